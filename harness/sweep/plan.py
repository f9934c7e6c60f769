"""Planning: overrides become points. Every point is composed, checked and named before any point runs.

If any point is invalid, nothing runs: `SweepPlanError` lists all of them, grouped by reason. The name of a point is its
fingerprint, a hash of everything that its result depends on.
"""

import gc
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice, product
from math import prod
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import yaml

from harness.config.checks import RANGES, check_settings, value_of
from harness.config.compose import compose_config, normalise, unread_keys
from harness.config.errors import ConfigError, UnknownKeyError, UserError
from harness.config.execution import EXECUTION_KEYS
from harness.config.foreign import is_option_file
from harness.config.groups import (
    DEPLOYED,
    DEPLOYMENT,
    EXPERIMENTS,
    groups,
    list_options,
    option_file,
    options,
)
from harness.config.option_files import BASE, plain_yaml, spelt
from harness.config.overrides import MOST_POINTS, Axis, Setting, of_a_file, parse_overrides, quoted, renamed
from harness.config.paths import check_paths
from harness.config.schema import DecodingConfig, ModelConfig, ReportConfig, RunConfig, config_keys
from harness.config.values import PerObject
from harness.console import shortened
from harness.store.commit import SCHEMA
from harness.store.remote import local_place
from harness.workers import in_workers

if TYPE_CHECKING:
    from harness.point import PointSession

DEFAULT_EXPERIMENT = "default"
DEFAULT_LABEL = "the default point"

# Settings of a whole sweep: where it is written, how it runs and what it reports. All its points share them.
REPORT_KEYS = tuple(f"report.{one.name}" for one in fields(ReportConfig))
FIXED = ("name", "out", "workers", *REPORT_KEYS, *EXECUTION_KEYS)
# Settings that do not belong in a point's label.
UNLABELLED = (
    *(*FIXED, "cost.cache_dir", "cost.recalibrate", "cost.kernels"),
    *("replay.compiled", "oracle.python"),
)
_WORTH_WORKERS = 10_000  # points; fewer are planned before processes have started
_PART = 2000  # points that a process plans at a time
_MOST_WORKERS = 8  # processes, of some 0.1 GB each
_LISTED = 8  # bad points of one reason that are named one by one
_RATE = "workload.request_rate"
_POOL = ("cache.pool_blocks", "cache.pool_tokens")
_WHOLE = ("device", "model")  # sections whose defaults are those of a small run on a CPU
_LONGEST_NAME = 80  # of a run's folder, in characters
_TOO_LARGE = (
    "does not fit the memory: lower workload.num_requests, workload.num_prefixes or cache.pool_tokens"
)

Settings = tuple[Setting, ...]
SharedErrors = dict[tuple[str | None, ...], list[ConfigError]]  # by the paths that were checked


@dataclass(frozen=True)
class BadPoint:
    """A point that cannot run, with every reason."""

    label: str
    reasons: tuple[str, ...]


class SweepPlanError(UserError):
    """Some points cannot run, so nothing was run."""

    def __init__(self, bad: tuple[BadPoint, ...], total: int) -> None:
        self.bad = bad
        self.total = total
        super().__init__(self._message())

    def _message(self) -> str:
        if self.total == 1:
            return "\n".join(self.bad[0].reasons)
        places: dict[str, list[str]] = {}
        for point in self.bad:
            for reason in point.reasons:
                places.setdefault(reason, []).append(point.label)
        lines = [f"nothing was run: {len(self.bad)} of {self.total} points cannot run"]
        for reason, labels in places.items():
            lines += [reason, *self._where(labels)]
        return shortened("\n".join(lines))

    def _where(self, labels: list[str]) -> list[str]:
        if len(labels) == self.total:
            return ["  (every point)"]
        if len(labels) > _LISTED:
            return [f"  at {len(labels):,} points, for example {labels[0]}"]
        return [f"  at {label}" for label in labels]


