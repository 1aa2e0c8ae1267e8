"""Tokens and pictures go in, sampled tokens with logprobs, expanded prompt ids and placeholder ranges come out.

`contract` is the HTTP contract, `client` speaks it, `local_engine` and `local_server` are our own server of it.
"""
