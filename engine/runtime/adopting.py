"""Layers of transformers that a CPU computes in fewer passes over memory, each adopted only after it was proved.

No code of transformers is edited: a layer keeps its weights and gets a `forward` of its own. Which layers qualify is
not decided by their class's name but by their parts, and by the same answer to the same random rows: what computes
anything else stays as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.runtime.native.norms import norm_forward
from engine.runtime.packing import Forward, in_step, out_of_step, pack_linears, reordered

_ROWS = 7  # of the proof
_SCALES = torch.tensor([1.0, 1.0, 1.0, 0.5, 2.0, 1e-3, 30.0])[:, None]  # small rows show another epsilon
_MEANS = torch.tensor([0.0, 0.0, 0.0, 3.0, -3.0, 0.0, 0.0])[
    :, None
]  # random rows have next to none: one is given
_TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
}  # of the largest number: another rounding, not another rule
_Maker = Callable[[torch.nn.Module], tuple[int, Forward] | None]


def adopt_layers(model: Any) -> int:
    """Adopt what qualifies, then pack all linear weights; returns how many layers were adopted. Twice is once."""
    adopted = [module for module in model.modules() if "forward" not in vars(module) and _adopt(module)]
    pack_linears(model)
    return len(adopted)


def give_back_layers(model: Any) -> None:
    """Give every layer its own forward back."""
    for module in model.modules():
        vars(module).pop("forward", None)


@contextmanager
def own_layers(model: Any) -> Iterator[None]:
    """The model as transformers computes it, for a while."""
    adopted = [(module, vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]
    give_back_layers(model)
    try:
        yield
    finally:
        for module, forward in adopted:
            vars(module)["forward"] = forward


def _adopt(module: torch.nn.Module) -> bool:
    for maker in _MAKERS:
        made = maker(module)
        if made is not None and _same_answer(module, *made):
            vars(module)["forward"] = made[1]
            return True
    return False


def _same_answer(module: torch.nn.Module, width: int, forward: Forward) -> bool:
    """Whether `forward` does to random rows, each by its own largest number, what the module does."""
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(1, _ROWS, width, generator=generator) * _SCALES + _MEANS
    rows = rows.to(weight.dtype)
    with torch.inference_mode():
        own, ours = module(rows), forward(rows)
    if own.shape != ours.shape or own.dtype is not ours.dtype:
        return False
    least = _TOLERANCE[weight.dtype] * own.abs().amax(dim=-1)
    return bool(((own - ours).abs().amax(dim=-1) <= least).all())


def _gated_mlp(module: torch.nn.Module) -> tuple[int, Forward] | None:
    """down(silu(gate(x)) * up(x)): without fresh buffers, in bfloat16 within the products themselves."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is torch.nn.Linear for part in parts):
        return None
    if not _is_silu(getattr(module, "act_fn", None)):
        return None
    gate, up, down = (part for part in parts if isinstance(part, torch.nn.Linear))
    if gate.weight.dtype is torch.bfloat16:
        return gate.in_features, _fused_gate(gate, up, down)

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(gate(x), inplace=True)
        return down(hidden.mul_(up(x)))  # type: ignore[no-any-return]

    return gate.in_features, forward


def _is_silu(activation: Any) -> bool:
    """Asked directly: in the answer of a layer with small weights one activation looks like another."""
    if not isinstance(activation, torch.nn.Module):
        return False
    x = torch.linspace(-8, 8, 97)
    return bool(torch.allclose(activation(x), torch.nn.functional.silu(x), atol=1e-6))


def _fused_gate(gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear) -> Forward:
    """Activation and product are done by oneDNN before it writes a result."""
    first, second = reordered(gate), reordered(up)
    run, combine = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = in_step(x)
        hidden = run(rows, first, gate.bias, "swish", [], "")
        return out_of_step(down(combine(rows, hidden, second, up.bias, "mul")), x)

    return forward


_MAKERS: tuple[_Maker, ...] = (norm_forward, _gated_mlp)
