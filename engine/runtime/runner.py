"""The measured executor: runs a step plan on the model, and returns its result and the seconds of each part."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.core.errors import CoreError
from engine.core.plan import IntArray, Row, StepPlan, StepResult
from engine.core.request import Request
from engine.runtime.attention.layer import NO_SPANS, ClockSpans, CudaSpans, PagedStep, Spans
from engine.runtime.attention.plans import AttentionPlan
from engine.runtime.attention.select import check_kv_dtype, engine_backend, plan_step
from engine.runtime.batch import StepBatch, build_batch
from engine.runtime.decoding.choose import Choice, Decoded, TokenChooser, decode
from engine.runtime.decoding.generation import Generation
from engine.runtime.drafts import Drafter
from engine.runtime.errors import AuditError, NaNLogitsError
from engine.runtime.graphs import DecodeGraphs, GraphOptions
from engine.runtime.kv_pool import KVPool, Lanes
from engine.runtime.models.load import LoadedModel
from engine.runtime.options import AUDITS, KVDtype
from engine.runtime.params import PLAIN, DecodingRules


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step by the runner's clock.

    `attention_s` is the attention function's own time over all layers, part of `forward_s`. `audit_s` (poisoning freed
    blocks, counting slots) is no part of the others: an engine that is not on trial does not do it.
    """

    build_s: float
    forward_s: float  # swaps, block copies and the model
    attention_s: float
    sample_s: float
    audit_s: float


