"""The CPU layer: time of the engine's attention on a CPU, relative to the accepted version of the same code.

The baseline holds the accepted sources: the C kernels of decode and prefill, and the torch paths of both. Torch is
timed with a softcap, since the engine leaves such layers to it; plain float32 layers run in C. The gate compiles and
loads the accepted sources beside today's, and times both in turns in one process. So a faster, slower or busier
machine changes both alike, and the ratio of unchanged code is 1 on every machine. Every figure is a CPU figure; none
says anything about a GPU. The prefill in bfloat16 is not timed: it needs matrix units, which few machines have.
"""

import ctypes
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.config.errors import UserError
from harness.gate.findings import (
    Baseline,
    Finding,
    GateVerdict,
    LayerResult,
    Measured,
    coverage,
    read_baseline,
)
from harness.gate.policy import rounds
from harness.gate.settings import GateSettings, default_settings, effect

if TYPE_CHECKING:
    import torch


NAME = "cpu-attention"
NATIVE, CHUNK = "CPU: compiled decode (C)", "CPU: compiled prefill (C)"
DECODE, PREFILL = "CPU: torch decode with a softcap", "CPU: torch prefill with a softcap"
ROWS, HEADS, KV_HEADS, DIM, CONTEXT, BLOCK = 8, 16, 4, 64, 512, 16
QUERIES = 128  # of the prefill cases
SOFTCAP = 30.0  # of the torch cases
CALLS = {NATIVE: 12, CHUNK: 5, DECODE: 5, PREFILL: 5}  # of a timed block, so that it takes some milliseconds
C_FILES = ("decode.c", "prefill.c", "decode.h", "vectors.h")
TORCH_FILES = ("gathered.py", "decode.py", "prefill.py")  # each imports only those before it
_TOLERANCE = 1e-4
Work = Callable[[], object]


def case_names() -> list[str]:
    """The names of the cases."""
    return [NATIVE, CHUNK, DECODE, PREFILL]


def sources() -> dict[str, str]:
    """Today's sources of the timed code, by file name."""
    import engine.runtime.attention.native
    import paged_kernels.torch

    native = Path(engine.runtime.attention.native.__file__).parent
    torch_paths = Path(paged_kernels.torch.__file__).parent
    files = [*(native / name for name in C_FILES), *(torch_paths / name for name in TORCH_FILES)]
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
        from engine.runtime.attention.native import library
        from paged_kernels.torch import decode, prefill

        return _works(library(), decode, prefill, data)
    modules = _load_torch(version)
    return _works(_compile(version, folder), modules["decode.py"], modules["prefill.py"], data)


def _works(native: ctypes.CDLL, decode: ModuleType, prefill: ModuleType, data: CpuInputs) -> dict[str, Work]:
    from paged_kernels import Scoring, Workspace

    scoring, q = Scoring(DIM**-0.5, softcap=SOFTCAP), data.q
    table, lengths = data.table.numpy(), data.lengths.numpy()
    metadata = decode.decode_metadata(table, lengths, BLOCK, token_bytes=2 * KV_HEADS * DIM * 4)
    chunk = prefill.prefill_metadata(table[0], 0, QUERIES, CONTEXT, BLOCK)
    decode_out, prefill_out, space = q[:ROWS].clone(), q[:QUERIES].clone(), Workspace()
    caches = data.keys, data.values

    def torch_decode() -> object:
        decode.run_decode(metadata, q[:ROWS], *caches, scoring, decode_out, space)
        return decode_out

    def torch_prefill() -> object:
        prefill.run_prefill(chunk, q[:QUERIES], *caches, scoring, prefill_out, space)
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

    def call() -> object:
        run(*pointers, 0, ROWS, *shape, DIM**-0.5, out.data_ptr(), scratch.data_ptr())
        return out

    return call


def _native_prefill(library: ctypes.CDLL, data: CpuInputs) -> Work:
    """The C kernel of one row's chunk as `NativeMetadata` of the engine calls it."""
    import torch

    from engine.runtime.attention.metadata import prefill_scratch

    run = _c_function(library, "prefill_f32", 4, 10)
    q, table = data.q[:QUERIES].contiguous(), data.table[0].contiguous()
    out = torch.empty(QUERIES, HEADS, DIM)
    scratch = torch.empty(prefill_scratch(torch.float32, DIM, DIM, CONTEXT))
    pointers = [tensor.data_ptr() for tensor in (q, data.keys, data.values, table)]
    shape = (QUERIES, CONTEXT, 0, HEADS, BLOCK, HEADS, KV_HEADS, DIM, DIM, 0)

    def call() -> object:
        run(*pointers, *shape, DIM**-0.5, out.data_ptr(), scratch.data_ptr())
        return out

    return call


