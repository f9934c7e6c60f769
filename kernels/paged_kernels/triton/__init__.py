"""The Triton backend, for CUDA devices. Each file holds kernels and, below them, the functions that launch them.

`scan.py` holds what the attention kernels share, `launch.py` their tiles and constants. `import triton` still imports
Triton: all imports are absolute. Triton may not be installed, so code outside this package imports this package only
inside functions.
"""
