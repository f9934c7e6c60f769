"""The kernels and the engine on a CUDA device, at full size and in all dtypes; skipped where there is none.

Each configuration is compiled once, which takes a second or two: what is crossed with what is chosen for that.
"""

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
from paged_kernels import (  # noqa: E402 - nothing of it is needed where torch is missing
    Workspace,
    cascade_attention_decode,
    copy_blocks,
    merge_attn_states,
    paged_attention_decode,
    paged_attention_prefill,
    reshape_and_cache,
    swap_blocks,
)
from paged_kernels.case import (  # noqa: E402
    CaseSpec,
    build_case,
    exact_attention,
    exact_output,
    relative_error,
    verify,
)
from paged_kernels.providers import UnsupportedCaseError, find_providers  # noqa: E402

DEVICE = torch.device("cuda")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [(FP16, None), (BF16, None), (FP32, None), (BF16, E4M3), (BF16, E5M2), (FP16, E4M3)]
OPTIONS = [
    {"window": 100},
    {"alibi": True, "softcap": 30.0},
    {"sinks": True},
    {"window": 1000, "softcap": 2.0, "sinks": True, "alibi": True},
]
QUERIES = (0, 1, 15, 16, 1, 400, 1000)


def lengths_around(block_size):
    """0, 1, block - 1, block, block + 1, and long ones; one much longer than all others."""
    return (0, 1, max(1, block_size - 1), block_size, block_size + 1, 1000, 20_000)


def attend(case, backend="triton", **arguments):
    """The case by its own call."""
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens)
    common = case.scoring._asdict() | {"backend": backend} | arguments
    if case.decode:
        return paged_attention_decode(*inputs, **common)
    return paged_attention_prefill(*inputs, case.cu_seqlens_q, **common)


def check(spec, **arguments):
    """Output and LSE against float64."""
    case = build_case(spec, device=DEVICE)
    lse = torch.full(case.q.shape[:2], float("nan"), device=DEVICE)
    found = attend(case, lse=lse, **arguments)
    exact, sums = exact_attention(case)
    verify(found, exact, "ours", case)
    assert torch.allclose(lse.double(), sums, atol=1e-4 if spec.dtype == FP32 else 2e-2)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 128, 256])
