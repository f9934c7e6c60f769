"""The page of a part: one line for each goal, and which steps gave an answer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_acceptance.counters import counter_lines
from gpu_acceptance.goals import Judged
from gpu_acceptance.judging import judge_part
from gpu_acceptance.machine import last_level_cache_bytes
from gpu_acceptance.parts import Outcome
from harness.config.errors import UserError
from harness.environment import versions
from harness.store.atomic import write_files

PAGE, FACTS, PROPOSAL = "README.md", "summary.json", "cascade_proposal.json"


def write_page(out: Path, part: str, outcomes: Sequence[Outcome], device: str, *, here: bool = True) -> Path:
    """Write the page and `summary.json` into `out`. Steps of earlier calls stay, unless this call repeats them.

    `here` False means that the part was measured on another machine. Versions and cache size then stay unchanged.
    """
    before = _facts(out)
    judged = judge_part(part, out)
    steps = {one["name"]: one for one in before.get("steps", ())} | {
        one.step.name: _step(one) for one in outcomes
    }
    cache_bytes = last_level_cache_bytes() if here else before.get("cache_bytes", 0)
    facts = {
        "part": part,
        "device": device,
        "versions": versions() if here else before.get("versions", {}),
        "cache_bytes": cache_bytes,
        "steps": list(steps.values()),
        "goals": [_goal(one) for one in judged],
    }
    page = "\n".join([*_page(facts, judged), "", *counter_lines(out)]).rstrip("\n") + "\n"
    files = {PAGE: page.encode(), FACTS: (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode()}
    write_files(out, {**_proposal(out, cache_bytes), **files})
    return out / PAGE


def known_device(out: Path) -> str:
    """The device of an earlier page.

    Raises:
        UserError: `out` has no earlier page.
    """
    device = _facts(out).get("device")
    if not device:
        raise UserError(
            f"--judge: {out} has no {FACTS} of a run; unpack the archive of one there, or run the part"
        )
    return str(device)


def _facts(out: Path) -> Mapping[str, Any]:
    file = out / FACTS
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _step(one: Outcome) -> dict[str, Any]:
    words = " ".join(word if "/" not in word else Path(word).name for word in one.step.words)
    return {
        "name": one.step.name,
        "state": one.state,
        "code": one.code,
        "seconds": round(one.seconds, 1),
        "command": words,
    }


def _goal(one: Judged) -> dict[str, Any]:
    goal, found = one.goal, one.found
    return {
        "key": goal.key,
        "row": goal.row,
        "figure": goal.figure,
        "found": found.value,
        "where": found.where,
        "aim": goal.aim,
        "sense": str(goal.sense),
        "verdict": one.verdict,
        "source": goal.source,
    }


def _proposal(out: Path, cache_bytes: int) -> dict[str, bytes]:
    """Proposed constants of the cascade's cost rule, where cascades were timed. A person reads and applies them."""
    from gpu_acceptance.kernel_goals import proposal, timed_cases

    shared = [case for case in timed_cases(out) if case.ours["shared_prefix"] and case.ours["queries"] == 1]
    proposed = proposal(shared, cache_bytes) if shared else None
    return {PROPOSAL: (json.dumps(proposed, indent=1) + "\n").encode()} if proposed else {}


def _page(facts: Mapping[str, Any], judged: Sequence[Judged]) -> Iterator[str]:
    yield f"# {facts['device']}: {facts['part']}"
    yield ""
    yield f"Made by `make gpu PART={facts['part']}`; `logs/` holds what each step printed, the folders its raw data."
    yield ""
    yield "| goal | figure | found | aim | met | where |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for one in judged:
        found = "–" if one.found.value is None else one.goal.shown(one.found.value)
        cells = (one.goal.row, one.goal.figure, found, one.goal.wanted, one.verdict, one.found.where)
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| step | state | seconds | command |"
    yield "| --- | --- | --- | --- |"
    for step in facts["steps"]:
        yield f"| {step['name']} | {step['state']} | {step['seconds']:.0f} | `{step['command']}` |"
    if facts["versions"]:
        yield ""
        yield ", ".join(f"{name} {found}" for name, found in facts["versions"].items() if found)
