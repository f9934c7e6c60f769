"""Tables of lengths without arrivals (etalon, Vidur): `num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio`.

Such a table needs an arrival process. Read as `lengths_chat`, a heuristic finds conversations: a row continues the row
before it if its prompt is at least as long as that row's prompt and output. (ShareGPT-8k keeps the rows of a
conversation together, and its prompts contain the history.)
"""

from math import isclose

from traces.errors import RowError
from traces.formats.parsing import Columns, plain_integer
from traces.formats.rows import Row, note
from traces.trace import AFTER, CONTENT, Segment

_COLUMNS = ("num_prefill_tokens", "num_decode_tokens", "num_total_tokens", "pd_ratio")
_RATIO_ERROR = 1e-6


class LengthsReader:
    """Rows of a table of lengths. Each is an independent request."""

    format = "lengths"
    key_kind = CONTENT
    source_block_tokens: int | None = None
    time_field = "line"
    has_header = True
    has_clock = False
    is_ordered = True

    def __init__(self) -> None:
        self.noted: dict[str, int] = {}

    def read_header(self, text: str) -> None:
        """Find the columns by name."""
        self._columns = Columns(_COLUMNS, text)
        self._columns.note_extra(self.noted)

    def read_row(self, text: str, line: int) -> Row:
        """The lengths of a row, whose stated sum and ratio are checked."""
        fields = self._columns.pick(text)
        prompt = plain_integer(fields[0], _COLUMNS[0], 1)
        output = plain_integer(fields[1], _COLUMNS[1], 0)
        total = plain_integer(fields[2], _COLUMNS[2], 1)
        if total != prompt + output:
            raise RowError(_COLUMNS[2], f"{total} is not {prompt} + {output}")
        _check_ratio(fields[3], prompt, output)
        return Row(None, prompt, output, (Segment(None, prompt),))

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """Rows are independent of each other."""
        return row

    def clock_quantum_us(self) -> int:
        """The assumed clock's resolution."""
        return 1


class ChatLengthsReader(LengthsReader):
    """The same table, with rows joined to conversations by the turn rule. An output returns in the next prompt."""

    format = "lengths_chat"

    def __init__(self) -> None:
        super().__init__()
        self._row: Row | None = None  # the row before
        self._id = self._turn = self._session = 0

    def accept(self, row: Row, line: int, request_id: int) -> Row:
        """The row as a turn: the segments of the turn before, then its output, then new tokens."""
        before = self._row
        continues = before is not None and row.prompt_tokens >= before.prompt_tokens + before.output_tokens
        if continues and before is not None:
            row = self._continued(row, before, request_id)
        else:
            row = self._opening(row, request_id)
        self._row, self._id = row, request_id
        return row

    def _opening(self, row: Row, request_id: int) -> Row:
        self._turn, self._session = 1, request_id
        note(self.noted, "conversations by the turn rule (a heuristic)")
        segments = (Segment(_key(request_id, 0), row.prompt_tokens),)
        return row._replace(segments=segments, more=self._turn_fields(request_id))

    def _continued(self, row: Row, before: Row, request_id: int) -> Row:
        self._turn += 1
        said = Segment(_key(self._id, 1), before.output_tokens)
        new = Segment(_key(request_id, 0), row.prompt_tokens - before.prompt_tokens - before.output_tokens)
        segments = (*before.segments, *(piece for piece in (said, new) if piece.tokens))
        linked = {"parent": self._id, "after": (self._id,), "release": AFTER, "think_us": 0}
        return row._replace(segments=segments, more={**self._turn_fields(request_id), **linked})

    def _turn_fields(self, request_id: int) -> dict[str, object]:
        return {"session": str(self._session), "turn": self._turn, "output_key": _key(request_id, 1)}


def _key(request_id: int, part: int) -> int:
    return request_id * 2 + part


def _check_ratio(text: str, prompt: int, output: int) -> None:
    if not output:
        return  # such a row is dropped later; it has no ratio
    try:
        ratio = float(text) if text.isascii() else float("nan")
    except ValueError:
        ratio = float("nan")
    if not isclose(ratio, prompt / output, abs_tol=_RATIO_ERROR, rel_tol=0):
        raise RowError(_COLUMNS[3], f"{text[:40]} does not equal {prompt}/{output}")
