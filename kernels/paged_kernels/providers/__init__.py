"""Our attention and that of other libraries: every provider runs the same cases, and is checked before it is timed."""

from paged_kernels.providers.case import Case, Provider, Run, UnsupportedCaseError
from paged_kernels.providers.registry import find_providers

__all__ = ["Case", "Provider", "Run", "UnsupportedCaseError", "find_providers"]
