"""Published trace files, where the machine has them, and ways to write small ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture
def published() -> Callable[[str], Path]:
    """The path of a published trace file; skips the test where the file is absent."""

    def find(name: str) -> Path:
        path = PUBLISHED / name
        if not path.exists():
            pytest.skip(f"published trace {name} is not in {PUBLISHED}")
        return path

    return find


@pytest.fixture
def mooncake_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes Mooncake rows (timestamp ms, input_length, output_length, hash_ids) to a file."""

    def write(*rows: tuple[int, int, int, list[int]]) -> Path:
        keys = ("timestamp", "input_length", "output_length", "hash_ids")
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def azure_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes Azure rows, given as lines, under the header of the format."""

    def write(*lines: str, end: str = "\n") -> Path:
        path = tmp_path / "rows.csv"
        path.write_text(end.join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]), newline="")
        return path

    return write
