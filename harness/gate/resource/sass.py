"""Counts of machine instructions that decide a memory-bound kernel's speed, read from `nvdisasm -c`.

An instruction line is `/*0010*/  @!P0 LDG.E.128 R4, ... ;`: address, optional predicate, opcode with its modifiers.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_.]*)")


@dataclass(frozen=True)
class Instructions:
    """Counts over one kernel's machine code.

    `wide_loads` and `narrow_loads` are loads from global memory of 16 bytes a thread and of fewer, asynchronous copies
    to shared memory (LDGSTS) among them; `local` are accesses to local memory, which only spills and arrays indexed at
    run time need; `hmma` and `hgmma` are matrix instructions of a warp and, on sm_90, of a warp group.
    """

    total: int
    wide_loads: int
    narrow_loads: int
    local: int
    hmma: int
    hgmma: int


def count(text: str) -> Instructions:
    """Count in the text of a disassembly; padding behind the last branch (NOP, BRA to itself) is part of the total."""
    opcodes = list(_opcodes(text.splitlines()))
    loads = [opcode for opcode in opcodes if opcode.startswith("LDG")]
    wide = [opcode for opcode in loads if ".128" in opcode]
    return Instructions(
        total=len(opcodes),
        wide_loads=len(wide),
        narrow_loads=len(loads) - len(wide),
        local=sum(opcode.partition(".")[0] in ("LDL", "STL") for opcode in opcodes),
        hmma=sum(opcode.startswith("HMMA") for opcode in opcodes),
        hgmma=sum(opcode.startswith(("HGMMA", "QGMMA")) for opcode in opcodes),
    )


def _opcodes(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        match = _INSTRUCTION.match(line)
        if match:
            yield match["opcode"]
