"""CPU time of a whole process tree. A peer may do its work in child processes: vLLM does.

A clock of this process alone would see its parent wait, and call it a hundred times too fast.
"""

import os
from importlib import import_module
from typing import Any


def tree_seconds() -> float:
    """CPU seconds, user and system, of this process and of all processes below it, ended ones included.

    Without psutil, running child processes are not seen; callers that need them ask for psutil first.
    """
    try:
        psutil: Any = import_module("psutil")
    except ImportError:
        return sum(os.times()[:4])
    root = psutil.Process()
    return sum(_seconds(psutil, process) for process in (root, *root.children(recursive=True)))


def _seconds(psutil: Any, process: Any) -> float:
    """Seconds of a process and of its children that have ended; 0 if it has ended itself, since its parent has them."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
