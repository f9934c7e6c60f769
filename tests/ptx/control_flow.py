"""Where lanes that part at a branch meet again: at the first instruction that every path from the branch passes."""

import networkx as nx
from ptx.program import Instruction, Program, Symbol

END = -1


def meeting_places(program: Program) -> dict[int, int]:
    """The immediate post-dominator of every conditional branch, both as places; END for the kernel's end."""
    graph = nx.DiGraph()
    last = len(program.instructions)
    for place, instruction in enumerate(program.instructions):
        jumps = _target(program, instruction)
        if jumps is not None:
            graph.add_edge(place, jumps)
        ends = instruction.opcode in ("ret", "exit") or place + 1 == last
        if ends:
            graph.add_edge(place, END)
        elif jumps is None or instruction.guard:
            graph.add_edge(place, place + 1)
    after = nx.immediate_dominators(graph.reverse(copy=False), END)
    branches = (place for place, each in enumerate(program.instructions) if each.guard)
    return {place: after[place] for place in branches if program.instructions[place].opcode.startswith("bra")}


def _target(program: Program, instruction: Instruction) -> int | None:
    if not instruction.opcode.startswith("bra"):
        return None
    (label,) = instruction.operands
    return program.labels[label.name] if isinstance(label, Symbol) and label.name in program.labels else END
