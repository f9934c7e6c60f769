"""Malformed files, CSV and JSON lines are refused by line and field, never repaired in silence."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from traces.errors import TraceError
from traces.reading import read_trace

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


def mooncake(timestamp: object = 0, prompt: object = 600, output: object = 5, ids: object = "[0, 1]") -> str:
    return f'{{"timestamp": {timestamp}, "input_length": {prompt}, "output_length": {output}, "hash_ids": {ids}}}\n'


def azure(*lines: str) -> str:
    return "\n".join([HEADER, *lines]) + "\n"


ANY = [
    Case("empty file", "auto", b"", 1, None, "empty file"),
    Case("header only", "auto", HEADER + "\n", 1, None, "no data rows"),
    Case("blank lines only", "auto", "\n\n\n", 1, None, "no data rows"),
    Case("blank lines only, format named", "mooncake", "\n\n\n", 1, None, "no data rows"),
    Case(
        "LFS pointer",
        "auto",
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        1,
        None,
        "LFS pointer",
    ),
    Case("HTML page", "auto", "<!DOCTYPE html>\n<html></html>\n", 1, None, "HTML page"),
    Case("gzip without .gz", "auto", b"\x1f\x8b\x08\x00abc", 1, None, "gzip"),
    Case(
        "not UTF-8",
        "auto",
        azure(GOOD).encode() + b"2023-11-16 18:15:47,\xff,5\n",
        3,
        "line",
        "not UTF-8 at byte 21",
    ),
    Case("not UTF-8 in line 1", "auto", b"TIMESTAMP\xff\n", 1, "line", "not UTF-8"),
    Case("NUL byte", "auto", HEADER + "\n2023-11-16 18:15:47,\0005,5\n", 2, "line", "NUL byte"),
    Case("unknown format", "auto", "a,b,c\n1,2,3\n", 1, None, "formats: azure, mooncake, vidur, burstgpt"),
]
JSONL = [
    Case("blank line inside", "auto", mooncake() + "\n" + mooncake(), 2, "line", "blank line"),
    Case("cut file", "auto", mooncake() + mooncake()[:-4], 2, "line", "JSON ends early"),
    Case("cut inside a name", "auto", '{"timestamp": 0, "inp', 1, "line", "JSON ends early"),
    Case("two objects a line", "auto", mooncake() + mooncake()[:-1] + mooncake(), 2, "line", "extra data"),
    Case("array over lines", "auto", "[\n" + mooncake() + "]\n", 1, "line", "one object a line"),
    Case("a list", "mooncake", mooncake() + "[0, 6758, 500]\n", 2, "line", "expected an object, found list"),
    Case("single quotes", "auto", "{'timestamp': 0}\n", 1, "line", "JSON syntax"),
    Case(
        "repeated key", "auto", '{"timestamp": 0, "timestamp": 5}\n', 1, "timestamp", 'key "timestamp" twice'
    ),
    Case("NaN", "auto", mooncake("NaN"), 1, "timestamp", "not a finite number"),
    Case("Infinity", "auto", mooncake("Infinity"), 1, "timestamp", "not a finite number"),
    Case("5,000 digits", "auto", mooncake(prompt="9" * 5000), 1, "line", "integer too large"),
    Case("deep nesting", "mooncake", mooncake() + "[" * 100_000, 2, "line", "nesting too deep"),
]
MOONCAKE = [
    Case(
        "no input_length",
        "mooncake",
        '{"timestamp": 0, "output_length": 1, "hash_ids": []}',
        1,
        "input_length",
        "missing key",
    ),
    Case(
        "misspelt hash_ids",
        "mooncake",
        mooncake().replace("hash_ids", "hash_id"),
        1,
        "hash_ids",
        "missing key hash_ids, unknown key hash_id",
    ),
    Case("string time", "mooncake", mooncake('"0"'), 1, "timestamp", "integer expected, found string"),
    Case(
        "fractional time",
        "mooncake",
        mooncake("27482.5"),
        1,
        "timestamp",
        "milliseconds expected, found 27482.5",
    ),
    Case("boolean time", "mooncake", mooncake("true"), 1, "timestamp", "integer expected, found boolean"),
    Case("negative time", "mooncake", mooncake(-1), 1, "timestamp", "-1 is below 0"),
    Case("huge time", "mooncake", mooncake(10**30), 1, "timestamp", "too large"),
    Case("time goes back", "mooncake", mooncake(3000) + mooncake(2999), 2, "timestamp", "behind line 1"),
    Case("input 0", "mooncake", mooncake(prompt=0, ids="[]"), 1, "input_length", "0 is below 1"),
    Case(
        "input 6955.0",
        "mooncake",
        mooncake(prompt="6955.0"),
        1,
        "input_length",
        "integer expected, found 6955.0",
    ),
    Case(
        "input null", "mooncake", mooncake(prompt="null"), 1, "input_length", "integer expected, found null"
    ),
    Case("output -3", "mooncake", mooncake(output=-3), 1, "output_length", "-3 is below 0"),
    Case("ids null", "mooncake", mooncake(ids="null"), 1, "hash_ids", "list expected, found null"),
    Case(
        "an id too few",
        "mooncake",
        mooncake(prompt=6758, ids=list(range(13))),
        1,
        "hash_ids",
        "= 14 ids expected, found 13",
    ),
    Case(
        "an id too many",
        "mooncake",
        mooncake(prompt=6656, ids=list(range(14))),
        1,
        "hash_ids",
        "= 13 ids expected, found 14",
    ),
    Case("negative id", "mooncake", mooncake(ids="[0, -1]"), 1, "hash_ids[1]", "-1 is below 0"),
    Case(
        "fractional id", "mooncake", mooncake(ids="[0, 1.0]"), 1, "hash_ids[1]", "integer expected, found 1.0"
    ),
    Case(
        "string id", "mooncake", mooncake(ids='[0, "1"]'), 1, "hash_ids[1]", "integer expected, found string"
    ),
    Case("null id", "mooncake", mooncake(ids="[0, null]"), 1, "hash_ids[1]", "integer expected, found null"),
    Case("list id", "mooncake", mooncake(ids="[0, [1]]"), 1, "hash_ids[1]", "integer expected, found list"),
    Case(
        "boolean id",
        "mooncake",
        mooncake(ids="[0, true]"),
        1,
        "hash_ids[1]",
        "integer expected, found boolean",
    ),
    Case("id of 2^64", "mooncake", mooncake(ids=f"[0, {2**64}]"), 1, "hash_ids[1]", "does not fit 64 bits"),
    Case("id twice in a row", "mooncake", mooncake(ids="[7, 7]"), 1, "hash_ids", "id 7 twice"),
    Case(
        "another parent",
        "mooncake",
        mooncake(ids="[4, 5]") + mooncake(ids="[9, 5]"),
        2,
        "hash_ids",
        "id 5 has parent 9, had parent 4 at line 1",
    ),
    Case(
        "another position",
        "mooncake",
        mooncake(prompt=1600, ids="[1, 2, 3, 5]") + mooncake(prompt=1500, ids="[1, 2, 5]"),
        2,
        "hash_ids",
        "id 5 at position 2, was at 3 at line 1",
    ),
]
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
CASES = [*ANY, *JSONL, *MOONCAKE, *AZURE, *VIDUR]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_malformed_input_is_refused_where_it_is_wrong(case: Case, refusal: Callable[..., TraceError]) -> None:
    error = refusal(case.content, case.format)
    assert (error.line, error.field) == (case.line, case.field)
    assert case.reason in error.reason


def test_a_wrong_checksum_is_refused_with_both_values(azure_file) -> None:
    with pytest.raises(TraceError, match=r"rows\.csv:1: sha256: expected 00.*, found [0-9a-f]{64}"):
        read_trace(azure_file(GOOD), expect_sha256="00" * 32)


def test_the_message_reads_file_line_field_reason(azure_file) -> None:
    path = azure_file(f"{STAMP},,44")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}:2: ContextTokens: is empty"


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.csv: cannot be read: No such file"):
        read_trace(tmp_path / "absent.csv")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)


def test_a_gzip_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03abc")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)
