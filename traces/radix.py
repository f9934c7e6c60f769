"""A tree over token sequences, cut wherever two of them part: their sharing, exact at any block size."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from traces.trace import Segment

Tokens = npt.NDArray[np.int64]


@dataclass
class _Node:
    """An edge's tokens and what follows it. `uses` counts sequences that pass."""

    key: int
    tokens: Tokens
    uses: int = 0
    next: dict[int, "_Node"] = field(default_factory=dict)


class TokenTree:
    """Insert every sequence first, then ask for their segments; a later insertion may cut a segment in two."""

    def __init__(self) -> None:
        self._root = _Node(-1, np.empty(0, np.int64))
        self._keys = 0

    def insert(self, tokens: Tokens, cuts: tuple[int, ...]) -> None:
        """Add a sequence. It is also cut at `cuts`, ascending positions that end with its length."""
        start = 0
        node = self._root
        for cut in cuts:
            node = self._extend(node, tokens[start:cut])
            start = cut

    def segments(self, tokens: Tokens) -> tuple[Segment, ...]:
        """The path of a sequence that was inserted, up to a cut; parts that no other sequence has get no key."""
        node, start, path = self._root, 0, []
        while start < len(tokens):
            node = node.next[int(tokens[start])]
            path.append(Segment(node.key if node.uses > 1 else None, len(node.tokens)))
            start += len(node.tokens)
        return tuple(path)

    def _extend(self, node: _Node, tokens: Tokens) -> _Node:
        """Walk or build the path of `tokens` from `node`; returns its last node."""
        while tokens.size:
            child = node.next.get(int(tokens[0]))
            if child is None:
                child = node.next[int(tokens[0])] = self._node(tokens)
            common = _agreeing(child.tokens, tokens)
            if common < len(child.tokens):
                self._split(child, common)
            child.uses += 1
            node, tokens = child, tokens[common:]
        return node

    def _split(self, node: _Node, position: int) -> None:
        """Cut an edge in two; the upper part is a new node in all but name."""
        lower = self._node(node.tokens[position:])
        lower.uses, lower.next = node.uses, node.next
        node.tokens, node.next = node.tokens[:position], {int(lower.tokens[0]): lower}

    def _node(self, tokens: Tokens) -> _Node:
        self._keys += 1
        return _Node(self._keys - 1, tokens)


def _agreeing(first: Tokens, second: Tokens) -> int:
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if different.size else length
