"""Which rows a group contributes to a step: chunks of its prompt, its branches in lockstep, or their catching up."""

from engine.core.sequence import Group, ScheduledRow


def rows_of(group: Group, budget: int, prefill_cap: int | None = None) -> list[ScheduledRow]:
    """The group's rows in a step with `budget` tokens left, chunks capped at `prefill_cap`: none, if it cannot move."""
    if not group.forked:
        return [_root_row(group, budget, prefill_cap)]
    tokens = group.tokens
    lacking = [tokens - sequence.computed for sequence in group.sequences]
    if max(lacking) == 1:  # branches sample together or not at all
        whole = len(lacking) <= budget
        return [ScheduledRow(sequence, 1, True) for sequence in group.sequences] if whole else []
    return _catch_up(group, lacking, budget if prefill_cap is None else min(budget, prefill_cap))


def _root_row(group: Group, budget: int, prefill_cap: int | None) -> ScheduledRow:
    """A chunk of the prompt, or of all known tokens where there is one branch; when it decodes, drafts behind it."""
    (root,) = group.sequences
    lacking = group.root_target - root.computed
    query = min(lacking, budget if prefill_cap is None else min(budget, prefill_cap))
    samples = query == lacking and (group.request.width == 1 or group.generated == 0)
    speculation = group.request.speculation
    if speculation is None or lacking > 1 or not group.generated:
        return ScheduledRow(root, query, samples)
    drafts = min(speculation.tokens, group.remaining - 1, budget - 1)
    return ScheduledRow(root, 1 + drafts, True, drafts)


def _catch_up(group: Group, lacking: list[int], budget: int) -> list[ScheduledRow]:
    """After a preemption each branch computes its generated tokens again, all but the last."""
    rows = []
    for sequence, lack in zip(group.sequences, lacking, strict=True):
        query = min(lack - 1, budget)
        if query > 0:
            rows.append(ScheduledRow(sequence, query, False))
            budget -= query
    return rows
