"""Which format a file or folder is in, from its content alone: header names or JSON keys, never a file name's end."""

import json
from collections.abc import Callable
from pathlib import Path

from traces.canonical.jsonl import CanonicalRows
from traces.canonical.parquet import MAGIC, CanonicalParquet
from traces.errors import TraceError
from traces.formats.agentic import AgenticSource
from traces.formats.azure import AzureReader
from traces.formats.bailian import BailianReader
from traces.formats.burstgpt import BurstGptReader
from traces.formats.lengths import ChatLengthsReader, LengthsReader
from traces.formats.mooncake import MooncakeReader
from traces.formats.ragpulse import TRACE_FILE, RagPulseReader
from traces.formats.servegen import ServeGenSource
from traces.formats.servingsim import ServingSimSource
from traces.formats.sharegpt import ShareGptSource
from traces.formats.simple import SimpleReader
from traces.formats.vidur import VidurReader
from traces.lines import LineRows
from traces.rows import RowReader
from traces.source import SourceFile, open_source
from traces.streaming import ReadOptions, RowSource

_LINE_READERS: dict[str, Callable[[SourceFile], RowReader]] = {
    "azure": lambda file: AzureReader(),
    "mooncake": lambda file: MooncakeReader(),
    "vidur": lambda file: VidurReader(),
    "burstgpt": lambda file: BurstGptReader(),
    "bailian": lambda file: BailianReader(),
    "ragpulse": lambda file: RagPulseReader(Path(file.path)),
    "lengths": lambda file: LengthsReader(),
    "lengths_chat": lambda file: ChatLengthsReader(),
    "simple": lambda file: SimpleReader(file.first_line),
}
_DOCUMENTS = ("agentic", "sharegpt", "servegen", "servingsim", "pagetwin")
READERS = (*_LINE_READERS, *_DOCUMENTS)
FORMATS = ("auto", *READERS)

_BY_COLUMN = {  # a column that one format alone has
    "TIMESTAMP": "azure",
    "ContextTokens": "azure",
    "arrived_at": "vidur",
    "Log Type": "burstgpt",
    "Request tokens": "burstgpt",
    "pd_ratio": "lengths",
    "num_total_tokens": "lengths",
    "arrival_s": "simple",
}
_BY_KEY = {  # a key that one format alone has; the first that is found decides
    "header": "pagetwin",
    "pagetwin_trace": "pagetwin",
    "hash_id_scope": "agentic",
    "block_size": "agentic",
    "parent_chat_id": "bailian",
    "chat_id": "bailian",
    "sub_requests": "servingsim",
    "input_toks": "servingsim",
    "arrival_s": "simple",
}
_LOOK = 1 << 16  # characters of a first line that are looked at where it is no JSON of its own


def open_rows(format: str, path: str | Path, options: ReadOptions) -> RowSource:
    """Open a source in a named format; raises TraceError."""
    place = Path(path)
    if format == "agentic":
        return AgenticSource(place, options.arrivals, options.seed, options.expect_sha256)
    if format == "servegen":
        return ServeGenSource(place, options.seed)
    if format == "pagetwin" and _is_parquet(place):
        return CanonicalParquet(place, options.expect_sha256)
    file = open_source(_inside(place) if format == "ragpulse" else path, options.expect_sha256)
    if format in ("mooncake", "bailian", "servingsim", "simple") and not file.first_line.strip():
        _refuse_blank(file)
    if format == "servingsim":
        return ServingSimSource(file, options.vocab_size)
    if format == "sharegpt":
        return ShareGptSource(file, options.encode)
    if format == "pagetwin":
        return CanonicalRows(file)
    return LineRows(file, _LINE_READERS[format](file))


def detect_format(path: str | Path) -> str:
    """The format's name; raises TraceError where the content belongs to no format that is read here."""
    place = Path(path)
    if place.is_dir():
        return _folder_format(place)
    if _is_parquet(place):
        return "pagetwin"
    file = open_source(path)
    found = line_format(file.first_line)
    if found is None and file.first_line.strip() == "[":  # an array spread over lines
        found = _array_format(file)
    if found is not None:
        return found
    if not file.first_line.strip():
        _refuse_blank(file)
    raise TraceError(file.path, 1, None, f"no known header or keys; formats: {', '.join(READERS)}")


def line_format(first_line: str) -> str | None:
    """The format of a file with this first line, or None."""
    text = first_line.strip()
    if text.startswith("{"):
        return _object_format(text)
    if text.startswith("["):
        return _text_format(text[:_LOOK]) if text != "[" else None
    names = {name.strip().strip('"') for name in text[:_LOOK].replace(";", ",").split(",")}
    if "session_id" in names and names & {"input_tok_ids"}:
        return "servingsim"
    return next((form for column, form in _BY_COLUMN.items() if column in names), None)


def _object_format(text: str) -> str | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return _text_format(text[:_LOOK])
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("hash_ids"), dict):
        return "ragpulse"
    return next((form for key, form in _BY_KEY.items() if key in record), "mooncake")


def _text_format(text: str) -> str:
    """By the keys that occur in a text that cannot be parsed on its own."""
    if '"conversations"' in text:
        return "sharegpt"
    if '"sys_prompt"' in text:
        return "ragpulse"
    return next((form for key, form in _BY_KEY.items() if f'"{key}"' in text), "mooncake")


def _array_format(file: SourceFile) -> str:
    head = b""
    for _, raw in file.lines():
        head += raw
        if len(head) > _LOOK:
            break
    return "sharegpt" if b'"conversations"' in head else "mooncake"


def _folder_format(folder: Path) -> str:
    if (folder / TRACE_FILE).is_file():
        return "ragpulse"
    if next(folder.rglob("chunk-*-trace.csv"), None) is not None:
        return "servegen"
    first = next(iter(sorted(folder.glob("*.json"))), None)
    if first is not None and line_format(open_source(first).first_line) == "agentic":
        return "agentic"
    reason = "a folder without conversation files, ServeGen clients or a RAGPulse trace; name a file"
    raise TraceError(str(folder), None, None, f"cannot be read: Is a directory ({reason})")


def _inside(place: Path) -> Path:
    return place / TRACE_FILE if place.is_dir() else place


def _is_parquet(place: Path) -> bool:
    try:
        with place.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # open_source says why


def _refuse_blank(file: SourceFile) -> None:
    raise TraceError(file.path, 1, None, "no data rows, or blank lines before them")
