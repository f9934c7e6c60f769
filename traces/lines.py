"""Line formats: one loop that hands lines to a row reader, in blocks where the reader can, row by row where it must."""

from collections.abc import Iterator
from itertools import islice

from traces.books import Books
from traces.errors import RowError, TraceError
from traces.rows import BlockReader, Numbered, Row, RowReader, note
from traces.source import SourceFile, decode
from traces.trace import TraceHeader

_BLOCK_LINES = 2048
Line = tuple[int, bytes]


class LineRows:
    """The rows of a file whose records are lines."""

    embedded: TraceHeader | None = None
    takes_arrivals = False

    def __init__(self, file: SourceFile, reader: RowReader) -> None:
        self.file = file
        self.reader = reader
        self.source = file.path.replace("\\", "/").rpartition("/")[2]
        self.sha256 = file.sha256
        self.format = reader.format
        self.is_ordered = reader.is_ordered
        self.has_clock = reader.has_clock
        self.assumed: list[str] = []
        self.noted = reader.noted
        if file.has_byte_order_mark:
            note(self.noted, "byte_order_mark")
        self._last: tuple[int, int] | None = None  # line and time of the last valid row
        if reader.has_header:
            self._read_header()

    @property
    def key_kind(self) -> str:
        """What equal keys mean, as far as the rows read so far say."""
        return self.reader.key_kind

    @property
    def source_block_tokens(self) -> int | None:
        """The granularity at which the source records sharing."""
        return self.reader.source_block_tokens

    def clock_quantum_us(self) -> int:
        """Resolution of the arrivals read so far."""
        return self.reader.clock_quantum_us()

    def rows(self, books: Books, sort: bool) -> Numbered:
        """Accepted rows with their numbers. `sort` allows time to run backwards: the caller sorts then."""
        lines = self._data_lines(books)
        blocks = self.reader if isinstance(self.reader, BlockReader) and not sort else None
        if blocks is None or (books.limit is not None and books.limit < _BLOCK_LINES):
            yield from self._one_by_one(lines, books, sort)
            return
        while block := list(islice(lines, _BLOCK_LINES)):
            rows = self._block(blocks, block)
            if rows is None:
                yield from self._one_by_one(block, books, sort)
                continue
            for row in rows:
                if books.is_full():
                    return
                books.read += 1
                yield books.read - 1, row

    def _read_header(self) -> None:
        try:
            self.reader.read_header(self.file.first_line)
        except RowError as error:
            raise TraceError(self.file.path, 1, error.field, error.reason) from error

    def _block(self, reader: BlockReader, block: list[Line]) -> Iterator[Row] | None:
        first, last = block[0][0], block[-1][0]
        if last - first + 1 != len(block):  # a blank line was skipped
            return None
        last_ns = None if self._last is None else self._last[1]
        rows = reader.read_block([raw for _, raw in block], first, last_ns)
        if rows is None:
            return None
        self._last = last, rows[0]
        return rows[1]

    def _one_by_one(self, lines: Iterator[Line] | list[Line], books: Books, sort: bool) -> Numbered:
        for line, raw in lines:
            if books.is_full():
                return
            books.read += 1
            try:
                row = self.reader.read_row(decode(raw), line)
                self._check_order(row, sort)
                row = self.reader.accept(row, line, books.read - 1)
            except RowError as error:
                books.refuse(line, error)
                continue
            if row.time_ns is not None:
                self._last = line, row.time_ns
            yield books.read - 1, row

    def _check_order(self, row: Row, sort: bool) -> None:
        if self._last is None or sort or not self.is_ordered or row.time_ns is None:
            return
        line, last_ns = self._last
        if row.time_ns < last_ns:
            back = (last_ns - row.time_ns) / 1000
            raise RowError(
                self.reader.time_field,
                f"goes back by {back:,.15g} us behind line {line}; sort the file by time first, or allow it (sort)",
            )

    def _data_lines(self, books: Books) -> Iterator[Line]:
        """Lines that hold something. Blank ones may only trail."""
        blank = None
        for line, raw in self.file.lines():
            if self.reader.has_header and line == 1:
                continue
            if not raw.strip():
                blank = blank or line
                continue
            if blank is not None:
                if books.on_error == "stop":
                    raise TraceError(self.file.path, blank, "line", "blank line inside the data")
                note(books.noted, "blank line skipped")
                blank = None
            yield line, raw
