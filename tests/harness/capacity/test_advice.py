"""Advice: answers with their evidence, warnings where a cache finds nothing or admission thrashes, and flags."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from tiers import cases

from engine.core.options import Eviction, GroupPages
from harness.capacity import CapacityAnswer, estimate, highest_rate
from harness.capacity.advice import (
    Advice,
    _devices,
    _replicas,
    advise,
    beside,
    best_rule,
    effects,
    rate_text,
    reuse,
    tier_line,
)
from harness.capacity.case import LoadCase, Trial
from harness.capacity.flags import HUB_IDS, flags_of
from harness.capacity.slo import parse_slo
from harness.cli.main import main
from harness.cli.workload import case_of as source_case
from harness.config import groups as option_groups
from harness.config.compose import TOY_MODELS, compose_config
from harness.config.errors import UserError
from harness.config.overrides import parse_overrides
from harness.config.values import replaced
from harness.metrics.compute import compute_metrics
from harness.metrics.record import PointRecord
from harness.point.cost import cost_model
from harness.store.commit import StoreContent
from harness.twin.configured import configured
from harness.twin.fit import trace_bytes
from harness.twin.prediction import predictor
from harness.twin.reading import read_engine_log
from harness.workload.deployment import settings_text
from harness.workload.point import resolve
from harness.workload.simulate import predict, simulate
from traces.analysis.reuse import PrefixPaths, optimal_hit_tokens, reuse_profile
from traces.formats.pagetwin import write_jsonl
from traces.trace import Segment, Trace, TraceHeader, TraceRequest

SLO = "ttft_p99<5,tpot_mean<0.1"


def write(folder: Path, shared: int, unique: int, output: int, count: int, gap_s: float) -> Path:
    """A trace of prompts that share a prefix, a request every `gap_s` seconds."""
    file = folder / "trace.jsonl"
    rows = [
        {
            "arrival_s": index * gap_s,
            "prompt_tokens": shared + unique,
            "output_tokens": output,
            **({"prefix": "one", "prefix_tokens": shared} if shared else {}),
        }
        for index in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def case_of(file: Path, *overrides: str, slo: str = SLO) -> LoadCase:
    words = (
        "measure=false",
        "trace=file",
        "workload=as_recorded",
        f"trace.path={file}",
        "model=llama3_8b",
        "device=h100",
        *overrides,
    )
    config = compose_config(axis.settings[0] for axis in parse_overrides(words))
    return LoadCase(config, parse_slo(slo), requests=60)


def advice_of(file: Path, *overrides: str, slo: str = SLO) -> Advice:
    return advise(case_of(file, *overrides, slo=slo), lambda what: None)


@cases("pool", [None, 40_000, 2_000], day=1)
@pytest.mark.parametrize("shared", [0, 800])
def test_a_flag_that_is_not_replayed_changes_nothing(tmp_path: Path, shared: int, pool: int | None) -> None:
    """A replay of every flag has the figures that are said of it, whether it was spared or not."""
    words = [] if pool is None else [f"cache.pool_tokens={pool}"]
    case = case_of(write(tmp_path, shared, 400, 60, 60, 0.05), *words)
    found = effects(case, 20.0)
    spared = {one.key for one in found if not one.trial.changes}
    for one in found:
        again = LoadCase(case.config, case.slo, requests=60).run(
            {one.key: one.value}, rate=20.0, busiest=one.trial.busiest, copies=one.trial.copies
        )
        assert again.metrics["ttft_p99"] == pytest.approx(one.trial.metrics["ttft_p99"])
        assert again.metrics["tpot_mean"] == pytest.approx(one.trial.metrics["tpot_mean"])
    assert ("cache.block_size" in spared) == (not shared and pool != 2_000)


def test_flags_are_tried_on_all_requests_where_the_busiest_ones_alone_do_not_break_the_slo(
    tmp_path: Path,
) -> None:
    """Sent once, 60 requests meet it at a rate that lasts for no more than that; then no flag would seem to help."""
    draw, file = np.random.default_rng(1), tmp_path / "trace.jsonl"
    times, outputs = np.cumsum(draw.exponential(0.5, 60)), draw.integers(10, 200, 60)
    rows = [
        {"arrival_s": round(at, 6), "prompt_tokens": 400, "output_tokens": output}
        for at, output in zip(times.tolist(), outputs.tolist(), strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    case = replace(case_of(file, "scheduler.max_running=4", slo="ttft_p99<2"), requests=240, made=[])
    answer = highest_rate(case, 1, 0.05, lambda _: None)
    assert answer.bad is not None
    assert case.run(rate=answer.bad.rate, busiest=True).met
    first = effects(case, answer.bad.rate)[0]
    assert (first.key, first.trial.busiest) == ("scheduler.max_running", False)
    assert first.worse < 0.1


@pytest.mark.nightly
def test_requests_are_sent_as_often_with_a_flag_as_without_it(tmp_path: Path) -> None:
    """A queue that grows is longer the more often they are sent; fewer places let it grow so fast that few show it."""
    file = write(tmp_path, 0, 400, 200, 60, 0.05)
    case = replace(case_of(file, "scheduler.max_running=128", slo="ttft_p99<1"), requests=20_000, made=[])
    answer = highest_rate(case, 1, 0.05, lambda _: None)
    assert answer.bad is not None
    assert answer.bad.copies > 2
    assert {one.trial.copies for one in effects(case, answer.bad.rate)} == {answer.bad.copies}


def test_no_model_is_named_that_takes_none_of_what_is_left_out(tmp_path: Path, capsys) -> None:
    for prompt, named in ((20_000, "model=llama31_8b takes them"), (10_000_000, None)):
        file = write(tmp_path, 0, prompt, 5, 40, 1.0)
        assert main(["advise", str(file), "--model", "llama3_8b", "--device", "h100"]) == 2
        said = capsys.readouterr()
        assert said.out.count("Simulated: 0 of 40 requests") == 1
        assert (f"; {named}" if named else "takes here.") in said.out
        assert said.err.strip() == "error: no answer, because no request is left to simulate"


def test_one_pass_gives_the_hits_of_separate_replays_at_ten_pool_sizes(tmp_path: Path) -> None:
    """For requests one after the other that fit the smallest pool, exactly."""
    draw, file = np.random.default_rng(3), tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 60_000 * at, "input_length": 512 * count + 100, "output_length": 1,
         "hash_ids": [*(int(family) * 100 + place for place in range(count)), 10_000 + at]}
        for at, (family, count) in enumerate(zip(draw.zipf(1.5, 60) % 9, draw.integers(1, 6, 60).tolist(), strict=True))
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    case = case_of(file, "trace=mooncake", f"trace.path={file}", "cache.block_size=512")
    profile = reuse_profile(case.trace, 512, spare_last_token=True)
    pools = [6 + 2 * place for place in range(10)]
    replayed = [case.run({"cache.pool_tokens": 512 * blocks}).metrics["hit_tokens"] for blocks in pools]
    assert replayed == [profile.hit_tokens(blocks) for blocks in pools]
    assert len(set(replayed)) > 3


def test_the_curve_is_that_of_the_requests_that_are_replayed(tmp_path: Path) -> None:
    """Tenants share nothing with each other, and requests that are left out have no part in it."""
    draw = np.random.default_rng(8)
    rows = []
    for number, (text, own) in enumerate(
        zip(draw.integers(4, size=50), draw.integers(1, 900, 50), strict=True)
    ):
        parts = Segment(7 + int(text), 100 * (1 + int(text))), Segment(None, int(own))
        prompt, salt = sum(part.tokens for part in parts), f"tenant {number % 2}"
        rows.append(TraceRequest(number, number * 60_000_000, prompt, 1, parts, salt=salt))
    header, file = TraceHeader("t", "simple", "t", "content", None, 1, "", 50, 50), tmp_path / "trace.jsonl"
    write_jsonl(Trace(header, tuple(rows)), file)
    words = ("trace=pagetwin", f"trace.path={file}", "cache.max_model_len=1000")
    case, advice = case_of(file, *words), Advice()
    profile = reuse(case, advice)
    assert sum(count for count, _ in case.scope.left_out.values()) > 5
    pools = [64 + 8 * place for place in range(10)]
    replayed = [case.run({"cache.pool_tokens": 16 * blocks}).metrics["hit_tokens"] for blocks in pools]
    assert replayed == [profile.hit_tokens(blocks) for blocks in pools]
    assert len(set(replayed)) > 3
    of_all = reuse_profile(Trace(header, tuple(rows)), 16, spare_last_token=True)
    without_salts = tuple(replace(row, salt=None) for row in case.trace.requests)
    alone = reuse_profile(Trace(header, without_salts), 16, spare_last_token=True)
    assert profile.hit_tokens(100) not in (of_all.hit_tokens(100), alone.hit_tokens(100))


@pytest.mark.nightly
def test_bounds_reach_as_far_as_the_ends_do_and_to_zero_where_a_slow_device_meets_it_at_no_rate(
    tmp_path: Path,
) -> None:
    case = case_of(write(tmp_path, 0, 400, 60, 60, 0.5), slo="tpot_mean<0.0075")
    answer = highest_rate(case, 1, 0.05, lambda _: None)
    assert answer.band is not None
    assert answer.band[0] == 0
    assert not case.run(rate=(case.rate or 1.0) / 100, end="slow").met
    assert case.run(rate=answer.band[1] / 1.15, end="fast").met
    assert not case.run(rate=answer.band[1], end="fast").met


@pytest.mark.nightly
def test_a_fitted_device_has_bounds_from_what_its_log_leaves_open(tmp_path: Path) -> None:
    file = write(tmp_path, 0, 400, 60, 60, 0.05)

    def band(fits: str) -> tuple[float, float]:
        case = case_of(file, "device.fitted_from=a log", f"device.fits='{fits}'")
        answer = highest_rate(case, 1, 0.05, lambda _: None)
        assert answer.band is not None
        assert answer.value is not None
        assert answer.band[0] <= answer.value.mean <= answer.band[1]
        return answer.band

    narrow, wide = band("compute_efficiency=0.64,0.65,0.66"), band("compute_efficiency=0.35,0.65,0.9")
    assert wide[1] / wide[0] > narrow[1] / narrow[0]


def test_the_line_of_every_preset_of_a_published_model_names_its_checkpoint() -> None:
    for preset in option_groups.groups()["model"]:
        name = yaml.safe_load(option_groups.option_file("model", preset).read_text(encoding="utf-8"))["name"]
        assert name in (*HUB_IDS, *TOY_MODELS, "opt-175b"), preset  # which is not on the hub


def test_three_requests_give_no_advice(tmp_path: Path) -> None:
    advice = advice_of(write(tmp_path, 0, 200, 20, 3, 1.0))
    assert advice.answers == ["No advice: 3 requests are too few to answer from; give 30 or more."]
    assert advice.config is None


def test_a_limit_of_sequences_that_binds_is_raised_and_said_first_to_matter(tmp_path: Path) -> None:
    """Never the observed peak: with 4 sequences no more than 4 run, and the server could hold many more."""
    advice = advice_of(write(tmp_path, 0, 400, 60, 40, 0.5), "scheduler.max_running=4")
    assert advice.config is not None
    assert advice.config.scheduler.max_running >= 64
    assert any("What matters most, where the SLO breaks: max_num_seqs=" in text for text in advice.answers)


def test_flags_that_change_nothing_keep_their_values(tmp_path: Path) -> None:
    case = case_of(write(tmp_path, 0, 400, 60, 40, 0.5))
    config = advise(case, lambda what: None).config
    assert config is not None
    assert (config.scheduler, config.cache) == (case.config.scheduler, case.config.cache)


@pytest.mark.nightly
def test_flags_that_help_where_the_slo_breaks_and_do_not_raise_the_rate_are_named(tmp_path: Path) -> None:
    """Nothing of the table is without a word: what makes the worst figure smaller is taken, or it says why not."""
    draw, file = np.random.default_rng(5), tmp_path / "trace.jsonl"
    times = np.cumsum(draw.exponential(1, 400))
    rows = [
        {"arrival_s": round(at, 6), "prompt_tokens": prompt, "output_tokens": output}
        for at, prompt, output in zip(
            times.tolist(),
            draw.integers(200, 1500, 400).tolist(),
            draw.integers(20, 300, 400).tolist(),
            strict=True,
        )
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    case = replace(case_of(file, slo="ttft_p99<2,tpot_mean<0.2"), requests=4000, made=[])
    advice = advise(case, lambda what: None)
    helps = {str(one) for one in advice.effects if one.worse < 0.95}
    assert helps
    said = [text for text in advice.answers if "the rate is" in text and "simulated" not in text]
    assert len(said) == 1
    assert any(one in said[0] for one in helps)


def test_more_replicas_are_advised_where_one_does_not_hold_the_rate_of_the_trace(tmp_path: Path) -> None:
    advice = advice_of(write(tmp_path, 0, 4000, 20, 60, 0.09))
    assert advice.config is not None
    assert advice.config.device.data_parallel > 1
    assert any("replicas), which was tried." in text for text in advice.answers)


def test_replicas_beside_four_are_counted_one_by_one() -> None:
    """Four that hold 100 of 105 requests a second: eight were advised, the next multiple of four."""
    device = SimpleNamespace(name="h100", tensor_parallel=1, data_parallel=4)
    case = SimpleNamespace(
        rate=105.0,
        config=SimpleNamespace(device=device),
        run=lambda changes, rate: Trial(rate, changes, 0, {}, {}, None, ()),
    )
    answer = CapacityAnswer("", "requests/s", estimate([100.0]))
    count, said = _replicas(case, answer, {}, lambda _: None)  # type: ignore[arg-type]
    assert (count, "5 x h100 (5 replicas), which was tried" in said) == (5, True)


def test_devices_that_would_do_are_named_with_their_number() -> None:
    """Eight H200 in two replicas were called h200."""
    words = ("measure=false", "device=h100", "device.tensor_parallel=4", "device.data_parallel=2")
    config = compose_config(axis.settings[0] for axis in parse_overrides(words))
    named = [name for name, _ in _devices(config, 1.0)]
    assert named == ["16 x h100 (device.tensor_parallel=8)", "8 x h200", "8 x b200"]


def test_the_hits_of_one_pool_are_said_to_be_of_one_replica(tmp_path: Path) -> None:
    file = write(tmp_path, 800, 400, 60, 60, 0.05)
    for words, said in (((), False), (("device.data_parallel=2",), True)):
        advice = Advice()
        reuse(case_of(file, *words), advice)
        assert ("requests one after the other, all to one replica" in advice.floor) is said


def test_an_slo_that_no_rate_meets_says_which_slo_and_which_device_would_do(tmp_path: Path) -> None:
    advice = advice_of(write(tmp_path, 0, 2000, 20, 40, 1.0), slo="ttft_p99<0.005")
    assert advice.answers[0].startswith("The SLO (ttft_p99 ≤ 0.005 s): no rate meets it. At ")
    assert advice.answers[1].startswith(
        "An SLO that would do, with a tenth to spare where requests hardly meet: ttft_p99<"
    )
    assert "; it holds up to " in advice.answers[1]
    assert "device" in advice.answers[2]
    assert advice.config is None


def test_a_client_that_holds_requests_back_is_told_whether_its_load_meets_the_slo(tmp_path: Path) -> None:
    advice = advice_of(write(tmp_path, 0, 200, 20, 40, 1.0), "replay.mode=closed", "replay.users=4")
    assert advice.answers[0].startswith("The client sets the rate (replay.mode=closed): ")
    assert advice.config is not None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("replay.mode=offline",), r"A device that would do: (\d+) x h100 \(\1 replicas\)\."),
        (
            ("replay.mode=closed", "replay.users=40"),  # its requests wait for others, so it has one replica
            r"No device that was tried would do: 2 x h100 \(device.tensor_parallel=2\), .*, h200, b200\.",
        ),
    ],
)
def test_a_client_whose_load_breaks_the_slo_is_told_which_device_would_do(
    tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    file = write(tmp_path, 0, 3000, 20, 40, 1.0)
    advice = advice_of(file, *overrides, slo="ttft_p99<0.3")
    found = [re.fullmatch(said, answer) for answer in advice.answers]
    assert any(found)
    if (match := next(filter(None, found))).groups():
        enough = case_of(file, *overrides, f"device.data_parallel={match[1]}", slo="ttft_p99<0.3")
        assert enough.run().met
        assert not case_of(file, *overrides, slo="ttft_p99<0.3").run().met


def test_requests_of_a_client_that_holds_them_back_are_sent_once(tmp_path: Path) -> None:
    """Four of forty are in the server at all times, and no load that falls hides a queue."""
    case = case_of(write(tmp_path, 0, 200, 20, 40, 1.0), "replay.mode=closed", "replay.users=4")
    assert case.run().outcome["finished"] == 40


def test_a_bound_on_the_span_is_refused_where_the_load_is_sent_at_a_rate(tmp_path: Path) -> None:
    """A load of 39 s was sent thirty times under span<60, and broke it with 1,200 s."""
    file = write(tmp_path, 0, 200, 20, 40, 1.0)
    assert case_of(file, "replay.mode=offline", slo="span<60").run().met
    with pytest.raises(UserError, match="--slo: the span of a load at a rate is that of its arrivals"):
        case_of(file, slo="span<60").run()


def test_flags_beside_a_figure_that_no_run_has_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Endless over endless was no number, in every line of the table."""
    file = write(tmp_path, 0, 200, 20, 40, 1.0)
    words = ["--model", "llama31_8b", "--device", "h100", "--slo", "waste_tail<0.5"]
    assert main(["advise", str(file), *words, "replay.mode=closed", "replay.users=4"]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^\S+=\S+ +1\.00 x ", shown, flags=re.MULTILINE)) > 5
    assert "nan" not in shown


def test_a_client_whose_load_meets_the_slo_is_not_told_that_a_flag_makes_it_meet_it(tmp_path: Path) -> None:
    file = write(tmp_path, 0, 3000, 60, 60, 0.5)
    advice = advice_of(file, "replay.mode=closed", "replay.users=8")
    assert "at which the SLO (ttft_p99 ≤ 5 s, tpot_mean ≤ 0.1 s) is met" in advice.answers[0]
    assert not re.search("with .* it is met", advice.answers[0])
    assert "where the SLO breaks" not in advice.answers[1]


def test_prompts_below_the_match_unit_are_warned_of(tmp_path: Path) -> None:
    """vllm#54607: prompts of 240 tokens, blocks of 784, no hit and no warning."""
    file = write(tmp_path, 200, 40, 20, 12, 1.0)
    words = advice_of(file, "cache.block_size=784", "cache.pool_tokens=400000").warnings
    assert words
    assert words[0].startswith("0 % hits: prompts of 240 tokens that share 200 (medians), match unit 784")


def test_prompts_above_the_match_unit_are_not_warned_of(tmp_path: Path) -> None:
    advice = advice_of(write(tmp_path, 200, 40, 20, 12, 1.0))
    assert not [text for text in advice.warnings if "match unit" in text]


def test_the_share_of_the_memory_is_no_flag_where_the_pool_is_set_by_hand(tmp_path: Path) -> None:
    file = write(tmp_path, 0, 200, 20, 3, 1.0)
    assert "--max-num-seqs 256" in flags_of(case_of(file).config)
    by_hand = flags_of(case_of(file, "cache.pool_tokens=20000").config)
    assert not [flag for flag in by_hand if flag.startswith("--gpu-memory-utilization")]


def test_the_best_eviction_is_called_a_bound(tmp_path: Path) -> None:
    assert "Belady's optimum, a bound" in advice_of(write(tmp_path, 100, 20, 20, 3, 1.0)).floor


def test_the_best_of_the_rules_is_said_beside_the_bound_where_least_recently_used_is_far_from_it() -> None:
    """Three texts that come round and round, in a pool for two of them: the order that drops the third is better."""
    header = TraceHeader("made", "made", "test", "content", None, 1, "00", 90, 90)
    rows = tuple(TraceRequest(n, n, 81, 2, [Segment(1 + n % 3, 80), Segment(None, 1)]) for n in range(90))
    paths = PrefixPaths(Trace(header, rows))
    rule, found = best_rule(paths, 16, 10)
    assert reuse_profile(paths, 16, spare_last_token=True).hit_ratio(10) == 0
    assert rule is not Eviction.lru
    assert 0 < found <= optimal_hit_tokens(paths, 16, 10) / sum(row.prompt_tokens for row in rows)


def test_sharing_that_is_recorded_in_larger_blocks_is_warned_of(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row | {"timestamp": 1000 * i}) + "\n" for i in range(3)))
    warnings = advice_of(file, "trace=mooncake", f"trace.path={file}").warnings
    assert any(text.startswith("the trace records sharing in blocks of 512 tokens") for text in warnings)


