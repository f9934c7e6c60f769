"""Speculative decoding: a draft model proposes tokens, and the model verifies all of them in one pass.

The draft model has its own KV pool, the draft KV pool, with the same block ids. So block tables, copies, swaps and
prefix cache hits hold for both pools. Every row of a step also runs through the draft model. Otherwise a block that one
request filled would be empty in the draft KV pool for the next request that hits it. A proposed token is kept only if
the model itself chooses the same token, so the output equals that of plain decoding, greedy or sampled.
"""

from collections.abc import Mapping, Sequence

import torch

from engine.core.plan import Row
from engine.runtime.attention.layer import NO_TIMER, PagedStep
from engine.runtime.attention.select import attention_metadata
from engine.runtime.batch import StepBatch, build_batch
from engine.runtime.decoding.choose import NO_TOKEN, forward_output
from engine.runtime.decoding.generation import Generation
from engine.runtime.errors import ModelError, NaNLogitsError
from engine.runtime.kv_pool import KVPool
from engine.runtime.models.load import LoadedModel


class Drafter:
    """A draft model and its KV pool. Raises ModelError if its vocabulary has another size than the target's.

    `Runner.execute` calls `propose` before the model runs, and `catch_up` after the tokens are chosen.
    """

    def __init__(self, draft: LoadedModel, target: LoadedModel, pool: KVPool, backend: str) -> None:
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
            tokens = forward_output(logits).tokens.tolist()
            if NO_TOKEN in tokens:
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
        batch = build_batch(rows, generations, self.pool.block_size, self.pool.device)
        metadata = attention_metadata(batch.layout, self.pool, self._draft.workspace, self._backend)
        paged = PagedStep(metadata, batch.slots, self.pool, NO_TIMER)
        return batch, self._draft.logits(batch.input_ids, batch.position_ids, paged, batch.logit_index)


def _one_token(row: Row, ahead: int) -> Row:
    """The draft model's row for the token `ahead` positions after the last known one."""
    return row._replace(context_len=row.context_len + ahead, query_len=1, drafts=0)
