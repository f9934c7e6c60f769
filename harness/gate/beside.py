"""Code beside its accepted version, timed in turns in one process: layers `policy` and `cpu`, and the plugin's `gated`.

A baseline holds the accepted sources by module. `load` imports them under other names, where they import each other;
everything else that they import is today's. Both sides then do the same work in the same process, so the ratio of
unchanged code is 1 on every machine and under every load, and margins can be narrow.
"""

import gc
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module, invalidate_caches
from importlib.util import find_spec, resolve_name
from pathlib import Path
from pkgutil import walk_packages
from statistics import median
from types import ModuleType

from harness.config.errors import UserError
from harness.gate.findings import (
    Baseline,
    Finding,
    GateVerdict,
    LayerResult,
    Measured,
    coverage,
    read_baseline,
)
from harness.gate.settings import GateSettings, default_settings, effect

Work = Callable[[], object]
Round = Callable[[], float]  # seconds

TOLERANCE = 1e-4  # between results of today's code and of the accepted one, where a layer compares them
_ENOUGH_S = 5e-3  # least time of a run on a CPU, whose clock has a resolution of about a microsecond
_MOST_CALLS = 10_000
_LAUNCHES = 20  # calls of a run on a GPU; with fewer, the events would dominate the time of short kernels


@dataclass(frozen=True)
class Turns:
    """The rounds of a timing: the least, the most, how many before the spread is asked again, and how close the bounds.

    `both` makes one time of the two runs that a side has in a round.
    """

    fewest: int
    most: int
    step: int
    precise: float
    both: Callable[[Sequence[float]], float]


DEVICE = Turns(30, 150, 20, 0.02, sum)
# on a CPU other processes only ever cost time, so the faster run of a round counts
PROCESS = Turns(20, 80, 10, 1 / 6, min)


def interleaved(
    kernel: Round, yardsticks: Mapping[str, Round], plan: Turns = DEVICE
) -> dict[str, list[float]]:
    """Ratios of kernel to each yardstick, one for each round.

    Each round runs everything twice, the second time in the opposite order (A B C C B A), so that a slow drift cancels.
    The number of rounds depends only on their spread, never on the ratio.
    """
    ratios: dict[str, list[float]] = {name: [] for name in yardsticks}
    while True:
        first = kernel()
        there = {name: run() for name, run in yardsticks.items()}
        back = {name: run() for name, run in reversed([*yardsticks.items()])}
        mine = plan.both((first, kernel()))
        for name, found in ratios.items():
            found.append(round(mine / plan.both((there[name], back[name])), 6))
        done = len(next(iter(ratios.values())))
        asked = done >= plan.fewest and (done - plan.fewest) % plan.step == 0
        if done >= plan.most or (
            asked and all(effect(it, it).width <= plan.precise for it in ratios.values())
        ):
            return ratios


def ratios(now: Work, before: Work, *, cuda: bool = False) -> list[float]:
    """Time of `now` over time of `before`, one for each round: of the device, or CPU time, which has no waits."""
    if cuda:
        sides = (partial(_device_seconds, one) for one in (now, before))
        return interleaved(next(sides), {"before": next(sides)})["before"]
    gc.collect()
    gc.freeze()  # later collections skip the objects that exist already
    gc.disable()  # otherwise one side would pay for a collection that the other side caused
    try:
        calls = max(_calls(now), _calls(before))
        theirs = partial(_seconds, before, calls)
        return interleaved(partial(_seconds, now, calls), {"before": theirs}, PROCESS)["before"]
    finally:
        gc.enable()
        gc.unfreeze()


def ratios_of(sides: Callable[[], tuple[Work, Work]], *, cuda: bool = False) -> list[float]:
    """The ratios of today's code and the accepted one, which `sides` makes.

    Where memory lies can slow one side, so what looks slower is made and timed anew, and the better of the two counts.
    """
    found = ratios(*sides(), cuda=cuda)
    if effect(found).lower > 1:
        found = min(found, ratios(*sides(), cuda=cuda), key=median)
    return found