@dataclass(frozen=True)
class SweepRequest:
    """The axes of a sweep, the last one varying fastest, and the experiment that some of them come from."""

    axes: tuple[Axis, ...]
    experiment: str | None
    deployment: str | None = None  # a file, and the keys whose values are its
    deployed: frozenset[str] = frozenset()
    replaced: tuple[str, ...] = ()  # sections of the file in whose place a group stands

    @property
    def named(self) -> list[Axis]:
        """The axes that name a point: without those that change no result, and those of a deployment's file."""
        return [axis for axis in self.axes if axis.key not in UNLABELLED and axis.key not in self.deployed]

    @property
    def varying(self) -> tuple[str, ...]:
        """Keys with more than one value."""
        return tuple(axis.key for axis in self.axes if len(axis.settings) > 1)


def sweep_request(overrides: Sequence[str]) -> SweepRequest:
    """The request of the command `sweep`. Without an axis and without `experiment=...` it is the default sweep.

    Raises:
        UserError: lists every override that cannot be used.
    """
    request = run_request(overrides)
    if request.deployment and not request.varying:
        raise UserError(
            f"a sweep on {DEPLOYMENT}={request.deployment} needs an axis: write several values of a setting, as "
            "cache.block_size=8,16,32"
        )
    if request.experiment is None and not request.varying:
        return _merge(DEFAULT_EXPERIMENT, request.axes)
    return request


def run_request(overrides: Sequence[str]) -> SweepRequest:
    """The request of the commands `run` and `show`: the user's overrides, and those of the experiment they name."""
    axes = parse_overrides(overrides)
    named = next((axis for axis in axes if axis.key == EXPERIMENTS), None)
    own = [axis for axis in axes if axis is not named]
    request = SweepRequest(tuple(own), None) if named is None else _merge(_chosen(named), own)
    if served := next((axis for axis in request.axes if axis.key == DEPLOYMENT), None):
        request = _on_deployment(served, request)
    for axis in request.axes:
        if axis.key in FIXED and len(axis.settings) > 1:
            raise ConfigError(axis.key, "one value for the whole sweep; run two sweeps instead")
    return request


def one_configuration(overrides: Sequence[str], what: str) -> RunConfig:
    """The configuration of a command that takes one alone, composed and not yet checked.

    Raises:
        UserError: an override cannot be used, or several values of a setting make a sweep; `what` begins the sentence.
    """
    axes = run_request(overrides).axes
    several = [axis.text for axis in axes if len(axis.settings) > 1]
    if several:
        raise UserError(f"{what} one configuration: write one value for {', '.join(several)}")
    return compose_config(axis.settings[0] for axis in axes)


