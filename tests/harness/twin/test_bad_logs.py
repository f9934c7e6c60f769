"""One impossible scalar in a good file of any format is refused, with the file's name, and nothing else happens."""

import gzip
from pathlib import Path

import pytest
from bad_logs import FORMATS, BadFile, Format, bad_files
from tiers import cases, tier

from harness.twin.reading import EngineLogError, read_engine_log
from traces.errors import TraceError
from traces.formats import files
from traces.reading import read_trace


def read(folder: Path, form: Format, content: bytes) -> None:
    (folder / form.file).write_bytes(content)
    if form.name == "series":  # which stands beside requests
        (folder / "log.csv").write_text(next(one.text for one in FORMATS if one.name == "plain-csv"))
    if form.trace is None:
        read_engine_log(folder)
    else:
        read_trace(folder / form.file, form.trace)


def refusal(folder: Path, bad: BadFile) -> str | None:
    try:
        read(folder, bad.format, bad.content)
    except TraceError as error:
        return str(error)
    return None


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_good_file_is_read(form: Format, tmp_path: Path) -> None:
    read(tmp_path, form, form.text.encode())


@cases(
    "form",
    FORMATS,
    day=6,
    ids=lambda form: form.name,
)
def test_no_impossible_scalar_is_believed(form: Format, tmp_path: Path) -> None:
    """By day every twelfth of some 1,250 files, each format with others."""
    chosen = [bad for bad in bad_files() if bad.format is form][:: tier(12, 1)]
    said = {bad.what: refusal(tmp_path, bad) for bad in chosen}
    assert [what for what, text in said.items() if text is None or form.file not in text] == []


def test_a_packed_document_that_unpacks_to_too_much_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 1 << 20)
    file = tmp_path / "result.json.gz"
    file.write_bytes(
        gzip.compress(b'{"input_lens": [], "output_lens": [], "ttfts": [], "itls":\n' + b"[\n" * (1 << 20))
    )
    with pytest.raises(EngineLogError, match="beyond 1 MiB of one document"):
        read_engine_log(tmp_path)
