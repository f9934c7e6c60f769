"""`bench kernels`. `runner` starts `benchmarks.py` in a process of its own, where pytest-benchmark runs it."""
