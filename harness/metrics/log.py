"""The run log: the columns that one replay, simulated or measured, records. Metrics are computed from it alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SLOT_STATES = ("token", "cached", "reserved", "internal", "external", "free")
"""The states of a KV slot; at any instant the six counts sum to the pool's capacity."""

STEP_COLUMNS: Mapping[str, str] = {
    "step": "number of the engine step, from 0",
    "start_s": "virtual time at which the step began, s",
    "seconds": "duration of the step, schedule() to the end of commit(), s",
    "attention_s": "attention time of the step over all layers, s",
    "policy_s": "scheduling and bookkeeping, s; nan where unknown",
    "build_s": "building the batch, s; nan where unknown",
    "forward_s": "forward pass, attention included, s; nan where unknown",
    "sample_s": "sampling, s; nan where unknown",
    "pace": "local pace of the core, by which the measured times are divided; nan where it was not followed",
    "rows": "sequences that ran",
    "decode_rows": "sequences that computed one token after their prompt",
    "prefill_tokens": "query tokens of the other rows",
    "query_tokens": "tokens computed",
    "kv_read_tokens": "KV slots that attention read, summed over rows",
    "sampled_rows": "rows whose logits chose a token",
    "new_blocks": "blocks taken from the pool",
    "copies": "blocks copied on write",
    "frees": "blocks whose content became void",
    "preempted": "requests that lost their blocks",
    "admitted": "requests that entered the batch",
    "hit_tokens": "prompt tokens of the admitted requests that were found in the cache",
    "running": "requests in the batch",
    "waiting": "requests in the queue",
    "token": "slots in state token while the step runs",
    "cached": "slots in state cached",
    "reserved": "slots in state reserved",
    "internal": "slots in state internal",
    "external": "slots in state external",
    "free": "slots in state free",
    "logical_blocks": "blocks that the running sequences refer to, a shared one once per sequence",
    "physical_blocks": "the same blocks, each once",
}
"""Columns of `RunLog.steps` with their meaning; one entry per engine step."""

REQUEST_COLUMNS: Mapping[str, str] = {
    "request_id": "identity of the request in the trace",
    "arrival_s": "arrival, virtual s",
    "first_scheduled_s": "start of the first step that ran a token of it, s; nan where it did not happen",
    "first_token_s": "end of the step that chose its first token, s; nan where it did not happen",
    "finish_s": "end of the step that chose its last token, s; nan where it did not happen",
    "prompt_tokens": "prompt length",
    "output_tokens": "tokens that each of its sequences generates, pinned by the trace",
    "width": "sequences (beams or parallel samples)",
    "hit_tokens": "prompt tokens found in the cache when it was first admitted",
    "resumed_hit_tokens": "tokens found in the cache when it came back after a preemption",
    "recomputed_tokens": "tokens computed again after preemptions",
    "preemptions": "times it lost its blocks",
    "outcome": "0 finished, 1 rejected, 2 unfinished",
}
"""Columns of `RunLog.requests` with their meaning; one entry per request of the trace."""

LOOKUP_COLUMNS: Mapping[str, str] = {
    "request_id": "identity of the request in the trace",
    "asked_blocks": "leading blocks of its prompt that were looked up, as many as leave a token to compute",
    "hit_blocks": "how many of them the prefix cache had",
}
"""Columns of `RunLog.lookups` with their meaning; one entry for each admission of a request with a prefix cache."""

RESIDENCY_COLUMNS: Mapping[str, str] = {
    "lifetime_s": "from the block's allocation until the pool gave it out again, s",
    "idle_s": "the last part of it, in which no request came to use the block, s",
    "gap_1_s": "between the last two times that a further request came to use it, s; nan where there were fewer",
    "gap_2_s": "between the two times before, s; nan where there were fewer",
    "gap_3_s": "and before, s; nan where there were fewer",
}
"""Columns of `RunLog.residency` with their meaning; one entry for each sampled block that was given out again."""

