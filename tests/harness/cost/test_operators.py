"""Timed operators of a GPU as a cost source: the file, the rows that cannot be, and the prices."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sim_cases import replay, request
from tiers import cases

from harness.config.errors import ConfigError
from harness.cost.model_shape import ModelShape
from harness.cost.operators import OperatorCost, read_operators
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.replay.cost_model import price_table
from harness.replay.features import AT, FEATURES

LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 2)
H200 = DeviceShape("h200", 4.8e12, 989e12, 4e-4, 8e-6, attention_overhead_s=1e-5, row_overhead_s=2e-7)
HEAD = "device,op,dtype,rows,tokens,context,heads,kv_heads,head_dim,m,n,k,us\n"
MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
ROWS, KV, TOKENS, SAMPLED, CHUNKS, CHUNK_TOKENS, CHUNK_KV, WORK = [
    AT.decode_rows,
    AT.decode_kv,
    AT.tokens,
    AT.sampled_rows,
    AT.prefill_rows,
    AT.prefill_tokens,
    AT.prefill_kv,
    AT.prefill_work,
]


def decode_us(rows: int, context: int) -> float:
    """Seconds as published tables have them: a floor, a time per row, bytes over 0.92 of the bandwidth."""
    return 9.0 + 0.2 * rows + rows * context * 4096 / 4.4e6


def table(folder: Path, *more: str, products: bool = False) -> Path:
    lines = [
        f"h200,decode,bf16,{rows},,{context},32,8,128,,,,{decode_us(rows, context)}"
        for rows in (1, 2, 4, 8, 16, 32, 64, 128)
        for context in (16, 64, 256, 1024, 4096, 16384)
    ]
    lines += [
        f"h200,prefill,bf16,,{tokens},{context},32,8,128,,,,{10 + 4 * 4096 * tokens * context / 450e6}"
        for tokens in (16, 64, 256, 512)
        for context in (512, 1024, 4096)
    ]
    if products:
        lines += [
            f"h200,gemm,bf16,,,,,,,{m},{n},{k},{2 + n * k * 2 / 4e6 + 2 * m * n * k / 500e6}"
            for n, k in MATRICES
            for m in (1, 8, 64, 512)
        ]
    file = folder / "operators.csv"
    file.write_text(HEAD + "\n".join([*lines, *more]) + "\n")
    return file


def cost_of(file: Path) -> OperatorCost:
    return OperatorCost(RooflineCost(LLAMA_8B, H200), read_operators(str(file), H200))


def test_a_timed_decode_costs_its_time_in_every_layer(tmp_path: Path) -> None:
    features = np.zeros((1, len(FEATURES)))
    features[0, [ROWS, KV, TOKENS]] = 16, 16 * 4096, 16
    attention = price_table(cost_of(table(tmp_path)), features)[1][0]
    assert attention == pytest.approx(32 * decode_us(16, 4096) * 1e-6, rel=1e-9)


def test_a_timed_chunk_costs_its_time_in_every_layer(tmp_path: Path) -> None:
    features = np.zeros((1, len(FEATURES)))
    features[0, [CHUNKS, CHUNK_TOKENS, CHUNK_KV, TOKENS]] = 1, 256, 1024, 256
    attention = price_table(cost_of(table(tmp_path)), features)[1][0]
    assert attention == pytest.approx(32 * (10 + 4 * 4096 * 256 * 1024 / 450e6) * 1e-6, rel=1e-9)


@cases(("rows", "queries"), [(1, 5), (16, 4), (3, 64)], day=1)
def test_a_few_queries_a_row_read_their_keys_as_decodes_do(tmp_path: Path, rows: int, queries: int) -> None:
    """The timed prefill at 16 tokens, by a kernel that does not split the keys, is no price of drafts."""
    features = np.zeros((1, len(FEATURES)))
    features[0, [CHUNKS, CHUNK_TOKENS, CHUNK_KV, TOKENS]] = rows, rows * queries, rows * 4096, rows * queries
    attention = price_table(cost_of(table(tmp_path)), features)[1][0]
    assert attention == pytest.approx(32 * decode_us(rows, 4096) * 1e-6, rel=0.01)


def test_a_few_queries_are_no_cheaper_than_their_products(tmp_path: Path) -> None:
    device = replace(H200, flops=H200.flops / 100)
    cost = OperatorCost(RooflineCost(LLAMA_8B, device), read_operators(str(table(tmp_path)), H200))
    features = np.zeros((1, len(FEATURES)))
    features[0, [CHUNKS, CHUNK_TOKENS, CHUNK_KV, TOKENS, WORK]] = 1, 64, 4096, 64, 64 * 4064
    plain = RooflineCost(LLAMA_8B, device)
    least = plain.parts(features.T).prompts[0]
    assert price_table(cost, features)[1][0] == pytest.approx(least, rel=1e-9)
    assert least > 32 * decode_us(1, 4096) * 1e-6


def test_a_chunk_counts_as_short_where_the_decode_kernel_reads_it() -> None:
    from harness.cost.grid import SHORT_QUERIES
    from paged_kernels import operations

    assert SHORT_QUERIES == operations.SHORT_QUERIES


def test_dense_layers_come_from_the_table_where_every_matrix_was_timed(tmp_path: Path) -> None:
    cost = cost_of(table(tmp_path, products=True))
    features = np.zeros((1, len(FEATURES)))
    features[0, [ROWS, KV, TOKENS, SAMPLED]] = 8, 8 * 256, 8, 8
    seconds, attention = price_table(cost, features)
    layer = sum(2 + n * k * 2 / 4e6 + 2 * 8 * n * k / 500e6 for n, k in MATRICES[:4])
    output = 2 + 128256 * 4096 * 2 / 4e6 + 2 * 8 * 128256 * 4096 / 500e6
    fixed = 4e-4 + 32 * 8e-6
    assert seconds[0] - attention[0] - fixed == pytest.approx((32 * layer + output) * 1e-6, rel=1e-9)
    assert cost.source.provenance["dense layers"] == "from the table"


def test_beyond_the_kv_heads_each_device_has_a_whole_one(tmp_path: Path) -> None:
    """Of 2 KV heads on 4 devices: 8 query heads and 1 KV head on each."""
    model, device = replace(LLAMA_8B, kv_heads=2), replace(H200, parallel=4)
    pairs = (((8 + 2) * 128, 4096), (4096, 8 * 128), (7168, 4096), (4096, 3584), (32064, 4096))
    shapes = [(rows, at) for rows in (1, 64) for at in (64, 4096)]
    lines = [f"h200,decode,bf16,{rows},,{at},8,1,128,,,,{9 + rows * at / 2e3}" for rows, at in shapes]
    lines += [f"h200,gemm,bf16,,,,,,,{m},{n},{k},{n * k * 1e-5}" for n, k in pairs for m in (1, 64)]
    file = tmp_path / "operators.csv"
    file.write_text(HEAD + "\n".join(lines))
    cost = OperatorCost(RooflineCost(model, device), read_operators(str(file), device))
    assert cost.source.provenance["dense layers"] == "from the table"


def test_without_every_matrix_dense_layers_are_the_rooflines(tmp_path: Path) -> None:
    cost = cost_of(table(tmp_path, "h200,gemm,bf16,,,,,,,8,6144,4096,20"))
    features = np.zeros((1, len(FEATURES)))
    features[0, [ROWS, KV, TOKENS, SAMPLED]] = 8, 8 * 256, 8, 8
    seconds, attention = price_table(cost, features)
    plain, own = price_table(RooflineCost(LLAMA_8B, H200), features)
    assert seconds[0] - attention[0] == pytest.approx(plain[0] - own[0], rel=1e-9)
    assert cost.source.provenance["dense layers"] == "by the roofline: not every matrix was timed"


def test_a_shape_outside_of_the_table_is_the_rooflines(tmp_path: Path) -> None:
    features = np.zeros((1, len(FEATURES)))
    features[0, [ROWS, KV, TOKENS]] = 512, 512 * 100_000, 512
    attention = price_table(cost_of(table(tmp_path)), features)[1][0]
    read = 512 * 100_000 * LLAMA_8B.kv_bytes_per_token / 4.8e12
    assert attention == pytest.approx(read + 32 * (1e-5 + 512 * 2e-7), rel=1e-9)


def test_numbers_and_arrays_are_priced_to_the_same_bits(tmp_path: Path) -> None:
    cost = cost_of(table(tmp_path, products=True))
    requests = [request(n, 0, 100 + 40 * n, 30) for n in range(5)]
    features = replay(requests, fast_forward=False)[1].features
    seconds, attention = price_table(cost, features)
    single = [cost.price(row) for row in features.tolist()]
    assert seconds.tolist() == [float(price.seconds) for price in single]
    assert attention.tolist() == [float(price.attention_s) for price in single]


def test_the_held_out_error_of_the_decode_grid_is_stated_and_small(tmp_path: Path) -> None:
    """Every other length, and every other batch, is predicted from the rest."""
    heldout = cost_of(table(tmp_path)).source.heldout
    assert set(heldout) >= {"decode grid along rows", "decode grid along KV slots a row"}
    assert heldout["decode grid along rows"]["mape"] < 0.04


def test_rows_that_are_faster_than_the_device_are_left_out_and_counted(tmp_path: Path) -> None:
    fast = (
        "h200,prefill,bf16,,512,4096,32,8,128,,,,0.5",  # 62,000 TFLOP/s
        "h200,decode,bf16,128,,16384,32,8,128,,,,100",  # 86 TB/s, far beyond any cache
        "h200,gemm,bf16,,,,,,,4096,28672,4096,10",
    )
    read = read_operators(str(table(tmp_path, *fast)), H200)
    assert dict(read.dropped) == {"decode": 1, "prefill": 1, "gemm": 1}
    assert cost_of(table(tmp_path, *fast)).source.provenance["rows faster than the device"] == (
        "1 decode; 1 prefill; 1 gemm"
    )


def test_a_kernel_of_less_than_half_a_microsecond_is_too_fast(tmp_path: Path) -> None:
    read = read_operators(str(table(tmp_path, "h200,decode,bf16,3,,16,32,8,128,,,,0.4")), H200)
    assert dict(read.dropped) == {"decode": 1}


@pytest.mark.parametrize(
    "line",
    [
        "h200,decode,bf16,3,,16,32,8,128,,,,60000",  # microseconds for nanoseconds
        "h200,decode,bf16,3,,64,32,8,128,,,,80",  # 8 and more rows of 256 slots take 15
        "h200,prefill,bf16,,32,1024,32,8,128,,,,900",
    ],
)
def test_a_row_that_is_absurdly_slow_is_left_out_and_counted(tmp_path: Path, line: str) -> None:
    read = read_operators(str(table(tmp_path, line)), H200)
    assert dict(read.slow) == {line.split(",")[1]: 1}
    assert len(read.rows) == 48 + 12


def test_the_record_says_how_many_rows_were_absurdly_slow(tmp_path: Path) -> None:
    cost = cost_of(table(tmp_path, "h200,decode,bf16,3,,16,32,8,128,,,,60000"))
    assert cost.source.provenance["rows absurdly slow"] == "1 decode"


def test_a_slow_row_with_one_faster_larger_row_is_kept(tmp_path: Path) -> None:
    """One larger row that is faster may itself be the wrong one."""
    read = read_operators(str(table(tmp_path, "h200,decode,bf16,128,,8192,32,8,128,,,,7000")), H200)
    assert not read.slow


def test_one_row_of_one_head_may_be_as_slow_as_one_multiprocessor(tmp_path: Path) -> None:
    """131,072 slots of one KV head of 64 took 1,346 us on an RTX PRO 6000."""
    read = read_operators(str(table(tmp_path, "h200,decode,bf16,1,,131072,1,1,64,,,,1346")), H200)
    assert not read.slow


def test_kv_that_fits_the_caches_may_be_read_faster_than_the_memory(tmp_path: Path) -> None:
    read = read_operators(str(table(tmp_path, "h200,decode,bf16,8,,512,32,8,128,,,,2")), H200)
    assert not read.dropped


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "h200,decod,bf16,1,,16,32,8,128,,,,9",
            "operators.csv:62: op is 'decod', must be one of decode, prefill",
        ),
        (
            "h200,decode,bf16,,,16,32,8,128,,,,9",
            "operators.csv:62: rows is '', must be a whole number of at least 1",
        ),
        ("h200,decode,bf16,1,,16,32,8,128,,,,-9", "operators.csv:62: us is '-9', must be greater than 0"),
        ("h200,decode,bf16,1,,16,32,8,128,,,,fast", "operators.csv:62: us is 'fast', must be a number"),
        (
            "h200,decode,int3,1,,16,32,8,128,,,,9",
            "operators.csv:62: dtype is 'int3', must be one of fp32, fp16",
        ),
        (
            "h200,prefill,bf16,,64,16,32,8,128,,,,9",
            "operators.csv:62: context is 16, less than the chunk's 64",
        ),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_column(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_operators(str(table(tmp_path, line)), H200)
    assert message in str(refused.value)


def test_a_table_of_another_device_is_refused_with_its_devices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no row of device a100; its devices are: h200"):
        read_operators(str(table(tmp_path)), DeviceShape("a100", 2e12, 312e12, 0, 0))


def test_a_table_of_other_heads_is_refused_with_its_heads(tmp_path: Path) -> None:
    other = ModelShape(32, 4096, 16, 4, 64, 14336, 128256, 2)
    with pytest.raises(
        ConfigError, match=r"no grid of decodes of 16/4 heads of 64, bf16 .* It has: 32/8 heads of 128"
    ):
        OperatorCost(RooflineCost(other, H200), read_operators(str(table(tmp_path)), H200))


def test_two_times_for_one_operator_are_refused(tmp_path: Path) -> None:
    file = table(tmp_path, "h200,decode,bf16,1,,16,32,8,128,,,,50")
    with pytest.raises(
        ConfigError, match=r"operators.csv:62: us is 50, but line 2 gives the same operator 9.2"
    ):
        read_operators(str(file), H200)


def test_a_row_that_stands_twice_counts_once(tmp_path: Path) -> None:
    once = read_operators(str(table(tmp_path)), H200).rows
    again = read_operators(
        str(table(tmp_path, f"h200,decode,bf16,1,,16,32,8,128,,,,{decode_us(1, 16)}")), H200
    ).rows
    assert len(again) == len(once)


def test_a_row_longer_than_the_header_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"operators.csv:62: row is longer than the header's 13 columns"):
        read_operators(str(table(tmp_path, "h200,decode,bf16,1,,16,32,8,128,,,,50,7")), H200)


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    file = table(tmp_path)
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert read_operators(str(file), H200).rows
