"""The Triton backend, for CUDA devices. Each file holds kernels and, below them, the functions that launch them.

`scan.py` is what the attention kernels share, `launch.py` their tiles and constants. `import triton` still imports
Triton: all imports are absolute. triton may not be installed, so code outside this package imports it only inside
functions.
"""
