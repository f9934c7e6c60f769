"""Providers that the tables and figures know by name; all others are shown beside them as they come."""

OURS = "paged"  # our kernels, as an engine would call them
CONTIGUOUS = "contiguous"  # the same kernel on contiguous KV: what is left is the cost of paging
CASCADE = "cascade"  # our kernels, reading a shared prefix once
ALWAYS = "cascade-always"  # the same without asking whether it pays: shows where it begins to
NATIVE = "native"  # the compiled decode that our engine runs on a CPU
SDPA = "sdpa"  # torch's fused attention on contiguous KV
