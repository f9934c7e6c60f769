"""The resource layer: every kernel configuration, compiled for every architecture that it supports.

No GPU is needed: Triton contains its compiler and NVIDIA's tools. The disassembly gives registers, spills, wide loads
and instructions. `broken` and `worse` define a regression. A kernel whose digest the baseline has need not be compiled
again (`unchanged`). The disassembler takes 0.3 to 0.5 s to start and 30 µs for an instruction, so it lists many kernels
at once.
"""

import hashlib
import multiprocessing
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import kernel_speed
from harness.config.errors import UserError
from harness.environment import kernel_digest
from harness.gate.findings import Baseline, Finding, GateVerdict, LayerResult, Measured, coverage
from harness.gate.settings import GateSettings, default_settings
from harness.kernel_speed.block_sizes import predicted_shares
from harness.kernel_speed.gpus import LATENCIES, SCHEDULERS
from harness.kernel_speed.predict import Instruction, Kernel, read_listing, replay, tile_loop

if TYPE_CHECKING:
    from paged_kernels.triton.configurations import KernelConfiguration


_BUFFER = re.compile(
    r"local_alloc : \(\) -> !ttg\.memdesc<(?P<depth>\d+)x(?P<keys>\d+)x(?P<width>\d+)x[^>]*mutable>"
)
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+)")
_WIDTH = 16  # bytes of an instruction


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Counts of instructions in the machine code of one kernel.

    `wide_loads` and `narrow_loads` are loads from global memory of 16 bytes and of fewer bytes per thread, including
    asynchronous copies to shared memory (LDGSTS). `local` are accesses to local memory, which only spills and arrays
    indexed at run time need. `hmma` and `hgmma` are matrix instructions of a warp and of a warp group (sm_90, sm_100).
    `conversions` (F2F) change the type of one number at a quarter of the usual rate. `loop` is the length of the loop
    that loads tiles of K and V, 0 where none does.
    """

    instructions: int
    wide_loads: int
    narrow_loads: int
    local: int
    hmma: int
    hgmma: int
    conversions: int = 0
    loop: int = 0


def count(code: Sequence[Instruction]) -> Instructions:
    """Count the instructions of a kernel, with the padding at the end (NOP, BRA to itself)."""
    loads = [one.opcode for one in code if one.opcode.startswith("LDG")]
    wide = sum(".128" in opcode for opcode in loads)
    return Instructions(
        instructions=len(code),
        wide_loads=wide,
        narrow_loads=len(loads) - wide,
        local=sum(one.name in ("LDL", "STL") for one in code),
        hmma=sum(one.opcode.startswith("HMMA") for one in code),
        hgmma=sum(one.opcode.startswith(("HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")) for one in code),
        conversions=sum(one.name == "F2F" for one in code),
        loop=len(tile_loop(code)),
    )


@dataclass(frozen=True)
class Built:
    """A compiled kernel: its machine code, registers of a thread, bytes of stack and of shared memory, staged tiles."""

    code: bytes
    registers: int
    stack_bytes: int
    shared_bytes: int
    depth: int


def built(configuration: "KernelConfiguration", capability: int) -> Built:
    """Compile for compute capability `capability` (such as 90).

    Raises:
        RuntimeError: a tool failed. Errors of the compiler keep their own types.
    """
    kernel = compiled(configuration, capability)
    cubin: bytes = kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(prefix="pagetwin-gate-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _USAGE.search(_tool("cuobjdump", "-res-usage", file.name))
    if usage is None:
        raise RuntimeError("cuobjdump did not report registers and stack")
    return Built(
        code=text_section(cubin),
        registers=int(usage["registers"]),
        stack_bytes=int(usage["stack"]),
        shared_bytes=int(kernel.metadata.shared),
        depth=pipeline_depth(kernel.asm["ttgir"], configuration.kv_tile),
    )


def compiled(configuration: "KernelConfiguration", capability: int) -> Any:
    """Triton's compiled kernel. The compiler is told which arguments are multiples of 16, which makes loads wide."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile

    return compile(
        configuration.source, target=GPUTarget("cuda", capability, 32), options=configuration.options
    )


