"""The folder `conf/`: its place, its groups, and the purpose of each option of a group."""

import re
from functools import cache
from pathlib import Path

from harness.config.errors import UserError

EXPERIMENTS = "experiment"  # lists of overrides, read by harness.sweep.plan
DEPLOYMENT = "deployment"  # a file of the sections DEPLOYED, read by harness.sweep.plan
DEPLOYED = ("model", "device", "engine", "cache", "scheduler", "decoding", "cost")
GATE = "gate"  # margins of the regression gate, read by harness.gate
REPRODUCE = "reproduce"  # published figures, read by harness.papers
_NO_GROUPS = (EXPERIMENTS, GATE, REPRODUCE)  # every other folder is a Hydra group of a run


@cache
def conf_dir() -> Path:
    """The configuration folder: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise UserError(f"no conf/config.yaml in {package} or {package.parent}: the installation is incomplete")


@cache
def groups() -> dict[str, tuple[str, ...]]:
    """Options by Hydra group, sorted: `{"cache": ("contiguous_max", "paged"), ...}`."""
    folders = sorted(path for path in conf_dir().iterdir() if path.is_dir() and path.name not in _NO_GROUPS)
    return {folder.name: options(folder.name) for folder in folders}


@cache
def options(group: str) -> tuple[str, ...]:
    """Names of the options of a group, sorted; also of EXPERIMENTS, GATE and REPRODUCE."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


@cache
def default_choices() -> dict[str, str]:
    """The option that each group has when the user chooses none, from the defaults list of `config.yaml`."""
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"^ +- (\w+): (\w+)$", text, flags=re.MULTILINE))


def option_file(group: str, option: str) -> Path:
    """The YAML file of a group's option."""
    return conf_dir() / group / f"{option}.yaml"


def purpose(group: str, option: str) -> str:
    """The purpose of an option: the comment in the first line of its file."""
    with option_file(group, option).open(encoding="utf-8") as lines:
        return lines.readline().lstrip("# ").rstrip()


def list_options(group: str) -> str:
    """The options of a group with their purposes, one a line, for a message."""
    names = options(group)
    width = max(map(len, names), default=0)
    return "\n".join(f"  {name:{width}}  {purpose(group, name)}" for name in names)
