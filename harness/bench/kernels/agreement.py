"""Is it the same function? Every provider is compared with the float64 reference before it is timed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.bench.kernels.problems import WrongOutputError

if TYPE_CHECKING:
    import torch

    from paged_kernels.providers import Case, Provider, Run

# Largest relative error of the whole output, ‖out − exact‖ / ‖exact‖, by the type of the queries: rounding of inputs,
# weights and output, with room for the order of summation.
TOLERANCES = {"torch.float32": 2e-5, "torch.float16": 2e-3, "torch.bfloat16": 1.2e-2}


def exact_output(case: "Case") -> "torch.Tensor":
    """The case's output in float64, by the readable reference, one sequence at a time."""
    import torch

    from paged_kernels.reference import attend, gather_kv

    scoring = case.scoring._replace(k_scale=1.0, v_scale=1.0)
    rows = torch.split(case.q.double(), list(case.queries))
    outputs = []
    for row, (q, length) in enumerate(zip(rows, case.lengths, strict=True)):
        keys = gather_kv(case.key_cache, case.block_table[row], length).double() * case.scoring.k_scale
        values = gather_kv(case.value_cache, case.block_table[row], length).double() * case.scoring.v_scale
        outputs.append(attend(q, keys, values, scoring)[0])
    return torch.cat(outputs)


def relative_error(found: "torch.Tensor", exact: "torch.Tensor") -> float:
    """‖found − exact‖ / ‖exact‖; NaN where anything in `found` is."""
    return float((found.double() - exact).norm() / exact.norm())


def agrees(error: float, case: "Case") -> bool:
    """Whether an error is rounding; NaN never is."""
    return error <= TOLERANCES[str(case.q.dtype)]


def checked_runs(
    provider: "Provider", cases: "Sequence[Case]", exact: "torch.Tensor | None" = None
) -> "tuple[list[Run], float]":
    """The provider's calls for all input sets, and the relative error of the first one's output.

    Args:
        provider: whose calls are wanted.
        cases: the same case on different inputs.
        exact: the exact output of the first case, where it is known already.

    Raises:
        WrongOutputError: the provider computes something else.
        UnsupportedCaseError: it cannot serve the case.
    """
    runs = [provider.prepare(case) for case in cases]
    error = relative_error(runs[0](), exact_output(cases[0]) if exact is None else exact)
    if not agrees(error, cases[0]):
        raise WrongOutputError(
            f"relative error {error:.2g}, {TOLERANCES[str(cases[0].q.dtype)]:.2g} is rounding"
        )
    return runs, error
