"""A probe for servers in production: `vllm serve MODEL --scheduler-cls pagetwin_probe.Scheduler` logs every step.

Copy this file to the server, into a folder on PYTHONPATH, or install PageTwin's wheel, which has it as a module of its
own. It needs vLLM and the standard library. `python -m harness twin FOLDER` reads the log.

The class that vLLM would take itself is watched and decides as before: `AsyncScheduler` where async scheduling is on,
else `Scheduler`. An error in the probe, or a full disk, ends the log and not the server. Prompts and token ids are
never written.

| environment | meaning | default |
|---|---|---|
| PAGETWIN_PROBE | the folder of the log | pagetwin-probe |
| PAGETWIN_PROBE_FILE_MB | size of a file, after which the next one begins | 64 |
| PAGETWIN_PROBE_FILES | files that are kept of one engine; older ones are deleted | 16 |
| PAGETWIN_PROBE_HASHES | 1: the first 8 bytes of the hash of every full block of a prompt and its answer | 0 |

A log is lines of JSON. The first of each file has `pagetwin_probe` (the version of this format), `config` (what the
engine made of its arguments, under vLLM's names) and the clock: times are whole ns since `unix_ns`. Then, as it
happens (requests are numbered as they come):

* `req`: number, id, prompt tokens, most output tokens, when the front end took it, when it was queued, priority;
  `hashes` if asked for.
* `step`: number. `t`: when it began, then ns of schedule(), of the model and all waiting for it, and of
  update_from_output(). `rows` and `tokens` in all; `run`, `wait` once it was scheduled; `free`: blocks once it was
  scheduled, and once it was done; `blocks` added to tables, cached ones included. `in`: requests that enter, each with
  its cached tokens and those it computes; `part`: rows of other than one token of requests that were there before, each
  with tokens before and computed; `off`: running requests without a row; `out`: preempted ones. All other rows go on by
  one token.
* `end`: number, reason, output tokens, when its first token came (null: never), when it ended, preemptions; `hashes` of
  the blocks that its answer filled, if asked for.
* `lost`: lines that were not written because the disk was too slow.
"""

import atexit
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

FORMAT = 1
VERSIONS = ("0.32", "0.33")
"""The versions of vLLM that the probe was tried with."""

WRITE_EVERY_S = 0.25
_MOST_WAITING = 100_000  # lines
_TOGETHER = 256  # lines that are written at once
_MB = 1_000_000
_logger = logging.getLogger("vllm.pagetwin_probe")


