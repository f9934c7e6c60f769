"""Outcomes that depend on token values: parents of beams, ends of sampled branches, accepted drafts.

A simulation has no token values. It draws these outcomes from models, or takes them from a recording. The recorded
beams of a measured run are kept beside its tables as the table `parents`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.options import Decoding
from harness.config.errors import ConfigError
from harness.config.schema import RunConfig
from harness.replay.beams import BeamGenealogy, Genealogy, RecordedGenealogy
from harness.replay.branches import BranchSurvival, DraftAcceptance
from harness.replay.cost_model import CostSource
from harness.store.commit import Layout
from harness.store.errors import ForeignFileError
from harness.store.reading import read_columns
from harness.workload.decoding import TraceDecoding
from traces.trace import Trace

KEY = "decoding.beam_parents"
TABLE = "parents"
COLUMNS = ("run", "request_id", "selection", "hypothesis", "parent")
"""Columns of the table: measured run, request, number of its selection (from 0), hypothesis, and the parent beam."""

Selections = Mapping[int, Sequence[Sequence[int]]]
"""Parents of each hypothesis by request id, one entry for each selection."""


def parents_table(runs: Sequence[Sequence[Mapping[int, Sequence[int]]]]) -> dict[str, "np.ndarray[Any, Any]"]:
    """The table of measured runs, each given as `Recorder.parents`; empty where no request uses beam search."""
    rows = [
        (run, request_id, selection, hypothesis, parent)
        for run, steps in enumerate(runs)
        for request_id, choices in RecordedGenealogy(steps).chosen.items()
        for selection, parents in enumerate(choices)
        for hypothesis, parent in enumerate(parents)
    ]
    if not rows:
        return {}
    return dict(zip(COLUMNS, np.array(rows, dtype=np.int64).T.copy(), strict=True))


def recorded_parents(path: str, trace: Trace, trace_decoding: TraceDecoding) -> RecordedGenealogy:
    """The beams of the first measured run at `path`: a `parents.parquet`, a point's folder, or a store.

    In a store, only recordings that hold every beam request of the trace with its width and length count. They must
    be equal.

    Raises:
        ConfigError: no recording fits, or several fit and differ.
    """
    wanted = {
        row.request_id: (decoding.width, row.output_tokens)
        for row in trace.requests
        if (decoding := trace_decoding.of(row)).mode is Decoding.beam
    }
    refused: dict[Path, str] = {}
    found: dict[Path, Selections] = {}
    for file in _files(path):
        chosen = _first_run(file, file.stat().st_mtime_ns)
        reason = _mismatch(chosen, wanted)
        if reason:
            refused[file] = reason
        else:
            found[file] = {request_id: chosen[request_id] for request_id in wanted}
    if not found:
        file, reason = next(iter(refused.items()))
        raise ConfigError(KEY, f"{file}: {reason}; name a measured run of this trace with these widths")
    first, *others = found
    differing = [file for file in others if found[file] != found[first]]
    if differing:
        raise ConfigError(
            KEY,
            f"{first.parent} and {differing[0].parent} both fit and hold different beams; name one of the two",
        )
    return RecordedGenealogy.of_requests(found[first])


def recording_stamp(path: str) -> str:
    """A text that changes with the recording: the sizes and modification times of its tables."""
    facts = [(file.parent.name, file.stat().st_size, file.stat().st_mtime_ns) for file in _files(path)]
    return repr(sorted(facts))


def _files(path: str) -> list[Path]:
    place = Path(path)
    if place.is_file():
        return [place]
    name = f"{TABLE}.parquet"
    if (place / name).is_file():
        return [place / name]
    files = sorted(Layout(place).points.glob(f"*/{name}"))
    if not files:
        raise ConfigError(
            KEY, f"'{path}' holds no {name}: only measured points with beams (measure=true) record parents"
        )
    return files


@lru_cache(maxsize=32)
def _first_run(file: Path, stamp: int) -> Selections:
    """Selections by request of run 0; `stamp`, the modification time, makes the cache read a changed file again."""
    try:
        columns = read_columns(file)
    except ForeignFileError as error:
        raise ConfigError(KEY, str(error)) from None
    missing = [n for n in COLUMNS if n not in columns or not np.issubdtype(columns[n].dtype, np.integer)]
    if missing:
        raise ConfigError(
            KEY, f"{file}: no table of beam parents, it lacks whole numbers in {', '.join(missing)}"
        )
    order = np.lexsort([columns[name] for name in ("hypothesis", "selection", "request_id")])
    order = order[columns["run"][order] == 0]
    chosen: dict[int, list[list[int]]] = {}
    rows = zip(
        *(columns[name][order].tolist() for name in ("request_id", "hypothesis", "parent")), strict=True
    )
    for request_id, hypothesis, parent in rows:
        choices = chosen.setdefault(request_id, [])
        if hypothesis == 0 or not choices:
            choices.append([])
        choices[-1].append(parent)
    return chosen


def _mismatch(chosen: Selections, wanted: Mapping[int, tuple[int, int]]) -> str:
    """Why a recording does not fit the beam requests of the trace; empty where it fits."""
    for request_id, (width, selections) in wanted.items():
        choices = chosen.get(request_id)
        if choices is None:
            return f"it has no beams of request {request_id}"
        if len(choices) != selections:
            return f"it has {len(choices)} selections of request {request_id}, which makes {selections}"
        wrong = next((parents for parents in choices if _invalid(parents, width)), None)
        if wrong is not None:
            return f"request {request_id} has {width} beams, it recorded parents {wrong}"
    return ""


def _invalid(parents: Sequence[int], width: int) -> bool:
    return len(parents) != width or not all(0 <= parent < width for parent in parents)


@dataclass(frozen=True)
class DrawnOutcomes:
    """Models of the outcomes that depend on token values: beam parents, ends of branches, accepted drafts.

    `parents` replays recorded beams instead of drawing them. `hazard` is the probability that a sampled branch ends
    after a token. Branch lengths are drawn once, from `seed`, and hold for simulation and measurement, as the trace's
    output lengths do. `acceptance` is the share of draft tokens that are accepted; None takes the calibrated share.
    """

    parents: RecordedGenealogy | None = None
    hazard: float = 0.0
    acceptance: float | None = None
    seed: int = 0

    @property
    def survival(self) -> BranchSurvival | None:
        """The model of branch lengths; None where every branch is as long as the trace says."""
        return BranchSurvival(self.hazard, self.seed) if self.hazard else None

    def genealogy(self, source: CostSource, width: int, churn: float | None) -> Genealogy:
        """The recorded parents, else draws with `churn` at `width`, or with the calibrated churn where it is None."""
        known = source.beam_churn if churn is None else {width: churn}
        return self.parents or BeamGenealogy(known, evenness=source.beam_evenness)

    def accepted(self, source: CostSource) -> DraftAcceptance | None:
        """The model of accepted drafts, with the given or the calibrated share; None without a share: reject all."""
        share = source.draft_acceptance if self.acceptance is None else self.acceptance
        return None if share is None else DraftAcceptance(share, self.seed)


def drawn_outcomes_of(config: RunConfig) -> DrawnOutcomes:
    """The models that the configuration asks for, without recorded beams."""
    decoding = config.decoding
    return DrawnOutcomes(None, decoding.branch_hazard, decoding.acceptance, config.workload.seed)
