"""Prices of a mixture of experts, of latent attention and of quantised weights, against closed forms."""

from dataclasses import replace

import numpy as np
import pytest
from sim_cases import replay, request

from harness.cost.model_shape import Experts, LatentKV, ModelShape
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.replay.cost_model import price_table
from harness.replay.features import AT, FEATURES

QWEN3_30B_A3B = ModelShape(48, 2048, 32, 4, 128, 6144, 151936, 2, experts=Experts(128, 8, 768))
DEEPSEEK = ModelShape(
    *(27, 2048, 16, 16, 128, 10944, 102400, 2),
    experts=Experts(64, 6, 1408, shared=2816, dense_layers=1),
    latent=LatentKV(512, 64, 128),
)
H100 = DeviceShape("h100", 3.35e12, 989e12, 0, 0)
SLOW = replace(H100, flops=1e12)
TOKENS, ROWS, DECODE_KV = [AT.tokens, AT.rows, AT.decode_kv]


def decode_step(rows: int, context: int = 0) -> np.ndarray:
    """Features `[1, FEATURES]` of a step of `rows` decode rows, without attention where `context` is 0."""
    features = np.zeros((1, len(FEATURES)))
    features[0, TOKENS], features[0, ROWS], features[0, DECODE_KV] = rows, rows, rows * context
    return features


def test_one_token_touches_its_own_experts() -> None:
    assert Experts(128, 8, 768).touched()[:2].tolist() == pytest.approx([0, 8])


@pytest.mark.parametrize("tokens", [1, 4, 32, 200])
def test_equal_experts_are_touched_by_the_closed_form(tokens: int) -> None:
    assert Experts(128, 8, 768).touched()[tokens] == pytest.approx(
        128 * (1 - (1 - 8 / 128) ** tokens), rel=1e-12
    )


def test_touched_experts_are_those_of_random_draws() -> None:
    """With a skew too: experts of 200 steps of 16 tokens, each drawn by its own chance."""
    experts = Experts(32, 4, 768, skew=0.8)
    draw = np.random.default_rng(7).uniform(size=(4000, 16, 32)) < experts.chances()
    assert experts.touched()[16] == pytest.approx(draw.any(axis=1).sum(axis=1).mean(), rel=0.01)


def test_a_skew_keeps_the_number_of_experts_of_a_token_and_touches_fewer() -> None:
    even, skewed = Experts(64, 6, 1408), Experts(64, 6, 1408, skew=1.5)
    assert skewed.chances().sum() == pytest.approx(6)
    assert skewed.chances().max() <= 1
    assert skewed.touched()[20] < even.touched()[20]


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_decode_step_reads_the_common_weights_and_the_touched_experts(rows: int) -> None:
    """Without attention, and where reading takes longer than computing."""
    seconds = price_table(RooflineCost(QWEN3_30B_A3B, H100), decode_step(rows))[0][0]
    touched = 128 * (1 - (1 - 8 / 128) ** rows)
    attention = 2048 * (2 * 32 + 2 * 4) * 128
    expert = 3 * 2048 * 768
    elements = 48 * (attention + 2048 * 128 + touched * expert) + 2048 * 151936
    assert seconds == pytest.approx(2 * elements / 3.35e12, rel=1e-8)


def test_a_prompt_computes_with_the_experts_of_its_tokens_alone() -> None:
    """On a device that computes slowly, so that reading does not count."""
    features = replay([request(0, 0, 512, 1)], fast_forward=False)[1].features
    seconds, attention = price_table(RooflineCost(QWEN3_30B_A3B, SLOW), features)
    attended = 2048 * (2 * 32 + 2 * 4) * 128
    weights = 48 * (attended + 2048 * 128 + 8 * 3 * 2048 * 768)
    flops = 2 * 512 * weights + 2 * 2048 * 151936
    assert seconds[0] - attention[0] == pytest.approx(flops / 1e12, rel=1e-8)


def test_latent_attention_reads_one_vector_a_token_on_every_device() -> None:
    step = decode_step(4, context=10_000)
    read = 4 * 10_000 * 27 * (512 + 64) * 2 / 3.35e12
    for parallel in (1, 2):
        attention = price_table(RooflineCost(DEEPSEEK, replace(H100, parallel=parallel)), step)[1][0]
        assert attention == pytest.approx(read, rel=1e-8)


