"""Run logs made by hand: every column zero unless a test says otherwise."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from harness.metrics.log import REQUEST_COLUMNS, STEP_COLUMNS, RunLog

Columns = Mapping[str, Sequence[float]]
MakeLog = Callable[..., RunLog]


def _table(names: Mapping[str, str], given: Columns, size: int) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(given.get(name, [0.0] * size), dtype=np.float64) for name in names}


@pytest.fixture(scope="session")
def make_log() -> MakeLog:
    def make(
        *,
        steps: Columns | None = None,
        requests: Columns | None = None,
        itl: tuple[Sequence[float], Sequence[float]] = ((), ()),
        capacity: int = 100,
        span: float = 10.0,
    ) -> RunLog:
        steps, requests = steps or {}, requests or {}
        num_steps = len(next(iter(steps.values()), ()))
        num_requests = len(next(iter(requests.values()), ()))
        return RunLog(
            steps=_table(STEP_COLUMNS, steps, num_steps),
            requests=_table(REQUEST_COLUMNS, requests, num_requests),
            itl_s=np.asarray(itl[0], dtype=np.float64),
            itl_weight=np.asarray(itl[1], dtype=np.float64),
            block_size=4,
            capacity_slots=capacity,
            kv_bytes_per_token=8,
            span_s=span,
        )

    return make
