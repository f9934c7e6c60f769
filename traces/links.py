"""Links between requests (`parent`, `after`) that stay valid when requests are left out.

What waited for a request that is gone waits for what that one waited for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from traces.rows import Row
from traces.trace import AFTER, AT, TraceRequest


class Links:
    """Remembers dropped requests, and rewrites the links of those that come later."""

    def __init__(self) -> None:
        self._gone: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def drop(self, request_id: int, more: Mapping[str, Any] | None) -> None:
        """`request_id` is gone; its own links, already mended, stand in for it."""
        linked = more or {}
        self._gone[request_id] = self._resolved(linked.get("parent"), linked.get("after", ()))

    def mend(self, row: Row) -> Row:
        """The row with links to requests that are there."""
        if not self._gone or row.more is None or not row.more.keys() & {"parent", "after"}:
            return row
        parent, after = self._resolved(row.more.get("parent"), row.more.get("after", ()))
        more = {**row.more, "parent": parent, "after": after}
        if not after:
            more["release"] = AT
        return row._replace(more=more)

    def _resolved(self, parent: int | None, after: Iterable[int]) -> tuple[int | None, tuple[int, ...]]:
        found: dict[int, None] = {}
        for request_id in after:
            found.update(
                dict.fromkeys(self._gone[request_id][1] if request_id in self._gone else (request_id,))
            )
        if parent in self._gone:
            parent = self._gone[parent][0]
        return parent, tuple(found)


def relinked(requests: Iterable[TraceRequest], is_kept: Iterable[bool]) -> tuple[TraceRequest, ...]:
    """The kept ones of `requests`, with their links mended."""
    links, kept = Links(), []
    for request, keep in zip(requests, is_kept, strict=True):
        linked = {"parent": request.parent, "after": request.after}
        if not keep:
            links.drop(request.request_id, linked)
            continue
        kept.append(_mended(links, request))
    return tuple(kept)


def _mended(links: Links, request: TraceRequest) -> TraceRequest:
    if request.parent is None and not request.after:
        return request
    row = links.mend(Row(None, 0, 0, (), {"parent": request.parent, "after": request.after}))
    assert row.more is not None
    parent, after = row.more["parent"], row.more["after"]
    if (parent, after) == (request.parent, request.after):
        return request
    release = AFTER if after and request.release == AFTER else AT
    return replace(request, parent=parent, after=after, release=release)