@pytest.mark.parametrize(("interval", "warned"), [("0", False), ("null", True)])
def test_groups_are_warned_of_where_vllm_keeps_less(tmp_path: Path, interval: str, warned: bool) -> None:
    file = write(tmp_path, 0, 1500, 4, 2, 1.0)
    settings = "model=gemma3_12b", "cache.groups=uniform", f"cache.retention_interval={interval}"
    advice = advice_of(file, *settings)
    assert warned == any("documents asked twice hit 0.458 here" in text for text in advice.warnings)
    assert warned == ("--prefix-cache-retention-interval None" in flags_of(case_of(file, *settings).config))


def test_requests_that_are_left_out_are_said_first_with_their_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": i, "prompt_tokens": 9000 if i == 2 else 500, "output_tokens": 4} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["advise", str(file), "--model", "llama3_8b", "--device", "h100"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("Simulated: 2 of 3 requests with 10 % of the tokens, ")
    assert lines[0].endswith(
        "Left out: 1 (33 %) with 90 % of the tokens, longer than the 8,192 tokens that llama-3-8b takes here; "
        "model=llama31_8b takes them."
    )
    assert lines[1] == "No advice: 2 requests are too few to answer from; give 30 or more."


def test_windowed_layers_without_groups_are_warned_of(tmp_path: Path) -> None:
    file = write(tmp_path, 0, 3000, 20, 3, 1.0)
    advice = advice_of(file, "model=gemma3_12b", "cache.groups=off")
    assert any(
        "of the KV of a request of 3,020 tokens is never read again" in text for text in advice.warnings
    )
    config = case_of(file, "model=gemma3_12b", "cache.groups=off").config
    assert "--disable-hybrid-kv-cache-manager" in flags_of(config)


