"""What is asked for: the user's overrides, on top of a ready-made experiment where there is one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import yaml

from harness.config.errors import ConfigError, UnknownKeyError, UserError
from harness.config.groups import EXPERIMENTS, experiments, list_options, option_file
from harness.config.overrides import Axis, parse_overrides

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
