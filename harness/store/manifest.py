"""The manifest of a store, `sweep.json`.

It holds the last sweep of the store, so that `status` and `report` know which points belong together.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from harness.config.foreign import Foreign
from harness.store import ForeignFileError, StoreError, StoreVersionError
from harness.store.atomic import write_files
from harness.store.commit import (
    DAMAGED,
    SCHEMA,
    Layout,
    check_version,
    digest_of,
    file_fault,
    read_sealed,
    sealed,
)

_NAME = re.compile(r"\w{1,64}")  # of a point, whose folder has it: never a path


@dataclass(frozen=True)
class SweepPoint:
    """A point of the sweep: its fingerprint and the settings in which it differs from the others."""

    fingerprint: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The last sweep (or run) of a store."""

    name: str
    command: str  # repeats the sweep; `Foreign` where it was read
    overrides: tuple[str, ...]  # as given, the experiment's included
    points: tuple[SweepPoint, ...]
    report: str | None = None  # relative path of the report written from exactly these points
    verdict: tuple[str, ...] = ()  # its first lines
    # of what was derived from the points, by relative path: the summary and all files of the report
    digests: Mapping[str, str] = field(default_factory=dict)


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Replace the manifest.

    Raises:
        StoreError: the folder cannot be written.
    """
    write_files(root, {Layout(root).manifest.name: sealed({"schema": SCHEMA, **asdict(manifest)})})


def read_manifest(root: Path) -> Manifest | None:
    """The manifest, or None if the store has none.

    Raises:
        ForeignFileError: truncated or not a manifest.
        StoreVersionError: written with another schema.
    """
    path = Layout(root).manifest
    if not path.exists():
        return None
    try:
        value = read_sealed(path.read_bytes())
        check_version(path, value["schema"])
        if value["report"] is not None and not _is_inside(value["report"]):
            raise ValueError(f"its report {value['report']!r} lies outside the store")
        where = (str(path), root)
        return Manifest(
            name=value["name"],
            command=Foreign(value["command"], *where),
            overrides=tuple(Foreign(text, *where) for text in value["overrides"]),
            points=_points(value["points"]),
            report=value["report"],
            verdict=tuple(value["verdict"]),
            digests=_digests(value.get("digests", {})),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, StoreVersionError):
            raise
        raise ForeignFileError(f"{path}: truncated or not a PageTwin sweep ({error})") from None


def keep_report(root: Path, manifest: Manifest) -> Path | None:
    """Move the manifest's report, with the manifest, to the first free `earlier/N`; None if there is no report.

    Raises:
        StoreError: the folder cannot be written.
    """
    if manifest.report is None or not (root / manifest.report).exists():
        return None
    number = 1
    while (root / "earlier" / str(number)).exists():
        number += 1
    place = root / "earlier" / str(number)
    try:
        place.mkdir(parents=True)
        first = Path(manifest.report).parts[0]
        (root / first).rename(place / first)
    except OSError as error:
        raise StoreError(f"cannot keep the earlier report in {place}: {error.strerror}") from error
    write_manifest(place, replace(manifest, digests=still_there(place, manifest)))
    return place


def with_report(
    manifest: Manifest, root: Path, report: Path, verdict: Sequence[str], summary: Path
) -> Manifest:
    """The manifest after its report was written, and its summary: with the digests of all their files."""
    written = (path for path in _beside(root) if path == summary or report.parent in path.parents)
    fresh = {str(path.relative_to(root)): digest_of(path.read_bytes()) for path in written}
    digests = dict(sorted((still_there(root, manifest) | fresh).items()))
    return replace(manifest, report=str(report.relative_to(root)), verdict=tuple(verdict), digests=digests)


def still_there(root: Path, manifest: Manifest) -> dict[str, str]:
    """The manifest's digests of files that are in the folder."""
    return {name: digest for name, digest in manifest.digests.items() if (root / name).exists()}


def derived_faults(root: Path, manifest: Manifest) -> dict[str, str]:
    """What is wrong with files that were derived from the points, by relative path; raises nothing."""
    found = {name: file_fault(root / name, digest) for name, digest in manifest.digests.items()}
    return {name: fault for name, fault in found.items() if fault}


def without_digest(root: Path, manifest: Manifest) -> list[str]:
    """The files beside the points that nothing can be compared with: those of older versions, and others'."""
    names = (str(path.relative_to(root)) for path in _beside(root))
    return [name for name in names if name not in manifest.digests]


def _beside(root: Path) -> Iterator[Path]:
    """All files of a store but points, what was kept or set aside, hidden ones and the manifest."""
    others = ("points", "earlier", DAMAGED, Layout(root).manifest.name)
    for place in sorted(root.iterdir()):
        if place.name not in others and not place.name.startswith("."):
            yield from (path for path in sorted([place, *place.rglob("*")]) if path.is_file())


def checked_summary(folder: Path | str) -> Path:
    """The path of a store's summary, after it was compared with its digest: `pd.read_parquet(checked_summary(out))`.

    A store of an older version has no digest of it; then its form alone is looked at.

    Raises:
        ForeignFileError: it is missing, or was changed after it was written.
        StoreVersionError: the store was written with another schema.
    """
    root = Path(folder)
    path, manifest = Layout(root).summary, read_manifest(root)
    if fault := file_fault(path, manifest.digests.get(path.name) if manifest else None):
        raise ForeignFileError(f"{root}: {fault}; write it anew: python -m harness report {root}")
    return path


def _digests(value: Mapping[str, Any]) -> dict[str, str]:
    for name, digest in value.items():
        if not _is_inside(name) or not isinstance(digest, str):
            raise ValueError(f"a digest of {name[:80]!r}, which is no file of the store")
    return dict(value)


def _is_inside(name: str) -> bool:
    """Whether a relative path stays in the folder that it starts from."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _points(values: Sequence[dict[str, Any]]) -> tuple[SweepPoint, ...]:
    points = tuple(SweepPoint(value["fingerprint"], tuple(value["overrides"])) for value in values)
    for point in points:
        if not _NAME.fullmatch(point.fingerprint) or not all(
            isinstance(text, str) for text in point.overrides
        ):
            reason = f"a point named {point.fingerprint[:80]!r}, which is no name of a point and its settings"
            raise ValueError(reason)
    return points
