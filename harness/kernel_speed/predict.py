"""Seconds of a decode kernel from its machine code: occupancy, latency, issue slots and bytes, without a fit.

A launch has `items` programs of `tiles` tiles each. At most `seats` = multiprocessors × programs at a time run (as
registers, shared memory and warps allow), so they run in waves. With P, T, E the cycles that one warp takes for
prologue, one tile and epilogue (`replay`), c programs on the busiest multiprocessor and n in all, a wave takes

    reading = n × tiles × tile_bytes / B            B is what reading reaches of the datasheet's bandwidth
    working = P + tiles × max(T, c × pipe) + E      latency of a warp, and the busiest pipe of the multiprocessor
    wave = (reading^4 + working^4)^(1/4)            near their balance neither hides the other

and a launch L + the sum over waves + P where bytes limit all of them, and the bytes of partial results, written and
read once, over B. `pipe` is the largest of: instructions issued by a scheduler, its integer, special
and matrix pipes (warps / 4 of them share a scheduler), and cycles of shared memory. Little's law is in T: with d
tiles on their way, T is at least (latency of the memory) / d.

Left out, so that a prediction is mostly too fast: how DRAM and TLBs react to the order of blocks, queueing near
the full bandwidth, warps that wait for slower ones, bank conflicts, the instruction cache, clocks below boost, and what
an engine launches beside the kernel. The L2 cache is left out too: KV that was just read and fits it is read faster.
`wave` has the form of the dense layers of the roofline, taken over from there and not fitted here.

Machine code (SASS) is read with its control codes. Each instruction of sm_70 and newer has 128 bits. Of them 21 tell
the issue logic when it may go on: stall cycles, a yield hint, the scoreboard that is set when the result is written,
the one that is set when the operands are read, and the mask of scoreboards to wait for. The layout is that of Jia et
al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking" (arXiv 1804.06826, section 2.1); it has not
changed since.

One warp is replayed. An instruction issues when the stall cycles of the one before it are over, the scoreboards that it
waits for are clear, and its pipe is free. What has a fixed latency needs nothing else: the compiler has put it into the
stall cycles. What has none sets a scoreboard; how long it takes is a published figure (`gpus.Latencies`). Copies from
global to shared memory (LDGSTS) arrive after the latency of the memory. LDGDEPBAR closes a group of them, DEPBAR waits
until at most so many groups are on their way. Warp-group products (HGMMA) run one after the other and are waited for in
the same way. A program with more warps than schedulers has several (`crowd`) on each. They are taken to go in step, as
barriers make them, so that the products of one do not hide the softmax of the other.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil

from harness.kernel_speed.gpus import MULTIPROCESSORS, REGISTERS, RESERVED, SCHEDULERS, WARP, Gpu, Latencies

_LINE = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>[^;]*?)\s*;\s*(?P<low>/\* 0x[0-9a-f]{16} \*/)?"
)
_HIGH = re.compile(r"^\s*/\* 0x(?P<high>[0-9a-f]{16}) \*/")
_TEXT = re.compile(r"^(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][A-Za-z0-9_.]*)(?:\s+(?P<operands>.*))?$")
_LABEL = re.compile(r"^\s*(?P<label>\.L_\w+):")
_TARGET = re.compile(r"`\((?P<label>\.L_\w+)\)|\b0x(?P<address>[0-9a-f]+)(?=\s|$)")
_NONE = 7  # the number that names no scoreboard
_NO_CONTROL = _NONE << 46 | _NONE << 49


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    `stall` are the cycles until the warp's next instruction may issue. `written` and `read` name the scoreboards that
    this instruction sets (-1: none), `waits` those that must be clear before it issues. `target` is the index of the
    instruction that it branches to, -1 where it does not.
    """

    opcode: str
    guard: str
    operands: str
    stall: int
    yields: bool
    written: int
    read: int
    waits: tuple[int, ...]
    target: int = -1

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def never(self) -> bool:
        """Whether its guard is false for all threads."""
        return self.guard == "!PT"


