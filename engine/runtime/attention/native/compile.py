"""Compiles the C files of this folder into a library for this machine's processor. Imports no torch.

The library is compiled once and kept in the user's cache folder (`~/.cache/pagetwin/native`). The file name holds a
digest of the sources, the compiler and the processor. `PAGETWIN_NATIVE=0` switches all compiled kernels off.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
_TIMEOUT_S = 120
SWITCH = "PAGETWIN_NATIVE"  # set to 0, nothing is compiled and torch does all


class NativeUnavailableError(RuntimeError):
    """There are no compiled kernels here; says why."""


def library() -> ctypes.CDLL:
    """The kernels. Raises NativeUnavailableError."""
    found = load_library()
    if isinstance(found, str):
        raise NativeUnavailableError(found)
    return found


def why_unavailable() -> str:
    """Why there are no compiled kernels; empty where there are."""
    found = load_library()
    return found if isinstance(found, str) else ""


@cache
def load_library() -> ctypes.CDLL | str:
    """The kernels, or why there are none: a process tries once, as every step asks."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 leaves compiled kernels out"
    try:
        compiler, *options = shlex.split(os.environ.get("CC") or "cc")
    except ValueError as error:
        return f"CC={os.environ['CC']!r} is no command: {error}"
    path = shutil.which(compiler)
    if path is None:
        return "there is no C compiler (cc, or what CC names)"
    return _loaded([path, *options])


def _loaded(compiler: list[str]) -> ctypes.CDLL | str:
    """The library that is kept, if it is whole; else a new one, or what the compiler says."""
    try:
        target = _cache_dir() / f"kernels-{_digest(compiler)}.so"
        if target.exists():
            with suppress(OSError):  # a crash left half of it: compiled again, below
                return ctypes.CDLL(str(target))
        _compile(compiler, target)
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: nobody's home folder
        said = getattr(error, "stderr", None) or str(error)
        return f"{shlex.join(compiler)} made no library: {said.strip()[:500]}"


def _compile(compiler: list[str], target: Path) -> None:
    """Into a file of another name first, so that no other process ever loads half a library."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        sources = [str(source) for source in sorted(_HERE.glob("*.c"))]
        command = [*compiler, *_FLAGS, *sources, "-o", str(built), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        built.replace(target)


def _digest(compiler: list[str]) -> str:
    """Of the sources, the compiler and the processor: a home directory may serve machines of several kinds."""
    digest = hashlib.sha256(" ".join((*compiler, *_FLAGS, platform.machine(), _processor())).encode())
    for source in sorted((*_HERE.glob("*.c"), *_HERE.glob("*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What the processor can do, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pagetwin" / "native"
