"""The claims ledger: every claim of `claims.yaml` with what our code computes, now, and whether the row still holds.

A row holds where the computed values are the right ones of the row (`found`), and where the claim's own values agree
with them exactly when its verdict says that it is right. So a changed formula of the core breaks rows.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from harness.config.errors import UserError
from harness.console import install_hint
from harness.environment import ENGINE, missing
from harness.papers import attention, behaviour, sizes
from harness.store.atomic import write_files

# The verdict of a row, and how it is shown.
VERDICTS: Mapping[str, str] = {
    "right": "right",
    "condition": "right if",
    "wrong": "wrong",
    "open": "open",
    "none": "no claim",
}

# How far a computed value may be from the row's, relative: rows state four digits and more.
EXACT = 5e-4

# How far a claim's value may be from the computed one, relative, to count as the same, unless its row says else.
ROUNDED = 0.01


@dataclass(frozen=True)
class Claim:
    """One row. `compute` is a function's name with its arguments; `claimed` and `found` are by names of its values."""

    id: str
    says: str
    verdict: str
    right: str
    compute: tuple[str, Mapping[str, Any]] | None = None
    claimed: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)
    within: float = ROUNDED
    missing: str = ""
    why: str = ""

    @property
    def source(self) -> str:
        """The title of the lesson that it stands in."""
        return sources()[self.id.partition(".")[0]]


@dataclass(frozen=True)
class JudgedClaim:
    """A claim and what was computed for it; `faults` says what does not fit, and is empty where the row holds."""

    claim: Claim
    computed: Mapping[str, Any]
    faults: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether our code still computes what the row says."""
        return not self.faults

    @property
    def shown(self) -> str:
        """The computed values that the row speaks of, as text; and what is missing."""
        claim = self.claim
        names = [*claim.found, *(name for name in claim.claimed if name not in claim.found)]
        values = ", ".join(f"{_words(name)} {_text(self.computed[name])}" for name in names or self.computed)
        return "; ".join(part for part in (values, claim.missing) if part)


@cache
def _document() -> dict[str, Any]:
    text = files("harness.papers").joinpath("claims.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def sources() -> Mapping[str, str]:
    """The titles of the lessons by the beginning of a claim's id."""
    found: Mapping[str, str] = _document()["sources"]
    return found


@cache
def claims() -> tuple[Claim, ...]:
    """All claims in the order of their ids."""
    return tuple(_claim(row) for row in _document()["claims"])


def _claim(row: Mapping[str, Any]) -> Claim:
    compute = row.get("compute")
    return Claim(**{**row, "compute": next(iter(compute.items())) if compute else None})


def chosen(ids: Iterable[str]) -> list[Claim]:
    """The claims with these ids, or of these lessons; all without any. Raises UserError for an unknown one."""
    wanted = list(ids)
    for name in wanted:
        if not any(name in (claim.id, claim.id.partition(".")[0]) for claim in claims()):
            reason = f"there is no claim '{name}'; ids are S0.1 to S4.30, and S0, S1, S2, S3, S4 name whole lessons"
            raise UserError(reason)
    return [
        claim
        for claim in claims()
        if not wanted or claim.id in wanted or claim.id.partition(".")[0] in wanted
    ]


def compute(claim: Claim) -> Mapping[str, Any]:
    """The values of the claim's function; empty where it has none."""
    if claim.compute is None:
        return {}
    name, arguments = claim.compute
    module = next(module for module in (sizes, behaviour, attention) if hasattr(module, name))
    values: Mapping[str, Any] = getattr(module, name)(**arguments)
    return values


def judge(claim: Claim) -> JudgedClaim:
    """Compute the claim and compare. Without the engine nothing is computed for a claim about attention itself."""
    if claim.compute and hasattr(attention, claim.compute[0]) and missing(ENGINE):
        needed = f"needs the engine: {install_hint('engine')}"
        return JudgedClaim(replace(claim, found={}, claimed={}, missing=needed), {}, ())
    computed = compute(claim)
    return JudgedClaim(claim, computed, tuple(_faults(claim, computed)))


def _faults(claim: Claim, computed: Mapping[str, Any]) -> Iterator[str]:
    for name, right in claim.found.items():
        if not _same(computed.get(name), right, EXACT):
            yield f"{_words(name)}: our code gives {_text(computed.get(name))}, the row has {_text(right)}"
    if not claim.claimed:
        return
    agrees = all(_same(computed.get(name), value, claim.within) for name, value in claim.claimed.items())
    if agrees == (claim.verdict == "wrong"):
        yield f"the claim {'agrees' if agrees else 'does not agree'} with our code, the verdict is {claim.verdict}"


def _same(one: Any, other: Any, within: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_same(a, b, within) for a, b in zip(one, other, strict=True))
    if isinstance(one, bool) or isinstance(other, bool) or not isinstance(one, int | float):
        return type(one) is type(other) and bool(one == other)
    return isinstance(other, int | float) and abs(one - other) <= within * abs(other)


def _words(name: str) -> str:
    return name.replace("_percent", " %").replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "nothing"}[value]
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def tally(judged: Iterable[JudgedClaim]) -> str:
    """How many claims there are of each verdict, in words."""
    counts = Counter(one.claim.verdict for one in judged)
    longer = {"condition": "right under the condition given", "wrong": "wrong as stated"}
    words = {**VERDICTS, **longer, "none": "that cannot be tested"}
    parts = [f"{counts[verdict]} {text}" for verdict, text in words.items() if counts[verdict]]
    return f"{counts.total()} claims: {', '.join(parts)}"


PAGE = "index.html"
_COLUMNS = ("id", "source", "claim", "verdict", "computed", "right value", "why it is wrong", "row holds")


def write_claims(judged: Sequence[JudgedClaim], folder: Path, command: str) -> Path:
    """Write page and CSV; returns the path of the page. Raises StoreError where they cannot be written."""
    write_files(folder, {"claims.csv": table(judged).encode(), PAGE: page(judged, command).encode()})
    return folder / PAGE


def table(judged: Sequence[JudgedClaim]) -> str:
    """All rows as CSV."""
    import pandas as pd

    rows = []
    for one in judged:
        claim = one.claim
        verdict, holds = VERDICTS[claim.verdict], "yes" if one.holds else "; ".join(one.faults)
        rows.append([claim.id, claim.source, claim.says, verdict, one.shown, claim.right, claim.why, holds])
    return pd.DataFrame(rows, columns=list(_COLUMNS)).to_csv(index=False, lineterminator="\n")


def page(judged: Sequence[JudgedClaim], command: str) -> str:
    """The page, with a list of verdicts to choose from."""
    from harness.report.style import filled

    lessons = groupby(judged, lambda one: one.claim.id.partition(".")[0])
    return filled(
        Path(__file__).with_name("claims.html.j2"),
        verdicts=VERDICTS,
        tally=tally(judged),
        broken=[one for one in judged if not one.holds],
        lessons=[(name, sources()[name], list(rows)) for name, rows in lessons],
        command=command,
    )
