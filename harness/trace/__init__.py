"""The actions of `python -m harness trace`: list, fetch, inspect, convert, cut, scale, generate and check traces.

Each action has two functions. `add_<name>` describes its options to argparse and imports nothing heavy. `run_<name>`
runs it and returns the exit code.
"""
