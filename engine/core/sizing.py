"""How many blocks a request takes."""

from dataclasses import dataclass

from engine.core.request import Request, SpeculationMode


@dataclass(frozen=True, slots=True)
class PagedSizing:
    """Blocks of `block_size` tokens; branches share the full blocks of their prompt where `shares`."""

    block_size: int
    shares: bool

    def blocks(self, request: Request, width: int, tokens: int) -> int:
        """Blocks of `width` branches at `tokens` each: full prompt blocks are shared, the rest counts as private."""
        shared = request.prompt_tokens // self.block_size if width > 1 and self.shares else 0
        return shared + width * (-(-tokens // self.block_size) - shared)

    def most_blocks(self, request: Request) -> int:
        """The most that the request ever holds: at its end, and with forked drafts a copy beside it."""
        blocks = self.blocks(request, request.width, request.final_kv_tokens)
        speculation = request.speculation
        if speculation is None or speculation.mode is not SpeculationMode.FORK or request.output_tokens == 1:
            return blocks
        return blocks + (1 if self.shares else blocks)
