"""`python -m harness`. The guard is needed, because worker processes import this module again."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python looks for modules in the working directory first, which may be a stranger's store with a `numpy.py`.
    if Path(sys.path[0]).absolute() != Path(__file__).absolute().parents[1]:
        del sys.path[0]
    from harness.cli.main import main

    raise SystemExit(main())
