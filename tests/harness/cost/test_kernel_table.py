"""`cost=table` from timed kernels: only those of the point's attention, with the rest of them named when none is."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.bench.cases import KernelCase
from harness.bench.results import TimingRow, device_name
from harness.cli.main import main
from harness.config.compose import compose_config, normalise
from harness.config.overrides import parse_overrides
from harness.config.schema import CostKind, RunConfig
from harness.cost.fitted import ATTENTION, REST, FittedCost
from harness.cost.kernel_table import KernelTableError, TimedAttention, kernel_shapes, kernel_table
from harness.cost.timings import MadeOn
from harness.point.cost import check_cost, resolve_cost_kind, timed_attention
from harness.replay.cost_model import CostSource
from harness.replay.features import AT, FEATURES
from harness.replay.folds import GridHull
from harness.sweep.plan import fingerprint
from harness.workload.deployment import deployment_of

TINY = {"heads": 8, "kv_heads": 4, "head_dim": 32, "dtype": "fp32"}
LAYERS = 4


def seconds_of(batch: int, context: int) -> float:
    return 1e-5 + 1e-8 * batch * context


def row(provider: str = "paged", us: float | None = None, **values: Any) -> TimingRow:
    spec = KernelCase(**{**TINY, **values})
    time = us if us is not None else 1e6 * seconds_of(spec.batch, spec.context)
    shares = {"copy_share": 0.5, "read_share": 0.5, "matmul_share": 0.1, "flat_bytes": 1, "against_ours": 1.0}
    timed = {"median_us": time, "least_us": time, "most_us": time, "spread": 0.0}
    return TimingRow(spec, provider, "CPU time", 0.0, 8, gbytes_s=1.0, tflop_s=0.01, **timed, **shares)


def rows(**values: Any) -> list[TimingRow]:
    return [
        row(batch=batch, context=context, **values) for batch in (1, 4, 16, 64) for context in (16, 64, 512)
    ]


def write(folder: Path, found: list[TimingRow], device: str | None = None, threads: int = 1) -> Path:
    from harness.bench.page import table_of

    facts = MadeOn(device or device_name("cpu"), "feed", "2.13.0", "3.6.0", threads, "2026-01-01")
    folder.mkdir(parents=True, exist_ok=True)
    table_of(found, facts).to_parquet(folder / "kernels.parquet", index=False)
    return folder


def config(kernels: Path, *words: str) -> RunConfig:
    overrides = ["engine=cpu", "engine.backend=torch", "cost=table", f"cost.kernels={kernels}", *words]
    return normalise(compose_config(axis.settings[0] for axis in parse_overrides(overrides)))


def asked(kernels: Path, *words: str) -> TimedAttention:
    return timed_attention(deployment_of(config(kernels, *words)))


def fitted(extra: float = 0.0) -> FittedCost:
    """Attention as the kernels' law says for all layers, and `extra` seconds a step on top."""
    values = dict.fromkeys(FEATURES, 0.0)
    values |= {"decode_steps": LAYERS * 1e-5 + extra, "decode_kv": LAYERS * 1e-8, "step": 1e-3}
    numbers = list(values.values())
    source = CostSource(
        "fitted", "tiny", "f", {"device": "here"}, {"step": {"n": 3.0}}, hull={"rows": (1, 64)}
    )
    import numpy as np

    return FittedCost(np.array(numbers)[ATTENTION], np.array(numbers)[REST], source)


