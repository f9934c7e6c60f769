"""Attention over the paged KV cache.

The layers of a model call `layer.py`. `metadata.py` holds the attention metadata of a step and computes its rows with
torch, Triton or C; `paged_kernels.backends` chooses between these. Importing this package imports no torch.
"""
