"""The sums that a recorded conversation states of itself, against those of its requests."""

from traces.errors import RowError

Record = dict[str, object]


def check_totals(record: Record, entries: list[Record]) -> None:
    """The stated sums of input and output tokens, of the conversation and of its nested agents."""
    totals = record.get("totals")
    if not isinstance(totals, dict):
        return
    nested = [entry for entry in entries if entry.get("type") == "subagent"]
    own = [entry for entry in entries if entry.get("type") != "subagent"]
    groups = {"parent_tokens": own, "subagent_tokens": [r for entry in nested for r in entry["requests"]]}  # type: ignore[attr-defined]
    for group, requests in groups.items():
        stated = totals.get(group)
        if not isinstance(stated, dict):
            continue
        for side, key in (("input", "in"), ("output", "out")):
            found = sum(request[key] for request in requests)
            if stated.get(side, found) != found:
                raise RowError("totals", f"{group}.{side} states {stated[side]}, the requests sum to {found}")
