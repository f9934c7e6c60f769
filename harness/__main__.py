"""`python -m harness`. The guard is needed, because worker processes import this module again."""

from harness.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