def decode(high: int) -> tuple[int, bool, int, int, tuple[int, ...]]:
    """Stall, yield, written scoreboard, read scoreboard and waits of the upper 64 bits of an instruction."""
    written, read = high >> 46 & 7, high >> 49 & 7
    return (
        high >> 41 & 15,
        not high >> 45 & 1,
        -1 if written == _NONE else written,
        -1 if read == _NONE else read,
        tuple(board for board in range(6) if high >> 52 >> board & 1),
    )


def read_listing(text: str) -> tuple[Instruction, ...]:
    """The instructions of one kernel, from `nvdisasm -c -hex` or `cuobjdump -sass`.

    Without `-hex` there are no encodings, so stalls are 0 and no scoreboard is named.
    """
    found: list[Instruction] = []
    places: dict[str, int] = {}
    targets: list[str] = []
    pending: re.Match[str] | None = None
    for line in text.splitlines():
        label, first, second = _LABEL.match(line), _LINE.match(line), _HIGH.match(line)
        if label:
            places[label["label"]] = len(found)
        elif first:
            pending = first if first["low"] else None
            places[hex(int(first["address"], 16))] = len(found)
            found.append(_instruction(first["text"], _NO_CONTROL))
            targets.append(_target(found[-1]))
        elif second and pending:
            found[-1] = _instruction(pending["text"], int(second["high"], 16))
            pending = None
    pairs = zip(found, targets, strict=True)
    return tuple(replace(one, target=places.get(target, -1)) for one, target in pairs)


def _instruction(text: str, high: int) -> Instruction:
    parts = _TEXT.match(text)
    opcode = parts["opcode"] if parts else text.split()[0]
    guard, operands = (parts["guard"] or "", parts["operands"] or "") if parts else ("", "")
    stall, yields, written, read, waits = decode(high)
    return Instruction(opcode, guard, operands, stall, yields, written, read, waits)


def _target(one: Instruction) -> str:
    if one.name not in ("BRA", "BRX", "JMP"):
        return ""
    if (match := _TARGET.search(one.operands)) is None:
        return ""
    return match["label"] or hex(int(match["address"], 16))


def is_copy(one: Instruction) -> bool:
    """Whether it copies from global to shared memory without waiting (LDGSTS, or a bulk copy by TMA)."""
    return one.name in ("LDGSTS", "UBLKCP", "UTMALDG") and not one.never


def tile_loop(code: Sequence[Instruction]) -> range:
    """Places of the loop that copies tiles of K and V: of all loops the one with most copies, then the shortest.

    It is empty where no loop copies. A branch back is a loop only where its target is on every way to it: on sm_100
    code that waits stands behind the kernel, and branches back into one of several loops.
    """
    copies = [0]
    for one in code:
        copies.append(copies[-1] + is_copy(one))
    loops = [range(one.target, place + 1) for place, one in enumerate(code) if 0 <= one.target <= place]
    loops = [loop for loop in loops if copies[loop.stop] > copies[loop.start]]
    loops = [loop for loop in loops if not _reaches(code, loop.stop - 1, without=loop.start)]
    return max(loops, key=lambda loop: (copies[loop.stop] - copies[loop.start], -len(loop)), default=range(0))


def _reaches(code: Sequence[Instruction], goal: int, without: int) -> bool:
    """Whether a way from the entry to the place `goal` leaves the place `without` out."""
    seen, left = {without}, [0]
    while left:
        place = left.pop()
        if place not in seen:
            seen.add(place)
            left += _followers(code, place)
    return goal in seen and goal != without


