"""Published trace files, as excerpts or whole where the machine has them, and ways to write small ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from traces.errors import TraceError
from traces.reading import read_trace

EXCERPTS = Path(__file__).parents[1] / "data" / "traces"
PUBLISHED = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture
def excerpt() -> Callable[[str], Path]:
    """The path of an excerpt, which the repository carries; fails where it is absent."""

    def find(name: str) -> Path:
        path = EXCERPTS / name
        assert path.exists(), f"no excerpt {name} in tests/data/traces"
        return path

    return find


@pytest.fixture
def published() -> Callable[[str], Path]:
    """The path of a whole published file; skips the test where the file is absent."""

    def find(name: str) -> Path:
        path = PUBLISHED / name
        if not path.exists():
            reason = "too large for this repository, looked for in ../shared/traces beside the clone"
            pytest.skip(f"needs the whole {name}: {reason}")
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


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[[bytes | str, str], TraceError]:
    """The error with which a file of this content is refused; it names that file."""

    def read(content: bytes | str, format: str) -> TraceError:
        path = tmp_path / "trace.data"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(TraceError) as caught:
            read_trace(path, format)
        assert caught.value.file == str(path)
        return caught.value

    return read