def test_decode_at_any_block_size(block_size):
    check(CaseSpec(lengths_around(block_size), block_size=block_size))


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("queries", [(), QUERIES])
def test_every_dtype(dtype, kv_dtype, queries):
    lengths = lengths_around(16) if not queries else (0, 1, 15, 16, 17, 1000, 3000)
    check(CaseSpec(lengths, queries, dtype=dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("dk", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("queries", [(), (1, 300)])
def test_every_head_dim(dk, queries):
    check(CaseSpec((33, 2000), queries, dk=dk))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("heads", [(8, 8), (6, 2), (7, 1), (16, 2), (32, 2)])
def test_every_group(dtype, heads):
    check(CaseSpec((33, 2000), heads=heads[0], kv_heads=heads[1], dtype=dtype))
    check(CaseSpec((33, 600), (33, 200), heads=heads[0], kv_heads=heads[1], dtype=dtype))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("queries", [(), (1, 300)])
def test_every_option(options, queries):
    check(CaseSpec((33, 2000), queries, **options))


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
def test_prefill_at_any_block_size(block_size):
    check(CaseSpec((1, 300, 2000), (1, 300, 129), block_size=block_size))


@pytest.mark.parametrize("dk", [64, 128])
@pytest.mark.parametrize("block_size", [1, 16, 48, 256])
@pytest.mark.parametrize("heads", [(8, 8), (6, 2), (32, 8), (32, 2)])
def test_the_prefill_kernel_for_hopper(dk, block_size, heads):
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("needs compute capability 9.0 (H100, H200)")
    sizes = {"block_size": block_size, "heads": heads[0], "kv_heads": heads[1], "dk": dk}
    check(CaseSpec((0, 1, 300, 2000, 5000), (0, 1, 300, 129, 700), **sizes), prefill_kernel="hopper")
    check(CaseSpec((300, 129), (300, 40), dtype=FP16, **sizes), prefill_kernel="hopper")


def test_the_prefill_kernel_for_hopper_gives_the_same_output_again():
    """A race between its warp groups would show as a difference."""
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("needs compute capability 9.0 (H100, H200)")
    case = build_case(CaseSpec((3000,) * 8, (1500,) * 8, heads=32, kv_heads=8), device=DEVICE)
    first = attend(case, prefill_kernel="hopper")
    for _ in range(20):
        assert torch.equal(attend(case, prefill_kernel="hopper"), first)


@pytest.mark.parametrize("queries", [(), (40, 129)])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_heads_before_slots_in_memory(queries, kv_dtype):
    check(CaseSpec((40, 2000), queries, layout="HND", kv_dtype=kv_dtype))


@pytest.mark.parametrize("num_splits", [1, 2, 7, 64])
def test_any_number_of_parts(num_splits):
    check(CaseSpec((0, 1, 300, 5000)), num_splits=num_splits)


def test_many_ragged_rows():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 700, (5000,), generator=generator).tolist()
    check(CaseSpec(tuple(lengths), heads=4, kv_heads=1, dk=64))


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("options", [{}, {"window": 1500, "alibi": True}, {"sinks": True}])
def test_a_cascade_equals_the_whole(options, kv_dtype):
    case = build_case(
        CaseSpec((1025, 2000, 1100) * 12, shared_tokens=1024, kv_dtype=kv_dtype, **options), device=DEVICE
    )
    lse = torch.empty(case.q.shape[:2], device=DEVICE)
    lens = torch.tensor([1024], dtype=torch.int32, device=DEVICE)
    halves = (case.block_table[:1, :64], lens, case.block_table[:, 64:], case.seq_lens - 1024)
    caches = (case.q, case.key_cache, case.value_cache)
    found = cascade_attention_decode(*caches, *halves, **case.scoring._asdict(), lse=lse, backend="triton")
    exact, sums = exact_attention(case)
    verify(found, exact, "cascade", case)
    assert torch.allclose(lse.double(), sums, atol=2e-2)


def captured(run):
    """A CUDA graph of `run`, warmed up first."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def test_a_captured_decode_follows_lengths_and_tables_that_change():
    first, second = (
        build_case(CaseSpec(lengths, heads=8, kv_heads=2), device=DEVICE, seed=seed)
        for seed, lengths in enumerate([(5000, 33, 200, 1), (70, 4000, 0, 3000)])
    )
    tables = torch.zeros(4, 512, dtype=torch.int32, device=DEVICE)
    tables[:, : first.block_table.shape[1]] = first.block_table
    keys, values = (
        torch.full((700, *cache.shape[1:]), float("nan"), dtype=BF16, device=DEVICE)
        for cache in (first.key_cache, first.value_cache)
    )
    keys[: len(first.key_cache)], values[: len(first.value_cache)] = first.key_cache, first.value_cache
    q, lengths, out = first.q.clone(), first.seq_lens.clone(), torch.empty_like(first.q)
    workspace = Workspace()
    options = first.scoring._asdict() | {"out": out, "workspace": workspace, "backend": "triton"}

    def run():
        paged_attention_decode(q, keys, values, tables, lengths, **options)
        workspace.freeze()

    graph = captured(run)
    for case in (first, second):
        q.copy_(case.q)
        lengths.copy_(case.seq_lens)
        tables[:, : case.block_table.shape[1]] = case.block_table
        keys[: len(case.key_cache)], values[: len(case.value_cache)] = case.key_cache, case.value_cache
        out.fill_(float("nan"))
        graph.replay()
        verify(out, exact_output(case), "the replayed graph", case)


def test_other_lengths_rows_and_windows_compile_nothing():
    from triton import knobs

    compiled = []
    attend(build_case(CaseSpec((300, 40), window=64), device=DEVICE))
    knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(kwargs.get("repr"))
    try:
        for lengths, window in [((16, 1), 1), ((5000, 7, 12), 17), ((48,) * 33, 256)]:
            attend(build_case(CaseSpec(lengths, window=window), device=DEVICE))
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3, E5M2])
def test_tokens_are_written_as_torch_writes_them(layout, kv_dtype):
    def caches():
        shape = (40, 16, 8, 128) if layout == "NHD" else (40, 8, 16, 128)
        made = [torch.zeros(shape, dtype=kv_dtype, device=DEVICE) for _ in range(2)]
        return made if layout == "NHD" else [cache.transpose(1, 2) for cache in made]

    key, value = (100 * torch.randn(100, 8, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    slots = torch.randperm(640, device=DEVICE)[:100]
    slots[7] = -1
    found, expected = caches(), caches()
    scales = {"k_scale": 0.5, "v_scale": 2.0} if kv_dtype != BF16 else {}
    reshape_and_cache(key, value, *found, slots, **scales, backend="triton")
    reshape_and_cache(key, value, *expected, slots, **scales, backend="torch")
    for one, other in zip(found, expected, strict=True):
        assert int((one.float() != other.float()).sum()) == 0


@pytest.mark.parametrize("pairs", [[(1, 2), (2, 1), (3, 4)], [(1, 7), (2, 8)]])
def test_copies_of_all_layers_are_simultaneous(pairs):
    keys, values = torch.randn(2, 4, 10, 16, 8, 128, device=DEVICE, dtype=BF16).unbind(0)
    source, destination = torch.tensor(pairs).unbind(1)
    expected = [stack.clone() for stack in (keys, values)]
    for stack, old in zip(expected, (keys, values), strict=True):
        stack[:, destination] = old[:, source]
    copy_blocks(keys, values, torch.tensor(pairs), backend="triton")
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_swaps_to_pinned_memory_and_back_keep_every_block():
    device = torch.randn(4, 30, 16, 8, 128, device=DEVICE, dtype=BF16)
    host = torch.zeros(4, 50, 16, 8, 128, dtype=BF16, pin_memory=True)
    pairs = [(3, 10), (4, 11), (5, 12), (20, 1)]
    kept = device.clone()
    swap_blocks(device, host, pairs)
    device.zero_()
    swap_blocks(host, device, [(there, here) for here, there in pairs])
    for here, _ in pairs:
        assert torch.equal(device[:, here], kept[:, here])


def test_partial_attentions_merge():
    a, b = (torch.randn(500, 32, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    lse_a, lse_b = (torch.randn(500, 32, device=DEVICE) for _ in range(2))
    lse_a[0] = lse_b[:2] = float("-inf")
    found, sums = merge_attn_states(a, lse_a, b, lse_b, backend="triton")
    wide = [value.double() for value in (a, lse_a, b, lse_b)]
    exact, exact_sums = merge_attn_states(*wide, backend="torch")
    assert relative_error(found, exact) < 2**-8
    assert torch.allclose(sums.double(), exact_sums, atol=1e-5)


@pytest.mark.parametrize("name", list(find_providers()))
def test_every_provider_that_is_here_computes_the_same(name):
    provider = find_providers()[name]
    reason = provider.available(DEVICE)
    if reason is not None:
        pytest.skip(f"{name} {reason}")
    served = 0
    for spec in (
        CaseSpec((512,) * 4),
        CaseSpec((1024, 1100), shared_tokens=1024),
        CaseSpec((700, 512), (700, 200)),
        CaseSpec((600, 50), block_size=256),
    ):
        case = build_case(spec, device=DEVICE)
        try:
            run = provider.prepare(case)
        except UnsupportedCaseError:
            continue
        verify(run(), exact_output(case), name, case)
        served += 1
    assert served


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_torch_path_runs_there_too(dtype):
    for queries in ((), (1, 1, 200)):
        case = build_case(CaseSpec((33, 40, 700), queries, dtype=dtype), device=DEVICE)
        verify(attend(case, backend="torch"), exact_output(case), "torch", case)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_engine_equals_generate(backend):
    from engine.core.options import SchedulerLimits
    from engine.runtime.llm import LLM
    from engine.runtime.models.load import load_model, original_model
    from engine.runtime.models.spec import ModelSpec
    from engine.runtime.params import SamplingParams

    loaded = load_model(ModelSpec(layers=2, vocab=512, initializer_range=0.2), device="cuda")
    prompts = [list(range(3, 40)), [7, 8], list(range(100, 170))]
    limits = SchedulerLimits(24, 8, max_model_len=128)
    llm = LLM(loaded, backend=backend, pool_tokens=512, limits=limits, audit="full")
    answers = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0))
    found = [list(done.outputs[0].token_ids) for done in answers]
    with original_model(loaded) as model:
        expected = [
            model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=12, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in prompts
        ]
    assert found == expected
