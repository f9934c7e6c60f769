"""The C kernels compiled without optimisation: a second in place of twenty, for tests that ask for no speed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiers import tier

from paged_kernels import native as compiling


@contextmanager
def quick_compiler(patch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """No library is loaded, the cache folder is in `folder`, and by day the compiler does not optimise."""
    flags = (tier("-O0", "-O3"), *(flag for flag in compiling._FLAGS if not flag.startswith("-O")))
    patch.setattr(compiling, "_FLAGS", flags)
    patch.setenv("XDG_CACHE_HOME", str(folder))
    compiling.load_library.cache_clear()
    yield
    compiling.load_library.cache_clear()
