"""The manifest of a store, `sweep.json`.

It holds the last sweep of the store, so that `status` and `report` know which points belong together.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from harness.config.foreign import Foreign
from harness.store import ForeignFileError, StoreError, StoreVersionError
from harness.store.atomic import write_files
from harness.store.commit import SCHEMA, Layout, json_bytes

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


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Replace the manifest.

    Raises:
        StoreError: the folder cannot be written.
    """
    write_files(root, {Layout(root).manifest.name: json_bytes({"schema": SCHEMA, **asdict(manifest)})})


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
        value = json.loads(path.read_bytes())
        _check_version(path, value["schema"])
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
    write_manifest(place, manifest)
    return place


def with_report(manifest: Manifest, root: Path, report: Path, verdict: Sequence[str]) -> Manifest:
    """The manifest after its report was written."""
    return replace(manifest, report=str(report.relative_to(root)), verdict=tuple(verdict))


def _is_inside(name: str) -> bool:
    """Whether a relative path stays in the folder that it starts from."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _check_version(path: Path, version: object) -> None:
    if version != SCHEMA:
        raise StoreVersionError(
            f"{path}: written with schema {version}, this PageTwin reads {SCHEMA}; "
            "use the version that wrote it, or another folder with out=..."
        )


def _points(values: Sequence[dict[str, Any]]) -> tuple[SweepPoint, ...]:
    points = tuple(SweepPoint(value["fingerprint"], tuple(value["overrides"])) for value in values)
    for point in points:
        if not _NAME.fullmatch(point.fingerprint) or not all(
            isinstance(text, str) for text in point.overrides
        ):
            reason = f"a point named {point.fingerprint[:80]!r}, which is no name of a point and its settings"
            raise ValueError(reason)
    return points
