"""Attention measured in the engine on a grid of shapes, one shape at a time, for the table model."""

from collections.abc import Callable

import numpy as np

from engine.core.options import CachePolicy, SchedulerLimits
from harness.calibrate.design import SEED, Budget
from harness.calibrate.store import GRID_BLOCK_SIZE as BLOCK_SIZE
from harness.config.schema import RunConfig
from harness.cost.grid import Grid, GridPoint, grid_of
from harness.measure.engine import measure
from harness.measure.yardstick import Reading
from harness.replay.features import feature_index
from harness.replay.recorder import MeasuredRun
from harness.workload.shapes import PoolShape, pool_shape
from harness.workload.workload import Workload
from traces.trace import CONTENT, Segment, Trace, TraceHeader, TraceRequest

ROWS = (1, 4, 16, 64)
LENGTHS = (16, 128, 512)
CHUNKS = (16, 128)
CONTEXTS = (0, 256, 512)
_STEPS = 6  # decode steps a shape
_MOST_TOKENS = 16_384  # of one shape's rows
_CORNERS = 2  # values of an axis that are measured even when the time is up
_DECODE, _KV, _PREFILLS, _TOKENS, _PREFILL_KV = feature_index(
    ("decode_rows", "decode_kv", "prefill_rows", "prefill_tokens", "prefill_kv")
)


def measure_grids(
    config: RunConfig, progress: Callable[[str], None], budget: Budget, reference: Reading | None
) -> dict[str, Grid]:
    """`decode` over (rows, KV slots a row) and `prefill` over (chunk, context), in seconds over all layers.

    When the time is up, larger shapes are left out; the fitted model prices them.
    """
    longest = min(pool_shape(config).max_model_len, max(LENGTHS) + _STEPS)
    decode: list[GridPoint] = []
    for length in (length for length in LENGTHS if length + _STEPS <= longest):
        progress(f"grid: {length} KV slots a row")
        for place, rows in enumerate(rows for rows in ROWS if rows * length <= _MOST_TOKENS):
            if place < _CORNERS or budget.left():
                decode.append(_decode_point(config, rows, length, reference))
    prefill: list[GridPoint] = []
    for chunk in CHUNKS:
        progress(f"grid: chunks of {chunk} tokens")
        prefill += _prefill_points(config, chunk, longest, reference)
    return {"decode": grid_of(decode), "prefill": grid_of(prefill)}


def _decode_point(config: RunConfig, rows: int, length: int, reference: Reading | None) -> GridPoint:
    """Median attention of steps in which `rows` sequences decode, scaled to `length` slots each."""
    half = _STEPS // 2
    run = _run(config, rows, max(1, length - half), _STEPS, rows * length, reference)
    steps = run.recorder.features
    chosen = (steps[:, _DECODE] == rows) & (steps[:, _PREFILLS] == 0)
    middle = np.argmin(np.abs(steps[chosen, _KV] / rows - length))
    nearest = run.log.steps["attention_s"][chosen][max(0, middle - 1) : middle + 2]
    return rows, length, float(np.median(nearest))


def _prefill_points(
    config: RunConfig, chunk: int, longest: int, reference: Reading | None
) -> list[GridPoint]:
    """Attention of one request's chunks of `chunk` tokens, at each of CONTEXTS that its prompt reaches."""
    prompt = min(longest - 1, max(CONTEXTS) + chunk)
    run = _run(config, 1, prompt, 1, chunk, reference)
    features, seconds = run.recorder.features, run.log.steps["attention_s"]
    context = features[:, _PREFILL_KV] - features[:, _TOKENS]
    found: list[GridPoint] = []
    for wanted in CONTEXTS:
        at = (features[:, _PREFILLS] == 1) & (features[:, _TOKENS] == chunk) & (context == wanted)
        if at.any():
            found.append((chunk, wanted, float(np.median(seconds[at]))))
    return found


def _run(
    config: RunConfig, rows: int, prompt: int, output: int, budget: int, reference: Reading | None
) -> MeasuredRun:
    """Run `rows` equal requests at once."""
    blocks = rows * -(-(prompt + output) // BLOCK_SIZE)
    base = pool_shape(config)
    pool = PoolShape(
        CachePolicy.paged, blocks, BLOCK_SIZE, base.kv_bytes_per_token, prompt + output, prefix_caching=False
    )
    requests = tuple(
        TraceRequest(number, 0, prompt, output, (Segment(None, prompt),)) for number in range(rows)
    )
    header = TraceHeader("grid", "generated", "calibration plan", CONTENT, None, 1, "", rows, rows)
    limits = SchedulerLimits(max(budget, rows), max_running=rows, max_model_len=prompt + output)
    workload = Workload(Trace(header, requests), pool, limits)
    return measure(config, workload, seed=SEED, reference=reference)
