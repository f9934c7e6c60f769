"""First contact with a GPU: each kernel is launched once, on a small case beside float64. About 20 seconds.

Then the engine's own launches: a layer's attention as a step of the engine launches it, beside float64, and on a GPU
timed by the device's events. The host's work for a launch counts where it is longer.

A child process makes the calls and writes a line before and behind each (`stream.append`). This process watches it. A
call that gives no answer in its limit, or ends its process, is named, and a new child makes those that are left: after
an illegal access a process cannot use its GPU any more. Kernels that no GPU has run come last, each in a child of its
own. After a wrong decode nothing more is called: no other figure would be worth anything.

Without a GPU `TRITON_INTERPRET=1 python -m gpu_acceptance.contact --device cpu --out FILE.jsonl` rehearses it, on
smaller cases and without times.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from gpu_acceptance.machine import ROOT, end_group, step_environment
from gpu_acceptance.stream import append
from harness.console import say

if TYPE_CHECKING:
    import torch

    from paged_kernels.case import Case


class Timed(NamedTuple):
    """What a call found: its error as a share of the tolerance, microseconds (None: not on a GPU), bytes of KV read."""

    error: float
    us: float | None = None
    read_bytes: int = 0


Call = Callable[[str], "float | Timed"]  # device → error as a share of the tolerance

START_S = 90.0  # until a child has imported torch and reached the device
WRONG_DECODE = 4  # exit code


def _attend(device: str, lengths: Sequence[int], queries: Sequence[int] = (), **options: Any) -> float:
    """Attention of a small case; `kernel` is a prefill kernel."""
    import torch

    from paged_kernels import paged_attention_decode, paged_attention_prefill
    from paged_kernels.case import TOLERANCE, CaseSpec, build_case, exact_attention, relative_error

    kernel = options.pop("kernel", "auto")
    small: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dk": 64, "dtype": torch.bfloat16} | options
    case = build_case(CaseSpec(tuple(lengths), tuple(queries), **small), device=torch.device(device))
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens)
    common = case.scoring._asdict() | {"backend": "triton"}
    if case.decode:
        out = paged_attention_decode(*inputs, **common)
    else:
        out = paged_attention_prefill(*inputs, case.cu_seqlens_q, prefill_kernel=kernel, **common)
    return relative_error(out, exact_attention(case)[0]) / TOLERANCE[case.q.dtype]


def _eight_bits(device: str) -> float:
    import torch

    return _attend(device, (300, 40), kv_dtype=torch.float8_e4m3fn, dk=128)


def _latent(device: str) -> float:
    import torch

    from paged_kernels import Scoring, reference
    from paged_kernels.case import TOLERANCE, relative_error
    from paged_kernels.triton.decode import run_decode

    q = torch.randn(2, 16, 576, device=device).bfloat16()
    latents, rotary = (torch.randn(9, 16, 1, width, device=device).bfloat16() for width in (512, 64))
    table = (torch.arange(16, dtype=torch.int32, device=device) % 8 + 1).repeat(2, 1)
    lengths, bounds = torch.tensor([70, 33], device=device).int(), torch.tensor([0, 1, 2], device=device)
    scoring, out = Scoring(0.05), q.new_empty(2, 16, 512)
    run_decode(q, latents, rotary, table, lengths, scoring, out, latent=True)
    wide = (q.double(), torch.cat([latents, rotary], dim=3).double(), latents.double())
    exact, _ = reference.paged_attention(*wide, table, lengths, bounds, scoring)
    return relative_error(out, exact) / TOLERANCE[q.dtype]


def _cascade(device: str) -> float:
    import torch

    from paged_kernels import cascade_attention_decode
    from paged_kernels.case import TOLERANCE, CaseSpec, build_case, exact_attention, relative_error

    spec = CaseSpec((97, 160, 120), shared_tokens=96, heads=8, kv_heads=2, dk=64)
    case = build_case(spec, device=torch.device(device))
    lens = torch.tensor([96], dtype=torch.int32, device=device)
    tables = (case.block_table[:1, :6], lens, case.block_table[:, 6:].contiguous(), case.seq_lens - 96)
    inputs = (case.q, case.key_cache, case.value_cache, *tables)
    out = cascade_attention_decode(*inputs, **case.scoring._asdict(), backend="triton")
    return relative_error(out, exact_attention(case)[0]) / TOLERANCE[case.q.dtype]


def _writes(device: str) -> float:
    """Stored rows and copied blocks must be equal, bit for bit."""
    import torch

    from paged_kernels import copy_blocks, reshape_and_cache

    rows, caches = (
        torch.randn(3, 2, 64, device=device).bfloat16(),
        torch.zeros(2, 1, 4, 16, 2, 64, device=device),
    )
    keys, values = caches.bfloat16().unbind(0)
    slots = torch.tensor([17, -1, 20], device=device)
    reshape_and_cache(rows, rows, keys[0], values[0], slots, backend="triton")
    copy_blocks(keys, values, torch.tensor([[1, 3]], device=device), backend="triton")
    right = torch.equal(keys[0, 3, 1], rows[0]) and torch.equal(values[0, 3, 4], rows[2])
    return 0.0 if right and int((keys[0] != 0).any(-1).sum()) == 8 else float("inf")


def _merge(device: str) -> float:
    import torch

    from paged_kernels import merge_attn_states
    from paged_kernels.case import relative_error

    states = [torch.randn(*shape, device=device) for shape in ((3, 4, 64), (3, 4)) * 2]
    exact, _ = merge_attn_states(*(state.double() for state in states), backend="torch")
    return relative_error(merge_attn_states(*states, backend="triton")[0], exact) / 2e-6


@dataclass(frozen=True)
class Engine:
    """A step of the engine, on a GPU and, smaller, in the interpreter. Rows of one query come first."""

    lengths: Sequence[int]
    queries: Sequence[int]
    shared: int = 0
    recorded: bool = False  # as a graph replays it
    window: int = 0

    def __call__(self, device: str) -> Timed:
        """Attention of one layer, by the metadata of the engine."""
        import torch

        from engine.runtime.attention import metadata
        from paged_kernels.case import (
            TOLERANCE,
            CaseSpec,
            build_case,
            exact_attention,
            relative_error,
        )
        from paged_kernels.providers import ALWAYS

        lengths, queries, shared = tuple(self.lengths), tuple(self.queries), self.shared
        small: dict[str, Any] = {}
        if device == "cpu":
            small = {"heads": 4, "kv_heads": 2, "dk": 16}
            lengths = tuple(100 + 9 * row + min(count, 70) for row, count in enumerate(queries[-3:]))
            queries, shared = tuple(min(count, 70) for count in queries[-3:]), min(shared, 64)
        window = min(self.window, 40) if device == "cpu" else self.window
        spec = CaseSpec(lengths, queries, shared_tokens=shared, window=window, **small)
        case = build_case(spec, device=torch.device(device))
        out = torch.full_like(case.q, float("nan"))
        priced = patch.object(metadata, "cost_of", lambda device: ALWAYS)
        with priced if shared else patch.object(metadata, "share_step", lambda *rows, **sizes: None):
            run = (recorded_step if self.recorded else engine_step)(case, out)
            run()
            error = relative_error(out, exact_attention(case)[0]) / TOLERANCE[case.q.dtype]
            seen = sum(min(length, window or length) for length in lengths) - shared * (len(lengths) - 1)
            us = _median_us(run) if device != "cpu" else None
            return Timed(error, us, seen * case.token_bytes)


def engine_step(case: "Case", out: "torch.Tensor") -> Callable[[], None]:
    """A call that attends as a layer of the engine does; the rows of one query are the first of the case."""
    import numpy as np

    from engine.runtime.attention.metadata import PrefillRow, StepLayout, TritonMetadata
    from paged_kernels import Workspace

    bounds, queries = case.cu_seqlens_q.tolist(), case.cu_seqlens_q.diff().tolist()
    tables, single = case.block_table.cpu().numpy().astype(np.int64), queries.count(1)
    chunks = [
        PrefillRow(table[: -(-length // case.block_size)], start, count, length)
        for table, start, count, length in zip(tables, bounds, queries, case.lengths, strict=False)
    ]
    inside = tables[:single] < len(case.key_cache)
    lengths = np.array(case.lengths[:single], dtype=np.int64)
    layout = StepLayout(np.where(inside, tables[:single], 0), lengths, chunks[single:])
    pool: Any = SimpleNamespace(block_size=case.block_size, device=case.device)
    step = TritonMetadata(layout, pool, Workspace())
    return lambda: step.attend(case.q, case.key_cache, case.value_cache, case.scoring, out)


def recorded_step(case: "Case", out: "torch.Tensor") -> Callable[[], None]:
    """The same from a recording, which is replayed for other lengths than those it was made with."""
    import torch

    from engine.runtime.graphs import CudaRecorder, EagerRecorder, StaticInputs, StaticMetadata
    from paged_kernels import Workspace

    rows = len(case.lengths)
    inputs = StaticInputs(rows, case.block_table.shape[1], case.device)
    inputs.tables[:, : case.block_table.shape[1]] = case.block_table
    inputs.lengths.fill_(1)
    step = StaticMetadata(inputs, rows, "triton", Workspace())

    def attend() -> Any:
        step.begin_pass()
        step.attend(case.q, case.key_cache, case.value_cache, case.scoring, out)

    recorder = CudaRecorder() if case.device.type == "cuda" else EagerRecorder()
    replay = recorder.record(attend)
    out.fill_(float("nan"))
    inputs.lengths.copy_(torch.tensor(case.lengths))
    return lambda: (replay(), None)[1]


def _median_us(run: Callable[[], None], rounds: int = 20) -> float:
    """Median microseconds between two events on the device around a call."""
    import torch

    def between() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    return median([between() for _ in range(rounds + 3)][3:])


CALLS: Mapping[str, Call] = {
    "decode": lambda device: _attend(device, (300, 1, 40)),
    "decode in parts": lambda device: _attend(device, (9000, 40)),
    "decode with all options": lambda device: _attend(
        device, (300, 40), window=70, softcap=5.0, sinks=True, alibi=True
    ),
    "decode of 8 bits": _eight_bits,
    "decode of short rows": lambda device: _attend(device, (3000, 70), (5, 2)),
    "decode of latent vectors": _latent,
    "writes and copies": _writes,
    "merge": _merge,
    "cascade": _cascade,
    "prefill": lambda device: _attend(device, (300, 90), (200, 90), kernel="plain"),
    "engine: 8 decodes of 16k": Engine((16384,) * 8, (1,) * 8),
    "engine: 64 decodes of 1k": Engine((1024,) * 64, (1,) * 64),
    "engine: 64 decodes of 1k, recorded": Engine((1024,) * 64, (1,) * 64, recorded=True),
    "engine: 8 x 4 drafts over 8k": Engine((8192,) * 8, (5,) * 8),
    "engine: 16 x 4 drafts over 8k that they share": Engine((8600,) * 16, (5,) * 16, shared=8192),
    "engine: 16 decodes over 8k that they share": Engine((8600,) * 16, (1,) * 16, shared=8192),
    "engine: a chunk of 512 beside 32 decodes": Engine((4096,) * 33, (*(1,) * 32, 512)),
    "engine: window of 1k": Engine((8192,) * 32, (1,) * 32, window=1024),
    "risky: prefill for Hopper": lambda device: _attend(device, (300, 90), (200, 90), kernel="hopper"),
}
RISKY, FIRST = "risky: ", "decode"  # how the names of these calls begin


def make_calls(calls: Mapping[str, Call], names: Sequence[str], device: str, out: Path) -> int:
    """The child: make the calls and write what became of each. An error ends it: the GPU may be lost for it."""
    with out.open("a", encoding="utf-8") as file:
        append(file, call=None, state="ready")
        for name in names:
            append(file, call=name, state="started")
            began = time.monotonic()
            try:
                answer = calls[name](device)
            except Exception as problem:
                kind = type(problem).__name__  # by its name: importing the class would take seconds
                state = "not served" if kind == "BackendUnavailableError" else "failed"
                append(file, call=name, state=state, why=f"{kind}: {problem}"[:500])
                return 1
            error, us, read = answer if isinstance(answer, tuple) else Timed(answer)
            facts: dict[str, Any] = {} if us is None else {"us": round(us, 1), "gb_s": round(read / us / 1e3)}
            facts |= {"error": repr(error), "seconds": round(time.monotonic() - began, 3)}
            append(file, call=name, state="right" if error <= 1 else "wrong", **facts)  # NaN is wrong
    return 0


def watch(
    words: Sequence[str], out: Path, names: Sequence[str], device: str, limit_s: float
) -> dict[str, Any]:
    """Make all calls in children; `words` start one. Returns the last line of each call, which `out` holds too."""
    left = list(names)
    while left:
        risky = [name.startswith(RISKY) for name in left]
        some = left[:1] if risky[0] else left[: risky.index(True) if True in risky else None]
        known = len(lines(out))
        ending = _run_child([*words, "--device", device, "--out", str(out), "--child", *some], out, limit_s)
        new = [line for line in lines(out)[known:] if line["call"]]
        if not new or new[-1]["state"] == "started":
            lost = new[-1]["call"] if new else some[0]
            with out.open("a", encoding="utf-8") as file:
                append(file, call=lost, state="lost", why=ending)
            new = lines(out)[known:]
        said = {line["call"] for line in new}
        left = [name for name in left if name not in said]
        last = {line["call"]: line for line in lines(out)}
        if any(name.startswith(FIRST) and last[name]["state"] == "wrong" for name in said - {None}):
            break
    return {line["call"]: line for line in lines(out) if line["call"]}


def _run_child(words: Sequence[str], out: Path, limit_s: float) -> str:
    """Run a child until it ends or writes nothing for its limit; returns how it ended."""
    child = subprocess.Popen(words, cwd=ROOT, env=step_environment(), start_new_session=True)
    try:
        seen, since, allowed = len(lines(out)), time.monotonic(), START_S
        while child.poll() is None:
            if len(lines(out)) > seen:
                seen, since, allowed = len(lines(out)), time.monotonic(), limit_s
            if time.monotonic() - since > allowed:
                return f"no answer in {allowed:.0f} s"
            time.sleep(0.02)
        return f"the process ended with code {child.returncode}"
    finally:
        end_group(child)


def lines(out: Path) -> list[dict[str, Any]]:
    """The lines that were written whole."""
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main(words: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all calls are right, 1 one is not, 4 a decode is wrong."""
    parser = argparse.ArgumentParser(prog="python -m gpu_acceptance.contact", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--limit", type=float, default=20.0, metavar="S", help="of a call; default: %(default)s"
    )
    parser.add_argument("--calls", default=f"{__name__.replace('__main__', 'gpu_acceptance.contact')}:CALLS")
    parser.add_argument("--child", nargs="+", metavar="CALL", help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="name the calls")
    flags = parser.parse_args(words)
    module, _, attribute = flags.calls.partition(":")
    calls: Mapping[str, Call] = getattr(importlib.import_module(module), attribute)
    if flags.child:
        return make_calls(calls, flags.child, flags.device, flags.out)
    if flags.dry_run:
        say("\n".join(calls))
        return 0
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text("")
    own = (sys.executable, "-m", "gpu_acceptance.contact", "--calls", flags.calls)
    found = watch(own, flags.out, list(calls), flags.device, flags.limit)
    for name in calls:
        line = found.get(name, {"state": "left out"})
        timed = f" ({line['us']:,} us, {line['gb_s']:,} GB/s of KV)" if "us" in line else ""
        say(f"{name}: {line['state']}" + (f" ({line['why']})" if "why" in line else timed))
    if any(name.startswith(FIRST) and line["state"] == "wrong" for name, line in found.items()):
        return WRONG_DECODE
    return 0 if all(found.get(name, {}).get("state") in ("right", "not served") for name in calls) else 1


if __name__ == "__main__":
    raise SystemExit(main())
