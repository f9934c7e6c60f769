"""How many prompt tokens a prefix cache could find at best, from the trace's prefix segments alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Segment = tuple[int | None, int]


@dataclass(slots=True)
class _Node:
    """What followed one prefix so far: the longest run of each key, and the prefix that a whole segment leads to."""

    longest: dict[int, int] = field(default_factory=dict)
    children: dict[tuple[int, int], "_Node"] = field(default_factory=dict)

    def visit(self, key: int, tokens: int) -> tuple[int, "_Node"]:
        """Tokens of this segment that were seen here before, and the prefix after it; both are now seen."""
        seen = min(tokens, self.longest.get(key, 0))
        self.longest[key] = max(tokens, self.longest.get(key, 0))
        return seen, self.children.setdefault((key, tokens), _Node())


def ideal_hit_tokens(prompts: Iterable[tuple[int, Sequence[Segment]]], block_size: int) -> int:
    """Tokens that an infinite prefix cache finds if every prompt is cached before the next one asks.

    `prompts` are (prompt tokens, ordered segments of (key, tokens)) in order of arrival; two prompts share
    what their leading segments share, and a key of None is shared with nobody. Of a common prefix of c tokens
    a prompt of L tokens finds min(floor(c / B), floor((L − 1) / B)) · B: blocks are found whole, and at least
    one token is always computed, for its logits.
    """
    root, hits = _Node(), 0
    for prompt_tokens, segments in prompts:
        hits += min(_common_prefix(root, segments), prompt_tokens - 1) // block_size * block_size
    return hits


def _common_prefix(root: _Node, segments: Sequence[Segment]) -> int:
    node, common, follows = root, 0, True
    for key, tokens in segments:
        if key is None:
            break
        seen, node = node.visit(key, tokens)
        common += seen if follows else 0
        follows = follows and seen == tokens
    return common