def package_sources(package: str) -> dict[str, str]:
    """The sources of a package's modules, by their names."""
    below = walk_packages(import_module(package).__path__, f"{package}.")
    places = {name: find_spec(name) for name in (package, *(one.name for one in below))}
    return {
        name: Path(place.origin).read_text(encoding="utf-8")
        for name, place in places.items()
        if place and place.origin
    }


def load(sources: Mapping[str, str], folder: Path) -> dict[str, ModuleType]:
    """The modules of accepted sources, by the names that they have today.

    They are written below `folder`, because compilers such as Triton read a function's source from its file.

    Raises:
        UserError: a module cannot be imported beside today's code.
    """
    root = f"accepted_{len(sys.modules)}"
    packages = {name.rpartition(".")[0] for name in sources}
    for name, text in sources.items():
        path = folder.joinpath(root, *name.split("."), "__init__.py") if name in packages else None
        file = path or folder.joinpath(root, *name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            _renamed(text, name if path else name.rpartition(".")[0], sources, root), encoding="utf-8"
        )
    home = sys.modules[root] = ModuleType(root)
    home.__path__ = [str(folder / root)]
    invalidate_caches()
    loaded = {}
    for name in sources:
        try:
            loaded[name] = import_module(f"{root}.{name}")
        except Exception as error:
            raise UserError(f"the accepted {name} cannot be loaded beside today's code: {error}") from error
    return loaded


def _renamed(text: str, package: str, sources: Mapping[str, str], root: str) -> str:
    """The text, importing the accepted modules under `root`, and relative names under their absolute ones."""

    def absolute(found: re.Match[str]) -> str:
        name = resolve_name(found[2], package) if found[2].startswith(".") else found[2]
        return f"{found[1]}{root}.{name}" if name in sources else f"{found[1]}{name}"

    return re.sub(r"^(\s*(?:from|import)\s+)([.\w]+)(?=\s)", absolute, text, flags=re.MULTILINE)


def accepted_sources(file: Path | None, layer: str, today: Mapping[str, str]) -> dict[str, str]:
    """The sources in a layer's baseline; without a baseline, those of today. A new file has no accepted one.

    Raises:
        UserError: the baseline holds no sources.
    """
    baseline = read_baseline(file, layer) if file else None
    kept = today if baseline is None else baseline.environment.get("sources")
    if not isinstance(kept, Mapping):
        raise UserError(f"{file} holds no sources; write it again with gate --layer {layer} --update")
    return dict(kept)


def judge(now: Measured, baseline: Baseline, settings: GateSettings | None = None) -> LayerResult:
    """A case regresses if even the lower bound of its ratio is above 1 by more than the negligible margin."""
    margins = (settings or default_settings()).margins()[now.layer]
    findings = []
    for case in sorted(now.cases.keys() & baseline.cases.keys()):
        found, difference = effect(now.cases[case]["ratios"]), now.cases[case].get("difference", 0.0)
        if not difference <= TOLERANCE:  # nan is no agreement
            text = f"its results differ from the accepted code's by {difference:.1e}; accept them if that is meant"
            findings.append(Finding(case, GateVerdict.regressed, text))
        else:
            findings.append(Finding(case, found.verdict(margins), f"{found}"))
    made_on = f"CPU, {platform.machine()}, accepted {baseline.date}"
    return LayerResult(now.layer, (*coverage(now, baseline), *findings), made_on, now.remarks)


def unfit(now: Measured, settings: GateSettings | None = None) -> Iterator[str]:
    """Nothing: the baseline holds sources, and no figure that noise could spoil."""
    del now, settings
    return iter(())


def _seconds(work: Work, calls: int) -> float:
    gc.collect()
    begun = time.process_time()
    for _ in range(calls):
        work()
    return time.process_time() - begun


def _calls(work: Work) -> int:
    """The calls of a run that takes long enough for the clock."""
    work()  # compiles, fills caches
    calls = 1
    while calls < _MOST_CALLS and (spent := _seconds(work, calls)) < _ENOUGH_S:
        calls *= 2 if spent <= 0 else min(8, max(2, round(_ENOUGH_S / spent)))
    return min(calls, _MOST_CALLS)


def _device_seconds(work: Work) -> float:
    """Seconds of a call on the current CUDA device, between two events."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_LAUNCHES):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _LAUNCHES
