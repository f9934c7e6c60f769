"""`python -m harness`. The guard matters: worker processes import this module again."""

from harness.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
