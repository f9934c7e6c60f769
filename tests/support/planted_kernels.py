"""Parts of kernels that are slow on purpose, for tests of the resource gate. Triton reads their source here."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def as_it_is(query, cache):
    """In place of `as_operand`: bfloat16 queries stay what they are, so 8-bit keys are widened to bfloat16."""
    return query, tl.full([query.shape[0]], 1.0, tl.float32)
