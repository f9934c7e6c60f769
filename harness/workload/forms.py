"""How each request is decoded: samples, beams or drafts, and how many.

A row of the trace may say it; otherwise the configuration does.
"""

from collections import Counter
from dataclasses import dataclass

from engine.core.options import Decoding, SpeculationMode
from engine.core.request import Speculation
from harness.config.schema import DecodingMode, RunConfig, Widths
from traces.trace import Trace, TraceRequest

_WORDS = {Decoding.GREEDY: "of one sequence", Decoding.SAMPLE: "of {} samples", Decoding.BEAM: "of {} beams"}


@dataclass(frozen=True)
class Form:
    """One way of decoding: how many sequences, how they relate, and their drafts."""

    width: int = 1
    decoding: Decoding = Decoding.GREEDY
    speculation: Speculation | None = None


@dataclass(frozen=True)
class Forms:
    """The configured form, and whether a row's own comes first.

    A row's `beam_width` above 1 searches; else `best_of`, or `n`, is how many samples it has (`n` of them are wanted,
    all are computed); where both say 1 it is one sequence. Drafts are for single sequences.
    """

    configured: Form = Form()
    recorded: bool = True

    def of(self, row: TraceRequest) -> Form:
        """The form of one request."""
        if not self.recorded or not says_width(row):
            return self.configured
        if row.beam_width is not None and row.beam_width > 1:
            return Form(row.beam_width, Decoding.BEAM)
        samples = row.best_of or row.n or 1
        if samples > 1:
            return Form(samples, Decoding.SAMPLE)
        sampled = self.configured.decoding is Decoding.SAMPLE
        speculation = self.configured.speculation
        return Form(1, Decoding.SAMPLE if sampled else Decoding.GREEDY, speculation)

    def uniform(self, trace: Trace) -> bool:
        """Whether all requests have the configured form."""
        return all(self.of(row) == self.configured for row in trace.requests)

    def named(self, trace: Trace) -> Trace:
        """The trace, with a sentence on what became of the widths that its rows say; itself where none says any."""
        found = Counter(self.of(row) for row in trace.requests if says_width(row))
        if not found:
            return trace
        if not self.recorded:
            sentence = f"widths of {found.total():,} requests replaced: every request has the configured one"
            return trace.changed(trace.requests, sentence)
        parts = (f"{count:,} {_WORDS[form.decoding].format(form.width)}" for form, count in found.items())
        return trace.changed(trace.requests, "widths as recorded: " + ", ".join(parts))


def says_width(row: TraceRequest) -> bool:
    """Whether the row has a width of its own."""
    return (row.n, row.best_of, row.beam_width) != (None, None, None)


def forms_of(config: RunConfig) -> Forms:
    """What the configuration says of decoding."""
    return Forms(_configured(config), config.workload.widths is Widths.recorded)


def _configured(config: RunConfig) -> Form:
    decoding = config.decoding
    if decoding.beam_width > 1:
        return Form(decoding.beam_width, Decoding.BEAM)
    sampled = decoding.mode is DecodingMode.sample
    speculation = None
    if decoding.draft_tokens:
        speculation = Speculation(decoding.draft_tokens, SpeculationMode(decoding.draft_place.value))
    return Form(decoding.n if sampled else 1, Decoding.SAMPLE if sampled else Decoding.GREEDY, speculation)
