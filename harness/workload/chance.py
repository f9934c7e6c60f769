"""What only an engine finds out: parents of beams, ends of branches, accepted drafts.

It is drawn from models or taken from a recording. The recorded beams of a measured run are kept beside its tables as
the table `parents`.
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
from harness.workload.forms import Forms
from traces.trace import Trace

KEY = "decoding.beam_parents"
TABLE = "parents"
COLUMNS = ("run", "request_id", "selection", "hypothesis", "parent")
"""Columns of the table: the measured run, the request, which of its selections (from 0), and whom each continues."""

Chosen = Mapping[int, Sequence[Sequence[int]]]


def parents_table(runs: Sequence[Sequence[Mapping[int, Sequence[int]]]]) -> dict[str, "np.ndarray[Any, Any]"]:
    """The table of measured runs, each given as `Recorder.parents`; empty where nobody searched."""
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


def recorded_parents(path: str, trace: Trace, forms: Forms) -> RecordedGenealogy:
    """The beams of the first measured run at `path`: a `parents.parquet`, a point's folder, or a store.

    Of a store, the points whose record holds for every beam request of the trace are meant; they must agree. Raises
    ConfigError where nothing fits, or several differ.
    """
    wanted = {
        row.request_id: (form.width, row.output_tokens)
        for row in trace.requests
        if (form := forms.of(row)).decoding is Decoding.BEAM
    }
    refused: dict[Path, str] = {}
    found: dict[Path, Chosen] = {}
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
    """What tells one recording from another: its tables' sizes and times of change."""
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
def _first_run(file: Path, stamp: int) -> Chosen:
    """Selections by request of run 0; `stamp` tells a file that changed."""
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


def _mismatch(chosen: Chosen, wanted: Mapping[int, tuple[int, int]]) -> str:
    """Why a recording cannot stand for the trace's beams; empty where it can."""
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
class Chance:
    """How beams descend, branches end and drafts fare, where no engine says so.

    `hazard` is the chance that a sampled branch ends after a token: lengths of branches are drawn once, from `seed`,
    and hold on both sides, as the trace's output lengths do. `acceptance` None takes the calibrated share.
    """

    parents: RecordedGenealogy | None = None  # replayed instead of drawn
    hazard: float = 0.0
    acceptance: float | None = None
    seed: int = 0

    @property
    def survival(self) -> BranchSurvival | None:
        """How long sampled branches last; None: as long as the trace says."""
        return BranchSurvival(self.hazard, self.seed) if self.hazard else None

    def genealogy(self, source: CostSource, width: int, churn: float | None) -> Genealogy:
        """The recorded parents, else draws by the given churn, else by the calibrated one."""
        known = source.beam_churn if churn is None else {width: churn}
        return self.parents or BeamGenealogy(known, evenness=source.beam_evenness)

    def accepted(self, source: CostSource) -> DraftAcceptance | None:
        """The given share of draft tokens, else the calibrated one; None where neither is known: all are rejected."""
        share = source.draft_acceptance if self.acceptance is None else self.acceptance
        return None if share is None else DraftAcceptance(share, self.seed)


def chance_of(config: RunConfig) -> Chance:
    """As the configuration says, recorded beams apart."""
    decoding = config.decoding
    return Chance(None, decoding.branch_hazard, decoding.acceptance, config.workload.seed)