def decode(count: int, slots: int, block_size: int = 16) -> list[float]:
    features = [0.0] * len(FEATURES)
    names = ("step", "decode_rows", "decode_steps", "decode_kv", "decode_padded_kv", "decode_padded_blocks")
    amounts = (1, count, 1, count * slots, count * slots, count * -(-slots // block_size))
    for place, amount in zip(map(FEATURES.index, names), amounts, strict=True):
        features[place] = float(amount)
    return features


def test_attention_of_all_layers_comes_from_the_timed_calls(tmp_path: Path) -> None:
    table = kernel_table(asked(write(tmp_path, rows())), fitted())
    price = table.price(decode(4, 64))
    assert price.attention_s == pytest.approx(LAYERS * seconds_of(4, 64))
    assert price.seconds == pytest.approx(1e-3 + LAYERS * seconds_of(4, 64))


def test_what_the_engine_adds_around_a_kernel_is_added(tmp_path: Path) -> None:
    table = kernel_table(asked(write(tmp_path, rows())), fitted(extra=5e-5))
    assert table.price(decode(4, 64)).attention_s == pytest.approx(
        LAYERS * seconds_of(4, 64) + 5e-5, rel=0.01
    )
    assert table.source.provenance["grid"]["around a decode"].startswith("50 µs a step")


def test_outside_of_what_was_timed_the_fitted_model_prices(tmp_path: Path) -> None:
    table = kernel_table(asked(write(tmp_path, rows())), fitted())
    beyond = decode(64, 600)
    assert table.price(beyond).attention_s == pytest.approx(fitted().price(beyond).attention_s)


def test_provenance_and_the_grids_own_error_go_into_the_record(tmp_path: Path) -> None:
    source = kernel_table(asked(write(tmp_path, rows())), fitted()).source
    assert source.kind == "table"
    facts = source.provenance["grid"]
    assert facts["from"] == "bench kernels"
    assert facts["geometry"].startswith("8 query and 4 KV heads of 32, fp32, on ")
    assert "feed, and this tree's are" in facts["kernel sources"]
    assert facts["decode shapes"] == 12
    assert set(source.heldout) == {"step", "decode grid along rows", "decode grid along KV slots a row"}
    assert source.heldout["decode grid along rows"]["n"] == 6
    assert isinstance(source.hull, GridHull)
    json.dumps(source.provenance)


def test_other_geometries_providers_and_kinds_of_case_are_left_out(tmp_path: Path) -> None:
    others = [
        *rows(us=1e6, heads=4),
        *rows(us=1e6, head_dim=64),
        *rows(us=1e6, dtype="bf16"),
        *rows(us=1e6, provider="sdpa"),
        *rows(us=1e6, layout="HND"),
        *[row(us=1e6, batch=4, context=64, ragged=True), row(us=1e6, batch=4, context=64, shared_prefix=16)],
    ]
    shapes = kernel_shapes(asked(write(tmp_path, [*others, *rows()])))
    assert len(shapes.decode) == 12
    assert all(shape.seconds < 1e-3 for shape in shapes.decode)


def test_the_kernel_that_the_engine_runs_is_the_one_that_counts(tmp_path: Path) -> None:
    from paged_kernels.native import why_unavailable

    if why_unavailable():
        pytest.skip("no C compiler: the engine runs torch")
    chunks = [
        row(us=us, provider=one, queries=16, batch=1, context=64)
        for one, us in (("paged", 1e6), ("native", 1.0))
    ]
    kernels = write(tmp_path, [*rows(us=1e6), *rows(provider="native"), *chunks])
    shapes = kernel_shapes(asked(kernels, "engine.backend=auto"))
    assert len(shapes.decode) == 12
    assert all(shape.seconds < 1e-3 for shape in (*shapes.decode, *shapes.prefill))
    assert len(shapes.prefill) == 1


def test_chunks_of_16_bits_are_priced_by_what_the_engine_runs(tmp_path: Path) -> None:
    from paged_kernels import native as compiling

    expected = "paged" if compiling.why_unavailable() else "native"
    both = {"dtype": "bf16", "queries": 16, "batch": 1, "context": 64}
    chunks = [row(us=1.0 if one == expected else 1e6, provider=one, **both) for one in ("paged", "native")]
    kernels = write(tmp_path, [*rows(provider="native", dtype="bf16"), *chunks])
    shapes = kernel_shapes(asked(kernels, "engine.backend=auto", "model.dtype=bfloat16"))
    assert [shape.seconds < 1e-3 for shape in shapes.prefill] == [True]


def test_block_size_is_an_axis(tmp_path: Path) -> None:
    slow = [row(us=3e6 * seconds_of(4, 64), batch=4, context=64, block_size=4)]
    kernels = write(tmp_path, [*rows(), *slow, *rows(block_size=64)])
    table = kernel_table(asked(kernels, "cache.block_size=4"), fitted())
    assert table.decode.at(4, 64) == pytest.approx(LAYERS * 3 * seconds_of(4, 64), rel=0.01)
    assert table.block_size == 4


def test_chunks_are_priced_by_the_call_with_the_fewest_of_them(tmp_path: Path) -> None:
    chunks = [
        row(us=batch * (queries + context / 10), queries=queries, batch=batch, context=context)
        for queries in (16, 64, 256)
        for context in (256, 512, 1024)
        for batch in (2, 8)
    ]
    table = kernel_table(asked(write(tmp_path, [*rows(), *chunks])), fitted())
    assert table.prefill is not None
    assert table.prefill.at(64, 512) == pytest.approx(LAYERS * (64 + 51.2) * 1e-6)
    features = [0.0] * len(FEATURES)
    for place, amount in zip(
        (AT.prefill_rows, AT.prefill_tokens, AT.prefill_kv), (2, 128, 1024), strict=True
    ):
        features[place] = float(amount)
    assert table.price(features).attention_s == pytest.approx(2 * LAYERS * (64 + 51.2) * 1e-6)


def test_too_few_chunks_are_left_to_the_fitted_model(tmp_path: Path) -> None:
    kernels = write(tmp_path, [*rows(), row(queries=16, batch=1, context=256)])
    table = kernel_table(asked(kernels), fitted())
    assert table.prefill is None
    assert "chunks are fitted" in table.source.provenance["grid"]["prefill shapes"]


def refusal(kernels: Path, *words: str) -> str:
    with pytest.raises(KernelTableError) as caught:
        kernel_shapes(asked(kernels, *words)).decode_grid()
    assert caught.value.key == "cost.kernels"
    return str(caught.value)


def test_a_refusal_says_what_is_wanted_what_there_is_and_how_to_time_it(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, [*rows(heads=16, head_dim=64), row(dtype="bf16")]))
    assert "is of 8 query and 4 KV heads of 32, fp32, on " in message
    assert "There are: 16 query and 4 KV heads of 64, fp32, on " in message
    assert "by paged (12); 8 query and 4 KV heads of 32, bf16" in message
    assert "bench kernels --device cpu --heads 8/4 --head-dim 32 --dtype fp32 --batch" in message


def test_a_run_of_another_kernel_than_the_engines_is_told_whose_is_wanted(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, [*rows(provider="native"), row(queries=16, batch=1, context=64)]))
    assert "by 'paged', which the engine runs there" in message
    assert "by native (12)" in message


