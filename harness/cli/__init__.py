"""The command line. Most commands are one module with `add`, which describes its options, and `run`.

Nothing here imports Hydra, torch or pandas at start. Each command imports what it needs inside its functions.
"""
