"""Log-probabilities of chosen tokens, for requests that ask for them: of the model's own logits, before any limits."""

from collections.abc import Mapping, Sequence

import torch

from engine.runtime.drawing import Draw
from engine.runtime.sequences import Generation, TokenLogprobs


def note_logprobs(
    draws: Sequence[Draw], tokens: Sequence[int], logits: torch.Tensor, generations: Mapping[int, Generation]
) -> None:
    """Note what the draws' requests asked for; logits `[rows, vocab]`."""
    wanted = [
        (draw, token, count)
        for draw, token in zip(draws, tokens, strict=True)
        if (count := generations[draw.request_id].rules.logprobs) is not None
    ]
    if not wanted:
        return
    rows = torch.tensor([draw.row for draw, _, _ in wanted], device=logits.device)
    logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
    chosen = torch.tensor([token for _, token, _ in wanted], device=logits.device).unsqueeze(1)
    own = logprobs.gather(1, chosen)
    ranks = (logprobs > own).sum(dim=1) + 1
    widest = min(max(count for _, _, count in wanted), logits.shape[1])
    best, ids = logprobs.topk(widest, dim=1) if widest else (logprobs[:, :0], chosen[:, :0])
    columns = zip(wanted, own.flatten().tolist(), ranks.tolist(), ids.tolist(), best.tolist(), strict=True)
    for (draw, token, count), logprob, rank, top, values in columns:
        pairs = tuple(zip(top[:count], values[:count], strict=True))
        generations[draw.request_id].logprobs[draw.branch].append(TokenLogprobs(token, logprob, rank, pairs))
