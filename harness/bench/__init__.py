"""Benchmarks: each is a package `harness.bench.<name>` behind `python -m harness bench <name>`.

The package's `__init__` has `add(benches)`, which describes the flags to argparse and imports nothing heavy, and
`run(flags)`, which returns the exit code. `runner.py` does the work. `benchmarks.py`, where there is one, is a file
that pytest-benchmark runs in a process of its own (`harness.bench.session`).
"""
