"""The executor that runs a model: takes a step plan, returns the step's result and the seconds of each part.

With a draft model (speculative decoding) a second model proposes tokens, and the model verifies all of them in one
pass. The draft model has its own KV pool, the draft KV pool, with the same block ids (with groups, those of a group
that keeps every token). So block tables, copies, swaps and prefix cache hits hold for both pools. Every row of a step
also runs through the draft model. Otherwise a block that one request filled would be empty in the draft KV pool for the
next request that hits it. A proposed token is kept only if the model itself chooses the same token, so the output
equals that of plain decoding, greedy or sampled.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from engine.core.errors import CoreError
from engine.core.memory.group_layout import GroupLayout
from engine.core.memory.group_pages import GroupUsage
from engine.core.options import GroupPages
from engine.core.plan import IntArray, Row, StepPlan, StepResult
from engine.core.request import Request
from engine.runtime.attention.layer import (
    NO_TIMER,
    AttentionTimer,
    ClockTimer,
    CudaTimer,
    LayerAttention,
    PagedStep,
    latents,
)
from engine.runtime.attention.metadata import attention_metadata
from engine.runtime.attention.state import mixing
from engine.runtime.batch import (
    GroupedStep,
    StepBatch,
    build_batch,
    build_group_batch,
    check_step,
    check_units,
    in_group,
)
from engine.runtime.decoding import choose
from engine.runtime.decoding.generation import Generation
from engine.runtime.errors import AuditError, ModelError, NaNLogitsError
from engine.runtime.graphs import DecodeGraphs, GraphOptions
from engine.runtime.group_pool import BlockOperations, CacheTensors, GroupedPool, GroupView
from engine.runtime.kv_pool import KVPool, kv_dtype_of
from engine.runtime.models.load import LoadedModel, demands_of
from engine.runtime.options import Audit, KVDtype
from engine.runtime.params import DEFAULT_RULES, DecodingRules
from paged_kernels.backends import choose_for_layers


class Drafter:
    """A draft model and its KV pool. Raises ModelError if its vocabulary has another size than the target's.

    `Runner.execute` calls `propose` before the model runs, and `catch_up` after the tokens are chosen.
    """

    def __init__(self, draft: LoadedModel, target: LoadedModel, pool: CacheTensors, backend: str) -> None:
        if draft.vocab_size != target.vocab_size:
            raise ModelError(
                f"draft model {draft.name} has {draft.vocab_size} tokens in its vocabulary, {target.name} has "
                f"{target.vocab_size}: it cannot propose tokens"
            )
        self.pool = pool
        self._draft, self._backend = draft, backend

    def propose(self, step: int, rows: Sequence[Row], generations: Mapping[int, Generation]) -> None:
        """Run the rows of a step through the draft model, and propose tokens for the rows that verify drafts.

        The proposals are written to the generations. Raises NaNLogitsError.
        """
        plain = [row for row in rows if not row.drafts]
        if plain:
            self._run(plain, generations)
        drafting = [row for row in rows if row.drafts]
        for row in drafting:
            generations[row.request_id].proposed = []
        for ahead in range(max((row.drafts for row in drafting), default=0)):
            unfinished = [_one_token(row, ahead) for row in drafting if row.drafts > ahead]
            batch, logits = self._run(unfinished, generations)
            tokens = choose.forward_output(logits).tokens.tolist()
            if choose.NO_TOKEN in tokens:
                raise NaNLogitsError(f"step {step}: NaN in the logits of the draft model {self._draft.name}")
            for row, token in zip(batch.sampled, tokens, strict=True):
                generations[row.request_id].propose(row.context_len + 1, token)

    def catch_up(
        self, rows: Sequence[Row], generations: Mapping[int, Generation], accepted: Mapping[int, int]
    ) -> None:
        """Run the last proposal through the draft model, for rows whose proposals were all right."""
        behind = [
            _one_token(row, row.drafts)
            for row in rows
            if row.drafts and accepted.get(row.request_id) == row.drafts
        ]
        if behind:
            self._run(behind, generations)

    def _run(
        self, rows: Sequence[Row], generations: Mapping[int, Generation]
    ) -> tuple[StepBatch, torch.Tensor]:
        if isinstance(self.pool, GroupView):
            rows = [in_group(row, self.pool) for row in rows]
        batch = build_batch(rows, generations, self.pool.block_size, self.pool.device)
        metadata = attention_metadata(batch.layout, self.pool, self._draft.workspace, self._backend)
        paged = PagedStep(metadata, batch.slots, self.pool, NO_TIMER)
        return batch, self._draft.logits(batch.input_ids, batch.position_ids, paged, batch.logit_index)


def _one_token(row: Row, ahead: int) -> Row:
    """The draft model's row for the token `ahead` positions after the last known one."""
    return row._replace(context_len=row.context_len + ahead, query_len=1, drafts=0)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step by the runner's clock.

    `audit_s` is not part of the other times, because an engine without the audit does not do this work.
    """

    build_s: float  # the batch and its attention metadata
    forward_s: float  # swaps, block copies, draft model and model
    attention_s: float  # the attention function over all layers, part of `forward_s`
    sample_s: float
    audit_s: float  # setting freed blocks to NaN, counting written slots


class Runner:
    """Runs the step plans of a scheduler on a model, with a KV pool of its own. Make one per run.

    Call `add` when a request is submitted, then `execute` once per plan, and give its result to `Scheduler.commit`.
    `outputs` returns the tokens of a request, and `forget` drops them. Several runners can share one loaded model.

    `audit` `off` neither sets freed blocks to NaN nor counts slots; `sampled` counts every `audit_every` steps, `full`
    at every step. With `isolate`, a request with NaN logits ends alone and its error is put into `failures`; without
    it `execute` raises the error. `temperature` and `seed` hold for requests that set none. With `groups`, layers lie
    in the pages of their group: `page_counts` in each pool, instead of `num_blocks` blocks. Raises CoreError for
    options out of range, ModelError and BackendUnavailableError for what cannot run here.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        backend: str = "auto",
        audit: str = "sampled",
        audit_every: int = 16,
        temperature: float = 1.0,
        seed: int = 0,
        isolate: bool = False,
        draft: LoadedModel | None = None,
        graphs: GraphOptions | None = None,
        kv_dtype: KVDtype | str = KVDtype.model,
        groups: GroupLayout | None = None,
        page_counts: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if audit not in set(Audit) or audit_every < 1 or temperature <= 0:
            raise CoreError(
                f"audit {audit!r} must be one of {', '.join(Audit)}, audit_every {audit_every} at least 1 and "
                f"temperature {temperature} above 0"
            )
        demands = demands_of((loaded, draft), kv_dtype)
        if groups is not None and groups.pages is GroupPages.lcm:  # a page holds K and V of several layers
            demands = {demand._replace(contiguous=False) for demand in demands}
        self.backend = choose_for_layers(backend, loaded.device, demands).backend
        sizes = (num_blocks, block_size, host_blocks, kv_dtype)
        self.pool: KVPool | GroupedPool
        if groups is None:
            self.pool = pool_for(loaded, *sizes)
        else:
            if graphs is not None:
                raise ModelError("layers in groups: a recording has one block table; set cuda_graphs=False")
            self.pool = GroupedPool(
                groups,
                page_counts,
                shapes=loaded.group_shapes,
                windows=loaded.windows,
                dtype=loaded.dtype,
                device=loaded.device,
                states=loaded.states,
                kv_dtype=kv_dtype,
            )
        self.audits = 0  # number of audited steps
        self.failures: dict[int, NaNLogitsError] = {}  # by request id, until the runner's owner takes them
        self._isolate = isolate
        self.loaded = loaded
        self._poisons = audit != "off"
        self._audit_every = {"off": 0, "sampled": audit_every, "full": 1}[audit]
        self._chooser = choose.TokenChooser(seed, temperature)
        self._clock = clock
        self._on_cuda = loaded.device.type == "cuda"
        self._timer: AttentionTimer = CudaTimer() if self._on_cuda else ClockTimer(clock)
        self._generations: dict[int, Generation] = {}
        self.drafter: Drafter | None = None
        pools = [self.pool]
        if draft is not None:
            own: CacheTensors
            if isinstance(self.pool, GroupedPool):
                own = self.pool.add_draft(draft.kv_shapes, kv_dtype_of(kv_dtype, draft.dtype))
            else:
                own = pool_for(draft, *sizes)
                pools.append(own)
            self.drafter = Drafter(draft, loaded, own, self.backend)
        self.graphs: DecodeGraphs | None = None
        if graphs is not None and isinstance(self.pool, KVPool):
            self.graphs = graphs.record(loaded, self.pool, self.backend)
        self._blocks = BlockOperations(pools)

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, request: Request, prompt_ids: IntArray, rules: DecodingRules = DEFAULT_RULES) -> None:
        """Register a request with its prompt ids `[prompt_tokens]` before its first row. Raises CoreError."""
        if request.width > self.loaded.vocab_size:
            raise CoreError(
                f"request {request.request_id}: width {request.width} exceeds the vocabulary of "
                f"{self.loaded.vocab_size}"
            )
        self._generations[request.request_id] = Generation(request, prompt_ids, rules)

    def generation(self, request_id: int) -> Generation:
        """The tokens of a request so far, and its rules."""
        return self._generations[request_id]

    def outputs(self, request_id: int) -> list[list[int]]:
        """Generated token ids per branch so far; beam hypotheses best first."""
        return self._generations[request_id].outputs()

    def scores(self, request_id: int) -> list[float]:
        """Beam scores, best first: log-probability over generated length. 0 for every other sequence."""
        return self._generations[request_id].scores()

    def forget(self, request_id: int) -> None:
        """Drop a request's tokens."""
        del self._generations[request_id]

    # -- a step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> tuple[StepResult, StepTimes]:
        """Run one step: swap out, set freed blocks to NaN, swap in, copy blocks, run the rows, choose tokens.

        Raises NaNLogitsError (names step and sequence), AuditError (names step and both counts), and CoreError for a
        fast-forward plan.
        """
        if plan.num_steps != 1:
            raise CoreError(f"step {plan.step}: the engine takes one step at a time, not {plan.num_steps}")
        if self._poisons:
            self._blocks.poison_stale(plan)
        start = self._now()
        self._blocks.swap_out(plan)
        saved = self._now()
        if self._poisons:
            self._blocks.poison_freed(plan)
        poisoned = self._now()
        rows: Sequence[Row] = plan.rows
        if self.drafter is not None:  # drafts that are written into a fork are still tokens of branch 0
            rows = [row._replace(branch=0) if row.drafts else row for row in rows]
        self._blocks.swap_in_and_copy(plan)
        if self._poisons:
            self._blocks.poison_copied(plan)
        if self.drafter is not None:
            self.drafter.propose(plan.step, rows, self._generations)
            for request_id in plan.padded:
                self._generations[request_id].fill()
        filled = self._now()
        if not rows:  # all that ran were preempted
            return StepResult(), StepTimes(0.0, filled - poisoned + saved - start, 0.0, 0.0, poisoned - saved)
        batch = self._batch(rows)
        graphs = self.graphs if self.graphs is not None and self.graphs.fits(batch) else None
        paged = None if graphs else self._paged(batch)
        built = self._now()
        audits = bool(self._audit_every) and plan.step % self._audit_every == 0
        witnessed = self._witness(plan.step, rows, batch, audits)
        output = graphs.run(batch) if graphs else self._forward(batch, paged)
        ran = self._now()
        if audits:
            self._audit(plan)
        audited = self._now()
        choice = self._choose(plan, batch, output)
        if self.drafter is not None:
            self.drafter.catch_up(rows, self._generations, choice.accepted)
        times = StepTimes(
            build_s=built - filled,
            forward_s=ran - built - witnessed + filled - poisoned + saved - start,
            attention_s=self._timer.total_s(),
            sample_s=self._now() - audited,
            audit_s=poisoned - saved + witnessed + audited - ran,
        )
        finished = frozenset(choice.finished.union(choice.failed))
        result = StepResult(
            parents=choice.parents, finished=finished, ended=choice.ended, accepted=choice.accepted
        )
        return result, times

    def written_slots(self) -> int:
        """Usable slots that hold numbers; without groups, as many as the scheduler's token and cached slots.

        With `audit` off, slots of void blocks count too.
        """
        return self.pool.written_slots()

    def _batch(self, rows: Sequence[Row]) -> StepBatch:
        if isinstance(self.pool, GroupedPool):
            return build_group_batch(rows, self._generations, self.pool)
        return build_batch(rows, self._generations, self.pool.block_size, self.pool.device)

    def _paged(self, batch: StepBatch) -> LayerAttention:
        pool, workspace = self.pool, self.loaded.workspace
        if isinstance(pool, GroupedPool):
            singly = self.loaded.singly
            return GroupedStep(batch, pool, workspace, self.backend, self._timer, singly=singly)
        metadata = attention_metadata(batch.layout, pool, workspace, self.backend)
        return PagedStep(metadata, batch.slots, pool, self._timer)

    def _forward(self, batch: StepBatch, paged: LayerAttention | None) -> choose.ForwardOutput:
        """Run the model over a batch, outside of graphs."""
        assert paged is not None
        with ExitStack() as hooks:
            if isinstance(paged, GroupedStep):
                hooks.enter_context(mixing(self.loaded.mixers, paged.states))
                if self.loaded.latent_shapes:
                    hooks.enter_context(latents(self.loaded.model))
            ids, positions = batch.input_ids, batch.position_ids
            return choose.forward_output(self.loaded.logits(ids, positions, paged, batch.logit_index))

    def _witness(self, step: int, rows: Sequence[Row], batch: StepBatch, audits: bool) -> float:
        """Note the writes of every group, and check a step that is audited; returns the seconds of that."""
        if not (self._poisons and isinstance(self.pool, GroupedPool)):
            return 0.0
        start = self._clock()
        for index, (_, slots) in enumerate(batch.groups):
            self.pool.note_writes(index, slots.cpu().numpy())
        if audits:
            check_step(step, rows, batch, self.pool)
        for view, (_, slots) in zip(self.pool.views, batch.groups, strict=True):
            if isinstance(view, GroupView) and view.marks is not None:
                view.marks.write(slots)
        return self._clock() - start

    def _choose(self, plan: StepPlan, batch: StepBatch, output: choose.ForwardOutput) -> choose.ChosenTokens:
        rows = len(batch.sampled)
        choose.note_prompt_logprobs(batch.scored, output.logits[rows:], self._generations)
        if not rows:
            return choose.ChosenTokens()
        choice = self._chooser.choose(plan.step, batch.sampled, output.first(rows), self._generations)
        if choice.failed and not self._isolate:
            raise next(iter(choice.failed.values()))
        self.failures.update(choice.failed)
        return choice

    def _audit(self, plan: StepPlan) -> None:
        self.audits += 1
        if isinstance(self.pool, GroupedPool):
            assert isinstance(plan.usage, GroupUsage)
            check_units(plan.step, plan.usage.written_units(), self.pool)
            return
        found, expected = self.pool.written_slots(), plan.usage.token + plan.usage.cached
        if found != expected:
            raise AuditError(
                f"step {plan.step}: {found} slots of the pool are written, the scheduler counts {expected} "
                f"({plan.usage.token} of live sequences, {plan.usage.cached} cached)"
            )

    def _now(self) -> float:
        """The clock, after the device has finished all work."""
        if self._on_cuda:
            torch.cuda.synchronize(self.loaded.device)
        return self._clock()


def pool_for(
    loaded: LoadedModel, num_blocks: int, block_size: int, host_blocks: int, kv_dtype: KVDtype | str
) -> KVPool:
    """A KV pool for a model, on its device, in its data type or in 8 bits.

    Raises ModelError for a model that keeps recurrent states, for which blocks of one kind have no place.
    """
    if loaded.mixers:
        raise ModelError(
            f"model {loaded.name}: {len(loaded.states)} of its layers keep a recurrent state, for which a pool of one "
            "kind of block has no place; set groups (uniform, separate or lcm)"
        )
    return KVPool(
        loaded.kv_shapes,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=loaded.dtype,
        device=loaded.device,
        host_blocks=host_blocks,
        kv_dtype=kv_dtype,
    )
