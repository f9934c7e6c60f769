"""The attention function that transformers calls in every layer, and the step that it works for.

`use_paged_attention` makes `paged_attention` the attention of a model. It calls `PagedStep.attend`, which first writes
all new K and V to the pool and then computes attention. An `AttentionTimer` measures how long this takes, without
waiting for the device between two layers.

Latent attention (MLA) can keep its latent vectors: what a layer would expand into K and V is stored as it is. A latent
layer of transformers (from 5.0 on) expands its compressed vectors by its method `expand_kv(latent, rotary)`, and hands
the result to its attention. While `latents` is open, the layer hands over the latent vectors `[1, 1, tokens, rank]` as
K and the rotary keys `[1, 1, tokens, rope_dim]` as V instead. They are stored in pages. `LatentStep` decodes from them
as they are, and expands those of longer rows, by the layer's own method, where they are read. So a page has
`rank + rope_dim` numbers a token, as DeepSeek's cache has. Without `latents` the engine keeps expanded K and V.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from engine.runtime.attention.metadata import (
    AttentionMetadata,
    LatentRows,
    PrefillRow,
    StepLayout,
    serves_latents,
    slots_of,
)
from engine.runtime.errors import ModelError
from engine.runtime.group_pool import CacheTensors, GroupView
from paged_kernels import Scoring, Workspace, torch_backend
from paged_kernels.arguments import causal_window, storable
from paged_kernels.operations import SHORT_QUERIES
from paged_kernels.private import attention_of

IMPLEMENTATION = "pagetwin"


class LayerCall(NamedTuple):
    """What a layer sends to its attention: q `[1, heads, tokens, dk]`, k and v `[1, kv_heads, tokens, d]`."""

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scoring: Scoring
    rest: Mapping[str, Any]  # other keywords


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
        reason = f"{type(module).__name__} was called without the paged KV: its model drops extra arguments"
        raise ModelError(reason)
    scoring = Scoring(scaling, sliding_window or 0, softcap or 0.0, s_aux)
    if attention_mask is not None:
        rest["attention_mask"] = attention_mask
    return paged.attend(LayerCall(module, query, key, value, scoring, rest)), None


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
    if attention_of(model) != IMPLEMENTATION:
        raise ModelError(
            f"model {name}: the attention of {model.config.model_type} cannot be replaced: "
            "transformers does not route it through its attention interface"
        )


class AttentionTimer(Protocol):
    """Adds up the time between `begin()` and `end()` over the layers of a step."""

    def begin(self) -> Any:
        """Start an interval; give the returned value to `end`."""

    def end(self, began: Any) -> None:
        """End the interval."""

    def total_s(self) -> float:
        """Seconds of all intervals since the last call of this method."""


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

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Attention of one layer: `[1, heads, tokens, d]` in, `[1, tokens, heads, d]` out."""


class PagedStep:
    """The KV pool and the attention metadata of one step. Give it to the model as `paged=`; every layer calls `attend`.

    `slots` `[tokens]` are the KV slots of the new tokens, int64; -1 is a padded row of a recorded graph.
    """

    def __init__(
        self, metadata: AttentionMetadata, slots: torch.Tensor, pool: CacheTensors, timer: AttentionTimer
    ) -> None:
        self._metadata, self._slots, self._pool, self._timer = metadata, slots, pool, timer

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Attention of one layer: `[1, heads, tokens, d]` in, `[1, tokens, heads, d]` out.

        All rows are written before any row is read, because a sequence may share a block that another one fills in the
        same step.
        """
        began = self._timer.begin()
        module, query, key, value, scoring, _ = call
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


_METHOD = "expand_kv"


def latent_layers(model: Any) -> list[Any]:
    """The attention modules of a model that expand latent vectors themselves."""
    return [module for module in model.modules() if callable(getattr(type(module), _METHOD, None))]


@contextmanager
def latents(model: Any) -> Iterator[None]:
    """While this is open, latent layers hand their latent vectors to the attention."""
    modules = latent_layers(model)
    for module in modules:
        setattr(module, _METHOD, lambda latent, rotary: (latent, rotary))
    try:
        yield
    finally:
        for module in modules:
            delattr(module, _METHOD)


def expand(module: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K `[1, heads, tokens, dk]` and V `[1, heads, tokens, dv]` by the layer's own method, hidden or not."""
    keys, values = getattr(type(module), _METHOD)(module, latent, rotary)
    return keys, values


class Absorbed(NamedTuple):
    """What a layer's expansion multiplies by, so that the query can be multiplied in place of all keys and values."""

    keys: torch.Tensor  # [heads, rank, dk]: of the latent vector
    rotary: torch.Tensor  # [heads, rope_dim, dk]
    values: torch.Tensor  # [heads, rank, dv]


_ABSORBED: WeakKeyDictionary[Any, Absorbed | None] = WeakKeyDictionary()  # by layer


