"""How much memory a point takes, estimated from its settings before anything is read or drawn.

A point that cannot fit is refused while it is planned, and a sweep starts no more worker processes than fit. The
figures are those of 20 to 300,000 generated requests with prompts of a thousand tokens that share prefixes (Python
3.11, 64 bits), whose peak is 0.9 to 1 times the estimate; requests that share none take less, longer prompts more. They
leave out the pool: the policy core keeps blocks that were given out at least once, and the engine's tensors have a
check of their own (`harness.environment`).
"""

import os
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

from harness.config.errors import ConfigError
from harness.config.schema import Compiled, RunConfig, TraceFormat

_BASE = 210 * 10**6  # an interpreter with what a prediction imports
_CODE, _FEW = 150 * 10**6, 1_000  # compiled code and its loader; so many requests are replayed without
# bytes a request: in the trace and the replay, and its rows (some seven steps each)
_REPLAY, _ROWS = (700, 4_400)
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_PARQUET = b"PAR1"
# Requests of a generated trace where `workload.num_requests` is null.
GENERATED = 1000
_SHARE = 0.8  # of the machine's memory; the system and the page cache need the rest


@cache
def machine_memory() -> int:
    """Bytes that this process may use, looked up once: every point of a sweep asks."""
    return usable_memory()


def usable_memory() -> int:
    """Bytes that this process may use: the machine's memory, or the limit of its control group where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit in map(_limit, _LIMITS) if limit is not None)])


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None  # no such control group
    return int(text) if text.isdigit() else None  # 'max': unlimited


def point_memory(config: RunConfig) -> int:
    """Bytes that one process takes for a point, roughly."""
    requests, loads = requests_of(config), config.replay.compiled is not Compiled.never
    code = _CODE if loads and requests > _FEW else 0
    return _BASE + code + requests * (_REPLAY + (_ROWS if config.replay.records else 0))


def requests_of(config: RunConfig) -> int:
    """Requests of a point, as far as is known before its trace is read.

    A trace in a file, or in the files of a folder, has at most as many as it has lines, or rows of Parquet. A document
    whose requests share a line counts as one: what it takes is not known.
    """
    wanted = config.workload.num_requests
    # drawn, as many as are asked for
    if config.trace.format in (TraceFormat.generated, TraceFormat.servegen):
        return wanted or GENERATED
    rows = rows_at_most(config.trace.path)
    return rows if wanted is None else min(wanted, rows)


def rows_at_most(named: str | None) -> int:
    """The lines of a file, or of all files of a folder; 0 where there is none that can be read."""
    place = Path(named or "").expanduser()
    try:
        if not named or not place.exists():
            return 0
        files = place.glob("*.json*") if place.is_dir() else [place]  # those below are never counted
        # a pipe or device has no end
        stats = ((file, file.stat()) for file in files if file.is_file())
        return sum(_rows(file, stat.st_mtime_ns, stat.st_size) for file, stat in stats)
    except OSError:
        return 0  # reading the trace says why


@lru_cache(maxsize=256)
def _rows(file: Path, changed: int, size: int) -> int:
    """Lines of a file as it was when it had changed last; rows where it is Parquet."""
    with file.open("rb") as content:
        if content.read(len(_PARQUET)) == _PARQUET:
            return _parquet_rows(file)
        content.seek(0)
        lines, last = 0, b""
        while part := content.read(1 << 20):
            lines, last = lines + part.count(b"\n"), part
    return lines + (bool(last) and not last.endswith(b"\n"))


def _parquet_rows(file: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(file).num_rows)
    except pa.ArrowException:
        return 0  # reading the trace says why


def workers_that_fit(config: RunConfig, wanted: int) -> int:
    """At most `wanted` worker processes, and as many as the machine's memory holds beside this process; at least 1."""
    each = point_memory(config)
    return max(1, min(wanted, int(_SHARE * machine_memory() - each) // each))


def check_memory(config: RunConfig) -> Iterator[ConfigError]:
    """An error if the point takes more memory than the machine has."""
    needed, allowed = point_memory(config), _SHARE * machine_memory()
    if needed > allowed:
        rows = "take fewer, or set replay.records=false" if config.replay.records else "take fewer requests"
        wanted = config.workload.num_requests
        found = (
            f"found {wanted:,}"
            if wanted is not None
            else f"null, and '{config.trace.path}' has {requests_of(config):,}"
        )
        yield ConfigError(
            "workload.num_requests",
            f"{found}, which take about {needed / 1e9:,.0f} GB; this machine has "
            f"{machine_memory() / 1e9:,.0f} GB, of which {_SHARE:.0%} may be used; {rows}",
        )
