"""latepix trains vision-language models with reinforcement learning, straight from inline image rollouts."""
