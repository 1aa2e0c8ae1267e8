"""One room per model family: a model folder goes in, token counts, positions and forward kwargs come out.

`model_info` reads a folder without torch; the adapters (`qwen_vl`) need torch and are imported on demand by `registry`.
"""
