"""How far a twin can be trusted: its errors by load and by length of prompts."""

import numpy as np

from harness.twin.log import EngineLog, IntArray
from harness.twin.prediction import PredictedRun, errors_of

_FEWEST = 10  # requests of a part whose errors are said


def errors_by_part(prediction: PredictedRun, log: EngineLog, places: IntArray) -> list[str]:
    """The errors of the requests at `places`, in sentences by their load and by the lengths of their prompts."""
    requests = log.requests.take(places)
    running, waiting = log.requests.under_way(requests.entered_s)
    found = []
    for name, values in (
        ("in flight when they came", running + waiting),
        ("prompt tokens", requests.prompt_tokens),
    ):
        middle = float(np.median(values))
        for words, chosen in (
            (f"at most {middle:,.0f} {name}", values <= middle),
            (f"more than {middle:,.0f} {name}", values > middle),
        ):
            if chosen.sum() >= _FEWEST:
                errors = errors_of(prediction, log, places[chosen])
                found.append(f"{errors.requests:,} requests with {words}: {errors}")
    return found
