"""What the operations take: options, batches and scratch memory; the errors of this package; and the checks.

The checks run on the host, before any launch. Messages hold the wrong values. Checks of shapes, dtypes, devices and
strides cost nothing. Values (lengths, block tables, slots) are on the device, and reading them waits for the device.
This is not possible while a CUDA graph is captured, and a caller that trusts its values may skip it.
"""

import threading
from numbers import Integral
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]  # tables and lengths on the host
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER_DTYPES = (torch.int32, torch.int64)


class KernelError(ValueError):
    """Arguments that an operation cannot serve. The subclasses say what is wrong with them."""


class ShapeError(KernelError):
    """Shapes that do not fit each other, or that no kernel serves: head_dim, group, number of rows."""


class DtypeError(KernelError):
    """A dtype, or a combination of dtypes, that the operation does not support."""


class DeviceError(KernelError):
    """Tensors that are not all on one device."""


class StrideError(KernelError):
    """Strides or addresses that the kernels cannot read in wide loads."""


class TableError(KernelError):
    """A block id, slot or length outside its cache or table."""


class OptionError(KernelError):
    """A number or name that an option does not allow."""


class WorkspaceError(KernelError):
    """A frozen workspace that is smaller than a call needs."""


class BackendUnavailableError(KernelError):
    """A backend that was chosen by name cannot run here. There is no silent fallback."""


class Scoring(NamedTuple):
    """Scores are q . k x `scale`, then the softcap, then ALiBi, then the mask. A sink column joins the softmax.

    An fp8 cache holds keys divided by `k_scale` and values divided by `v_scale` (one number per tensor).
    """

    scale: float
    window: int = 0  # keys kept: query position - window < key position <= query position; 0: all keys
    softcap: float = 0.0  # tanh(score / softcap) x softcap; 0: none
    sinks: torch.Tensor | None = None  # [heads], one extra logit per head, in the denominator only
    alibi: torch.Tensor | None = None  # [heads], slopes; adds slope x (key position - query position)
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def options(self) -> tuple[str, ...]:
        """What is asked beside scale and window."""
        asked = {
            "a softcap": self.softcap > 0,
            "sinks": self.sinks is not None,
            "ALiBi": self.alibi is not None,
        }
        return tuple(name for name, on in asked.items() if on)

    @property
    def plain(self) -> bool:
        """Whether torch's fused SDPA can compute this: no softcap, sinks or ALiBi."""
        return not self.options


