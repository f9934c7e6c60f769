"""Speculative decoding: a draft model proposes tokens, and the model verifies all of them in one pass.

The draft model has a KV pool of its own with the same block ids, so that block tables, copies, swaps and prefix hits
hold for both. Every row of a step also runs through the draft model. Without that, a block that one request filled
would be empty in the draft's pool for the next request that hits it. A proposed token is kept only if the model itself
chooses the same token, so the output is that of plain decoding, greedy or sampled.
"""

from collections.abc import Mapping, Sequence

import torch

from engine.core.plan import Row
from engine.runtime.attention.layer import PagedStep, Spans
from engine.runtime.attention.select import plan_step
from engine.runtime.batch import StepBatch, build_batch
from engine.runtime.decoding.choose import NO_TOKEN, decode
from engine.runtime.decoding.generation import Generation
from engine.runtime.errors import ModelError, NaNLogitsError
from engine.runtime.kv_pool import KVPool
from engine.runtime.models.load import LoadedModel


def run_model(
    loaded: LoadedModel, batch: StepBatch, pool: KVPool, backend: str, spans: Spans
) -> torch.Tensor:
    """Logits `[wanted positions, vocab]` of one pass over a batch, K and V kept in `pool`."""
    attention = plan_step(batch.layout, pool, loaded.workspace, backend)
    output = loaded.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.logit_index,
        paged=PagedStep(attention, batch.slots, pool, spans),
    )
    logits: torch.Tensor = output.logits[0]
    return logits


class Drafter:
    """A draft model and its lane."""

    def __init__(
        self, draft: LoadedModel, target: LoadedModel, pool: KVPool, backend: str, spans: Spans
    ) -> None:
        if draft.vocab_size != target.vocab_size:
            raise ModelError(
                f"draft model {draft.name} has {draft.vocab_size} tokens in its vocabulary, {target.name} has "
                f"{target.vocab_size}: it cannot propose to it"
            )
        self.pool = pool
        self._draft, self._backend, self._spans = draft, backend, spans

    def propose(self, step: int, rows: Sequence[Row], generations: Mapping[int, Generation]) -> None:
        """Bring the lane up to the step, and let rows with drafts have proposals: the generations keep them."""
        plain = [row for row in rows if not row.drafts]
        if plain:
            self._run(plain, generations)
        drafting = [row for row in rows if row.drafts]
        for row in drafting:
            generations[row.request_id].proposed = []
        for ahead in range(max((row.drafts for row in drafting), default=0)):
            going = [_one_token(row, ahead) for row in drafting if row.drafts > ahead]
            batch, logits = self._run(going, generations)
            tokens = decode(logits).tokens.tolist()
            if NO_TOKEN in tokens:
                raise NaNLogitsError(f"step {step}: NaN in the logits of the draft model {self._draft.name}")
            for row, token in zip(batch.sampled, tokens, strict=True):
                generations[row.request_id].propose(row.context_len + 1, token)

    def catch_up(
        self, rows: Sequence[Row], generations: Mapping[int, Generation], accepted: Mapping[int, int]
    ) -> None:
        """Where every proposal was right, the last one has not been through the draft model yet."""
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
        batch = build_batch(rows, generations, self.pool.block_size, self.pool.device)
        return batch, run_model(self._draft, batch, self.pool, self._backend, self._spans)


def _one_token(row: Row, ahead: int) -> Row:
    """The row of the draft model that reads the token `ahead` places behind the last known one."""
    return row._replace(context_len=row.context_len + ahead, query_len=1, drafts=0)
