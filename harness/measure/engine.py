"""One measured run. The model is loaded once per process and used for every run of the sweep."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np

from engine.core.identity import TokenIdentity
from engine.core.options import Decoding
from engine.core.scheduling.scheduler import Scheduler
from engine.runtime.errors import ModelError
from engine.runtime.graphs import GraphOptions
from engine.runtime.models.cpu_layers import can_pack, is_small, replace_layers
from engine.runtime.models.load import LoadedModel, load_model
from engine.runtime.models.spec import ModelSpec
from engine.runtime.runner import Runner
from harness.config.errors import ConfigError
from harness.config.schema import Clock, RunConfig
from harness.environment import engine_device
from harness.measure.beam_search import TokenBeams
from harness.measure.executor import FixedDurations, MeasuredExecutor
from harness.measure.yardstick import Reading, Yardstick, middle
from harness.replay.executors import Executor
from harness.replay.loop import Progress
from harness.replay.recorder import MeasuredRun
from harness.workload.devices import clock_of, has_yardstick
from harness.workload.shapes import draft_of, model_spec
from harness.workload.simulate import replay_workload, with_ends
from harness.workload.workload import Workload
from traces.tokens import token_ids
from traces.trace import TraceRequest

_WARM_UP = 6  # requests

Watch = Callable[[Executor, Scheduler, Callable[[], float]], Executor]
"""Makes an executor around another; it gets the scheduler, whose pool it may look at, and the run's clock."""


def loaded_model(config: RunConfig) -> LoadedModel:
    """The model on its device, loaded once per process; threads are set each time."""
    import torch

    device = engine_device(config.engine.device)
    if device == "cpu":
        torch.set_num_threads(config.engine.threads)
    return _loaded(model_spec(config.model), device)


def draft_model(config: RunConfig, loaded: LoadedModel) -> LoadedModel:
    """The model that proposes tokens: the configured checkpoint, or the model itself."""
    path = config.decoding.draft_path
    if path is None:
        return loaded
    return _loaded(model_spec(draft_of(config.model, path)), engine_device(config.engine.device))


@lru_cache(maxsize=2)
def _loaded(spec: ModelSpec, device: str) -> LoadedModel:
    loaded = load_model(spec, device=device)
    if can_pack(loaded.model) and is_small(loaded.model):
        replace_layers(loaded.model)
    gc.collect()
    gc.freeze()  # modules and weights stay in memory: later collections skip them
    return loaded


def measure(
    config: RunConfig,
    workload: Workload,
    *,
    seed: int,
    progress: Progress | None = None,
    step_ns: Sequence[int] | None = None,
    reference: Reading | None = None,
    watch: Watch | None = None,
) -> MeasuredRun:
    """Run the workload on the engine. Token ids come from the trace's prefix keys; `seed` drives sampling alone.

    On a CPU times are those at the pace of `reference` (None: at the pace at which the run begins).

    With `step_ns` requests arrive as if steps took these nanoseconds. Step plans are then the same in every run,
    however long the engine takes. `watch` puts an executor around the engine that looks at each plan and at the pool.
    """
    loaded, clock = loaded_model(config), _clock(clock_of(config))
    runner = _runner(config, workload, loaded, seed, clock)
    prompts = {row.request_id: _prompt(row, config, loaded) for row in workload.trace.requests}
    requests = workload.requests(
        lambda row: TokenIdentity(
            row.request_id, prompts[row.request_id], row.salt, algorithm=workload.cache.hash
        )
    )
    client = _client(workload, runner, prompts)
    for timed in requests:
        if client is None or timed.request.decoding is not Decoding.beam:
            runner.add(timed.request, prompts[timed.request.request_id])
    yardstick = Yardstick(clock, reference) if has_yardstick(config) else None
    with _no_collection():
        by_id = {timed.request.request_id: timed.request for timed in requests}
        executor = with_ends(workload, MeasuredExecutor(runner, clock, yardstick), by_id)
        scheduler = workload.scheduler() if watch else None
        if watch and scheduler:
            executor = watch(executor, scheduler, clock)
        same = FixedDurations(executor, step_ns) if step_ns else None
        log, recorder = replay_workload(
            workload,
            requests,
            same or executor,
            keep_plans=True,
            progress=progress,
            scheduler=scheduler,
            client=client,
            live={} if client else None,
        )
    log = same.as_measured(log) if same else log
    return MeasuredRun(log, recorder, runner.audits, middle(yardstick.readings) if yardstick else None)


def _client(workload: Workload, runner: Runner, prompts: Mapping[int, np.ndarray]) -> TokenBeams | None:
    if not workload.resubmits:
        return None
    salts = {row.request_id: row.salt for row in workload.trace.requests}
    return TokenBeams(workload.client_stride, runner, prompts, salts, workload.cache.hash)


def _runner(
    config: RunConfig, workload: Workload, loaded: LoadedModel, seed: int, clock: Callable[[], float]
) -> Runner:
    """A runner for the workload. Raises ConfigError where its groups of layers are not those of the model."""
    pool, groups = workload.pool, workload.pool.groups
    try:
        return Runner(
            loaded,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            host_blocks=0 if groups else workload.cache.host_tokens // pool.block_size,
            backend=str(config.engine.backend),
            kv_dtype=str(config.model.kv_dtype),
            audit=str(config.engine.audit),
            audit_every=config.engine.audit_every,
            temperature=config.decoding.temperature,
            seed=seed,
            draft=draft_model(config, loaded) if workload.trace_decoding.configured.speculation else None,
            graphs=graphs_of(config, workload),
            groups=groups,
            page_counts=pool.page_counts,
            clock=clock,
        )
    except ModelError as error:
        raise ConfigError("cache.groups" if groups else "model", str(error)) from error


def graphs_of(config: RunConfig, workload: Workload) -> GraphOptions | None:
    """The CUDA graphs to record before the run; None where `engine.cuda_graphs` is not set."""
    if not config.engine.cuda_graphs:
        return None
    return GraphOptions(workload.limits.max_running, workload.pool.max_model_len)


def warm_up(config: RunConfig, workload: Workload) -> Reading | None:
    """Run the first few requests and discard the result, so that buffers and code caches are filled.

    Returns the reading of the yardstick, where there is one.
    """
    trace = workload.trace
    few = replace(trace, requests=trace.requests[:_WARM_UP])
    run = measure(config, replace(workload, trace=few), seed=config.workload.seed)
    return Reading(*run.yardstick_s) if run.yardstick_s else None


def _prompt(row: TraceRequest, config: RunConfig, loaded: LoadedModel) -> np.ndarray:
    return token_ids(
        row, seed=config.workload.seed, vocab_size=loaded.vocab_size, first_id=loaded.first_token_id
    )


def _clock(clock: Clock) -> Callable[[], float]:
    return time.thread_time if clock is Clock.cpu else time.perf_counter


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch garbage collection off, which would slow one step in a few hundred down; it runs before instead."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
