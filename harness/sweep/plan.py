"""Planning: overrides become points. Every point is composed, checked and named before any point runs.

If any point is invalid, nothing runs: `PlanError` lists all of them, grouped by what is wrong. The fingerprint of a
point is a hash of all that its result depends on.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from os.path import expanduser
from pathlib import Path
from typing import Any, Protocol

import yaml

from harness.config.checks import check_config, value_of
from harness.config.compose import compose_config, normalise
from harness.config.errors import ConfigError, UnknownKeyError, UserError
from harness.config.groups import EXPERIMENTS, experiments, list_options, option_file
from harness.config.overrides import MOST_POINTS, Axis, Setting, parse_overrides
from harness.config.schema import RunConfig
from harness.store.commit import SCHEMA


@dataclass(frozen=True)
class BadPoint:
    """A point that cannot run, and every reason."""

    label: str
    reasons: tuple[str, ...]


class PlanError(UserError):
    """Nothing was run, because some points cannot run."""

    def __init__(self, bad: tuple[BadPoint, ...], total: int) -> None:
        self.bad = bad
        self.total = total
        super().__init__(self._message())

    def _message(self) -> str:
        if self.total == 1:
            return "\n".join(self.bad[0].reasons)
        lines = [f"nothing was run: {len(self.bad)} of {self.total} points cannot run"]
        reasons = dict.fromkeys(reason for point in self.bad for reason in point.reasons)
        for reason in reasons:
            labels = [point.label for point in self.bad if reason in point.reasons]
            lines.append(reason)
            lines += (
                ["  (every point)"] if len(labels) == self.total else [f"  at {label}" for label in labels]
            )
        return "\n".join(lines)


_NOT_IDENTITY = (
    *("name", "out", "workers", "report", "trace.path"),
    *("cost.cache_dir", "cost.kernels", "replay.compiled"),
)
_BYTES = 16


def fingerprint(config: RunConfig, identity: Mapping[str, Any]) -> str:
    """Hex name of a point (32 digits): its normalised configuration, and what else decides its result.

    Args:
        config: validated and normalised. Where it is written, what is reported and how many run at once do not count,
            nor where a trace or timed kernels lie, since the digests of their content are part of `identity`.
        identity: trace digest, code version, device and cost model, from `harness.point.point_identity`.
    """
    content = asdict(config)
    for key in _NOT_IDENTITY:
        section, _, name = key.rpartition(".")
        del (content[section] if section else content)[name]
    for section, key in (("model", "path"), ("decoding", "draft_path"), ("decoding", "beam_parents")):
        if content[section][key] is not None:
            content[section][key] = str(Path(content[section][key]).resolve())
    text = json.dumps([SCHEMA, content, identity], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=_BYTES).hexdigest()


DEFAULT = "default"
# say where and how a sweep runs and is reported, so they are the same for all its points
FIXED = ("name", "out", "workers", "report.kernels")
UNNAMED = (  # of no interest in the name of a point
    *FIXED,
    *("cost.cache_dir", "cost.recalibrate", "cost.kernels", "replay.compiled"),
)


@dataclass(frozen=True)
class SweepRequest:
    """Axes in the order that varies the last one fastest, and the experiment that some of them come from."""

    axes: tuple[Axis, ...]
    experiment: str | None

    @property
    def varying(self) -> tuple[str, ...]:
        """Keys with more than one value."""
        return tuple(axis.key for axis in self.axes if len(axis.settings) > 1)


def sweep_request(overrides: Sequence[str]) -> SweepRequest:
    """What `sweep` is asked for; without an axis and without `experiment=...` that is the default sweep.

    Raises:
        UserError: an override cannot be used; all of them are listed.
    """
    request = run_request(overrides)
    if request.experiment is None and not request.varying:
        return _merge(DEFAULT, request.axes)
    return request


def run_request(overrides: Sequence[str]) -> SweepRequest:
    """What `run` and `show` are asked for: nothing is added to the user's words but the experiment they name."""
    axes = parse_overrides(overrides)
    named = next((axis for axis in axes if axis.key == EXPERIMENTS), None)
    own = [axis for axis in axes if axis is not named]
    request = SweepRequest(tuple(own), None) if named is None else _merge(_chosen(named), own)
    for axis in request.axes:
        if axis.key in FIXED and len(axis.settings) > 1:
            raise ConfigError(axis.key, "one value for the whole sweep; run two sweeps instead")
    return request


def experiment_overrides(name: str) -> list[str]:
    """The overrides that an experiment stands for: a YAML list in `conf/experiment/<name>.yaml`."""
    content = yaml.safe_load(option_file(EXPERIMENTS, name).read_text(encoding="utf-8"))
    if not isinstance(content, list) or not all(isinstance(item, str) for item in content):
        raise UserError(
            f"{option_file(EXPERIMENTS, name)}: must be a list of overrides, one '- key=value' a line"
        )
    return content


def _merge(experiment: str, own: Iterable[Axis]) -> SweepRequest:
    """The user's words replace the experiment's where both speak of the same key."""
    axes = {axis.key: axis for axis in parse_overrides(experiment_overrides(experiment))}
    axes.update({axis.key: axis for axis in own})
    return SweepRequest(tuple(axes.values()), experiment)


def _chosen(axis: Axis) -> str:
    names = [str(setting.value) for setting in axis.settings]
    if len(names) != 1 or names[0] not in experiments():
        raise UnknownKeyError(
            EXPERIMENTS, f"no experiment '{','.join(names)}'; choose one of\n{list_options(EXPERIMENTS)}"
        )
    return names[0]


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
