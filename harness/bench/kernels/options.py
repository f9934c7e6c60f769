"""The command line of `bench kernels`, and the cases that it asks for."""

import argparse
from collections.abc import Callable
from typing import Any

from harness.bench.kernels.grid import CaseSpec, expand
from harness.bench.kernels.presets import PRESETS
from harness.config.errors import UserError

_AXES: tuple[tuple[str, str, str, str], ...] = (  # option, field, kind, what it is
    ("batch", "batch", "int", "sequences"),
    ("context", "context", "int", "cached tokens per sequence, the queries' own included"),
    ("block-size", "block_size", "int", "tokens per block"),
    ("heads", "heads", "heads", "query/key heads, e.g. 32/8,32/32"),
    ("head-dim", "head_dim", "int", "width of a head"),
    ("dtype", "dtype", "str", "bf16, fp16, fp32, fp8_e4m3, fp8_e5m2"),
    ("ragged", "ragged", "bool", "no, yes or both: lengths from half to one and a half of the context"),
    ("prefix", "shared_prefix", "int", "leading tokens that all sequences share, in whole blocks"),
    ("queries", "queries", "int", "query tokens per sequence; 1 is a decode"),
    ("layout", "layout", "str", "NHD, HND"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe every option."""
    axes = parser.add_argument_group("axes of the grid (lists with commas)")
    for option, field, _, what in _AXES:
        axes.add_argument(f"--{option}", dest=field, metavar="A,B", help=what)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a ready-made grid; default: the device's")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--provider", metavar="A,B", help="only these (our own always runs)")
    parser.add_argument("--function", metavar="MODULE:NAME", help="a function of yours as one more provider")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds a case; default: 20")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="begin no case after so long; default: no limit"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (--device cpu); default: 1")
    parser.add_argument("--out", default="results/bench/kernels", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="list the cases, time nothing")


def chosen_device(flags: argparse.Namespace) -> str:
    """`cuda` or `cpu`; `auto` looks for a driver, without importing torch."""
    from harness.environment import gpu_names

    if flags.device != "auto":
        return str(flags.device)
    return "cuda" if gpu_names() else "cpu"


def chosen_cases(flags: argparse.Namespace) -> list[CaseSpec]:
    """The preset, or the grid of the axes that were given.

    Raises:
        UserError: an axis has no or impossible values, or both a preset and axes were given.
    """
    _check(flags)
    given = {field: getattr(flags, field) for _, field, _, _ in _AXES if getattr(flags, field) is not None}
    if given and flags.preset:
        raise UserError(
            f"--preset {flags.preset} is a whole grid; leave out --{next(iter(given))}, or the preset"
        )
    device = chosen_device(flags)
    if not given:
        return PRESETS[flags.preset or ("gpu" if device == "cuda" else "cpu")]()
    plain = CaseSpec() if device == "cuda" else CaseSpec(heads=16, kv_heads=4, head_dim=64, dtype="fp32")
    defaults: dict[str, list[Any]] = {"heads": [(plain.heads, plain.kv_heads)]}
    defaults |= {"head_dim": [plain.head_dim], "dtype": [plain.dtype]}
    kinds = {field: (option, _KINDS[kind]) for option, field, kind, _ in _AXES}
    return expand(defaults | {field: _values(text, *kinds[field]) for field, text in given.items()})


def _check(flags: argparse.Namespace) -> None:
    for option in ("rounds", "threads"):
        if getattr(flags, option) < 1:
            raise UserError(f"--{option} is {getattr(flags, option)}, must be at least 1")
    if flags.seconds is not None and not flags.seconds > 0:
        raise UserError(f"--seconds is {flags.seconds:g}, must be above 0")


def _values(text: str, option: str, read: Callable[[str], list[Any]]) -> list[Any]:
    try:
        return [value for part in text.split(",") for value in read(part.strip())]
    except ValueError as error:
        raise UserError(f"--{option} {text}: {error}") from error


def _heads(part: str) -> list[tuple[int, int]]:
    heads, _, kv_heads = part.partition("/")
    return [(int(heads), int(kv_heads or heads))]


def _yes_or_no(part: str) -> list[bool]:
    answers = {"no": [False], "yes": [True], "both": [False, True]}
    if part not in answers:
        raise ValueError(f"{part!r} is none of no, yes, both")
    return answers[part]


_KINDS: dict[str, Callable[[str], list[Any]]] = {
    "int": lambda part: [int(part)],
    "str": lambda part: [part],
    "heads": _heads,
    "bool": _yes_or_no,
}
