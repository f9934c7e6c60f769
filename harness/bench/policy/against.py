"""`bench policy --against PYTHON`: our work and that of vLLM's own classes in turns, in one sitting.

Each side runs in one process, one after the other, round by round, so that a busy machine slows both. The time is the
CPU time of the whole process. Both must have done the same: blocks taken, blocks hit, blocks held, tokens scheduled.
"""

import gc
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.bench.policy.work import Allocation, Decoding256, Prompts, Scheduling
from harness.config.errors import UserError
from harness.oracle import vllm_driver
from harness.oracle.process import vllm_version

_SCRIPT = Path(__file__).with_name("vllm_work.py")
_ORACLE = Path(vllm_driver.__file__).parent
_LAST_LINES = 3
Round = Callable[[], tuple[float, int]]  # CPU-seconds, and what was done


@dataclass(frozen=True)
class Paired:
    """One line: units of work in a round, CPU-seconds of each round on both sides, and what one round did."""

    line: str
    count: int
    ours_s: Sequence[float]
    vllm_s: Sequence[float]
    done: int
    version: str

    @property
    def rate(self) -> float:
        """Our units per CPU-second."""
        return self.count / median(self.ours_s)

    @property
    def vllm_rate(self) -> float:
        """vLLM's units per CPU-second."""
        return self.count / median(self.vllm_s)

    @property
    def ratios(self) -> list[float]:
        """How many times as fast ours was, round by round, sorted."""
        return sorted(theirs / ours for ours, theirs in zip(self.ours_s, self.vllm_s, strict=True))

    def record(self) -> dict[str, Any]:
        """The line for the JSON file."""
        return {**asdict(self), "rate": self.rate, "vllm_rate": self.vllm_rate, "ratios": self.ratios}


def _timed(run: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    start = time.process_time()
    run()
    spent = time.process_time() - start
    gc.enable()
    return spent


def _rounds(sizes: Mapping[str, int]) -> Iterator[tuple[str, int, Round]]:
    """Our side of each line: its key, units in a round, and a round."""
    allocation = Allocation(sizes["sequences"], sizes["tokens"], evicting=False)
    prompts = Prompts(sizes["prompts"], sizes["tokens"], evicting=False)
    decoding = Decoding256(sizes["running"], sizes["steps"], hashed=True)
    scheduling = Scheduling(sizes["running"], sizes["steps"], rows=True, hashed=True)

    def allocate() -> tuple[float, int]:
        (groups,), _ = allocation.fresh()
        seconds = _timed(lambda: allocation.run(groups))
        return seconds, sum(group.sequences[0].cached_blocks for group in groups)

    def serve() -> tuple[float, int]:
        (asked,), _ = prompts.fresh_lists()
        hits: list[int] = []
        return _timed(lambda: hits.append(prompts.run_lists(asked))), hits[0]

    def decode() -> tuple[float, int]:
        (decoders,), _ = decoding.fresh()
        return _timed(lambda: decoding.run(decoders)), decoders.manager.pool.live_blocks

    def schedule() -> tuple[float, int]:
        (scheduler,), _ = scheduling.fresh()
        tokens: list[int] = []
        return _timed(lambda: tokens.append(scheduling.run(scheduler))), tokens[0]

    yield "allocate", allocation.blocks, allocate
    yield "prompt_list", prompts.count, serve
    yield "decode_hashed", decoding.steps, decode
    yield "schedule_hashed", scheduling.steps, schedule


def paired(python: str, sizes: Mapping[str, int], rounds: int) -> Iterator[Paired]:
    """Every line that vLLM 0.33 can do, both sides in turns, after a round for warming up.

    Raises:
        ConfigError: the interpreter has no vLLM.
        UserError: vLLM stopped, or the two sides did different work.
    """
    version = vllm_version(python)
    with tempfile.TemporaryFile() as log:
        words = [python, "-P", str(_SCRIPT), str(_ORACLE)]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process:
            for line, count, ours in _rounds(sizes):
                question = json.dumps({"line": line, "sizes": dict(sizes)}) + "\n"
                found: list[tuple[float, float]] = []
                for _ in range(1 + rounds):
                    spent, done = ours()
                    theirs = _ask(process, question, log)
                    if theirs["done"] != done:
                        raise UserError(
                            f"bench policy --against: in '{line}' ours did {done:,} units and vLLM's {theirs['done']:,}"
                        )
                    found.append((spent, theirs["cpu_s"]))
                ours_s, vllm_s = zip(*found[1:], strict=True)
                yield Paired(line, count, ours_s, vllm_s, done, version)


def _ask(process: "subprocess.Popen[str]", question: str, log: Any) -> dict[str, Any]:
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(question)
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        process.wait()
        log.seek(0)
        last = log.read().decode("utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
        raise UserError(f"bench policy --against: vLLM stopped: {' / '.join(last) or 'without a word'}")
    found: dict[str, Any] = json.loads(answer)
    return found
