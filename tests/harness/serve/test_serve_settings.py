"""`serve` takes the settings that a sweep takes, and refuses those that would do nothing."""

import pytest
from own_policies import LongestFirst, MostRecentFirst, ShortPromptsFirst
from serve_cases import PATIENCE_S, served
from tiers import cases

from harness.cli.main import main
from harness.config.errors import UserError

TINY = (
    "model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "model.head_dim=16",
    "model.intermediate=48", "model.vocab=300", "model.max_position=128", "cache.pool_tokens=512",
    "cache.max_model_len=null", "engine.device=cpu",
)  # fmt: skip


def built(*overrides):
    from harness.serve import _config, build_engine

    return build_engine(_config((*TINY, *overrides)))


def test_policies_of_a_users_own_reach_the_engine(monkeypatch):
    monkeypatch.syspath_prepend("tests/support")
    engine = built(
        "scheduler.order=own_policies:ShortPromptsFirst",
        "scheduler.victim=own_policies:LongestFirst",
        "cache.eviction=own_policies:MostRecentFirst",
    )
    policies, manager = engine.scheduler.policies, engine.scheduler.manager
    assert type(policies.order).__name__ == ShortPromptsFirst.__name__
    assert type(policies.victim).__name__ == LongestFirst.__name__
    assert type(manager.pool._evictable).__name__ == MostRecentFirst.__name__


@pytest.mark.parametrize(
    ("override", "found", "wanted"),
    [
        ("scheduler.preemption=auto", lambda engine: engine.limits.preemption.value, "auto"),
        ("scheduler.policy=priority", lambda engine: engine.limits.policy.value, "priority"),
        ("scheduler.watermark=0.1", lambda engine: engine.limits.watermark, 0.1),
        ("scheduler.static_batch=true", lambda engine: engine.limits.static_batch, True),
        ("scheduler.chunked_prefill=false", lambda engine: engine.limits.chunked_prefill, False),
        ("cache.hash=xxh3_128", lambda engine: engine.options.hash.value, "xxh3_128"),
        ("cache.block_size=8", lambda engine: engine.scheduler.manager.block_size, 8),
        ("cache.policy=contiguous_pow2", lambda engine: engine.scheduler.manager.block_size, 1),
        ("decoding.draft_tokens=3", lambda engine: engine.runner.drafter is not None, True),
        ("cache.host_tokens=64", lambda engine: engine.scheduler.manager.swapper.host.num_blocks, 4),
    ],
)
def test_a_setting_reaches_the_engine(override, found, wanted):
    host = ("cache.host_tokens=64",) if "preemption" in override else ()
    assert found(built(override, *host)) == wanted


@pytest.mark.parametrize(
    "override", ["cache.tier_tokens=4096 cache.disk_tokens=8192", "model.weight_dtype=fp8"]
)
def test_what_is_predicted_alone_is_refused_without_a_setting_that_a_server_has_not(override):
    """A server measures: `measure=false` is advice for a sweep."""
    with pytest.raises(UserError, match="a sweep with measure=false predicts") as refused:
        built(*override.split())
    assert "set measure=false" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "looked_up"),
    [
        ("cache.prefix_caching=true", 36),
        ("cache.prefix_caching=false", 0),
        ("cache.policy=contiguous_max", 0),
    ],
)
def test_a_server_knows_whether_it_has_a_prefix_cache_and_counts_what_was_looked_up(override, looked_up):
    """Not the prompts whose log-probabilities are asked for, which are computed whole; as vLLM's counters."""
    from engine.runtime.async_engine import EngineFacts
    from engine.runtime.params import SamplingParams

    engine = built(override)
    for number, scored in (("a", None), ("b", 1)):
        engine.add_request(number, [5, 6, 7] * 12, SamplingParams(max_tokens=2, prompt_logprobs=scored))
    assert len([output for output in engine.run() if output.finished]) == 2
    assert engine.counters.prefix_queries == looked_up
    assert EngineFacts.of(engine).prefix_caching == (looked_up > 0)


