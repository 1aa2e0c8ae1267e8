"""Rollouts become micro batches: environments are played, groups scored, traces cut into samples, samples packed."""
