"""`trace`: every action on small files, as a user runs it; mistakes are sentences and exit code 2."""

from collections.abc import Callable
from pathlib import Path

import pytest
from trace_samples import CONTENTS

from harness.cli.main import main
from traces.reading import read_trace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in an empty folder with an empty cache: exit code, output, remarks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGETWIN_TRACES", str(tmp_path / "cache"))

    def command(*words: str) -> tuple[int, str, str]:
        code = main(["trace", *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return command


@pytest.fixture
def talk(tmp_path: Path) -> str:
    (tmp_path / "talk.json").write_text(CONTENTS["agentic"])
    return "talk.json"


def test_convert_keeps_conversations_exactly(run: Run, talk: str) -> None:
    assert run("convert", talk, "--out", "t.jsonl")[0] == 0
    assert run("convert", "t.jsonl", "--out", "t.parquet")[0] == 0
    assert read_trace("t.parquet") == read_trace(talk)


def test_nothing_is_overwritten_unless_asked(run: Run, talk: str) -> None:
    run("convert", talk, "--out", "t.jsonl")
    code, _, err = run("convert", talk, "--out", "t.jsonl")
    assert (code, err) == (2, "error: --out: 't.jsonl' exists; add --overwrite to replace it\n")
    assert run("convert", talk, "--out", "t.jsonl", "--overwrite")[0] == 0


def test_slice_mends_links_and_starts_at_zero(run: Run, talk: str) -> None:
    assert run("slice", talk, "--rows", "1:4", "--out", "s.jsonl")[0] == 0
    requests = read_trace("s.jsonl").requests
    assert [(r.request_id, r.arrival_us, r.after) for r in requests] == [
        (1, 0, ()),
        (2, 3_000_000, (1,)),
        (3, 9_500_000, (2,)),
    ]


def test_slice_by_whole_sessions_takes_nested_agents_along(run: Run, talk: str) -> None:
    assert run("slice", talk, "--time", "0:1", "--whole-sessions", "--out", "s.jsonl")[0] == 0
    assert read_trace("s.jsonl").requests == read_trace(talk).requests


def test_scale_reaches_the_rate(run: Run) -> None:
    run("synth", "azure_conv", "--requests", "50", "--out", "a.jsonl")
    assert run("scale", "a.jsonl", "--to-rate", "3", "--out", "b.jsonl")[0] == 0
    last = read_trace("b.jsonl").requests[-1].arrival_us
    assert 49 / (last / 1e6) == pytest.approx(3, rel=1e-3)


def test_synth_says_what_it_is_calibrated_on_and_how_it_shares(run: Run) -> None:
    words = ("--requests", "60", "--sharing", "tree", "--share", "0.4", "--out", "a.jsonl")
    code, out, _ = run("synth", "azure_conv", *words)
    assert code == 0
    assert "calibrated_on: " in out
    assert "sharing: " in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rate", "20"), "--rate goes with --arrivals"),
        (("--arrivals", "poisson", "--shape", "2"), "--shape goes with --arrivals gamma"),
        (("--count", "4"), "--count goes with --sharing"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(run: Run, words: tuple[str, ...], said: str) -> None:
    code, _, err = run("synth", "azure_conv", "--requests", "20", *words, "--out", "a.jsonl")
    assert code == 2
    assert said in err


@pytest.mark.parametrize("name", ["azure_conv", "system_prompts"])
def test_generated_requests_come_at_the_rate_that_is_asked_for(run: Run, name: str) -> None:
    """An option of conf/trace came at its table's rate, whatever process was asked for."""
    words = ("--requests", "40", "--arrivals", "even", "--rate", "20", "--out", "a.jsonl")
    assert run("convert", name, *words)[0] == 0
    assert read_trace("a.jsonl").mean_rate == pytest.approx(20)


def test_validate_names_the_place_of_what_is_wrong(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(CONTENTS["azure"].replace("374", "x"))
    code, _, err = run("validate", "bad.csv")
    assert code == 2
    assert err.startswith('error: bad.csv:2: ContextTokens: "x" is not a plain integer')


def test_validate_counts_skipped_rows(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(CONTENTS["azure"].replace("374", "x"))
    code, out, _ = run("validate", "bad.csv", "--on-error", "skip")
    assert code == 0
    assert "rows read 2 = kept 1 + dropped 1\n  dropped: malformed ContextTokens: 1\n" in out


@pytest.mark.nightly
def test_inspect_draws_pictures(run: Run) -> None:
    assert run("inspect", "chat", "--requests", "40", "--json", "--out", "pictures")[0] == 0
    names = {"lengths", "arrivals", "burstiness", "ideal_hit_ratio", "lru_hit_ratio", "reuse_distance"}
    assert {path.stem for path in Path("pictures").glob("*.png")} == names
    assert {path.stem for path in Path("pictures").glob("*.svg")} == names


def test_a_public_trace_that_was_not_fetched_says_how_to(run: Run) -> None:
    code, _, err = run("inspect", "ragpulse-weeks")
    assert code == 2
    assert "fetch it: python -m harness trace get ragpulse-weeks" in err


def test_get_without_a_connection_says_what_to_place_where(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*words: object, **more: object) -> None:
        raise OSError("no connection")

    monkeypatch.setattr("pooch.retrieve", offline)
    code, _, err = run("get", "mooncake-conversation")
    assert code == 1
    assert "conversation_trace.jsonl  sha256 b8cbb061a85206d7" in err
    assert "cache/mooncake-conversation" in err


def test_lengths_without_a_clock_say_which_flags_to_add(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text(CONTENTS["lengths"])
    assert "here: --arrivals poisson --rate 1" in run("inspect", "lengths.csv")[2]
    assert run("inspect", "lengths.csv", "--arrivals", "poisson")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["slice", "azure_conv", "--rows", "9:3", "--out", "x.jsonl"],
        ["scale", "azure_conv", "--out", "x.jsonl"],
        ["convert", "azure_conv", "--out", "x.txt"],
        ["get", "nothing"],
    ],
)
def test_wrong_wishes_are_refused_before_any_work(run: Run, words: list[str]) -> None:
    assert run(*words)[0] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scale", "talk.json", "--lengths", "1e30"], "--lengths: 1e+30 makes a request of"),
        (["scale", "talk.json", "--to-rate", "1e-300"], "--to-rate: from 1e-06 to 1,000,000,000 expected"),
        (["scale", "talk.json", "--to-rate", "1e300"], "--to-rate: from 1e-06 to 1,000,000,000 expected"),
        (["synth", "azure_conv", "--requests", "99999999999"], "--requests: at most 10,000,000 expected"),
    ],
)
def test_a_change_that_no_file_can_hold_is_refused_and_leaves_no_file(
    run: Run, talk: str, tmp_path: Path, words: list[str], message: str
) -> None:
    code, _, err = run(*words, "--out", "new.jsonl")
    assert (code, message in err) == (2, True), err
    assert sorted(file.name for file in tmp_path.iterdir()) == [talk]
