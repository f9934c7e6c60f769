"""C kernels for CPUs, compiled on first use. Without a C compiler torch does the same work.

`decode.c`, `prefill.c` and `prefill_bf16.c` (attention) are called in `attention/metadata.py`, `norm.c` and `gate.c` in
`models/cpu_layers.py`, `rotate.c` in `models/cpu_rotary.py`, and `best.c` (the best token of
each row of logits) in `decoding/choose.py`.
"""