def shortest_path(code: Sequence[Instruction], start: int, ends: Iterable[int]) -> tuple[int, ...]:
    """Places from `start` to the first of `ends` that is reached with least stall cycles; `ends` are not included.

    The way that a warp really takes depends on data. The shortest is never longer. Empty where no way exists.
    """
    goals = set(ends)
    reached = {start: (0, -1)}
    queue = [(0, start)]
    while queue:
        cycles, place = heappop(queue)
        if place in goals:
            path = []
            while place >= 0:
                path.append(place)
                place = reached[place][1]
            return tuple(reversed(path[1:]))
        if cycles > reached[place][0]:
            continue
        for following in _followers(code, place):
            through = cycles + max(1, code[place].stall)
            if following not in reached or through < reached[following][0]:
                reached[following] = (through, place)
                heappush(queue, (through, following))
    return ()


def _followers(code: Sequence[Instruction], place: int) -> list[int]:
    one = code[place]
    taken = [one.target] if one.target >= 0 else []
    stops = one.name in ("EXIT", "BRA", "JMP", "BRX", "RET") and not one.guard and "UP" not in one.operands
    stops = stops and not (one.name == "BRA" and "," in one.operands)
    return taken if stops or place + 1 >= len(code) else [*taken, place + 1]


def exits(code: Sequence[Instruction]) -> list[int]:
    """Places of all EXIT instructions without a guard."""
    return [place for place, one in enumerate(code) if one.name == "EXIT" and not one.guard]


