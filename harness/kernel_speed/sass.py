"""Machine code (SASS) with its control codes, from a listing of NVIDIA's disassembler with encodings.

Each instruction of sm_70 and newer has 128 bits. Of them 21 tell the issue logic when it may go on: stall cycles,
a yield hint, the scoreboard that is set when the result is written, the one that is set when the operands are read,
and the mask of scoreboards to wait for. The layout is that of Jia et al., "Dissecting the NVIDIA Volta GPU
Architecture via Microbenchmarking" (arXiv 1804.06826, section 2.1); it has not changed since.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

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
    return tuple(
        replace(one, target=places.get(target, -1)) for one, target in zip(found, targets, strict=True)
    )


def _instruction(text: str, high: int) -> Instruction:
    parts = _TEXT.match(text)
    opcode = parts["opcode"] if parts else text.split()[0]
    guard, operands = (parts["guard"] or "", parts["operands"] or "") if parts else ("", "")
    stall, yields, written, read, waits = decode(high)
    return Instruction(opcode, guard, operands, stall, yields, written, read, waits)


def _target(one: Instruction) -> str:
    if one.name not in ("BRA", "BRX", "JMP"):
        return ""
    match = _TARGET.search(one.operands)
    if match is None:
        return ""
    return match["label"] or hex(int(match["address"], 16))


def is_copy(one: Instruction) -> bool:
    """Whether it copies from global to shared memory without waiting (LDGSTS, or a bulk copy by TMA)."""
    return one.name in ("LDGSTS", "UBLKCP", "UTMALDG") and not one.never


def tile_loop(code: Sequence[Instruction]) -> range:
    """Places of the loop that copies tiles of K and V: of all loops the one with most copies, then the shortest.

    It is empty where no loop copies. A branch from behind a loop into it (sm_100, waiting) looks like a longer loop
    with as many copies, so the shortest counts.
    """
    copies = [0]
    for one in code:
        copies.append(copies[-1] + is_copy(one))
    loops = [range(one.target, place + 1) for place, one in enumerate(code) if 0 <= one.target <= place]
    loops = [loop for loop in loops if copies[loop.stop] > copies[loop.start]]
    return max(loops, key=lambda loop: (copies[loop.stop] - copies[loop.start], -len(loop)), default=range(0))


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
