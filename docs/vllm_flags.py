"""Write the defaults in docs/vllm-flags.md anew: `python docs/vllm_flags.py [PATH/bin/python of a vLLM]`.

Those of PageTwin come from its configuration, those of vLLM from its own argument parser. Where a parser's default is
None, because vLLM decides later, the words of the table stay. A new row needs its flag, its key and what differs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.config.checks import value_of
from harness.config.schema import RunConfig

PAGE = Path(__file__).with_name("vllm-flags.md")
_FLAGS = (
    "import json, vllm\n"
    "from vllm.engine.arg_utils import EngineArgs\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = EngineArgs.add_cli_args(FlexibleArgumentParser())\n"
    "found = {name: action.default for action in parser._actions for name in action.option_strings}\n"
    "print(json.dumps([vllm.__version__, found], default=str))\n"
)
_VALUE = re.compile(r"(?:on|off|null|none|`[^`]*`|\d[\d,.]*\d|\d)(?![\w])")


def flags_of_vllm(python: str) -> tuple[str, dict[str, Any]]:
    """The version of the vLLM of this Python, and the defaults of its flags by name."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(Path.home()), "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run([python, "-c", _FLAGS], env=environment, capture_output=True, text=True, check=True)
    version, found = json.loads(done.stdout.splitlines()[-1])
    return version, found


def written(text: str, vllm: tuple[str, dict[str, Any]] | None = None) -> str:
    """The page with the defaults of today; without `vllm` those of PageTwin alone.

    Raises:
        KeyError: vLLM has no such flag, or PageTwin no such key.
    """
    lines = [
        _row(line, vllm[1] if vllm else None) if line.startswith("| `--") else line
        for line in text.split("\n")
    ]
    if vllm:
        lines = [
            re.sub(r"(arguments of vLLM) [\d.]+\d", rf"\1 {vllm[0].partition('+')[0]}", line)
            for line in lines
        ]
    return "\n".join(lines)


def _row(line: str, theirs: dict[str, Any] | None) -> str:
    flags, there, key, here = line.removeprefix("| ").removesuffix(" |").split(" | ")
    for flag in re.findall(r"`(--[\w-]+)`", flags) if theirs is not None else ():
        there = _beginning(there, theirs[flag])
    first = re.match(r"`(\w+\.\w+)`", key)
    if first:
        here = _beginning(here, value_of(RunConfig(), first[1]))
    return f"| {flags} | {there} | {key} | {here} |"


def _beginning(cell: str, default: Any) -> str:
    """The cell with this value where it begins with another one; a cell that begins with words is left as it is."""
    said, begins = _said(default), _VALUE.match(cell)
    if default is None or begins is None or said in re.split(r"; |\. |: ", cell)[0]:
        return cell
    return said + cell[begins.end() :]


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,g}" if isinstance(value, int | float) else f"`{value}`"


if __name__ == "__main__":
    asked = flags_of_vllm(sys.argv[1]) if len(sys.argv) > 1 else None
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), asked), encoding="utf-8")
