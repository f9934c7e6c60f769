"""One measured run. The model is loaded once per process and used for every run of the sweep."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile

from engine.core.identity import BlockHash, TokenIdentity
from engine.core.options import CachePolicy, Decoding, HashAlgorithm
from engine.core.plan import IntArray
from engine.core.request import Request
from engine.runtime.errors import ModelError
from engine.runtime.graphs import GraphOptions
from engine.runtime.models.cpu_layers import packs_unasked, replace_layers
from engine.runtime.models.load import LoadedModel, load_model
from engine.runtime.models.spec import ModelSpec
from engine.runtime.runner import Runner
from harness.config.errors import ConfigError
from harness.config.schema import Clock
from harness.measure.beam_search import TokenBeams
from harness.measure.executor import FixedDurations, MeasuredExecutor, Reading, Yardstick, middle
from harness.measure.yardstick import FixedWork
from harness.replay.executors import Executor, PinnedEnds
from harness.replay.features import FeatureMeter
from harness.replay.loop import Progress
from harness.replay.recorder import MeasuredRun, PlanRecording
from harness.workload.deployment import Deployment
from harness.workload.point import Point
from harness.workload.simulate import Observe, new_log, replay_point
from traces.analysis.reuse import shared_prefix_tokens
from traces.tokens import answer_ids, token_ids
from traces.trace import TraceRequest

_WARM_UP = 6  # requests


def loaded_models(deployment: Deployment, *, drafts: bool) -> tuple[LoadedModel, LoadedModel | None]:
    """The model on its device, and with `drafts` the one that proposes tokens; threads are set each time."""
    import torch

    if deployment.runs_on == "cpu":
        torch.set_num_threads(deployment.engine.threads)
    specs = [deployment.model_spec, *([deployment.draft_spec] if drafts else [])]
    models = [_loaded(spec, deployment.runs_on) for spec in specs]
    return models[0], models[1] if drafts else None


@lru_cache(maxsize=2)  # once per process
def _loaded(spec: ModelSpec, device: str) -> LoadedModel:
    loaded = load_model(spec, device=device)
    if packs_unasked(loaded.model):
        replace_layers(loaded.model)
    gc.collect()
    gc.freeze()  # modules and weights stay in memory: later collections skip them
    return loaded


def measure(
    point: Point,
    *,
    seed: int,
    progress: Progress | None = None,
    step_ns: Sequence[int] | None = None,
    reference: Reading | None = None,
    observe: Observe | None = None,
) -> MeasuredRun:
    """Run the point on its engine. Token ids come from the trace's prefix keys; `seed` drives sampling alone.

    On a CPU times are those at the pace of `reference` (None: at the pace at which the run begins).

    With `step_ns` requests arrive as if steps took these nanoseconds. Step plans are then the same in every run,
    however long the engine takes. What `observe` makes looks at the replay, off the clock.
    """
    deployment, workload = point.deployment, point.workload
    if deployment.engine.on_vllm:
        from harness.measure.vllm import measure_on_vllm

        assert observe is None, "a lesson is of our engine"
        return measure_on_vllm(point, progress=progress, step_ns=step_ns, reference=reference)
    clock = time.thread_time if deployment.clock_used is Clock.cpu else time.perf_counter
    live: dict[int, Request] = {}
    meter = FeatureMeter(live, point.pool.block_size, point.pool.window, point.pool.page_slots)
    runner, algorithm = _runner(point, seed, clock), deployment.cache.hash
    loaded = runner.loaded
    ids = {"seed": workload.seed, "vocab_size": loaded.vocab_size, "first_id": loaded.first_token_id}
    prompts = {row.request_id: token_ids(row, **ids) for row in workload.trace.requests}
    answers = {
        row.request_id: answer_ids(row, **ids) for row in workload.trace.requests if deployment.cache.answers
    }
    salts = {row.request_id: row.salt for row in workload.trace.requests}
    beams = (workload.client_stride, runner, prompts, salts, algorithm)
    client = TokenBeams(*beams) if workload.resubmits else None
    yardstick = Yardstick(FixedWork(clock).seconds, reference) if deployment.has_yardstick else None
    executor: Executor = MeasuredExecutor(runner, clock, meter, yardstick)
    if workload.drawn.survival:
        executor = PinnedEnds(executor, workload.drawn.survival, live)
    same = FixedDurations(executor, step_ns) if step_ns else None
    identities = {it.request_id: _identity(it, prompts, answers, algorithm) for it in workload.trace.requests}
    requests = point.requests(lambda row: identities[row.request_id])
    for timed in requests:
        if client is None or timed.request.decoding is not Decoding.beam:
            runner.add(timed.request, prompts[timed.request.request_id])
            runner.generation(timed.request.request_id).forced = answers.get(timed.request.request_id)
    with _no_collection():
        recording, kept = PlanRecording(client.chosen if client else None), new_log(point)
        beside = replay_point(
            *(point, kept, requests, same or executor, recording),
            observe=observe,
            progress=progress,
            client=client,
            live=live,
        )
    log = kept.log(**beside)
    log = same.as_measured(log) if same else log
    readings = middle(yardstick.readings) if yardstick else None
    return MeasuredRun(log, recording, runner.audits, readings, alike=_alike_by_chance(point, identities))


def _alike_by_chance(point: Point, identities: Mapping[int, TokenIdentity]) -> int:
    """Prompts that begin with more blocks of an earlier one than their keys say: of few token ids some are equal."""
    cache, trace, size = point.deployment.cache, point.workload.trace, point.pool.block_size
    if cache.policy is not CachePolicy.paged or not cache.prefix_caching or cache.answers:
        return 0
    seen, count = set[BlockHash](), 0
    for row, tokens in zip(trace.requests, shared_prefix_tokens(trace), strict=True):
        hashes = identities[row.request_id].prompt_hashes(size)
        count += len(list(takewhile(seen.__contains__, hashes))) > tokens // size
        seen.update(hashes)
    return count


def _identity(
    row: TraceRequest,
    prompts: Mapping[int, IntArray],
    answers: Mapping[int, IntArray | None],
    algorithm: HashAlgorithm,
) -> TokenIdentity:
    """Hashes of the ids of the prompt, and of the answer that is forced, which are known from the start."""
    answer = answers.get(row.request_id)
    made = TokenIdentity(
        *(row.request_id, prompts[row.request_id], row.salt),
        algorithm=algorithm,
        share_outputs=answer is not None,
    )
    if answer is not None:
        made.extend(0, answer.tolist())
    return made


def _runner(point: Point, seed: int, clock: Callable[[], float]) -> Runner:
    """A runner for the point. Raises ConfigError where its groups of layers are not those of the model."""
    deployment, pool, groups = point.deployment, point.pool, point.pool.groups
    drafts, graphs = point.workload.trace_decoding.configured.speculation, graphs_of(deployment)
    loaded, draft = loaded_models(deployment, drafts=drafts is not None)
    try:
        return Runner(
            loaded,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            host_blocks=0 if groups else point.host_blocks,
            backend=str(deployment.engine.backend),
            kv_dtype=str(deployment.model.kv_dtype),
            audit=str(deployment.engine.audit),
            audit_every=deployment.engine.audit_every,
            temperature=deployment.decoding.temperature,
            seed=seed,
            draft=draft,
            graphs=graphs,
            groups=groups,
            page_counts=pool.page_counts,
            clock=clock,
        )
    except ModelError as error:
        raise ConfigError("cache.groups" if groups else "model", str(error)) from error


def graphs_of(deployment: Deployment) -> GraphOptions | None:
    """The CUDA graphs to record before the run; None where `engine.cuda_graphs` is not set."""
    sizes = deployment.limits.max_running, deployment.pool.max_model_len
    return GraphOptions(*sizes) if deployment.engine.cuda_graphs else None


def warm_up(point: Point) -> Reading | None:
    """Run the first few requests and discard the result, so that buffers and code caches are filled.

    Returns the reading of the yardstick, where there is one.
    """
    few = replace(point.trace, requests=point.trace.requests[:_WARM_UP])
    run = measure(point.of_trace(few), seed=point.workload.seed)
    return Reading(*run.yardstick_s) if run.yardstick_s else None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch garbage collection off, which would slow one step in a few hundred down; it runs before instead."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
