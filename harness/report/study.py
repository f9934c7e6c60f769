"""A sweep read from its store: records, failures, and the files that could not be read.

Of a very large sweep a page shows a grid of its settings' values, spread evenly. Figures compare points that differ in
one setting alone. So values are left out, not points: of each key some values stay, and every point that has no other
value is shown.
"""

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.metrics.record import PointRecord
from harness.store import ForeignFileError
from harness.store.commit import Layout, StoreContent, point_names, read_point, read_store, read_table
from harness.store.manifest import Manifest, read_manifest
from harness.store.survey import Seen, files_state, seen_point

if TYPE_CHECKING:
    import pandas as pd


T = TypeVar("T")

# The most points of a store that is shown whole.
MOST_WHOLE = 2000
# The most points that the page shows of a larger one.
MOST_SHOWN = 1000
# The most points whose figures lie in the page; `points.csv` has all.
MOST_POINTS = 1000
_SHRINK = 0.95  # of the key with the most values, in one step


def shown_points(asked: Mapping[str, Sequence[str]], most_whole: int, most: int) -> list[str]:
    """The fingerprints to show, of points with these overrides, in their order: all up to `most_whole`."""
    if len(asked) <= most_whole:
        return list(asked)
    values: dict[str, dict[str, None]] = {}
    for words in asked.values():
        for word in words:
            values.setdefault(word.partition("=")[0], {})[word] = None
    counts = {key: len(found) for key, found in values.items()}
    while True:
        stay = {word for key, found in values.items() for word in spread(list(found), counts[key])}
        names = [name for name, words in asked.items() if stay.issuperset(words)]
        widest = max(counts, key=lambda key: counts[key], default="")
        if len(names) <= most or not widest or counts[widest] <= 2:
            return spread(names, most)
        share = (most / len(names)) ** (1 / len(counts))
        for key in [key for key, count in counts.items() if count > _SHRINK * counts[widest]]:
            counts[key] = max(2, min(counts[key] - 1, int(counts[key] * max(share, 0.5))))


