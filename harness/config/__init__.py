"""Configuration: the schema of a run, its checks, and Hydra's composition of `conf/`."""
