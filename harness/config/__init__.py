"""What a run can be told: the schema, its checks, and Hydra's composition of `conf/`."""
