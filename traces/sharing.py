"""How much of a trace an unlimited prefix cache would have seen before: exact, from segment keys, without tokens."""

from traces.trace import Trace, TraceRequest


class PrefixTree:
    """All prompts seen so far, as paths of segments.

    A node is a path of exact segments. Under a node, prompts that continue with one key agree over the shorter of
    the two lengths, and part there: keys differ in their first token (but for chance in small vocabularies).
    """

    def __init__(self) -> None:
        self._longest: dict[tuple[int, int], int] = {}  # (node, key) -> tokens of the longest segment seen
        self._children: dict[tuple[int, int, int], int] = {}  # (node, key, tokens) -> node

    def seen_tokens(self, request: TraceRequest) -> int:
        """Leading prompt tokens that an earlier prompt began with; then remembers this prompt."""
        node, seen = 0, 0
        for key, tokens in request.segments:
            if key is None:
                break
            known = self._longest.get((node, key), 0)
            seen += min(known, tokens)
            if known < tokens:
                self._longest[node, key] = tokens
            node = self._children.setdefault((node, key, tokens), len(self._children) + 1)
        return seen


def shared_prefix_tokens(trace: Trace) -> list[int]:
    """For each request the leading prompt tokens that some earlier request of the trace has too."""
    tree = PrefixTree()
    return [tree.seen_tokens(request) for request in trace.requests]


def realised_prefix_share(trace: Trace) -> float:
    """Share of all prompt tokens that an unlimited, token-exact prefix cache would have seen before (0 to 1)."""
    total = sum(request.prompt_tokens for request in trace.requests)
    return sum(shared_prefix_tokens(trace)) / total if total else 0.0
