"""What the layers of a model send to their attention, found by running one token through the model.

The token shows the K and V shapes that each layer really sends, because configs often state them wrongly, and whether
every layer calls our function exactly once. In a second pass transformers is asked for masks: a layer may hide keys by
a mask alone, and on paged KV there are no masks. Both passes refuse with a `ModelError` what they find wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from engine.runtime.attention.layer import IMPLEMENTATION, LayerCall, expand, latent_layers, latents
from engine.runtime.errors import ModelError
from engine.runtime.kv_pool import LayerShape
from paged_kernels.private import forget_masks

# keywords that layers may send beside q, k, v and the paged kernels' arguments; they do not change the attention
_IGNORED_KEYWORDS = frozenset(
    ["position_ids", "use_cache", "dropout", "is_causal", "cache_position", "layer_type"]
)
# What a layer sends that has no attention.
NO_KV: LayerShape = ((0, 0), (0, 0))
_FARTHEST = 1 << 17  # masks are looked at for a query at most this far from the first token


def longest_sequence(config: Any) -> int | None:
    """The longest sequence that a configuration names, in tokens; None if it names none."""
    names = "max_position_embeddings n_positions max_target_positions max_seq_len model_max_length"
    values = (getattr(config, name, None) for name in names.split())
    return next((value for value in values if isinstance(value, int)), None)


def run_flat(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, paged: Any, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """Run a model over a flat batch `[1, tokens]`: logits `[tokens, vocab]`, or `[len(keep), vocab]`.

    `paged` is what the attention of every layer calls; `keep` are the flat positions whose logits are wanted.
    """
    kept = {} if keep is None else {"logits_to_keep": keep}
    output = model(input_ids=ids, position_ids=positions, use_cache=False, paged=paged, **kept)
    logits: torch.Tensor = output.logits[0]
    return logits


def _zeros(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """An output of attention."""
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class ShapeProbe:
    """Takes the place of the `PagedStep` in a test pass: records shapes of K and V and windows, returns zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int] = {}
        self.calls = 0
        self.sent: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}  # the layer, K and V
        self.unsupported: set[str] = set()

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Record one layer's call."""
        module, query, key, value, scoring, rest = call
        self.calls += 1
        if rest.get("is_causal", getattr(module, "is_causal", True)) is False:
            self.unsupported.add("keys to the right of a query")
        self.shapes[module.layer_idx] = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
        self.windows[module.layer_idx] = scoring.window
        self.sent[module.layer_idx] = module, key, value
        self.unsupported |= {  # `output_*` says what the model returns
            name
            for name, sent in rest.items()
            if sent is not None and name not in _IGNORED_KEYWORDS and not name.startswith("output_")
        }
        return _zeros(query, value)


class LatentProbe(ShapeProbe):
    """A `ShapeProbe` that is handed latent vectors, and returns zeros as wide as what they expand to."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Record one layer's call."""
        super().attend(call)
        return _zeros(call.query, expand(call.module, call.key, call.value)[1])


class LayerProbe(NamedTuple):
    """By layer: the shapes of K and V that it sends, and the window that it tells in tokens, 0 for none."""

    shapes: tuple[LayerShape, ...]
    windows: tuple[int, ...]


def probe_layers(model: Any, name: str, token: int, stateful: Sequence[int] = ()) -> LayerProbe:
    """Run one token through the model and return what its layers send to their attention.

    `stateful` are the layers that keep a recurrent state. A model that has such layers may have others without
    attention. Raises ModelError unless every layer called `paged_attention` exactly once, or none in such a model,
    with arguments that the kernels support.
    """
    probe = ShapeProbe()
    try:
        _run_token(model, token, probe)
    except ModelError as error:
        raise ModelError(f"model {name}: {error}") from error
    except Exception as error:
        why = "its code computes on attention masks, and paged KV has none"
        try:
            with _masks_by(MaskProbe(farthest=1)) as masks:
                _run_token(model, token, masks)
        except Exception:
            why = "its code fails"
        kind = model.config.model_type
        raise ModelError(f"model {name}: {kind} on paged KV: {why} ({said(error)})") from error
    layers = model.config.get_text_config().num_hidden_layers
    called = sorted(layer for layer in probe.shapes if isinstance(layer, int))
    expected = sorted({*called, *stateful, *range(layers)}) if stateful else called
    if stateful and not probe.calls:
        raise ModelError(
            f"model {name}: the layers of {model.config.model_type} keep a recurrent state and none keeps K and V of "
            "its tokens: a pool that is sized in tokens has no size for it"
        )
    if probe.calls != len(called) or expected != list(range(len(expected))) or len(expected) < layers:
        raise ModelError(
            f"model {name}: {model.config.model_type} has {layers} layers, and {len(called)} of them called paged "
            f"attention, {probe.calls} times in all: not every layer has one KV cache per token"
        )
    if probe.unsupported:
        raise ModelError(
            f"model {name}: {model.config.model_type} asks its attention for {', '.join(sorted(probe.unsupported))}, "
            "which the paged kernels do not support"
        )
    shapes = tuple(probe.shapes.get(layer, NO_KV) for layer in expected)
    return LayerProbe(shapes, tuple(probe.windows.get(layer, 0) for layer in expected))


