"""What the parts of `bench gpu` run that is no command of its own: `python -m harness.bench.gpu.programs.<name>`."""
