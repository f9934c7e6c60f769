"""Small cases for Triton's interpreter, and their check against float64."""

import random

import torch

from paged_kernels import (
    cascade_attention_decode,
    launch_policy,
    paged_attention_decode,
    paged_attention_prefill,
    reference,
)
from paged_kernels.case import TOLERANCE, CaseSpec, build_case, exact_attention, relative_error
from paged_kernels.launch_policy import Room
from paged_kernels.triton import launch
from paged_kernels.triton.decode import Queries, run_decode

FP32 = torch.float32
# multiprocessors, and programs of a decode of bfloat16 heads of 128 that one holds
DEVICES = {
    "a100": (108, 2),
    "a10g": (80, 1),
    "l40s": (142, 1),
    "h100": (132, 3),
    "b200": (148, 3),
    "pro": (188, 1),
}


def cut_short_rows(monkeypatch):
    """Let the launch policy cut rows of a few tiles: many multiprocessors, and parts that cost nothing to start."""
    for name, value in {"SPLIT_TOKENS": 64, "START": 0, "MERGE": 0}.items():
        monkeypatch.setattr(launch_policy, name, value)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 16)


def random_batches(seed):
    """A room and a batch of at most six rows, by device: (room, lengths, window)."""
    draw = random.Random(seed)
    found = {}
    for name, (processors, held) in DEVICES.items():
        room = Room(
            processors, held, draw.choice((5_000, 18_000, 36_000)), draw.choice((1, 2, 8)), 64, 32_768, 2064
        )
        lengths = [
            draw.choice((0, draw.randint(1, 600), draw.randint(1, 40_000))) for _ in range(draw.randint(1, 6))
        ]
        found[name] = room, lengths, draw.choice((0, 0, 100, 4096))
    return found


def spec_of(lengths, queries=(), **options):
    """A small case: float32, 4 query and 2 KV heads of 16."""
    small = {"heads": 4, "kv_heads": 2, "dk": 16, "dtype": FP32}
    return CaseSpec(tuple(lengths), tuple(queries), **(small | options))


def random_spec(seed):
    """A batch that nobody chose: a few queries a row, empty rows, any block size, group, width and options."""
    draw = random.Random(seed)
    group = draw.choice((1, 1, 2, 3, 5, 9))
    most = max(2, 64 // group)  # 64 queries a row where they take few programs
    queries = [draw.choice((0, 1, draw.randint(2, most))) for _ in range(draw.randint(1, 3))]
    queries = [*queries, draw.randint(2, most)] if draw.random() < 0.8 else [1] * len(queries)
    lengths = [
        count and count + draw.choice((0, draw.randint(0, 70), draw.randint(0, 200))) for count in queries
    ]
    kv_heads, width = draw.choice((1, 2)), draw.choice((16, 32, 64, 80))
    return spec_of(
        lengths, queries,
        heads=kv_heads * group, kv_heads=kv_heads, dk=width, dv=draw.choice((width, 48)),
        block_size=draw.choice((1, 3, 8, 16, 48, 64, 128)), layout=draw.choice(("NHD", "HND")),
        dtype=draw.choice((FP32, FP32, torch.bfloat16, torch.float16)),
        window=draw.choice((0, 0, 1, draw.randint(2, 200))), softcap=draw.choice((0.0, 2.0)),
        sinks=draw.random() < 0.3, alibi=draw.random() < 0.3,
    )  # fmt: skip


def options_of(case):
    """The scoring of a case as keyword arguments."""
    return case.scoring._asdict()


def attend(case, *, num_splits=None, workspace=None, lse=None, prefill_kernel="plain"):
    """The case through the Triton kernels. `prefill_kernel` "auto" takes the decode kernel for a few queries a row."""
    common = options_of(case) | {"lse": lse, "workspace": workspace, "backend": "triton"}
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens)
    if case.decode:
        return paged_attention_decode(*inputs, num_splits=num_splits, **common)
    return paged_attention_prefill(*inputs, case.cu_seqlens_q, prefill_kernel=prefill_kernel, **common)


def check(spec, **arguments):
    """Output and LSE of the kernels against float64, under poison and garbage."""
    case = build_case(spec)
    lse = torch.full(case.q.shape[:2], float("nan"))
    found = attend(case, lse=lse, **arguments)
    exact, sums = exact_attention(case)
    assert relative_error(found, exact) < TOLERANCE[spec.dtype]
    assert torch.allclose(lse.double(), sums, atol=1e-5 if spec.dtype == FP32 else 2e-2)


LATENT_WIDTHS = [(32, 8), (64, 16), (128, 32)]  # of a latent vector and of a rotary key


def latent_case(lengths, queries, heads, widths, *, window=0, block_size=8, dtype=FP32):
    """Inputs of an absorbed latent decode (q, both caches, table, lengths, scoring), its bounds, and the exact result.

    Slots that nobody wrote are NaN, and the tables end in garbage.
    """
    rank, rope = widths
    wide = build_case(
        spec_of(lengths, queries, heads=heads, kv_heads=1, dk=rank + rope, dv=rank, window=window,
                block_size=block_size, dtype=dtype)
    )  # fmt: skip
    latents, rotary = (part.contiguous() for part in wide.key_cache.split(widths, dim=3))
    exact = reference.paged_attention(
        wide.q.double(), wide.key_cache.double(), latents.double(), wide.block_table, wide.seq_lens,
        wide.cu_seqlens_q, wide.scoring,
    )  # fmt: skip
    return (wide.q, latents, rotary, wide.block_table, wide.seq_lens, wide.scoring), wide.cu_seqlens_q, exact


def check_latent(lengths, queries, heads, widths, *, num_splits=None, **options):
    """Output and LSE of the decode kernel over latent vectors against float64."""
    inputs, bounds, (exact, sums) = latent_case(lengths, queries, heads, widths, **options)
    q, out = inputs[0], inputs[0].new_full((*inputs[0].shape[:2], widths[0]), float("nan"))
    lse = torch.full(q.shape[:2], float("nan"))
    several = Queries(bounds, max(queries)) if queries else None
    run_decode(*inputs, out, lse, num_splits, queries=several, latent=True)
    assert relative_error(out, exact) < TOLERANCE[q.dtype]
    assert torch.allclose(lse.double(), sums, atol=1e-5 if q.dtype == FP32 else 2e-2)


def over_shared(case, shared, *, backend="triton", **more):
    """A cascade over the case's first `shared` tokens."""
    several = {} if case.decode else {"cu_seqlens_q": case.cu_seqlens_q}
    inputs = (case.q, case.key_cache, case.value_cache, *halves(case, shared))
    return cascade_attention_decode(*inputs, **several, **options_of(case), backend=backend, **more)


def halves(case, shared):
    """Tables and lengths of what the rows share and of what is their own."""
    blocks = shared // case.block_size
    lens = torch.tensor([shared], dtype=torch.int32)
    return case.block_table[:1, :blocks], lens, case.block_table[:, blocks:], case.seq_lens - shared
