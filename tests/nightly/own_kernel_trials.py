"""How often the gate's plugin finds a CPU function that is a fifth slower, and lets an unchanged one pass.

python tests/nightly/own_kernel_trials.py [--slowed 20] [--unchanged 40]     it prints the load of the machine
"""

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path

import torch

from harness.gate.plugin import _loaded, _ratios
from harness.gate.settings import default_settings, effect

ROWS, WIDTH = 500, 1024
SOURCE = (Path(__file__).resolve().parents[2] / "examples" / "own_kernel" / "kernel.py").read_text()
WORK = """

def work(x, weight):
    return rms_norm(x[:{rows}], weight)
"""


def verdict(rows: int, folder: Path) -> str:
    """The verdict on a function that computes so many rows, beside one of `ROWS` rows."""
    sides = [
        _loaded(folder, {"file": "kernel.py", "function": "work", "source": SOURCE + WORK.format(rows=count)})
        for count in (rows, ROWS)
    ]
    given = (torch.randn(2 * ROWS, WIDTH), torch.ones(WIDTH))
    margins = default_settings().attention
    for _ in range(2):  # as the gate asks again where it finds a regression
        ratios = _ratios(*sides, given)
        found = effect(ratios, [1.0] * len(ratios)).verdict(margins)
        if found != "regressed":
            break
    return str(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slowed", type=int, default=20)
    parser.add_argument("--unchanged", type=int, default=40)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, rows, trials in (
            ("a fifth slower", 6 * ROWS // 5, wanted.slowed),
            ("unchanged", ROWS, wanted.unchanged),
        ):
            found = Counter(verdict(rows, Path(folder)) for _ in range(trials))
            print(name, dict(found), "load", [round(one, 1) for one in os.getloadavg()], flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
