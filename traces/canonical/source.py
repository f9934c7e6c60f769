"""What every canonical file says of itself, whatever its container: its header carries over as it is."""

from traces.trace import TraceHeader


class CanonicalSource:
    """The facts of a row source, taken from the header that is embedded in the file."""

    has_clock = True
    is_ordered = True
    takes_arrivals = False

    def __init__(self, header: TraceHeader) -> None:
        self.embedded: TraceHeader | None = header
        self.format = header.format
        self.source = header.source
        self.sha256 = header.sha256
        self.key_kind = header.key_kind
        self.source_block_tokens = header.source_block_tokens
        self.noted: dict[str, int] = {}
        self.assumed: list[str] = []
        self._quantum_us = header.clock_quantum_us

    def clock_quantum_us(self) -> int:
        """As the header says."""
        return self._quantum_us