def in_its_own_place(request: SweepRequest) -> SweepRequest:
    """The request of a `run`, written to a folder named after its overrides unless `out` or `name` is given.

    The default sweep and every other run keep their reports then.
    """
    if any(axis.key in ("out", "name") for axis in request.axes):
        return request
    texts = [axis.text for axis in request.named]
    if request.deployment:  # an edited file, or another one of this name, is another question
        values = " ".join(axis.text for axis in request.axes if axis.key in request.deployed)
        texts.insert(0, f"{DEPLOYMENT}={Path(request.deployment).stem}-{_digest(values)}")
    words = "_".join(["run", *texts])
    plain = re.sub(r"[^\w=.,+-]+", "-", words)[:_LONGEST_NAME]
    if plain != words:  # two questions must not share a folder
        plain += "_" + _digest(words)
    out = f"results/{plain}"
    return replace(
        request, axes=(*request.axes, Axis("out", (Setting("out", out, f"out={out}"),), f"out={out}"))
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def experiment_overrides(name: str) -> Sequence[str]:
    """The overrides of an experiment: a YAML list in `conf/experiment/<name>.yaml`, or in a file of the user's own.

    Raises:
        UserError: the file cannot be read, or is no list of overrides.
    """
    file = Path(name).expanduser() if is_option_file(name) else option_file(EXPERIMENTS, name)
    content = _content(EXPERIMENTS, file)
    if not isinstance(content, list) or not all(isinstance(item, str) for item in content):
        raise UserError(f"{file}: must be a list of overrides, one '- key=value' a line")
    if any(item.lstrip().startswith(f"{EXPERIMENTS}=") for item in content):
        raise UserError(f"{file}: an experiment cannot choose another experiment")
    return of_a_file(content, str(file))


def _content(key: str, file: Path) -> Any:
    if file.is_fifo():  # reading one may never end
        raise ConfigError(key, f"cannot read '{file}': it is a pipe; name a file")
    try:
        return plain_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(key, f"cannot read '{file}': {error}") from None


def _merge(experiment: str, own: Iterable[Axis]) -> SweepRequest:
    """The experiment's axes. The user's own axis replaces one with the same key, or one that would make it void."""
    axes = {axis.key: axis for axis in parse_overrides(experiment_overrides(experiment))}
    chosen = {axis.key: axis for axis in own}
    if _RATE in chosen:
        axes.pop("replay", None)  # a closed loop has no rate
    axes.update(chosen)
    return SweepRequest(tuple(axes.values()), experiment)


def _on_deployment(axis: Axis, request: SweepRequest) -> SweepRequest:
    """The request on the deployment of a file: each of its values holds where the request says nothing of the key.

    A group that the request names (`device=h100`) replaces the file's section whole, and so does a checkpoint.

    Raises:
        ConfigError: several files, or a file that is no deployment; names the file and the key.
    """
    files = [str(setting.value) for setting in axis.settings]
    if len(files) != 1 or not is_option_file(files[0]):
        raise ConfigError(DEPLOYMENT, f"found {','.join(files)!r}, must be one file that ends in .yaml")
    own = [each for each in request.axes if each is not axis]
    named = {each.key for each in own}
    whole = {key for key in named if key in groups()} | ({"model"} if "model.path" in named else set())
    if named & set(_POOL):
        named |= set(_POOL)  # one size of the pool replaces the other
    found = parse_overrides(of_a_file(deployment_overrides(files[0]), files[0]))
    section = {each.key: each.key.partition(".")[0] for each in found}
    rest = [each for each in found if each.key not in named and section[each.key] not in whole]
    for each in rest:
        value, allowed = each.settings[0].value, RANGES.get(each.key)
        if allowed is not None and isinstance(value, int | float) and not allowed.holds(value):
            raise ConfigError(each.key, f"{files[0]}: found {value}, must be {allowed}")
    return replace(
        request,
        axes=(*rest, *own),
        deployed=frozenset(each.key for each in rest),
        deployment=files[0],
        replaced=tuple(sorted(whole & set(section.values()))),
    )


def deployment_overrides(name: str) -> list[str]:
    """The values of a deployment's file as overrides. It is YAML with a section for each part of DEPLOYED.

    A section is the name of an option (`device: h100`), or keys and values, on an option where it has a `base`. A
    device and a model without `base` are whole, as `settings_text` writes them: else they would be mostly the default.

    Raises:
        ConfigError: the file cannot be read, or a section is unknown, incomplete or no such thing.
    """
    content = _content(DEPLOYMENT, file := Path(name).expanduser())
    if not isinstance(content, dict) or not content:
        raise ConfigError(DEPLOYMENT, f"{file}: must be sections: {', '.join(DEPLOYED)}")
    return [text for name, part in content.items() for text in _section_overrides(file, name, part)]


def _section_overrides(file: Path, section: str, part: Any) -> Iterator[str]:
    if section not in DEPLOYED:
        raise ConfigError(
            DEPLOYMENT, f"{file}: no section {section!r} in a deployment; allowed: {', '.join(DEPLOYED)}"
        )
    values = {BASE: part} if isinstance(part, str) else part
    if not isinstance(values, dict):
        raise ConfigError(DEPLOYMENT, f"{file}: {section} must be 'key: value' lines, or name an option")
    for key, value in values.items():
        renamed(f"{section}.{key}", value, f"{file}: ")  # refused before it is named as missing
    if not values.keys() & {BASE, "path"} and section in _WHOLE:
        keys = [key.partition(".")[2] for key in config_keys() if key.startswith(f"{section}.")]
        if missing := [key for key in keys if key not in values and key != "path"]:
            raise ConfigError(
                DEPLOYMENT,
                f"{file}: {section} lacks {', '.join(missing)}; begin with an option that has them, as "
                f"base: {groups()[section][0]}",
            )
    for key, value in values.items():
        known, name = config_keys().get(f"{section}.{key}"), section if key == BASE else f"{section}.{key}"
        yield f"{name}={_written(spelt(value, known.kind) if known else value)}"


def _written(value: Any) -> str:
    return quoted(value, always=True) if isinstance(value, str) else json.dumps(value, default=str)


def _chosen(axis: Axis) -> str:
    names = [str(setting.value) for setting in axis.settings]
    if len(names) == 1 and is_option_file(names[0]):
        return names[0]
    if len(names) != 1 or names[0] not in options(EXPERIMENTS):
        raise UnknownKeyError(
            EXPERIMENTS, f"no experiment '{','.join(names)}'; choose one of\n{list_options(EXPERIMENTS)}"
        )
    return names[0]


@dataclass(frozen=True)
class PlannedPoint:
    """One point of a sweep. It runs unless the store already holds its record."""

    fingerprint: str
    overrides: tuple[str, ...]  # all settings that the request gives this point
    varying: tuple[str, ...]  # those of them that differ between the points of the sweep
    config: RunConfig
    idle: frozenset[str] = frozenset()  # keys of settings that have no effect together with the others

    @property
    def label(self) -> str:
        """The point's name for people."""
        return " ".join(self.varying) or DEFAULT_LABEL


@dataclass(frozen=True)
class SweepPlan:
    """All points of a sweep, each once, with the folder and the number of workers."""

    name: str
    out: Path  # the store's folder, or the local copy of one on object storage
    workers: int
    experiment: str | None
    overrides: tuple[str, ...]  # as requested, with those of the experiment
    points: tuple[PlannedPoint, ...]
    same: tuple[tuple[str, str], ...]  # (label of a duplicate, label of the point that is kept)
    idle: tuple[str, ...] = ()  # overrides that have no effect at any point


def plan_sweep(
    request: SweepRequest, checks: "PointSession", *, progress: Callable[[int, int], None] | None = None
) -> SweepPlan:
    """Compose, check and name every point of a request.

    Args:
        request: the axes.
        checks: checks and identifies points; `harness.point` in normal use.
        progress: called with (points planned, points in total).

    Raises:
        SweepPlanError: lists every point that cannot run.
    """
    total = prod(len(axis.settings) for axis in request.axes)
    if total > MOST_POINTS:
        reason = f"{total:,} points asked for, at most {MOST_POINTS:,} are allowed; use fewer values or axes"
        raise UserError(reason)
    points: dict[str, PlannedPoint] = {}
    same: list[tuple[str, str]] = []
    bad: list[BadPoint] = []
    with _rare_collections():
        planned = zip(_combinations(request), _planned(request, checks, total), strict=True)
        for number, (settings, point) in enumerate(planned, start=1):
            if isinstance(point, BadPoint):
                bad.append(point)
            elif points.setdefault(point.fingerprint, point) is not point:
                same.append((_label(_varying(settings, request)), points[point.fingerprint].label))
            if progress is not None:
                progress(number, total)
    if bad:
        raise SweepPlanError(tuple(bad), total)
    return _sweep_plan(request, tuple(points.values()), tuple(same))


def _combinations(request: SweepRequest) -> Iterator[Settings]:
    return product(*(axis.settings for axis in request.axes))


@dataclass(frozen=True)
class _PlanPart:
    """The points of a request with these numbers, for this process or for another one."""

    request: SweepRequest
    checks: "PointSession"
    first: int
    end: int


def _planned(request: SweepRequest, checks: "PointSession", total: int) -> Iterator[PlannedPoint | BadPoint]:
    """Every point in its order. Very many are planned in several processes."""
    if total < _WORTH_WORKERS:
        return _plan_part(_PlanPart(request, checks, 0, total))
    parts = [_PlanPart(request, checks, first, min(first + _PART, total)) for first in range(0, total, _PART)]
    workers = min(os.cpu_count() or 1, _MOST_WORKERS)
    return (point for part in in_workers(_plan_list, parts, workers) for point in part)


def _plan_list(part: _PlanPart) -> list[PlannedPoint | BadPoint]:
    """A task of a worker process."""
    with _rare_collections():
        return list(_plan_part(part))


def _plan_part(part: _PlanPart) -> Iterator[PlannedPoint | BadPoint]:
    shared, bound = SharedErrors(), _bound(part.request)
    for settings in islice(_combinations(part.request), part.first, part.end):
        varying = _varying(settings, part.request)
        point = _plan_point((*settings, *bound), varying, part.checks, shared)
        has_none = bound and isinstance(point, BadPoint)
        yield _plan_point(settings, varying, part.checks, shared) if has_none else point


def _bound(request: SweepRequest) -> Settings:
    """All rules of eviction are asked for: so is what any can find. It takes a third of the time of a replay."""
    every = any(axis.text == "cache.eviction=all" for axis in request.axes)
    said = any(axis.key == "replay.optimum" for axis in request.axes)
    return parse_overrides(["replay.optimum=true"])[0].settings if every and not said else ()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the garbage collector look less often: it would look through all planned points again and again."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _plan_point(
    settings: Settings, varying: Settings, checks: "PointSession", shared: SharedErrors
) -> PlannedPoint | BadPoint:
    try:
        asked = compose_config(settings, shared=True)
        errors = [*check_settings(asked), *_path_errors(asked, shared)]
        if errors:
            return BadPoint(_label(varying), tuple(map(str, errors)))
        config = normalise(asked)
        checks.check_point(config)
        name = fingerprint(config, checks.point_identity(config))
    except ConfigError as error:
        return BadPoint(_label(varying), (str(error),))
    except MemoryError:
        return BadPoint(_label(varying), (_TOO_LARGE,))
    applies = tuple(item.text for item in varying if _applies(item, asked, config))
    idle = idle_keys(settings, asked, config)
    return PlannedPoint(name, tuple(item.text for item in settings), applies, config, idle)


