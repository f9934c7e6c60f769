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
            # At least doubled, so that growing contexts pay for few new buffers; zeros, not empty, so that every page
            # is touched here and not in the middle of a gather.
            room = max(numel, 0 if buffer is None else 2 * buffer.numel())
            buffer = self._buffers[key] = torch.zeros(room, dtype=like.dtype, device=like.device)
        return buffer[:numel]


DEFAULT_WORKSPACE = Workspace()
