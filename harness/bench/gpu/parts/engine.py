"""Part `engine`: decode steps of models of serving size, and transformers' continuous batching in the same run."""

from harness.bench.gpu.parts import Setting
from harness.bench.gpu.parts.words import program, step
from harness.bench.gpu.step import SECONDS, Step

LIMITS = {"1b": 230, "8b": 335}


def engine_steps(setting: Setting) -> list[Step]:
    """A step a model: batch 1 to 256, graphs on and off, then the peer on the same weights."""
    return [_step(setting, model, limit) for model, limit in LIMITS.items()]


def _step(setting: Setting, model: str, limit: int) -> Step:
    out = ("--out", str(setting.out / f"{model}.json"))
    command = (*program("decoding"), "--model", model, *out, "--seconds", SECONDS)
    return step(model, command, (*program("decoding"), "--model", model, *out, "--dry-run"), limit)
