"""What an attention implementation must offer to stand beside ours."""

from collections.abc import Callable
from typing import Protocol

import torch

from paged_kernels.errors import KernelError
from paged_kernels.providers.case import Case

Run = Callable[[], torch.Tensor]  # one call of the prepared attention; gives the output [tokens, heads, dv]


class UnsupportedCaseError(KernelError):
    """A case that a provider cannot serve (a dtype, an option, a layout): reported, and left out of its column."""


class Provider(Protocol):
    """One attention implementation. It has no state: one instance serves any number of cases."""

    @property
    def name(self) -> str:
        """Unique among the providers; the column of tables and reports."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a prepared run may be captured in a CUDA graph (no host wait, no allocation that outlives it)."""
        ...

    def available(self, device: torch.device) -> str | None:
        """None where it can run on `device`, else the reason why not."""
        ...

    def prepare(self, case: Case) -> Run:
        """Do all that is not timed (host planning, layout changes, buffers, compilation) and give the timed call.

        The call may return the same output tensor each time. Raises `UnsupportedCaseError` where the case cannot be
        served.
        """
        ...