def spread(values: Sequence[T], most: int) -> list[T]:
    """At most `most` of these values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


class ReportError(ValueError):
    """There is nothing to report on, or the report cannot be written. The message says what to do."""


@dataclass(frozen=True)
class Failure:
    """A point that failed: its settings, the error in one line, and the file of the traceback in the store."""

    label: str
    message: str
    path: str


@dataclass(frozen=True)
class Study:
    """A sweep with its records.

    `problems` are sentences about skipped files. `absent` counts the points of the sweep that neither finished nor
    failed. `others` counts the points in the store that belong to another sweep.
    """

    root: Path
    name: str
    command: str  # empty if unknown
    records: tuple[PointRecord, ...]
    failures: tuple[Failure, ...] = ()
    problems: tuple[str, ...] = ()
    absent: int = 0
    others: int = 0
    date: str = ""  # of the newest record, UTC
    total: int = 0  # finished points of the sweep; more than `records` where these are a grid of its values
    unfinished: Mapping[str, str] = field(default_factory=dict)  # of all points, where `records` are not all

    @property
    def is_thinned(self) -> bool:
        """Whether `records` are some of the points only."""
        return self.total > len(self.records)

    @property
    def measured(self) -> tuple[PointRecord, ...]:
        """The records that have a measured side."""
        return tuple(record for record in self.records if record.measured)

    @property
    def not_priced(self) -> tuple[str, ...]:
        """What the cost models of the points do not price, in their own words."""
        facts = (record.provenance.get("not priced") for record in self.records)
        return tuple(dict.fromkeys(str(found) for found in facts if found))

    @property
    def block_size_unpriced(self) -> str:
        """The sentence for figures along a block size that the cost model does not price; else empty."""
        if any("block size" in text for text in self.not_priced):
            return "The cost model does not price block size: equal predicted times are no finding."
        return ""

    @property
    def block_size_caution(self) -> str:
        """The same, or the sentence for block sizes that are priced by the static model of our kernels."""
        if self.block_size_unpriced:
            return self.block_size_unpriced
        modelled = [record.provenance.get("block size") for record in self.records]
        if found := [one for one in modelled if one]:
            most = max(float(one["uncertainty"]) for one in found)
            what = "Block size is priced by a static model of our kernels, not by measurements: predicted"
            return f"{what} differences in attention below {most:.0%} are no finding."
        return ""

    def steps(self, record: PointRecord) -> "pd.DataFrame | None":
        """The step table of a point with both sides and all runs; None if it cannot be read."""
        return self.table(record, "steps")

    def table(self, record: PointRecord, name: str) -> "pd.DataFrame | None":
        """A table of a point with both sides and all runs; None if it is not there or cannot be read."""
        import pandas as pd

        try:
            return pd.DataFrame(read_table(self.root, record.fingerprint, name))
        except ForeignFileError:
            return None  # the record is still shown; the figure that needs the table gives the reason for its absence


_NOT_SHOWN = PointRecord()  # stands for a point that the study leaves out


def read_study(root: Path, *, shown_only: bool = False, where: Collection[str] = ()) -> Study:
    """Read the points of the store's last sweep, or all points if the store has no manifest.

    Of more than `MOST_WHOLE` points the study holds a grid, and the counts of all. With `shown_only` the others are not
    looked at; `EveryRecord` reads them later, and corrects the study. Points that have all settings of `where`
    (`key=value`) are shown beside the grid, or a grid of their own.

    Raises:
        ReportError: the store has neither a record nor a failure.
        StoreVersionError: a file was written by another version of PageTwin.
    """
    manifest, problems = _manifest(root)
    asked = {point.fingerprint: point.overrides for point in manifest.points} if manifest else {}
    found = set(point_names(root))
    there = {key: asked[key] for key in asked if key in found and os.path.exists(Layout(root).record(key))}
    held = {key: words for key, words in there.items() if where and {*where} <= {*words}}
    shown = {name for some in (there, held) for name in shown_points(some, MOST_WHOLE, MOST_SHOWN)}
    later = there.keys() - shown if shown_only else set()
    unfinished: dict[str, str] = {}

    def keep(record: PointRecord) -> PointRecord:
        key = record.fingerprint
        if key in asked and (words := record.unfinished):
            unfinished[" ".join(asked[key]) or key[:10]] = words
        return record if not asked or key in shown else _NOT_SHOWN

    content = read_store(root, keep, later)
    asked = asked or _told_apart(
        {key: failure.get("overrides") or () for key, failure in content.failures.items()}
        | {key: record.overrides for key, record in content.records.items()}
    )
    problems += content.problems
    problems += _put_out(root, content.records)
    done = [key for key in asked if key in content.records]
    records = [_named(content.records[key], asked) for key in done if content.records[key] is not _NOT_SHOWN]
    total = len(done) + len(later)
    failures = [_failure(content.failures[key], key, asked) for key in asked if key in content.failures]
    if not records and not failures:
        raise ReportError(_nothing(root, problems))
    seen = content.records.keys() | content.failures.keys()
    return Study(
        root=root,
        name=manifest.name if manifest else root.resolve().name,
        command=manifest.command if manifest else "",
        records=tuple(records),
        failures=tuple(failures),
        problems=tuple(problems),
        absent=len(asked.keys() - seen - later),
        others=len(seen - asked.keys()),
        date=_date(root, [record.fingerprint for record in records]),
        total=total,
        unfinished=unfinished,
    )


def _put_out(root: Path, records: dict[str, PointRecord]) -> list[str]:
    """Leave out records that do not say on which cache they ran, as no figure can place them; says which."""
    bad = [key for key, record in records.items() if record is not _NOT_SHOWN and not _places(record)]
    for key in bad:
        del records[key]
    return [
        f"skipped {Layout(root).record(key)}: its cache's policy and block size are missing" for key in bad
    ]


def _places(record: PointRecord) -> bool:
    cache = record.config.get("cache")
    if not isinstance(cache, Mapping):
        return False
    return isinstance(cache.get("policy"), str) and isinstance(cache.get("block_size"), int)


# The points of a sweep: the overrides that tell each from the others, by fingerprint.
Asked = Mapping[str, Sequence[str]]


def asked_points(study: Study) -> Asked:
    """The points of the store's last sweep, in its order."""
    manifest, _ = _manifest(study.root)
    return {point.fingerprint: point.overrides for point in manifest.points} if manifest else {}


