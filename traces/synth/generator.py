"""Generate traces from a built-in table, without any download.

Lengths are drawn by inverse CDF. If prompt and output lengths depend on each other in the data, they are drawn together
with a Gaussian copula. Gaps are gamma distributed unless an arrival process is given. Prompts are unique
unless a sharing model is given.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from math import erf, pi, sin, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from traces.arrivals import ArrivalProcess
from traces.errors import ParameterError
from traces.randomness import uniform
from traces.synth.chat import CHAT, chat_requests, chat_source
from traces.synth.sharing import Sharing, share_prompts
from traces.synth.tables import TABLES, CalibrationTable, LengthTable, load_table
from traces.trace import CONTENT, Segment, Trace, TraceHeader, TraceRequest

Floats = npt.NDArray[np.float64]
_PROMPTS, _OUTPUTS = 1, 2  # stream numbers; changing one changes every generated trace
GENERATORS = (*TABLES, CHAT)


MOST_REQUESTS = 10**7  # of one trace, which is in memory as a whole: about a kilobyte each


def correlated(first: Floats, second: Floats, spearman: float) -> Floats:
    """Uniform numbers whose rank correlation with `first` is `spearman`, made of `first` and an independent `second`.

    The normal correlation that gives a Spearman coefficient s is 2 sin(pi s / 6) (Kruskal 1958).
    """
    linear = 2 * sin(pi * spearman / 6)
    inverse = NormalDist().inv_cdf
    smallest = 2.0**-53
    normal_first = np.array([inverse(max(u, smallest)) for u in first.tolist()])
    normal_second = np.array([inverse(max(u, smallest)) for u in second.tolist()])
    mixed = linear * normal_first + sqrt(1 - linear**2) * normal_second
    return np.array([(1 + erf(z / sqrt(2))) / 2 for z in mixed.tolist()])


def generate_trace(
    table: str,
    *,
    num_requests: int,
    seed: int,
    arrivals: ArrivalProcess | None = None,
    sharing: Sharing | None = None,
) -> Trace:
    """`num_requests` requests of a generator (one of `GENERATORS`); raises ParameterError.

    Without `arrivals` they arrive at the table's recorded rate. Without `sharing` prompts share only what the table
    itself describes.
    """
    if num_requests < 1:
        raise ParameterError("num_requests", f"at least 1 expected, found {num_requests}")
    if num_requests > MOST_REQUESTS:
        raise ParameterError("num_requests", f"at most {MOST_REQUESTS:,} expected, found {num_requests:,}")
    if table not in GENERATORS:
        raise ParameterError("table", f'no table "{table}"; there are {", ".join(GENERATORS)}')
    if table == CHAT:
        return _chat(num_requests, seed, arrivals, sharing)
    chosen = load_table(table)
    process = arrivals or chosen.arrivals.process()
    requests = _lengths_only(chosen, process, num_requests, seed)
    model = sharing or chosen.sharing()
    specification: dict[str, object] = {"table": chosen.specification(), "seed": seed}
    quality = dict(chosen.quality())
    if arrivals is not None:
        specification["arrivals"] = asdict(arrivals)
        quality = {name: value for name, value in quality.items() if not name.startswith("arrival")}
        quality["arrivals"] = arrivals.describe()
    if model is not None:
        specification["sharing"] = asdict(model)
        quality["sharing"] = model.describe()
        requests = share_prompts(requests, model, seed)
    return Trace(_header(table, chosen.licence, specification, quality, num_requests, seed), requests)


def _lengths_only(
    table: CalibrationTable, process: ArrivalProcess, count: int, seed: int
) -> tuple[TraceRequest, ...]:
    first, second = uniform(seed, _PROMPTS, count), uniform(seed, _OUTPUTS, count)
    if table.copula:
        second = correlated(first, second, table.prompt_output_spearman)
    prompts, outputs = _lengths(table.prompt_tokens, first), _lengths(table.output_tokens, second)
    columns = zip(process.times_us(count, seed), prompts, outputs, strict=True)
    return tuple(
        TraceRequest(number, arrival_us, prompt, output, (Segment(None, prompt),))
        for number, (arrival_us, prompt, output) in enumerate(columns)
    )


def _lengths(table: LengthTable, shares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[int]:
    drawn = np.rint(table.quantile(shares))
    lengths: list[int] = np.maximum(drawn, 1).astype(np.int64).tolist()
    return lengths


def _chat(num_requests: int, seed: int, arrivals: ArrivalProcess | None, sharing: Sharing | None) -> Trace:
    if sharing is not None and sharing.model != "system":
        raise ParameterError(
            "sharing", f'{CHAT} shares by conversation; beside it only "system" can be added'
        )
    requests, quality, licence = chat_requests(num_requests, seed, arrivals, sharing)
    specification = {
        "source": chat_source(),
        "seed": seed,
        "arrivals": arrivals and asdict(arrivals),
        "sharing": sharing and asdict(sharing),
    }
    return Trace(_header(CHAT, licence, specification, quality, num_requests, seed), requests)


def _header(
    name: str,
    licence: str,
    specification: Mapping[str, object],
    quality: Mapping[str, float | str],
    num_requests: int,
    seed: int,
) -> TraceHeader:
    text = json.dumps(specification, sort_keys=True)
    return TraceHeader(
        name=name,
        format="generated",
        source=f"generator {name}, seed {seed}",
        key_kind=CONTENT,
        source_block_tokens=None,
        clock_quantum_us=1,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        rows_read=num_requests,
        rows_kept=num_requests,
        licence=licence,
        calibration=quality,
    )
