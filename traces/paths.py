"""Prompts as paths in a tree of shared beginnings, cut only where some prompt parts from the others."""

from collections.abc import Iterable, Iterator

from traces.trace import Segment, Trace

_MANY_ENDS = 256  # one text used at more lengths than this is cut at multiples of _GRAIN tokens only
_GRAIN = 16
_Step = tuple[int, int, int, int]  # path before it, key, start, stop
Extent = tuple[int, int]  # name, number of blocks; equal names hold equal prefixes


class PrefixPaths:
    """The paths of all prompts of a trace, built once and asked for extents at any block size.

    Two prompts share a path as far as an unlimited, token-exact prefix cache would find them equal. (A text that is
    used at more than 256 lengths is compared in steps of 16 tokens.)
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        paths: dict[tuple[int, int, int], int] = {}
        walks = [list(_walk(request.segments, paths)) for request in trace.requests]
        self._cuts = _cuts(walks)
        self._names: dict[tuple[int, int, int], int] = {}
        self._uses: list[int] = []
        ways = [self._path(walk) for walk in walks]
        pairs = zip(ways, trace.requests, strict=True)
        self._ends = [self._merged(nodes, stops, request.prompt_tokens) for (nodes, stops), request in pairs]

    def extents(self, index: int, block_size: int, partial_block: bool = False) -> list[Extent]:
        """The full blocks of request number `index`, in order; then its partial block if asked for."""
        extents, done = [], 0
        prompt_tokens = self.trace.requests[index].prompt_tokens
        for name, stop in self._ends[index]:
            blocks = stop // block_size - done
            if blocks:
                extents.append((name, blocks))
                done += blocks
        if partial_block and prompt_tokens % block_size:
            extents.append((-1 - self._ends[index][-1][0], 1))
        return extents

    def _path(self, walk: list[_Step]) -> tuple[list[int], list[int]]:
        """Nodes of the keyed beginning, and where each ends in tokens."""
        nodes, stops, parent, ends = [], [], -1, self._cuts.ends
        for path, key, start, stop in walk:
            cuts = (*self._cuts.between(path, key, start, stop), stop) if (path, key) in ends else (stop,)
            for cut in cuts:
                parent = self._name(parent, key, cut)
                self._uses[parent] += 1
                nodes.append(parent)
                stops.append(cut)
        return nodes, stops

    def _merged(self, nodes: list[int], stops: list[int], total: int) -> list[tuple[int, int]]:
        """Nodes that the same requests pass are one extent; what one request alone has joins its unique end."""
        uses, ends = self._uses, []
        for place, (node, stop) in enumerate(zip(nodes, stops, strict=True)):
            last = place + 1 == len(nodes)
            if uses[node] > 1 and (last or uses[nodes[place + 1]] != uses[node]):
                ends.append((node, stop))
        if not ends or ends[-1][1] < total:
            self._uses.append(1)
            ends.append((len(self._uses) - 1, total))
        return ends

    def _name(self, parent: int, key: int, stop: int) -> int:
        name = self._names.setdefault((parent, key, stop), len(self._uses))
        if name == len(self._uses):
            self._uses.append(0)
        return name


class _Cuts:
    """Where segments of one key, behind one path, end: those that reach further are cut there."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, int], list[int]] = {}

    def between(self, path: int, key: int, start: int, stop: int) -> Iterator[int]:
        for cut in self.ends.get((path, key), ()):
            if cut >= stop:
                return
            if cut > start:
                yield cut


def _cuts(walks: Iterable[list[_Step]]) -> _Cuts:
    cuts = _Cuts()
    found: dict[tuple[int, int], int | set[int]] = {}
    for walk in walks:
        for path, key, _, stop in walk:
            known = found.setdefault((path, key), stop)
            if known != stop:
                stops = known if isinstance(known, set) else {known}
                stops.add(stop)
                found[path, key] = stops
    for place, ends in found.items():
        if isinstance(ends, set):
            coarse = {end // _GRAIN * _GRAIN for end in ends} if len(ends) > _MANY_ENDS else ends
            cuts.ends[place] = sorted(coarse)
    return cuts


def _walk(
    segments: Iterable[Segment], paths: dict[tuple[int, int, int], int]
) -> Iterator[tuple[int, int, int, int]]:
    """Leading keyed segments: (path before it, key, start, stop)."""
    path, start = 0, 0
    for key, tokens in segments:
        if key is None:
            return
        stop = start + tokens
        yield path, key, start, stop
        path = paths.setdefault((path, key, tokens), len(paths) + 1)
        start = stop
