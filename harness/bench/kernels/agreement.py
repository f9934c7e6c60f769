"""Is it the same function? Every provider's output is compared with float64 before it is timed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from paged_kernels.providers import Case, Provider, Run


def checked_runs(
    provider: "Provider", cases: "Sequence[Case]", exact: "torch.Tensor | None" = None
) -> "tuple[list[Run], float]":
    """The provider's calls for all input sets, and the relative error of the first one's output.

    Args:
        provider: whose calls are wanted.
        cases: the same case on different inputs.
        exact: the exact output of the first case, where it is known already.

    Raises:
        DisagreementError: the provider computes something else.
        UnsupportedCaseError: it cannot serve the case.
    """
    from paged_kernels.providers.verify import exact_output, verify

    runs = [provider.prepare(case) for case in cases]
    wanted = exact_output(cases[0]) if exact is None else exact
    return runs, verify(runs[0](), wanted, provider.name, cases[0])