def test_the_command_prints_answers_first_and_flags_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, 100, 20, 20, 30, 1.0)
    assert main(["advise", str(file), "--model", "llama3_8b", "--device", "h100", "--requests", "40"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("Simulated: all 30 requests")
    assert lines[1].startswith("The SLO (")
    assert lines[-1].startswith("vllm serve meta-llama/Meta-Llama-3-8B --block-size 16 ")


def test_a_model_with_windows_is_advised_with_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    import harness.capacity.advice as module

    real = module.advise
    monkeypatch.setattr(module, "advise", lambda case, *more: seen.append(case.config) or real(case, *more))
    file = write(tmp_path, 0, 1500, 10, 2, 1.0)
    assert main(["advise", str(file), "--model", "gemma3_12b", "--device", "h100"]) == 0
    assert [config.cache.groups for config in seen] == [GroupPages.uniform]
    assert "--disable-hybrid-kv-cache-manager" not in capsys.readouterr().out


@pytest.mark.nightly
def test_groups_that_a_file_of_a_deployment_sets_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, words = write(tmp_path, 0, 1500, 10, 2, 1.0), ["model=gemma3_12b", "device=h100"]
    for groups, kept in (("off", GroupPages.off), ("uniform", GroupPages.uniform)):
        server = tmp_path / "server.yaml"
        config = compose_config(
            [axis.settings[0] for axis in parse_overrides([*words, f"cache.groups={groups}"])]
        )
        server.write_text(settings_text(config))
        asked = [f"deployment={server}", "trace.ticks=even", "workload.num_prefixes=3"]
        assert source_case(file, asked, parse_slo(SLO)).case.config.cache.groups is kept
    said = "without effect beside the other settings: workload.num_prefixes"
    assert [line for line in capsys.readouterr().err.splitlines() if "effect" in line] == [said, said]


@cases(
    ("words", "said"),
    [
        (
            ("decoding.draft_tokens=2", "decoding.acceptance=0.5"),
            "whose model proposes the drafts is left open",
        ),
        (("scheduler.watermark=0.1",), ""),
        (("cache.eviction=gdsf",), "vLLM evicts the least recently used alone"),
    ],
    day=2,
)
def test_what_the_line_of_vllm_does_not_ask_for_is_said_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    file = write(tmp_path, 0, 100, 5, 30, 1.0)
    assert main(["advise", str(file), "--model", "llama3_8b", "--device", "h100", *words]) == 0
    line, *rest = capsys.readouterr().out.partition("vllm serve")[2].splitlines()
    assert ("--watermark 0.1" in line) == (not said)
    assert [said in note for note in rest] == [True] * bool(said)


def test_a_rate_of_turns_that_wait_says_what_is_served(tmp_path: Path) -> None:
    """Their times are of a trace; by pauses of ten seconds they come much later."""
    rows = [
        {"arrival_s": n / 8, "prompt_tokens": 50, "output_tokens": 4, "session": f"{n % 6}"}
        for n in range(36)
    ]
    file = tmp_path / "turns.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    case = case_of(file, "replay.mode=sessions", "replay.think_s=10")
    answer = highest_rate(case, 1, 0.5, lambda _: None, bounds=False)
    assert answer.good is not None
    assert answer.value is not None
    served = answer.good.metrics["request_throughput"]
    assert served < 0.5 * answer.value.mean
    assert f"turns wait for answers, so {served:.3g} requests/s are served there" in rate_text(case, answer)
    sent = answer.good.copies * len(rows)
    assert f" (with the beginning and the end of {sent} requests, in which fewer are" in rate_text(
        case, answer
    )
    alone = case_of(file)
    assert "turns wait" not in rate_text(alone, highest_rate(alone, 1, 0.5, lambda _: None, bounds=False))


def test_a_store_gives_its_trace_and_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = write(tmp_path, 100, 20, 20, 6, 1.0), tmp_path / "store"
    settings = [
        f"trace.path={file}",
        "trace=file",
        "workload=as_recorded",
        "replay.mode=trace",
        "model=llama3_8b",
    ]
    run = [
        "run",
        "measure=false",
        "device=h100",
        "cache.block_size=32",
        "report.figures=none",
        f"out={store}",
    ]
    assert main([*run, *settings]) == 0
    capsys.readouterr()
    assert main(["advise", str(store)]) == 2  # a file outside of the store is read where it is typed
    assert "names a file outside of it" in capsys.readouterr().err
    assert main(["advise", str(store), f"trace.path={file}"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Simulated: all 6 requests")
    assert "in whole match units of 32 tokens" in shown


def test_a_store_gives_the_workload_of_its_first_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole trace at its own times and lengths was taken instead, and only its size was said."""
    words = ["trace=sosp23_alpaca", "model=llama3_8b", "device=h100", "workload.length_scale=0.5"]
    (tmp_path / "points").mkdir()
    monkeypatch.setattr(
        "harness.store.commit.read_store", lambda root: StoreContent({"point": PointRecord(overrides=words)})
    )
    own, whole = (
        source_case(tmp_path, asked, parse_slo(SLO)).case.config.workload
        for asked in ([], ["workload=as_recorded"])
    )
    assert (own.num_requests, own.request_rate, own.length_scale) == (32, 40.0, 0.5)
    assert (whole.num_requests, whole.request_rate) == (None, None)


def test_a_class_that_a_record_names_is_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    word = "scheduler.order=stranger:Order"
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    trace = f"trace.path={write(tmp_path, 100, 20, 20, 6, 1.0)}"
    record = PointRecord(overrides=[trace, "trace=file", word])
    content = StoreContent({"point": record})
    (tmp_path / "store" / "points").mkdir(parents=True)
    monkeypatch.setattr("harness.store.commit.read_store", lambda root: content)
    assert main(["advise", "store"]) == 2
    said = capsys.readouterr().err
    assert "scheduler.order: the record of point in store names code to run, 'stranger:Order'" in said


def test_the_log_of_a_deployment_gives_its_requests_and_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s"]
    lines += [f"{index},200,20,{index + 0.1},{index + 0.5}" for index in range(35)]
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "serve.sh").write_text(
        "vllm serve meta-llama/Llama-3.1-8B --block-size 32 --max-num-seqs 8\n"
    )
    assert (
        main(["advise", str(tmp_path), "--model", "llama31_8b", "--device", "h100", "--requests", "40"]) == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("Simulated: all 35 requests")
    assert "As it ran: ttft_p50 0.1 measured, " in shown
    assert "in whole match units of 32 tokens" in shown


def test_a_log_whose_turns_go_on_behind_answers_has_its_hits_in_advise_as_in_twin(tmp_path: Path) -> None:
    """`advise` found 34.8 % of the prompt tokens in the cache, `twin` and the log 41.7 %."""
    lines = ["arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s,cached_tokens"]
    for at in range(0, 80, 4):
        lines += [f"{at},160,33,{at + 0.1},{at + 0.5},0", f"{at + 2},300,8,{at + 2.1},{at + 2.2},192"]
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    words = ["model=llama31_8b", "device=h100"]
    log = read_engine_log(tmp_path)
    twin = configured(log, words).config
    run = compute_metrics(predictor(twin, log.workload)(twin.device).log)
    found = source_case(tmp_path, words, parse_slo(SLO), 20)
    for assumed in (
        "What the server does before the scheduler's queue is assumed",
        "which earlier request it came",
    ):
        assert any(one.startswith("note: ") and assumed in one for one in found.said)  # as `twin` says
    assert run["hit_ratio"] == pytest.approx(192 / 460)
    own, whole = found.case.run(copies=1), replace(found.case, requests=40)
    assert whole.run(copies=1).metrics["hit_ratio"] == run["hit_ratio"]
    assert " (measured: 40 requests, predicted: 20 of them): " in beside(own, {"ttft_p50": 0.1}, 40)
    reuse(whole, advice := Advice())
    assert "; what prompts find of earlier answers comes on top (cache.answers)" in advice.floor
    assert whole.run({"device.data_parallel": 2}, copies=1).metrics["finished"] == 40
    assert not configured(log, [*words, "cache.answers=false"]).config.cache.answers
    (folder := tmp_path / "twin").mkdir()
    (folder / "workload.jsonl").write_bytes(trace_bytes(log.workload))  # as twin writes it, alone
    of_twin, without = (
        source_case(folder, [*words, *more], parse_slo(SLO)).case for more in ([], ["cache.answers=false"])
    )
    assert of_twin.run(copies=1).metrics["hit_ratio"] == run["hit_ratio"]
    assert not without.config.cache.answers


@pytest.mark.parametrize("queued", [False, True])
def test_a_log_that_counts_from_the_queue_is_said_to(tmp_path: Path, queued: bool) -> None:
    lines = ["arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s" + ",queued_s" * queued]
    lines += [f"{i},200,20,{i + 0.1},{i + 0.5}" + f",{i + 0.01}" * queued for i in range(35)]
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    found = source_case(tmp_path, ["model=llama31_8b", "device=h100"], parse_slo(SLO), 40)
    assert any("counts from the scheduler's queue" in line for line in found.said) is queued


@pytest.mark.nightly
def test_a_log_is_compared_with_its_own_requests_sent_once(tmp_path: Path) -> None:
    """A search sends a short log several times, by which queues grow longer than those that were measured."""
    lines = ["arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s"]
    lines += [f"{index * 0.2},200,100,{index * 0.2 + 0.8},{index * 0.2 + 0.9}" for index in range(40)]
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "serve.sh").write_text("vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 2\n")
    words = ["model=llama31_8b", "device=h100"]
    found = source_case(tmp_path, words, parse_slo(SLO), 400)
    answers = advise(found.case, lambda what: None, found.measured).answers
    point = resolve(found.case.config, found.case.recorded)
    own = predict(point, cost_model(point.deployment), rows=True).metrics["ttft_p50"]
    assert f"As it ran: ttft_p50 0.8 measured, {own:.3g} predicted; " in " ".join(answers)
    assert found.case.run(rate=found.case.rate).metrics["ttft_p50"] > 1.5 * own


@pytest.mark.nightly
def test_the_folder_of_a_twin_gives_its_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose_config(
        axis.settings[0]
        for axis in parse_overrides(("trace=file", f"trace.path={write(tmp_path, 100, 20, 20, 6, 1.0)}"))
    )
    folder = tmp_path / "twin"
    folder.mkdir()
    write_jsonl(resolve(config).trace, folder / "workload.jsonl")
    assert main(["advise", str(folder), "--model", "llama3_8b", "--device", "h100"]) == 0
    assert capsys.readouterr().out.startswith("Simulated: all 6 requests")


def test_no_command_is_given_for_a_toy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(write(tmp_path, 100, 20, 20, 30, 1.0)), "--requests", "40"]) == 0
    shown = capsys.readouterr().out
    assert "tiny-llama is a toy with random weights" in shown
    assert "vllm serve" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.jsonl"], "no such file or folder: 'nowhere.jsonl'"),
        (["{file}", "--requests", "0"], "--requests: must be at least 1"),
        (["{file}", "--slo", "fast"], "'fast' is no goal"),
        (["{file}", "cache.block_size=16,32"], "advice is for one configuration"),
    ],
)
def test_wrong_input_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, 0, 20, 2, 2, 1.0)
    assert main(["advise", *(word.format(file=file) for word in words)]) == 2
    assert message in capsys.readouterr().err


def texts_in_turn(folder: Path) -> Path:
    """Twelve texts of 4,000 tokens, one after the other, five times."""
    file = folder / "trace.jsonl"
    row = {"prompt_tokens": 4032, "output_tokens": 4, "prefix_tokens": 4000}
    rows = [{**row, "arrival_s": float(index), "prefix": str(index % 12)} for index in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_tier_is_worth_what_a_replay_with_it_loads(tmp_path: Path) -> None:
    """The pool holds one text. 8 GiB hold 65,536 tokens, all twelve."""
    case = case_of(texts_in_turn(tmp_path), "cache.pool_tokens=6000")
    profile = reuse_profile(PrefixPaths(case.trace), 16, spare_last_token=True)
    said = tier_line(case, profile)
    saved, loading = (
        float(part) for part in re.findall(r"8 GiB ([\d.]+) s for ([\d.]+) s of loading;", said)[0]
    )
    assert said.endswith("more than 8 GiB no longer pays.")
    point = resolve(replaced(case.config, {"cache.tier_tokens": 65_536}))
    metrics = compute_metrics(simulate(point, cost_model(point.deployment)))
    minutes = 60 / (60 * case.rate)
    assert loading == pytest.approx(metrics["tier_load_s"] / minutes, rel=0.05)
    assert saved == pytest.approx(metrics["tier_saved_s"] / minutes, rel=0.2)  # without attention


def test_a_tier_that_is_read_slower_than_prompts_are_computed_does_not_pay(tmp_path: Path) -> None:
    words = ("cache.pool_tokens=6000", "device.host_link_gbs=1")
    case = case_of(texts_in_turn(tmp_path), *words)
    said = tier_line(case, reuse_profile(PrefixPaths(case.trace), 16, spare_last_token=True))
    assert "does not pay: loading takes" in said
