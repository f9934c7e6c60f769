"""Scratch memory that outlives a call: fresh buffers cost a page fault per 4 KiB, several times the gather itself."""

import torch

from paged_kernels.errors import WorkspaceError


class Workspace:
    """Named flat buffers that grow and are reused; not safe for two calls at once.

    A captured CUDA graph keeps the addresses that it saw: run the largest case once, `freeze`, then capture.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._frozen = False

    def take(
        self, name: str, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A flat tensor of `numel` elements with the device of `like`, and its dtype unless `dtype` says otherwise.

        Its content is undefined. Raises `WorkspaceError` where a frozen workspace is too small.
        """
        key = (name, dtype or like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = self._grown(name, numel, buffer, key[1], key[2])
        return buffer[:numel]

    def freeze(self) -> None:
        """From now on a call that needs more than there is fails instead of moving to a larger buffer."""
        self._frozen = True

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _grown(
        self, name: str, numel: int, buffer: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        held = 0 if buffer is None else buffer.numel()
        if self._frozen:
            raise WorkspaceError(
                f"the frozen workspace holds {held} elements of {dtype} for {name!r} on {device} and the call needs "
                f"{numel}: run the largest case once before freeze()"
            )
        # At least doubled, so that growing contexts pay for few new buffers; on the CPU zeros, so that every page is
        # touched here and not in the middle of a gather.
        make = torch.zeros if device.type == "cpu" else torch.empty
        return make(max(numel, 2 * held), dtype=dtype, device=device)


DEFAULT_WORKSPACE = Workspace()