def _compile(version: Mapping[str, str], folder: Path) -> ctypes.CDLL:
    from engine.runtime.attention.native import NativeUnavailableError, compile_command

    for name in C_FILES:
        (folder / name).write_text(version[name], encoding="utf-8")
    target = folder / "accepted.so"
    try:
        command = compile_command([folder / name for name in C_FILES if name.endswith(".c")], target)
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        return ctypes.CDLL(str(target))
    except (OSError, NativeUnavailableError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise UserError(f"the accepted C files do not compile here: {said.strip()[:300]}") from error


def _load_torch(version: Mapping[str, str]) -> dict[str, ModuleType]:
    """The accepted modules, which import each other and not today's."""
    package = "paged_kernels_accepted"
    found: dict[str, ModuleType] = {}
    for name in TORCH_FILES:
        full = f"{package}_{name.removesuffix('.py')}"
        text = version[name]
        for other in TORCH_FILES:
            stem = other.removesuffix(".py")
            text = text.replace(f"paged_kernels.torch.{stem} import", f"{package}_{stem} import")
        module = ModuleType(full)
        sys.modules[full] = module  # before it runs: its dataclasses look their module up
        try:
            exec(compile(text, f"<accepted {name}>", "exec"), module.__dict__)
        except Exception as error:
            raise UserError(f"the accepted {name} cannot be loaded beside today's code: {error}") from error
        found[name] = module
    return found


def measure(folder: Path | None = None) -> Measured:
    """Time today's code and the accepted one in turns; without a baseline in `folder`, today's against itself."""
    today = sources()
    baseline = _accepted(folder)
    kept = {} if baseline is None else baseline.environment["sources"]
    accepted = {name: kept.get(name, text) for name, text in today.items()}  # a new file has no accepted one
    cases: dict[str, dict[str, Any]] = {}
    remark = "CPU figures: time of today's code / time of the accepted code, in turns in one process"
    data = inputs()
    with tempfile.TemporaryDirectory() as place:
        ours, theirs = works(None, data, Path(place)), works(accepted, data, Path(place))
        for name in case_names():
            difference = (ours[name]() - theirs[name]()).abs().max()  # type: ignore[operator]
            cases[name] = {"difference": float(difference)}
            cases[name]["ratios"] = rounds(_times(ours[name], CALLS[name]), _times(theirs[name], CALLS[name]))
    made_on = {"machine": platform.machine(), "files": sorted(today)}
    return Measured("cpu", NAME, made_on, None, cases, {"sources": today}, (remark,))


def _accepted(folder: Path | None) -> Baseline | None:
    if folder is None:
        return None
    found = read_baseline(folder / f"{NAME}.json", "cpu")
    if found is not None and not isinstance(found.environment.get("sources"), dict):
        reason = "holds no sources; write it again with gate --layer cpu --update"
        raise UserError(f"{folder / NAME}.json {reason}")
    return found


def _times(work: Work, calls: int) -> Work:
    def run() -> None:
        for _ in range(calls):
            work()

    return run


def judge(now: Measured, baseline: Baseline, settings: GateSettings | None = None) -> LayerResult:
    """A case regresses if even the lower bound of its ratio is above 1 by more than the negligible margin."""
    margins = (settings or default_settings()).attention
    findings = []
    for case in sorted(set(now.cases) & set(baseline.cases)):
        found, difference = now.cases[case], float(now.cases[case]["difference"])
        bounds = effect(found["ratios"], [1.0] * len(found["ratios"]))
        if difference > _TOLERANCE:
            text = f"its results differ from the accepted code's by {difference:.1e}; accept them if that is meant"
            findings.append(Finding(case, GateVerdict.regressed, text))
        else:
            findings.append(Finding(case, bounds.verdict(margins), f"{bounds}"))
    made_on = f"CPU, {platform.machine()}, accepted {baseline.date}"
    return LayerResult("cpu", (*coverage(now, baseline), *findings), made_on, now.remarks)


def unfit(now: Measured, settings: GateSettings | None = None) -> Iterator[str]:
    """Nothing: the baseline holds sources, and no figure that noise could spoil."""
    del now, settings
    return iter(())
