"""Recorded agent conversations (kv-cache-tester): one JSON object a file, or a folder of them.

Files have no common clock: when conversations start is assumed. Within one, a turn is released `think_time` after
the turn before has finished and after every nested chain that it launched; ids are chained, local to the file (64
tokens a block, the partial last block has none).
"""

import hashlib
from pathlib import Path

from traces.arrivals import ArrivalProcess
from traces.books import Books
from traces.errors import RowError, TraceError
from traces.formats.conversation import Conversation, read_conversation
from traces.rows import Numbered, note
from traces.source import SourceFile, open_source, read_document
from traces.trace import CHAINED, TraceHeader

_STARTS = ArrivalProcess("poisson", 1 / 60)  # one conversation a minute, unless the user says otherwise


class AgenticSource:
    """The requests of one conversation file, or of all in a folder, in the order of their names."""

    format = "agentic"
    key_kind = CHAINED
    has_clock = True
    is_ordered = False
    takes_arrivals = True
    embedded: TraceHeader | None = None

    def __init__(
        self, path: Path, starts: ArrivalProcess | None, seed: int, expect_sha256: str | None = None
    ) -> None:
        paths = conversation_files(path)
        self.source = path.name
        self.files = [open_source(found, None if path.is_dir() else expect_sha256) for found in paths]
        self.sha256 = self.files[0].sha256 if path.is_file() else _common_sha256(self.files)
        self.noted: dict[str, int] = {}
        self._starts = (starts or _STARTS).times_us(len(paths), seed)
        sentence = f"conversation starts assumed: {(starts or _STARTS).describe()}"
        self.assumed = [sentence] if len(paths) > 1 else []
        self._blocks: set[int] = set()
        self._loaded: dict[str, str] = {}  # id or digest of the requests -> file
        self._inputs: set[tuple[int, ...]] = set()

    @property
    def source_block_tokens(self) -> int | None:
        """The block size, where all files have the same."""
        return next(iter(self._blocks)) if len(self._blocks) == 1 else None

    def clock_quantum_us(self) -> int:
        """Whole seconds within a conversation."""
        return 1_000_000

    def rows(self, books: Books, sort: bool) -> Numbered:
        """Requests, conversation by conversation. A malformed conversation is refused, or skipped, as a whole."""
        for number, (file, start_us) in enumerate(zip(self.files, self._starts, strict=True)):
            try:
                conversation = read_conversation(read_document(file), number, books.read)
                self._check_once(conversation, file)
            except RowError as error:
                books.read += 1
                books.refuse(error.text_line, error, file.path)
                continue
            self._remember(conversation, file)
            for row in conversation.rows:
                books.read += 1
                assert row.time_ns is not None  # from the conversation's start
                yield books.read - 1, row._replace(time_ns=row.time_ns + start_us * 1000)

    def _check_once(self, conversation: Conversation, file: SourceFile) -> None:
        for name in (conversation.name, conversation.digest):
            if name in self._loaded:
                raise RowError("id", f"{conversation.name} already loaded from {self._loaded[name]}")

    def _remember(self, conversation: Conversation, file: SourceFile) -> None:
        self._loaded |= dict.fromkeys((conversation.name, conversation.digest), Path(file.path).name)
        self._blocks.add(conversation.block_tokens)
        for name, times in conversation.noted.items():
            note(self.noted, name, times)
        if conversation.inputs in self._inputs:
            note(self.noted, "conversation repeats the inputs of another")
        self._inputs.add(conversation.inputs)
        if conversation.name != Path(file.path).stem:
            note(self.noted, "id is not the file's name")


def conversation_files(path: Path) -> list[Path]:
    """The file itself, or the JSON files of a folder by name; raises TraceError where there is none."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        raise TraceError(str(path), None, None, "no conversation files (*.json) in this folder")
    return found


def _common_sha256(files: list[SourceFile]) -> str:
    lines = "".join(f"{file.sha256}  {Path(file.path).name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()
