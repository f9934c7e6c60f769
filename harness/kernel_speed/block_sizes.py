"""Makes `conf/block_sizes.csv`: decode attention at each block size over that at 64, by the static model.

    python -m harness.kernel_speed.block_sizes            # writes the table again
    python -m harness.kernel_speed.block_sizes --check    # says whether it is stale
    python -m harness.kernel_speed.block_sizes --shares   # predicted shares of bandwidth and peak, by GPU and shape

It reads the accepted figures of the resource gate (`results/baselines/resource-*.json`), so it compiles nothing. Accept
the kernels first: `python -m harness gate --layer resource --update --reason '...'`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.console import say
from harness.cost.roofline import REFERENCE, preset_rates, table_file
from harness.kernel_speed.gpus import GPUS, SCHEDULERS, Gpu
from harness.kernel_speed.predict import Kernel, LaunchTime, WarpCycles, predict
from harness.store.atomic import write_files

if TYPE_CHECKING:
    from paged_kernels.launch_policy import Room

ROWS, SLOTS = 64, 4096  # sequences and keys of each: 1.07 GB of a 16-bit cache
HEADS, KV_HEADS, DIM = 32, 8, 128
BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
CACHES = {2: "bf16", 1: "bf16-kv-fp8e4nv"}
WARPS = 4  # as `paged_kernels.triton.launch` launches decode
_HEAD = (
    "# Made by python -m harness.kernel_speed.block_sizes from {source}; do not edit.\n"
    "# Static model of compiled code, not measured (docs/kernel-speed.md). Seconds of our decode at block sizes\n"
    "# over those at 64. {rows} sequences of {slots} keys, {heads} query heads and {kv_heads} KV heads of {dim}.\n"
    "device,element_bytes,block_size,factor,limit\n"
)


def kernel_of(case: Mapping[str, Any], warps: int = WARPS) -> Kernel:
    """A kernel from the figures that the resource gate keeps of it."""
    warp = WarpCycles(
        loop=case["tile"],
        ahead=case["in_flight"] / max(1, case["programs"] * case["copied"] * warps),
        **{
            name: case[name] for name in ("prologue", "epilogue", "pipe", "shared", "copied", "product_waits")
        },
    )
    return Kernel(case["registers"], case["shared_bytes"], warps, warp)


def keys_of(kernel: Kernel, element_bytes: int) -> int:
    """Keys in a tile, from the bytes of K and V that the program copies for it."""
    return kernel.tile_bytes // (2 * DIM * element_bytes)


def room_of(kernel: Kernel, gpu: Gpu, element_bytes: int) -> "Room":
    """What the launch policy is told of a decode of the table's heads on a GPU."""
    from paged_kernels.launch_policy import Room, latency_bytes

    tile = keys_of(kernel, element_bytes)
    return Room(
        multiprocessors=gpu.multiprocessors,
        resident=max(1, kernel.staged(gpu.capability)),
        latency=latency_bytes(gpu.name, gpu.capability),
        programs=KV_HEADS,
        tile=tile,
        tile_bytes=tile * 2 * DIM * element_bytes,
        partial_bytes=4 * HEADS // KV_HEADS * (DIM + 1),
    )


def decode_time(kernel: Kernel, gpu: Gpu, rows: int, slots: int, element_bytes: int) -> LaunchTime:
    """The predicted time of our decode: parts of all rows and KV heads, and the launch that merges them if any is cut.

    Parts are those of the launch policy, and are taken to be of equal size.
    """
    from paged_kernels.launch_policy import parts_of_rows

    room = room_of(kernel, gpu, element_bytes)
    parts = int(parts_of_rows([slots] * rows, room)[0])
    items, tiles = rows * KV_HEADS * parts, ceil(slots / room.tile) / parts
    cut = parts > 1
    partial = items * room.partial_bytes if cut else 0
    return predict(kernel, gpu, items, tiles, launches=1 + cut, partial_bytes=partial)


def decode_case(cases: Mapping[str, Any], element_bytes: int, block_size: int, capability: int) -> Any:
    """The gate's figures of the decode kernel of the table's shape, however it finds its blocks; None: not compiled."""
    start = _decode_key(CACHES[element_bytes], block_size)
    found = (cases.get(f"{start}/{path} sm_{capability}") for path in ("scalar", "vector"))
    return next((case for case in found if case), None)


def _decode_key(cache: str, block_size: int = 16) -> str:
    return f"decode/{cache}/d{DIM}/g{HEADS // KV_HEADS}/bs{block_size}"


def rows_of(cases: Mapping[str, Any]) -> Iterator[tuple[str, int, int, float, str]]:
    """Device, bytes of an element, block size, factor and limit. A100 and A10G have no 8-bit kernels."""
    for gpu in GPUS.values():
        for width in CACHES:
            found = {size: decode_case(cases, width, size, gpu.capability) for size in BLOCK_SIZES}
            if found[REFERENCE] is None:
                continue
            each = ((size, kernel_of(case)) for size, case in found.items())
            times = {size: decode_time(kernel, gpu, ROWS, SLOTS, width) for size, kernel in each}
            for size, time in times.items():
                yield gpu.name, width, size, time.seconds / times[REFERENCE].seconds, time.limit


