"""Which rows a group contributes to a step: chunks of its prompt, its branches in lockstep, or their catching up."""

from engine.core.sequence import Group, ScheduledRow


def rows_of(group: Group, budget: int) -> list[ScheduledRow]:
    """The group's rows in a step with `budget` tokens left: nothing, if it cannot move."""
    if not group.forked:
        return [_root_row(group, budget)]
    lacking = [group.tokens - sequence.computed for sequence in group.sequences]
    if max(lacking) == 1:  # branches sample together or not at all
        whole = len(lacking) <= budget
        return [ScheduledRow(sequence, 1, True) for sequence in group.sequences] if whole else []
    return _catch_up(group, lacking, budget)


def _root_row(group: Group, budget: int) -> ScheduledRow:
    """A chunk of the prompt, or of all known tokens where there is one branch."""
    (root,) = group.sequences
    query = min(group.root_target - root.computed, budget)
    complete = root.computed + query == group.root_target
    return ScheduledRow(root, query, complete and (group.request.width == 1 or group.generated == 0))


def _catch_up(group: Group, lacking: list[int], budget: int) -> list[ScheduledRow]:
    """After a preemption each branch computes its generated tokens again, all but the last."""
    rows = []
    for sequence, lack in zip(group.sequences, lacking, strict=True):
        query = min(lack - 1, budget)
        if query > 0:
            rows.append(ScheduledRow(sequence, query, False))
            budget -= query
    return rows