def pipeline_depth(ttgir: str, kv_tile: tuple[int, int] | None) -> int:
    """Tiles in the K or V buffer (the smaller number), from Triton's GPU dialect; 0 where no tile is staged."""
    found = [tuple(map(int, shape)) for shape in _BUFFER.findall(ttgir)]
    return min((depth for depth, *tile in found if tuple(tile) == kv_tile), default=0)


def text_section(cubin: bytes) -> bytes:
    """The machine code of the only kernel in a cubin, which is a 64-bit ELF file.

    Raises:
        RuntimeError: the file does not hold exactly one kernel.
    """
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, number, names = struct.unpack_from("<HHH", cubin, 58)
    # of a section: place of the name, place of the content, length of the content
    sections = [struct.unpack_from("<I20xQQ", cubin, headers + size * index) for index in range(number)]
    found = [
        cubin[start : start + length]
        for name, start, length in sections
        if cubin.startswith(b".text.", sections[names][1] + name)
    ]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} kernels in a cubin; expected 1")
    return found[0]


def listed(codes: Sequence[bytes], capability: int) -> Iterator[tuple[Instruction, ...]]:
    """The instructions of several kernels of one architecture, from one run of the disassembler.

    Targets of branches are places within the kernel, as `read_listing` gives them for a kernel alone.
    """
    with tempfile.NamedTemporaryFile(prefix="pagetwin-gate-", suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        # -ndf leaves out the data-flow analysis, which takes a third of the time and does not change the listing
        # the variants Triton compiles for
        architecture = f"SM{capability}a" if capability >= 90 else f"SM{capability}"
        listing = _tool("nvdisasm", "-ndf", "-hex", "-b", architecture, file.name)
    code = read_listing(listing)
    ends = list(accumulate(len(one) // _WIDTH for one in codes))
    if len(code) != (ends or [0])[-1]:
        raise RuntimeError(f"nvdisasm listed {len(code)} instructions of {ends[-1]}")
    for start, end in zip([0, *ends], ends, strict=False):
        yield tuple(
            replace(one, target=one.target - start) if one.target >= 0 else one for one in code[start:end]
        )


def _tool(name: str, *words: str) -> str:
    """The output of a tool in Triton's NVIDIA backend. Raises RuntimeError where it fails."""
    import triton.backends.nvidia.compiler as backend

    program = Path(backend.__file__).parent / "bin" / name
    done = subprocess.run((str(program), *words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed: {done.stderr or done.stdout}")
    return done.stdout


# Instructions per byte of K and V at which issue slots limit no GPU, of 16-bit and of 8-bit caches.
GOAL_PER_BYTE = (0.06, 0.12)
# Bytes on their way in a multiprocessor that hide the memory's latency (Little's law). An H200 delivers about 20 bytes
# a cycle to each, and its memory answers after 700 cycles (14 KB), near the full rate after several times as many.
GOAL_IN_FLIGHT = 65_536
LESS_SHARE = 0.005  # of the bandwidth, which a predicted share may lose
# The compiler makes the same machine code, bit for bit, for sm_86 and sm_89 (but not of 8-bit floats, which sm_86 does
# not have), so a kernel is compiled for one and judged on both.
SAME_CODE = {86: 89}
_BATCH = 8  # kernels that a process compiles before it starts the disassembler
UNCOMPILED = "error"  # the key under which a case keeps the compiler's refusal


class _Batch(NamedTuple):
    keys: tuple[str, ...]
    capability: int
    judged: tuple[int, ...]  # architectures that run what is compiled for `capability`


@dataclass(frozen=True, kw_only=True)
class Resources(Instructions):
    """The resources of one compiled kernel, beside its instructions.

    `depth` is the number of tiles in each K and V buffer (the smaller of the two). With 2 or more, the next tile loads
    while the present one is computed; 0 means that no tile is staged in shared memory. Spilled registers appear as a
    stack and as accesses to local memory. `per_byte` are the instructions of all warps in the loop per byte of K and V
    (decode; else 0), `most_per_byte` what is promised of them (0: nothing).

    The others are of the static model (`harness.kernel_speed`): programs that a multiprocessor holds, bytes of K and V
    that it has on their way, cycles that one warp takes before the loop, for a tile and behind the loop, cycles of a
    tile on its scheduler's busiest pipe and on shared memory, bytes that a warp copies for a tile, and waits for
    warp-group products in a tile. Goals are not promised: the baseline may hold a figure that misses one, and the
    answer then says so (0: no goal). `shares` are predicted shares of a GPU's bandwidth by GPU and batch, of the decode
    of one shape as the launch policy cuts it. `digest` is of all that the other fields follow from, but for Triton's
    version.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    depth: int
    per_byte: float = 0.0
    most_per_byte: float = 0.0
    programs: int = 0
    in_flight: int = 0
    prologue: float = 0.0
    tile: float = 0.0
    epilogue: float = 0.0
    pipe: float = 0.0
    shared: float = 0.0
    copied: int = 0
    product_waits: int = 0
    goal_per_byte: float = 0.0
    goal_in_flight: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)
    digest: str = ""


def resources(
    configuration: "KernelConfiguration", kernel: Built, code: Sequence[Instruction], capability: int
) -> Resources:
    """The resources of a kernel that was compiled for `capability` (such as 90), and of its instructions."""
    counts = count(code)
    warps, kv_bytes = configuration.num_warps, configuration.kv_bytes
    warp = replay(code, LATENCIES[capability], crowd=-(-warps // SCHEDULERS))
    speed = Kernel(kernel.registers, kernel.shared_bytes, warps, warp)
    return Resources(
        **vars(counts),
        registers=kernel.registers,
        stack_bytes=kernel.stack_bytes,
        shared_bytes=kernel.shared_bytes,
        depth=kernel.depth,
        per_byte=round(counts.loop * warps / kv_bytes, 4) if kv_bytes else 0.0,
        most_per_byte=configuration.most_per_byte,
        programs=speed.seats(capability),
        in_flight=round(speed.in_flight(capability)),
        prologue=round(warp.prologue),
        tile=round(warp.loop),
        epilogue=round(warp.epilogue),
        pipe=warp.pipe,
        shared=warp.shared,
        copied=warp.copied,
        product_waits=warp.product_waits,
        goal_per_byte=GOAL_PER_BYTE["fp8" in configuration.key] if configuration.most_per_byte else 0.0,
        goal_in_flight=GOAL_IN_FLIGHT if kv_bytes else 0,
        shares=predicted_shares(configuration.key, speed, capability),
        digest=digest_of(configuration),
    )


def digest_of(configuration: "KernelConfiguration") -> str:
    """A digest of a kernel (its sources, types, constants, options) and of the code that reads its resources."""
    made_of = (
        configuration.source.hash(),
        sorted(configuration.options.items()),
        configuration.kv_tile,
        configuration.kv_bytes,
        configuration.most_per_byte,
        _readers(),
    )
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]


@cache
def _readers() -> str:
    """A digest of the files that turn machine code, and the launch policy, into resources."""
    from paged_kernels import launch_policy

    files = [Path(__file__), *Path(kernel_speed.__file__).parent.glob("*.py"), Path(launch_policy.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def unchanged(baseline: Baseline | None) -> dict[str, dict[str, Any]]:
    """The cases of a baseline whose kernels, constants and compiler are today's, with their resources."""
    if baseline is None or baseline.made_on != measured({}).made_on:
        return {}
    digests = {_name(one.key, arch): digest_of(one) for one in _configurations() for arch in one.capabilities}
    return {
        name: dict(values)
        for name, values in baseline.cases.items()
        if name in digests and values.get("digest") == digests[name]
    }


def compare_kernel(case: str, capability: int, now: Resources, before: Resources, more: float) -> Finding:
    """Compare one compiled kernel with its baseline; its instructions may grow by the share `more`."""
    wrong = [*broken(capability, now), *worse(now, before, more)]
    if wrong:
        return Finding(case, GateVerdict.regressed, "; ".join(wrong))
    return Finding(
        case,
        GateVerdict.passed,
        f"{now.registers} registers, {now.shared_bytes:,} B shared, depth {now.depth}",
    )


def broken(capability: int, now: Resources) -> Iterator[str]:
    """Faults that are regressions whatever the baseline says."""
    from paged_kernels.triton.launch import shared_bytes

    if now.stack_bytes or now.local:
        yield f"spills: {now.stack_bytes} B of stack and {now.local} accesses to local memory"
    limit = shared_bytes(capability)  # of one program; the compiler does not check it
    if now.shared_bytes > limit:
        yield f"shared memory {now.shared_bytes:,} B does not fit sm_{capability} ({limit:,} B): it cannot launch"
    if now.most_per_byte and not 0 < now.per_byte <= now.most_per_byte:
        yield f"{now.per_byte} instructions per byte of K and V; {now.most_per_byte} are promised"


def worse(now: Resources, before: Resources, more: float) -> Iterator[str]:
    """The resources that are worse than in the baseline."""
    if now.programs < before.programs:  # more registers alone cost nothing
        more_registers = f"registers {before.registers} → {now.registers}"
        yield f"programs that a multiprocessor holds {before.programs} → {now.programs} ({more_registers})"
    if now.shared_bytes > before.shared_bytes:
        yield f"shared memory {before.shared_bytes:,} → {now.shared_bytes:,} B"
    if now.wide_loads < before.wide_loads:
        narrow = f"{before.narrow_loads} → {now.narrow_loads}"
        yield f"16-byte loads {before.wide_loads} → {now.wide_loads} (narrow ones {narrow})"
    if now.instructions > (1 + more) * before.instructions:
        yield f"instructions {before.instructions} → {now.instructions}, more than {more:.0%} on top"
    if now.loop > (1 + more) * before.loop:
        yield f"instructions per tile {before.loop} → {now.loop}, more than {more:.0%} on top"
    if now.conversions > before.conversions:
        yield f"conversions through the slow pipe {before.conversions} → {now.conversions}"
    if now.depth < before.depth:
        yield f"pipeline depth {before.depth} → {now.depth}"
    if now.in_flight < before.in_flight:
        yield f"bytes on their way in a multiprocessor {before.in_flight:,} → {now.in_flight:,}"
    if now.prologue > (1 + more) * before.prologue:
        yield f"cycles before the first tile {before.prologue:.0f} → {now.prologue:.0f}, more than {more:.0%} on top"
    if now.tile > (1 + more) * before.tile:
        yield f"cycles of a warp per tile {before.tile:.0f} → {now.tile:.0f}, more than {more:.0%} on top"
    if now.product_waits > before.product_waits:
        yield f"waits for warp-group products per tile {before.product_waits} → {now.product_waits}"
    for name, share in before.shares.items():
        if now.shares.get(name, 0.0) < share - LESS_SHARE:
            yield f"predicted share of bandwidth, {name}: {share:.3f} → {now.shares.get(name, 0.0):.3f}"
    if before.hgmma and not now.hgmma:
        yield f"warp-group matrix instructions {before.hgmma} → 0"


def missed_goals(now: Resources) -> Iterator[str]:
    """The goals that a kernel misses. The baseline may hold such figures, but every answer names them."""
    if now.goal_per_byte and now.per_byte > now.goal_per_byte:
        yield f"{now.per_byte} instructions per byte of K and V (goal {now.goal_per_byte})"
    if now.in_flight < now.goal_in_flight:
        yield f"{now.in_flight:,} bytes on their way in a multiprocessor (goal {now.goal_in_flight:,})"


def case_names() -> list[str]:
    """The name of every pair of configuration and supported architecture."""
    return [_name(one.key, arch) for one in _configurations() for arch in one.capabilities]


def measure(accepted: Baseline | None = None) -> Measured:
    """Compile all configurations of `paged_kernels`, several at a time, and read their resources.

    Those that are `unchanged` since the baseline `accepted` are not compiled; they have its resources.

    Raises:
        UserError: TRITON_INTERPRET is set.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":  # kernels decorated for the interpreter cannot be compiled
        raise UserError("the resource gate compiles kernels; unset TRITON_INTERPRET")
    cases = unchanged(accepted)
    remarks = (f"{len(cases)} unchanged kernels were not compiled",) if cases else ()
    if batches := _batches(cases):
        # spawned processes start the compiler anew; forked ones would share open state of torch and Triton
        with ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("spawn")) as pool:
            cases |= {name: case for found in pool.map(_measure, batches) for name, case in found}
    return replace(measured(cases), remarks=remarks)


def measured(cases: dict[str, dict[str, Any]]) -> Measured:
    """The run of this layer, from resources by case."""
    triton = version("triton")
    return Measured("resource", f"resource-triton-{triton}", {"triton": triton}, kernel_digest(), cases)


def compiled_cases(
    configurations: "Sequence[KernelConfiguration]", capability: int, judged: Sequence[int]
) -> list[tuple[str, dict[str, Any]]]:
    """Names and resources (or the compiler's error) of kernels that are compiled for one architecture.

    `judged` are the architectures that run this code; each configuration is judged on those that it names.
    """
    kernels: list[Built | Exception] = []
    for one in configurations:
        try:
            kernels.append(built(one, capability))
        except Exception as error:  # any error of the compiler becomes a finding on this case
            kernels.append(error)
    codes = listed([kernel.code for kernel in kernels if isinstance(kernel, Built)], capability)
    cases = []
    for one, kernel in zip(configurations, kernels, strict=True):
        code = next(codes) if isinstance(kernel, Built) else ()
        for arch in judged:
            case = (
                asdict(resources(one, kernel, code, arch))
                if isinstance(kernel, Built)
                else {UNCOMPILED: _in_one_line(kernel)}
            )
            cases.append((_name(one.key, arch), case))
    return cases


def judge(now: Measured, baseline: Baseline, settings: GateSettings | None = None) -> LayerResult:
    """Compare with a baseline of the same Triton version, since another version generates other code.

    Returns a single inconclusive finding for a baseline of another version.
    """
    made_on = f"Triton {now.made_on['triton']}, {len(now.cases)} compiled kernels; nothing was timed"
    if baseline.made_on != now.made_on:
        reason = f"the baseline is of Triton {baseline.made_on.get('triton')}: others make other code"
        return LayerResult.undecided("resource", reason, made_on)
    more = (settings or default_settings()).resource.more_instructions
    findings, remarks = list(coverage(now, baseline)), list(now.remarks)
    for name, values in sorted(now.cases.items()):
        before = baseline.cases.get(name)
        if UNCOMPILED in values:
            reason = f"does not compile: {values[UNCOMPILED]}"
            findings += [Finding(name, GateVerdict.regressed, reason)] if before else []
            continue
        found = Resources(**values)
        if missed := "; ".join(missed_goals(found)):
            remarks.append(f"goal missed, accepted as it is: {name}: {missed}")
        if before:
            findings.append(compare_kernel(name, _capability(name), found, Resources(**before), more))
    return LayerResult("resource", tuple(findings), made_on, tuple(remarks))


def unfit(now: Measured, settings: GateSettings | None = None) -> Iterator[str]:
    """The reasons why these figures cannot become a baseline: kernels that do not compile, spill or cannot launch."""
    del settings  # no margin allows these faults
    for name, values in now.cases.items():
        if UNCOMPILED in values:
            yield f"{name} does not compile: {values[UNCOMPILED]}"
        else:
            yield from (f"{name}: {wrong}" for wrong in broken(_capability(name), Resources(**values)))


def _capability(name: str) -> int:
    return int(name.rpartition("sm_")[2])


def _in_one_line(error: BaseException) -> str:
    """The compiler's message in one line. The innermost cause says more than the excerpt of the source."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"


def _name(key: str, capability: int) -> str:
    return f"{key} sm_{capability}"


def _batches(known: Container[str] = ()) -> list[_Batch]:
    """What a process compiles at a time: the kernels of one architecture, the slowest architectures first.

    A kernel is left out where the cases of all architectures that run it are `known`.
    """
    compiled_for: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for one in _configurations():
        for arch in one.capabilities:
            twin = SAME_CODE.get(arch)
            if twin in one.capabilities:
                continue
            judged = tuple(other for other in one.capabilities if arch in (other, SAME_CODE.get(other)))
            if all(_name(one.key, other) in known for other in judged):
                continue
            compiled_for.setdefault((arch, judged), []).append(one.key)
    return [
        _Batch(tuple(keys[start : start + _BATCH]), arch, judged)
        for (arch, judged), keys in sorted(compiled_for.items(), key=lambda item: item[0], reverse=True)
        for start in range(0, len(keys), _BATCH)
    ]


def _measure(batch: _Batch) -> list[tuple[str, dict[str, Any]]]:
    known = {one.key: one for one in _configurations()}
    return compiled_cases([known[key] for key in batch.keys], batch.capability, batch.judged)


def _configurations() -> "list[KernelConfiguration]":
    from paged_kernels.triton.configurations import kernel_configurations

    return list(kernel_configurations())
