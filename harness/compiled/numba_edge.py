"""The only file that uses numba. It is imported when a function is compiled, not with this module."""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

# numba reads it when imported: a quarter less of compiling, and as fast
os.environ.setdefault("NUMBA_OPT", "1")
_Function = TypeVar("_Function", bound=Callable[..., object])
_JITABLE: list[Callable[..., object]] = []
_CALLED: list[Callable[..., object]] = []


def is_available() -> bool:
    """Whether numba is installed and can be imported here: a build may be too old for the numpy beside it."""
    try:
        import_module("numba")
    except (ImportError, OSError, AttributeError):
        return False
    return True


def is_cached() -> bool:
    """Whether machine code of these sources is on disk."""
    return any(_cache_dir().glob("**/*.nbc"))


def jitable(function: _Function) -> _Function:
    """Mark `function` as callable from compiled code; in Python it stays as it is."""
    _JITABLE.append(function)
    return function


def called(function: _Function) -> _Function:
    """The same for what runs once a request or less: it is not inlined at every place that calls it."""
    _CALLED.append(function)
    return function


@cache
def compiled(function: _Function) -> _Function:
    """`function` as machine code, cached on disk for the next process where the cache folder can be written.

    The code allocates nothing, so numba's reference counting of arrays is switched off: it took 70 times as long as
    all the rest, because every call passes the whole state. Every function is inlined by LLVM for the same reason: the
    state is some 90 arrays of seven words, which a call passes by value. That takes a thirteenth of the time of calls,
    None is called from C, so none gets an entry for C: a quarter of the compiling.
    """
    numba, extending = import_module("numba"), import_module("numba.extending")
    for each in _JITABLE:
        extending.register_jitable(forceinline=True, no_cfunc_wrapper=True)(each)
    for each in _CALLED:
        extending.register_jitable(no_cfunc_wrapper=True)(each)
    numba.config.CACHE_DIR = str(_cache_dir())
    kept = _is_writable(_cache_dir())
    found: _Function = numba.njit(cache=kept, _nrt=False)(function)
    return found


def _is_writable(folder: Path) -> bool:
    """Whether `folder` can be written. numba would cache beside the sources instead, and miss most changes there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _cache_dir() -> Path:
    """One cache folder for each state of the sources, since numba checks only the file of the outermost function."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    replay = here.parent / "replay"
    for source in (
        *sorted(here.glob("*.py")),
        here.parent / "metrics" / "log.py",
        here.parent / "cost" / "roofline.py",
        here.parents[1] / "engine" / "core" / "plan.py",
        replay / "arrivals.py",
        replay / "features.py",
        replay / "beams.py",
        replay / "branches.py",
    ):
        digest.update(source.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "pagetwin" / "compiled" / digest.hexdigest()[:16]
