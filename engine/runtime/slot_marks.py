"""Which slots of an 8-bit pool were written: one mark a slot, where a NaN would not tell."""

import torch


class SlotMarks:
    """Marks `[num_blocks + 1, block_size]`, and of the host's blocks. They go where the slots' content goes."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int, device: torch.device) -> None:
        self._size = block_size
        # one entry more in front: where padded rows of a recorded step, whose slot is -1, leave their mark
        self._all = torch.zeros((num_blocks + 1) * block_size + 1, dtype=torch.bool, device=device)
        self._marks = self._all[1:].view(num_blocks + 1, block_size)
        self._host = torch.zeros(host_blocks, block_size, dtype=torch.bool)

    def write(self, slots: torch.Tensor) -> None:
        """Mark slots `[tokens]`; -1 is nobody's."""
        self._all.index_fill_(0, slots + 1, True)

    def void(self, blocks: torch.Tensor) -> None:
        """Take the marks of whole blocks away."""
        self._marks.index_fill_(0, blocks, False)

    def void_slots(self, slots: torch.Tensor) -> None:
        """Take the marks of single slots away."""
        self._all.index_fill_(0, slots + 1, False)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Blocks were copied, all sources read before any destination is written."""
        self._marks.index_copy_(0, destination, self._marks.index_select(0, source))

    def save(self, blocks: torch.Tensor, host: torch.Tensor) -> None:
        """Blocks were saved in host memory."""
        self._host.index_copy_(0, host, self._marks.index_select(0, blocks.to(self._marks.device)).cpu())

    def bring_back(self, host: torch.Tensor, blocks: torch.Tensor) -> None:
        """Blocks came back from host memory."""
        saved = self._host.index_select(0, host).to(self._marks.device)
        self._marks.index_copy_(0, blocks.to(self._marks.device), saved)

    def count(self) -> int:
        """Marked slots of usable blocks."""
        return int(self._marks[1:].sum())