def idle_keys(settings: Iterable[Setting], asked: RunConfig, normal: RunConfig) -> frozenset[str]:
    """The keys of settings that have no effect in a configuration, as it was asked for and normalised."""
    unread = unread_keys(normal)
    return frozenset(one.key for one in settings if one.key in unread or not _applies(one, asked, normal))


def idle_words(overrides: Sequence[str], asked: RunConfig, normal: RunConfig) -> str:
    """Those of the user's overrides of one configuration that have no effect, in words; empty where all have one."""
    request = run_request(overrides)
    users = (axis.settings[0] for axis in request.axes if axis.key not in request.deployed)
    idle = ", ".join(sorted(idle_keys(users, asked, normal)))
    return f"without effect beside the other settings: {idle}" if idle else ""


def _path_errors(config: RunConfig, known: SharedErrors) -> list[ConfigError]:
    """The errors of files and folders, which are looked at once in a sweep and not at each of its points."""
    named = (config.out, config.cost.cache_dir, config.cost.kernels, config.report.kernels)
    if named not in known:
        known[named] = check_paths(config)
    return known[named]


def _varying(settings: Settings, request: SweepRequest) -> Settings:
    """The settings that differ between points. A single point gets all its settings."""
    keys = request.varying or tuple(axis.key for axis in request.named)
    return tuple(setting for setting in settings if setting.key in keys)


