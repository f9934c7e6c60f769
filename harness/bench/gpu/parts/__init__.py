"""The parts of `bench gpu`: each is a list of steps that fits one call of ten minutes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.bench.gpu.step import Step
from harness.config.errors import UserError


@dataclass(frozen=True)
class Setting:
    """What a part's steps depend on.

    `out` takes everything that the part writes; `device` is the option of the group `device` that describes this
    machine; `trace` an Azure LLM inference CSV, None for the generated one.
    """

    out: Path
    device: str
    trace: str | None = None


PARTS = ("quick", "kernels", "engine", "prediction")


def steps_of(part: str, setting: Setting) -> list[Step]:
    """The part's steps, those that others rest on first.

    Raises:
        UserError: there is no such part.
    """
    builders = _builders()
    if part not in builders:
        raise UserError(f"--part {part}: there is no such part; choose {', '.join(builders)}")
    return builders[part](setting)


def _builders() -> Mapping[str, Callable[[Setting], list[Step]]]:
    from harness.bench.gpu.parts.engine import engine_steps
    from harness.bench.gpu.parts.kernels import kernel_steps
    from harness.bench.gpu.parts.prediction import prediction_steps
    from harness.bench.gpu.steps import steps

    builders = (
        lambda setting: steps(setting.out, setting.device),
        kernel_steps,
        engine_steps,
        prediction_steps,
    )
    return dict(zip(PARTS, builders, strict=True))
