"""How each request is decoded: samples, beams or drafts, and how many.

A row of the trace may name its own width. All other rows are decoded as the configuration says.
"""

from collections import Counter
from dataclasses import dataclass, replace

from engine.core.options import Decoding
from engine.core.request import Speculation
from harness.config.errors import ConfigError
from harness.config.schema import DecodingMode, RunConfig, Widths
from harness.config.values import PerObject
from traces.trace import Segment, Trace, TraceRequest

SHORT = 2_000  # requests; the replay of more takes so long that looking through them does not count
_OWN_TEXT = 1 << 63  # keys of text that one request of the trace has alone, from here on
_WORDS = {Decoding.greedy: "of one sequence", Decoding.sample: "of {} samples", Decoding.beam: "of {} beams"}


@dataclass(frozen=True)
class RequestDecoding:
    """How one request is decoded: its number of sequences, its mode (greedy, samples or beams), and its drafts."""

    width: int = 1
    mode: Decoding = Decoding.greedy
    speculation: Speculation | None = None


@dataclass(frozen=True)
class TraceDecoding:
    """How the requests of a trace are decoded: `of(row)` gives the decoding of one request.

    `configured` holds for every row, unless `recorded` is set and the row names a width. Then a `beam_width` above 1
    means beam search. Otherwise `best_of`, or `n` where it is absent, is the number of samples (`n` of them are
    returned, all are computed); 1 means a single sequence. Only single sequences have drafts.
    """

    configured: RequestDecoding = RequestDecoding()
    recorded: bool = True

    def of(self, row: TraceRequest) -> RequestDecoding:
        """The decoding of one request."""
        if not self.recorded or not states_width(row):
            return self.configured
        if row.beam_width is not None and row.beam_width > 1:
            return RequestDecoding(row.beam_width, Decoding.beam)
        samples = row.best_of or row.n or 1
        if samples > 1:
            return RequestDecoding(samples, Decoding.sample)
        sampled = self.configured.mode is Decoding.sample
        speculation = self.configured.speculation
        return RequestDecoding(1, Decoding.sample if sampled else Decoding.greedy, speculation)

    def uniform(self, trace: Trace) -> bool:
        """Whether all requests are decoded as configured."""
        return all(self.of(row) == self.configured for row in trace.requests)

    def noted(self, trace: Trace) -> Trace:
        """The trace with a note on what became of the widths that its rows name; unchanged where no row names one."""
        if not names_widths(trace.requests):
            return trace
        found = Counter(self.of(row) for row in trace.requests if states_width(row))
        if not self.recorded:
            sentence = f"widths of {found.total():,} requests replaced: every request has the configured one"
            return trace.changed(trace.requests, sentence)
        parts = (f"{count:,} {_WORDS[each.mode].format(each.width)}" for each, count in found.items())
        return trace.changed(trace.requests, "widths as recorded: " + ", ".join(parts))


def keyed_text(row: TraceRequest) -> tuple[Segment, ...]:
    """The segments of a prompt, with keys for text that no other request has: so requests made of this one find it."""
    return tuple(
        Segment(_OWN_TEXT + (row.request_id << 12) + index if part.key is None else part.key, part.tokens)
        for index, part in enumerate(row.segments)
    )


def resubmitted(trace: Trace, decoding: TraceDecoding) -> Trace:
    """The trace with a note that its beams are sent as requests (`harness.workload.beam_requests`).

    Raises ConfigError where rows have samples too, which the prefix cache serves in another way.
    """
    if any(each.width > 1 and each.mode is Decoding.sample for each in map(decoding.of, trace.requests)):
        raise ConfigError(
            "decoding.sharing",
            "prefix_cache, but the requests of the trace have samples and beams; set workload.widths=configured",
        )
    return trace.changed(
        trace.requests,
        "a client sends a request for the prompt, and for each beam and further token one more (decoding.sharing="
        "prefix_cache): rates, hits and latencies are those of these requests",
    )


def one_request_per_sample(trace: Trace, decoding: TraceDecoding) -> Trace:
    """The trace with a request for each sample, all with the same prompt: vLLM's parallel sampling.

    Text that no other request has is keyed, so that the samples of one request find it. Sample b of request i is
    request i x (the greatest width) + b.
    """
    widths = {row.request_id: decoding.of(row) for row in trace.requests}
    most = max((each.width for each in widths.values()), default=1)

    def samples(request_id: int) -> tuple[int, ...]:
        own = widths.get(request_id)
        return tuple(request_id * most + branch for branch in range(own.width if own else 1))

    rows = []
    for row in trace.requests:
        after = tuple(sample for each in row.after for sample in samples(each))
        parent = None if row.parent is None else row.parent * most
        alike = replace(
            row, segments=keyed_text(row), after=after, parent=parent, n=None, best_of=None, beam_width=None
        )
        rows += [
            replace(alike, request_id=sample, output_key=None if number else row.output_key)
            for number, sample in enumerate(samples(row.request_id))
        ]
    return trace.changed(
        tuple(rows),
        f"{len(rows):,} samples of {len(trace.requests):,} requests are requests of their own (decoding.sharing="
        "prefix_cache): rates, hits and latencies are those of samples",
    )


def names_widths(requests: tuple[TraceRequest, ...]) -> bool:
    """Whether a row names a width of its own; remembered for the traces of small points, of which sweeps have many."""
    return _names_widths(requests) if len(requests) <= SHORT else any(map(states_width, requests))


def states_width(row: TraceRequest) -> bool:
    """Whether the row names a width of its own."""
    return (row.n, row.best_of, row.beam_width) != (None, None, None)


_names_widths = PerObject[tuple[TraceRequest, ...], bool](lambda rows: any(map(states_width, rows)), most=64)


def trace_decoding_of(config: RunConfig) -> TraceDecoding:
    """How the configuration has the trace's requests decoded."""
    return TraceDecoding(_configured(config), config.workload.widths is Widths.recorded)


def _configured(config: RunConfig) -> RequestDecoding:
    decoding = config.decoding
    if decoding.beam_width > 1:
        return RequestDecoding(decoding.beam_width, Decoding.beam)
    sampled = decoding.mode is DecodingMode.sample
    speculation = None
    if decoding.draft_tokens:
        speculation = Speculation(decoding.draft_tokens, decoding.draft_place)
    return RequestDecoding(
        decoding.n if sampled else 1, Decoding.sample if sampled else Decoding.greedy, speculation
    )
