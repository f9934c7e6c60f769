"""The attention function that transformers calls in every layer, and the step that it works for.

`use_paged_attention` makes `paged_attention` the attention of a model. It calls `PagedStep.attend`, which first writes
all new K and V to the pool and then computes attention. An `AttentionTimer` measures how long this takes, without
waiting for the device between two layers.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from engine.runtime.attention.metadata import AttentionMetadata
from engine.runtime.errors import ModelError
from engine.runtime.kv_pool import CacheTensors
from paged_kernels import Scoring

IMPLEMENTATION = "pagetwin"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer for a flat batch: q `[1, heads, tokens, dk]`, k and v `[1, kv_heads, tokens, d]`.

    RoPE is already applied. `paged` is the argument of that name that the model was called with: the `PagedStep` of
    the step, or the `ShapeProbe` of a model that is being loaded. Returns `[1, tokens, heads, dv]` and no attention
    weights. Raises ModelError if the model does not pass `paged` on.
    """
    if paged is None:
        raise ModelError(
            f"{type(module).__name__} was called without the paged KV: its model drops extra arguments"
        )
    scoring = Scoring(scaling, sliding_window or 0, softcap or 0.0, s_aux)
    if attention_mask is not None:
        rest["attention_mask"] = attention_mask
    return paged.attend(module, query, key, value, scoring, rest), None


def use_paged_attention(model: Any, name: str) -> None:
    """Make `paged_attention` the attention of a model. Raises ModelError if transformers does not use it.

    It is registered as an attention function only, not as a mask function, so that transformers builds no masks.
    """
    from transformers import AttentionInterface
    from transformers.utils import logging

    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the check below raises an error instead of a warning
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    finally:
        logging.set_verbosity(level)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise ModelError(
            f"model {name}: the attention of {model.config.model_type} cannot be replaced: "
            "transformers does not route it through its attention interface"
        )


class AttentionTimer(Protocol):
    """Adds up the time between `begin()` and `end()` over the layers of a step."""

    def begin(self) -> Any:
        """Start an interval; give the returned value to `end`."""
        ...

    def end(self, began: Any) -> None:
        """End the interval."""
        ...

    def total_s(self) -> float:
        """Seconds of all intervals since the last call of this method."""
        ...


class ClockTimer:
    """For a CPU, where the work is done when a call returns: reads the clock twice."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0

    def begin(self) -> float:
        """The clock now."""
        return self._clock()

    def end(self, began: float) -> None:
        """Add the seconds since `began`."""
        self._seconds += self._clock() - began

    def total_s(self) -> float:
        """Seconds so far; the sum starts again at 0."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class CudaTimer:
    """For a GPU: records CUDA events, so that no layer waits for the one before it."""

    def __init__(self) -> None:
        self._intervals: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> torch.cuda.Event:
        """An event at this place of the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def end(self, began: torch.cuda.Event) -> None:
        """A second event at this place of the stream."""
        self._intervals.append((began, self.begin()))

    def total_s(self) -> float:
        """Seconds between the events. The caller must have synchronised the device."""
        milliseconds = [float(began.elapsed_time(ended)) for began, ended in self._intervals]
        self._intervals.clear()
        return sum(milliseconds) / 1e3


class NoTimer:
    """Measures nothing: for recorded graphs and for the draft model."""

    def begin(self) -> None:
        """Do nothing."""

    def end(self, began: None) -> None:
        """Do nothing."""

    def total_s(self) -> float:
        """Always 0."""
        return 0.0


NO_TIMER = NoTimer()


class LayerAttention(Protocol):
    """What a model is given as `paged=`: the attention of every layer of one step. See `PagedStep.attend`."""

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        rest: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attention of one layer: `[1, heads, tokens, d]` in, `[1, tokens, heads, d]` out."""
        ...


class PagedStep:
    """The KV pool and the attention metadata of one step. Give it to the model as `paged=`; every layer calls `attend`.

    `slots` `[tokens]` are the KV slots of the new tokens, int64; -1 is a padded row of a recorded graph.
    """

    def __init__(
        self, metadata: AttentionMetadata, slots: torch.Tensor, pool: CacheTensors, timer: AttentionTimer
    ) -> None:
        self._metadata = metadata
        self._slots = slots
        self._pool = pool
        self._timer = timer

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        rest: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attention of one layer: `[1, heads, tokens, d]` in, `[1, tokens, heads, d]` out.

        All rows are written before any row is read, because a sequence may share a block that another one fills in the
        same step.
        """
        began = self._timer.begin()
        keys, values = self._pool.keys[module.layer_idx], self._pool.values[module.layer_idx]
        if module.layer_idx == 0 and self._pool.marks is not None:
            self._pool.marks.write(self._slots)
        self._metadata.store(keys, key[0].transpose(0, 1), self._slots)
        self._metadata.store(values, value[0].transpose(0, 1), self._slots)
        q = query[0].transpose(0, 1)
        out = q.new_empty(q.shape[0], q.shape[1], value.shape[3])
        self._metadata.attend(q, keys, values, scoring, out)
        self._timer.end(began)
        return out.unsqueeze(0)
