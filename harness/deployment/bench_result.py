"""The result file of `vllm bench serve --save-result --save-detailed`.

Source: `vllm/benchmarks/serve.py` of vLLM 0.19.0. Lists with one entry for each request: `input_lens`, `output_lens`,
`ttfts`, `itls` (gaps between chunks), `start_times`, `errors`; times are seconds of the client's monotonic clock.
"""

from typing import Any

from harness.deployment.documents import JsonDocument
from harness.deployment.rows import LoggedRequest, RequestLog, as_number
from traces.errors import RowError
from traces.formats.files import SourceFile
from traces.formats.parsing import MAX_INTEGER, kind

KEYS = ("input_lens", "output_lens", "ttfts", "itls")
_FACTS = ("model_id", "backend", "request_rate", "max_concurrency")


def read_bench_result(file: SourceFile) -> RequestLog:
    """The requests. A request with an error or without a token is dropped. Raises TraceError."""
    document = JsonDocument(file)
    log = RequestLog("vllm bench serve", file)
    log.facts = {name: document.value[name] for name in _FACTS if document.value.get(name) is not None}
    columns = {name: document.items((name,)) for name in KEYS}
    if "start_times" not in document.value:
        reason = (
            "missing, so that the arrivals are not known; vLLM 0.10 does not write it, 0.19 does. Run the benchmark "
            "with --save-detailed of a newer vLLM, or log the requests in another form"
        )
        raise document.error((), RowError("start_times", reason))
    columns["start_times"] = document.items(("start_times",))
    errors = document.items(("errors",)) if document.value.get("errors") else [""] * len(columns["ttfts"])
    for name, column in (*columns.items(), ("errors", errors)):
        if len(column) != len(columns["input_lens"]):
            reason = f"{len(column)} entries, but input_lens has {len(columns['input_lens'])}"
            raise document.error((name,), RowError(None, reason))
    for index in range(len(errors)):
        if errors[index]:
            log.drop("failed")
            continue
        row = _row(document, columns, index)
        if row is None:
            log.drop("no output token")
        else:
            log.rows.append(row)
    return log


def _row(document: JsonDocument, columns: dict[str, list[Any]], index: int) -> LoggedRequest | None:
    def number(name: str) -> float:
        try:
            return as_number(columns[name][index], "")
        except RowError as error:
            raise document.error((name, index), RowError(None, error.reason)) from error

    lengths = []
    for name, lowest in (("input_lens", 1), ("output_lens", 0)):
        value = number(name)
        if value != int(value) or not lowest <= value <= MAX_INTEGER:
            reason = f"whole number of at least {lowest} expected, found {value:g}"
            raise document.error((name, index), RowError(None, reason))
        lengths.append(int(value))
    gaps = columns["itls"][index]
    if not isinstance(gaps, list):
        raise document.error(("itls", index), RowError(None, f"list expected, found {kind(gaps)}"))
    total = 0.0
    for place, gap in enumerate(gaps):
        try:
            total += as_number(gap, "")
        except RowError as error:
            raise document.error(("itls", index, place), RowError(None, error.reason)) from error
    start, ttft = number("start_times"), number("ttfts")
    if not lengths[1] or not ttft:
        return None
    return LoggedRequest(str(index), start, start + ttft, start + ttft + total, lengths[0], lengths[1])