def causal_window(
    queries: int, keys: int, window: int = 0, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Bool `[queries, keys]`: True where the query may look. The queries are the last positions of the keys.

    Query position p sees key positions `p - window < k <= p`; window 0 means no limit.
    """
    query = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device).unsqueeze(0)
    visible = key <= query
    return visible & (key > query - window) if window else visible


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as numbers to add to the scores: 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))


class PagedBatch(NamedTuple):
    """Ragged queries over paged KV: the common form of decode and prefill. Shapes as in `paged_attention_prefill`."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int


def as_layers(cache: torch.Tensor) -> torch.Tensor:
    """The cache as `[layers, blocks, block_size, heads, dim]`; adds the layer axis if there is none."""
    return cache if cache.dim() == 5 else cache.unsqueeze(0)


def storable(cache: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that can be indexed and copied: torch cannot index 8-bit floats on the CPU."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def token_bytes(key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    """Bytes of one token's K and V in one layer."""
    return key_cache[0, 0].nbytes + value_cache[0, 0].nbytes


def block_width(layers: torch.Tensor) -> int:
    """Elements of one block. Raises `StrideError` if the block is not dense in memory."""
    inner = sorted(zip(layers.stride()[2:], layers.shape[2:], strict=True))
    expected = 1
    for stride, size in inner:
        if size > 1 and stride != expected:
            raise StrideError(
                f"a block {tuple(layers.shape[2:])} with strides {tuple(layers.stride()[2:])} is not dense in memory; "
                "copies move whole blocks (NHD or HND)"
            )
        expected *= size
    return expected


class Workspace:
    """Named flat buffers that grow and are reused. Two calls must not use one workspace at the same time.

    A captured CUDA graph keeps the addresses that it saw: run the largest case once, `freeze`, then capture.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._frozen = False

    def take(
        self, name: str, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A flat tensor of `numel` elements on the device of `like`, with its dtype unless `dtype` is given.

        Its content is undefined. Raises `WorkspaceError` if the workspace is frozen and too small.
        """
        key = (name, dtype or like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = self._grown(name, numel, buffer, key[1], key[2])
        return buffer[:numel]

    def freeze(self) -> None:
        """From now on, a call that needs a larger buffer raises `WorkspaceError`."""
        self._frozen = True

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _grown(
        self, name: str, numel: int, buffer: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        held = 0 if buffer is None else buffer.numel()
        if self._frozen:
            raise WorkspaceError(
                f"the frozen workspace holds {held} elements of {dtype} for {name!r} on {device} and the call needs "
                f"{numel}: run the largest case once before freeze()"
            )
        # The size at least doubles, so that growing contexts need few new buffers. On the CPU the buffer is zeroed, so
        # that the page faults happen here and not in the middle of a gather.
        make = torch.zeros if device.type == "cpu" else torch.empty
        return make(max(numel, 2 * held), dtype=dtype, device=device)


class _WorkspaceOfThread(threading.local, Workspace):
    """Each thread sees one of its own."""


DEFAULT_WORKSPACE = _WorkspaceOfThread()


def check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Check that both caches are `[blocks, block_size, kv_heads, dim]`, agree in all but `dim`, and have dense rows."""
    dims = (*key_cache.shape[1:], *value_cache.shape[3:])
    if key_cache.dim() != 4 or len(dims) != 4 or key_cache.shape[:3] != value_cache.shape[:3] or 0 in dims:
        raise ShapeError(
            f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} must both be "
            "[blocks, block_size, kv_heads, dim], none of the last three 0, and agree in the first three"
        )
    check_same("key_cache", key_cache, "value_cache", value_cache)
    if key_cache.dtype not in (*FLOAT_DTYPES, *FP8_DTYPES):
        raise DtypeError(
            f"key_cache is {key_cache.dtype}; a cache must be one of {_names((*FLOAT_DTYPES, *FP8_DTYPES))}"
        )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_last_stride(name, cache)


def check_blocks(name: str, cache: torch.Tensor) -> None:
    """Check that a cache is `[blocks, block_size, kv_heads, dim]`, or a stack of layers of these."""
    if cache.dim() not in (4, 5):
        wanted = "[blocks, block_size, kv_heads, dim], or have an axis of layers in front"
        raise ShapeError(f"{name} {tuple(cache.shape)} must be {wanted}")


def check_queries(q: torch.Tensor, key_cache: torch.Tensor) -> None:
    """Check that q is `[tokens, heads, dk]`: heads a multiple of kv_heads, the cache's dk, a dtype that fits it."""
    if q.dim() != 3 or not q.shape[1] or q.shape[1] % key_cache.shape[2] or q.shape[2] != key_cache.shape[3]:
        raise ShapeError(
            f"q {tuple(q.shape)} must be [tokens, heads, dk] with heads a multiple of {key_cache.shape[2]} "
            f"and dk {key_cache.shape[3]}, to fit key_cache {tuple(key_cache.shape)}"
        )
    if q.dtype not in FLOAT_DTYPES or (key_cache.dtype not in FP8_DTYPES and q.dtype != key_cache.dtype):
        raise DtypeError(
            f"q is {q.dtype} and the cache {key_cache.dtype}: q must be one of {_names(FLOAT_DTYPES)}, and the "
            f"cache must have q's dtype or one of {_names(FP8_DTYPES)}"
        )
    if q.device != key_cache.device:
        raise DeviceError(f"q is on {q.device} and key_cache on {key_cache.device}")
    check_last_stride("q", q)


def check_tables(
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, device: torch.device
) -> None:
    """Check that there is one table row, length and span of queries per sequence, as integers on q's device."""
    rows = seq_lens.numel()
    if seq_lens.dim() != 1 or block_table.shape[:-1] != (rows,) or cu_seqlens_q.shape != (rows + 1,):
        raise ShapeError(
            f"{rows} seq_lens need as many rows in block_table {tuple(block_table.shape)} and one more in "
            f"cu_seqlens_q {tuple(cu_seqlens_q.shape)}; seq_lens {tuple(seq_lens.shape)} must have one axis"
        )
    named = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
    for name, tensor in named.items():
        check_whole(name, tensor)
        if tensor.device != device:
            raise DeviceError(f"{name} is on {tensor.device} and q on {device}; they must agree")
        check_last_stride(name, tensor)


def check_whole(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor has integers: others would be cut."""
    if tensor.dtype not in INTEGER_DTYPES:
        raise DtypeError(f"{name} is {tensor.dtype}; it must be one of {_names(INTEGER_DTYPES)}")


def check_outputs(q: torch.Tensor, dv: int, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Check that `out` is `[tokens, heads, dv]` as q, and `lse` `[tokens, heads]`, contiguous, float32 or float64."""
    if out.shape != (*q.shape[:2], dv):
        raise ShapeError(f"out {tuple(out.shape)} must be {(*q.shape[:2], dv)}")
    check_same("out", out, "q", q)
    check_last_stride("out", out)
    if lse is None:
        return
    if lse.shape != q.shape[:2] or lse.device != q.device:
        raise ShapeError(f"lse {tuple(lse.shape)} on {lse.device} must be {tuple(q.shape[:2])} on {q.device}")
    if lse.dtype not in (torch.float32, torch.float64):
        raise DtypeError(f"lse is {lse.dtype}; it must be float32 or float64")
    if not lse.is_contiguous():
        raise StrideError(f"lse has strides {lse.stride()} and must be contiguous")


def check_scoring(scoring: Scoring, q: torch.Tensor, cache: torch.Tensor) -> None:
    """Check that options are in range, and that there is one sink and one slope per head."""
    whole = isinstance(scoring.window, Integral)
    if not whole or not (scoring.window >= 0 and scoring.softcap >= 0):  # NaN is neither
        given = f"window {scoring.window} (a whole number) and softcap {scoring.softcap}"
        raise OptionError(f"{given} must not be negative; 0 means none")
    check_scales(scoring.k_scale, scoring.v_scale, cache)
    for name, values in (("sinks", scoring.sinks), ("alibi", scoring.alibi)):
        if values is not None and (values.shape != q.shape[1:2] or values.device != q.device):
            raise ShapeError(
                f"{name} {tuple(values.shape)} on {values.device} must hold one number for each of the "
                f"{q.shape[1]} heads, on {q.device}"
            )
        if values is not None:
            check_last_stride(name, values)


def check_scales(k_scale: float, v_scale: float, cache: torch.Tensor) -> None:
    """Check that the scales of an fp8 cache are positive, and that another one has none."""
    if not min(k_scale, v_scale) > 0 or (cache.dtype.itemsize > 1 and not k_scale == v_scale == 1):
        scales = f"k_scale {k_scale} and v_scale {v_scale} must be positive"
        raise OptionError(f"{scales}, and 1 where the cache is not fp8: it is {cache.dtype}")


def check_states(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    """Check that two partial attentions have the same rows, dtypes and devices."""
    if o_a.shape != o_b.shape or lse_a.shape != o_a.shape[:2] or lse_b.shape != lse_a.shape:
        raise ShapeError(
            f"outputs {tuple(o_a.shape)} and {tuple(o_b.shape)} with LSE {tuple(lse_a.shape)} and "
            f"{tuple(lse_b.shape)} must be [tokens, heads, dv] and [tokens, heads] of the same rows"
        )
    check_same("o_a", o_a, "o_b", o_b)
    check_same("lse_a", lse_a, "lse_b", lse_b)


def check_same(first: str, a: torch.Tensor, second: str, b: torch.Tensor) -> None:
    """Check that two tensors have the same dtype and device."""
    if a.dtype != b.dtype:
        raise DtypeError(f"{first} is {a.dtype} and {second} {b.dtype}; they must agree")
    if a.device != b.device:
        raise DeviceError(f"{first} is on {a.device} and {second} on {b.device}; they must agree")


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Check that the last axis is dense: kernels read it in wide loads."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise StrideError(
            f"{name} {tuple(tensor.shape)} has strides {tensor.stride()}; the last one must be 1"
        )


def check_slots(slots: torch.Tensor, tokens: int, cache: torch.Tensor) -> None:
    """Check that there is one slot per token, from -1 (skip) to the last slot of the cache."""
    if slots.shape != (tokens,) or slots.dtype not in INTEGER_DTYPES:
        raise ShapeError(
            f"slot_mapping {tuple(slots.shape)} of {slots.dtype} must be {tokens} integers, one per token"
        )
    slots_held = cache.shape[0] * cache.shape[1]
    if can_read_values(slots) and slots.numel():
        low, high = int(slots.min()), int(slots.max())
        if low < -1 or high >= slots_held:
            raise TableError(f"slots from {low} to {high}; allowed are -1 (skip) to {slots_held - 1}")


def check_values(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cache: torch.Tensor,
    tokens: int,
    most: int,
) -> None:
    """Check that lengths fit the tables, queries (`most` a sequence) the lengths, and tables the cache. Waits for the
    device.
    """
    if not can_read_values(seq_lens) or not seq_lens.numel():
        return
    blocks, block_size = cache.shape[:2]
    capacity, lengths = block_table.shape[1] * block_size, seq_lens.long()
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0:
        raise TableError(f"a sequence of {low} tokens; lengths must not be negative")
    if high > capacity:
        raise TableError(f"a sequence of {high} tokens does not fit a table of {capacity} slots")
    used = torch.arange(block_table.shape[1], device=lengths.device) * block_size < lengths.unsqueeze(1)
    wrong = used & ((block_table < 0) | (block_table >= blocks))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise TableError(
            f"block_table[{row}, {column}] is {int(block_table[row, column])}; the cache has blocks 0 to {blocks - 1}"
        )
    _check_spans(lengths, cu_seqlens_q.long(), tokens, most)


def _check_spans(lengths: torch.Tensor, bounds: torch.Tensor, tokens: int, most: int) -> None:
    queries = bounds.diff()
    wrong = (queries < 0) | (queries > most) | ((queries > lengths) & (lengths > 0))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise TableError(
            f"sequence {row} has {int(queries[row])} queries in cu_seqlens_q and {int(lengths[row])} cached tokens; "
            f"the queries must be the last of the cached tokens, {most} (max_seqlen_q) at most"
        )
    if int(bounds[0]) < 0 or int(bounds[-1]) > tokens:
        raise TableError(f"cu_seqlens_q runs from {int(bounds[0])} to {int(bounds[-1])}; q has {tokens} rows")


def can_read_values(tensor: torch.Tensor) -> bool:
    """Whether the host may read the tensor's values: not while a CUDA graph is being captured."""
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
