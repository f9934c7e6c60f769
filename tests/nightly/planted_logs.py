"""Held-out errors of a fit on logs that the simulator wrote, with constants that the fit must find.

    python tests/nightly/planted_logs.py [CASE ...] [--seeds N] [--drawn N]     # so many cases, others every date

Each case is a GPU, a model and a load. For each seed, the constants that a log can teach are drawn around the
description's, with the spreads that the fit takes as priors; 300 requests are replayed with them and kept as a folder
as an engine would leave it (a CSV of times, the engine's arguments). `calibrate --from-log` then knows the
description alone: it fits the first 75 and is judged on the others. This shows what the fit can learn from so few
requests, not that the form is right: that takes logs of real engines.

The cases of clients that wait (capped, closed, multi-turn) are logs as a load generator keeps them: requests are sent
through a front end whose constants are drawn too, and the reader must find the client.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from tiers import nights_share

from harness.config.schema import DeviceConfig
from harness.twin.configured import Configured, configured
from harness.twin.fit import Fit, fit_device
from harness.twin.log import EngineLog
from harness.twin.prediction import Errors, predictor
from harness.twin.reading import read_engine_log
from harness.twin.residuals import CONSTANTS, LINK_CONSTANTS
from traces.trace import AFTER, CHAINED, OPEN, Client, ClientKind, Segment, Trace, TraceHeader, TraceRequest

REQUESTS = 300
GOAL_TPOT, GOAL_TTFT = 0.03, 0.05
NOISE_S = 0.001  # of a logged time, either way: a delay that all had would be a constant that no fit has
TURNS, THINK_S = 4, 5.0


@dataclass(frozen=True)
class Case:
    """A deployment. `burst` is the coefficient of variation of the gaps between arrivals; 1 is Poisson."""

    device: str
    model: str
    per_s: float
    max_num_seqs: int = 128
    burst: float = 1.0
    parallel: int = 1
    skew: float = 0.0  # of the popularity of experts, which the fit does not know
    client: Client | None = None  # who sends, through a front end; None: an open loop, logged by the engine
    users: int = 0  # multi-turn: conversations under way at once


CASES = {
    "rtx4090": Case("rtx4090", "meta-llama/Llama-3.1-8B", 4.0),
    "a100": Case("a100_80gb", "meta-llama/Llama-3.1-8B", 8.0),
    "h100-tp2": Case("h100", "Qwen/Qwen3-32B", 6.0, parallel=2),
    "moe": Case("rtx_pro_6000", "Qwen/Qwen3-30B-A3B", 6.0, skew=0.6),
    "saturated": Case("rtx_pro_6000", "meta-llama/Llama-3.1-8B", 10.0),
    "bursts": Case("l40s", "meta-llama/Llama-3.1-8B", 4.0, burst=2.0),
    "bursts-h100": Case("h100", "meta-llama/Llama-3.1-8B", 18.0, burst=2.0),
    "open-client": Case("h100", "meta-llama/Llama-3.1-8B", 10.0, client=Client()),
    "capped": Case("h100", "meta-llama/Llama-3.1-8B", 16.0, client=Client(ClientKind.capped, 24, 300)),
    "capped-often": Case("l40s", "meta-llama/Llama-3.1-8B", 4.5, client=Client(ClientKind.capped, 20, 300)),
    "closed": Case("rtx4090", "meta-llama/Llama-3.1-8B", 1e5, client=Client(ClientKind.closed, 8, 300)),
    "closed-saturated": Case(
        "a100_80gb",
        "meta-llama/Llama-3.1-8B",
        1e5,
        max_num_seqs=64,
        client=Client(ClientKind.closed, 96, 300),
    ),
    "multi-turn": Case("h100", "meta-llama/Llama-3.1-8B", 3.0, client=Client(ClientKind.multi_turn)),
}


def trace_of(case: Case, seed: int) -> Trace:
    """Prompts and outputs with long tails, as chats have, at gamma-distributed gaps."""
    draw = np.random.default_rng(seed)
    shape = 1 / case.burst**2
    gaps = draw.gamma(shape, 1 / (case.per_s * shape), REQUESTS)
    at = np.cumsum(gaps) - gaps[0]
    prompts = np.clip(draw.lognormal(5.5, 1.0, REQUESTS), 8, 4000).astype(int)
    outputs = np.clip(draw.lognormal(5.2, 0.7, REQUESTS), 4, 1200).astype(int)
    rows = tuple(
        TraceRequest(
            i, round(1e6 * at[i]), int(prompts[i]), int(outputs[i]), (Segment(None, int(prompts[i])),)
        )
        for i in range(REQUESTS)
    )
    client = case.client or OPEN
    if client.kind is ClientKind.multi_turn:
        rows = turns_of(rows, draw)
    header = TraceHeader(
        "planted", "simple", "drawn", CHAINED, None, 1, "0" * 64, REQUESTS, REQUESTS, client=client
    )
    return Trace(header, rows)


def turns_of(rows: tuple[TraceRequest, ...], draw: np.random.Generator) -> tuple[TraceRequest, ...]:
    """The requests as conversations of four turns, each some seconds after the answer before it."""
    found, firsts = [], len(rows) // TURNS
    pauses = draw.exponential(THINK_S, len(rows))
    for row, pause in zip(rows, pauses, strict=True):
        turn, session = divmod(row.request_id, firsts)
        row = replace(row, session=f"s{session}", turn=turn + 1)
        if turn:
            before = row.request_id - firsts
            row = replace(row, after=(before,), think_us=round(1e6 * pause), release=AFTER)
        found.append(row)
    return tuple(found)


def arguments(case: Case) -> dict[str, object]:
    """The engine's arguments, as vLLM's own are called."""
    return {
        "model": case.model,
        "max_num_seqs": case.max_num_seqs,
        "max_num_batched_tokens": 2048,
        "tensor_parallel_size": case.parallel,
        "max_model_len": 8192,
        "dtype": "bfloat16",
        "vllm_version": "0.19.0",
    }


def planted_device(described: DeviceConfig, seed: int) -> DeviceConfig:
    """The description with constants drawn from the priors of the fit."""
    draw = np.random.default_rng(1000 + seed)
    constants = CONSTANTS + (LINK_CONSTANTS if described.tensor_parallel > 1 else ())
    found = replace(described)
    for one in constants:
        value = float(getattr(described, one.key)) or one.centre
        drawn = value * float(np.exp(one.spread * np.clip(draw.normal(), -1.5, 1.5)))
        setattr(found, one.key, min(max(drawn, one.low), one.high))
    return found


def with_front_end(device: DeviceConfig, seed: int) -> DeviceConfig:
    """The device behind a server that takes 2 to 8 ms for a request, and up to a microsecond for a prompt's token."""
    draw = np.random.default_rng(3000 + seed)
    return replace(
        device,
        frontend_request_us=float(draw.uniform(2000, 8000)),
        frontend_token_us=float(draw.uniform(0, 1)),
    )


