"""The guard at load: does an architecture compute on paged KV what it computes natively?

Two requests run natively, one after the other and whole. The same requests run on paged KV, together and in three
pieces. The logits must agree in float32. Whatever an architecture does besides attention over its own K and V shows
here: a state that is carried on, keys that only a mask hides, positions that it counts itself, attention to something
else, layers that share a cache. No list of names is needed. A small copy of the model runs, so that it takes a
fraction of a second; the verdict is kept for the process.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.core.memory.group_layout import KVGroup
from engine.core.options import GroupKind
from engine.runtime.attention.layer import NO_TIMER, PagedStep, use_paged_attention
from engine.runtime.attention.metadata import PrefillRow, StepLayout, TorchMetadata
from engine.runtime.attention.state import StateStep, find_mixers, mixing, state_shapes
from engine.runtime.errors import ModelError
from engine.runtime.group_views import StateShape, StateView, new_ends, state_bytes, state_numbers
from engine.runtime.kv_pool import KVPool
from engine.runtime.models.probe import ShapeProbe, probe_layers, run_flat, said
from engine.runtime.models.small_copy import FIRST_ID, VOCAB, small_copy
from paged_kernels import Workspace

# Relative to how far the logits of one request's tokens lie apart. Another attention moves them by about as much.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}  # relative to the largest logit
_BLOCK = 4
_BLOCKS = ((1, 3, 5, 7), (2, 4, 6, 8))  # of the two requests: they alternate in the pool
_LENGTHS = (14, 11)


class Verdict(NamedTuple):
    """What was found: why the model would give wrong tokens, or None; and whether its layers with a state go on from it
    by one token alone, because transformers begins longer pieces without a state."""

    reason: str | None
    singly: bool = False


_verdicts: dict[tuple[type, str], Verdict] = {}


class _Piece(NamedTuple):
    """Tokens `start` to `end` of one request."""

    request: int
    start: int
    end: int


_Step = Sequence[_Piece]  # pieces of one token come first
_WHOLE: tuple[_Step, ...] = ((_Piece(0, 0, 14),),)
_CHUNKS: tuple[_Step, ...] = ((_Piece(0, 0, 8),), (_Piece(0, 8, 13),), (_Piece(0, 13, 14),))
_TOGETHER: tuple[_Step, ...] = (
    (_Piece(0, 0, 8), _Piece(1, 0, 6)),
    (_Piece(1, 6, 10), _Piece(0, 8, 13)),
    (_Piece(0, 13, 14), _Piece(1, 10, 11)),
)
_REASONS: tuple[
    tuple[tuple[_Step, ...], str], ...
] = (  # tried in this order: the first that differs is the reason
    (
        _WHOLE,
        "it attends to other keys than it tells its attention (a mask, a bias, more inputs), "
        "or counts positions itself",
    ),
    (_CHUNKS, "it carries more from step to step than K and V (a state), or counts positions itself"),
    (_TOGETHER, "requests that run together change one another"),
)


def check_architecture(model: Any, name: str) -> Verdict:
    """Raise ModelError with the reason if the model does not compute on paged KV what it computes natively.

    `model` is on paged attention. Where no small copy can be built, the model itself runs, in its own data type.
    """
    verdict = _verdict(model)
    if verdict.reason is not None:
        raise ModelError(
            f"model {name}: {model.config.model_type} would give wrong tokens on paged KV: {verdict.reason}"
        )
    return verdict


def _verdict(model: Any) -> Verdict:
    for head_dim in _head_dims(model):
        native = _small_native(model, head_dim)
        if native is None:
            continue
        copy, expected = native
        key = type(model), json.dumps(copy.config.to_dict(), sort_keys=True, default=str)
        if key not in _verdicts:
            _verdicts[key] = _difference(copy, expected)
        return _verdicts[key]
    return _own_verdict(model)


def _small_native(model: Any, head_dim: int) -> tuple[Any, list[torch.Tensor]] | None:
    """A small copy and its native logits; None for sizes that this architecture does not allow."""
    try:
        copy = small_copy(model, head_dim=head_dim)
        expected = _native(copy)
    except Exception:
        return None
    return (copy, expected) if all(bool(logits.isfinite().all()) for logits in expected) else None


def _head_dims(model: Any) -> list[int]:
    """Head widths to try: a small one, and the model's own."""
    own = getattr(model.config.get_text_config(), "head_dim", None)
    return [16, own] if isinstance(own, int) and own not in (0, 16) else [16]


def _own_verdict(model: Any) -> Verdict:
    """The verdict from the model itself."""
    paged = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        expected = _native(model)
    except Exception as error:
        return Verdict(f"it does not run natively either: {said(error)}")
    finally:
        model.set_attn_implementation(paged)
    return _difference(model, expected)


def _ids(model: Any) -> list[torch.Tensor]:
    """The token ids of the two requests, each `[1, tokens]`."""
    generator = torch.Generator().manual_seed(1)
    vocab = min(model.config.get_text_config().vocab_size, VOCAB)
    ids = torch.randint(FIRST_ID, vocab, (1, sum(_LENGTHS)), generator=generator)
    return list(torch.split(ids.to(model.device), list(_LENGTHS), dim=1))


def _native(model: Any) -> list[torch.Tensor]:
    """Logits `[tokens, vocab]` of each request, alone and whole, with the model's own attention."""
    with torch.inference_mode():
        return [_native_logits(model, ids)[0].float() for ids in _ids(model)]


def _native_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits with a cache, as `generate()` computes them; without one where the model's own cache does not work."""
    try:
        logits: torch.Tensor = model(input_ids=ids, use_cache=True).logits
    except Exception:
        logits = model(input_ids=ids, use_cache=False).logits
    return logits