@dataclass
class EveryRecord:
    """The finished ones of some points, one by one and in their order, also those that are not shown.

    Each is given as it is stored, and with those overrides alone that tell it from the others. What is found on the way
    is noted: damaged records, requests that did not finish, and what a later survey of the store needs.
    """

    root: Path
    asked: Asked
    count: int = 0
    problems: list[str] = field(default_factory=list)
    unfinished: dict[str, str] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[PointRecord, PointRecord]]:
        now_ns = time.time_ns()
        for name in self.asked:
            files = files_state(self.root, name, now_ns)
            found = StoreContent(problems=self.problems)
            read_point(self.root, name, found, None)
            for record in found.records.values():
                named = _named(record, self.asked)
                self.count += 1
                if words := record.unfinished:
                    self.unfinished[named.point_label] = words
                self.seen.append(seen_point(record, files))
                yield record, named

    def add(self, other: "EveryRecord") -> None:
        """Take over what another one found."""
        self.count += other.count
        self.problems += other.problems
        self.unfinished |= other.unfinished
        self.seen += other.seen

    def corrected(self, study: Study) -> Study:
        """The study with the counts and problems of all points."""
        return replace(
            study,
            total=self.count,
            absent=study.absent + study.total - self.count,
            problems=tuple(dict.fromkeys([*study.problems, *self.problems])),
            unfinished=self.unfinished,
        )


def _date(root: Path, fingerprints: list[str]) -> str:
    """The day on which the newest record was written; records themselves hold no date, so that equal runs are equal."""
    files = [Layout(root).record(name) for name in fingerprints]
    newest = max((file.stat().st_mtime for file in files), default=None)
    return "" if newest is None else datetime.fromtimestamp(newest, UTC).date().isoformat()


def _manifest(root: Path) -> tuple[Manifest | None, list[str]]:
    """The manifest, if it can be read, and the problems found."""
    try:
        return read_manifest(root), []
    except ForeignFileError as error:
        return None, [f"skipped {error}"]


def _told_apart(overrides: Asked) -> dict[str, tuple[str, ...]]:
    """The settings in which each point differs from the others; used where no manifest lists them."""
    words = {key: tuple(map(str, found)) for key, found in overrides.items()}
    common = set.intersection(*map(set, words.values())) if len(words) > 1 else set()
    return {key: tuple(word for word in found if word not in common) for key, found in words.items()}


def _nothing(root: Path, problems: list[str]) -> str:
    skipped = "".join(f"\n  {line}" for line in problems)
    return (
        f"no points in {root}: run 'python -m harness sweep out={root}' first, or name another store{skipped}"
    )


def _named(record: PointRecord, asked: Asked) -> PointRecord:
    """The record with those overrides only that distinguish it from the sweep's other points."""
    overrides, record = asked.get(record.fingerprint), as_reached(record)
    return replace(record, overrides=list(overrides), given=record.overrides) if overrides else record


SHARE = "workload.prefix_share"
_REACHED = 0.02  # of the prompt tokens: a share that is reached so closely is the one that was asked for


def as_reached(record: PointRecord) -> PointRecord:
    """The record with the share of prompt tokens that is shared in place of one that was asked for and not reached.

    The setting was once a part of each prompt, and samples of one request share their prompt besides.
    """
    asked, reached = record.setting(SHARE), record.trace.get("realised_prefix_share")
    if not asked or reached is None or abs(reached - asked) <= _REACHED:
        return record
    workload = {**record.config["workload"], "prefix_share": round(reached, 2)}
    return replace(record, config={**record.config, "workload": workload})


def _failure(failure: Mapping[str, Any], fingerprint: str, asked: Asked) -> Failure:
    label = " ".join(asked.get(fingerprint) or failure.get("overrides") or ()) or fingerprint
    message = failure.get("error") or "no message"
    return Failure(label, str(message), f"points/{fingerprint}/failure.json")
