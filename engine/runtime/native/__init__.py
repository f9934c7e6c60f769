"""Kernels for CPUs in C: what torch cannot say in one pass over memory. Compiled where a compiler is, else left out.

Two of them: decode attention that reads paged KV where it lies (`paged.py`), and the norm of rows (`norms.py`).
"""
