"""Published figures as named experiments: `conf/reproduce/NAME.yaml`, what each runs, and what its paper prints.

A file has `figure`, `title`, `source` and `data` (what stood in for the paper's data), and either bars or a reason:

* `grids`: sweeps by name, as lists of overrides; `base` stands before each.
* `bars`: each `of` something, perhaps a `part` of it, with the `printed` value (a number, or [lowest, highest]), and
  ours: `value: [grid, [overrides of one point], metric]`, `over` the same for a ratio, or `take` a value of `compute`.
* `fitted: true` on a bar: a constant was chosen by this bar, so it does not count in the verdict.
* `curves`: `[grid, key along x, metric]`, drawn beside the bars.
* `choices`: what the paper does not say, and what was taken. `reason`: why bars differ, in numbers.
* `not_comparable` or `needs`: why there is no verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from harness.config.errors import UserError
from harness.config.groups import list_options, option_file, reproductions

Place = tuple[str, tuple[str, ...], str]
"""A grid, the overrides that choose one of its points, and a metric; metrics joined by `+` are added."""


@dataclass(frozen=True)
class Bar:
    """One printed value and where ours comes from. `printed` is a number or a range."""

    of: str
    printed: float | tuple[float, float]
    part: str = ""
    value: Place | None = None
    over: Place | None = None
    take: str = ""
    times: float = 1.0
    fitted: bool = False


@dataclass(frozen=True)
class Experiment:
    """A published figure."""

    name: str
    figure: str
    title: str
    source: str
    data: str
    unit: str = ""
    form: str = "bars"
    base: tuple[str, ...] = ()
    grids: Mapping[str, Sequence[str]] = field(default_factory=dict)
    compute: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bars: tuple[Bar, ...] = ()
    curves: tuple[str, str, str] | None = None
    choices: tuple[str, ...] = ()
    within: float = 0.10
    reason: str = ""
    not_comparable: str = ""
    needs: str = ""


def experiment(name: str) -> Experiment:
    """The experiment with this name. Raises UserError for an unknown one, or for a file that cannot be used."""
    if name not in reproductions():
        raise UserError(f"no figure '{name}'; choose one of\n{list_options('reproduce')}")
    path = option_file("reproduce", name)
    row: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    unknown = row.keys() - {one.name for one in fields(Experiment)}
    if unknown:
        raise UserError(f"{path}: unknown key {sorted(unknown)[0]!r}")
    row["bars"] = tuple(_bar(bar) for bar in row.get("bars", ()))
    for key in ("base", "choices", "curves"):
        if key in row:
            row[key] = tuple(row[key])
    return Experiment(name=name, **row)


def _bar(row: dict[str, Any]) -> Bar:
    for key in ("value", "over"):
        if key in row:
            grid, chosen, metric = row[key]
            row[key] = (grid, tuple(chosen), metric)
    printed = row.pop("printed")
    return Bar(printed=tuple(printed) if isinstance(printed, list) else printed, **row)
