"""Part `quick`: what each step runs, how long it may take, and how it is rehearsed where there is no GPU."""

import sys
from pathlib import Path

from harness.bench.gpu.step import SECONDS, Step

_PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-m",
    "gpu",
    "--continue-on-collection-errors",
    "tests/paged_kernels",
    "tests/engine",
)
_HARNESS = ("-m", "harness")
CALIBRATION_S = (
    45  # what it is asked for; its limit leaves room to start the engine and to compile its kernels
)


def steps(out: Path, device: str) -> list[Step]:
    """All steps, the ones that others rest on first.

    Args:
        out: the folder that takes everything.
        device: option of the group `device` whose memory the simulated pool is sized by.
    """
    kernels = (
        *_HARNESS,
        "bench",
        "kernels",
        "--preset",
        "gpu",
        "--device",
        "cuda",
        "--seconds",
        SECONDS,
        "--out",
        str(out / "kernels"),
    )
    told = ("--save", str(out / "latency.json"), "--markdown", str(out / "gate.md"))
    gate = (*_HARNESS, "gate", "--layer", "latency", *told)
    same = ("experiment=gpu", f"device={device}", f"cost.cache_dir={out / 'calibration'}")
    sweep = (*_HARNESS, "sweep", *same, f"out={out / 'sweep'}")
    one = (
        "cache=paged",
        "cache.block_size=16",
        "decoding.beam_width=1",
    )  # a calibration is of one point, for all
    calibrate = (*_HARNESS, "calibrate", *same, *one, "--budget", str(CALIBRATION_S), "--no-grid")
    dry = ("engine=auto", "--dry-run")
    return [  # ten minutes in all, starting and packing included
        _step("tests", (*_PYTEST, f"--junitxml={out / 'tests.xml'}"), (*_PYTEST, "--collect-only"), 140),
        _step("kernels", kernels, (*kernels, "--dry-run"), 195),
        _step("gate", gate, (*gate, "--dry-run"), 75, (0, 1, 3)),
        _step("calibration", calibrate, (*calibrate, *dry), 70),
        _step("sweep", sweep, (*sweep, *dry), 90),
    ]


def _step(
    name: str,
    command: tuple[str, ...],
    rehearsal: tuple[str, ...],
    limit_s: float,
    answers: tuple[int, ...] = (0,),
) -> Step:
    return Step(name, (sys.executable, *command), (sys.executable, *rehearsal), limit_s, answers)
