"""A prediction of a GPU or a real model has the defaults of a real deployment, a toy on the CPU those of a toy."""

import pytest
from tiers import cases

from harness.config.compose import TOY_MODELS, compose_config
from harness.config.groups import groups
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig


def composed(*texts: str) -> RunConfig:
    return compose_config([axis.settings[0] for axis in parse_overrides(texts)])


def scale(config: RunConfig) -> tuple[object, ...]:
    return (
        config.workload.length_scale,
        config.cache.pool_tokens,
        config.cache.max_model_len,
        config.scheduler.max_batched_tokens,
        config.scheduler.max_running,
    )


REAL, TOY = (1.0, None, None, 8192, 256), (0.1, 8192, 1024, 512, 64)


@cases(
    ("texts", "expected"),
    [
        (("measure=false", "device=h100"), REAL),
        (("measure=false", "model=llama3_8b"), REAL),
        (("measure=false", "model.path=somewhere"), REAL),
        (("measure=false", "device=h100", "cache=contiguous_max", "scheduler=swap"), REAL),
        (("engine=cuda", "model=llama3_8b"), REAL),
        (("measure=false",), TOY),
        (("measure=false", "model=small_llama"), TOY),
        (("device=h100",), TOY),
        (("engine=cuda", "device=h100"), TOY),
        (("model=llama3_8b",), TOY),
    ],
    day=5,
)
def test_whole_lengths_and_the_devices_memory_belong_to_predictions_of_real_deployments(
    texts: tuple[str, ...], expected: tuple[object, ...]
) -> None:
    assert scale(composed(*texts)) == expected


def test_what_the_user_names_stays() -> None:
    found = composed("measure=false", "device=h100", "cache.pool_tokens=8192", "workload=small")
    assert (found.cache.pool_tokens, found.workload.length_scale) == (8192, 0.1)
    assert found.scheduler.max_batched_tokens == 8192


@pytest.mark.nightly
def test_every_model_with_random_weights_for_the_cpu_is_a_toy() -> None:
    made = {"tiny", "small"}
    found = [name for name in groups()["model"] if made & set(name.split("_"))]
    assert len(found) == len(TOY_MODELS)
    assert {scale(composed("measure=false", f"model={name}")) for name in found} == {TOY}
