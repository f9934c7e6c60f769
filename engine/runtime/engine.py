"""The engine: takes requests, runs one step at a time, and returns outputs.

A step does this: schedule, run, look for stop strings, commit, report. An error of one request ends only that request.
An error of a whole step ends the requests of that step, and the engine continues. Only errors that show that the
counters are wrong (`AuditError`, `CoreError`) are raised.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch

from engine.core.errors import CoreError
from engine.core.identity import TokenIdentity
from engine.core.memory.group_chunks import pages_of
from engine.core.memory.group_layout import GroupLayout, LayerSet, layout_of
from engine.core.memory.paged import PagedManager, host_memory, layer_groups
from engine.core.options import (
    CachePolicy,
    Decoding,
    GroupKind,
    GroupPages,
    SchedulerLimits,
    SpeculationMode,
    WindowHits,
)
from engine.core.plan import SlotUsage, StepPlan, StepResult
from engine.core.request import Request, Speculation
from engine.core.scheduling.commit import CommitReport, RequestStats
from engine.core.scheduling.scheduler import Scheduler
from engine.runtime.errors import AuditError, ModelError, ParamsError, RequestError, RunError, StepError
from engine.runtime.graphs import GraphOptions
from engine.runtime.group_pool import state_bytes
from engine.runtime.kv_pool import kv_dtype_of
from engine.runtime.models.cpu_layers import packs_unasked, replace_layers
from engine.runtime.models.load import LoadedModel, demands_of
from engine.runtime.models.spec import rope_types
from engine.runtime.options import EngineOptions, build_manager
from engine.runtime.params import OutputKind, SamplingParams, is_whole, listed
from engine.runtime.requests import (
    FinishReason,
    RequestMetrics,
    RequestOutput,
    RequestState,
    check_choices,
    check_prompt,
    encode_bad_words,
    encode_prompt,
    truncated,
)
from engine.runtime.runner import Runner
from engine.runtime.structured import Constraint, Grammars
from engine.runtime.text import Tokenizer
from paged_kernels.backends import choose_for_layers

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """What of a request can be made before the engine takes it: the ids and the text, and the form of its output."""

    ids: list[int]
    text: str | None
    constraint: Constraint | None


GIB = 1 << 30
CPU_BYTES = GIB  # of a KV pool on a CPU, unless the options give its size


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a KV pool. `bytes` includes one more block, the null block.

    With `groups` of layers, blocks are the pages of all of them, and the block size is the match unit.
    """

    blocks: int
    block_size: int
    bytes: int
    groups: int = 0

    @property
    def tokens(self) -> int:
        """KV slots. Without groups."""
        return self.blocks * self.block_size

    def __str__(self) -> str:
        if self.groups:
            held = f"{self.groups} groups of layers, match unit {self.block_size} tokens, {_size(self.bytes)}"
            return f"KV pool: {self.blocks:,} pages of {held}"
        return f"KV pool: {self.blocks:,} blocks of {self.block_size} = {self.tokens:,} tokens, {_size(self.bytes)}"


def _size(count: int) -> str:
    """Bytes in the largest fitting unit."""
    for unit, width in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= width:
            return f"{count / width:.1f} {unit}"
    return f"{count} bytes"


