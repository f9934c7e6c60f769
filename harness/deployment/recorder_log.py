"""The requests.jsonl and timeseries.csv of LLMServingSim's vLLM recorder.

Source: `bench/core/recorder.py` and `stat_logger.py` of github.com/casys-kaist/LLMServingSim at 5daddb2. A request has
`input_toks`, `output_toks`, `arrival_time` (wall clock) and `queued_ts`, `scheduled_ts`, `first_token_ts`,
`last_token_ts` (the engine's monotonic clock), all in seconds. The series has one row for each second.
"""

import numpy as np

from harness.deployment.log import Timeseries
from harness.deployment.rows import (
    LoggedRequest,
    RequestLog,
    csv_rows,
    json_lines,
    located,
    number,
    text_number,
    whole,
)
from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile
from traces.formats.parsing import kind

SERIES_COLUMNS = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")
_CLOCK = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


def read_recorded_requests(file: SourceFile) -> RequestLog:
    """The requests, all on the engine's clock. Raises TraceError.

    The wall clock is shifted by the least `queued_ts - arrival_time` of all requests: one request at least is taken to
    have entered the queue at once. So a mean delay between arrival and queue is known only beyond that least delay.
    """
    log = RequestLog("vLLM recorder", file)
    found: list[tuple[int, dict[str, float], str, int, int]] = []
    for line, record in json_lines(file):
        try:
            if any(record.get(name) is None for name in _CLOCK):
                log.drop("no time of " + next(name for name in _CLOCK if record.get(name) is None))
                continue
            times = {name: number(record, name) for name in ("arrival_time", *_CLOCK)}
            name = record.get("request_id")
            if not isinstance(name, str | int):
                raise RowError("request_id", f"string expected, found {kind(name)}")
            lengths = whole(record, "input_toks", 1), whole(record, "output_toks")
        except RowError as error:
            raise located(file, line, error) from error
        if lengths[1] == 0:
            log.drop("no output token")
            continue
        found.append((line, times, str(name), *lengths))
    if not found:
        return log
    offset = min(times["queued_ts"] - times["arrival_time"] for _, times, *_ in found)
    for line, times, name, prompt, output in found:
        log.rows.append(
            LoggedRequest(
                name,
                min(times["arrival_time"] + offset, times["queued_ts"]),  # a wall clock is exact to 0.2 us
                times["first_token_ts"],
                times["last_token_ts"],
                prompt,
                output,
                times["queued_ts"],
                times["scheduled_ts"],
                line=line,
            )
        )
    delay = sum(row.queued_s - row.arrival_s for row in log.rows if row.queued_s is not None) / len(log.rows)
    log.notes.append(
        f"{file.name}: arrival_time is a wall clock, the other times are the engine's. It is shifted by the least "
        f"difference, {offset:.6f} s; then queued_ts is {1000 * delay:.1f} ms after the arrival in the mean."
    )
    return log


def read_recorded_series(file: SourceFile) -> tuple[Timeseries, list[str]]:
    """The series on its own clock, and notes. KV use of 0 throughout was not recorded. Raises TraceError."""
    rows: list[list[float]] = []
    for line, fields in csv_rows(file, SERIES_COLUMNS):
        try:
            rows.append([text_number(fields, name) for name in SERIES_COLUMNS])
            _check_row(rows)
        except RowError as error:
            raise located(file, line, error) from error
    if not rows:
        raise TraceError(file.path, 1, None, "no data rows")
    at_s, prompt, generated, running, waiting, kv = np.array(rows).T
    notes = [] if kv.any() else [f"{file.name}: kv_cache_pct is 0 throughout, so KV use was not recorded."]
    return Timeseries(at_s, running, waiting, kv / 100 if kv.any() else None, prompt, generated), notes


def _check_row(rows: list[list[float]]) -> None:
    low = next((name for name, value in zip(SERIES_COLUMNS, rows[-1], strict=True) if value < 0), None)
    if low is not None:
        raise RowError(low, "is below 0")
    if len(rows) > 1 and rows[-1][0] <= rows[-2][0]:
        raise RowError("t", f"{rows[-1][0]:g} is not after {rows[-2][0]:g} of the row before")
    if rows[-1][5] > 100:
        raise RowError("kv_cache_pct", f"{rows[-1][5]:g} is above 100")