def table_text(baseline: Path) -> str:
    """The table made from a baseline of the resource gate."""
    cases = json.loads(baseline.read_text(encoding="utf-8"))["cases"]
    shape = {"rows": ROWS, "slots": SLOTS, "heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM}
    rows = (f"{gpu},{width},{size},{ratio:.4f},{top}\n" for gpu, width, size, ratio, top in rows_of(cases))
    return _HEAD.format(source=f"results/baselines/{baseline.name}", **shape) + "".join(rows)


SHAPES = ((8, 16_384), (16, 4096), (64, 1024), (64, 4096), (256, 1024), (256, 4096))
PREFILL = "prefill/bf16/d128/g4/bs16/vector"
PREFILL_WARPS, PREFILL_ROWS = 8, 128
# whose launch a GPU has; sm_100's products are not modelled
_ALIKE = {80: 80, 86: 80, 89: 80, 90: 90, 120: 80}


def decode_shares(kernel: Kernel, gpu: Gpu, element_bytes: int) -> dict[str, float]:
    """Predicted share of the datasheet's bandwidth of each shape, by its name: sequences x keys."""
    slot = 2 * KV_HEADS * DIM * element_bytes
    return {
        f"{rows} × {slots // 1024}k": decode_time(kernel, gpu, rows, slots, element_bytes).share(
            rows * slots * slot, gpu
        )
        for rows, slots in SHAPES
    }


def predicted_shares(key: str, kernel: Kernel, capability: int) -> dict[str, float]:
    """Shares by GPU and shape of the kernel with this key of the resource gate.

    It is empty for all kernels but the table's decode, and where that cannot run or stages no tile.
    """
    width = next((width for width, cache in CACHES.items() if key == f"{_decode_key(cache)}/vector"), 0)
    runs = width and kernel.seats(capability) and keys_of(kernel, width)
    gpus = [gpu for gpu in GPUS.values() if runs and gpu.capability == capability]
    return {
        f"{gpu.name} {shape}": round(share, 4)
        for gpu in gpus
        for shape, share in decode_shares(kernel, gpu, width).items()
    }


def share_lines(cases: Mapping[str, Any]) -> Iterator[str]:
    """A table in Markdown: shares of the datasheet's bandwidth in decode by shape, and of the peak in prefill."""
    yield f"| GPU, cache | {' | '.join(f'{rows} × {slots // 1024}k' for rows, slots in SHAPES)} | prefill |"
    yield "|---" * (len(SHAPES) + 2) + "|"
    for gpu in GPUS.values():
        for width in CACHES:
            case = decode_case(cases, width, 16, gpu.capability)
            if case is None:
                continue
            shares = decode_shares(kernel_of(case), gpu, width)
            cells = " | ".join(f"{share:.2f}".lstrip("0") for share in shares.values())
            yield f"| {gpu.name}, {'16-bit' if width == 2 else 'fp8'} | {cells} | {_prefill_cell(cases, gpu, width)} |"


def products(gpu: Gpu) -> float:
    """Multiply-adds of a multiprocessor's matrix units in a cycle, as the model has them for the architecture."""
    return gpu.latencies.warp_group or SCHEDULERS * 16 * 8 * 16 / gpu.latencies.matrix


def halves_sums(gpu: Gpu) -> bool:
    """Whether the datasheet's rate, with sums in float32 (`tflops` in conf/device), is half that of the architecture.

    So it is on consumer GPUs and the A10G. The model has the whole rate, and would pass the peak of the datasheet.
    """
    peak, _ = preset_rates(gpu.name)["tflops"]
    return 1e12 * peak < 0.75 * 2 * products(gpu) * gpu.multiprocessors * gpu.clock


def _prefill_cell(cases: Mapping[str, Any], gpu: Gpu, width: int) -> str:
    case = cases.get(f"{PREFILL}/sm_{_ALIKE.get(gpu.capability)} sm_{gpu.capability}")
    if case is None or width == 1 or halves_sums(gpu):
        return "–"
    return f"{prefill_share(case, gpu):.2f}".lstrip("0")


def prefill_share(case: Mapping[str, Any], gpu: Gpu) -> float:
    """The share of the peak in the loop of prefill over whole tiles: what latency and pipes leave, at any length.

    Prologues, the diagonal and the last wave are left out, so it is what long prompts come near to.
    """
    kernel = kernel_of(case, PREFILL_WARPS)
    programs = kernel.seats(gpu.capability)
    keys = keys_of(kernel, 2)
    cycles = max(kernel.replay.loop, kernel.pipe(programs))
    return float(programs * 2 * PREFILL_ROWS * keys * DIM / cycles / products(gpu))


def newest_baseline(folder: Path) -> Path:
    """The resource gate's baseline in a folder. Of several (one for each version of Triton) the first by name."""
    found = sorted(folder.glob("resource-triton-*.json"))
    if not found:
        raise SystemExit(f"no baseline of the resource gate in {folder}; run this in a checkout")
    return found[0]


def main(words: list[str] | None = None) -> int:
    """Write the table, or check it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.kernel_speed.block_sizes")
    what = {"--check": "exit code 1 if the table is stale", "--shares": "print predicted shares"}
    for flag, does in what.items():
        parser.add_argument(flag, action="store_true", help=f"write nothing; {does}")
    folder = "folder of the baselines"
    parser.add_argument("--baselines", default="results/baselines", metavar="DIR", help=folder)
    flags = parser.parse_args(words)
    baseline = newest_baseline(Path(flags.baselines))
    if flags.shares:
        for line in share_lines(json.loads(baseline.read_text(encoding="utf-8"))["cases"]):
            say(line)
        return 0
    file, text = table_file(), table_text(baseline)
    if flags.check:
        stale = not file.exists() or file.read_text(encoding="utf-8") != text
        say(f"{file} is {'stale: run python -m harness.kernel_speed.block_sizes' if stale else 'up to date'}")
        return int(stale)
    write_files(file.parent, {file.name: text.encode()})
    say(f"written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