def absorbed(module: Any, latent: torch.Tensor, rotary: torch.Tensor) -> Absorbed | None:
    """The products of a layer's `expand_kv`, found once from what it makes of unit vectors; None if it is not linear.

    `latent` and `rotary` are vectors of the layer as in `expand`, on which the products are checked.
    """
    if module not in _ABSORBED:
        units, turns = (torch.eye(it.shape[3], dtype=it.dtype, device=it.device) for it in (latent, rotary))
        none = (units.new_zeros(len(turns), len(units)), turns.new_zeros(len(units), len(turns)))
        keys, values = expand(module, units[None, None], none[1][None, None])
        turned, left = expand(module, none[0][None, None], turns[None, None])
        made = Absorbed(keys[0].contiguous(), turned[0].contiguous(), values[0].contiguous())
        wanted = expand(module, latent, rotary)
        found = (latent[0] @ made.keys + rotary[0] @ made.rotary, latent[0] @ made.values)
        near = all(_near(one, other[0]) for one, other in zip(found, wanted, strict=True))
        _ABSORBED[module] = made if near and not left.any() else None
    return _ABSORBED[module]


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two ways to sum differ by rounding alone."""
    few = 2e-2 if found.dtype.itemsize == 2 else 1e-5
    return bool((found - wanted).norm() <= few * wanted.norm())


class LatentStep:
    """The latent layers of one step: stores latent vectors in pages, and attends to them.

    Rows of one query read the latent vectors as they are (`Absorbed`): the query is brought into their space, and what
    it reads is brought out of it. Longer rows attend to what the vectors expand to, which is less work for them. On
    Triton, steps whose rows have few queries read the vectors as they are too, by the decode kernel. The rows are those
    of `layout`, in the tensors of `pool`; `slots` `[tokens]` are the slots of the new tokens.
    """

    def __init__(
        self,
        layout: StepLayout,
        slots: torch.Tensor,
        pool: GroupView,
        timer: AttentionTimer,
        workspace: Workspace,
        backend: str,
    ) -> None:
        self._slots, self._pool, self._timer = slots, pool, timer
        singles = [
            PrefillRow(table, number, 1, int(length))
            for number, (table, length) in enumerate(zip(layout.tables, layout.lengths, strict=True))
        ]
        self._rows, self._inside = [*singles, *layout.prefills], len(singles)
        self._kernel = None
        if backend == "triton" and serves_latents(pool):
            if all(row.queries <= SHORT_QUERIES for row in layout.prefills):
                self._inside = len(self._rows)
            self._kernel = LatentRows(self._rows[: self._inside], pool, workspace)
        self._places: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Attention of one latent layer; see `PagedStep.attend`. `key` and `value` are latents and rotary keys."""
        began = self._timer.begin()
        module, query, key, value, scoring, _ = call
        stored = self._pool.keys[module.layer_idx], self._pool.values[module.layer_idx]
        for cache, new in zip(stored, (key, value), strict=True):
            torch_backend.store(cache, new[0].transpose(0, 1), self._slots)
        _check_latent(scoring)
        products = absorbed(module, key, value) if self._inside else None
        inside = self._inside if products else 0
        whole, parts = self._rows[inside:], []
        if products:
            tokens = sum(row.queries for row in self._rows[:inside])
            moved = [query[0, :, :tokens] @ one.transpose(1, 2) for one in (products.keys, products.rotary)]
            if self._kernel is not None:
                read = self._kernel.attend(
                    torch.cat(moved, dim=2).transpose(0, 1).contiguous(), *stored, scoring
                )
            else:
                caches = self._gathered(stored, 0, inside, query.dtype)
                read = _read_rows(moved, caches, self._rows[:inside], scoring)
            parts.append(torch.matmul(read, products.values)[None])
        if whole:
            gathered = self._gathered(stored, inside, len(self._rows), query.dtype)
            keys, values = expand(module, *(one[None, None] for one in gathered))
            ends = np.cumsum([row.length for row in whole])
            for (_, start, queries, length), end in zip(whole, ends, strict=True):
                rows, read_keys = slice(start, start + queries), slice(end - length, end)
                parts.append(
                    _attend_row(query[:, :, rows], keys[:, :, read_keys], values[:, :, read_keys], scoring)
                )
        self._timer.end(began)
        return torch.cat(parts, dim=2).transpose(1, 2)

    def _gathered(
        self, stored: Sequence[torch.Tensor], first: int, last: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Latents and rotary keys `[tokens, width]` of some rows, row behind row."""
        if (first, last) not in self._places:
            size = self._pool.block_size
            read = [slots_of(row.table, 0, row.length, size) for row in self._rows[first:last]]
            places = torch.from_numpy(np.concatenate(read)).to(self._pool.device)
            self._places[first, last] = places // size, places % size
        pages, slots = self._places[first, last]
        return [storable(cache)[pages, slots, 0].view(cache.dtype).to(dtype) for cache in stored]


def _check_latent(scoring: Scoring) -> None:
    if not scoring.plain:
        raise ModelError("a latent layer with a softcap, sinks or ALiBi is not served")


def _read_rows(
    moved: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    rows: Sequence[PrefillRow],
    scoring: Scoring,
) -> torch.Tensor:
    """What rows of one query, `[heads, rows, rank]` and `[heads, rows, rope_dim]`, read of their latents and keys.

    Scores are float32 or wider: bfloat16 would round large ones by a tenth and more.
    """
    dtype = moved[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    (inside, turned), (latent, rotary) = ([one.to(wide) for one in pair] for pair in (moved, caches))
    read, first = [], 0
    for row, (_, _, _, length) in enumerate(rows):
        span = slice(first + max(0, length - scoring.window) if scoring.window else first, first + length)
        scores = inside[:, row] @ latent[span].T + turned[:, row] @ rotary[span].T
        read.append(torch.softmax(scores * scoring.scale, dim=1) @ latent[span])
        first += length
    return torch.stack(read, dim=1).to(dtype)


def _attend_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """The queries of one row, the last tokens of its keys: `[1, heads, queries, dv]`."""
    queries, length = query.shape[2], keys.shape[2]
    mask = causal_window(queries, length, scoring.window, device=query.device)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scoring.scale)
