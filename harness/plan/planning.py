"""From a request to a plan: compose, check, normalise, fingerprint and de-duplicate every point; run nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from os.path import expanduser
from pathlib import Path
from typing import Any, Protocol

from harness.config.checks import check_config, value_of
from harness.config.compose import compose_config
from harness.config.errors import ConfigError, UserError
from harness.config.normal import normalise
from harness.config.overrides import MOST_POINTS, Setting
from harness.config.schema import RunConfig
from harness.plan.errors import BadPoint, PlanError
from harness.plan.fingerprint import fingerprint
from harness.plan.request import UNNAMED, SweepRequest

Settings = tuple[Setting, ...]
DEFAULTS = "the default point"
_TOO_LARGE = (
    "does not fit the memory: lower workload.num_requests, workload.num_prefixes or cache.pool_tokens"
)


class PointModel(Protocol):
    """What planning asks of `harness.point` (a module; tests hand in their own)."""

    def check_point(self, config: RunConfig) -> None:
        """Raise ConfigError if the point cannot run although every setting is allowed."""
        ...

    def point_identity(self, config: RunConfig) -> Mapping[str, Any]:
        """What the result depends on beside the configuration."""
        ...


@dataclass(frozen=True)
class PlannedPoint:
    """One point that will run unless its record is there already."""

    fingerprint: str
    overrides: tuple[str, ...]  # all of the point's settings that were asked for
    varying: tuple[str, ...]  # those that tell it from the sweep's other points
    config: RunConfig
    idle: frozenset[str] = frozenset()  # keys of settings that mean nothing beside the others

    @property
    def label(self) -> str:
        """The point's name for a person."""
        return " ".join(self.varying) or DEFAULTS


@dataclass(frozen=True)
class Plan:
    """All points of a request, each once."""

    name: str
    out: Path
    workers: int
    experiment: str | None
    overrides: tuple[str, ...]  # as asked, the experiment's included
    points: tuple[PlannedPoint, ...]
    same: tuple[tuple[str, str], ...]  # (label, label of the point that it is the same as)
    idle: tuple[str, ...] = ()  # overrides that mean nothing at any point


def make_plan(
    request: SweepRequest, model: PointModel, *, progress: Callable[[int, int], None] | None = None
) -> Plan:
    """Plan a request.

    Args:
        request: the axes.
        model: checks and identifies points.
        progress: told (points planned, points in all).

    Raises:
        PlanError: lists every point that cannot run.
    """
    _check_size(request)
    combinations = list(product(*(axis.settings for axis in request.axes)))
    points: dict[str, PlannedPoint] = {}
    same: list[tuple[str, str]] = []
    bad: list[BadPoint] = []
    for number, settings in enumerate(combinations, start=1):
        varying = _varying(settings, request)
        point = _plan_point(settings, varying, model)
        if isinstance(point, BadPoint):
            bad.append(point)
        elif points.setdefault(point.fingerprint, point) is not point:
            same.append((_label(varying), points[point.fingerprint].label))
        if progress is not None:
            progress(number, len(combinations))
    if bad:
        raise PlanError(tuple(bad), len(combinations))
    return _plan(request, tuple(points.values()), tuple(same))


def _check_size(request: SweepRequest) -> None:
    size = prod(len(axis.settings) for axis in request.axes)
    if size > MOST_POINTS:
        raise UserError(
            f"{size:,} points asked for, at most {MOST_POINTS:,} are allowed; use fewer values or axes"
        )


def _plan_point(settings: Settings, varying: Settings, model: PointModel) -> PlannedPoint | BadPoint:
    try:
        asked = compose_config(settings)
        errors = check_config(asked)
        if errors:
            return BadPoint(_label(varying), tuple(map(str, errors)))
        config = normalise(asked)
        model.check_point(config)
        name = fingerprint(config, model.point_identity(config))
    except ConfigError as error:
        return BadPoint(_label(varying), (str(error),))
    except MemoryError:
        return BadPoint(_label(varying), (_TOO_LARGE,))
    applies = tuple(item.text for item in varying if _applies(item, asked, config))
    idle = frozenset(item.key for item in settings if not _applies(item, asked, config))
    return PlannedPoint(name, tuple(item.text for item in settings), applies, config, idle)


def _varying(settings: Settings, request: SweepRequest) -> Settings:
    """The settings that are not the same everywhere; of a single point, all of them."""
    keys = request.varying or tuple(axis.key for axis in request.axes if axis.key not in UNNAMED)
    return tuple(setting for setting in settings if setting.key in keys)


def _applies(item: Setting, asked: RunConfig, normal: RunConfig) -> bool:
    """Whether a setting was left as it is by normalisation: it has a meaning at this point."""
    if item.is_group:
        return True
    found, kept = value_of(asked, item.key), value_of(normal, item.key)
    return bool(found == kept or (isinstance(found, str) and expanduser(found) == kept))


def _label(settings: Settings) -> str:
    return " ".join(item.text for item in settings) or DEFAULTS


def _plan(request: SweepRequest, points: tuple[PlannedPoint, ...], same: tuple[tuple[str, str], ...]) -> Plan:
    config = points[0].config
    if len({point.config.out for point in points}) > 1:
        raise ConfigError("out", "differs between the points; a sweep has one results folder")
    return Plan(
        name=config.name,
        out=Path(config.out),
        workers=config.workers,
        experiment=request.experiment,
        overrides=tuple(axis.text for axis in request.axes),
        points=points,
        same=same,
        idle=tuple(axis.text for axis in request.axes if all(axis.key in point.idle for point in points)),
    )
