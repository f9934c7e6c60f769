"""Malformed CSV traces are refused by line and field, never repaired in silence."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from traces.errors import TraceError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
STAMP = "2023-11-16 18:15:46.6805900"
GOOD = f"{STAMP},374,44"


class Case(NamedTuple):
    name: str
    format: str
    content: bytes | str
    line: int
    field: str | None
    reason: str  # a part of it


def azure(*lines: str) -> str:
    return "\n".join([HEADER, *lines]) + "\n"


AZURE = [
    Case("no header", "azure", GOOD + "\n", 1, "TIMESTAMP", "header expected"),
    Case(
        "misspelt column",
        "auto",
        "TIMESTAMP,ContextToken,GeneratedTokens\n" + GOOD,
        1,
        "ContextTokens",
        "missing column ContextTokens",
    ),
    Case(
        "column twice",
        "auto",
        f"{HEADER},ContextTokens\n{GOOD},1",
        1,
        "ContextTokens",
        "column ContextTokens twice",
    ),
    Case("semicolons", "auto", HEADER.replace(",", ";") + "\n", 1, "TIMESTAMP", "semicolon"),
    Case(
        "multimodal",
        "auto",
        f"TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n{STAMP},1,2,3",
        1,
        "NumImages",
        "not a text trace",
    ),
    Case("2 fields", "auto", azure(GOOD, f"{STAMP},374"), 3, "line", "3 fields expected, found 2"),
    Case("4 fields", "auto", azure(GOOD, GOOD + ",1"), 3, "line", "3 fields expected, found 4"),
    Case("header repeated", "auto", azure(*[GOOD] * 399, HEADER), 401, "line", "header repeated"),
    Case("empty field", "auto", azure(f"{STAMP},,44"), 2, "ContextTokens", "is empty"),
    Case(
        "thousands",
        "auto",
        azure(f'{STAMP},"4,808",10'),
        2,
        "ContextTokens",
        '"4,808" is not a plain integer',
    ),
    Case(
        "underscore", "auto", azure(f"{STAMP},1_000,10"), 2, "ContextTokens", '"1_000" is not a plain integer'
    ),
    Case("full-width digits", "auto", azure(f"{STAMP},１２,10"), 2, "ContextTokens", "ASCII digits expected"),
    *[
        Case(f"number {text}", "auto", azure(f"{STAMP},{text},10"), 2, "ContextTokens", "not a plain integer")
        for text in ("12.5", "1e3", "+5", "0x10", " 5", "-", "--5")
    ],
    Case("huge number", "auto", azure(f"{STAMP},{'9' * 5000},10"), 2, "ContextTokens", "too large"),
    Case("below 1", "auto", azure(f"{STAMP},-5,10"), 2, "ContextTokens", "-5 is below 1"),
    Case("output below 0", "auto", azure(f"{STAMP},5,-1"), 2, "GeneratedTokens", "-1 is below 0"),
    Case("no such date", "auto", azure("2023-02-30 00:00:00.0000000,5,5"), 2, "TIMESTAMP", "no such date"),
    Case(
        "second 60", "auto", azure("2023-11-16 18:15:60.0000000,5,5"), 2, "TIMESTAMP", "seconds out of range"
    ),
    Case("hour 24", "auto", azure("2023-11-16 24:15:00.0000000,5,5"), 2, "TIMESTAMP", "hours out of range"),
    Case(
        "11 digits",
        "auto",
        azure("2023-11-16 18:15:46.12345678901,5,5"),
        2,
        "TIMESTAMP",
        "more than 9 fractional digits",
    ),
    Case(
        "another date form",
        "auto",
        azure("16/11/2023 18:15,5,5"),
        2,
        "TIMESTAMP",
        "YYYY-MM-DD HH:MM:SS expected",
    ),
    Case(
        "zone lost",
        "auto",
        azure("2024-05-12 00:00:00+00:00,5,5", "2024-05-12 00:00:01,5,5"),
        3,
        "TIMESTAMP",
        "without zone in a file with zones",
    ),
    Case(
        "time goes back",
        "auto",
        azure("2023-11-16 18:15:46.5,5,5", "2023-11-16 18:15:46.25,5,5"),
        3,
        "TIMESTAMP",
        "goes back by 250,000 us",
    ),
    Case("open quote", "auto", azure(GOOD, f'{STAMP},"374,44', GOOD), 3, "line", "unterminated quoted field"),
    Case("blank line inside CSV", "auto", azure(GOOD, "", GOOD), 3, "line", "blank line"),
]
VIDUR_HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
VIDUR = [
    Case("nan", "auto", VIDUR_HEADER + "nan,1,1", 2, "arrived_at", "finite, not negative number expected"),
    Case("inf", "auto", VIDUR_HEADER + "inf,1,1", 2, "arrived_at", "finite, not negative number expected"),
    Case(
        "negative", "auto", VIDUR_HEADER + "-0.5,1,1", 2, "arrived_at", "finite, not negative number expected"
    ),
    Case("finer than 1 us", "auto", VIDUR_HEADER + "4.3145791,1,1", 2, "arrived_at", "more than 6 decimals"),
]
CASES = [*AZURE, *VIDUR]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_malformed_csv_is_refused_where_it_is_wrong(case: Case, refusal: Callable[..., TraceError]) -> None:
    error = refusal(case.content, case.format)
    assert (error.line, error.field) == (case.line, case.field)
    assert case.reason in error.reason