def probe_latents(model: Any, token: int, layers: int) -> tuple[LayerShape, ...] | None:
    """The shapes of the latent vectors that the layers can hand over; None unless all with attention can.

    What a layer hands over must expand to the K and V that it sends otherwise, bit for bit. Where it does not, or its
    code needs the expanded ones, the engine keeps these.
    """
    modules = latent_layers(model)
    if not modules:
        return None
    plain, latent = ShapeProbe(), LatentProbe()
    _run_token(model, token, plain)
    with latents(model):
        try:
            _run_token(model, token, latent)
        except Exception:  # its code does more with K and V than handing them over
            return None
    if len(modules) != len(plain.sent) or latent.sent.keys() != plain.sent.keys():
        return None
    for layer, (module, key, value) in latent.sent.items():
        with torch.inference_mode():
            expanded = expand(module, key, value)
        if not all(map(torch.equal, expanded, plain.sent[layer][1:])):
            return None
    return tuple(latent.shapes.get(layer, NO_KV) for layer in range(layers))


def said(error: Exception) -> str:
    """An error of someone else's code in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def _run_token(model: Any, token: int, probe: Any) -> None:
    ids = torch.tensor([[token]], device=model.device)
    with torch.inference_mode():
        run_flat(model, ids, torch.zeros_like(ids), probe)


_MaskFunction = Callable[..., torch.Tensor]


class MaskProbe:
    """Takes the place of the `PagedStep` while masks are made, and notes layers whose mask hides more than they say.

    `hidden` holds these layers. A layer tells its attention a sliding window or nothing; its mask must hide the same.
    """

    def __init__(self, farthest: int) -> None:
        self.hidden: list[int] = []
        self._query = farthest
        self._masks: dict[int, tuple[torch.Tensor, _MaskFunction]] = {}

    def make(self, *, mask_function: _MaskFunction, **rest: Any) -> torch.Tensor:
        """A mask function as transformers calls it: a mask that hides nothing, and stands for `mask_function`."""
        shape = (rest["batch_size"], 1, rest["q_length"], rest["kv_length"])
        mask = torch.ones(shape, dtype=torch.bool, device=rest.get("device"))
        self._masks[id(mask)] = mask, mask_function
        return mask

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Compare the mask of one layer with the window that it sends."""
        _, mask_function = self._masks.get(id(call.rest.get("attention_mask")), (None, None))
        if mask_function is not None:
            visible = self._visible(mask_function)
            window = call.scoring.window or self._query + 1
            told = torch.arange(self._query + 1) > self._query - window
            if visible is not None and not torch.equal(visible, told):
                self.hidden.append(call.module.layer_idx)
        return _zeros(call.query, call.value)

    def _visible(self, mask_function: _MaskFunction) -> torch.Tensor | None:
        """Which keys `[positions]` the farthest query sees; None if the mask depends on more than positions."""
        zero, keys = torch.tensor(0), torch.arange(self._query + 1)
        try:
            seen = mask_function(zero, zero, torch.tensor(self._query), keys)
        except (IndexError, RuntimeError, TypeError):
            return None  # it looks something up by position: the comparison in guard.py decides
        return torch.as_tensor(seen).expand(len(keys)) if torch.as_tensor(seen).dim() < 2 else None


def check_masks(model: Any, name: str, token: int) -> None:
    """Raise ModelError if a mask of the model hides keys that its layers do not hide by a sliding window."""
    longest = longest_sequence(model.config.get_text_config()) or _FARTHEST
    probe = MaskProbe(min(longest, _FARTHEST) - 1)
    with _masks_by(probe):
        try:
            _run_token(model, token, probe)
        except Exception:  # it works on its mask: without masks, as it will run, it has passed `probe_layers`
            return
    if probe.hidden:
        raise ModelError(
            f"model {name}: the masks of {model.config.model_type} hide keys (a sliding window or chunks) that its "
            f"layers do not tell their attention, for example layer {probe.hidden[0]}; paged KV has no masks"
        )


@contextmanager
def _masks_by(probe: MaskProbe) -> Iterator[MaskProbe]:
    """Let transformers make its masks with the probe. Without a registered function it makes none."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(IMPLEMENTATION, probe.make)
    try:
        yield probe
    finally:
        forget_masks(IMPLEMENTATION)
