"""The CPU layer: time of the engine's attention on a CPU, relative to the accepted version of the same code.

The baseline holds the accepted sources: the C kernels of decode and prefill, and the torch paths of both. Torch is
timed with a softcap, since the engine leaves such layers to it; plain float32 layers run in C. The gate compiles and
loads the accepted sources beside today's, and times both in turns in one process. So a faster, slower or busier
machine changes both alike, and the ratio of unchanged code is 1 on every machine. Every figure is a CPU figure; none
says anything about a GPU. The prefill in bfloat16 is not timed.
"""

import ctypes
import platform
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.config.errors import UserError
from harness.gate.beside import Work, accepted_sources, judge, load, ratios_of, unfit
from harness.gate.findings import Measured

if TYPE_CHECKING:
    import torch


__all__ = ["case_names", "judge", "measure", "sources", "unfit", "works"]
NAME = "cpu-attention"
NATIVE, CHUNK = "CPU: compiled decode (C)", "CPU: compiled prefill (C)"
DECODE, PREFILL = "CPU: torch decode with a softcap", "CPU: torch prefill with a softcap"
ROWS, HEADS, KV_HEADS, DIM, CONTEXT, BLOCK = 8, 16, 4, 64, 512, 16
QUERIES = 128  # of the prefill cases
SOFTCAP = 30.0  # of the torch cases
C_FILES = ("attention.c", "attention.h", "vectors.h")
TORCH_FILE = "torch_backend.py"
_TORCH = "paged_kernels.torch_backend"


def case_names() -> list[str]:
    """The names of the cases."""
    return [NATIVE, CHUNK, DECODE, PREFILL]


def sources() -> dict[str, str]:
    """Today's sources of the timed code, by file name."""
    from paged_kernels import native, torch_backend

    folder = Path(native.__file__).parent
    files = [*(folder / name for name in C_FILES), Path(torch_backend.__file__)]
    return {file.name: file.read_text(encoding="utf-8") for file in files}


@dataclass(frozen=True)
class CpuInputs:
    """Queries, caches, block tables and lengths of the cases, in float32 on one thread."""

    q: "torch.Tensor"
    keys: "torch.Tensor"
    values: "torch.Tensor"
    table: "torch.Tensor"
    lengths: "torch.Tensor"


def inputs() -> CpuInputs:
    """The same inputs in every run."""
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    per_row = CONTEXT // BLOCK
    table = torch.randperm(ROWS * per_row, generator=generator).view(ROWS, per_row) + 1
    shape = (ROWS * per_row + 1, BLOCK, KV_HEADS, DIM)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    q = torch.randn(max(ROWS, QUERIES), HEADS, DIM, generator=generator)
    return CpuInputs(q, keys, values, table, torch.full((ROWS,), CONTEXT))


def works(version: Mapping[str, str] | None, data: CpuInputs, folder: Path) -> dict[str, Work]:
    """The calls of a version of the code by case; None is today's. A call returns its output, made anew in place.

    Raises:
        UserError: the version cannot be compiled or loaded here; the message says why.
    """
    if version is None:
        from paged_kernels import torch_backend
        from paged_kernels.native import library

        return _works(library(), torch_backend, data)
    module = load({_TORCH: version[TORCH_FILE]}, folder)[_TORCH]
    return _works(_compile(version, folder), module, data)


def _works(native: ctypes.CDLL, attention: ModuleType, data: CpuInputs) -> dict[str, Work]:
    from paged_kernels import Scoring, Workspace

    scoring, q = Scoring(DIM**-0.5, softcap=SOFTCAP), data.q
    table, lengths = data.table.numpy(), data.lengths.numpy()
    metadata = attention.decode_metadata(table, lengths, BLOCK, token_bytes=2 * KV_HEADS * DIM * 4)
    chunk = attention.prefill_metadata(table[0], 0, QUERIES, CONTEXT, BLOCK)
    decode_out, prefill_out, space = q[:ROWS].clone(), q[:QUERIES].clone(), Workspace()
    caches = data.keys, data.values

    def torch_decode() -> object:
        attention.run_decode(metadata, q[:ROWS], *caches, scoring, decode_out, space)
        return decode_out

    def torch_prefill() -> object:
        attention.run_prefill(chunk, q[:QUERIES], *caches, scoring, prefill_out, space)
        return prefill_out

    compiled = {NATIVE: _native(native, data), CHUNK: _native_prefill(native, data)}
    return {**compiled, DECODE: torch_decode, PREFILL: torch_prefill}