def _applies(item: Setting, asked: RunConfig, normal: RunConfig) -> bool:
    """Whether a setting has an effect at this point: normalisation left its value unchanged."""
    section = item.key.rpartition(".")[0]
    if item.is_group or (section and getattr(asked, section) is getattr(normal, section)):
        return True
    found, kept = value_of(asked, item.key), value_of(normal, item.key)
    return bool(found == kept or (isinstance(found, str) and expanduser(found) == kept))


def _label(settings: Settings) -> str:
    return " ".join(item.text for item in settings) or DEFAULT_LABEL


def _sweep_plan(
    request: SweepRequest, points: tuple[PlannedPoint, ...], same: tuple[tuple[str, str], ...]
) -> SweepPlan:
    config = points[0].config
    if len({point.config.out for point in points}) > 1:
        raise ConfigError("out", "differs between the points; a sweep has one results folder")
    return SweepPlan(
        name=config.name,
        out=local_place(config.out),
        workers=config.workers,
        experiment=request.experiment,
        overrides=tuple(axis.text for axis in request.axes),
        points=points,
        same=same,
        idle=tuple(
            axis.text
            for axis in request.axes
            if axis.key not in request.deployed and all(axis.key in point.idle for point in points)
        ),
    )


# Settings that do not change a point's result.
_NOT_IDENTITY = (
    *("name", "out", "workers", "report", "execute", "trace.path"),
    *("cost.cache_dir", "cost.kernels", "cost.operators", "replay.compiled", "oracle.python"),
)
_SECTIONS = get_type_hints(RunConfig)
_IDENTIFYING = tuple(
    (name, kind if is_dataclass(kind) else None)
    for name, kind in sorted(_SECTIONS.items())
    if name not in _NOT_IDENTITY
)
_PATHS = {ModelConfig: ("path",), DecodingConfig: ("draft_path", "beam_parents")}  # absolute in a fingerprint
_FINGERPRINT_BYTES = 16


