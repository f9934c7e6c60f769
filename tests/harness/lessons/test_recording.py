"""The recording behind the lesson `replay`: its states are those that the core's own counters say."""

import pytest

from harness import point
from harness.cli.main import main
from harness.lessons.recording import CACHED, DEFAULT, FIRST, Recording, record
from harness.point.cost import cost_model
from harness.sweep.plan import plan_sweep, run_request
from harness.workload.simulate import simulate
from harness.workload.workload import build_workload


def states(recording: Recording) -> list[dict[int, int]]:
    """The codes of all blocks that ever changed, by step."""
    now: dict[int, int] = {}
    found = []
    for step in range(len(recording.times)):
        part = slice(recording.offsets[step], recording.offsets[step + 1])
        now |= dict(zip(recording.blocks[part], recording.codes[part], strict=True))
        found.append(dict(now))
    return found


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("cache.block_size=4", "cache.pool_tokens=3000"),
        ("decoding=sample", "decoding.n=3", "workload.num_requests=20"),
    ],
    ids=["default", "small blocks, preemptions", "samples"],
)
def test_blocks_in_use_and_cached_are_those_of_the_log(more: tuple[str, ...]) -> None:
    given = {word.split("=", 1)[0] for word in more}
    words = [*(word for word in DEFAULT if word.split("=", 1)[0] not in given), *more]
    config = plan_sweep(run_request(words), point).points[0].config
    workload = build_workload(config)
    steps = simulate(workload, cost_model(config), None).steps
    recording = record(more)
    found = states(recording)
    assert recording.times == pytest.approx(steps["start_s"].tolist())
    used = [sum(code >= FIRST for code in state.values()) for state in found]
    assert used == steps["physical_blocks"].tolist()
    cached = [sum(code == CACHED for code in state.values()) for state in found]
    assert cached == (steps["cached"] // recording.block_size).tolist()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["replay", "cache.block_size=8,16"], "one value for cache.block_size"),
        (["replay", "cache=contiguous_max"], "contiguous_max has none"),
        (["replay", "measure=true"], "measure"),
        (["replay", "device.data_parallel=2"], "device.data_parallel"),
        (["pool", "cache.block_size=8"], "of the lesson replay alone"),
    ],
)
def test_what_cannot_be_shown_is_refused(words: list[str], text: str, tmp_path, capsys) -> None:
    assert main(["lesson", *words, "--out", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err
