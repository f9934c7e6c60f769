"""Layers with recurrent state (Mamba, gated delta nets, short convolutions) on the states of many sequences at once.

Such a layer of transformers (from 5.10 on) keeps its state in the cache that it is called with, by the cache's
`update_conv_state` and `update_recurrent_state`. A module that calls them is a mixer here. While `mixing` is open, the
flat batch of a step is cut before each mixer: rows of one token run together, a longer row runs in pieces that end
where a state is kept. The unmodified module gets a cache of transformers with the states of these rows, read from
their pages, and what it leaves there is written back. So a state that is kept is never changed: the next piece writes
to another page.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import BoundArguments, signature
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.core.memory.group_layout import KVGroup
from engine.core.plan import IntArray
from engine.runtime.attention.metadata import StepLayout
from engine.runtime.errors import ModelError
from engine.runtime.group_pool import StatePart, StateShape, StateView

# In place of a page, where a row begins its sequence.
NO_STATE = 0
_HOOKS = {"update_conv_state": "conv", "update_recurrent_state": "recurrent"}


@dataclass(frozen=True)
class Mixer:
    """A module that keeps `parts` of the state of layer `layer` in the cache that it gets as argument `cache`."""

    module: torch.nn.Module
    cache: str
    layer: int
    parts: StateShape

    def call(self, bound: BoundArguments, cache: Any) -> Any:
        """The module's own code, with another cache."""
        bound.arguments[self.cache] = cache
        return type(self.module).forward(*bound.args, **bound.kwargs)


def _bind(module: torch.nn.Module, sent: Sequence[Any], named: Mapping[str, Any]) -> BoundArguments:
    return signature(type(module).forward).bind_partial(module, *sent, **named)


def state_shapes(mixers: Sequence[Mixer]) -> dict[int, StateShape]:
    """By layer the parts of its state, which may be those of several mixers."""
    return {
        layer: tuple(part for mixer in mixers if mixer.layer == layer for part in mixer.parts)
        for layer in sorted({mixer.layer for mixer in mixers})
    }


def find_mixers(model: Any, token: int, paged: Any) -> tuple[Mixer, ...]:
    """The mixers of a model, found by running `token` with a cache of transformers and noting who calls its hooks.

    `paged` is what the attention of the other layers calls. None are found where this cache does not work: then the
    model keeps its state elsewhere, or none. Raises ModelError for a module that keeps states of two layers.
    """
    from transformers import DynamicCache

    try:
        cache = DynamicCache(config=model.config.get_text_config())
    except AttributeError:  # a configuration without what this cache asks for
        return ()
    running: list[_Call] = []
    noted: dict[tuple[int, str, int], _Call] = {}

    def noting(update: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def hooked(states: torch.Tensor, layer_idx: int, state_idx: int = 0, **more: Any) -> Any:
            noted[layer_idx, kind, state_idx] = running[-1]
            return update(states, layer_idx, state_idx, **more)

        return hooked

    def leave(*_: Any) -> None:
        running.pop()

    for name, kind in _HOOKS.items():
        setattr(cache, name, noting(getattr(cache, name), kind))
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda *call: running.append(call), with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    ids = torch.tensor([[token]], device=model.device)
    try:
        with torch.inference_mode():
            positions = torch.zeros_like(ids)
            model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, paged=paged)
    # it does not work on this cache: what loads the model says why, or finds it equal without
    except Exception:
        return ()
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[int, Mixer] = {}
    for (layer, kind, index), (module, sent, named) in noted.items():
        arguments = _bind(module, sent, named).arguments
        argument = next((name for name, value in arguments.items() if value is cache), None)
        if argument is None:
            raise ModelError(f"{type(module).__name__} keeps its state in a cache that it is not called with")
        state = getattr(cache.layers[layer], f"{kind}_states")[index]
        part = StatePart(kind, index, tuple(state.shape[1:]), state.dtype)
        before = found.get(id(module))
        if before is not None and before.layer != layer:
            raise ModelError(f"{type(module).__name__} keeps states of layers {before.layer} and {layer}")
        found[id(module)] = Mixer(module, argument, layer, (*(before.parts if before else ()), part))
    return tuple(found.values())


_Call = tuple[torch.nn.Module, Sequence[Any], Mapping[str, Any]]  # a module and what it is called with


@contextmanager
def mixing(mixers: Sequence[Mixer], steps: Mapping[int, "StateStep"] | None) -> Iterator[None]:
    """While this is open, each mixer works on the states of the step of its layer. With None it keeps no state."""

    def hooked(mixer: Mixer, step: StateStep | None) -> Callable[..., Any]:
        def forward(*sent: Any, paged: Any = None, **named: Any) -> Any:
            if step is None:
                return mixer.call(_bind(mixer.module, sent, named), None)
            return step.mix(mixer, sent, named)

        return forward

    for mixer in mixers:
        vars(mixer.module)["forward"] = hooked(mixer, None if steps is None else steps[mixer.layer])
    try:
        yield
    finally:
        for mixer in mixers:
            vars(mixer.module).pop("forward", None)


class Piece(NamedTuple):
    """Rows that a mixer runs together, all of the same length.

    `flat` `[rows, tokens]` are positions of the batch, `sources` and `targets` `[rows]` pages of the tensors;
    all `sources` are NO_STATE, or none. `context` `[rows]` is the first position of each row in its pages.
    """

    flat: IntArray
    sources: IntArray
    targets: IntArray
    context: IntArray


