"""The Triton kernels in Triton's interpreter, run by `test_triton.py` in a process of its own.

TRITON_INTERPRET is read when a kernel is defined, so this file is not collected with the others. Shapes are tiny: a
tile costs about 10 ms here.
"""

import pytest
import torch

from paged_kernels import copy_blocks, paged_attention_decode, paged_attention_prefill, reshape_and_cache

SCALE = 0.3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
OPTIONS = [{}, {"window": 5}, {"softcap": 2.0}, {"sinks": torch.linspace(-1, 3, 8)}]
pytestmark = pytest.mark.filterwarnings("error:invalid value")


def error_of(case, dtype=torch.float32, *, num_splits=None, **options):
    """Relative error of the Triton kernels against float64, for a decode batch where every row has one query."""
    decode = int(case.cu_seqlens_q.diff().max()) == 1
    q, keys, values, table, lengths, bounds = case.args(dtype)
    narrow = (table.int(), lengths.int())
    lse = torch.full(q.shape[:2], float("nan"))
    common = {"scale": SCALE, "lse": lse, "backend": "triton", **options}
    if decode:
        out = paged_attention_decode(q, keys, values, *narrow, num_splits=num_splits, **common)
    else:
        out = paged_attention_prefill(q, keys, values, *narrow, bounds.int(), **common)
    wide = [value.double() for value in (q, keys, values)]
    sums = torch.empty(q.shape[:2], dtype=torch.float64)
    options = {"scale": SCALE, "lse": sums, "backend": "torch_ref", **options}
    exact = paged_attention_prefill(*wide, table, lengths, bounds, **options)
    assert torch.allclose(lse.double(), sums, atol=1e-5)
    return float((out.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("block_size", [1, 8, 16, 64, 128])
def test_decode_at_any_block_size(make_case, block_size):
    case = make_case([1, block_size, 90], [1] * 3, block_size, (4, 2))
    assert error_of(case, num_splits=2) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("options", OPTIONS)
def test_decode_options(make_case, dtype, options):
    assert error_of(make_case([33, 90], [1, 1], 8), dtype, num_splits=2, **options) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (7, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (80, 48)])
def test_decode_of_any_group_and_width(make_case, heads, dims):
    case = make_case([20, 65], [1, 1], 16, heads, dims)
    assert error_of(case, num_splits=1) < TOLERANCE[torch.float32]


def test_more_splits_than_tiles_and_an_automatic_number(make_case):
    case = make_case([20, 65], [1, 1], 16, (2, 1))
    assert error_of(case, num_splits=7) < TOLERANCE[torch.float32]
    assert error_of(case) < TOLERANCE[torch.float32]


def test_a_row_of_length_zero_gives_zeros_and_minus_infinity(make_case):
    case = make_case([12, 5], [1, 1], 8, (2, 1))
    case.seq_lens[1] = 0
    q, keys, values, table, lengths, _ = case.args(torch.float32)
    lse = torch.empty(2, 2)
    out = paged_attention_decode(
        q, keys, values, table.int(), lengths.int(), scale=SCALE, lse=lse, backend="triton", num_splits=2
    )
    assert not out[1].any()
    assert lse[1].eq(float("-inf")).all()
    assert out[0].isfinite().all()


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_prefill_chunks_see_their_prefix(make_case, block_size):
    case = make_case([40, 70, 9], [40, 5, 9], block_size, (4, 2))
    assert error_of(case) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_options(make_case, dtype, options):
    assert error_of(make_case([20, 70], [20, 3], 8), dtype, **options) < TOLERANCE[dtype]


def test_prefill_of_a_group_that_is_no_power_of_two(make_case):
    assert error_of(make_case([20, 33], [20, 7], 8, (3, 1), (24, 16))) < TOLERANCE[torch.float32]


def test_tokens_land_in_their_slots_and_minus_one_is_skipped():
    cache = [torch.full((4, 4, 2, 3), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    key = torch.randn(2, 3, 3).bfloat16().transpose(0, 1)
    reshape_and_cache(key, key, *cache, torch.tensor([9, -1, 4]), backend="triton")
    assert torch.equal(cache[0][2, 1], key[0])
    assert torch.equal(cache[1][1, 0], key[2])
    assert int((~cache[0][..., 0, 0].isnan()).sum()) == 2


def test_copies_are_simultaneous_over_a_stack_of_layers():
    stack = torch.randn(2, 5, 4, 2, 3)
    expected = stack.clone()
    expected[:, [2, 1, 4]] = stack[:, [1, 2, 3]]
    copy_blocks(stack, stack.clone(), torch.tensor([[1, 2], [2, 1], [3, 4]]), backend="triton")
    assert torch.equal(stack, expected)


def test_the_engine_gives_the_same_tokens_on_both_backends():
    from engine.runtime.llm import LLM, SamplingParams
    from engine.runtime.model import ModelSpec, load_model

    shape = {
        "layers": 1,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "intermediate": 32,
        "vocab": 64,
    }
    loaded = load_model(ModelSpec(**shape, max_position=64))
    prompts = [[5, 9, 2, 7], [8], list(range(3, 20))]
    answers = [
        LLM(loaded, backend=backend, pool_tokens=128, block_size=8, audit="full").generate(
            prompts, SamplingParams(3)
        )
        for backend in ("torch", "triton")
    ]
    assert answers[0] == answers[1]
