"""Behind `python -m harness trace`: list, fetch, look into, convert, cut, scale, make and check traces.

Each action is a module with `add(actions)`, which describes it to argparse and imports nothing heavy, and
`run(flags)`, which returns the exit code.
"""

ACTIONS: tuple[str, ...] = ("ls", "get", "inspect", "convert", "slice", "scale", "synth", "validate")
"""Names of the actions, in the order of `trace --help`; each is `harness.trace.<name>_action`."""
