"""The real engine: an unmodified transformers model on a paged KV cache.

Users start at `llm.LLM`, servers at `async_engine.AsyncEngine`. `attention/`, `models/` and `decoding/` hold the parts
that touch tensors; `runner.py` runs one step with them. Importing this package imports no torch.
"""
