"""The cost model of measured operators, against tables whose prices are known formulas."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.config.compose import compose_config, normalise
from harness.config.errors import ConfigError
from harness.config.schema import CostKind, RunConfig, TableEngine
from harness.cost.model_shape import Experts, ModelShape
from harness.cost.published import (
    VERSION,
    Limits,
    PerOp,
    PublishedCost,
    TableSetup,
    check_package,
    checkpoint_config,
    compiled,
    system_of,
    tables_of,
)
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.point.cost import check_cost, cost_model, table_setup
from harness.replay.cost_model import Amount, CostSource
from harness.replay.features import FEATURES
from harness.sweep.plan import run_request
from harness.workload.deployment import deployment_of

SHAPE = ModelShape(4, 256, 8, 2, 32, 512, 1000, 2)
DEVICE = DeviceShape("some_gpu", 1e12, 1e14, step_overhead_s=1e-4, layer_overhead_s=1e-3)
LIMITS = Limits(rows=64, tokens=1024, sequence=4096)


class Formulas:
    """A handle whose milliseconds are linear in rows x slots, tokens and query-key pairs."""

    def decode_step_per_op(self, gen_tokens: int, isl: int, osl: int) -> list[PerOp]:
        slots = isl + osl - 1
        return [
            ("generation_gemm", 0.5 + 0.01 * gen_tokens, 0.0, "silicon"),
            ("generation_attention", 0.02 + 1e-5 * gen_tokens * slots, 0.0, "silicon"),
            ("generation_logits_gemm", 0.1 + 0.001 * gen_tokens, 0.0, "silicon"),
        ]

    def run_static_per_op(
        self, *, batch_size: int, isl: int, osl: int, prefix: int, mode: str
    ) -> tuple[list[PerOp], list[PerOp]]:
        assert mode == "static_ctx"
        tokens = isl - prefix
        context: list[PerOp] = [
            ("context_gemm", 0.4 + 0.02 * batch_size * tokens, 0.0, "silicon"),
            ("context_mixer", 0.03 + 2e-6 * batch_size * tokens * prefix, 0.0, "empirical"),
            ("context_logits_gemm", 0.1, 0.0, "silicon"),
        ]
        return context, []


@pytest.fixture(scope="module")
def cost() -> PublishedCost:
    moves = RooflineCost(SHAPE, DEVICE)
    return PublishedCost(
        tables_of(Formulas(), LIMITS), moves, CostSource("published", "some_gpu", "formulas")
    )


def features(**found: float) -> list[Amount]:
    return [float(found.get(name, 0.0)) for name in FEATURES]


def decode(rows: int, slots: int) -> list[Amount]:
    return features(
        step=1,
        tokens=rows,
        rows=rows,
        sampled_rows=rows,
        decode_rows=rows,
        decode_steps=1,
        decode_kv=rows * slots,
    )


def chunk(tokens: int, earlier: int, decodes: int = 0, slots: int = 0) -> list[Amount]:
    return features(
        step=1,
        tokens=tokens + decodes,
        rows=1 + decodes,
        sampled_rows=1 + decodes,
        decode_rows=decodes,
        decode_kv=decodes * slots,
        prefill_rows=1,
        prefill_tokens=tokens,
        prefill_kv=tokens + earlier,
        prefill_work=tokens * (earlier + (tokens + 1) / 2),
    )


@pytest.mark.parametrize(("rows", "slots"), [(1, 100), (7, 333), (50, 4000)])
def test_a_decode_step_is_overhead_and_operators(cost: PublishedCost, rows: int, slots: int) -> None:
    dense, sample = 0.5 + 0.01 * rows, 0.1 + 0.001 * rows
    attention = 0.02 + 1e-5 * rows * slots
    price = cost.price(decode(rows, slots))
    assert price.seconds == pytest.approx(1e-4 + 1e-3 * (dense + sample + attention), rel=1e-9)
    assert price.attention_s == pytest.approx(1e-3 * attention, rel=1e-9)


def test_the_overheads_of_layers_are_the_operators_own(cost: PublishedCost) -> None:
    """4 layers of 1 ms each would be seen."""
    assert cost.price(decode(1, 16)).seconds < 1e-3


@pytest.mark.parametrize(("tokens", "earlier"), [(512, 0), (700, 0), (65, 2000), (64, 100)])
def test_a_chunk_is_priced_with_its_earlier_tokens(cost: PublishedCost, tokens: int, earlier: int) -> None:
    attention = 0.03 + 2e-6 * tokens * earlier
    assert cost.price(chunk(tokens, earlier)).attention_s == pytest.approx(1e-3 * attention, rel=1e-9)


@pytest.mark.parametrize(("tokens", "earlier"), [(5, 8000), (2, 1000), (64, 200)])
def test_a_few_queries_take_no_less_than_a_decode_of_their_slots(
    cost: PublishedCost, tokens: int, earlier: int
) -> None:
    chunks, read = 0.03 + 2e-6 * tokens * earlier, 0.02 + 1e-5 * (tokens + earlier)
    found = cost.price(chunk(tokens, earlier)).attention_s
    assert found == pytest.approx(1e-3 * max(chunks, read), rel=1e-9)


def test_a_mixed_step_adds_the_attention_of_both_and_the_dense_layers_of_all_tokens(
    cost: PublishedCost,
) -> None:
    price = cost.price(chunk(500, 128, decodes=8, slots=600))
    attention = 0.03 + 2e-6 * 500 * 128 + 0.02 + 1e-5 * 8 * 600
    dense, sample = 0.4 + 0.02 * 508, 0.1 + 0.001 * 9
    assert price.attention_s == pytest.approx(1e-3 * attention, rel=1e-9)
    assert price.seconds == pytest.approx(1e-4 + 1e-3 * (dense + sample + attention), rel=1e-9)


def test_an_operator_that_grows_with_the_kv_is_attention_whatever_its_name(cost: PublishedCost) -> None:
    near, far = (float(np.max(cost.price(chunk(256, earlier)).attention_s)) for earlier in (0, 2048))
    assert far - near == pytest.approx(1e-3 * 2e-6 * 256 * 2048, rel=1e-9)


def test_many_steps_cost_to_the_bit_what_they_cost_one_by_one(cost: PublishedCost) -> None:
    steps = [decode(rows, slots) for rows, slots in ((3, 100), (9, 1234), (60, 17))]
    steps += [chunk(33, 77), chunk(900, 5, decodes=4, slots=99)]
    many = cost.price([np.array(column) for column in zip(*steps, strict=True)])
    assert np.asarray(many.seconds).tolist() == [cost.price(step).seconds for step in steps]


def test_moved_blocks_cost_what_the_roofline_says(cost: PublishedCost) -> None:
    still, moved = features(step=1), features(step=1, swapped_slots=160, swapped_blocks=10, copied_slots=16)
    roofline = RooflineCost(SHAPE, DEVICE)
    expected = roofline.price(moved).seconds - roofline.price(still).seconds
    assert cost.price(moved).seconds - cost.price(still).seconds == pytest.approx(expected, rel=1e-9)


def test_anchors_multiply_attention_and_all_other_operators(cost: PublishedCost) -> None:
    step, anchored = decode(8, 512), PublishedCost(cost.tables, cost.moves, cost.source, (2.0, 1.5))
    plain, found = cost.price(step), anchored.price(step)
    assert found.attention_s == pytest.approx(2 * plain.attention_s)
    rest = plain.seconds - plain.attention_s - DEVICE.step_overhead_s
    assert found.seconds == pytest.approx(1.5 * rest + 2 * plain.attention_s + DEVICE.step_overhead_s)


@pytest.mark.parametrize("key", ["tables_attention", "tables_dense"])
def test_an_anchor_is_refused_where_seconds_come_from_elsewhere(key: str) -> None:
    with pytest.raises(ConfigError, match="a factor on cost=published"):
        check_cost(deployment_of(by_roofline(config("device=h100", f"device.{key}=1.2"))))


def by_roofline(found: RunConfig) -> RunConfig:
    """The same with the roofline's prices."""
    return replace(found, cost=replace(found.cost, kind=CostKind.roofline))


