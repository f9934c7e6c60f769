"""Composition: the cached one equals Hydra's own, types are checked, and every file under conf/ composes."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from engine.core.options import CachePolicy
from harness.config.compose import compose_config, compose_with_hydra, real_defaults
from harness.config.errors import ConfigError
from harness.config.groups import EXPERIMENTS, conf_dir, default_choices, groups, option_file, purpose
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig


def composed(*texts: str) -> RunConfig:
    return compose_config([axis.settings[0] for axis in parse_overrides(texts)])


VALUES = {
    "name": st.sampled_from(["one", "two"]),
    "measure": st.booleans(),
    "cache.block_size": st.integers(1, 64),
    "cache.pool_tokens": st.one_of(st.none(), st.integers(1, 10**6)),
    "cache.max_model_len": st.sampled_from(["${cache.pool_tokens}", "null", "64"]),
    "workload.prefix_share": st.floats(0, 1),
    "workload.oversize": st.sampled_from(["drop", "error"]),
    "decoding.mode": st.sampled_from(["greedy", "sample"]),
    "trace.path": st.sampled_from(["null", "a/b.csv", "'x, y.csv'"]),
    "device.name": st.sampled_from(["mine", "7"]),
}
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        **{group: st.sampled_from(options) for group, options in groups().items()},
        **VALUES,
    },
)


@pytest.mark.slow
@given(OVERRIDES)
@settings(max_examples=25, deadline=None)  # Hydra's own composition takes a third of a second
def test_cached_composition_equals_hydras_own(chosen: dict[str, object]) -> None:
    texts = [f"{key}={'null' if value is None else value}" for key, value in chosen.items()]
    tree = compose_with_hydra(texts)
    for key, value in real_defaults(tree, chosen).items():
        OmegaConf.update(tree, key, value, merge=False)
    assert composed(*texts) == OmegaConf.to_object(tree)


def test_composing_leaves_the_cached_configuration_as_it_was() -> None:
    composed("cache.block_size=32", "name=other")
    assert composed().cache.block_size == 16
    assert composed().out == "results/default"


def test_the_results_folder_follows_the_name() -> None:
    assert composed("name=mine").out == "results/mine"


def test_a_group_choice_changes_the_whole_group() -> None:
    assert composed("cache=contiguous_max").cache.policy is CachePolicy.contiguous_max


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache.block_size=abc", "cache.block_size: found 'abc', must be a whole number"),
        ("cache.block_size=8.5", "cache.block_size: found '8.5', must be a whole number"),
        ("cache.block_size=null", "cache.block_size: found null, must be a whole number"),
        ("cache.policy=pagd", "cache.policy: found 'pagd', must be one of paged, contiguous_max"),
        ("workload.prefix_share=half", "workload.prefix_share: found 'half', must be a number or null"),
        ("measure=maybe", "measure: found 'maybe', must be true or false"),
        ("cache.block_size=[8,16]", "write the values without brackets"),
        ("out=${nowhere}", "out: Interpolation key 'nowhere' not found"),
    ],
)
def test_a_value_of_the_wrong_type_names_the_key_the_value_and_what_is_allowed(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(text)
    assert message in str(caught.value)


OPTIONS = [(group, option) for group, options in groups().items() for option in options]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group: str, option: str) -> None:
    assert composed(f"{group}={option}") is not None


@pytest.mark.parametrize("file", sorted(conf_dir().rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_file_starts_by_saying_what_it_is_for(file: Path) -> None:
    assert file.read_text(encoding="utf-8").startswith("# ")


def test_the_purpose_of_an_option_is_its_first_line() -> None:
    assert purpose("cache", "paged").startswith("Choose for blocks that are allocated on demand")


def test_every_group_has_a_default_that_exists() -> None:
    assert set(default_choices()) == set(groups())
    assert all(option_file(*pair).is_file() for pair in default_choices().items())


def test_experiments_are_no_hydra_group() -> None:
    assert EXPERIMENTS not in groups()
