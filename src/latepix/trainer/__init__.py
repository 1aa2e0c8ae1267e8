"""Micro batches become new weights: pixels are made late, logprobs recomputed, the loss stepped, weights published."""
