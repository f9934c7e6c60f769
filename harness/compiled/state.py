"""The state of the compiled replay: arrays in named tuples, whose fields numba can access."""

from typing import Any, NamedTuple

import numpy as np

from harness.metrics.log import FloatArray, IntArray

NEVER = -1

# -- entries of `ReplayState.at` ---------------------------------------------------------------------------------------
NOW = 0  # ns
ARRIVED = 1  # requests that have arrived
HEAD = 2  # of the queue: requests that have entered the batch
TAIL = 3  # requests that have been queued
RUNNING = 4  # rows of the batch
STEADY = 5  # leading rows that are steady decoders
EMPTY = 6  # free blocks without reusable content
CACHED = 7  # free blocks that hold a prefix
WRITTEN = 8  # slots in use that are written
INTERNAL = 9  # slots in use that will never be written
VOIDED = 10  # blocks whose content was discarded since the last plan
LAST_END = 11  # ns at which the last step ended
ENDED = 12  # requests that have ended
STEPS = 13  # steps in the log
GAPS = 14  # gaps in the log
OLDEST = 15  # the entry of `cached` that is evicted next
NEWEST = 16  # one past the entry that was released last
TAKEN = 17  # blocks taken in the step under way
ADMITTED = 18  # requests admitted in it
PREEMPTED = 19  # requests that lost their blocks in it
HITS = 20  # slots that the admitted ones found in the cache
NUM_SCALARS = 21

# -- columns of `StepLog.counts` -------------------------------------------------------------------------------
COUNTS = (
    *(
        "start_ns",
        "ns",
        "rows",
        "decode_rows",
        "prefill_tokens",
        "query_tokens",
        "kv_read_tokens",
        "sampled_rows",
    ),
    *("new_blocks", "frees", "admitted", "preempted", "hit_tokens", "running", "waiting"),
    *("token", "cached", "internal", "free", "physical_blocks"),
)


_COUNTED = (
    "generated",
    "lost",
    "preemptions",
    "resumed_hits",
    "recomputed",
)  # of `RequestStates`; they start at 0


class RequestInputs(NamedTuple):
    """The requests in order of arrival, each int64 `[requests]`; `fits` is 0 for those that can never be served."""

    arrival_ns: IntArray
    prompt: IntArray
    output: IntArray
    fits: IntArray


class Rules(NamedTuple):
    """Limits of the scheduler and the pool. `prefill_cap` 0 is none; flags are 0 or 1."""

    budget: int
    max_running: int
    chunked: int
    whole_prompt: int
    prefill_cap: int
    watermark_blocks: int
    block_size: int
    keeps: int  # whether released blocks stay findable until they are taken again


class Prices(NamedTuple):
    """A cost model as numbers: `rates` of the kind `kind`, for a linear one over the features `columns`.

    The first `attention` terms are the attention's; everything is scaled by `ratio`.
    """

    kind: int
    rates: FloatArray
    columns: IntArray
    attention: int
    ratio: float


class Batch(NamedTuple):
    """The running requests in order of admission, each int64 `[max_running]`."""

    request: IntArray
    computed: IntArray
    generated: IntArray
    blocks: IntArray
    query: IntArray  # query tokens in the step under way
    last_token: IntArray  # ns


class RequestStates(NamedTuple):
    """The state of each request, int64 `[requests]`; times are in ns. `queue` and `ended` list requests in order.

    The fields from `last_token` to `lost` keep what a preempted request had: the time of its last token, the entry of
    `CachedTables` that holds its remaining KV, tokens generated, tokens whose KV was lost. The last three count what
    preemptions cost.
    """

    scheduled: IntArray
    first_token: IntArray
    finish: IntArray
    queue: IntArray
    ended: IntArray
    last_token: IntArray
    cached_entry: IntArray
    generated: IntArray
    lost: IntArray
    preemptions: IntArray
    resumed_hits: IntArray
    recomputed: IntArray


class CachedTables(NamedTuple):
    """Cached blocks, one entry for each released block table in order of release.

    `owner` is the request that may come back for the blocks (NEVER: none), `blocks` their number.
    """

    owner: IntArray
    blocks: IntArray


class StepLog(NamedTuple):
    """Steps since the log was last emptied, and the gaps between tokens in them, with how often each occurred."""

    counts: IntArray  # [steps, COUNTS]
    attention_s: FloatArray  # [steps]
    gap_ns: IntArray
    gap_weight: IntArray


class ReplayState(NamedTuple):
    """A replay under way. `at` holds the scalars (NOW, ARRIVED, …), `after_prefill[0]` the feature of that name."""

    inputs: RequestInputs
    rules: Rules
    prices: Prices
    at: IntArray
    after_prefill: FloatArray
    features: FloatArray
    batch: Batch
    requests: RequestStates
    cached: CachedTables
    log: StepLog


def new_state(
    inputs: RequestInputs, rules: Rules, prices: Prices, num_blocks: int, features: int, log_steps: int
) -> ReplayState:
    """A replay at its beginning, over an empty pool; its log holds `log_steps` steps."""
    num_requests, rows = len(inputs.prompt), rules.max_running
    firsts = [0 if name in _COUNTED else NEVER for name in RequestStates._fields]
    at = np.zeros(NUM_SCALARS, dtype=np.int64)
    at[EMPTY] = num_blocks
    gaps = 2 * log_steps + rows
    return ReplayState(
        inputs,
        rules,
        prices,
        at,
        np.zeros(1),
        np.zeros(features),
        Batch(*_columns(len(Batch._fields), rows)),
        RequestStates(*(np.full(num_requests, first, dtype=np.int64) for first in firsts)),
        CachedTables(*_columns(2, 2 * min(num_blocks, num_requests) + 2)),
        StepLog(
            np.zeros((log_steps, len(COUNTS)), dtype=np.int64),
            np.zeros(log_steps),
            *_columns(2, gaps),
        ),
    )


def _columns(count: int, length: int) -> tuple[Any, ...]:
    return tuple(np.zeros(length, dtype=np.int64) for _ in range(count))
