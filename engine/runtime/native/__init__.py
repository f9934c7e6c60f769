"""Kernels for CPUs in C: what torch cannot say in one pass over memory. Compiled where a compiler is, else left out.

Decode attention that reads paged KV where it lies (`paged.py`), the norm of rows (`norms.py`), the best token of rows
of logits (`best.py`).
"""