_GROUPS = re.compile(r"\b(?:SB(?P<board>\d)|gsb\d),\s*0x(?P<left>[0-9a-f]+)")
_PRODUCT = re.compile(r"HGMMA\.64x(?P<columns>\d+)x(?P<depth>\d+)")
_WIDE = (".64", ".128")
_GLOBAL = ("LDG", "LD", "ATOM", "ATOMG", "RED")
_SHARED = ("LDS", "LDSM", "ATOMS", "STS", "STSM")
# Integer and comparison instructions, which 16 lanes of a scheduler execute. IMAD has another pipe of 16 lanes.
_HALF = frozenset(
    (
        *("LOP3", "IADD3", "ISETP", "SEL", "SHF", "LEA", "PRMT", "FMNMX", "FSETP", "FSEL", "IABS", "IMNMX"),
        *("VIADD", "VIMNMX", "VIADDMNMX", "PLOP3", "SGXT", "BMSK", "POPC", "FLO", "IADD", "P2R", "R2P"),
        *("CS2R", "HMNMX2"),
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
class WarpCycles:
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


def replay(code: Sequence[Instruction], latencies: Latencies, crowd: int = 1) -> WarpCycles:
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
        return WarpCycles(warp.now, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0)
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
    return WarpCycles(
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
    names = [one.name for one in body]
    integer, special = sum(2 for name in names if name in _HALF), sum(8 for name in names if name in _SPECIAL)
    matrix = sum(_matrix_cycles(one, latencies) for one in body)
    return float(max(len(body), integer, 2 * names.count("IMAD"), special, matrix))


def _matrix_cycles(one: Instruction, latencies: Latencies) -> float:
    if one.name in ("HMMA", "IMMA", "QMMA"):
        return latencies.matrix
    match = _PRODUCT.search(one.opcode)
    if match and latencies.warp_group:  # all four matrix units work for the warp group: each is taken as long
        return 64 * int(match["columns"]) * int(match["depth"]) / latencies.warp_group
    return 0.0


def _copied_bytes(one: Instruction) -> int:
    """Bytes that a warp copies with one LDGSTS: 16, 8 or 4 for each thread."""
    return 32 * (16 if ".128" in one.opcode else 8 if ".64" in one.opcode else 4) if is_copy(one) else 0


def _shared_cycles(one: Instruction) -> float:
    """Cycles of 128 bytes each that an instruction takes of the shared memory."""
    if one.never or one.name not in (*_SHARED, "LDGSTS", "SHFL"):
        return 0.0
    if one.name == "LDSM":
        # LDSM.16.M88.4 reads four of 128 bytes each, LDSM.16.M88 one
        matrices = one.opcode.rpartition(".")[2]
        return float(matrices) if matrices.isdigit() else 1.0
    return 4.0 if ".128" in one.opcode else 2.0 if ".64" in one.opcode else 1.0


LAUNCH_S = 2.0e-6  # from one kernel of a graph to the next: NVIDIA's blog on CUDA graphs gives 1.5 to 2.5 us


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: registers of a thread, shared memory in bytes, warps, one replayed warp."""

    registers: int
    shared_bytes: int
    warps: int
    replay: WarpCycles

    @property
    def tile_bytes(self) -> int:
        """Bytes that a program copies in a round of its loop."""
        return self.replay.copied * self.warps

    def seats(self, capability: int) -> int:
        """Programs that a multiprocessor holds; 0 where not even one fits."""
        limits = MULTIPROCESSORS[capability]
        # registers are given to warps in units of 256, shared memory in units of 128 bytes
        by_registers = REGISTERS // (ceil(self.registers * WARP / 256) * 256 * self.warps)
        return min(by_registers, self.staged(capability), limits.warps // self.warps, limits.programs)

    def staged(self, capability: int) -> int:
        """Programs whose shared memory a multiprocessor holds."""
        return MULTIPROCESSORS[capability].shared_bytes // (ceil(self.shared_bytes / 128) * 128 + RESERVED)

    def in_flight(self, capability: int) -> float:
        """Bytes of K and V that a multiprocessor has on their way while all its programs wait."""
        return self.seats(capability) * self.replay.ahead * self.tile_bytes

    def pipe(self, programs: int) -> float:
        """Cycles that the busiest pipe of a multiprocessor takes for one tile of each of its programs."""
        warps = programs * self.warps
        return max(ceil(warps / SCHEDULERS) * self.replay.pipe, warps * self.replay.shared)


@dataclass(frozen=True)
class LaunchTime:
    """Seconds of a launch, and what limits the waves of most of it: `bytes`, `latency` (of one warp) or `pipes`."""

    seconds: float
    limit: str
    waves: int

    def share(self, size: float, gpu: Gpu) -> float:
        """The share of the datasheet's bandwidth at which `size` bytes are read."""
        return size / self.seconds / gpu.bandwidth


def predict(
    kernel: Kernel, gpu: Gpu, items: int, tiles: float, *, launches: int = 1, partial_bytes: float = 0.0
) -> LaunchTime:
    """The time of `items` programs of `tiles` tiles each.

    `partial_bytes` are written by all programs together and read again by a second launch that merges them.

    Raises:
        ValueError: the kernel does not fit a multiprocessor.
    """
    each = kernel.seats(gpu.capability)
    if each == 0:
        needs = f"{kernel.registers} registers and {kernel.shared_bytes:,} B"
        raise ValueError(f"{needs} do not fit sm_{gpu.capability}")
    seats = each * gpu.multiprocessors
    full, rest = divmod(items, seats)
    one = kernel.replay
    spent = {"bytes": 0.0, "latency": 0.0, "pipes": 0.0}  # cycles of waves by what limits them
    for count, programs in ((full, seats), (1 if rest else 0, rest)):
        if not count:
            continue
        busiest = ceil(programs / gpu.multiprocessors)
        reading = programs * tiles * kernel.tile_bytes / gpu.bytes_per_cycle
        pipe = kernel.pipe(busiest)
        working = one.prologue + tiles * max(one.loop, pipe) + one.epilogue
        limit = "bytes" if working <= reading else "pipes" if pipe > one.loop else "latency"
        spent[limit] += count * (reading**4 + working**4) ** 0.25
    cycles = sum(spent.values()) + 2.0 * partial_bytes / gpu.bytes_per_cycle
    # nothing is read before the first address is known
    cycles += 0.0 if spent["latency"] or spent["pipes"] else one.prologue
    limit = max(spent, key=lambda name: spent[name])
    return LaunchTime(launches * LAUNCH_S + cycles / gpu.clock, limit, full + bool(rest))
