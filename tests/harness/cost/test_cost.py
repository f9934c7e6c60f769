from dataclasses import replace

import numpy as np
import pytest
from sim_cases import fingerprint, replay, request

from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding
from harness.cost.fitted import ATTENTION, REST, FittedCost, fit_cost, held_out_error
from harness.cost.grid import grid_of
from harness.cost.model_shape import ModelShape
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.cost.table import TableCost
from harness.replay.beams import BeamGenealogy, churn_of_run
from harness.replay.cost_model import CostModel, CostSource, PacedCost, price_table
from harness.replay.features import AT, FEATURES

SOURCE = CostSource("fitted", "test", "test")


def measured_features(seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    requests = [
        request(rid, 0.004 * rid, int(draw.integers(8, 200)), int(draw.integers(2, 40)), shared=4)
        for rid in range(40)
    ]
    return replay(requests, fast_forward=False)[1].features


def true_seconds(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    attention = features[:, [AT.decode_padded_kv, AT.prefill_work, AT.decode_steps]] @ [
        2e-7,
        1e-8,
        1e-4,
    ]
    rest = features[:, [AT.step, AT.tokens, AT.sampled_rows]] @ [5e-4, 1e-5, 3e-5]
    return attention + rest, attention


def test_the_fit_recovers_a_linear_machine_on_workloads_it_never_saw() -> None:
    features = measured_features(0)
    cost = fit_cost(features, *true_seconds(features), SOURCE)
    unseen = measured_features(1)
    seconds, attention = true_seconds(unseen)
    assert held_out_error(price_table(cost, unseen)[0], seconds)["max"] < 0.01
    assert held_out_error(price_table(cost, unseen)[1], attention)["max"] < 0.01


def test_the_fit_is_unbiased_under_symmetric_noise() -> None:
    features = measured_features(0)
    seconds, attention = true_seconds(features)
    noise = np.random.default_rng(2).normal(1, 0.05, len(seconds))
    cost = fit_cost(features, seconds * noise, attention * noise, SOURCE)
    assert abs(held_out_error(price_table(cost, features)[0], seconds)["total_error"]) < 0.01


def test_a_few_drawn_out_steps_do_not_move_the_fit() -> None:
    features = measured_features(0)
    seconds, attention = true_seconds(features)
    slow = seconds.copy()
    slow[::40] *= 5
    cost = fit_cost(features, slow, attention, SOURCE)
    assert abs(held_out_error(price_table(cost, features)[0], seconds)["total_error"]) < 0.02


def test_the_fit_follows_a_machine_on_which_one_token_is_cheaper_than_two() -> None:
    """As on a CPU, where one token is a product with a vector, and two to four tokens cost nearly the same."""
    features = measured_features(0)
    tokens = features[:, AT.tokens]
    seconds = 4.7e-3 + 1.5e-3 * (tokens > 1) + 5e-5 * tokens
    cost = fit_cost(features, seconds, np.zeros(len(features)), SOURCE)
    assert (tokens == 1).any()
    assert held_out_error(price_table(cost, features)[0], seconds)["max"] < 0.01


def test_a_decode_has_a_floor_beside_its_attention() -> None:
    features = measured_features(0)
    decodes = features[:, AT.decode_rows] > 0
    seconds = 1e-3 + 8e-4 * decodes
    cost = fit_cost(features, seconds, np.zeros(len(features)), SOURCE)
    assert 0 < decodes.mean() < 1
    assert held_out_error(price_table(cost, features)[0], seconds)["max"] < 0.01


def test_coefficients_are_never_negative() -> None:
    features = measured_features(0)
    seconds, attention = true_seconds(features)
    noise = np.random.default_rng(3).normal(1, 0.3, len(seconds)).clip(0.2)
    cost = fit_cost(features, seconds * noise, attention * noise, SOURCE)
    assert min(cost.coefficients().values()) >= 0
    assert list(cost.coefficients()) == list(FEATURES)


def test_held_out_error_keeps_its_sign() -> None:
    errors = held_out_error(np.array([0.9, 1.0]), np.array([1.0, 1.0]))
    assert errors["bias"] == pytest.approx(-0.05)
    assert errors["mape"] == pytest.approx(0.05)


def test_features_count_what_the_plans_hold() -> None:
    features = replay([request(0, 0, 40, 3)], fast_forward=False)[1].features
    tokens, decode_kv, prefill_kv, work, blocks, new = [
        AT.tokens,
        AT.decode_kv,
        AT.prefill_kv,
        AT.prefill_work,
        AT.blocks,
        AT.new_blocks,
    ]
    assert features[:, tokens].tolist() == [40, 1, 1]
    assert features[:, decode_kv].tolist() == [0, 41, 42]
    assert features[0, prefill_kv] == 40
    assert features[0, work] == 40 * 41 / 2
    assert features[:, blocks].tolist() == [3, 3, 3]
    assert features[:, new].tolist() == [3, 0, 0]


def test_chunked_prefill_work_is_that_of_the_whole() -> None:
    work = AT.prefill_work
    whole = replay([request(0, 0, 400, 1)], fast_forward=False)[1].features
    from engine.core.options import SchedulerLimits

    chunks = replay([request(0, 0, 400, 1)], limits=SchedulerLimits(64, 8), fast_forward=False)[1].features
    assert len(chunks) == 7
    assert chunks[:, work].sum() == whole[:, work].sum() == 400 * 401 / 2


def test_beam_copies_are_slots_of_whole_blocks() -> None:
    copied = AT.copied_slots
    features = replay(
        [request(0, 0, 20, 2, 4, Decoding.beam)],
        manager=PagedManager(100, 16),
        fast_forward=False,
    )[1].features
    assert features[:, copied].tolist() == [0, 3 * 16]


def test_the_steps_after_a_large_prefill_are_marked_and_fade() -> None:
    after = AT.after_prefill
    features = replay([request(0, 0, 200, 4)], fast_forward=False)[1].features
    assert features[:, after].tolist() == [0, 1, 0.75, 0.75**2]


def test_a_paced_cost_is_the_cost_times_the_ratio() -> None:
    cost = RooflineCost(LLAMA_8B, DeviceShape("h200", 4.8e12, 989e12, 0, 0))
    features = replay([request(0, 0, 40, 3)], fast_forward=False)[1].features
    plain, paced = price_table(cost, features), price_table(PacedCost(cost, 1.25), features)
    assert paced[0].tolist() == pytest.approx((1.25 * plain[0]).tolist())
    assert paced[1].tolist() == pytest.approx((1.25 * plain[1]).tolist())


@pytest.mark.parametrize("size", [1, 4, 16])
def test_every_feature_of_a_fast_forward_is_that_of_its_steps(size: int) -> None:
    """Every coefficient counts, on requests whose branches share their prompts: records must not differ by a bit."""
    draw = np.random.default_rng(size)
    requests = [
        request(rid, 0.05 * rid, int(draw.integers(5, 60)), int(draw.integers(20, 90)), 3, Decoding.sample, 4)
        for rid in range(12)
    ]
    cost = FittedCost(draw.uniform(1e-7, 1e-5, len(ATTENTION)), draw.uniform(1e-7, 1e-5, len(REST)), SOURCE)
    one, other = (
        replay(requests, cost=cost, manager=PagedManager(1600 // size, size), fast_forward=together)[0]  # type: ignore[arg-type]
        for together in (True, False)
    )
    assert fingerprint(one) == fingerprint(other)


def test_shared_blocks_count_once_among_distinct_slots() -> None:
    rows, kv, distinct = (AT.decode_rows, AT.decode_kv, AT.decode_distinct_kv)
    alone = replay([request(0, 0, 32, 4)], fast_forward=False)[1].features
    assert alone[1:, distinct].tolist() == alone[1:, kv].tolist()
    samples = [request(0, 0, 32, 4, 4, Decoding.sample)]
    shared = replay(samples, manager=PagedManager(100, 16), fast_forward=False)[1].features
    assert shared[1, [rows, kv]].tolist() == [4, 4 * 33]
    assert shared[1, distinct] == 4 * 33 * (2 + 4) / (4 * 3)  # two blocks in common, one each


def table_cost(features: np.ndarray) -> TableCost:
    """A grid that covers some of the steps of `measured_features`, and not all."""
    fitted = fit_cost(features, *true_seconds(features), SOURCE)
    decode = [(r, kv, 1e-5 * r + 1e-7 * r * kv) for r in (1, 4, 16) for kv in (16, 64, 128)]
    prefill = [(q, c, 1e-6 * q + 1e-8 * q * c) for q in (8, 64, 128) for c in (0, 64)]
    return TableCost(fitted, grid_of(decode), grid_of(prefill), 16, SOURCE)


def test_a_grid_reproduces_what_is_affine_in_rows_and_their_product_with_the_length() -> None:
    points = [(r, kv, 2e-5 + 1e-5 * r + 1e-7 * r * kv) for r in (1, 4, 16) for kv in (16, 64, 128)]
    assert grid_of(points).at(7, 100.5) == pytest.approx(2e-5 + 7e-5 + 1e-7 * 7 * 100.5)
    assert np.isnan(grid_of(points).at(17, 64))
    assert np.isnan(grid_of(points).at(2, 15))


def test_a_cell_that_was_not_measured_is_left_to_the_fit() -> None:
    grid = grid_of([(1, 16, 1.0), (1, 64, 1.0), (4, 16, 1.0), (4, 64, 1.0), (16, 16, 1.0)])
    assert grid.at(2, 32) == 1.0
    assert np.isnan(grid.at(10, 32))


def test_a_grid_needs_two_values_on_each_axis() -> None:
    with pytest.raises(ValueError, match="found 1 by 2"):
        grid_of([(1, 16, 1.0), (1, 64, 1.0)])


def test_outside_its_grid_the_table_prices_as_the_fit_does() -> None:
    features = measured_features(0)
    table = table_cost(features)
    chunks, rows, kv = (AT.prefill_rows, AT.decode_rows, AT.decode_kv)
    only = features[(features[:, chunks] == 0) & (features[:, kv] > 128 * features[:, rows])]
    assert len(only) > 10
    assert price_table(table, only)[0].tolist() == pytest.approx(price_table(table.fitted, only)[0].tolist())
    inside = features[0].copy()
    inside[kv] = 1e9
    assert table.price(list(inside)).seconds == pytest.approx(table.fitted.price(list(inside)).seconds)


def test_inside_its_grid_the_table_follows_the_measurements_and_not_the_fit() -> None:
    features = measured_features(0)
    chunks, rows, kv, padded, blocks = [
        AT.prefill_rows,
        AT.decode_rows,
        AT.decode_kv,
        AT.decode_padded_kv,
        AT.decode_padded_blocks,
    ]
    step = features[(features[:, chunks] == 0) & (features[:, rows] == 4)][0].copy()
    step[kv] = step[padded] = 4 * 64
    step[blocks] = 16
    table = table_cost(features)
    assert table.price(list(step)).attention_s == pytest.approx(4e-5 + 1e-7 * 4 * 64)
    step[padded] = 4 * 80  # ragged: the longest has 80 slots
    slope = table.fitted.coefficients()["decode_padded_kv"]
    assert table.price(list(step)).attention_s == pytest.approx(4e-5 + 1e-7 * 4 * 64 + slope * 4 * 16)


@pytest.mark.parametrize("kind", ["fitted", "roofline", "split", "expected", "table"])
def test_numbers_and_arrays_are_priced_to_the_same_bits(kind: str) -> None:
    features = measured_features(0)
    fitted = fit_cost(features, *true_seconds(features), SOURCE)
    roofline = RooflineCost(LLAMA_8B, DeviceShape("h200", 4.8e12, 989e12, 1e-4, 1e-6))
    split = RooflineCost(LLAMA_8B, DeviceShape("h200", 4.8e12, 989e12, 1e-4, 1e-6, parallel=4))
    expected = RooflineCost(LLAMA_8B, EXPECTED)
    models = {"fitted": fitted, "roofline": roofline, "split": split, "expected": expected}
    models["table"] = table_cost(features)
    cost: CostModel = models[kind]
    seconds, attention = price_table(cost, features)
    single = [cost.price(row) for row in features.tolist()]
    assert [price.seconds for price in single] == seconds.tolist()
    assert [price.attention_s for price in single] == attention.tolist()


LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 2)
H200 = DeviceShape("h200", 4.8e12, 989e12, 0, 0)
EXPECTED = replace(
    H200,
    step_overhead_s=4e-4,
    layer_overhead_s=8e-6,
    attention_overhead_s=1e-5,
    row_overhead_s=2e-7,
    bandwidth_efficiency=0.85,
    kv_efficiency=0.95,
    compute_efficiency=0.65,
    attention_efficiency=0.5,
    overlaps=True,
)


def test_kv_bytes_per_token_of_llama_3_8b() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 131_072


def test_a_decode_step_takes_at_least_the_time_to_read_weights_and_kv() -> None:
    cost = RooflineCost(LLAMA_8B, DeviceShape("h200", 4.8e12, 989e12, 0, 0))
    features = replay([request(0, 0, 1000, 2)], fast_forward=False)[1].features
    read = (LLAMA_8B.step_bytes + 1001 * LLAMA_8B.kv_bytes_per_token) / 4.8e12
    assert price_table(cost, features)[0][-1] == pytest.approx(read)


def test_a_step_is_the_sum_of_its_fixed_times_its_dense_layers_and_its_attention() -> None:
    """One request of 400 prompt tokens: its prompt in one step, then a step that decodes over 401 slots."""
    features = replay([request(0, 0, 400, 2)], fast_forward=False)[1].features
    seconds, attention = price_table(RooflineCost(LLAMA_8B, EXPECTED), features)
    fixed, reading = 4e-4 + 32 * 8e-6, LLAMA_8B.step_bytes / (0.85 * 4.8e12)
    per_token, row = 2 * 32 * LLAMA_8B.layer_weights / (0.65 * 989e12), 32 * (1e-5 + 2e-7)
    sampling = 2 * 4096 * 128256 / (0.65 * 989e12)
    pairs = 4 * 32 * 128 * 32 * 400 * 401 / 2 / (0.5 * 989e12)
    prompt = (400 * per_token + sampling) ** 4 + reading**4
    assert attention[0] == pytest.approx(row + pairs, rel=1e-12)
    assert seconds[0] == pytest.approx(fixed + row + pairs + prompt**0.25, rel=1e-12)
    kv = 401 * LLAMA_8B.kv_bytes_per_token / (0.95 * 4.8e12)
    decode = (per_token + sampling) ** 4 + reading**4
    assert seconds[1] == pytest.approx(fixed + row + kv + decode**0.25, rel=1e-12)


def test_no_step_is_expected_to_take_less_than_its_bound() -> None:
    features = measured_features(3)
    bound = price_table(RooflineCost(LLAMA_8B, EXPECTED.bound), features)[0]
    assert (price_table(RooflineCost(LLAMA_8B, EXPECTED), features)[0] > bound).all()
    assert bound[-1] == pytest.approx(price_table(RooflineCost(LLAMA_8B, H200), features)[0][-1])


def test_two_devices_halve_what_is_read_and_add_what_is_sent() -> None:
    """Two all-reduces a layer, one gather of a row's logits; with two devices a ring sends each byte once."""
    features = replay([request(0, 0, 1000, 2)], fast_forward=False)[1].features
    one = RooflineCost(LLAMA_8B, DeviceShape("h200", 4.8e12, 989e12, 0, 0))
    two = RooflineCost(LLAMA_8B, DeviceShape("h200", 4.8e12, 989e12, 0, 0, 2, 450e9, 10e-6))
    sent = 2 * 32 * (4096 * 2 / 450e9 + 10e-6) + (LLAMA_8B.vocab / 2 * 2 / 450e9 + 10e-6)
    assert price_table(two, features)[0][-1] == pytest.approx(price_table(one, features)[0][-1] / 2 + sent)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "weights_gb", "kv_bytes"),
    [(40, 5120, 40, 26, 819_200), (64, 9216, 72, 132, 2_359_296), (96, 12288, 96, 346, 4_718_592)],
)
def test_the_paper_s_models_have_the_paper_s_sizes(
    layers: int, hidden: int, heads: int, weights_gb: float, kv_bytes: int
) -> None:
    opt = ModelShape(layers, hidden, heads, heads, 128, 4 * hidden, 50272, 2, mlp_matrices=2)
    assert opt.weight_bytes / 1e9 == pytest.approx(weights_gb, rel=0.02)
    assert opt.kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize(("width", "churn"), [(2, 0.25), (4, 0.33), (8, 0.38), (4, 0.0)])
def test_drawn_beams_are_dropped_at_the_given_rate(width: int, churn: float) -> None:
    genealogy = BeamGenealogy({width: churn})
    distinct = [len(set(genealogy.parents(rid, step, width))) for rid in range(50) for step in range(40)]
    assert churn_of_run(width, distinct) == pytest.approx(churn, abs=0.02)


def test_draws_depend_on_the_request_and_its_step_alone() -> None:
    one, other = BeamGenealogy({4: 0.4}), BeamGenealogy({4: 0.4})
    other.parents(9, 9, 4)
    assert one.parents(3, 5, 4) == other.parents(3, 5, 4)


def test_an_all_reduce_reaches_a_share_of_the_link_and_the_bound_all_of_it() -> None:
    device = DeviceShape("pair", 1e12, 1e15, 0.0, 0.0, parallel=2, link_bandwidth=64e9, link_efficiency=0.25)
    whole = replace(device, link_efficiency=1.0)
    model = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 2)
    features = np.zeros((1, len(FEATURES)))
    features[0, AT.tokens] = 64
    seconds = [
        price_table(RooflineCost(model, each), features)[0][0] for each in (device, whole, device.bound)
    ]
    sent = 64 * 2 * 32 * 4096 * 2  # two all-reduces a layer; of two devices each sends all of it once
    assert seconds[0] - seconds[1] == pytest.approx(sent / 16e9 - sent / 64e9, rel=1e-9)
    assert seconds[2] < seconds[1]


