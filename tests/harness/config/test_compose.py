"""Composition: the cached one equals Hydra's own, types are checked, and every file under conf/ composes."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tiers import cases, tier

from engine.core.options import CachePolicy
from harness.config.checks import check_config
from harness.config.compose import (
    compose_as_tree,
    compose_config,
    compose_with_hydra,
    normalise,
    real_defaults,
)
from harness.config.errors import ConfigError
from harness.config.groups import EXPERIMENTS, conf_dir, default_choices, groups, option_file, purpose
from harness.config.overrides import Setting, parse_overrides
from harness.config.schema import RunConfig, config_keys


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


@given(OVERRIDES)
@settings(max_examples=tier(2, 60))  # Hydra's own composition takes a third of a second
def test_cached_composition_equals_hydras_own(chosen: dict[str, object]) -> None:
    texts = [f"{key}={'null' if value is None else value}" for key, value in chosen.items()]
    tree = compose_with_hydra(texts)
    for key, value in real_defaults(tree, chosen).items():
        OmegaConf.update(tree, key, value, merge=False)
    assert composed(*texts) == OmegaConf.to_object(tree)


@pytest.mark.parametrize(
    "key", ["model.name", "model.path", "model.dtype", "engine.device", "cache.pool_blocks"]
)
def test_a_reference_that_leads_nowhere_is_refused_with_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match="nowhere") as refused:
        composed(f"{key}=${{nowhere}}")
    assert refused.value.key == key


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "x${oc.env:HOME,y}", "${${model.name}:HOME}"])
def test_what_reads_the_environment_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=r"name: found .*write the value itself"):
        composed(f"name='{text}'")


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
BY_DAY = [("device", "h100")]


@cases(("group", "option"), OPTIONS, day=BY_DAY)
def test_every_option_composes_and_sets_its_own_section_alone(group: str, option: str) -> None:
    one, other = (OmegaConf.to_container(compose_with_hydra(texts)) for texts in ([f"{group}={option}"], []))
    assert composed(f"{group}={option}") is not None
    assert {**one, group: None} == {**other, group: None}


def test_every_config_file_starts_by_saying_what_it_is_for() -> None:
    files = sorted(conf_dir().rglob("*.yaml"))
    assert len(files) > 100
    assert [file for file in files if not file.read_text(encoding="utf-8").startswith("# ")] == []


def test_the_purpose_of_an_option_is_its_first_line() -> None:
    assert purpose("cache", "paged").startswith("Choose for blocks that are allocated on demand")


def test_every_group_has_a_default_that_exists() -> None:
    assert set(default_choices()) == set(groups())
    assert all(option_file(*pair).is_file() for pair in default_choices().items())


def test_experiments_are_no_hydra_group() -> None:
    assert EXPERIMENTS not in groups()


def both_ways(*texts: str) -> tuple[object, object]:
    """The configuration, or the error, by values and by OmegaConf's trees; without the files of parsed overrides."""

    def answer(compose: Callable[[Sequence[Setting]], RunConfig]) -> object:
        try:
            return repr(compose(settings_of))  # which shows every type, and -0.0
        except ConfigError as error:
            return str(error)

    settings_of = [axis.settings[0] for axis in parse_overrides(texts)]
    return answer(compose_config), answer(compose_as_tree)


def words_of(kind: object) -> st.SearchStrategy[str]:
    """Values that a user may write for a key, right and wrong ones."""
    odd = [
        "null",
        "abc",
        "1.5",
        "-0.0",
        "1e3",
        "true",
        "no",
        "0x10",
        "'12'",
        "' 7'",
        "1_000",
        "inf",
        "nan",
        "???",
    ]
    odd += ["[1,2]", "{a: 1}", "${name}", "${cache.block_size}", "${nowhere}", "'a, b'", "ä"]
    own = list(kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else []
    return st.one_of(st.sampled_from([*odd, *map(str, own)]), st.integers(-3, 10**12).map(str))


ANY_KEY = st.sampled_from(sorted(config_keys())).flatmap(
    lambda key: words_of(config_keys()[key].kind).map(lambda word: f"{key}={word}")
)
ANY_GROUP = st.sampled_from(sorted(groups())).flatmap(
    lambda group: st.sampled_from(groups()[group]).map(lambda option: f"{group}={option}")
)


@given(st.lists(st.one_of(ANY_KEY, ANY_KEY, ANY_GROUP), max_size=6))
@settings(max_examples=tier(6, 200))
def test_composition_by_values_equals_composition_by_trees(texts: list[str]) -> None:
    by_values, by_trees = both_ways(*texts)
    assert by_values == by_trees


@cases(
    "texts",
    [
        ("device=h100", "measure=false"),
        ("device=h100", "measure=false", "workload=small"),
        ("measure=false", "device=h100", "cache.pool_blocks=100"),
        ("name=mine", "cache.block_size=32"),
        ("name=mine", "out='x/${name}'"),
        ("cache.max_model_len=${cache.pool_tokens}", "cache.pool_tokens=512"),
        ("model.path=/nowhere", "measure=false"),
        ("replay.think_s=-0.0",),
    ],
    day=4,
)
def test_what_follows_from_other_settings_is_the_same_by_values_and_by_trees(texts: tuple[str, ...]) -> None:
    by_values, by_trees = both_ways(*texts)
    assert by_values == by_trees


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    found = []
    for memory in (80, 4000):
        file.write_text(f"base: h100\nmemory_gb: {memory}\n")
        found.append(composed(f"device={file}").device.memory_gb)
    assert found == [80, 4000]


def test_points_share_the_sections_that_are_equal() -> None:
    texts = [("cache.block_size=8", "workload.seed=1"), ("cache.block_size=8",)]
    one, other = (compose_config([a.settings[0] for a in parse_overrides(t)], shared=True) for t in texts)
    assert one.cache is other.cache


def test_a_configuration_that_is_not_shared_may_be_changed() -> None:
    composed("cache.block_size=8").cache.block_size = 32
    assert composed("cache.block_size=8").cache.block_size == 8


def test_a_changed_section_is_checked_again() -> None:
    config = composed("cache.block_size=8")
    assert check_config(config) == []
    config.cache.block_size = 0
    assert [error.key for error in check_config(config)] == ["cache.block_size"]


def test_normalising_shares_the_sections_that_it_makes() -> None:
    texts = [("cache=contiguous_max", f"workload.seed={seed}") for seed in (1, 2)]
    shared = [compose_config([a.settings[0] for a in parse_overrides(t)], shared=True) for t in texts]
    one, other = map(normalise, shared)
    assert one.cache is other.cache
    assert one.replay is other.replay
