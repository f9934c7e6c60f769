"""Settings that an engine's log does not name, told by its ceilings.

Where requests wait while the number that runs stands still, that number is the engine's limit (`max_num_seqs`). Where
the share of the pool in use is logged, the tokens that the running requests hold at the same time give its size.
"""

import numpy as np

from harness.twin.log import LoggedRequests, Timeseries
from harness.twin.settings import EngineSettings
from traces.trace import Trace

INFERRED = "inferred"  # how the origin of such a setting begins
_USUAL = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
_NEAR = 0.03  # below a usual number: requests in their prefill are not seen to run
_TICKS = 2000
_FLAT = 0.07  # below the top is still at the top
_MOSTLY = 0.7  # of the time in which others wait
_LONG = 0.1  # of the run, in which others wait
_EVEN = 0.05  # a spread of the ratios beyond which they tell no size
_FEWEST = 10  # instants


def with_ceilings(
    settings: EngineSettings, requests: LoggedRequests, series: Timeseries | None, workload: Trace
) -> EngineSettings:
    """The settings, with those that are not given and that a ceiling of the log shows."""
    replicas = settings.data_parallel or 1
    most = _most_running(requests)
    if settings.max_running is None and most is not None and replicas == 1:
        origin = f"{INFERRED}: no more ran while others waited"
        settings = settings.changed(origin, max_running=most)
    tokens = _pool_tokens(requests, series, workload)
    if not settings.knows_pool and tokens is not None and replicas == 1:
        origin = f"{INFERRED} from the KV use and the tokens that were held"
        settings = settings.changed(origin, pool_tokens=tokens)
    return settings


def _most_running(requests: LoggedRequests) -> int | None:
    """The number at which running requests stand still while others wait; None where they do not."""
    ticks = np.linspace(float(requests.entered_s.min()), float(requests.last_token_s.max()), _TICKS)
    running, waiting = requests.under_way(ticks)
    top = int(running.max())
    waits = waiting >= max(3, 0.05 * top)
    if top < _USUAL[0] - 1 or waits.mean() < _LONG:
        return None
    if (running[waits] >= (1 - _FLAT) * top).mean() < _MOSTLY:
        return None
    return next((usual for usual in _USUAL if (1 - _NEAR) * usual <= top <= usual), top)


def _pool_tokens(requests: LoggedRequests, series: Timeseries | None, workload: Trace) -> int | None:
    """The slots of the pool where its use is logged; None where it is not, or prompts share blocks."""
    shares = any(segment.key is not None for row in workload.requests for segment in row.segments)
    if series is None or series.kv_use is None or shares:
        return None
    starts = requests.first_token_s if requests.scheduled_s is None else requests.scheduled_s
    held = requests.held(series.at_s, starts)
    known = (series.kv_use > 0.1 * float(series.kv_use.max())) & (held > 0)
    if known.sum() < _FEWEST or not series.kv_use.max() > 0:
        return None
    low, middle, high = np.quantile(held[known] / series.kv_use[known], (0.25, 0.5, 0.75))
    return round(float(middle)) if high - low <= _EVEN * middle else None
