"""torch's fused attention, with the LSE where torch hands it out: on the CPU."""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom

from paged_kernels.scoring import Scoring


def gives_lse(device: torch.device) -> bool:
    """Whether `fused_attention` gives the LSE: torch's public call keeps it to itself, its CPU kernel does not."""
    return device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    *,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output `[N, kv_heads, rows, dv]` in q's dtype and, if asked for, the natural-log LSE `[N, kv_heads, rows]`.

    q `[N, kv_heads, rows, dk]`, k and v `[N, kv_heads, L, d]`; `mask` is additive in q's dtype and broadcasts.
    """
    scale, sums = scoring.scale * scoring.k_scale, None
    if lse:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result, sums = flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    else:
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return (result if scoring.v_scale == 1 else result * scoring.v_scale), sums