def test_latent_attention_of_a_prompt_multiplies_unpacked_keys_and_values() -> None:
    features = replay([request(0, 0, 512, 1)], fast_forward=False)[1].features
    attention = price_table(RooflineCost(DEEPSEEK, SLOW), features)[1][0]
    pairs = 512 * 513 / 2
    assert attention == pytest.approx(27 * 2 * 16 * (128 + 64 + 128) * pairs / 1e12, rel=1e-8)


def test_whole_experts_on_devices_wait_for_the_busiest_one() -> None:
    skewed = replace(QWEN3_30B_A3B, experts=Experts(128, 8, 768, skew=1.0))
    split, whole = (
        price_table(
            RooflineCost(skewed, replace(H100, parallel=4, link_latency_s=0.0, expert_parallel=each)), step
        )[0]
        for each in (False, True)
        for step in [decode_step(16)]
    )
    assert whole[0] > split[0]


def test_replicas_in_lockstep_gather_the_activations_of_the_others_and_give_them_back() -> None:
    """Twice 3 of the 4 replicas' tokens, of 2,048 elements of 2 bytes, in 48 layers."""
    moved = 2 * 3 / 4 * 64 * 2048 * 2 * 48
    steps_s = []
    for link in (1e9, 2e9):
        cost = RooflineCost(
            QWEN3_30B_A3B, replace(H100, replicas=4, link_bandwidth=link, link_efficiency=0.5)
        )
        cost.of_group(64)
        steps_s.append(cost.price(decode_step(16)[0]).seconds)
    assert steps_s[0] - steps_s[1] == pytest.approx(moved / 0.5e9 - moved / 1e9)


def test_whole_experts_of_equal_chances_read_what_slices_read() -> None:
    split, whole = (
        price_table(
            RooflineCost(QWEN3_30B_A3B, replace(H100, parallel=4, expert_parallel=each)), decode_step(16)
        )[0]
        for each in (False, True)
    )
    assert whole[0] == pytest.approx(split[0], rel=1e-9)


def test_eight_bits_halve_what_the_layers_read_and_leave_the_embeddings() -> None:
    dense = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 2)
    eight = replace(dense, layer_bits=8.0)
    embeddings = 2 * 4096 * 128256
    assert dense.step_bytes - embeddings == 2 * (eight.step_bytes - embeddings)
    cost = RooflineCost(eight, H100)
    assert price_table(cost, decode_step(1))[0][0] == pytest.approx(eight.step_bytes / 3.35e12)
    assert "arithmetic of quantised weights" in cost.source.provenance["not priced"]


def test_the_rate_of_float32_on_a_gpu_is_said_not_to_be_known() -> None:
    said = {
        (device, width): RooflineCost(
            replace(QWEN3_30B_A3B, bytes_per_element=width), replace(H100, name=device)
        ).source.provenance["not priced"]
        for device in ("h100", "cpu")
        for width in (2, 4)
    }
    assert [key for key, words in said.items() if "arithmetic in float32" in str(words)] == [("h100", 4)]


@pytest.mark.parametrize(
    ("parallel", "shape", "repeats"),
    [(1, QWEN3_30B_A3B, False), (4, QWEN3_30B_A3B, False), (8, QWEN3_30B_A3B, True), (2, DEEPSEEK, True)],
)
def test_what_several_devices_do_beside_their_share_is_said(
    parallel: int, shape: ModelShape, repeats: bool
) -> None:
    said = str(RooflineCost(shape, replace(H100, parallel=parallel)).source.provenance["not priced"])
    assert ("the all-reduce of the input embedding" in said) == (parallel > 1)
    assert ("weights of K and V that several devices hold" in said) == repeats
    assert "prefixes that rows share: each row reads them" in said


@pytest.mark.parametrize("shape", [QWEN3_30B_A3B, DEEPSEEK], ids=["experts", "latent"])
def test_numbers_and_arrays_are_priced_to_the_same_bits(shape: ModelShape) -> None:
    features = replay([request(n, 0, 300 + n, 20) for n in range(3)], fast_forward=False)[1].features
    cost = RooflineCost(shape, replace(H100, overlaps=True, compute_efficiency=0.6))
    seconds = price_table(cost, features)[0]
    assert seconds.tolist() == [float(cost.price(row).seconds) for row in features.tolist()]