def test_a_price_that_is_no_number_is_refused() -> None:
    class Broken(Formulas):
        def decode_step_per_op(self, gen_tokens: int, isl: int, osl: int) -> list[PerOp]:
            return [("generation_gemm", float("nan"), 0.0, "silicon")]

    with pytest.raises(ConfigError, match=r"generation_gemm takes nan ms"):
        tables_of(Broken(), LIMITS)


def _installed(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(package: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr("harness.cost.published.metadata.version", version)


def test_without_the_extra_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"not installed: pip install '\.\[gpu-tables\]'"):
        check_package()


def test_another_version_of_the_tables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "0.13.0")
    with pytest.raises(ConfigError, match=r"checked with aiconfigurator-core 0\.12\.0 alone, found 0\.13\.0"):
        check_package()


@pytest.mark.parametrize(
    ("engine", "kv", "asked"),
    [
        (TableEngine.sglang, None, ("bfloat16", "bfloat16")),
        (TableEngine.trtllm, "fp8", ("fp8", "bfloat16")),
        (TableEngine.vllm, "fp8", ("fp8", None)),
    ],
)
def test_latent_attention_has_the_kv_of_the_engine_and_prompts_as_they_were_timed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: TableEngine,
    kv: str | None,
    asked: tuple[str | None, str | None],
) -> None:
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    options: dict[str, object] = {}

    class Handle:
        decode_step_per_op = staticmethod(lambda *_: [])
        run_static_per_op = staticmethod(lambda **_: ([], []))

        @classmethod
        def compile(cls, *_: object, **given: object) -> type["Handle"]:
            options.update(given)
            return cls

    _installed(monkeypatch, VERSION)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", SimpleNamespace(EngineHandle=Handle))
    compiled(TableSetup("h200", engine, 8, True, str(tmp_path), None, kv=kv))
    assert (options["kvcache_quant_mode"], options["fmha_quant_mode"]) == asked


