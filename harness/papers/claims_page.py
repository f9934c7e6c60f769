"""The claims ledger as files: one HTML page without network, and a CSV."""

import csv
import io
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from harness.papers.ledger import VERDICTS, Judged, sources, tally
from harness.store.atomic import write_files

PAGE = "index.html"
_COLUMNS = ("id", "source", "claim", "verdict", "computed", "right value", "why it is wrong", "row holds")


def write_claims(judged: Sequence[Judged], folder: Path, command: str) -> Path:
    """Write page and CSV; returns the path of the page. Raises StoreError where they cannot be written."""
    write_files(folder, {"claims.csv": table(judged).encode(), PAGE: page(judged, command).encode()})
    return folder / PAGE


def table(judged: Sequence[Judged]) -> str:
    """All rows as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for one in judged:
        claim = one.claim
        verdict, holds = VERDICTS[claim.verdict], "yes" if one.holds else "; ".join(one.faults)
        writer.writerow(
            [claim.id, claim.source, claim.says, verdict, one.shown, claim.right, claim.why, holds]
        )
    return text.getvalue()


def page(judged: Sequence[Judged], command: str) -> str:
    """The page, with a list of verdicts to choose from."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    css = files("harness.report").joinpath("page.css").read_text(encoding="utf-8")
    text = files("harness.papers").joinpath("claims.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    lessons = groupby(judged, lambda one: one.claim.id.partition(".")[0])
    return environment.from_string(text).render(
        style=Markup(css),
        verdicts=VERDICTS,
        tally=tally(judged),
        broken=[one for one in judged if not one.holds],
        lessons=[(name, sources()[name], list(rows)) for name, rows in lessons],
        command=command,
    )
