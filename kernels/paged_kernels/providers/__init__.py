"""Our attention and that of others, side by side: every provider runs the same cases, checked before they are timed."""

from paged_kernels.providers.case import Case, Provider, Run, UnsupportedCaseError
from paged_kernels.providers.registry import find_providers

__all__ = ["Case", "Provider", "Run", "UnsupportedCaseError", "find_providers"]
