"""The real engine: an unmodified transformers model on paged KV tensors that audit themselves.

Importing this package or `engine.runtime.model` imports no torch; loading a model does.
"""
