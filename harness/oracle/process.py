"""vLLM in a process of its own, in the interpreter that has it. It may be another environment than ours."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from engine.core.options import SchedulerLimits
from harness.config.errors import ConfigError
from harness.oracle.decisions import Step

KNOWN = "0.33.0"
"""The version of vLLM that the driver is written for and tested with."""

KEY = "oracle.python"
_INSTALL = (
    "install vLLM in an environment of its own and name its interpreter, "
    f"oracle.python=PATH/bin/python: pip install vllm=={KNOWN}; without a GPU: "
    "pip install torch setuptools-scm setuptools-rust jinja2 cmake ninja wheel packaging && "
    f"VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE={KNOWN} "
    f"pip install --no-build-isolation --no-binary vllm vllm=={KNOWN}"
)
_ASK_VERSION = "from importlib.metadata import version; print(version('vllm'))"
_DRIVER = Path(__file__).with_name("vllm_driver.py")
_LAST_LINES = 3


@lru_cache(maxsize=8)
def vllm_version(python: str | None) -> str:
    """The version of vLLM that an interpreter has; None asks our own. Raises ConfigError, which says how to install."""
    interpreter = python or sys.executable
    try:
        asked = subprocess.run([interpreter, "-c", _ASK_VERSION], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(KEY, f"'{interpreter}' cannot be started: {error.strerror}; {_INSTALL}") from error
    if asked.returncode:
        where = f"'{interpreter}'" if python else "this environment"
        raise ConfigError(KEY, f"{where} has no vLLM; {_INSTALL}")
    return asked.stdout.strip()


def settings_of(
    num_blocks: int, block_size: int, prefix_caching: bool, limits: SchedulerLimits, longest: int
) -> dict[str, Any]:
    """The settings of a scheduler as the driver takes them; `longest` is the longest request, in tokens."""
    return {
        "pool_blocks": num_blocks,
        "block_size": block_size,
        "prefix_caching": prefix_caching,
        "max_batched_tokens": limits.max_batched_tokens,
        "max_running": limits.max_running,
        "chunked_prefill": limits.chunked_prefill,
        "watermark": limits.watermark,
        "policy": str(limits.policy),
        "long_prefill_tokens": limits.long_prefill_tokens,
        "admit_whole_prompt": limits.admit_whole_prompt,
        "max_model_len": (limits.max_model_len or longest) + 1,
    }


class VllmProcess:
    """A running driver; use it as a context. `begin` starts with an empty pool, and can be called again."""

    def __init__(self, python: str | None = None) -> None:
        self._python = python or sys.executable
        self._version = vllm_version(python)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [self._python, "-P", str(_DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        process = self._process
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._log):
            assert stream is not None
            with suppress(BrokenPipeError):  # what it did not read any more
                stream.close()

    def begin(self, settings: Mapping[str, Any]) -> str:
        """Start with an empty pool; returns vLLM's version."""
        return str(self._ask({"settings": settings})["vllm"])

    def step(self, arrived: Sequence[Mapping[str, Any]]) -> Step:
        """What vLLM decides in the next step, with these requests before it."""
        return Step.of(self._ask({"submit": arrived}))

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question, separators=(",", ":")) + "\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died() from error
        line = process.stdout.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> ConfigError:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", errors="replace").strip().splitlines()
        last = " / ".join(line.strip() for line in lines[-_LAST_LINES:]) or "without a word"
        return ConfigError(
            KEY, f"vLLM {self._version} stopped ({last}); the driver is written for vLLM {KNOWN}; {_INSTALL}"
        )