def pieces_of(
    layout: StepLayout, block_size: int, *, aligned: bool = False, singly: bool = False
) -> list[Piece]:
    """The rows of a step cut where a block ends, in the order in which they must run.

    A piece reads the state that the one before it wrote, the first of a row that of the block before its first token,
    and writes that of the block of its last one: a block without a page is no end. Where states are `aligned`, a row
    that leaves the block in which it begins keeps none there, as the core counts it: other sequences may begin with
    that page. With `singly` a piece that goes on from a state has one token.
    """
    ones = enumerate(zip(layout.tables, layout.lengths, strict=True))
    spans = [(table, number, int(length) - 1, int(length)) for number, (table, length) in ones]
    spans += [(row.table, row.start, row.length - row.queries, row.length) for row in layout.prefills]
    cut: dict[tuple[int, int, bool], list[tuple[int, int, int, int]]] = {}
    for table, start, context, end in spans:
        begin, depth = context, 0
        source = int(table[(begin - 1) // block_size]) if begin else NO_STATE
        opens = context // block_size
        left = opens if aligned and context % block_size and end > (opens + 1) * block_size else None
        while begin < end:
            block = begin // block_size
            while not table[block] or block == left:
                block += 1
            until = min(end, (block + 1) * block_size, begin + 1 if singly and begin else end)
            target = int(table[block])
            cut.setdefault((depth, until - begin, begin == 0), []).append(
                (start + begin - context, source, target, begin)
            )
            begin, depth, source = until, depth + 1, target
    found = []
    for (_, tokens, _), rows in sorted(cut.items()):
        first, sources, targets, begins = (np.array(each, dtype=np.int64) for each in zip(*rows, strict=True))
        found.append(Piece(first[:, None] + np.arange(tokens), sources, targets, begins))
    return found


def first_written(layout: StepLayout, group: KVGroup) -> IntArray:
    """The pages that a step writes and none before it: those that no piece reads and writes."""
    pieces = pieces_of(layout, group.block_size, aligned=group.aligned)
    return np.concatenate([piece.targets[piece.targets != piece.sources] for piece in pieces])


class StateStep:
    """The layers with state of one step, on the states of one group.

    The rows are those of `layout`, in the pages of `view`; `positions` `[tokens]` are those of the flat batch in their
    sequences. `singly` is for layers that go on from a state by one token alone.
    """

    def __init__(
        self, layout: StepLayout, view: StateView, positions: IntArray, *, singly: bool = False
    ) -> None:
        self._view = view
        device = view.device
        self._pieces = [
            (
                torch.from_numpy(piece.flat).to(device),
                torch.from_numpy(piece.sources).to(device) if piece.context.any() else None,
                torch.from_numpy(piece.targets).to(device),
                positions[piece.flat[:, -1]] + 1,
            )
            for piece in pieces_of(layout, view.block_size, aligned=view.group.aligned, singly=singly)
        ]
        self._tokens = len(positions)

    def mix(self, mixer: Mixer, sent: Sequence[Any], named: Mapping[str, Any]) -> torch.Tensor:
        """What the mixer makes of the flat batch `[1, tokens, width]`: it runs piece by piece, on its states.

        Every argument with an axis of tokens is cut. Raises ModelError where it returns anything but `[rows, tokens,
        width]`.
        """
        output: torch.Tensor | None = None
        for index, sources, targets, ends in self._pieces:
            cache = self._cache(mixer, sources)
            bound = _bind(mixer.module, self._cut(tuple(sent), index), self._cut(dict(named), index))
            made = mixer.call(bound, cache)
            if not isinstance(made, torch.Tensor) or made.shape[:2] != index.shape:
                raise ModelError(
                    f"{type(mixer.module).__name__} keeps a state and does not return one row for each token"
                )
            layer = cache.layers[mixer.layer]
            self._view.write(mixer.layer, targets, {part: _state(layer, part) for part in mixer.parts}, ends)
            if output is None:
                output = made.new_empty(1, self._tokens, *made.shape[2:])
            output[0, index] = made
        assert output is not None  # a step has rows
        return output

    def _cache(self, mixer: Mixer, sources: torch.Tensor | None) -> Any:
        """A cache of transformers that holds the states of the rows of a piece, or none at their begin."""
        from transformers.cache_utils import Cache, LinearAttentionLayer

        states = 1 + max(part.number for part in self._view.shapes[mixer.layer])
        layer = LinearAttentionLayer(number_of_states=states)
        if sources is not None:
            kept = self._view.read(mixer.layer, sources)
            for part in mixer.parts:
                getattr(layer, f"{part.kind}_states")[part.number] = kept[part]
                getattr(layer, f"is_{part.kind}_states_initialized")[part.number] = True
                layer.has_previous_state[part.number] = True
                if part.kind == "conv":
                    layer.conv_kernel_size[part.number] = part.shape[-1]
                    layer.dtype, layer.device = part.dtype, self._view.device
        return Cache(layers=[layer] * (mixer.layer + 1))

    def _cut(self, value: Any, index: torch.Tensor) -> Any:
        """The rows and tokens of a piece, of whatever has them: `[1, tokens, ...]` becomes `[rows, piece, ...]`."""
        if isinstance(value, torch.Tensor) and value.shape[:2] == (1, self._tokens):
            return value[0][index]
        if type(value) in (tuple, list):
            return type(value)(self._cut(each, index) for each in value)
        if type(value) is dict:
            return {name: self._cut(each, index) for name, each in value.items()}
        return value


def _state(layer: Any, part: StatePart) -> torch.Tensor:
    """A part as the module left it. Raises ModelError where it is of another shape or type than at load."""
    state: torch.Tensor | None = getattr(layer, f"{part.kind}_states")[part.number]
    if state is None or tuple(state.shape[1:]) != part.shape or state.dtype is not part.dtype:
        found = "nothing" if state is None else f"{tuple(state.shape[1:])} of {state.dtype}"
        reason = f"a {part.kind} state of {part.shape} of {part.dtype} is kept, the layer left {found}"
        raise ModelError(reason)
    return state
