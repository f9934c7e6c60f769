"""A whole vLLM on a model, step by step. Runs in the interpreter that has vLLM, and imports nothing of PageTwin.

It is started as a script by `harness.measure.vllm`. Standard input and output carry one JSON object a line. A line with
`begin` starts a run with an empty pool: `flags` are vLLM's own arguments, `model` is a folder with a checkpoint or the
values of a config.json (random weights), `clock` is `cpu` or `wall`; it is answered with vLLM's version. The engine is
kept where only the requests differ. A line with `submit` names the requests that arrive before the next step, and is
answered with what vLLM decides in it (`harness.oracle.decisions.Step`) and how long it took; with `audit`, also with
the slots of its block tables, and with `paced` with the seconds of fixed work beside it.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "oracle"))
_driver: Any = import_module("vllm_driver")
sys.path.append(str(Path(__file__).parent))
_work: Any = import_module("yardstick")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
}
_CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.thread_time, "wall": time.perf_counter}


class CoreRun(_driver.Watched):  # type: ignore[misc]  # it is imported by its path
    """A run of vLLM's engine core over an empty pool, and what its steps decide and take."""

    def __init__(self, core: Any, clock: Callable[[], float]) -> None:
        _drain(core)
        core.scheduler = fresh(core.scheduler, core)
        super().__init__(core.scheduler, core.request_block_hasher)
        self._core = core
        self._clock = clock
        self._audit = False
        self._work = _work.FixedWork(clock)
        self._watch()

    def _watch(self) -> None:
        """Note the decisions of a step once it is scheduled, and the time of each part."""
        scheduler, clock = self._scheduler, self._clock
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def scheduling(*args: Any, **named: Any) -> Any:
            began = clock()
            plan = schedule(*args, **named)
            planned = clock()
            self._decided = self._decisions(plan)
            self._slots = self._slots_now() if self._audit else []
            self._policy_s, self._looking_s = planned - began, clock() - planned
            return plan

        def updating(*args: Any, **named: Any) -> Any:
            began = clock()
            outputs = update(*args, **named)
            self._policy_s += clock() - began
            return outputs

        scheduler.schedule, scheduler.update_from_output = scheduling, updating

    def step(self, *, audit: bool, paced: bool = False) -> dict[str, Any]:
        """Run the next step: what it decides, its seconds, and if asked for the slots in use while it ran, and how long
        fixed work takes beside it (`yardstick.py`).
        """
        Attention.seconds, self._audit = 0.0, audit
        began = self._clock()
        outputs, _ = self._core.step()
        took = self._clock() - began - self._looking_s
        finished = _driver.ended(outputs)
        for request_id in finished:
            self._ends.pop(str(request_id), None)
        found = {"step": self._decided | {"finished": finished}}
        times = {"seconds": took, "policy_s": self._policy_s, "attention_s": Attention.seconds}
        reading = self._work.seconds() if paced else None
        return found | times | {"slots": self._slots, "reading": reading}

    def _slots_now(self) -> list[int]:
        """Written slots in the block tables, blocks in them, and blocks that are free and cached.

        A block that several requests refer to counts once.
        """
        scheduler, written = self._scheduler, dict[int, int]()
        (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        for name, blocks in manager.req_to_blocks.items():
            left = scheduler.requests[name].num_computed_tokens
            for block in blocks:
                held = min(manager.block_size, max(left, 0))
                written[block.block_id] = max(written.get(block.block_id, 0), held)
                left -= manager.block_size
        pool = scheduler.kv_cache_manager.block_pool.blocks
        cached = sum(block.ref_cnt == 0 and block.block_hash is not None for block in pool)
        return [sum(written.values()), len(written), cached]


class Attention:
    """The seconds of attention in all layers since they were last set to 0."""

    seconds = 0.0

    @classmethod
    def time(cls, config: Any, clock: Callable[[], float]) -> None:
        """Time every attention layer of a model from now on."""

        def timed(forward: Any) -> Any:
            def forwards(*args: Any, **named: Any) -> Any:
                began = clock()
                found = forward(*args, **named)
                cls.seconds += clock() - began
                return found

            return forwards

        for layer in config.compilation_config.static_forward_context.values():
            if hasattr(layer, "impl"):
                layer.impl.forward = timed(layer.impl.forward)


def _drain(core: Any) -> None:
    """End what an earlier run has left, also in the batch of the model runner."""
    from vllm.v1.request import RequestStatus

    core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    while core.scheduler.has_requests():
        core.step()


def fresh(scheduler: Any, core: Any) -> Any:
    """A scheduler like this one over an empty pool."""
    return type(scheduler)(
        vllm_config=core.vllm_config,
        kv_cache_config=scheduler.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=scheduler.block_size,
        hash_block_size=getattr(scheduler, "hash_block_size", None),
        log_stats=False,
    )


def new_core(asked: dict[str, Any], folder: str) -> Any:
    """vLLM's engine core with the model; `folder` is for its config.json."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    path, words = asked["model"], []
    if not isinstance(path, str):
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(path, file)
        path, words = folder, ["--load-format", "dummy"]
    words += ["--model", path, "--skip-tokenizer-init", "--enforce-eager", *_driver.words_of(asked["flags"])]
    config = _driver.resolved_config(words)
    return EngineCore(config, Executor.get_class(config), log_stats=False)


def _warm_core(asked: dict[str, Any], folder: str, clock: Callable[[], float]) -> Any:
    """The same, timed, and warmed up by one request."""
    core = new_core(asked, folder)
    Attention.time(core.vllm_config, clock)
    run = CoreRun(core, clock)
    run.submit({"id": 0, "ids": [1] * 8, "output": (0, 2)})
    _ = [run.step(audit=False) for _ in range(2)]
    return core


def main() -> int:
    """Serve the lines of standard input."""
    os.environ.update(ENVIRONMENT)
    known: tuple[dict[str, Any], Any] | None = None
    run: CoreRun | None = None

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal known, run
        if "begin" in asked:
            import vllm

            settings = asked["begin"]
            clock = _CLOCKS[settings["clock"]]
            if known is None or known[0] != settings:
                if known is not None:
                    known[1].shutdown()
                run, known = None, None  # its memory is free before the next one takes its own
                known = settings, _warm_core(settings, folder, clock)
            run = CoreRun(known[1], clock)
            return {"vllm": vllm.__version__}
        assert run is not None, "begin comes first"
        for request in asked["submit"]:
            run.submit(request)
        return run.step(audit=asked["audit"], paced=asked["paced"])

    with tempfile.TemporaryDirectory() as folder:
        return int(_driver.serve(answer))


if __name__ == "__main__":
    sys.exit(main())
