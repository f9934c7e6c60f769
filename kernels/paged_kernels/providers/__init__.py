"""Our attention and that of other libraries: every provider runs the same cases, and is checked before it is timed."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paged_kernels.checks import OptionError
from paged_kernels.providers import libraries, ours
from paged_kernels.providers.case import Case, Provider, Run, UnsupportedCaseError

__all__ = ["Case", "Provider", "Run", "UnsupportedCaseError", "find_providers"]


@dataclass(frozen=True, slots=True)
class UserFunction:
    """`function(case)` returns the output `[tokens, heads, dv]`. The whole call is timed.

    If the function has an attribute `prepare`, `function.prepare(case)` is called instead, untimed, and returns the
    timed call. An attribute `capturable = True` allows capture in a CUDA graph.
    """

    name: str
    function: Callable[[Case], Any]

    @property
    def capturable(self) -> bool:
        """The function's attribute `capturable`, False without one."""
        return bool(getattr(self.function, "capturable", False))

    def available(self, device: torch.device) -> str | None:
        """It was imported, so it can run."""
        return None

    def prepare(self, case: Case) -> Run:
        """The user's own preparation, or none."""
        prepare = getattr(self.function, "prepare", None)
        run: Run = prepare(case) if prepare is not None else partial(self.function, case)
        return run


def load_function(spec: str) -> UserFunction:
    """The provider for `module:function`. Raises `OptionError` if the module or the function is not found."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise OptionError(f"{spec!r} names no function; write module:function, e.g. my_kernels:paged_decode")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise OptionError(f"{spec!r}: module {module_name!r} cannot be imported: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise OptionError(
            f"{spec!r}: module {module_name!r} has no function {name!r}; it has {known or 'none'}"
        )
    return UserFunction(spec, function)


def find_providers(function: str | None = None) -> dict[str, Provider]:
    """Every provider by name, ours first, whether or not it can run here. `function` adds the user's `module:function`.

    Raises `OptionError` if that function is not found.
    """
    every_case = ours.Cascade("cascade-always", always=True)
    own = (ours.Paged(), ours.HopperPrefill(), ours.ContiguousDecode(), ours.Cascade(), every_case)
    sdpa = (libraries.ContiguousSdpa(), libraries.GatherSdpa())
    others = (libraries.FlexAttention(), libraries.FlashInfer(), libraries.FlashAttention(), ours.Native())
    users = (load_function(function),) if function else ()
    providers: tuple[Provider, ...] = (*own, *sdpa, *others, *users)
    return {provider.name: provider for provider in providers}