def _difference(model: Any, expected: Sequence[torch.Tensor]) -> Verdict:
    """Why the logits on paged KV differ from the expected ones, if they do."""
    try:
        use_paged_attention(model, model.config.model_type)
        runner = _PagedRuns(model)
        if runner.differs(_TOGETHER, expected) is None:
            return Verdict(None)
        if runner.mixers and runner.differs(_TOGETHER, expected, singly=True) is None:
            return Verdict(None, singly=True)
        for steps, reason in _REASONS:
            found = runner.differs(steps, expected)
            if found is not None:
                return Verdict(f"{reason} [{found}]")
    except ModelError as error:
        return Verdict(str(error))
    raise AssertionError("the runs together differed before and agree now")


class _PagedRuns:
    """Runs the two requests on paged KV and compares the logits."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.mixers = find_mixers(model, FIRST_ID, ShapeProbe())
        self._states = state_shapes(self.mixers)
        with mixing(self.mixers, None):
            self._shapes = probe_layers(model, model.config.model_type, FIRST_ID, list(self._states)).shapes
        self._ids = _ids(model)

    def differs(
        self, steps: Sequence[_Step], expected: Sequence[torch.Tensor], *, singly: bool = False
    ) -> str | None:
        """Where the logits of the steps first differ from the expected ones, or what failed; None if all agree."""
        pool = KVPool(
            self._shapes, num_blocks=8, block_size=_BLOCK, dtype=self._model.dtype, device=self._model.device
        )
        states = _state_pages(self._states, self._model)
        for number, step in enumerate(steps):
            try:
                found = self._run(step, pool, states, singly)
            except ModelError:
                raise
            except Exception as error:
                return f"step {number}: {said(error)}"
            wanted = torch.cat([expected[piece.request][piece.start : piece.end] for piece in step])
            wanted = wanted[self._kept(step)]
            if found.shape != wanted.shape:
                raise ModelError(
                    f"asked for the logits of {len(wanted)} tokens of a step it gives {len(found)}"
                )
            apart = self._error(found, wanted, expected)
            if not apart <= 1:  # NaN differs too
                return f"step {number}: logits differ by {apart:.3g} times the tolerance"
        return None

    def _error(self, found: torch.Tensor, wanted: torch.Tensor, expected: Sequence[torch.Tensor]) -> float:
        """The largest difference in units of the tolerance."""
        dtype, largest = self._model.dtype, max(float(logits.abs().max()) for logits in expected)
        apart = max(float((logits - logits.mean(dim=0)).abs().max()) for logits in expected)
        allowed = _TOLERANCE[dtype] * apart + _ROUNDING[dtype] * largest
        return float((found - wanted).abs().max() / allowed)

    def _kept(self, step: _Step) -> torch.Tensor:
        """The flat positions whose logits are compared: not all of them, as in the engine."""
        tokens = sum(piece.end - piece.start for piece in step)
        return torch.arange(1 if tokens > len(step) else 0, tokens, device=self._model.device)

    @torch.inference_mode()
    def _run(self, step: _Step, pool: KVPool, states: StateView, singly: bool) -> torch.Tensor:
        device = self._model.device
        ids = torch.cat([self._ids[piece.request][:, piece.start : piece.end] for piece in step], dim=1)
        positions = np.concatenate([np.arange(piece.start, piece.end) for piece in step])
        tables = [np.array(_BLOCKS[piece.request]) for piece in step]
        slots = [
            table[span // _BLOCK] * _BLOCK + span % _BLOCK
            for table, piece in zip(tables, step, strict=True)
            for span in (np.arange(piece.start, piece.end),)
        ]
        layout = _layout(step, tables)
        paged = PagedStep(
            TorchMetadata(layout, pool, Workspace()),
            torch.from_numpy(np.concatenate(slots)).to(device),
            pool,
            NO_TIMER,
        )
        flat = torch.from_numpy(positions)[None].to(device)
        mixed = dict.fromkeys(self._states, StateStep(layout, states, positions, singly=singly))
        with mixing(self.mixers, mixed):
            return run_flat(self._model, ids, flat, paged, self._kept(step)).float()


def _state_pages(states: Mapping[int, StateShape], model: Any) -> StateView:
    """Memory for the states of all layers that keep one, in pages that end with the blocks of K and V."""
    empty = torch.empty(0, dtype=model.dtype, device=model.device)
    keys = [empty] * (1 + max(states, default=0))
    for layer, shape in states.items():
        keys[layer] = empty.new_full(
            (1 + sum(map(len, _BLOCKS)), state_numbers(shape, model.dtype)), torch.nan
        )
    nothing = [each[:, :0] if each.dim() > 1 else each for each in keys]
    size = max(map(state_bytes, states.values()), default=1)
    group = KVGroup(GroupKind.state, len(states), 0, _BLOCK, size, size * len(states))
    ends = new_ends(len(states), 1 + sum(map(len, _BLOCKS)))
    return StateView(group, tuple(states), keys, nothing, 0, 1, model.device, states, ends)


def _layout(step: _Step, tables: Sequence[np.ndarray]) -> StepLayout:
    """The layout of a step: all of its pieces are decode rows, or all are prefill rows."""
    if all(piece.end - piece.start == 1 for piece in step):
        return StepLayout(np.stack(tables), np.array([piece.end for piece in step]), [])
    rows, start = [], 0
    for piece, table in zip(step, tables, strict=True):
        length = piece.end - piece.start
        rows.append(PrefillRow(table[: -(-piece.end // _BLOCK)], start, length, piece.end))
        start += length
    return StepLayout(np.zeros((0, 0), dtype=np.int64), np.zeros(0, dtype=np.int64), rows)