def test_kernels_of_another_device_price_nothing(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, rows(), device="NVIDIA H200", threads=0))
    assert "There are: 8 query and 4 KV heads of 32, fp32, on NVIDIA H200 by paged (12)" in message


def test_kernels_timed_with_other_threads_price_nothing(tmp_path: Path) -> None:
    assert "2 threads by paged (12)" in refusal(write(tmp_path, rows(), threads=2))


def test_a_block_size_beyond_the_timed_ones_is_refused(tmp_path: Path) -> None:
    kernels = write(tmp_path, rows())
    assert "block size 64 lies outside of the timed ones (16)" in refusal(kernels, "cache.block_size=64")
    assert "--block-size 1 " in refusal(kernels, "cache=contiguous_max")


def test_one_batch_makes_no_grid(tmp_path: Path) -> None:
    few = [row(batch=4, context=context) for context in (64, 128)]
    assert "2 timed shapes; a grid needs two values on each axis" in refusal(write(tmp_path, few))


def test_a_file_that_is_no_table_is_refused_before_any_point_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernels.parquet").write_text("no table")
    for key in ("cost.kernels", "report.kernels"):
        assert main(["sweep", "cost=roofline", f"{key}={tmp_path}", "--dry-run"]) == 2
        assert f"{key}: '{tmp_path}/kernels.parquet' is no Parquet table" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_table_that_is_cut_is_refused_before_any_point_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, rows()) / "kernels.parquet"
    file.write_bytes(file.read_bytes()[:300])
    assert main(["sweep", "cost=table", f"cost.kernels={tmp_path}", "--dry-run"]) == 2
    assert "cost.kernels: " in capsys.readouterr().err


@pytest.mark.parametrize("named", ["nowhere", "''"])
def test_a_folder_that_is_not_there_is_refused(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "cost=table", f"cost.kernels={named}", "--dry-run"]) == 2
    assert "cost.kernels: no kernels.parquet in" in capsys.readouterr().err


def test_auto_with_timed_kernels_is_the_table(tmp_path: Path) -> None:
    kernels = write(tmp_path, rows())
    assert resolve_cost_kind(deployment_of(config(kernels, "cost.kind=auto"))) is CostKind.table


def test_other_models_do_not_look_at_the_kernels(tmp_path: Path) -> None:
    assert config(write(tmp_path, rows()), "cost.kind=fitted").cost.kernels is None


def test_a_prediction_without_a_calibration_is_told_to_make_one(tmp_path: Path) -> None:
    kernels = write(tmp_path / "k", rows())
    found = config(kernels, "measure=false", f"cost.cache_dir={tmp_path / 'none'}")
    with pytest.raises(Exception, match=r"table, but this model and engine have not been calibrated"):
        check_cost(deployment_of(found))


def test_where_the_kernels_lie_is_no_part_of_a_points_name(tmp_path: Path) -> None:
    first, second = (config(write(tmp_path / name, rows())) for name in "ab")
    assert fingerprint(first, {}) == fingerprint(second, {})


def test_what_the_kernels_say_is_part_of_a_points_name(tmp_path: Path) -> None:
    from harness.point.run import point_identity

    first = point_identity(config(write(tmp_path / "a", rows())))
    second = point_identity(config(write(tmp_path / "b", rows(us=7.0))))
    assert first["kernels"] != second["kernels"]
    assert "calibration" in first


def test_native_asked_for_by_name_is_priced_by_native(tmp_path: Path) -> None:
    from paged_kernels.native import why_unavailable

    if why_unavailable():
        pytest.skip("no C compiler: the engine runs torch")
    kernels = write(tmp_path, [*rows(us=1e6), *rows(provider="native")])
    shapes = kernel_shapes(asked(kernels, "engine.backend=native"))
    assert all(shape.seconds < 1e-3 for shape in shapes.decode)


def test_a_cache_in_8_bits_is_not_priced_by_another(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, rows()), "model.kv_dtype=fp8_e4m3")
    assert "model.kv_dtype=fp8_e4m3 beside model.dtype=float32" in message
    words = ("model.kv_dtype=fp8_e4m3", "model.dtype=bfloat16")
    assert "32, fp8_e4m3, on" in refusal(write(tmp_path, rows()), *words)
    kernels = write(tmp_path, rows(dtype="fp8_e4m3"))
    assert len(kernel_shapes(asked(kernels, *words)).decode) == 12
