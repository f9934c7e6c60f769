"""The text of a PTX kernel as a list of instructions, and what can go wrong with one.

Only what Triton emits is read: one entry, registers and labels of one scope, dynamic shared memory under one name.
Source of the syntax: PTX ISA, chapters 4 (syntax) and 6 (operands).
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

RAW = {"pred": "?", "8": "u1", "16": "u2", "32": "u4", "64": "u8"}  # NumPy types that hold registers


class PtxError(Exception):
    """What a kernel may not do, or what the interpreter does not know. The text names the instruction."""


class UnsupportedError(PtxError):
    """An instruction, an operand or a situation that the interpreter does not model."""


class AccessError(PtxError):
    """A memory access outside all tensors, outside shared memory, or at an address that does not fit its width."""


class HazardError(PtxError):
    """An access whose result depends on an order that nothing enforces: a missing barrier or a missing wait."""


class Register(NamedTuple):
    """A register, `%r1`, or a special one, `%tid.x`."""

    name: str


class Immediate(NamedTuple):
    """A number as it is written. Its value depends on the type of the operand."""

    text: str


class Symbol(NamedTuple):
    """A name that is no register: a label, a parameter or the shared memory."""

    name: str


class Pack(NamedTuple):
    """Several registers or numbers in braces."""

    items: tuple["Operand", ...]


class Address(NamedTuple):
    """`[base + offset]`."""

    base: Register | Symbol
    offset: int


Operand = Register | Immediate | Symbol | Pack | Address


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@[!]guard opcode operands`."""

    line: int
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: str = ""
    negated: bool = False

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass
class Program:
    """A kernel: its parameters with their types, its registers' widths, its instructions, its labels."""

    name: str
    target: str
    threads: int
    parameters: dict[str, str]
    shared_name: str = ""
    widths: dict[str, str] = field(default_factory=dict)  # by prefix, `%rd` -> "u8"
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def raw(self, register: str) -> str:
        """The NumPy type that holds a register."""
        prefix = register.rstrip("0123456789")
        prefix = prefix if prefix in self.widths else prefix[1:]
        if prefix not in self.widths:
            raise UnsupportedError(f"register {register} is not declared")
        return self.widths[prefix]


def parse(text: str) -> Program:
    """The only kernel of a PTX file. Raises `UnsupportedError` for what is not read."""
    text = re.sub(r"//[^\n]*|^\s*\.(loc|file)\b[^\n]*", "", text, flags=re.MULTILINE)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*((?:\.\w+[^{]*)?)\{", text, flags=re.DOTALL)
    if entry is None or len(re.findall(r"\.entry\b", text)) != 1:
        raise UnsupportedError("expected one .entry")
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
    if threads is None:
        raise UnsupportedError("the kernel does not fix its threads (.reqntid)")
    target, shared = re.search(r"\.target\s+(\w+)", text), re.search(r"\.extern\s+\.shared.*?(\w+)\[\]", text)
    parameters = {
        name: kind for kind, name in re.findall(r"\.param\s+\.(\w+)[^,)]*?(\w+)\s*(?:,|$)", entry[2].strip())
    }
    program = Program(
        name=entry[1],
        target=target[1] if target else "",
        threads=int(threads[1]),
        parameters=parameters,
        shared_name=shared[1] if shared else "",
    )
    _read_body(program, text, entry.end())
    if not program.instructions:
        raise UnsupportedError(f"kernel {program.name} has no instructions")
    return program


def _read_body(program: Program, text: str, start: int) -> None:
    line = text.count("\n", 0, start) + 1
    depth, statement, begun = 1, "", line
    packed = 0  # braces of operands, not of scopes
    for char in text[start:]:
        line += char == "\n"
        if not statement.strip():
            statement, begun = "", line
        if char == "{" and statement.strip():
            packed += 1
        elif char == "}" and packed:
            packed -= 1
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return
            continue
        if char == ";":
            _read_statement(program, " ".join(statement.split()), begun)
            statement = ""
        elif char == ":" and re.fullmatch(r"\s*[\w$]+", statement):
            program.labels[statement.strip()] = len(program.instructions)
            statement = ""
        else:
            statement += char
    raise UnsupportedError(f"kernel {program.name} does not end")


def _read_statement(program: Program, statement: str, line: int) -> None:
    declared = re.fullmatch(r"\.reg \.(?:[bsuf])?(pred|\d+) (%?\w+?)(?:<\d+>)?", statement)
    if declared:
        prefix, held = declared[2].rstrip("0123456789"), RAW[declared[1]]
        if program.widths.setdefault(prefix, held) != held:
            raise UnsupportedError(f"line {line}: {statement} (declared with another width)")
    elif statement.startswith(".pragma"):
        return
    elif statement.startswith("."):
        raise UnsupportedError(f"line {line}: {statement}")
    else:
        program.instructions.append(instruction_of(statement, line, program.widths))


def instruction_of(statement: str, line: int, declared: Mapping[str, str]) -> Instruction:
    """One statement without its semicolon. Registers of inline assembly may have names without `%`."""
    for prefix in declared:
        if prefix[0] != "%":
            statement = re.sub(rf"(?<![\w%$.]){prefix}(?=\d+\b)", f"%{prefix}", statement)
    try:
        return Instruction(line, statement, *_parts(statement))
    except UnsupportedError as error:
        raise UnsupportedError(f"line {line}: {statement}: {error}") from None


@functools.cache
def _parts(statement: str) -> tuple[str, tuple[Operand, ...], str, bool]:
    """Opcode, operands, guard, and whether the guard is negated."""
    found = re.fullmatch(r"(?:@(!?)(%\w+) )?([\w.:]+)(?: (.*))?", statement)
    if found is None:
        raise UnsupportedError("not an instruction")
    return found[3], tuple(map(_operand, _split(found[4] or ""))), found[2] or "", bool(found[1])


def _split(text: str) -> list[str]:
    """Operands by commas that stand outside braces and brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _operand(text: str) -> Operand:
    if text[0] == "{":
        return Pack(tuple(map(_operand, _split(text[1:-1]))))
    if text[0] == "[":
        found = re.fullmatch(r"\[ ?([%\w$.]+)(?: ?\+ ?(-?\w+)| ?(-\d+))? ?\]", text)
        if found is None:
            raise UnsupportedError(f"address {text}")
        base = Register(found[1]) if found[1][0] == "%" else Symbol(found[1])
        return Address(base, int(found[2] or found[3] or "0", 0))
    if re.fullmatch(r"%\w+(\.[xyz])?", text):
        return Register(text)
    if re.fullmatch(r"-?\d\w*", text):
        return Immediate(text)
    if re.fullmatch(r"[\w$]+", text):
        return Symbol(text)
    raise UnsupportedError(f"operand {text}")