WASTE_COLUMNS: Mapping[str, str] = {
    "token": "K, V or a state that a next token needs",
    "behind_window": "written and no longer seen, in a block that its window has not left as a whole",
    "duplicate": "the same as another page that is in use",
    "reserved": "allocated, and will be written",
    "tail": "allocated, and never will be",
    "padding": "lost because pages have one size",
    "imbalance": "places of padding layers, which make groups equally large",
    "cached": "a reusable prefix that no live sequence refers to; not waste",
    "external": "free, but of no use to the request at the head of the queue: another pool lacks pages",
    "free": "free and usable",
}
"""Columns of `RunLog.waste` with what their bytes hold while a step runs; they sum to the pools."""

GENERATED = "generated"
"""A further column of `RunLog.requests`: tokens of all its sequences; where it is absent, output_tokens x width."""

RETURNED = "returned"
"""A further column of `RunLog.requests`: tokens of the sequences that answer the request. They are the best sequence of
a beam search and every parallel sample. Where the column is absent, all generated tokens are returned."""


class RunLogError(ValueError):
    """A log that cannot be measured: a column is missing or has the wrong length."""


class Outcome(IntEnum):
    """The end of a request."""

    FINISHED = 0
    REJECTED = 1
    UNFINISHED = 2


@dataclass(frozen=True)
class RunLog:
    """One replay of a trace, simulated or measured.

    `steps` has one entry per engine step in each of `STEP_COLUMNS`, `requests` one entry per request of the trace in
    each of `REQUEST_COLUMNS`. `itl_s` holds inter-token gaps in seconds, each standing for `itl_weight` gaps.
    `capacity_slots` is the pool in KV slots (tokens), `span_s` the virtual time at the end of the last step. Where
    they are kept, `kv_events` are the changes of the prefix cache (`traces.formats.kv_events`), `lookups` its lookups,
    one entry per lookup in each of `LOOKUP_COLUMNS`, and `residency` its sampled blocks. With several `replicas` the
    steps are those of all of them, and slots and `capacity_slots` those of the replica that ran the step. `waste` is
    kept where layers are in groups: int64 bytes of each step in each of `WASTE_COLUMNS`, and in `group_0` and following
    what each group has in use. `optimal_hit_tokens` are the most that any order of eviction could have found, where
    they were asked for.

    Raises `RunLogError` where a column is missing or columns differ in length.
    """

    steps: Mapping[str, Column]
    requests: Mapping[str, Column]
    itl_s: FloatArray
    itl_weight: FloatArray
    block_size: int
    capacity_slots: int
    kv_bytes_per_token: int
    span_s: float
    kv_events: bytes | None = None
    lookups: Mapping[str, Column] | None = None
    residency: Mapping[str, Column] | None = None
    replicas: int = 1
    waste: Mapping[str, Column] | None = None
    optimal_hit_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_columns("steps", self.steps, STEP_COLUMNS)
        _check_columns("requests", self.requests, REQUEST_COLUMNS)
        if len(self.itl_s) != len(self.itl_weight):
            raise RunLogError(f"itl_s has {len(self.itl_s)} samples, itl_weight has {len(self.itl_weight)}")


def empty_log(block_size: int, capacity_slots: int, kv_bytes_per_token: int) -> RunLog:
    """The log of a run whose rows were not kept: every column, and no entry."""
    none = np.empty(0)
    return RunLog(
        steps=dict.fromkeys(STEP_COLUMNS, none),
        requests=dict.fromkeys(REQUEST_COLUMNS, none),
        itl_s=none,
        itl_weight=none,
        block_size=block_size,
        capacity_slots=capacity_slots,
        kv_bytes_per_token=kv_bytes_per_token,
        span_s=0.0,
    )


def _check_columns(table: str, columns: Mapping[str, Column], expected: Mapping[str, str]) -> None:
    missing = [name for name in expected if name not in columns]
    if missing:
        raise RunLogError(f"{table}: missing columns {', '.join(missing)}")
    lengths = {name: len(columns[name]) for name in expected}
    if len(set(lengths.values())) > 1:
        raise RunLogError(f"{table}: columns differ in length: {lengths}")
