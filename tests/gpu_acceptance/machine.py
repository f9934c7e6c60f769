"""The machine: checks that it can run the steps, and commands with a time limit.

The checks come before the clock starts, because time on a GPU is scarce. Each command has a process group of its own.
When its time is over, the whole group is ended. Otherwise a benchmark would still use the GPU during the next step.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from harness.config.errors import UserError
from harness.environment import gpu_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (  # that the steps import: (module, distribution)
    *(("torch", "torch"), ("triton", "triton"), ("transformers", "transformers"), ("numpy", "numpy")),
    *(("hydra", "hydra-core"), ("omegaconf", "omegaconf"), ("antlr4", "antlr4-python3-runtime")),
    *(("simpy", "simpy"), ("pandas", "pandas"), ("pyarrow", "pyarrow"), ("scipy", "scipy")),
    *(("seaborn", "seaborn"), ("matplotlib", "matplotlib"), ("jinja2", "jinja2"), ("rich", "rich")),
    *(
        ("pooch", "pooch"),
        ("xxhash", "xxhash"),
        ("pytest", "pytest"),
        ("pytest_benchmark", "pytest-benchmark"),
    ),
    ("hypothesis", "hypothesis"),
)
GRACE_S = 8.0  # from SIGTERM to SIGKILL; a sweep keeps its points in this time


def check_packages() -> None:
    """Raise UserError if packages are missing; it names all of them."""
    missing = [name for module, name in PACKAGES if find_spec(module) is None]
    if missing:
        raise UserError(
            f"packages are missing here: {', '.join(missing)}. Where there is no network, bring them as wheels and put "
            "the folder that they were installed to on PYTHONPATH"
        )


def device_folder(names: Sequence[str]) -> str:
    """The device's name as a folder name: 'nvidia-h200'; 'no-gpu' without a device."""
    name = names[0] if names else "no gpu"
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def device_overrides(names: Sequence[str]) -> tuple[str, ...]:
    """The overrides that describe this GPU. Its memory sizes the simulated pool.

    The preset is that of `twin`, by the driver's name. A GPU without one, as each slower variant of a card, takes the
    H100's under its own name, so that no record calls it an H100, or a card of that name. Without a GPU they are the
    H100's, for a rehearsal.
    """
    from harness.twin.configured import preset_of_device  # after the packages that it imports were looked for

    option = preset_of_device(names[0]) if names else "h100"
    if option:
        return (f"device={option}",)
    own = device_folder(names).removeprefix("nvidia-").replace("-", "_")
    return ("device=h100", f"device.name={own}")


def check_gpu() -> Sequence[str]:
    """The names of this machine's GPUs.

    Raises:
        UserError: there is no GPU.
    """
    names = gpu_names() or _torch_names()
    if not names:
        raise UserError("no NVIDIA driver shows a GPU here; --dry-run rehearses every step without one")
    return names


def step_environment(more: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """The environment of a step. The folders of the checkout come first on the path, so it need not be installed."""
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **dict(more)}


def last_level_cache_bytes() -> int:
    """The last-level cache of this machine's GPU; without a GPU, that of the cascade cost rule's own device."""
    import torch

    from harness.bench.calls import cache_bytes
    from paged_kernels.cascade_groups import H200

    return cache_bytes(torch.device("cuda")) if torch.cuda.is_available() else H200.cache_bytes


def _torch_names() -> tuple[str, ...]:
    """GPU names from torch. Some containers hide the driver's files although the device is usable."""
    import torch

    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def run_for(
    words: Sequence[str], seconds: float, output: IO[str], folder: Path, environment: Mapping[str, str]
) -> int | None:
    """Run a command and return its exit code; None where it was ended after `seconds`. `output` takes its output."""
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:  # also after an interrupt, and for processes that a finished command left running
        end_group(process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started, which share a group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _signal(process.pid, number):
            break
        deadline = time.monotonic() + GRACE_S
        while _signal(process.pid, 0) and time.monotonic() < deadline:
            process.poll()  # the leader stays in its group until its exit status is read
            time.sleep(0.05)
    process.wait()


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; returns whether the group still had members."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
