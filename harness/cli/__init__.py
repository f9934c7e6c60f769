"""The command line. Nothing here imports Hydra, torch or pandas at start; each command imports what it needs."""
