"""Where numba compiles. Numba is imported when a function is compiled, not with this module."""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])
_PARTS: dict[Callable[..., object], bool] = {}  # what compiled code may call, and whether it is inlined


def is_available() -> bool:
    """Whether numba is installed and can be used here: a build may be too old for the numpy beside it, or be new and
    have what `reference` needs elsewhere. NUMBA_DISABLE_JIT switches it off.
    """
    try:
        import_module("numba")
        import_module("harness.compiled.reference")
    except (ImportError, OSError, AttributeError):
        return False
    return not import_module("numba").config.DISABLE_JIT


def is_cached() -> bool:
    """Whether machine code of these sources is on disk."""
    return any(_cache_dir().glob("**/*.nbc"))


def called(function: _Function) -> _Function:
    """Mark `function` as callable from compiled code; in Python it stays as it is."""
    _PARTS[function] = False
    return function


def inlined(function: _Function) -> _Function:
    """The same for what runs in every step or for every row: it is inlined at every place that calls it.

    All of it inlined takes three times as long to compile, and is no faster.
    """
    _PARTS[function] = True
    return function


class MachineCode:
    """A function of a state and an int as machine code; the state is a named tuple of arrays, numbers, and such tuples.

    It is bound to one state at a time, because to find the addresses of all its arrays takes longer than many a call.
    """

    def __init__(self, function: Callable[[Any, int], int]) -> None:
        self._function, self._state = function, None

    def __call__(self, state: Any, number: int) -> int:
        """Call it."""
        if state is not self._state:
            self._state = state
            kind, self._words = import_module("harness.compiled.reference").reference_to(state)
            self._entry = dispatcher(self._function).compile((kind, import_module("numba").int64))
            self._address = self._words.ctypes.data
        return int(self._entry(self._address, number))


@cache
def dispatcher(function: Callable[..., object]) -> Any:
    """`function` as machine code, cached on disk for the next process where the cache folder can be written.

    The code allocates nothing, so numba's reference counting of arrays is switched off: it took 70 times as long as
    all the rest. None is called from C, so none gets an entry for C: a quarter of the compiling.
    """
    numba, reference = import_module("numba"), import_module("harness.compiled.reference")
    while _PARTS:  # once in a process
        reference.compile_where_called(*_PARTS.popitem())
    numba.config.CACHE_DIR = str(_cache_dir())
    return numba.njit(cache=_is_writable(_cache_dir()), _nrt=False)(function)


def _is_writable(folder: Path) -> bool:
    """Whether `folder` can be written. numba would cache beside the sources instead, and miss most changes there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _cache_dir() -> Path:
    """One cache folder for each state of the sources, since numba checks only the file of the outermost function."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    beside = ["metrics/log", "cost/roofline", "../engine/core/plan"]
    beside += ["replay/arrivals", "replay/features", "replay/beams", "replay/branches"]
    for source in (*sorted(here.glob("*.py")), *(here.parent / f"{name}.py" for name in beside)):
        digest.update(source.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "pagetwin" / "compiled" / digest.hexdigest()[:16]
