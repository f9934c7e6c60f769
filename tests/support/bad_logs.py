"""Bad files of every format of traces and of logs: one generator puts one impossible scalar into a good file.

`bad_files()` gives name, content and what is wrong. A reader that reads one believes what cannot be; one that raises
anything but a `TraceError` has a hole. Each format is a good text and the places of its scalars with what each must be.
"""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from trace_samples import BAILIAN, CANONICAL, CONVERSATION, MOONCAKE, SERVINGSIM, VIDUR, jsonl

DATA = Path(__file__).resolve().parents[1] / "data" / "deployments"
# JSON texts that are no count, and no time or duration.
NO_NUMBER = ('"x"', "[]", "{}", "true", "NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"1_0"', '"٣"')
NO_TIME = (*NO_NUMBER, "1e300", "-1e300", f"{'9' * 4400}")
NO_COUNT = (*NO_NUMBER, "-1", "2.5", "1e300", "-3e5", f"1{'0' * 30}", f"{'9' * 4400}", "0.1")
WRONG = {
    "count": NO_COUNT,
    "tokens": (*NO_COUNT, "0"),
    "cached": (*NO_COUNT, "999999"),
    "time": NO_TIME,
    "length": (*NO_TIME, "-1"),  # of a time, which is not negative
    "epoch": (*NO_TIME, "1.8e15"),  # of a wall clock in seconds, which is no year of ours
}


class Format(NamedTuple):
    """A good text, its file's name, and the kind of the scalar at each place: a path in JSON, or a column of a CSV."""

    name: str
    file: str
    text: str
    places: Mapping[tuple[Any, ...], str]
    trace: str | None = None  # the format's name for `read_trace`; None: a log of an engine


class BadFile(NamedTuple):
    """A file that no reader may take."""

    format: Format
    what: str
    content: bytes


def _csv(rows: list[str]) -> str:
    return "\n".join(rows) + "\n"


_PLAIN = {
    "prompt_tokens": 50,
    "output_tokens": 10,
    "arrival_s": 1.0,
    "queued_s": 1.1,
    "scheduled_s": 1.2,
    "first_token_s": 1.5,
    "last_token_s": 2.0,
    "cached_tokens": 5,
}
_PLAIN_KINDS = {
    "prompt_tokens": "tokens",
    "output_tokens": "count",
    "cached_tokens": "cached",
    **dict.fromkeys(("arrival_s", "queued_s", "scheduled_s", "first_token_s", "last_token_s"), "epoch"),
}
_SPAN = {
    "gen_ai.latency.time_to_first_token": 0.5,
    "gen_ai.latency.e2e": 1.0,
    "gen_ai.latency.time_in_queue": 0.1,
    "gen_ai.latency.time_in_model_prefill": 0.3,
    "gen_ai.latency.time_in_model_decode": 0.5,
    "gen_ai.usage.prompt_tokens": 50,
    "gen_ai.usage.completion_tokens": 10,
}


def _spans_jaeger() -> Format:
    tags = [{"key": key, "value": value} for key, value in _SPAN.items()]
    spans = [{"spanID": name, "startTime": 1_700_000_000_000_000, "tags": deepcopy(tags)} for name in "ab"]
    kinds = ["length"] * 5 + ["tokens", "count"]
    places = {("data", 0, "spans", 1, "tags", at, "value"): kind for at, kind in enumerate(kinds)}
    places[("data", 0, "spans", 1, "startTime")] = "count"
    return Format("jaeger", "spans.json", json.dumps({"data": [{"spans": spans}]}), places)


def _spans_otlp() -> Format:
    def attribute(key: str, value: float) -> dict[str, Any]:
        kind = "doubleValue" if isinstance(value, float) else "intValue"
        return {"key": key, "value": {kind: value if isinstance(value, float) else str(value)}}

    attributes = [attribute(*each) for each in _SPAN.items()]
    span = {"spanId": "a", "startTimeUnixNano": "1700000000000000000", "attributes": attributes}
    record = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    other = json.loads(json.dumps(record).replace('"spanId": "a"', '"spanId": "b"'))
    inside = ("resourceSpans", 0, "scopeSpans", 0, "spans", 0)
    places = {(1, *inside, "attributes", at, "value", "doubleValue"): "length" for at in range(5)}
    places |= {
        (1, *inside, "attributes", at, "value", "intValue"): kind
        for at, kind in ((5, "tokens"), (6, "count"))
    }
    places[(1, *inside, "startTimeUnixNano")] = "count"
    return Format("otlp", "spans.jsonl", jsonl([other, record]), places)


def _recorder() -> Format:
    names = {
        "input_toks": 50,
        "output_toks": 10,
        "arrival_time": 1.7e9,
        "queued_ts": 5.0,
        "scheduled_ts": 5.1,
    }
    record = {"request_id": "a", **names, "first_token_ts": 5.5, "last_token_ts": 6.0}
    kinds = {"input_toks": "tokens", "output_toks": "count", "arrival_time": "epoch"}
    kinds |= dict.fromkeys(("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"), "epoch")
    return Format(
        "recorder",
        "requests.jsonl",
        jsonl([record, record | {"request_id": "b"}]),
        {(1, key): kind for key, kind in kinds.items()},
    )


def _guidellm() -> Format:
    document = json.loads((DATA / "guidellm" / "benchmarks.json").read_text())
    request = ("benchmarks", 0, "requests", "successful", 1)
    times = {
        (*request, "info", "timings", f"{name}"): "epoch"
        for name in ("request_start", "first_token_iteration", "last_token_iteration")
    }
    return Format(
        "guidellm",
        "b.json",
        json.dumps(document),
        {**times, (*request, "output_tokens"): "count", (*request, "prompt_tokens"): "tokens"},
    )


def _bench() -> Format:
    document = json.loads((DATA / "vllm-bench" / "result.json").read_text())
    places = {("input_lens", 1): "tokens", ("output_lens", 1): "count", ("ttfts", 1): "length"}
    places |= {("start_times", 1): "epoch", ("itls", 1, 0): "length"}
    return Format("bench", "result.json", json.dumps(document), places)


def _sglang() -> Format:
    lines = (DATA / "sglang" / "requests-json.log").read_text().splitlines()
    records = [json.loads(line[line.index("{") :]) for line in lines if "request.finished" in line]
    kinds = {"prompt_tokens": "tokens", "completion_tokens": "count", "cached_tokens": "cached"}
    kinds |= {"request_received_ts": "epoch", "request_finished_ts": "epoch", "first_token_latency": "length"}
    places = {(1, "out", "meta_info", name): kind for name, kind in kinds.items()}
    return Format("sglang", "requests.log", jsonl(records), places)


def _aiperf() -> Format:
    lines = [json.loads(line) for line in (DATA / "aiperf" / "profile_export.jsonl").read_text().splitlines()]
    kinds = {"time_to_first_token": "length", "request_latency": "length", "usage_completion_tokens": "count"}
    kinds |= {"usage_prompt_tokens": "tokens"}
    places = {(1, "metrics", name, "value"): kind for name, kind in kinds.items()}
    places[(1, "metadata", "request_start_ns")] = "time"
    return Format("aiperf", "p.jsonl", jsonl(lines), places)


def _of_traces() -> Iterator[Format]:
    kinds = {("arrived_at",): "length", ("num_prefill_tokens",): "tokens", ("num_decode_tokens",): "count"}
    yield Format("vidur", "t.csv", VIDUR, kinds, "vidur")
    yield Format(
        "simple",
        "t.jsonl",
        jsonl([{"arrival_s": at, "prompt_tokens": 30, "output_tokens": 5} for at in range(3)]),
        {(1, "arrival_s"): "length", (1, "prompt_tokens"): "tokens", (1, "output_tokens"): "count"},
        "simple",
    )
    yield Format(
        "mooncake",
        "t.jsonl",
        jsonl(MOONCAKE),
        {
            (1, "timestamp"): "count",
            (1, "input_length"): "tokens",
            (1, "output_length"): "count",
            (1, "hash_ids", 0): "count",
        },
        "mooncake",
    )
    yield Format(
        "bailian",
        "t.jsonl",
        jsonl(BAILIAN),
        {
            (1, "timestamp"): "length",
            (1, "input_length"): "tokens",
            (1, "output_length"): "count",
            (1, "hash_ids", 0): "count",
        },
        "bailian",
    )
    yield Format(
        "servingsim",
        "t.jsonl",
        jsonl(SERVINGSIM),
        {(0, "arrival_time_ns"): "count", (0, "input_toks"): "tokens"},
        "servingsim",
    )
    yield Format(
        "pagetwin",
        "t.jsonl",
        jsonl(CANONICAL),
        {(1, "arrival_us"): "count", (1, "prompt_tokens"): "tokens", (1, "output_tokens"): "tokens"},
        "pagetwin",
    )
    yield Format(
        "agentic",
        "t.json",
        json.dumps(CONVERSATION),
        {("requests", 0, "t"): "length", ("requests", 0, "in"): "tokens", ("requests", 0, "out"): "count"},
        "agentic",
    )


FORMATS: tuple[Format, ...] = (
    Format(
        "plain",
        "log.jsonl",
        jsonl([_PLAIN, {**_PLAIN, "arrival_s": 1.05}]),
        {(1, key): kind for key, kind in _PLAIN_KINDS.items()},
    ),
    Format(
        "plain-csv",
        "log.csv",
        _csv([",".join(_PLAIN), *[",".join(map(str, _PLAIN.values()))] * 2]),
        {(key,): kind for key, kind in _PLAIN_KINDS.items()},
    ),
    Format(
        "series",
        "timeseries.csv",
        _csv(
            [
                "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct",
                "1,0,0,1,0,10",
                "2,0,0,1,0,10",
            ]
        ),
        {("t",): "length", ("running",): "length", ("waiting",): "length", ("kv_cache_pct",): "length"},
    ),
    _spans_jaeger(),
    _spans_otlp(),
    _recorder(),
    _guidellm(),
    _bench(),
    _aiperf(),
    _sglang(),
    *_of_traces(),
)


def bad_files() -> Iterator[BadFile]:
    """Every format with every wrong value at every place."""
    for form in FORMATS:
        for place, kind in form.places.items():
            for value in WRONG[kind]:
                if (content := _with(form, place, value)) is not None:
                    yield BadFile(form, f"{'.'.join(map(str, place))} = {value[:24]}", content.encode())


def _with(form: Format, place: tuple[Any, ...], value: str) -> str | None:
    """The text with a JSON text in place of a scalar; None where it means nothing there."""
    if form.file.endswith(".csv"):
        header, first, last = form.text.splitlines()
        cells = last.split(",")
        plain = value.strip('"')
        if plain in ("[]", "{}"):
            return None
        cells[header.split(",").index(place[0])] = plain
        return _csv([header, first, ",".join(cells)])
    if form.file.endswith(".json"):
        return _replaced(json.loads(form.text), place, value)
    lines = form.text.splitlines()
    lines[place[0]] = _replaced(json.loads(lines[place[0]]), place[1:], value)
    return "\n".join(lines) + "\n"


def _replaced(document: Any, place: tuple[Any, ...], value: str) -> str:
    inside = document
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = "@here@"
    return json.dumps(document).replace('"@here@"', value)
