"""The recording behind the lesson `replay`: its states are those that the core's own counters say."""

from types import SimpleNamespace

import pytest
from tiers import cases

from engine.core.plan import StepPlan, StepResult
from engine.runtime.runner import StepTimes
from harness import point
from harness.cli.main import main
from harness.lessons.pages import CACHED, DEFAULT, FIRST, Recording, record
from harness.measure import engine
from harness.measure.executor import MeasuredExecutor
from harness.point.cost import cost_model
from harness.replay.features import FeatureMeter
from harness.sweep.plan import plan_sweep, run_request
from harness.workload.deployment import deployment_of
from harness.workload.point import resolve
from harness.workload.simulate import simulate


def states(recording: Recording) -> list[dict[int, int]]:
    """The codes of all blocks that ever changed, by step."""
    now: dict[int, int] = {}
    found = []
    for step in range(len(recording.times)):
        part = slice(recording.offsets[step], recording.offsets[step + 1])
        now |= dict(zip(recording.blocks[part], recording.codes[part], strict=True))
        found.append(dict(now))
    return found


@pytest.mark.nightly
@cases(
    "more",
    [
        (),
        ("cache.block_size=4", "cache.pool_tokens=3000"),
        ("decoding=sample", "decoding.n=3", "workload.num_requests=20"),
    ],
    day=1,
    ids=["default", "small blocks, preemptions", "samples"],
)
def test_blocks_in_use_and_cached_are_those_of_the_log(more: tuple[str, ...]) -> None:
    given = {word.split("=", 1)[0] for word in more}
    words = [*(word for word in DEFAULT if word.split("=", 1)[0] not in given), *more]
    config = plan_sweep(run_request(words), point).points[0].config
    workload = resolve(config)
    steps = simulate(workload, cost_model(deployment_of(config))).steps
    recording = record(more)
    found = states(recording)
    assert recording.times == pytest.approx(steps["start_s"].tolist())
    used = [sum(code >= FIRST for code in state.values()) for state in found]
    assert used == steps["physical_blocks"].tolist()
    cached = [sum(code == CACHED for code in state.values()) for state in found]
    assert cached == (steps["cached"] // recording.block_size).tolist()


@pytest.mark.nightly
def test_samples_of_one_request_are_no_several_requests() -> None:
    words = (
        "decoding=sample",
        "decoding.n=3",
        "workload.num_requests=4",
        "workload.prefix_share=0",
        'out="a b"',
    )
    recording = record(words)
    assert recording.label.endswith(""" workload.prefix_share=0 'out="a b"'""")  # as a shell takes it
    in_use = [code for code in recording.codes if code >= FIRST]
    assert len(in_use) > 100
    assert not any(code % 2 for code in in_use)


def test_beams_that_a_client_sends_are_recorded_as_a_run_has_them() -> None:
    more = ("decoding.beam_width=2", "decoding.sharing=prefix_cache", "workload.num_requests=2")
    more += ("workload.prefix_share=0",)
    given = {word.partition("=")[0] for word in more}
    words = [word for word in DEFAULT if word.partition("=")[0] not in given]
    config = plan_sweep(run_request([*words, *more]), point).points[0].config
    log = simulate(resolve(config), cost_model(deployment_of(config)))
    recording = record(more)
    assert len(recording.requests) == len(log.requests["request_id"]) > 2
    assert recording.times == pytest.approx(log.steps["start_s"].tolist())


def test_a_measured_run_is_recorded_beside_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    found, real = [], engine.measure

    def measure(*given, **more):
        found.append(real(*given, **more))
        return found[-1]

    monkeypatch.setattr(engine, "measure", measure)
    first = record(["measure=true", "cost=roofline", "workload.num_requests=8"])
    second = first.beside
    assert second is not None
    assert {first.side, second.side} == {"predicted", "measured"}
    assert first.times[-1] >= second.times[-1]
    assert first.requests == second.requests
    measured = first if first.side == "measured" else second
    used = [sum(code >= FIRST for code in state.values()) for state in states(measured)]
    assert used == found[-1].log.steps["physical_blocks"].tolist()
    assert measured.times == pytest.approx(found[-1].log.steps["start_s"].tolist())


def test_the_time_of_noting_is_no_part_of_a_measured_step() -> None:
    """As long as an observer looks at a planned step, the clock of the engine stands still."""
    ticks = iter([10.0, 10.000003, 10.000005, 10.000006, 10.000008, 10.000009])
    runner = SimpleNamespace(execute=lambda plan: (StepResult(), StepTimes(0.0, 1e-6, 1e-6, 0.0, 0.0)))
    executor = MeasuredExecutor(runner, lambda: next(ticks), FeatureMeter({}, 16))
    looked = []
    executor.begin()
    executor.unclocked(lambda: looked.append(True))
    executor.execute(StepPlan(0, []), None)
    timing = executor.end()
    assert looked
    assert timing.ns == [7_000]
    assert timing.phases["policy_s"] == pytest.approx(5e-6)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["replay", "cache.block_size=8,16"], "one value for cache.block_size"),
        (["replay", "cache=contiguous_max"], "contiguous_max has none"),
        (["replay", "device.data_parallel=2"], "device.data_parallel"),
        (["replay", "model=gemma2_9b", "cache.groups=uniform"], "cache.groups"),
        (["pool", "cache.block_size=8"], "of the lesson replay alone"),
        (["pool", "--trace", "chat"], "of the lesson accountant alone"),
        (["accountant", "--requests", "5"], "--requests: found 5"),
        (["accountant", "--trace", "none.csv"], "none.csv"),
    ],
)
def test_what_cannot_be_shown_is_refused(words: list[str], text: str, tmp_path, capsys) -> None:
    assert main(["lesson", *words, "--out", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err
