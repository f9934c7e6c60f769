"""Scratch memory that outlives a call: fresh buffers cost a page fault per 4 KiB, several times the gather itself."""

import torch


class Workspace:
    """Named flat buffers that grow and are reused; not safe for two calls at once."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A flat tensor of `numel` elements with the dtype and device of `like`; its content is undefined."""
        key = (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            # zeros, not empty: every page is touched here and not inside a timed gather
            buffer = self._buffers[key] = torch.zeros(numel, dtype=like.dtype, device=like.device)
        return buffer[:numel]


DEFAULT_WORKSPACE = Workspace()
