"""A figure whose axes the user chooses: `report --x cache.block_size --hue decoding.beam_width --where ...`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from harness.metrics import METRICS
from harness.report.axes import POLICY, Axes, find_axes, policy_of, setting
from harness.report.figures import curves
from harness.report.figures.curves import BLOCK, SHOWN, main_policy
from harness.report.study import Record, ReportError, Study, read_study
from harness.report.style import Drawing, Missing, style
from harness.report.write import write_figure_files

_POLICIES = (POLICY, "cache")  # every policy has a line of its own already


@dataclass(frozen=True)
class FigureChoice:
    """What a figure shows.

    Attributes:
        x: swept setting along x; it needs two numbers at least.
        hue: swept setting whose values are lines; None draws one line.
        col: swept setting whose values are columns of panels; None draws one column.
        where: values at which settings are held, as text. A swept setting that is neither named here nor drawn
            is held at its middle value, and the caption says so.
        metrics: rows of panels, by name.
    """

    x: str
    hue: str | None = None
    col: str | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[str] = SHOWN

    @property
    def name(self) -> str:
        """The file name without suffix; two different choices have two names."""
        parts = [self.x, *(f"{key}" for key in (self.hue, self.col) if key)]
        parts += [f"{key}={value}" for key, value in self.where.items()]
        parts += () if tuple(self.metrics) == SHOWN else self.metrics
        return "chosen_" + "_".join("".join(_plain(sign) for sign in part) for part in parts)


def _plain(sign: str) -> str:
    return sign if sign.isalnum() or sign in "=-" else "_"


def write_chosen_figure(store_root: Path, choice: FigureChoice, *, out: Path | None = None) -> list[Path]:
    """Draw one figure and write it as SVG, PDF and CSV into `figures` of the report's folder; returns the files.

    The report itself stays as it is.

    Raises:
        ReportError: a setting is not swept or a metric is unknown (the message lists what is allowed), no point fits
            `where`, or the files cannot be written.
    """
    study = read_study(store_root)
    chosen, axes = _check(study, choice)
    layout = curves.Layout(choice.x, choice.hue, choice.col, tuple(choice.metrics))
    if layout.hue in _POLICIES:
        layout = replace(layout, hue=None)
    with style():
        picture = curves.draw(chosen, axes, layout, name=choice.name)
        if isinstance(picture, Missing):
            raise ReportError(f"--x {choice.x}: {picture.reason}")
        held = ", ".join(f"{key}={value}" for key, value in choice.where.items())
        caption = picture.caption + (f" Chosen: {held}." if held else "")
        named = Drawing(picture.name, caption, picture.figure, picture.data)
        return write_figure_files((out or store_root / "report") / "figures", named)


def _check(study: Study, choice: FigureChoice) -> tuple[Study, Axes]:
    """The study with the points that fit `where`, and its axes.

    Raises:
        ReportError: a part of the choice does not fit the store.
    """
    whole = find_axes(study.records)
    _check_metrics(choice.metrics)
    if choice.x not in whole.numeric:
        raise ReportError(f"--x: '{choice.x}' is no swept number here; {_allowed(whole.numeric)}")
    for option, key in (("--hue", choice.hue), ("--col", choice.col)):
        allowed = [other for other in whole.values if other != choice.x]
        if key is not None and key not in allowed and not (option == "--hue" and key in _POLICIES):
            raise ReportError(f"{option}: '{key}' is not swept here or drawn already; {_allowed(allowed)}")
    if choice.hue is not None and choice.hue == choice.col:
        raise ReportError(f"--hue and --col are both '{choice.hue}'; name two settings")
    for key in choice.where:
        if key in (choice.x, choice.hue, choice.col):
            raise ReportError(f"--where: '{key}' is drawn already; leave it out of --x, --hue and --col")
    records = _matching(study.records, choice.where, whole, choice.x)
    axes = find_axes(records)
    drawn = [key for key in (choice.x, choice.hue, choice.col) if key and key not in _POLICIES]
    gone = [key for key in drawn if key not in axes.values]
    if gone:
        held = " ".join(f"{key}={value}" for key, value in choice.where.items())
        raise ReportError(
            f"--where {held}: '{gone[0]}' has one value at these points; nothing to draw along it"
        )
    return replace(study, records=tuple(records)), axes


def _check_metrics(metrics: Sequence[str]) -> None:
    for name in metrics:
        if name not in METRICS:
            close = get_close_matches(name, METRICS, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(METRICS)}"
            raise ReportError(f"--metric: no metric is called '{name}'; {hint}")
    if not metrics:
        raise ReportError("--metric: name at least one metric")


def _matching(records: Sequence[Record], where: Mapping[str, str], axes: Axes, x: str) -> list[Record]:
    """The points that have the values of `where`.

    A policy without blocks has no block size of its own, so its points stay whatever `where` says of the block size.
    """
    found = list(records)
    main = main_policy([record for record in records if setting(record, x) is not None], x)
    for key, text in where.items():
        aim = POLICY if key in _POLICIES else key
        known = list(dict.fromkeys(str(setting(record, aim)) for record in records))
        if aim != POLICY and aim not in axes.values:
            raise ReportError(f"--where: '{key}' is not swept here; {_allowed([POLICY, *axes.values])}")
        if text not in known:
            raise ReportError(f"--where: no point has {key}={text}; {_allowed(known)}")
        found = [
            record
            for record in found
            if str(setting(record, aim)) == text or (aim == BLOCK and policy_of(record) != main)
        ]
    if not found:
        raise ReportError(f"--where: no point has all of {', '.join(f'{k}={v}' for k, v in where.items())}")
    return found


def _allowed(names: Sequence[str]) -> str:
    return f"allowed are {', '.join(names)}" if names else "nothing is swept in this store"
