"""Benchmarks: each is a room `harness.bench.<name>` behind `python -m harness bench <name>`.

A room offers `add(benches)`, which describes its command line to argparse and imports nothing heavy, and
`run(flags)`, which returns the exit code. `harness.bench.session` runs timings with pytest-benchmark.
"""

BENCHES: tuple[str, ...] = ("engine", "kernels", "policy", "sim", "gpu")
"""Names of the benchmarks, in the order of `bench --help`."""
