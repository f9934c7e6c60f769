"""Attention over the paged KV cache.

`layer.py` is what the layers of a model call, `plans.py` computes the rows of a step with torch, Triton or C, and
`select.py` chooses between them. `native/` compiles the C kernels. Importing this package imports no torch.
"""