class Log:
    """Lines of JSON in the files of a folder, at most `files` of `file_bytes` each. A thread of its own writes them.

    So whoever adds a line never waits for a disk. A line is in the file after WRITE_EVERY_S, also when the process is
    killed then. `head` is the first line of every file.
    """

    def __init__(self, folder: Path, head: Mapping[str, Any], file_bytes: int, files: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._head = head
        self._file_bytes = file_bytes
        self._files = files
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._lost = 0
        self._number, self._written = -1, 0
        self._fd: int | None = None
        self._over = threading.Event()
        self.failed = False
        self._next_file()
        self._thread = threading.Thread(target=self._write_on, name="pagetwin-probe", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line, which must not change any more."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(line)
        else:
            self._lost += 1

    def path(self, number: int) -> Path:
        """The path of a file of this log."""
        return self._folder / f"probe-{self._head['pid']}-{number:04d}.jsonl"

    def close(self) -> None:
        """Write what is left."""
        atexit.unregister(self.close)
        self._over.set()
        self._thread.join()

    def _write_on(self) -> None:
        while not self._over.wait(WRITE_EVERY_S) and not self.failed:
            self._write()
        self._write()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self) -> None:
        try:
            while self._waiting and not self.failed:
                self._put(
                    b"".join(
                        _encoded(self._waiting.popleft()) for _ in range(min(_TOGETHER, len(self._waiting)))
                    )
                )
            if self._lost and not self.failed:
                lost, self._lost = self._lost, 0
                self._put(_encoded({"lost": lost}))
        except (OSError, TypeError, ValueError) as error:  # a full disk, or what is no JSON
            self.failed = True
            _logger.warning("PageTwin's probe ends its log in %s: %s", self._folder, error)

    def _put(self, data: bytes) -> None:
        if self._written + len(data) > self._file_bytes and self._written:
            self._next_file()
        assert self._fd is not None
        self._written += len(data)
        while data:
            data = data[os.write(self._fd, data) :]

    def _next_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._number += 1
        self._fd = os.open(self.path(self._number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        head = _encoded({**self._head, "file": self._number})
        os.write(self._fd, head)
        self._written = len(head)
        if self._number >= self._files:
            self.path(self._number - self._files).unlink(missing_ok=True)


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def _encoded(line: Mapping[str, Any]) -> bytes:
    return _encode(line).encode() + b"\n"


class Probe:
    """What is noted of one scheduler. No method of it raises: after an error it notes nothing more."""

    def __init__(self, log: Log, origin_ns: tuple[int, int], hash_tokens: int | None) -> None:
        self._log = log
        self._origin_ns, self._unix_ns = origin_ns
        self._hash_tokens = hash_tokens  # of a hash; None: hashes are not asked for
        self._numbers: dict[str, int] = {}
        self._came = self._steps = 0
        self._silent: set[str] = set()  # requests that have begun and have no token
        self._first_ns: dict[str, int] = {}
        self._preempted: list[int] = []
        self._open: deque[tuple[Any, dict[str, Any], list[str]]] = deque(maxlen=64)  # scheduled and not done

    def now(self) -> int:
        """Nanoseconds on the log's clock."""
        return time.monotonic_ns() - self._origin_ns

    def arrived(self, request: Any) -> None:
        """A request is queued."""
        name, at = request.request_id, self.now()
        if name in self._numbers:  # a further part of a request that streams its input
            return
        self._numbers[name] = self._came
        asked = round(request.arrival_time * 1e9) - self._unix_ns
        row = [self._came, name, request.num_prompt_tokens, request.max_tokens, asked, at, request.priority]
        line: dict[str, Any] = {"req": row}
        if self._hash_tokens:
            line["hashes"] = _hashes(request.block_hashes)
        self._came += 1
        self._log.add(line)

    def scheduled(self, scheduler: Any, output: Any, began: int) -> None:
        """A step is scheduled."""
        planned, numbers, requests = self.now(), self._numbers, scheduler.requests
        counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        if not counts and not self._preempted:
            return
        entering = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        if cached.resumed_req_ids:
            pairs = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            entering |= {name: found for name, found in pairs if name in cached.resumed_req_ids}
        added = sum(len(group) for one in output.scheduled_new_reqs for group in one.block_ids)
        added += sum(len(group) for one in cached.new_block_ids if one is not None for group in one)
        line = {
            "step": self._steps,
            "t": [began, planned - began],
            "rows": len(counts),
            "tokens": output.total_num_scheduled_tokens,
            "run": len(scheduler.running),
            "wait": scheduler.get_request_counts()[1],
            "free": [scheduler.kv_cache_manager.block_pool.get_num_free_blocks()],
            "blocks": added,
        }
        self._steps += 1
        if entering:
            line["in"] = [[numbers[name], found, counts[name]] for name, found in entering.items()]
            self._silent.update(name for name in entering if name not in self._first_ns)
        if output.total_num_scheduled_tokens != len(counts):
            several = [name for name, count in counts.items() if count != 1 and name not in entering]
            if several:
                line["part"] = [
                    [numbers[name], requests[name].num_computed_tokens - counts[name], counts[name]]
                    for name in several
                ]
        if len(scheduler.running) > len(counts):
            line["off"] = [
                numbers[one.request_id] for one in scheduler.running if one.request_id not in counts
            ]
        if self._preempted:
            line["out"], self._preempted = self._preempted, []
        firsts = [name for name in self._silent if name in counts and _is_whole(requests[name])]
        self._silent.difference_update(firsts)
        self._open.append((output, line, firsts))

    def resulted(self, output: Any) -> None:
        """The model's result is there."""
        if not self._is_next(output):
            return
        _, line, firsts = self._open[0]
        began, policy = line["t"]
        now = self.now()
        line["t"] = [began, policy, now - began - policy]
        self._first_ns.update(dict.fromkeys(firsts, now))

    def done(self, scheduler: Any, output: Any) -> None:
        """The step is done."""
        if not self._is_next(output):
            return
        _, line, _ = self._open.popleft()
        line["t"].append(self.now() - sum(line["t"]))
        line["free"].append(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        self._log.add(line)

    def _is_next(self, output: Any) -> bool:
        """Whether this step is noted. They end in the order in which they were scheduled; those before have failed."""
        if any(one is output for one, _, _ in self._open):
            while self._open[0][0] is not output:
                self._open.popleft()
            return True
        return False

    def preempted(self, request: Any) -> None:
        """A request loses its blocks."""
        self._preempted.append(self._numbers[request.request_id])

    def ended(self, request: Any) -> None:
        """A request has ended."""
        name, now = request.request_id, self.now()
        number = self._numbers.pop(name, None)
        if number is None:
            return
        self._silent.discard(name)
        first = self._first_ns.pop(name, None)
        reason = str(request.get_finished_reason())
        line: dict[str, Any] = {
            "end": [number, reason, request.num_output_tokens, first, now, request.num_preemptions]
        }
        if self._hash_tokens:
            # K and V of the last token are never computed
            blocks = (request.num_prompt_tokens, request.num_tokens - 1)
            begin, end = (tokens // self._hash_tokens for tokens in blocks)
            line["hashes"] = _hashes(request.block_hashes[begin:end])
        self._log.add(line)

    def close(self) -> None:
        """Write what is left."""
        self._log.close()


def _hashes(blocks: Any) -> list[str]:
    return [bytes(block)[:8].hex() for block in blocks]


def _is_whole(request: Any) -> bool:
    """Whether its prompt is computed with the step that is scheduled, which then gives its first token."""
    return bool(request.num_computed_tokens >= request.num_prompt_tokens)


def config_of(scheduler: Any) -> dict[str, Any]:
    """What an engine made of its arguments, under their names."""
    whole = scheduler.vllm_config
    model, cache, limits = whole.model_config, whole.cache_config, whole.scheduler_config
    parallel, drafts = whole.parallel_config, whole.speculative_config
    return {
        "model": model.model,
        "max_model_len": model.max_model_len,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "block_size": cache.block_size,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
        "kv_cache_dtype": cache.cache_dtype,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "max_num_seqs": scheduler.max_num_running_reqs,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        "enable_chunked_prefill": limits.enable_chunked_prefill,
        "long_prefill_token_threshold": limits.long_prefill_token_threshold,
        "long_prefill_token_threshold_adaptive": getattr(
            limits, "long_prefill_token_threshold_adaptive", False
        ),
        "scheduling_policy": limits.policy,
        "async_scheduling": limits.async_scheduling,
        "watermark": limits.watermark,
        "scheduler_reserve_full_isl": limits.scheduler_reserve_full_isl,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "num_speculative_tokens": drafts.num_speculative_tokens if drafts is not None else 0,
        "scheduler": type(scheduler).__mro__[1].__name__,
    }


def new_probe(scheduler: Any, version: str) -> Probe | None:
    """The probe of a scheduler; None where the folder of its log cannot be written."""
    origin = time.monotonic_ns(), time.time_ns()
    hash_tokens = None
    if os.environ.get("PAGETWIN_PROBE_HASHES") == "1":
        hash_tokens = getattr(scheduler, "hash_block_size", scheduler.block_size)
    folder = Path(os.environ.get("PAGETWIN_PROBE") or "pagetwin-probe")
    head = {
        "pagetwin_probe": FORMAT,
        "vllm": version,
        "pid": os.getpid(),
        "unix_ns": origin[1],
        "hash_block_tokens": hash_tokens,
        "config": config_of(scheduler),
    }
    file_bytes = int(float(os.environ.get("PAGETWIN_PROBE_FILE_MB") or 64) * _MB)
    try:
        log = Log(folder, head, file_bytes, int(os.environ.get("PAGETWIN_PROBE_FILES") or 16))
    except OSError as error:
        _logger.warning("PageTwin's probe cannot write its log: %s", error)
        return None
    _logger.info("PageTwin's probe writes %s", log.path(0))
    return Probe(log, origin, hash_tokens)


@lru_cache
def probed(base: type) -> type:
    """A scheduler class of vLLM that tells a probe what it does."""

    class Probed(base):  # type: ignore[misc]  # untyped
        _probe: Probe | None = None

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self._probe = new_probe(self, _version())

        def _tell(self, what: str, *about: Any) -> Any:
            """Call a method of the probe. After an error there is no probe any more."""
            if self._probe is None:
                return None
            try:
                return getattr(self._probe, what)(*about)
            except Exception:
                _logger.warning("PageTwin's probe stops after an error; the server goes on", exc_info=True)
                self._probe = None
                return None

        def add_request(self, request: Any, *args: Any, **named: Any) -> Any:
            self._tell("arrived", request)
            return super().add_request(request, *args, **named)

        def schedule(self, *args: Any, **named: Any) -> Any:
            began = self._tell("now")
            output = super().schedule(*args, **named)
            self._tell("scheduled", self, output, began)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **named: Any) -> Any:
            self._tell("resulted", scheduler_output)
            result = super().update_from_output(scheduler_output, *args, **named)
            self._tell("done", self, scheduler_output)
            return result

        def _preempt_request(self, request: Any, *args: Any, **named: Any) -> Any:
            self._tell("preempted", request)
            return super()._preempt_request(request, *args, **named)

        def _free_request(self, request: Any, *args: Any, **named: Any) -> Any:
            self._tell("ended", request)
            return super()._free_request(request, *args, **named)

        def shutdown(self) -> None:
            super().shutdown()
            self._tell("close")

    return Probed


def _version() -> str:
    import vllm

    version = str(vllm.__version__)
    if not version.startswith(tuple(f"{known}." for known in VERSIONS)):
        raise ImportError(
            f"pagetwin_probe knows vLLM {' and '.join(VERSIONS)}, and this is {version}: start the server without "
            "--scheduler-cls, or take the probe of a newer PageTwin"
        )
    return version


def Scheduler(vllm_config: Any, **named: Any) -> Any:  # noqa: N802  # vLLM calls it as a class
    """The scheduler that vLLM would take itself, watched.

    Raises:
        ImportError: another version of vLLM.
        ValueError: a model that vLLM serves with a scheduler of another kind.
    """
    _version()
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler as Plain

    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise ValueError("pagetwin_probe knows no diffusion models: start the server without --scheduler-cls")
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Plain
    return probed(base)(vllm_config=vllm_config, **named)
