"""A pytest plugin (`-p ptx.pytest_plugin`): every Triton kernel that a test launches runs in the PTX interpreter.

It is for the tests of Triton's own interpreter, in a process without TRITON_INTERPRET. The PTX is that of sm_80, and of
sm_89 for tests of 8-bit caches, for which sm_80 has no instructions.
"""

import inspect
from collections.abc import Iterator

import pytest
import torch
from ptx.triton_launch import interpreted_launches


def _capability(request: pytest.FixtureRequest) -> int:
    call = getattr(request.node, "callspec", None)
    values = [] if call is None else [repr(value) for value in call.params.values()]
    texts = [*values, inspect.getsource(request.function)]
    return 89 if any(name in text.lower() for text in texts for name in ("float8", "e4m3", "e5m2")) else 80


@pytest.fixture(autouse=True)
def _compiled_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    with interpreted_launches(_capability(request)):
        yield