def described(case: Case, log: EngineLog) -> Configured:
    """The configuration as `calibrate --from-log` makes it."""
    return configured(log, (f"device={case.device}",))


def write_log(case: Case, seed: int, folder: Path) -> None:
    """Replay the load on the planted device, and keep what an engine would."""
    (folder / "engine.json").write_text(json.dumps(arguments(case)))
    trace = trace_of(case, seed)
    write_requests(folder, case, trace, None, seed)
    config = described(case, read_engine_log(folder)).config
    config = replace(config, model=replace(config.model, expert_skew=case.skew or config.model.expert_skew))
    device = planted_device(config.device, seed)
    if case.client is not None:
        device = with_front_end(device, seed)
    run = predictor(config, trace)(device)
    queued = run.seen_s if case.client is None else np.full(REQUESTS, np.nan)
    times = np.stack([run.arrival_s, queued, run.first_token_s, run.last_token_s])
    write_requests(folder, case, trace, times, seed)


def write_requests(folder: Path, case: Case, trace: Trace, times: "np.ndarray | None", seed: int) -> None:
    """The CSV of requests; without times, with any, so that the settings can be read.

    The log of a client has no time of the queue. Its own time of an end is not later than when it sends the next.
    """
    draw = np.random.default_rng(2000 + seed)
    lines = ["arrival_s,queued_s,prompt_tokens,output_tokens,first_token_s,last_token_s,session"]
    for i, row in enumerate(trace.requests):
        at = row.arrival_us / 1e6
        at, queued, first, last = (9.0 * i, 9.0 * i, 9 * i + 1, 9 * i + 2) if times is None else times[:, i]
        first = max(at, first + draw.normal(0, NOISE_S))
        if case.client is None:
            last += draw.normal(0, NOISE_S)
        last = max(last, first)
        entered = "" if np.isnan(queued) else f"{max(queued, at):.6f}"
        lengths = f"{row.prompt_tokens},{row.output_tokens}"
        lines.append(f"{at:.6f},{entered},{lengths},{first:.6f},{last:.6f},{row.session or ''}")
    (folder / "requests.csv").write_text("\n".join(lines) + "\n")


def fitted(case: Case, seed: int) -> Fit:
    """The fit of a planted log."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_log(case, seed, folder)
        log = read_engine_log(folder)
        if log.workload.header.client.kind is not (case.client or OPEN).kind:
            say(f"WRONG: {log.client}")
        say(f"  {log.client}")
        return fit_device(log, described(case, log).config)


def found_front_end(fit: Fit, seed: int) -> str:
    """What a prompt of 500 tokens takes before the queue, planted and found."""
    true = with_front_end(fit.device, seed)
    planted, found = (each.frontend_request_us + 500 * each.frontend_token_us for each in (true, fit.device))
    return f"front end for 500 tokens: {planted:.0f} us planted, {found:.0f} us found"


def shown(errors: Errors) -> str:
    """Both medians' errors, as text."""
    return f"TPOT {100 * errors.tpot_p50:+.1f} %, TTFT {100 * errors.ttft_p50:+.1f} %"


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> int:
    """Fit and print; 0 where the median error of every case is within the goals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="*", choices=[*CASES, []], help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--drawn", type=int, default=len(CASES))
    flags = parser.parse_args(words)
    missed = 0
    for name in flags.case or nights_share(CASES, flags.drawn):
        errors = []
        for seed in range(flags.seeds):
            began = time.process_time()
            fit = fitted(CASES[name], seed)
            errors.append((fit.held_out.tpot_p50, fit.held_out.ttft_p50))
            if CASES[name].client is not None:
                say(f"  {found_front_end(fit, seed)}")
            say(
                f"{name:12} seed {seed}: held out {shown(fit.held_out)} (before {shown(fit.before)}; fitted part "
                f"{shown(fit.fitted)}), {time.process_time() - began:.0f} CPU-s"
            )
        tpot, ttft = np.abs(np.array(errors)).T
        missed += bool(np.median(tpot) > GOAL_TPOT or np.median(ttft) > GOAL_TTFT)
        say(
            f"{name:12} of {flags.seeds}: TPOT median {100 * np.median(tpot):.1f} %, worst {100 * tpot.max():.1f} %; "
            f"TTFT median {100 * np.median(ttft):.1f} %, worst {100 * ttft.max():.1f} %; within the goals "
            f"{int(((tpot <= GOAL_TPOT) & (ttft <= GOAL_TTFT)).sum())}"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