def test_an_all_reduce_of_few_tokens_takes_one_round_and_that_of_many_takes_two() -> None:
    device = DeviceShape("four", 1e12, 1e15, 0.0, 0.0, parallel=4, link_bandwidth=100e9, link_latency_s=5e-6)
    reduces, token_bytes = 2 * LLAMA_8B.layers, 2 * LLAMA_8B.hidden
    features = np.zeros((2, len(FEATURES)))
    features[:, AT.tokens] = 1, 2048
    free = replace(device, link_bandwidth=1e30, link_latency_s=0.0)
    with_links, without = (price_table(RooflineCost(LLAMA_8B, each), features)[0] for each in (device, free))
    links, fixed = with_links - without, (reduces + 1) * 5e-6
    assert links[0] == pytest.approx(fixed + reduces * 3 * token_bytes / 100e9)
    assert links[1] == pytest.approx(fixed + reduces * (5e-6 + 1.5 * 2048 * token_bytes / 100e9))


def test_scatter_of_small_attention_does_not_raise_large_attention() -> None:
    features = np.zeros((400, len(FEATURES)))
    step, kv = (AT.step, AT.decode_kv)
    features[:, step] = 1
    features[:300, kv], features[300:, kv] = 20, 600
    attention = 1e-6 * features[:, kv]
    attention[:300:2] *= 1.5  # a clock that sees 30 instead of 20 us, in steps of a millisecond
    cost = fit_cost(features, 1e-3 + attention, attention, SOURCE)
    predicted = price_table(cost, features[300:])[1]
    assert predicted.sum() == pytest.approx(attention[300:].sum(), rel=0.05)
