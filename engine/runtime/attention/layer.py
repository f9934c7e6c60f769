"""The attention function that transformers calls in every layer, and the step that it works for.

`use_paged_attention` makes `paged_attention` the attention of a model. It calls `PagedStep.attend`, which first writes
all new K and V to the pool and then computes attention. `Spans` measure how long this takes, without waiting for the
device between two layers.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from engine.runtime.attention.plans import AttentionPlan
from engine.runtime.errors import ModelError
from engine.runtime.kv_pool import KVPool
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
    """One layer of a flattened step: q `[1, heads, tokens, dk]`, k and v `[1, kv_heads, tokens, d]` after RoPE.

    Returns `[1, tokens, heads, dv]`. `paged` is what the model was called with: the step's `PagedStep`, or a probe.
    """
    if paged is None:
        raise ModelError(
            f"{type(module).__name__} was reached without the paged KV: its model drops extra arguments"
        )
    scoring = Scoring(scaling, sliding_window or 0, softcap or 0.0, s_aux)
    if attention_mask is not None:
        rest["attention_mask"] = attention_mask
    return paged.attend(module, query, key, value, scoring, rest), None


def use_paged_attention(model: Any, name: str) -> None:
    """Make `paged_attention` the model's attention. Raises ModelError if transformers does not really do so.

    The name is registered for attention alone and not for masks: without a mask function transformers builds none.
    """
    from transformers import AttentionInterface
    from transformers.utils import logging

    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the check below says the same, as an error
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    finally:
        logging.set_verbosity(level)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise ModelError(
            f"model {name}: the attention of {model.config.model_type} cannot be replaced: "
            "transformers does not route it through its attention interface"
        )


class Spans(Protocol):
    """Times the stretches between `begin()` and `end()`."""

    def begin(self) -> Any:
        """Start a stretch; pass what this returns to `end`."""
        ...

    def end(self, began: Any) -> None:
        """End the stretch."""
        ...

    def total_s(self) -> float:
        """Seconds of all stretches since the last call of this method."""
        ...


class ClockSpans:
    """On the CPU work is done when a call returns: two readings of the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0

    def begin(self) -> float:
        """The clock now."""
        return self._clock()

    def end(self, began: float) -> None:
        """Add the time since `began`."""
        self._seconds += self._clock() - began

    def total_s(self) -> float:
        """Seconds so far, and start anew."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class CudaSpans:
    """On a GPU the device marks the stretches itself, so that no layer waits for the one before it."""

    def __init__(self) -> None:
        self._stretches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> torch.cuda.Event:
        """An event at this place of the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def end(self, began: torch.cuda.Event) -> None:
        """A second event at this place of the stream."""
        self._stretches.append((began, self.begin()))

    def total_s(self) -> float:
        """Seconds between the events; the caller has synchronised the device."""
        milliseconds = [float(began.elapsed_time(ended)) for began, ended in self._stretches]
        self._stretches.clear()
        return sum(milliseconds) / 1e3


class NoSpans:
    """Times nothing: for passes that are not the model's own."""

    def begin(self) -> None:
        """Nothing begins."""

    def end(self, began: None) -> None:
        """Nothing ends."""

    def total_s(self) -> float:
        """No time."""
        return 0.0


NO_SPANS = NoSpans()


class PagedStep:
    """Handed to the model as `paged=`; its layers call `attend`. Index tensors are shared by all layers."""

    def __init__(self, plan: AttentionPlan, slots: torch.Tensor, pool: KVPool, spans: Spans) -> None:
        self._plan = plan
        self._slots = slots
        self._pool = pool
        self._spans = spans

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

        All rows are written before any is read: a sequence may share a block that another fills in this very step.
        """
        began = self._spans.begin()
        keys, values = self._pool.keys[module.layer_idx], self._pool.values[module.layer_idx]
        if module.layer_idx == 0 and self._pool.marks is not None:
            self._pool.marks.write(self._slots)
        self._plan.store(keys, key[0].transpose(0, 1), self._slots)
        self._plan.store(values, value[0].transpose(0, 1), self._slots)
        q = query[0].transpose(0, 1)
        out = q.new_empty(q.shape[0], q.shape[1], value.shape[3])
        self._plan.attend(q, keys, values, scoring, out)
        self._spans.end(began)
        return out.unsqueeze(0)
