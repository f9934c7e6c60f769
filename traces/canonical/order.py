"""What spans the records of a canonical trace: ids, order, links, and keys that are chained if the header says so."""

from traces.errors import RowError
from traces.trace import CHAINED, TraceRequest


class OrderCheck:
    """Fed with requests in the order of the file."""

    def __init__(self, key_kind: str) -> None:
        self._is_chained = key_kind == CHAINED
        self._lines: dict[int, int] = {}  # request id -> line
        self._last_us = 0
        self._parents: dict[int, tuple[int | None, int, int]] = {}  # key -> parent, start in tokens, line

    def add(self, request: TraceRequest, line: int) -> None:
        """Check a request against all before it, and remember it; raises RowError, and then remembers nothing."""
        if request.request_id in self._lines:
            raise RowError(
                "request_id", f"{request.request_id} already at line {self._lines[request.request_id]}"
            )
        if request.arrival_us < self._last_us:
            raise RowError("arrival_us", f"{request.arrival_us} before {self._last_us} of the line before")
        links = [("after", earlier) for earlier in request.after]
        if request.parent is not None:
            links.append(("parent", request.parent))
        for name, earlier in links:
            if earlier not in self._lines:
                raise RowError(name, f"request {earlier} is not earlier")
        if self._is_chained:
            self._check_chain(request, line)
        self._lines[request.request_id] = line
        self._last_us = request.arrival_us

    def _check_chain(self, request: TraceRequest, line: int) -> None:
        parent, start = None, 0
        fresh: dict[int, tuple[int | None, int, int]] = {}
        for key, tokens in request.segments:
            if key is None:
                break
            known = self._parents.get(key) or fresh.get(key)
            if known is None:
                fresh[key] = (parent, start, line)
            elif known[:2] != (parent, start):
                where = f"behind key {parent} at token {start}, was behind {known[0]} at {known[1]} at line {known[2]}"
                raise RowError("segments", f"key {key} {where}: keys are not chained")
            parent, start = key, start + tokens
        self._parents |= fresh