def pool_size(
    loaded: LoadedModel, options: EngineOptions, draft: LoadedModel | None
) -> tuple[SchedulerLimits, PoolSize]:
    """The size of the KV pool, and the limits with a `max_model_len` that fits into it.

    The pool has `pool_tokens` slots, or takes `kv_cache_memory_bytes`, or a share of the device's memory. The share
    counts memory that is already in use, and leaves a tenth for activations; on a CPU the pool then takes 1 GiB. A size
    in bytes is at most what requests can use within the limits. Raises ModelError if the memory holds no block, or
    for sequences that are longer than the positions of a model that does not stretch them.
    """
    limits = options.limits or SchedulerLimits(max_model_len=loaded.max_position)
    block_size = options.slots_per_block
    longest, plain = limits.max_model_len or loaded.max_position, {"default", "llama3"}
    if longest > loaded.max_position and plain >= set(rope_types(loaded.model.config.to_dict())):
        reason = f"max_model_len {longest:,}, and its positions are known up to {loaded.max_position:,}"
        raise ModelError(f"model {loaded.name}: {reason}")
    per_token = _token_bytes(loaded, options) + (_draft_bytes(draft, loaded, options) if draft else 0)
    tokens = options.pool_tokens
    if tokens is None:
        budget = options.kv_cache_memory_bytes
        if budget is None and loaded.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(loaded.device)
            budget = max(0, int(options.gpu_memory_utilization * total) - (total - free) - total // 10)
        useful = limits.max_running * min(longest, loaded.max_position)
        fitting = (CPU_BYTES if budget is None else budget) // per_token - block_size  # the null block
        tokens = min(fitting, -(-useful // block_size) * block_size)
    blocks = tokens // block_size
    if blocks < 1:
        raise ModelError(
            f"model {loaded.name}: its KV cache takes {per_token:,} bytes a token, and the memory given to it holds "
            f"no block of {block_size} tokens; raise kv_cache_memory_bytes, gpu_memory_utilization or pool_tokens"
        )
    capacity = PoolSize(blocks, block_size, (blocks + 1) * block_size * per_token)
    if GroupPages(options.groups) is GroupPages.off:  # with groups, windows decide how long a sequence may be
        longest = min(longest, capacity.tokens)
    return replace(limits, max_model_len=longest), capacity


def _draft_bytes(draft: LoadedModel, loaded: LoadedModel, options: EngineOptions) -> int:
    """Bytes of a draft model's K and V beside a token of the model.

    With groups it has pages beside all of those that the group with every token may get.
    """
    each = sum(heads * dim for layer in draft.kv_shapes for heads, dim in layer)
    each *= kv_dtype_of(options.kv_dtype, draft.dtype).itemsize
    if GroupPages(options.groups) is GroupPages.off:
        return each
    whole = [group for group in model_layout(loaded, options).groups if not group.forgets]
    most = max(
        (_token_bytes(loaded, options) * group.block_size / group.page_bytes for group in whole), default=1
    )
    return ceil(each * most)


def _token_bytes(loaded: LoadedModel, options: EngineOptions) -> int:
    """Bytes of K and V of one token of a model, in the pool's data type."""
    shapes = loaded.kv_shapes if GroupPages(options.groups) is GroupPages.off else loaded.group_shapes
    numbers = sum(heads * dim for layer in shapes for heads, dim in layer)
    return numbers * kv_dtype_of(options.kv_dtype, loaded.dtype).itemsize


def _default_scheduler(
    loaded: LoadedModel, options: EngineOptions, blocks: int, limits: SchedulerLimits
) -> Scheduler:
    """A scheduler with the manager that the options describe; that of groups in the memory of `blocks` blocks."""
    longest = limits.max_model_len or loaded.max_position
    if GroupPages(options.groups) is GroupPages.off:
        return Scheduler(build_manager(options, blocks, longest), limits)
    layout = model_layout(loaded, options)
    per_token = _token_bytes(loaded, options)
    memory = blocks * options.block_size * per_token
    counts = layout.page_counts(memory, longest, limits.max_batched_tokens)
    if min(counts) < 1:
        raise ModelError(
            f"model {loaded.name}: the memory of {blocks * options.block_size} tokens holds "
            f"{', '.join(map(str, counts))} pages of its groups of layers, each needs at least 1; enlarge the pool"
        )
    try:
        manager = PagedManager.of(
            pages_of(layout, counts, behind_first=options.behind_first),
            most_chunk=limits.max_batched_tokens,
            prefix_caching=options.prefix_caching,
            window_hits=WindowHits(options.window_hits),
            retention_interval=options.retention_interval,
            host_slots=options.host_blocks * options.block_size * per_token // layout.slot_bytes,
        )
    except CoreError as error:
        raise ModelError(f"model {loaded.name}: {error}") from error
    return Scheduler(manager, limits)


def model_layout(loaded: LoadedModel, options: EngineOptions) -> GroupLayout:
    """The groups of a model's layers, by the K, V and windows that they send and the states that they keep.

    States are first, layers that see every token last, as in `harness.workload.deployment.layer_sets`.

    Raises ModelError for options that groups do not serve, and for pages that cannot be unified.
    """
    if CachePolicy(options.cache) is not CachePolicy.paged or options.copy_at_fork:
        what = "copy_at_fork" if options.copy_at_fork else f"cache {options.cache}"
        reason = f"layers in groups: {what} is not served with groups; leave it out, or set groups=off"
        raise ModelError(reason)
    kinds: dict[tuple[int, int], int] = {}
    width = kv_dtype_of(options.kv_dtype, loaded.dtype).itemsize
    for shape, window in zip(loaded.group_shapes, loaded.windows, strict=True):
        if size := sum(heads * dim for heads, dim in shape) * width:
            kinds[window, size] = kinds.get((window, size), 0) + 1
    whole = GroupKind.latent if loaded.latent_shapes else GroupKind.full
    sets = [
        LayerSet(GroupKind.window if window else whole, layers, size, window or None)
        for (window, size), layers in sorted(kinds.items(), key=lambda each: each[0][0] == 0)
    ]
    states = Counter(map(state_bytes, loaded.states.values()))
    sets = [*(LayerSet(GroupKind.state, layers, size) for size, layers in states.items()), *sets]
    pages = GroupPages(options.groups)
    try:
        layout = layout_of(pages, sets, options.block_size, options.state_every, options.kept_states)
        return replace(layout, unit=options.prefix_match_unit if options.prefix_caching else None)
    except CoreError as error:
        raise ModelError(f"model {loaded.name}: groups={options.groups}: {error}") from error


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine's start; `running`, `waiting` and `usage` are those of the last step."""

    steps: int = 0
    prompt_tokens: int = 0  # of requests with a first token
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache, of finished requests
    prefix_hits: int = 0  # of them found
    resumed_hits: int = 0  # tokens found in the prefix cache after a preemption
    preemptions: int = 0
    swaps: int = 0  # preemptions that saved the blocks in host memory, of finished requests
    copies: int = 0  # blocks copied
    # of the last step, as vLLM counts: generated ones, and with the first of a request those of its prompt that were
    # computed, in whichever steps
    step_tokens: int = 0
    drafts: int = 0  # rows that verified drafts
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones
    running: int = 0
    waiting: int = 0
    usage: float = 0.0  # share of the pool's slots in blocks with a refcount above 0
    token_usage: float = 0.0  # share of those slots that hold a token
    finished: Counter[str] = field(default_factory=Counter)  # requests by finish reason

    def note_step(self, plan: StepPlan, report: CommitReport, accepted: int) -> None:
        """Count a step that has been committed; `accepted` are the draft tokens that were right."""
        self.steps += 1
        self.preemptions += len(plan.preempted)
        self.copies += len(plan.copies)
        self.step_tokens = 0
        drafting = [row.drafts for row in plan.rows if row.drafts]
        self.drafts += len(drafting)
        self.drafted_tokens += sum(drafting)
        self.accepted_tokens += accepted
        self.running, self.waiting = plan.running - len(report.finished), plan.waiting
        self.note_usage(plan.usage)

    def note_usage(self, use: SlotUsage) -> None:
        """Set the share of the pool in use, and how much of that holds tokens. Without a running request both are 0."""
        held = use.token + use.reserved + use.internal if self.running else 0
        self.usage, self.token_usage = held / max(1, use.capacity), use.token / held if held else 0.0

    def note_tokens(self, metrics: RequestMetrics, sequences: int) -> None:
        """Count the tokens of a request, one per sequence; with the first ones its prompt counts as computed."""
        self.generation_tokens += sequences
        self.step_tokens += sequences
        if not metrics.steps:
            self.prompt_tokens += metrics.prompt_tokens
            self.step_tokens += metrics.prompt_tokens - metrics.cached_tokens

    def note_request(self, output: RequestOutput, stats: RequestStats, looked_up: bool) -> None:
        """Count a finished request; `looked_up`: its prompt was to be found in the prefix cache."""
        metrics = output.metrics
        if looked_up and metrics.scheduled_s is not None:
            self.prefix_queries += metrics.prompt_tokens
            self.prefix_hits += metrics.cached_tokens
        self.resumed_hits += stats.resumed_hit_tokens
        self.swaps += stats.swaps
        reasons = [one.finish_reason for one in output.outputs] or ["error" if output.error else "abort"]
        self.finished[str(reasons[0])] += 1


class Engine:
    """A model with its KV pool and a continuous-batching scheduler, one step at a time.

        engine = Engine(load_model(spec), EngineOptions(pool_tokens=4096))
        engine.add_request("first", [1, 2, 3], SamplingParams(max_tokens=8))
        while engine.has_unfinished_requests:
            for output in engine.step():
                print(output.request_id, output.outputs)

    Text prompts and outputs need a `tokenizer`; a `draft` model turns on speculative decoding. `clock` gives the
    seconds of all metrics. An engine must not be used from several threads at once: `AsyncEngine` is for that. Raises
    ModelError if the memory holds no block, and what `Runner` raises.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        draft: LoadedModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded, self.options, self.tokenizer = loaded, options or EngineOptions(), tokenizer
        options, pack = self.options, self.options.pack_weights
        if packs_unasked(loaded.model) if pack is None else pack:
            replace_layers(loaded.model)
        self.limits, self.capacity = pool_size(loaded, options, draft)
        make_scheduler = options.scheduler or partial(_default_scheduler, loaded, options)
        self.scheduler = make_scheduler(self.capacity.blocks, self.limits)
        self._clock = clock
        self.runner = self._make_runner(draft)
        manager = self.scheduler.manager
        groups = layer_groups(manager)
        self._grouped = groups is not None  # what is generated stays private
        if groups is not None:
            self.capacity = PoolSize(
                manager.num_blocks, manager.block_size, self.runner.pool.bytes, len(groups.layout.groups)
            )
        self._speculation = (
            Speculation(options.draft_tokens, SpeculationMode(options.draft_mode)) if draft else None
        )
        self._check_smallest()
        self.counters = EngineCounters()
        self._states: dict[str, RequestState] = {}
        self._by_number: dict[int, RequestState] = {}
        self._watched: dict[int, RequestState] = {}  # whose text is read in every step, before the commit
        self._next = 0
        self._epoch = 0  # part of every block hash: a higher epoch gives no hits on blocks of an earlier one
        # as in vLLM a sequence ends with the tokenizer's end token too
        own: Any = getattr(tokenizer, "eos_token_id", None)
        more = [own] if is_whole(own) and 0 <= own < loaded.vocab_size else []
        self._end_ids = tuple(dict.fromkeys([*loaded.end_ids, *more]))
        self._grammars = Grammars(tokenizer, loaded.vocab_size, self._end_ids)
        self._pending: list[RequestOutput] = []  # outputs of requests that ended outside of a step

    def _check_smallest(self) -> None:
        """Raise ModelError if no request of more than a block could be served, which each would say otherwise."""
        manager, longest = self.scheduler.manager, self.limits.max_model_len or self.loaded.max_position
        new, most = max(1, min(2, longest - 1)), max(1, min(manager.block_size + 1, longest - 2))
        small, larger = (Request(0, size, new, speculation=self._speculation) for size in (1, most))
        if reason := self.scheduler.never_fits(small) or manager.never_fits(larger):
            raise ModelError(f"model {self.loaded.name}: even the smallest request {reason}")

    def _make_runner(self, draft: LoadedModel | None) -> Runner:
        """Make the pool, and record graphs: only for Triton on CUDA, whose kernels read the lengths on the device."""
        loaded, options, limits = self.loaded, self.options, self.limits
        grouped = layer_groups(self.scheduler.manager)
        records = options.cuda_graphs and loaded.device.type == "cuda" and grouped is None
        graphs = None
        demands = demands_of((loaded, draft), options.kv_dtype)
        if records and choose_for_layers(options.backend, loaded.device, demands).backend == "triton":
            graphs = GraphOptions(limits.max_running, limits.max_model_len or loaded.max_position)
        return Runner(
            loaded,
            num_blocks=self.capacity.blocks,
            block_size=self.capacity.block_size,
            host_blocks=options.host_blocks if grouped else host_memory(self.scheduler.manager),
            backend=options.backend,
            audit=options.audit,
            audit_every=options.audit_every,
            temperature=options.temperature,
            kv_dtype=options.kv_dtype,
            seed=options.seed,
            isolate=True,
            draft=draft,
            graphs=graphs,
            groups=grouped.layout if grouped else None,
            page_counts=grouped.pages.page_counts if grouped else (),
            clock=self._clock,
        )

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def prefix_caching(self) -> bool:
        """Whether there is a prefix cache, whoever made the scheduler."""
        return bool(getattr(self.scheduler.manager, "prefix_caching", False))

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has requests to run or outputs to return."""
        return bool(self._states or self._pending)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | PreparedPrompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
        cache_salt: str = "",
    ) -> None:
        """Queue a prompt, text or token ids, under a `request_id` that no unfinished request has.

        `arrival_s` is a time of the engine's clock (default: now). Requests find each other's blocks in the prefix
        cache only if they have the same `cache_salt`: one for each tenant keeps tenants apart. Raises RequestError
        (also its subclasses ParamsError, PromptError, TokenizerError) or NeverFitsError; then nothing is queued.
        """
        params = params or SamplingParams()
        if not isinstance(request_id, str):
            raise RequestError(f"a request id is a string, not {request_id!r}")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"request {request_id}: params are SamplingParams, not {params!r}")
        params = params.clone()
        if not is_whole(priority):
            raise ParamsError("priority", f"{priority!r} is not a whole number")
        if request_id in self._states:
            raise RequestError(f"a request with the id {request_id!r} is already running or waiting")
        ready = prompt if isinstance(prompt, PreparedPrompt) else self.prepared(prompt, params)
        ids = truncated(ready.ids, params, self.limits)
        most = check_prompt(ids, params, self.loaded, self.limits)
        bad_words = encode_bad_words(listed(params.bad_words), self.tokenizer)
        check_choices(params, bad_words, self.loaded.vocab_size, self._end_ids)
        array, number = np.array(ids, dtype=np.int64), self._next
        if not isinstance(cache_salt, str):
            raise ParamsError("cache_salt", f"{cache_salt!r} is not a string")
        # log-probabilities of a prompt need all of it computed: such a request has a salt of its own
        salt = cache_salt if params.prompt_logprobs is None else f"{cache_salt}\nrequest {number}"
        form = params.structured_outputs
        ends = self._end_ids if form is None else self._grammars.end_ids
        shared = params.decoding is not Decoding.beam and not self._grouped
        identity = TokenIdentity(
            number, array, salt, epoch=self._epoch, algorithm=self.options.hash, share_outputs=shared
        )
        plain = params.width == 1 and params.decoding is not Decoding.beam
        speculation = self._speculation if plain else None
        request = Request(
            number, len(ids), most, params.width, params.decoding, identity, int(priority), speculation
        )
        self.scheduler.submit(request)
        self._next += 1
        self.runner.add(request, array, params.rules(ends, bad_words, ready.constraint))
        metrics = RequestMetrics(self._clock() if arrival_s is None else arrival_s, prompt_tokens=len(ids))
        tokenizer = self.tokenizer if params.detokenize else None
        generation = self.runner.generation(number)
        state = RequestState(
            request_id, number, ready.text, ids, params, generation, identity, tokenizer, metrics
        )
        self._states[request_id] = self._by_number[number] = state
        if params.stops or form is not None:
            self._watched[number] = state

    def prepared(self, prompt: Prompt, params: SamplingParams | None) -> PreparedPrompt:
        """The prompt, encoded, and the form of its output, compiled. Any thread may do that.

        Raises PromptError, TokenizerError and ParamsError.
        """
        form = None if params is None else params.structured_outputs
        constraint = None if form is None else self._grammars.constraint(form)
        text = prompt if isinstance(prompt, str) else None
        return PreparedPrompt(encode_prompt(prompt, self.tokenizer), text, constraint)

    def reset_prefix_cache(self) -> None:
        """Let no later request find a block that was filled before now. Running requests go on."""
        self._epoch += 1
        if isinstance(self.scheduler.manager, PagedManager) and not self._grouped:
            self.scheduler.manager.pool.note_cleared()

    def abort(self, request_id: str) -> bool:
        """End a request and free its blocks. `step` returns its last output. False if there is no such request."""
        state = self._states.get(request_id)
        if state is None:
            return False
        self._pending.append(self._close(state, self.scheduler.abort(state.number), "abort"))
        self._note_load()
        return True

    def _note_load(self) -> None:
        """Take the gauges from the scheduler: after an abort there may be no step that would."""
        scheduler, counters = self.scheduler, self.counters
        counters.running = len(scheduler.running)
        counters.waiting = len(scheduler.waiting) + len(scheduler.swapped)
        counters.note_usage(scheduler.manager.usage(None))

    # -- a step --------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns an output for every request with new tokens or a new state."""
        outputs, self._pending = self._pending, []
        if not self.scheduler.has_work:
            return outputs
        plan = self.scheduler.schedule()
        now = self._clock()
        for number in plan.admitted:
            metrics = self._by_number[number].metrics
            if metrics.scheduled_s is None:
                metrics.scheduled_s = now
                metrics.cached_tokens = self.scheduler.stats[number].hit_tokens
        try:
            result, _ = self.runner.execute(plan)
        except (AuditError, CoreError):
            raise  # the counters are wrong, so the engine must not go on
        except Exception as error:  # any other error ends only the requests of this step
            return outputs + self._fail_step(plan, error)
        if self._watched:
            result = self._apply_stops(result)
        report = self.scheduler.commit(plan, result)
        self.counters.note_step(plan, report, sum(result.accepted.values()))
        return outputs + self._outputs(report)

    def _apply_stops(self, result: StepResult) -> StepResult:
        """Add sequences that a stop string ended, and requests whose tokenizer failed, to the ended ones."""
        finished, ended = set(result.finished), dict(result.ended)
        for number, state in self._watched.items():
            if number in finished:
                continue
            before = state.generation.ended_branches
            self._read(state)
            stopped = state.generation.ended_branches - before
            if state.generation.ended or state.error is not None:
                finished.add(number)
            elif stopped:
                ended[number] = sorted({*ended.get(number, ()), *stopped})
        ended = {number: branches for number, branches in ended.items() if number not in finished}
        return replace(result, finished=frozenset(finished), ended=ended)

    def _outputs(self, report: CommitReport) -> list[RequestOutput]:
        now, done, outputs = self._clock(), set(report.finished), []
        for number in report.emitted:
            state = self._by_number[number]
            metrics = state.metrics
            self.counters.note_tokens(metrics, report.tokens.get(number, state.generation.growing))
            metrics.note_tokens(now)
            state.extend_identity(self.capacity.block_size)
            if number not in done and state.params.output_kind is not OutputKind.FINAL:
                self._read(state)
                outputs.append(state.output(finished=False))
        outputs.extend(self._close(self._by_number[one], report.stats[one]) for one in report.finished)
        return outputs

    def _read(self, state: RequestState) -> None:
        """Extend the text of a request. If the tokenizer fails, only this request ends."""
        try:
            state.read()
            state.check_form()
        except RequestError as error:
            state.error = state.error or error
            state.drop_text()
            self._watched[state.number] = state  # the request ends with its next token

    def _close(
        self, state: RequestState, stats: RequestStats, reason: FinishReason | None = None
    ) -> RequestOutput:
        """Drop a request from the engine. Returns its last output."""
        number, metrics = state.number, state.metrics
        state.error = self.runner.failures.pop(number, None) or state.error
        if state.error is None and reason is None:
            self._read(state)
        if state.error is not None:
            reason = "error"
        metrics.finished_s = self._clock()
        lengths = [len(ids) for ids in state.generation.outputs()]
        metrics.output_tokens, metrics.longest = sum(lengths), max(lengths, default=0)
        metrics.preemptions = stats.preemptions
        metrics.drafted_tokens, metrics.accepted_tokens = stats.drafted_tokens, stats.accepted_tokens
        try:
            output = state.output(finished=True, reason=reason)
        except RequestError as error:
            state.error = state.error or error
            state.drop_text()
            output = state.output(finished=True, reason="error")
        self.runner.forget(number)
        self._by_number.pop(number, None)
        self._watched.pop(number, None)
        del self._states[state.request_id]
        if isinstance(state.error, RunError):
            self._epoch += 1
        looked_up = self.prefix_caching and state.params.prompt_logprobs is None
        self.counters.note_request(output, stats, looked_up)
        return output

    def _fail_step(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        """End the requests of a step that failed. The step is committed, so that the other requests can go on."""
        numbers = list(dict.fromkeys(row.request_id for row in plan.rows))
        unmoved = {number: range(self._by_number[number].params.width) for number in numbers}
        report = self.scheduler.commit(plan, StepResult(parents=unmoved, finished=frozenset(numbers)))
        reason = StepError(f"step {plan.step} with {len(numbers)} requests failed: {error}")
        outputs = []
        for number in numbers:
            stats = report.stats[number] if number in report.stats else self.scheduler.abort(number)
            state = self._by_number[number]
            state.error = reason
            outputs.append(self._close(state, stats, "error"))
        self._note_load()
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        return outputs

    def run(self) -> Iterable[RequestOutput]:
        """Run steps until no request is left. Yields their outputs."""
        while self.has_unfinished_requests:
            yield from self.step()