@pytest.mark.parametrize(
    "override",
    ["cache.retention=none", "cache.deduplicate=true", "cache.copy_at_fork=true", "cache.hash=xxh3_128"],
)
def test_answers_do_not_depend_on_the_policy(override):
    from engine.runtime.params import SamplingParams

    said = []
    for engine in (built(), built(override)):
        for number in range(4):
            engine.add_request(str(number), [5, 6, 7] * 12, SamplingParams(n=2, seed=1, max_tokens=9))
        done = [output for output in engine.run() if output.finished]
        said.append(sorted((out.request_id, str([one.token_ids for one in out.outputs])) for out in done))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "override",
    ["decoding.beam_width=4", "workload.num_requests=3", "replay=closed", "device=h200", "experiment=gpu"],
)
def test_a_setting_without_effect_is_refused_by_name(override, capsys):
    assert main(["serve", *TINY, override]) == 2
    assert f"a server has no use for {override.split('=')[0]}" in capsys.readouterr().err


def test_steps_that_are_scheduled_ahead_are_refused():
    """The engine would hold the blocks of what a step ends, and schedule no step ahead."""
    with pytest.raises(
        UserError, match=r"scheduler\.async_scheduling: true, but a server schedules a step when"
    ):
        built("scheduler.async_scheduling=true")


def test_a_policy_that_cannot_be_made_is_the_users_error():
    with pytest.raises(UserError, match="no_such_module"):
        built("scheduler.victim=no_such_module:Victim")


def test_compiled_kernels_that_cannot_be_had_are_refused_before_anything_is_loaded(monkeypatch, capsys):
    from paged_kernels.native import load_library

    monkeypatch.setenv("PAGETWIN_NATIVE", "0")
    load_library.cache_clear()
    try:
        assert main(["serve", *TINY, "engine.backend=native"]) == 2
    finally:
        load_library.cache_clear()
    assert "PAGETWIN_NATIVE=0 leaves compiled kernels out; use engine.backend=auto" in capsys.readouterr().err


def test_a_model_that_no_memory_holds_is_refused_before_anything_is_loaded(capsys):
    assert (
        main(["serve", *TINY, "engine.device=cpu", "model.layers=10000", "model.intermediate=1000000"]) == 2
    )
    assert "error: model: its weights take" in capsys.readouterr().err


WINDOWED = ("model.family=gemma2", "model.layers=2", "model.window=24", "model.windowed_layers=1")


@pytest.mark.nightly
@cases("groups", ["uniform", "separate"], day=1)
def test_a_server_with_groups_answers_as_one_without(groups):
    import httpx

    said = []
    for override in ("cache.groups=off", f"cache.groups={groups}"):
        engine = built(
            *WINDOWED, override, "cache.pool_tokens=256", "cache.block_size=4", "engine.audit=full"
        )
        with served(engine) as address:
            body = {"model": "tiny", "prompt": [5, 6, 7, 8, 9] * 12, "max_tokens": 30, "temperature": 0}
            answers = [
                httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE_S) for _ in range(2)
            ]
            said.append([answer.json()["choices"][0]["text"] for answer in answers])
    assert said[0] == said[1]
    assert engine.counters.prefix_hits > 0
    assert engine.runner.audits == engine.counters.steps


def test_groups_that_the_model_does_not_have_are_refused():
    from harness.config.errors import ConfigError

    with pytest.raises(ConfigError, match=r"cache\.groups: group 0 has 2 window layers .* the model has 1"):
        built(*WINDOWED[:3], "model.windowed_layers=2", "cache.groups=uniform")


def test_a_server_of_a_model_with_states_hits_them_and_answers_alike():
    import httpx

    shape = ("model.family=qwen3_next", "model.layers=2", "model.state_layers=1", "model.state_bytes=3072")
    engine = built(*shape, "cache.groups=separate", "cache.state_every=16", "engine.audit=full")
    with served(engine) as address:
        body = {"model": "tiny", "prompt": [5, 6, 7, 8, 9] * 12, "max_tokens": 12, "temperature": 0}
        answers = [
            httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE_S).json() for _ in range(2)
        ]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert engine.counters.prefix_hits > 0
    assert engine.runner.audits == engine.counters.steps
