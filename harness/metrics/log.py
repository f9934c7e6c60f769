"""The run log: the columns that one replay, simulated or measured, records. Metrics are computed from it alone."""

from collections import namedtuple
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from engine.core.plan import SlotUsage, StepCounts

T = TypeVar("T")
Column = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SLOT_STATES = ("token", "cached", "reserved", "internal", "external", "free")
"""The states of a KV slot; at any instant the six counts sum to the pool's capacity."""

PHASES = ("policy_s", "build_s", "forward_s", "sample_s", "pace")
"""Parts of a measured step: scheduling and bookkeeping, building the batch, forward pass with attention, and sampling,
in s; `pace` is the local pace of the core, by which measured times are divided. NaN where unknown."""

ROW_COUNTS = (
    "rows",  # sequences that ran
    "decode_rows",  # of them, those that computed one token after their prompt
    "prefill_tokens",  # query tokens of the others
    "query_tokens",  # tokens computed
    "kv_read_tokens",  # KV slots that attention read, summed over rows
    "sampled_rows",  # rows whose logits chose a token
)
STEP_COUNTS = (*ROW_COUNTS, *StepCounts._fields)
"""What is counted of a step; a count of `StepPlan.counts` is one here."""

STEP_RECORD = ("start_ns", "ns", *STEP_COUNTS, *SlotUsage._fields)
"""The record of a step, whole numbers: when it began and how long it took, what it did, and the pool while it ran. The
policy core and the compiled replay write the same."""

COLUMN: Any = namedtuple("COLUMN", STEP_RECORD)(*range(len(STEP_RECORD)))
"""The place of each number in the record, by its name: `COLUMN.rows`."""

STEP_COLUMNS = ("step", "start_s", "seconds", "attention_s", *PHASES, *STEP_RECORD[2:])
"""Columns of `RunLog.steps`; one entry per engine step. `step` counts from 0; `start_s` is the virtual time at which it
began, `seconds` its duration from schedule() to the end of commit(), `attention_s` that of attention in all layers."""


class RequestRow(NamedTuple, Generic[T]):
    """The record of a request that ended, whole numbers; times are in ns, NEVER if it did not happen."""

    request_id: T  # identity of the request in the trace
    arrival_ns: T
    scheduled_ns: T  # start of the first step that ran a token of it
    first_token_ns: T  # end of the step that chose its first token
    finish_ns: T  # end of the step that chose its last token, or ended its static batch
    prompt_tokens: T
    output_tokens: T  # tokens that each of its sequences generates, pinned by the trace
    width: T  # sequences (beams or parallel samples)
    hit_tokens: T  # prompt tokens found in the cache when it was first admitted
    resumed_hit_tokens: T  # tokens found in the cache when it came back after a preemption
    recomputed_tokens: T  # tokens computed again after preemptions
    preemptions: T  # times it lost its blocks
    outcome: T  # of `Outcome`
    generated: T  # tokens of all its sequences
    # tokens of the sequences that answer it: the best one of a beam search, and every parallel sample
    returned: T


REQUEST_COLUMNS = (
    *("request_id", "arrival_s", "first_scheduled_s", "first_token_s", "finish_s"),
    *RequestRow._fields[5:-2],
)
"""Columns of `RunLog.requests`: those of `RequestRow` with times in s, nan where it did not happen."""

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
    "behind_window": "written and no longer seen, in a block that is not released yet",
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

GENERATED, RETURNED = RequestRow._fields[-2:]
"""Further columns of `RunLog.requests`, which empty logs and those of before lack: without GENERATED it is
output_tokens x width; without RETURNED all generated tokens are returned."""


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
    they were asked for. `tiers` are the metrics of tiers below the pool, where there are any.

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
    tiers: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        _check_columns("steps", self.steps, STEP_COLUMNS)
        _check_columns("requests", self.requests, REQUEST_COLUMNS)
        if len(self.itl_s) != len(self.itl_weight):
            raise RunLogError(f"itl_s has {len(self.itl_s)} samples, itl_weight has {len(self.itl_weight)}")

    @property
    def outcomes(self) -> dict[str, int]:
        """How many requests ended in each way, by the name of the `Outcome`."""
        ends = self.requests["outcome"]
        return {outcome.name.lower(): int((ends == outcome).sum()) for outcome in Outcome}


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


def _check_columns(table: str, columns: Mapping[str, Column], expected: Collection[str]) -> None:
    missing = [name for name in expected if name not in columns]
    if missing:
        raise RunLogError(f"{table}: missing columns {', '.join(missing)}")
    lengths = {name: len(columns[name]) for name in expected}
    if len(set(lengths.values())) > 1:
        raise RunLogError(f"{table}: columns differ in length: {lengths}")