def test_a_device_without_tables_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"do not know rtx4090; allowed: a100_80gb, b200"):
        system_of("rtx4090")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (ModelShape(4, 256, 8, 2, 32, 512, 1000, 2, window=128, windowed_layers=2), "sliding windows"),
        (ModelShape(4, 256, 8, 2, 32, 512, 1000, 2, mlp_matrices=2), "an MLP of two matrices"),
        (ModelShape(4, 256, 8, 2, 32, 512, 1000, 2, experts=Experts(8, 2, 64, shared=64)), "shared experts"),
    ],
)
def test_a_shape_that_the_tables_cannot_be_told_is_refused(shape: ModelShape, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        checkpoint_config(shape)


def config(*overrides: str) -> RunConfig:
    words = ("measure=false", "cost=published", *overrides)
    return normalise(compose_config(axis.settings[0] for axis in run_request(words).axes))


def test_drafts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, VERSION)
    with pytest.raises(ConfigError, match="does not price draft passes"):
        check_cost(
            deployment_of(
                config(
                    "device=h100", "model=llama31_8b", "decoding.draft_tokens=3", "decoding.acceptance=0.5"
                )
            )
        )


@pytest.mark.parametrize(("key", "value"), [("bandwidth_gbs", 1000), ("tflops", 100)])
def test_rates_that_the_tables_do_not_have_are_refused(key: str, value: int) -> None:
    with pytest.raises(
        ConfigError, match=f"device.{key}: as the user set it; the preset h100 has .* timings"
    ):
        check_cost(deployment_of(config("device=h100", "model=llama31_8b", f"device.{key}={value}")))


def test_no_table_has_float32() -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype: float32, but published has timings of 16 bits"):
        check_cost(deployment_of(config("device=h100", "model=llama31_8b", "model.dtype=float32")))


def test_the_engine_of_the_tables_counts_for_published_timings_alone() -> None:
    assert str(config("cost.engine=sglang").cost.engine) == "sglang"
    assert str(config("cost=roofline", "cost.engine=sglang").cost.engine) == "vllm"


@pytest.fixture(scope="module")
def chosen() -> RunConfig:
    pytest.importorskip("aiconfigurator_core", reason="needs pagetwin[gpu-tables]")
    return config("device=a100_80gb", "model=llama31_8b", "scheduler.max_batched_tokens=2048")


class TestInstalled:
    """Against the package itself; it is an optional extra."""

    def test_a_step_costs_the_sum_of_the_package_operators(self, chosen: RunConfig) -> None:
        cost, handle = cost_model(deployment_of(chosen)), compiled(table_setup(deployment_of(chosen)))
        operators: Sequence[PerOp] = handle.decode_step_per_op(32, 1023, 2)
        expected = 1e-6 * chosen.device.step_overhead_us + 1e-3 * sum(ms for _, ms, _, _ in operators)
        assert cost.price(decode(32, 1024)).seconds == pytest.approx(expected, rel=1e-9)

    def test_between_the_places_of_the_grid_the_price_is_within_three_percent(
        self, chosen: RunConfig
    ) -> None:
        cost, handle = cost_model(deployment_of(chosen)), compiled(table_setup(deployment_of(chosen)))
        for rows, slots in ((11, 777), (45, 1500), (101, 3001)):
            operators = handle.decode_step_per_op(rows, slots - 1, 2)
            expected = 1e-6 * chosen.device.step_overhead_us + 1e-3 * sum(ms for _, ms, _, _ in operators)
            assert cost.price(decode(rows, slots)).seconds == pytest.approx(expected, rel=0.03)

    def test_the_record_names_the_provenance_of_each_operator(self, chosen: RunConfig) -> None:
        said = cost_model(deployment_of(chosen)).source.provenance
        found = said["operators"]
        assert {"silicon", "empirical"} <= {kind for step in found.values() for kind in step.values()}
        assert "prefixes that rows share: each row reads them" in said["not priced"]