def _c_function(library: ctypes.CDLL, name: str, pointers: int, numbers: int) -> Callable[..., None]:
    """A kernel of so many pointers, whole numbers, a float, and pointers to output and scratch."""
    given = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * numbers
    return ctypes.CFUNCTYPE(None, *given, ctypes.c_float, *[ctypes.c_void_p] * 2)((name, library))


def _native(library: ctypes.CDLL, data: CpuInputs) -> Work:
    """The C kernel as `NativeMetadata` of the engine calls it."""
    import torch

    run = _c_function(library, "decode_f32", 5, 9)
    q, out = data.q[:ROWS].contiguous(), torch.empty(ROWS, HEADS, DIM)
    scratch = torch.empty(HEADS * (2 * DIM + 16 + 2))
    pointers = [tensor.data_ptr() for tensor in (q, data.keys, data.values, data.table, data.lengths)]
    shape = (data.table.shape[1], BLOCK, HEADS, KV_HEADS, DIM, DIM, 0)

    def call(held: object = (data, q)) -> object:  # what the pointers point at lives as long as the call
        del held
        run(*pointers, 0, ROWS, *shape, DIM**-0.5, out.data_ptr(), scratch.data_ptr())
        return out

    return call


def _native_prefill(library: ctypes.CDLL, data: CpuInputs) -> Work:
    """The C kernel of one row's chunk as `NativeMetadata` of the engine calls it."""
    import torch

    from paged_kernels.native.attention import prefill_scratch

    run = _c_function(library, "prefill_f32", 4, 10)
    q, table = data.q[:QUERIES].contiguous(), data.table[0].contiguous()
    out = torch.empty(QUERIES, HEADS, DIM)
    scratch = torch.empty(prefill_scratch("prefill_f32", DIM, DIM, CONTEXT))
    pointers = [tensor.data_ptr() for tensor in (q, data.keys, data.values, table)]
    shape = (QUERIES, CONTEXT, 0, HEADS, BLOCK, HEADS, KV_HEADS, DIM, DIM, 0)

    def call(held: object = (data, q, table)) -> object:
        del held
        run(*pointers, *shape, DIM**-0.5, out.data_ptr(), scratch.data_ptr())
        return out

    return call


def _compile(version: Mapping[str, str], folder: Path) -> ctypes.CDLL:
    from paged_kernels.native import NativeUnavailableError, compile_command

    target = folder / "accepted.so"
    if target.exists():
        return ctypes.CDLL(str(target))
    for name in C_FILES:
        (folder / name).write_text(version[name], encoding="utf-8")
    try:
        command = compile_command([folder / name for name in C_FILES if name.endswith(".c")], target)
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        return ctypes.CDLL(str(target))
    except (OSError, NativeUnavailableError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise UserError(f"the accepted C files do not compile here: {said.strip()[:300]}") from error


def measure(folder: Path | None = None) -> Measured:
    """Time today's code and the accepted one in turns; without a baseline in `folder`, today's against itself."""
    today = sources()
    # a new file has no accepted one
    accepted = today | accepted_sources(folder and folder / f"{NAME}.json", "cpu", today)
    cases: dict[str, dict[str, Any]] = {}
    remark = "CPU figures: time of today's code / time of the accepted code, in turns in one process"
    with tempfile.TemporaryDirectory(prefix="pagetwin-gate-") as place:
        for name in case_names():

            def sides(name: str = name) -> tuple[Work, Work]:
                data = inputs()
                ours, theirs = (works(version, data, Path(place)) for version in (None, accepted))
                return ours[name], theirs[name]

            ours, theirs = sides()
            difference = (ours() - theirs()).abs().max()  # type: ignore[operator]
            cases[name] = {"difference": float(difference), "ratios": ratios_of(sides)}
    made_on = {"machine": platform.machine(), "files": sorted(today)}
    return Measured("cpu", NAME, made_on, None, cases, {"sources": today}, (remark,))
