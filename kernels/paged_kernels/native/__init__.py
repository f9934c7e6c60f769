"""C kernels for CPUs, compiled on first use. Without a C compiler torch does the same work. Imports no torch.

`attention.c` and `prefill_bf16.c` are called in `attention.py`. The engine calls those of
`layer.c`: the norm, the gate of an MLP and the rotation of q and k, and the best token of each row of logits.

The C files of this folder become a library for this machine's processor. It is compiled once and kept in the user's
cache folder (`~/.cache/pagetwin/native`). The file name holds a digest of the sources, the compiler and the processor.
`PAGETWIN_NATIVE=0` switches all compiled kernels off. They keep to `ONEDNN_MAX_CPU_ISA` as oneDNN itself does, so one
variable leaves AMX out of the whole engine (`AVX512_CORE_BF16`), or all of AVX-512 (`AVX2`).
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
from typing import Any

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
_TIMEOUT_S = 120
_MOST = "ONEDNN_MAX_CPU_ISA"  # environment variable of oneDNN: the instructions that it may use
_NO_AMX = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
_LESS = {
    **dict.fromkeys(("AVX512_CORE_FP16", "AVX512_CORE_BF16"), _NO_AMX),
    **dict.fromkeys(("AVX512_CORE_VNNI", "AVX512_CORE"), (*_NO_AMX, "-mno-avx512bf16")),
    **dict.fromkeys(("AVX2_VNNI_2", "AVX2_VNNI", "AVX2"), (*_NO_AMX, "-mno-avx512f")),
    **dict.fromkeys(("AVX", "SSE41"), (*_NO_AMX, "-mno-avx2")),
}
SWITCH = "PAGETWIN_NATIVE"  # environment variable: 0 switches the compiled kernels off


class NativeUnavailableError(RuntimeError):
    """There are no compiled kernels; the message says why."""


def library() -> ctypes.CDLL:
    """The library of compiled kernels. Raises NativeUnavailableError."""
    found = load_library()
    if isinstance(found, str):
        raise NativeUnavailableError(found)
    return found


@cache
def c_function(name: str, arguments: str) -> Any:
    """A function of the library by its name, and the types of its arguments: `p`ointer, `i`nteger, `f`loat.

    Raises NativeUnavailableError.
    """
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
    function = getattr(library(), name)
    function.argtypes, function.restype = [types[each] for each in arguments], None
    return function


def why_unavailable() -> str:
    """Why there are no compiled kernels; an empty string if there are."""
    found = load_library()
    return found if isinstance(found, str) else ""


@cache
def bf16_unit() -> str:
    """What multiplies bfloat16 in prefill: `amx`, `avx512_bf16`, or nothing (""): it is widened to float32.

    The matrix units of AMX only where Linux allows their use.
    """
    found = load_library()
    if isinstance(found, str):
        return ""
    found.prefill_bf16_by.argtypes, found.prefill_bf16_by.restype = [], ctypes.c_int64
    return ("", "avx512_bf16", "amx")[found.prefill_bf16_by()]


@cache
def load_library() -> ctypes.CDLL | str:
    """Load the library, compiling it first if needed, or return why it is unavailable. A process tries this once."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 leaves compiled kernels out"
    try:
        return _loaded(_compiler())
    except NativeUnavailableError as error:
        return str(error)


def _compiler() -> list[str]:
    """The C compiler with its options. Raises NativeUnavailableError."""
    try:
        compiler, *options = shlex.split(os.environ.get("CC") or "cc")
    except ValueError as error:
        raise NativeUnavailableError(f"CC={os.environ['CC']!r} is not a command: {error}") from error
    path = shutil.which(compiler)
    if path is None:
        raise NativeUnavailableError("there is no C compiler (cc, or the command in CC)")
    return [path, *options]


def compile_command(sources: list[Path], target: Path) -> list[str]:
    """The command that compiles C files into the library `target` as ours are. Raises NativeUnavailableError."""
    return [*_compiler(), *_flags(), *map(str, sources), "-o", str(target), "-lm"]


def _flags() -> tuple[str, ...]:
    return (*_FLAGS, *_LESS.get(os.environ.get(_MOST, "").upper(), ()))


def _loaded(compiler: list[str]) -> ctypes.CDLL | str:
    """The library in the cache folder if it loads, else a newly compiled one, or the error message."""
    try:
        target = _cache_dir() / f"kernels-{_digest(compiler)}.so"
        if target.exists():
            with suppress(OSError):  # an incomplete file is compiled again below
                return ctypes.CDLL(str(target))
        _compile(target)
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home folder
        message = getattr(error, "stderr", None) or str(error)
        return f"{shlex.join(compiler)} made no library: {message.strip()[:500]}"


def _compile(target: Path) -> None:
    """Compile to a temporary file and rename it, so that no other process loads an incomplete library."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = compile_command(sorted(_HERE.glob("*.c")), built)
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        built.replace(target)


def _digest(compiler: list[str]) -> str:
    """A digest of the sources, the compiler and the processor, because machines may share a home directory."""
    digest = hashlib.sha256(" ".join((*compiler, *_flags(), platform.machine(), _processor())).encode())
    for source in sorted((*_HERE.glob("*.c"), *_HERE.glob("*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The processor's feature flags from /proc/cpuinfo, or its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pagetwin" / "native"
