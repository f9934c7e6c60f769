"""What a user may write, and the answer to what they may not: keys, options, grammar."""

import pytest

from engine.core.options import Eviction
from harness.config.errors import ConfigError, UnknownKeyError, UserError
from harness.config.overrides import parse_override, parse_overrides


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cache.block_size=8", [8]),
        ("cache.block_size=8,16", [8, 16]),
        ("cache.block_size=range(8,33,8)", [8, 16, 24, 32]),
        ("cache.block_size=choice(8,16)", [8, 16]),
        ("workload.prefix_share=null,0.5", [None, 0.5]),
        ("measure=true,false", [True, False]),
        ("device=glob(a100*)", ["a100_40gb", "a100_80gb"]),
        ("""trace.path='a=b,c.csv'""", ["a=b,c.csv"]),
        ("trace.path=/data/jürgen/é b.csv,~/x.csv", ["/data/jürgen/é b.csv", "~/x.csv"]),
        ("out=~/x", ["~/x"]),
        ("cache.eviction=all", list(Eviction)),
        ("cache.eviction=null,mine:Rule", ["lru", "mine:Rule"]),
        ("cache.keep=recent,pin,ttl", ["lru", "pinned", "ttl"]),
    ],
)
def test_a_sweep_is_written_in_hydras_grammar(text: str, values: list[object]) -> None:
    assert [setting.value for setting in parse_override(text).settings] == values


def test_settings_of_older_files_have_the_names_of_today() -> None:
    axes = parse_overrides(["cache.keep=ttl", "cache.keep_s=3", "cache.keep_tokens=64"])
    assert [axis.settings[0].text for axis in axes] == [
        "cache.eviction=ttl",
        "cache.ttl_s=3",
        "cache.pinned_tokens=64",
    ]


def test_a_setting_is_spelt_as_a_user_would() -> None:
    assert [setting.text for setting in parse_override("measure=true,false").settings] == [
        "measure=true",
        "measure=false",
    ]


def test_the_text_of_a_setting_gives_the_setting_again() -> None:
    for setting in parse_override("""trace.path='a b','c,d'""").settings:
        assert parse_override(setting.text).settings == (setting,)


@pytest.mark.parametrize(
    "text", ["cache.block_sise=8", "+engine.block_sise=8", "~block_sise", "block_size@x=8"]
)
def test_an_unknown_key_is_refused_with_the_nearest_one(text: str) -> None:
    with pytest.raises(UnknownKeyError, match=r"no such key; did you mean 'cache\.block_size'\?"):
        parse_override(text)


def test_an_unknown_group_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownKeyError, match="did you mean 'cache'"):
        parse_override("+cahce=paged")


def test_a_key_like_no_other_says_how_to_see_all_keys() -> None:
    with pytest.raises(UnknownKeyError, match="harness show"):
        parse_override("qqqqq=1")


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("+cache.block_size=8", r"without '\+'"),
        ("++cache.block_size=8", r"without '\+\+'"),
        ("~cache", "nothing can be deleted"),
        ("cache@other=paged", "write cache="),
        ("cache.block_size=interval(1,2)", r"range\(start,stop,step\)"),
    ],
)
def test_a_known_key_in_a_form_that_changes_nothing_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        parse_override(text)


def test_an_unknown_option_lists_the_options_and_when_to_choose_them() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        parse_override("cache=pagd")
    assert "no option 'pagd'" in str(caught.value)
    assert "paged              Choose for blocks that are allocated on demand" in str(caught.value)


def test_a_group_does_not_take_a_mapping() -> None:
    with pytest.raises(UnknownKeyError, match="no option"):
        parse_override("cache={policy: paged}")


def test_an_unreadable_value_says_how_to_quote_it() -> None:
    with pytest.raises(UserError, match=r"""'trace\.path="a=b\.csv"'"""):
        parse_override("trace.path=a=b.csv")


def test_a_later_override_replaces_an_earlier_one() -> None:
    (axis,) = parse_overrides(["cache.block_size=8,16", "cache.block_size=4"])
    assert [setting.value for setting in axis.settings] == [4]


def test_every_bad_override_is_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides(["cache.blok=1", "cache.block_size=4", "decoding.bem_width=2"])
    assert "cache.blok" in str(caught.value)
    assert "decoding.beam_width" in str(caught.value)


@pytest.mark.parametrize("text", ["trace.path=/ü/a.csv, /ü/b.csv", "out=~/x"])
def test_the_text_of_a_value_that_was_quoted_for_the_user_gives_it_again(text: str) -> None:
    for setting in parse_override(text).settings:
        assert parse_override(setting.text).settings == (setting,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cache.block_size=range(8,33,0)", "must not be zero; use range"),
        ("cache.block_size=range(33,8,8)", r"'range\(33,8,8\)' has no value"),
        ("cache.block_size=range(0,10000000)", "has more than 100,000 values"),
        ("trace.path=glob(*)", "trace.path is none"),
    ],
)
def test_a_range_that_is_no_list_of_points_is_refused_by_its_key(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_override(text)


@pytest.mark.parametrize("text", ["cache.block_size=8,", "cache.block_size=,8", "cache.block_size=8,,16"])
def test_a_list_with_an_empty_place_says_so(text: str) -> None:
    with pytest.raises(UserError, match=r"a value is missing beside a comma; write cache\.block_size=a,b,c"):
        parse_override(text)


def test_an_override_without_a_key_says_so() -> None:
    with pytest.raises(UserError, match="no key before the '='"):
        parse_override("=8")