class Runner:
    """Runs plans over its own KV pool. Build one per run; the loaded model is shared.

    `audit`: `off` neither poisons nor counts, `sampled` counts every `audit_every` steps, `full` at every step. With
    `isolate` a request whose logits are NaN ends alone, and its error waits in `failures`; else the step raises it.
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
        kv_dtype: KVDtype | str = KVDtype.MODEL,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if audit not in AUDITS or audit_every < 1 or temperature <= 0:
            raise CoreError(
                f"audit {audit!r} must be one of {', '.join(AUDITS)}, audit_every {audit_every} at least 1 and "
                f"temperature {temperature} above 0"
            )
        self.backend = engine_backend(backend, loaded.device)
        check_kv_dtype(kv_dtype, loaded.device, backend)
        make_pool = partial(
            pool_for, num_blocks=num_blocks, block_size=block_size, host_blocks=host_blocks, kv_dtype=kv_dtype
        )
        self.pool = make_pool(loaded)
        self.audits = 0  # how many steps were audited
        self.failures: dict[int, NaNLogitsError] = {}  # by request, until the owner of the runner takes them
        self._isolate = isolate
        self._loaded = loaded
        self._poisons = audit != "off"
        self._audit_every = {"off": 0, "sampled": audit_every, "full": 1}[audit]
        self._chooser = TokenChooser(seed, temperature)
        self._clock = clock
        self._on_cuda = loaded.device.type == "cuda"
        self._spans: Spans = CudaSpans() if self._on_cuda else ClockSpans(clock)
        self._generations: dict[int, Generation] = {}
        self.drafter: Drafter | None = None
        if draft is not None:
            self.drafter = Drafter(draft, loaded, make_pool(draft), self.backend, NO_SPANS)
        self.graphs: DecodeGraphs | None = None
        if graphs is not None:
            self.graphs = graphs.record(loaded, self.pool, self.backend)
        self._lanes = Lanes([self.pool, *([self.drafter.pool] if self.drafter else [])])

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, request: Request, prompt_ids: IntArray, rules: DecodingRules = PLAIN) -> None:
        """Make a request known before its first row is planned: prompt ids `[prompt_tokens]`."""
        if request.width > self._loaded.vocab_size:
            raise CoreError(
                f"request {request.request_id}: width {request.width} exceeds the vocabulary of "
                f"{self._loaded.vocab_size}"
            )
        self._generations[request.request_id] = Generation(request, prompt_ids, rules)

    def generation(self, request_id: int) -> Generation:
        """What is known of a request."""
        return self._generations[request_id]

    def outputs(self, request_id: int) -> list[list[int]]:
        """Generated token ids per branch, so far; beam hypotheses best first."""
        return self._generations[request_id].outputs()

    def scores(self, request_id: int) -> list[float]:
        """Beam scores, best first: log-probability over generated length (0 each where nothing is scored)."""
        return self._generations[request_id].scores()

    def forget(self, request_id: int) -> None:
        """Drop a request's tokens."""
        del self._generations[request_id]

    # -- a step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> tuple[StepResult, StepTimes]:
        """Swap out, poison what is void, swap in, copy blocks, run the rows, choose tokens.

        Raises NaNLogitsError (step and sequence), and AuditError (step and both counts).
        """
        if plan.repeat != 1:
            raise CoreError(f"step {plan.step}: the engine takes one step at a time, not {plan.repeat}")
        if self._poisons:
            self._lanes.void_stale(plan)
        start = self._now()
        self._lanes.save(plan)
        saved = self._now()
        if self._poisons:
            self._lanes.void(plan)
        poisoned = self._now()
        rows = self._rows(plan)
        self._lanes.fill(plan)
        if self.drafter is not None:
            self.drafter.propose(plan.step, rows, self._generations)
        filled = self._now()
        batch = build_batch(rows, self._generations, self.pool.block_size, self.pool.device)
        graphs = self.graphs if self.graphs is not None and self.graphs.fits(batch) else None
        attention = None if graphs else self._attention(batch)
        built = self._now()
        decoded = graphs.run(batch) if graphs else self._forward(batch, attention)
        ran = self._now()
        self._audit(plan)
        audited = self._now()
        choice = self._choose(plan, batch, decoded)
        if self.drafter is not None:
            self.drafter.catch_up(rows, self._generations, choice.accepted)
        times = StepTimes(
            build_s=built - filled,
            forward_s=ran - built + filled - poisoned + saved - start,
            attention_s=self._spans.total_s(),
            sample_s=self._now() - audited,
            audit_s=poisoned - saved + audited - ran,
        )
        over = frozenset(choice.finished.union(choice.failed))
        result = StepResult(
            parents=choice.parents, finished=over, ended=choice.ended, accepted=choice.accepted
        )
        return result, times

    def written_slots(self) -> int:
        """Usable slots that hold numbers; the books' tokens and cached slots unless `audit` is off."""
        return self.pool.written_slots()

    def _rows(self, plan: StepPlan) -> Sequence[Row]:
        """The plan's rows; drafts that are written into a fork are still tokens of the one sequence."""
        if self.drafter is None:
            return plan.rows
        return [row._replace(branch=0) if row.drafts else row for row in plan.rows]

    def _attention(self, batch: StepBatch) -> AttentionPlan:
        return plan_step(batch.layout, self.pool, self._loaded.workspace, self.backend)

    def _forward(self, batch: StepBatch, attention: AttentionPlan | None) -> Decoded:
        """The model's pass over the batch."""
        assert attention is not None
        paged = PagedStep(attention, batch.slots, self.pool, self._spans)
        output = self._loaded.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_index,
            paged=paged,
        )
        return decode(output.logits[0])

    def _choose(self, plan: StepPlan, batch: StepBatch, decoded: Decoded) -> Choice:
        if not batch.sampled:
            return Choice()
        choice = self._chooser.choose(plan.step, batch.sampled, decoded, self._generations)
        if choice.failed and not self._isolate:
            raise next(iter(choice.failed.values()))
        self.failures.update(choice.failed)
        return choice

    def _audit(self, plan: StepPlan) -> None:
        if not self._audit_every or plan.step % self._audit_every:
            return
        self.audits += 1
        found, books = self.pool.written_slots(), plan.usage.token + plan.usage.cached
        if found != books:
            raise AuditError(
                f"step {plan.step}: {found} slots of the pool are written, the books say {books} "
                f"({plan.usage.token} of live sequences, {plan.usage.cached} cached)"
            )

    def _now(self) -> float:
        """The clock, when the device has finished what it was given."""
        if self._on_cuda:
            torch.cuda.synchronize(self._loaded.device)
        return self._clock()


def pool_for(
    loaded: "LoadedModel",
    *,
    num_blocks: int,
    block_size: int,
    host_blocks: int = 0,
    kv_dtype: KVDtype | str = KVDtype.MODEL,
) -> KVPool:
    """A model's pool, on its device, in its type or a narrower one."""
    return KVPool(
        loaded.kv_shapes,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=loaded.dtype,
        device=loaded.device,
        host_blocks=host_blocks,
        kv_dtype=kv_dtype,
    )
