"""What the log of a fit has shown (its model, its largest steps, a typical one), and what of a deployment is new to it.

A fit keeps it in `device.seen`, so that every command knows where its constants are carried further than they were
seen. A fit to one model cannot tell how much of a step is fixed and how much follows the work: a matrix of another
size may take as long as before, or as much longer as it is larger. `work_range` are these two ends.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import log2

import numpy as np

from harness.config.errors import ConfigError
from harness.cost.model_shape import ModelShape
from harness.metrics.log import Column
from harness.replay.folds import Hull

NEW = "new to the fit"
"""The key of a fitted cost model's provenance that says what of the model the fit has not seen."""
NOT_KEPT = (
    "the file of this fit does not keep what its log has shown: fit the log again with calibrate --from-log"
)
"""What is said of a fit without `device.seen`."""
LARGEST = ("rows", "query_tokens", "kv_read_tokens", "waiting")
"""Columns of the step table of which a fit keeps the largest value."""
_SIZES = ("rows", "query_tokens", "kv_read_tokens", "longest")  # those that make a step longer
_WORDS = {
    "rows": "requests in a step",
    "query_tokens": "tokens in a step",
    "kv_read_tokens": "KV tokens read in a step",
    "waiting": "requests that wait",
    "longest": "tokens of a request",
}
_WORK = ("layers", "step_bytes", "weight_bytes", "token_weights", "kv_bytes")
_PARTS = ("experts", "latent", "window", "state_layers")  # kinds of layers, each priced by terms of its own
_STEP = ("step_rows", "step_context", "step_s")


@dataclass(frozen=True)
class SeenByFit:
    """What a fit has seen, as numbers by name.

    `model` has the fields of its shape and `device.tensor_parallel`, `work` what a device does for it, `largest` the
    largest of each of `LARGEST` and the `longest` request in tokens. `step` is a decode step of the log: rows, tokens
    of each before it, and the seconds that the fit gives it.
    """

    model: Mapping[str, float]
    work: Mapping[str, float]
    largest: Mapping[str, float]
    step: tuple[float, float, float]

    def __str__(self) -> str:
        """The text of `device.seen`."""
        parts = {
            **{f"model.{name}": value for name, value in self.model.items()},
            **{f"work.{name}": value for name, value in self.work.items()},
            **{f"largest.{name}": value for name, value in self.largest.items()},
            **dict(zip(_STEP, self.step, strict=True)),
        }
        return "; ".join(f"{name}={value:.10g}" for name, value in parts.items())

    @property
    def hull(self) -> Hull:
        """The range of step columns, for `CostSource.hull`: smaller steps than those seen are inside."""
        return {name: (0.0, value) for name, value in self.largest.items() if name in LARGEST}

    def new_model(self, shape: ModelShape, parallel: int) -> str:
        """What of a model the fit has not seen, in a sentence without its stop; empty where it is the same."""
        now = _numbers(shape, parallel)
        names = [name for name in {**self.model, **now} if now.get(name, 0.0) != self.model.get(name, 0.0)]
        if not names:
            return ""
        said = ", ".join(f"{one} {now.get(one, 0):g} (it saw {self.model.get(one, 0):g})" for one in names)
        return f"the fit has not seen this model shape: {said}"

    def new_kinds(self, shape: ModelShape) -> list[str]:
        """Kinds of layers that one of both models has and the other has not."""
        now, then = ({name.partition(".")[0] for name in one} for one in (_numbers(shape, 1), self.model))
        return [part for part in _PARTS if (part in now) != (part in then)]

    def new_load(self, steps: Mapping[str, Column], longest: float) -> str:
        """What of a simulated load the fit has not seen, in a sentence without its stop; empty where nothing is."""
        now = self._reached(steps, longest)
        said = [
            f"{value:,.0f} {_WORDS[name]} (it saw at most {self.largest[name]:,.0f})"
            for name, value in now.items()
            if value > self.largest[name]
        ]
        return f"the fit has not seen this load: {', '.join(said)}" if said else ""

    def doublings(self, steps: Mapping[str, Column], longest: float) -> float:
        """How often the largest step, or the longest request, doubles what the fit has seen; 0 inside of it."""
        now = self._reached(steps, longest)
        return max(0.0, *(log2(max(now[name], 1.0) / max(self.largest[name], 1.0)) for name in _SIZES))

    def _reached(self, steps: Mapping[str, Column], longest: float) -> dict[str, float]:
        return {**{name: float(np.max(steps[name], initial=0.0)) for name in LARGEST}, "longest": longest}

    def work_range(self, shape: ModelShape, parallel: int) -> tuple[float, float]:
        """The least and the most by which the time of a step may change for the model: not at all, or as its work."""
        now = _work(shape, parallel)
        ratios = [now[name] / self.work[name] for name in _WORK if self.work[name]]
        return min(1.0, *ratios), max(1.0, *ratios)


def seen(shape: ModelShape, parallel: int, steps: Mapping[str, Column], longest: float) -> SeenByFit:
    """What these steps have shown of a model on so many devices; the time of the typical step is left 0.

    `longest` is the longest request, prompt and output, in tokens.
    """
    largest = {name: float(np.max(steps[name], initial=0.0)) for name in LARGEST} | {"longest": longest}
    rows, kv = (np.asarray(steps[name], dtype=np.float64) for name in ("rows", "kv_read_tokens"))
    typical = max(1, round(float(rows.mean())))
    context = max(1, round(float(kv.sum() / max(1.0, rows.sum()))))
    return SeenByFit(
        _numbers(shape, parallel), _work(shape, parallel), largest, (float(typical), float(context), 0.0)
    )


def seen_of(text: str) -> SeenByFit:
    """What is in a text of `device.seen`.

    Raises:
        ConfigError: it is none; names `device.seen`.
    """
    found: dict[str, dict[str, float]] = {"model": {}, "work": {}, "largest": {}, "": {}}
    try:
        for part in text.split(";"):
            name, value = part.strip().split("=")
            group, dot, key = name.partition(".")
            found[group if dot else ""][key if dot else name] = float(value)
        step = found[""]["step_rows"], found[""]["step_context"], found[""]["step_s"]
        other = {*found["largest"]} != {*LARGEST, "longest"} or {*found["work"]} != {*_WORK}
        if other or min(step) <= 0:
            raise ValueError
    except (ValueError, KeyError) as error:
        raise ConfigError(
            "device.seen",
            f"found {text[:60]!r}…, must be the 'model.layers=…; …' that calibrate --from-log writes; null: nothing "
            "is known of what the fit has seen",
        ) from error
    return SeenByFit(found["model"], found["work"], found["largest"], step)


def _numbers(shape: ModelShape, parallel: int) -> dict[str, float]:
    """The fields of a shape that are set, those of its parts behind a dot, and the devices."""
    found = {"tensor_parallel": float(parallel)}
    for name, value in asdict(shape).items():
        parts = value if isinstance(value, dict) else {"": value}
        for part, number in parts.items():
            if number:
                found[f"{name}.{part}" if part else name] = float(number)
    return found


def _work(shape: ModelShape, parallel: int) -> dict[str, float]:
    """What each device does for a model: layers, bytes of weights read and kept, weights a token meets, bytes of KV."""
    return {
        "layers": float(shape.layers),
        "step_bytes": shape.step_bytes / parallel,
        "weight_bytes": shape.weight_bytes / parallel,
        "token_weights": shape.token_weights / parallel,
        "kv_bytes": shape.kv_bytes_per_token * shape.kv_share(parallel),
    }
