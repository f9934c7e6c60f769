"""The compiled kernels, run from their PTX without a GPU, against float64.

By day a decode with its merge and a store run. By night every kind of kernel, every case of Triton's
interpreter again, and the parser over every kernel of the resource gate.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need pagetwin[gpu]")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 keeps Triton from compiling", allow_module_level=True)

from interpreted_cases import check_latent, cut_short_rows, over_shared
from ptx.interpreter import Machine
from ptx.kernel_cases import TIGHT, PoisonedWorkspace, assert_exact, hostile, run_compiled
from ptx.program import parse
from ptx.triton_launch import interpreted_launches

from paged_kernels import (
    copy_blocks,
    merge_attn_states,
    reshape_and_cache,
)
from paged_kernels.case import exact_attention, relative_error

TESTS = Path(__file__).resolve().parents[1]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF = float("nan"), float("inf")
SPLITS = (1, 3, None)


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch):
    cut_short_rows(monkeypatch)  # so that `None` cuts short rows into parts


def test_a_split_decode_of_compiled_code_equals_float64():
    case = hostile((1, 0, 64, 150))  # the longest is last: behind its end the table ends
    out, lse, launches = run_compiled(case, num_splits=3)
    assert_exact(case, out, lse)
    assert not out[1].any()
    assert launches.reached("decode_kernel") > 0.99
    assert launches.reached("combine_kernel") > 0.95


def test_compiled_code_stores_rows_bit_for_bit():
    caches = [torch.full((4, 16, 2, 64), NAN, dtype=BF16) for _ in range(2)]
    rows = torch.randn(3, 2, 64).bfloat16()
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        cache[2, 8], cache[0, 9] = rows[0], rows[2]
    with interpreted_launches():
        reshape_and_cache(rows, rows, *caches, torch.tensor([40, -1, 9]), backend="triton")
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("dk", [64, 128])
@pytest.mark.parametrize("block_size", [16, 32])
def test_decode(dtype, num_splits, dk, block_size):
    case = hostile((270, 40), dtype=dtype, dk=dk, block_size=block_size)
    assert_exact(case, *run_compiled(case, num_splits=num_splits)[:2])


@pytest.mark.nightly
@pytest.mark.parametrize("num_splits", SPLITS)
def test_what_nothing_has_written_does_not_matter(num_splits):
    case = hostile((150, 64, 0, 1))
    one, other = (run_compiled(case, num_splits=num_splits, seed=seed) for seed in (0, 1))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.nightly
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("queries", [(), (9, 40)])
def test_8_bit_caches(kv_dtype, queries):
    """On sm_89, the first architecture that converts 8-bit floats."""
    case = hostile((150, 40), queries, kv_dtype=kv_dtype, dk=128)
    assert_exact(case, *run_compiled(case, capability=89, num_splits=None if queries else 3)[:2])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 2, "kv_heads": 2},
        {"heads": 6, "kv_heads": 2},
        {"heads": 32, "kv_heads": 1},
        {"heads": 128, "kv_heads": 1},
        {"dk": 80, "heads": 4},
        {"dk": 96, "dv": 64},
        {"dk": 256},
        {"block_size": 1},
        {"block_size": 48},
        {"block_size": 64},
        {"layout": "HND"},
        {"window": 20},
        {"window": 70, "alibi": True},
        {"softcap": 2.0, "sinks": True},
        {"softcap": 50.0},
        {"softcap": 300.0, "dtype": FP32},
        {"sinks": True, "window": 20, "softcap": 2.0, "alibi": True},
    ],
)
@pytest.mark.parametrize("queries", [(), (20, 33)])
def test_shapes_and_options(options, queries):
    case = hostile((150, 40), queries, **options)
    assert_exact(case, *run_compiled(case, num_splits=None if queries else 3)[:2])


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dk", [64, 128])
def test_prefill(dtype, dk):
    case = hostile((150, 40, 1), (70, 40, 1), dtype=dtype, dk=dk)
    out, lse, launches = run_compiled(case)
    assert_exact(case, out, lse)
    assert launches.reached("prefill_kernel") > 0.99


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 6, "kv_heads": 2},
        {"block_size": 48},
        {"dk": 128},
        {"window": 70},
        {"sinks": True, "window": 90, "softcap": 2.0, "alibi": True},
    ],
)
@pytest.mark.parametrize(("lengths", "queries"), [((250, 70, 0), (5, 2, 0)), ((300, 40), (33, 1))])
def test_a_few_queries_a_row(lengths, queries, options):
    case = hostile(lengths, queries, **options)
    out, lse, launches = run_compiled(case, prefill_kernel="auto")
    assert_exact(case, out, lse)
    assert launches.reached("decode_kernel") > 0.8


@pytest.mark.nightly
@pytest.mark.parametrize("queries", [(1, 1), (5, 2)])
@pytest.mark.parametrize(
    ("widths", "block_size"), [((64, 16), 16), ((512, 64), 16), ((512, 64), 1), ((512, 64), 48)]
)
def test_latent_vectors(queries, widths, block_size):
    with interpreted_launches() as launches:
        check_latent((200, 70), queries, 16, widths, block_size=block_size, dtype=BF16)
    assert launches.reached("decode_kernel") > 0.85


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"sinks": True, "window": 90, "softcap": 2.0, "alibi": True}])
@pytest.mark.parametrize("queries", [(), (5, 3, 1)])
def test_cascade(queries, options):
    # of one query each, three rows leave much of the prefix's tile empty
    rows = (200, 150, 129) if queries else (200, 150, 129) * 7
    case = hostile(rows, queries, shared_tokens=128, **options)
    with interpreted_launches() as launches:
        found = over_shared(case, 128, workspace=PoisonedWorkspace())
    assert relative_error(found, exact_attention(case)[0]) < TIGHT[BF16]
    assert launches.reached("prefix_kernel") > 0.99


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["none", "a", "b", "both"])
def test_merge_of_empty_sides(side):
    parts, sums = torch.randn(2, 3, 8, 64).bfloat16(), torch.randn(2, 3, 8)
    for index, name in enumerate("ab"):
        if side in (name, "both"):
            parts[index, 1], sums[index, 1] = NAN, -INF
    with interpreted_launches():
        out, lse = merge_attn_states(parts[0], sums[0], parts[1], sums[1], backend="triton")
    wide = parts.double()
    exact, exact_lse = merge_attn_states(
        wide[0], sums[0].double(), wide[1], sums[1].double(), backend="torch"
    )
    assert relative_error(out, exact) < TIGHT[BF16]
    assert torch.allclose(lse.double(), exact_lse, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("pairs", [[[1, 2], [3, 4]], [[1, 2], [2, 1], [3, 4]]])
def test_copies_are_bit_for_bit(pairs):
    keys, values = torch.randn(2, 2, 5, 16, 2, 64).bfloat16().unbind(0)
    expected = [stack.clone() for stack in (keys, values)]
    source, destination = torch.tensor(pairs).unbind(1)
    for stack in expected:
        stack[:, destination] = stack[:, source]
    with interpreted_launches():
        copy_blocks(keys, values, torch.tensor(pairs), backend="triton")
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@pytest.mark.nightly
@pytest.mark.parametrize("which", ["key_cache", "value_cache"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("num_splits", SPLITS)
def test_a_strange_number_reaches_the_output(which, value, num_splits):
    case = hostile((300, 40), block_size=16)
    getattr(case, which)[case.block_table[0, 7], 5, 0, 3] = value  # token 117, KV head 0
    exact, sums = exact_attention(case)
    out, lse, _ = run_compiled(case, num_splits=num_splits)
    assert not exact.isfinite().all()
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.allclose(out.double(), exact, atol=2e-2, equal_nan=True)
    assert torch.equal(lse.isfinite(), sums.isfinite())  # an infinite LSE may become NaN on the way


@pytest.mark.nightly
@pytest.mark.parametrize("num_splits", [1, 4, None])
def test_a_read_behind_the_end_shows(num_splits):
    case = hostile((300, 40), block_size=16)
    assert run_compiled(case, num_splits=num_splits)[0].isfinite().all()
    case.seq_lens[0] += 1
    assert run_compiled(case, num_splits=num_splits)[0][0].isnan().all()


@pytest.mark.nightly
@pytest.mark.parametrize("num_splits", SPLITS)
def test_blocks_that_a_window_has_freed_are_not_read(num_splits):
    case = hostile((300,), block_size=16, window=40)
    right = run_compiled(case, num_splits=num_splits)[0]
    freed = case.block_table[0, : (300 - 40) // 16].long()
    case.key_cache[freed] = NAN
    case.value_cache[freed] = NAN
    assert torch.equal(run_compiled(case, num_splits=num_splits)[0], right)


@pytest.mark.nightly
@pytest.mark.parametrize("lengths", [(192, 128, 64), (193, 129, 65), (191, 127, 63), (0,), (1, 0, 1)])
@pytest.mark.parametrize("num_splits", SPLITS)
def test_lengths_on_the_edges_of_splits_and_tiles(lengths, num_splits):
    case = hostile(lengths)
    out, lse, _ = run_compiled(case, num_splits=num_splits)
    exact, sums = exact_attention(case)
    assert torch.allclose(out.double(), exact, atol=1e-2)
    assert torch.allclose(lse.double(), sums, atol=1e-5)
    assert not out[case.seq_lens == 0].any()


@pytest.mark.nightly
@pytest.mark.parametrize("queries", [(), (20, 33)])
def test_tables_of_int64(queries):
    case = hostile((150, 40), queries)
    wide = {name: getattr(case, name).long() for name in ("block_table", "seq_lens", "cu_seqlens_q")}
    assert torch.equal(run_compiled(replace(case, **wide))[0], run_compiled(case)[0])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["interpreted_checks.py", "interpreted_extremes.py"])
def test_every_case_of_tritons_interpreter_holds_for_compiled_code(name, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "ptx.pytest_plugin"]
    paths = [*(str(TESTS / folder) for folder in ("", "support")), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*command, str(TESTS / "paged_kernels" / name)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 89])
def test_every_instruction_of_every_kernel_of_the_resource_gate_is_known(capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from paged_kernels.triton.configurations import kernel_configurations

    chosen = [case for case in kernel_configurations() if capability in case.capabilities]
    assert len(chosen) > 10
    for case in chosen:
        source = ASTSource(
            fn=case.kernel, signature=dict(case.signature), constexprs=case.fixed, attrs=case.facts
        )
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=case.options)
        Machine(parse(kernel.asm["ptx"]))  # refuses what it does not know, by name
