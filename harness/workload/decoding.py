"""How each request is decoded: samples, beams or drafts, and how many.

A row of the trace may name its own width. All other rows are decoded as the configuration says.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.options import Decoding
from engine.core.request import Speculation
from harness.config.errors import ConfigError
from harness.config.schema import DecodingMode, RunConfig, Widths
from harness.replay.beams import BeamGenealogy, Genealogy, RecordedGenealogy
from harness.replay.branches import BranchSurvival, DraftAcceptance
from harness.replay.cost_model import CostSource
from harness.store import ForeignFileError
from harness.store.commit import Layout, read_columns
from traces.trace import Trace, TraceRequest

_WORDS = {Decoding.greedy: "of one sequence", Decoding.sample: "of {} samples", Decoding.beam: "of {} beams"}


@dataclass(frozen=True)
class RequestDecoding:
    """How one request is decoded: its number of sequences, its mode (greedy, samples or beams), and its drafts."""

    width: int = 1
    mode: Decoding = Decoding.greedy
    speculation: Speculation | None = None


@dataclass(frozen=True)
class TraceDecoding:
    """How the requests of a trace are decoded: `of(row)` gives the decoding of one request.

    `configured` holds for every row, unless `recorded` is set and the row names a width. Then a `beam_width` above 1
    means beam search. Otherwise `best_of`, or `n` where it is absent, is the number of samples (`n` of them are
    returned, all are computed); 1 means a single sequence. Only single sequences have drafts.
    """

    configured: RequestDecoding = RequestDecoding()
    recorded: bool = True

    def of(self, row: TraceRequest) -> RequestDecoding:
        """The decoding of one request."""
        if not self.recorded or not _states_width(row):
            return self.configured
        if row.beam_width is not None and row.beam_width > 1:
            return RequestDecoding(row.beam_width, Decoding.beam)
        samples = row.best_of or row.n or 1
        if samples > 1:
            return RequestDecoding(samples, Decoding.sample)
        sampled = self.configured.mode is Decoding.sample
        speculation = self.configured.speculation
        return RequestDecoding(1, Decoding.sample if sampled else Decoding.greedy, speculation)

    def of_all(self, trace: Trace) -> list[RequestDecoding]:
        """The decoding of each request."""
        if not self.recorded or not names_widths(trace):
            return [self.configured] * len(trace.requests)
        return [self.of(row) for row in trace.requests]

    def different(self, trace: Trace) -> set[RequestDecoding]:
        """The decodings that requests have."""
        if not self.recorded or not names_widths(trace):
            return {self.configured}
        return set(self.of_all(trace))

    def noted(self, trace: Trace) -> Trace:
        """The trace with a note on what became of the widths that its rows name; unchanged where no row names one."""
        if not names_widths(trace):
            return trace
        found = Counter(self.of(row) for row in trace.requests if _states_width(row))
        if not self.recorded:
            sentence = f"widths of {found.total():,} requests replaced: every request has the configured one"
            return trace.changed(trace.requests, sentence)
        parts = [f"{count:,} {_WORDS[each.mode].format(each.width)}" for each, count in found.items()]
        if fewer := sum((row.best_of or 0) > (row.n or 1) for row in trace.requests):
            parts.append(f"of which {fewer:,} return n of best_of samples: all count as output tokens")
        return trace.changed(trace.requests, "widths as recorded: " + ", ".join(parts))


def names_widths(trace: Trace) -> bool:
    """Whether a row names a width of its own."""
    rows = trace.columns
    return rows.others is not None and any(set(rows.values(name)) != {None} for name in _WIDTHS)


def _states_width(row: TraceRequest) -> bool:
    return any(getattr(row, name) is not None for name in _WIDTHS)


_WIDTHS = ("n", "best_of", "beam_width")


def trace_decoding_of(config: RunConfig) -> TraceDecoding:
    """How the configuration has the trace's requests decoded."""
    decoding, recorded = config.decoding, config.workload.widths is Widths.recorded
    if decoding.beam_width > 1:
        return TraceDecoding(RequestDecoding(decoding.beam_width, Decoding.beam), recorded)
    drafts = Speculation(decoding.draft_tokens, decoding.draft_place) if decoding.draft_tokens else None
    if decoding.mode is DecodingMode.sample:
        return TraceDecoding(RequestDecoding(decoding.n, Decoding.sample, drafts), recorded)
    return TraceDecoding(RequestDecoding(1, Decoding.greedy, drafts), recorded)


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
        reason = f"'{path}' holds no {name}: only measured points with beams (measure=true) record parents"
        raise ConfigError(KEY, reason)
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
        reason = f"{file}: no table of beam parents, it lacks whole numbers in {', '.join(missing)}"
        raise ConfigError(KEY, reason)
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
        beams = {*range(width)}
        wrong = next((each for each in choices if len(each) != width or not {*each} <= beams), None)
        if wrong is not None:
            return f"request {request_id} has {width} beams, it recorded parents {wrong}"
    return ""


@dataclass(frozen=True)
class DrawnOutcomes:
    """Models of the outcomes that depend on token values: beam parents, ends of branches, accepted drafts.

    `parents` replays recorded beams instead of drawing them. `hazard` is the probability that a sampled branch ends
    after a token. Branch lengths are drawn once, from `seed`, and hold for simulation and measurement, as the trace's
    output lengths do. `acceptance` is the share of draft tokens that are accepted, `churn` the share of beams that are
    dropped in a step; None takes the calibrated one.
    """

    parents: RecordedGenealogy | None = None
    hazard: float = 0.0
    acceptance: float | None = None
    seed: int = 0
    churn: float | None = None

    @property
    def survival(self) -> BranchSurvival | None:
        """The model of branch lengths; None where every branch is as long as the trace says."""
        return BranchSurvival(self.hazard, self.seed) if self.hazard else None

    def genealogy(self, source: CostSource, width: int) -> Genealogy:
        """The recorded parents, else draws with `churn` at `width`, or with the calibrated churn where it is None."""
        known = source.beam_churn if self.churn is None else {width: self.churn}
        return self.parents or BeamGenealogy(known, evenness=source.beam_evenness)

    def accepted(self, source: CostSource) -> DraftAcceptance | None:
        """The model of accepted drafts, with the given or the calibrated share; None without a share: reject all."""
        share = source.draft_acceptance if self.acceptance is None else self.acceptance
        return None if share is None else DraftAcceptance(share, self.seed)


def drawn_outcomes_of(config: RunConfig) -> DrawnOutcomes:
    """The models that the configuration asks for, without recorded beams."""
    decoding = config.decoding
    return DrawnOutcomes(
        None, decoding.branch_hazard, decoding.acceptance, config.workload.seed, decoding.beam_churn
    )
