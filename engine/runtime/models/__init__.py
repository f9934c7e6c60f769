"""Models: which one to run, how it is loaded, and faster layers for CPUs.

`spec.py` describes and checks a model without torch, `load.py` builds it on the paged KV cache, and `cpu_layers.py`
speeds up its layers. Importing this package imports no torch.
"""
