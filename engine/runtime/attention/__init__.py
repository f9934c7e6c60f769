"""Attention over the paged KV cache.

The layers of a model call `layer.py`. `metadata.py` holds the attention metadata of a step and computes its rows with
torch, Triton or C; `select.py` chooses between these. `native/` compiles the C kernels. Importing this package imports
no torch.
"""
