"""What the policy acts in: tasks with pictures go in, a conversation is played, a reward comes out."""