def fingerprint(config: RunConfig, identity: Mapping[str, Any]) -> str:
    """The identifier of a point (32 hexadecimal digits): a hash of its configuration and of `identity`.

    Args:
        config: validated and normalised. Four things do not count: the output folder, the report settings, the number
            of workers, and the paths of traces and timed kernels. `identity` holds the digests of their content.
        identity: trace digest, code version, device and cost model, from `harness.point.point_identity`.
    """
    parts = [
        f'"{name}": {_section_text(getattr(config, name)) if kind is not None else _json(getattr(config, name))}'
        for name, kind in _IDENTIFYING
    ]
    text = f"[{SCHEMA}, {{{', '.join(parts)}}}, {_json(identity)}]"  # as JSON with sorted keys
    return hashlib.blake2b(text.encode(), digest_size=_FINGERPRINT_BYTES).hexdigest()


def _identity_text(section: Any) -> str:
    """The settings of a section on which a result depends, as JSON with sorted keys."""
    content, kind = dict(vars(section)), type(section)
    for key in _NOT_IDENTITY:
        name, _, inner = key.rpartition(".")
        if name and kind is _SECTIONS[name]:
            del content[inner]
    for inner in _PATHS.get(kind, ()):
        if content[inner] is not None:
            content[inner] = str(Path(content[inner]).resolve())
    return _json(content)


_identity_texts = PerObject(_identity_text, 1 << 12)


def _section_text(section: Any) -> str:
    """The text of a section, which points share; not remembered where it depends on the working directory."""
    for inner in _PATHS.get(type(section), ()):
        if getattr(section, inner) is not None:
            return _identity_text(section)
    return _identity_texts(section)


_json = json.JSONEncoder(sort_keys=True, default=str).encode
