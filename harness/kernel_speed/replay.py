"""One warp, replayed through machine code: when each of its instructions issues.

An instruction issues when the stall cycles of the one before it are over, the scoreboards that it waits for are clear,
and its pipe is free. What has a fixed latency needs nothing else: the compiler has put it into the stall cycles. What
has none sets a scoreboard; how long it takes is a published figure (`gpus.Latencies`).

Copies from global to shared memory (LDGSTS) arrive after the latency of the memory. LDGDEPBAR closes a group of them,
DEPBAR waits until at most so many groups are on their way. Warp-group products (HGMMA) run one after the other and are
waited for in the same way.

A program with more warps than schedulers has several (`crowd`) on each. They are taken to go in step, as barriers make
them, so that the products of one do not hide the softmax of the other.

Left out: warps of other programs on the same scheduler (they share issue slots, which `predict` bounds), bank
conflicts, the instruction cache, and how long barriers wait for slower warps.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.kernel_speed.gpus import Latencies
from harness.kernel_speed.sass import Instruction, exits, is_copy, shortest_path, tile_loop

_GROUPS = re.compile(r"\b(?:SB(?P<board>\d)|gsb\d),\s*0x(?P<left>[0-9a-f]+)")
_PRODUCT = re.compile(r"HGMMA\.64x(?P<columns>\d+)x(?P<depth>\d+)")
_WIDE = (".64", ".128")
_GLOBAL = ("LDG", "LD", "ATOM", "ATOMG", "RED")
_SHARED = ("LDS", "LDSM", "ATOMS", "STS", "STSM")
# Integer and comparison instructions, which 16 lanes of a scheduler execute. IMAD has another pipe of 16 lanes.
_HALF = frozenset(
    (
        *("LOP3", "IADD3", "ISETP", "SEL", "SHF", "LEA", "PRMT", "FMNMX", "FSETP", "FSEL", "IABS", "IMNMX"),
        *(
            "VIADD",
            "VIMNMX",
            "VIADDMNMX",
            "PLOP3",
            "SGXT",
            "BMSK",
            "POPC",
            "FLO",
            "IADD",
            "P2R",
            "R2P",
            "CS2R",
        ),
        "HMNMX2",
    )
)
_SPECIAL = ("MUFU", "F2F", "F2I", "I2F", "FRND")  # a quarter of the integer rate
WARM, ROUNDS = 6, 6  # rounds of the loop until it is steady, and those that are then counted


@dataclass
class Warp:
    """The state of a warp between instructions, in cycles.

    `boards` are the times at which the pending settings of each scoreboard are over, `groups` those at which groups of
    copies arrive, `products` those at which warp-group products are done.
    """

    now: float = 0.0
    issued: int = 0
    boards: list[list[float]] = field(default_factory=lambda: [[] for _ in range(6)])
    open_copies: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # copies of each group that was not waited for
    ahead: int = 0  # the most copies that were on their way when the warp began to wait
    products: list[float] = field(default_factory=list)
    open_products: float = 0.0
    matrix_free: float = 0.0


def run(warp: Warp, code: Iterable[Instruction], latencies: Latencies, crowd: int = 1) -> None:
    """Let the warp go through the instructions; its state afterwards is in `warp`.

    `crowd` warps of the program share a scheduler and go in step: each waits for the others' turns to issue and for
    their matrix products.
    """
    for one in code:
        for board in one.waits:
            _wait_for(warp, warp.boards[board])
            warp.boards[board].clear()
        if one.name == "DEPBAR":
            _depbar(warp, one)
        if one.name in ("HMMA", "IMMA", "QMMA", "DMMA"):
            warp.now = max(warp.now, warp.matrix_free)
            warp.matrix_free = warp.now + crowd * latencies.matrix
        if one.name in ("HGMMA", "QGMMA"):
            _warp_group(warp, one, latencies, crowd)
        if one.opcode.startswith("WARPGROUP.DEPBAR"):
            _wait_for_products(warp, one)
        if is_copy(one):
            warp.open_copies.append(warp.now + latencies.memory)
        _set_boards(warp, one, latencies)
        warp.issued += 1
        warp.now += max(crowd, one.stall)
        if one.name == "BAR" and not one.never:
            warp.now += latencies.barrier


def _wait_for(warp: Warp, times: Sequence[float]) -> None:
    warp.now = max([warp.now, *times])


def _depbar(warp: Warp, one: Instruction) -> None:
    """Wait until at most so many of the last settings of a scoreboard are pending."""
    match = _GROUPS.search(one.operands)
    if match is None or match["board"] is None:
        return
    times, left = warp.boards[int(match["board"])], int(match["left"], 16)
    warp.ahead = max(warp.ahead, sum(warp.groups))
    warp.groups = warp.groups[len(warp.groups) - left :] if left else []
    over = times[: len(times) - left] if left else times
    _wait_for(warp, over)
    warp.boards[int(match["board"])] = times[len(over) :]


def _warp_group(warp: Warp, one: Instruction, latencies: Latencies, crowd: int) -> None:
    """A product of 64 rows: one instruction for all four warps, whose matrix units work together."""
    match = _PRODUCT.search(one.opcode)
    if match is None or not latencies.warp_group:
        return
    cycles = crowd * 64 * int(match["columns"]) * int(match["depth"]) / latencies.warp_group
    start = max(warp.now, warp.open_products, warp.matrix_free)
    warp.open_products = warp.matrix_free = start + cycles
    if "gsb0" in one.operands:  # the last of a batch
        warp.products.append(warp.open_products)


def _wait_for_products(warp: Warp, one: Instruction) -> None:
    match = _GROUPS.search(one.operands)
    left = int(match["left"], 16) if match else 0
    over = warp.products[: len(warp.products) - left] if left else warp.products
    _wait_for(warp, over)
    warp.products = warp.products[len(over) :]


def _set_boards(warp: Warp, one: Instruction, latencies: Latencies) -> None:
    if one.written >= 0:
        if one.name == "LDGDEPBAR":
            warp.boards[one.written].append(max([warp.now, *warp.open_copies]))
            warp.groups.append(len(warp.open_copies))
            warp.open_copies.clear()
        else:
            warp.boards[one.written].append(warp.now + cycles_of(one, latencies))
    if one.read >= 0:
        warp.boards[one.read].append(warp.now + latencies.operands)


def cycles_of(one: Instruction, latencies: Latencies) -> int:
    """Cycles until the result of an instruction with a scoreboard is there.

    Wide loads from global memory come from the memory (queries, keys and values), narrow ones from the L2 cache (ids
    of blocks and lengths, which many programs read).
    """
    if one.never:
        return 1
    if one.name in _GLOBAL:
        return latencies.memory if any(width in one.opcode for width in _WIDE) else latencies.l2
    if one.name in _SHARED:
        return latencies.shared
    if one.name == "SHFL":
        return latencies.shuffle
    if one.name in (*_SPECIAL, "POPC", "FLO"):
        return latencies.special
    if one.name in ("LDC", "LDCU", "ULDC", "S2R", "S2UR", "CS2R", "B2R"):
        return latencies.constant
    return latencies.uniform


@dataclass(frozen=True)
class Replay:
    """What one warp of a kernel takes, in cycles; a kernel without a loop that copies has 0 for the loop.

    `loop` is one round of the loop over tiles, with what it waits for at the unloaded latency of the memory. `pipe` are
    cycles that a warp takes in a round of the busiest pipe of its scheduler (issue slots, integer, special, matrix),
    `shared` those of the multiprocessor's shared memory. `copied` are bytes that a warp copies in a round, `ahead` the
    rounds whose copies are on their way when the warp waits, `product_waits` how often a round waits for warp-group
    products.
    """

    prologue: float
    loop: float
    epilogue: float
    pipe: float
    shared: float
    copied: int
    ahead: float
    product_waits: int


def replay(code: Sequence[Instruction], latencies: Latencies, crowd: int = 1) -> Replay:
    """Replay one of `crowd` warps that go in step: to the loop over tiles, through many rounds of it, and to the end.

    Before and behind the loop the warp takes the way with fewest stall cycles, since the true one depends on data. In
    the loop it takes no branch forward, so that every round copies a tile.

    Raises:
        ValueError: the listing has no encodings, so nothing tells when an instruction may issue.
    """
    if not any(one.stall for one in code):
        raise ValueError("no control codes in this listing; make it with 'nvdisasm -c -hex'")
    loop, warp = tile_loop(code), Warp()
    if not loop:
        run(warp, (code[place] for place in shortest_path(code, 0, exits(code))), latencies, crowd)
        return Replay(warp.now, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0)
    body = code[loop.start : loop.stop]
    run(warp, (code[place] for place in shortest_path(code, 0, [loop.start])), latencies, crowd)
    prologue = warp.now
    for _ in range(WARM):
        run(warp, body, latencies, crowd)
    start, warp.ahead = warp.now, 0
    for _ in range(ROUNDS):
        run(warp, body, latencies, crowd)
    per_round, ended = (warp.now - start) / ROUNDS, warp.now
    ahead = warp.ahead / sum(map(is_copy, body))
    run(warp, (code[place] for place in shortest_path(code, loop.stop, exits(code))), latencies, crowd)
    return Replay(
        prologue=prologue,
        loop=per_round,
        epilogue=warp.now - ended,
        pipe=_busiest_pipe(body, latencies),
        shared=sum(map(_shared_cycles, body)),
        copied=sum(map(_copied_bytes, body)),
        ahead=ahead,
        product_waits=sum(one.opcode.startswith("WARPGROUP.DEPBAR") for one in body),
    )


def _busiest_pipe(body: Sequence[Instruction], latencies: Latencies) -> float:
    integer = sum(2 for one in body if one.name in _HALF)
    products = sum(2 for one in body if one.name == "IMAD")
    special = sum(8 for one in body if one.name in _SPECIAL)
    matrix = sum(_matrix_cycles(one, latencies) for one in body)
    return float(max(len(body), integer, products, special, matrix))


def _matrix_cycles(one: Instruction, latencies: Latencies) -> float:
    if one.name in ("HMMA", "IMMA", "QMMA"):
        return latencies.matrix
    match = _PRODUCT.search(one.opcode)
    if match and latencies.warp_group:  # all four matrix units work for the warp group: each is taken as long
        return 64 * int(match["columns"]) * int(match["depth"]) / latencies.warp_group
    return 0.0


def _copied_bytes(one: Instruction) -> int:
    """Bytes that a warp copies with one LDGSTS: 16, 8 or 4 for each thread."""
    if not is_copy(one):
        return 0
    return 32 * (16 if ".128" in one.opcode else 8 if ".64" in one.opcode else 4)


def _shared_cycles(one: Instruction) -> float:
    """Cycles of 128 bytes each that an instruction takes of the shared memory."""
    if one.never or one.name not in (*_SHARED, "LDGSTS", "SHFL"):
        return 0.0
    if one.name == "LDSM":
        matrices = one.opcode.rpartition(".")[
            2
        ]  # LDSM.16.M88.4 reads four of 128 bytes each, LDSM.16.M88 one
        return float(matrices) if matrices.isdigit() else 1.0
    return 4.0 if ".128" in one.opcode else 2.0 if ".64" in one.opcode else 1.0
