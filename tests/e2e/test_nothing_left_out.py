"""No command leaves a request out without naming it, and why, before its first figure."""

import io
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from harness.cli.main import main
from tests.support.tiers import cases, tier

LENGTHS = {"fits": (500, 4), "long": (9_000, 4), "huge": (140_000, 4), "empty": (500, 0), "bad": (-1, 4)}
UNREAD = {"empty": "output_zero", "bad": "malformed prompt_tokens"}  # and how a reader calls them
LONGEST = {"llama3_8b": 8_192, "llama31_8b": 131_072}
DRAWN = (Phase.explicit, Phase.reuse, Phase.generate)  # not shrunk: a command takes a second
POOL = 4_000  # tokens, in which longer requests never fit


@dataclass(frozen=True)
class Asked:
    """A trace by the kind of each row, the model, whether its pool is tiny, and how many requests are taken."""

    kinds: Sequence[str]
    model: str
    tiny: bool
    taken: int | None

    @property
    def words(self) -> list[str]:
        """The overrides."""
        return [f"model={self.model}", "device=h100", *([f"cache.pool_tokens={POOL}"] if self.tiny else [])]

    def gone(self, taken: int | None = None, model: str = "") -> Mapping[str, int]:
        """How many rows are left out, by what names their reason."""
        kept = [place for place, kind in enumerate(self.kinds) if kind not in UNREAD]
        cut = taken is not None and taken < len(kept)
        read = self.kinds[: kept[taken - 1] + 1] if taken is not None and cut else self.kinds
        lengths = [sum(LENGTHS[kind]) for kind in read if kind not in UNREAD]
        too_long = sum(length > LONGEST[model or self.model] for length in lengths)
        beyond = sum(length > POOL for length in lengths) - too_long if self.tiny else 0
        return {
            **{reason: sum(kind == one for one in read) for kind, reason in UNREAD.items()},
            r"longer.than.the": too_long,
            r"(never.fit|larger.than.the)": beyond,
        }


ASKED = st.builds(
    Asked,
    st.lists(st.sampled_from(sorted(LENGTHS)), min_size=4, max_size=24).map(
        lambda kinds: ["fits", *kinds, "fits"]
    ),
    st.sampled_from(sorted(LONGEST)),
    st.booleans(),
    st.sampled_from((None, 3, 10)),
)


def output_of(*words: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        assert main(list(words)) in (0, 1)  # 1: there is no answer
    return out.getvalue()


def named(head: str, gone: Mapping[str, int]) -> list[str]:
    """The reasons whose number of rows the text does not say."""
    return [
        reason
        for reason, count in gone.items()
        if count and not re.search(rf"\b{count:,} (?:(?!Left out).)*{reason}|{reason}\s+{count:,}\b", head)
    ]


def written(folder: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "trace.jsonl"


@cases("command", ["advise", "run", "trace inspect", "sweep models", "capacity", "sweep"], day=3)
@settings(max_examples=tier(2, 30), phases=DRAWN)
@given(asked=ASKED)
def test_what_is_left_out_is_named_before_any_figure(command: str, asked: Asked) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        rows = [
            {"arrival_s": place / 2, "prompt_tokens": LENGTHS[kind][0], "output_tokens": LENGTHS[kind][1]}
            for place, kind in enumerate(asked.kinds)
        ]
        file, skip = written(Path(folder), rows), "trace.on_error=skip"
        trace = ["trace=file", f"trace.path={file}", skip, f"workload.num_requests={asked.taken or 'null'}"]
        taken = asked.taken
        if command == "trace inspect":
            head = output_of("trace", "inspect", str(file), "--on-error", "skip").split("\nrequests ")[0]
            assert named(head, {reason: asked.gone()[reason] for reason in UNREAD.values()}) == []
            return
        if command == "advise":
            taken = None
            head = output_of("advise", str(file), skip, *asked.words).splitlines()[0]
        elif command == "capacity":
            head = output_of(
                "capacity", "--slo", "ttft_p99<2", "--out", out, *trace, *asked.words
            ).splitlines()[0]
        else:
            varied = {"sweep": "cache.block_size=16,32", "sweep models": f"model={','.join(LONGEST)}"}
            sent = (
                "replay.mode=trace",
                "measure=false",
                "workload.oversize=drop",
                "report.figures=none",
                f"out={out}",
                varied.get(command, "cache.block_size=16"),
            )
            words = [
                *trace,
                *(word for word in asked.words if command != "sweep models" or "model=" not in word),
            ]
            head = output_of(command.split()[0], *words, *sent).partition("Simulation only")[0]
        for model in LONGEST if command == "sweep models" else (asked.model,):
            assert named(head, asked.gone(taken, model)) == []
        kept = sum(kind not in UNREAD for kind in asked.kinds)
        assert ("the rest is unread" in head) == (taken is not None and taken < kept)


@pytest.mark.nightly
@settings(max_examples=tier(1, 6), phases=DRAWN)
@given(kinds=st.lists(st.sampled_from(["fits", "long", "empty", "bad"]), min_size=2, max_size=8))
@example(kinds=["long", "empty", "bad"])
def test_what_a_grid_leaves_out_is_named_before_it_is_measured(kinds: Sequence[str]) -> None:
    """Our engine measures a cell: those that serve fewer requests than others are no choice, and are named as well."""
    lengths = {"fits": (30, 4), "long": (300, 4), "empty": (30, 0), "bad": (-1, 4)}
    kinds = ["fits", *kinds, "fits"]
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"arrival_s": place / 50, "prompt_tokens": lengths[kind][0], "output_tokens": lengths[kind][1]}
            for place, kind in enumerate(kinds)
        ]
        words = ("trace.on_error=skip", "workload.oversize=drop", "cost=roofline", "replay.repeats=2")
        grid = ("cache.max_model_len=200,400", "scheduler.max_running=2,4")
        file = str(written(Path(folder), rows))
        said = output_of("advise", file, "--measure", "1", "--slo", "ttft_p99<9", *words, *grid)
    head = said.splitlines()[0]
    kept, long = sum(kind not in UNREAD for kind in kinds), kinds.count("long")
    assert named(head, {reason: kinds.count(kind) for kind, reason in UNREAD.items()}) == []
    assert (
        f"all {len(kinds)} requests" if kept == len(kinds) else f"{kept} of {len(kinds)} requests"
    ) in head
    assert ("Left out: 2 cells at which fewer requests are served." in said) == bool(long)
    assert ("cache.max_model_len=200" in said) != bool(long)


def csv_log(kinds: Sequence[str], folder: Path) -> None:
    head = "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n"
    lines = [
        f"{at},100,{0 if kind == 'no output token' else 3},{at}.1,{at}.2\n" for at, kind in enumerate(kinds)
    ]
    (folder / "requests.csv").write_text(head + "".join(lines))


def bench_log(kinds: Sequence[str], folder: Path) -> None:
    """What `vllm bench serve --save-detailed` writes."""
    fine = [kind == "" for kind in kinds]
    columns = {
        "input_lens": [100] * len(kinds),
        "output_lens": [3 * each for each in fine],
        "ttfts": [0.1 * each for each in fine],
        "itls": [[0.05, 0.05] if each else [] for each in fine],
        "start_times": list(range(len(kinds))),
        "errors": ["Traceback" if kind == "failed" else "" for kind in kinds],
    }
    (folder / "result.json").write_text(json.dumps(columns))


def aiperf_log(kinds: Sequence[str], folder: Path) -> None:
    def record(at: int, kind: str) -> dict[str, object]:
        metrics: dict[str, object] = {
            name: {"value": value, "unit": unit}
            for name, value, unit in (
                ("time_to_first_token", 100, "ms"),
                ("request_latency", 200, "ms"),
                ("usage_completion_tokens", 0 if kind == "no output token" else 3, "tokens"),
                ("usage_prompt_tokens", 100, "tokens"),
            )
        }
        facts = {
            "request_start_ns": at * 10**9,
            "x_request_id": str(at),
            "was_cancelled": kind == "cancelled",
        }
        return {"metadata": facts, "metrics": metrics, "error": {"code": 500} if kind == "failed" else None}

    lines = (json.dumps(record(at, kind)) + "\n" for at, kind in enumerate(kinds))
    (folder / "profile_export.jsonl").write_text("".join(lines))


LOGS: Mapping[str, tuple[Callable[[Sequence[str], Path], None], tuple[str, ...]]] = {
    "csv": (csv_log, ("no output token",)),
    "vllm bench serve": (bench_log, ("failed", "no output token")),
    "aiperf": (aiperf_log, ("failed", "cancelled", "no output token")),
}
PAGE = "".join(
    f'vllm:{name}{{engine="0"}} {value}\n'
    for name, value in (
        ("num_requests_running", 1),
        ("num_requests_waiting", 0),
        ("kv_cache_usage_perc", 0.01),
    )
)
OF_A_LOG: Mapping[str, tuple[str, ...]] = {
    "twin": ("twin", "{log}", "--no-fit", "--what-if", "load=1", "--out", "{out}"),
    "check": ("twin", "{log}", "--no-fit", "--check", "{out}/page.txt", "--out", "{out}"),
    "advise": ("advise", "{log}"),
    "calibrate": ("calibrate", "--from-log", "{log}", "--dry-run"),
}


@cases("command", OF_A_LOG, day=4)
@cases("log", LOGS, day=["vllm bench serve"])
@settings(max_examples=tier(1, 10), phases=DRAWN)
@given(picked=st.lists(st.integers(0, 3), min_size=4, max_size=20))
@example(picked=[1, 0, 2, 0, 3, 1])
def test_rows_of_a_log_that_are_left_out_are_named_first(
    command: str, log: str, picked: Sequence[int]
) -> None:
    write, reasons = LOGS[log]
    kinds = ["", "", *(["", *reasons][number % (1 + len(reasons))] for number in picked)]
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place) / "log", Path(place) / "out"
        folder.mkdir()
        out.mkdir()
        write(kinds, folder)
        (out / "page.txt").write_text(PAGE)
        words = [word.format(log=folder, out=out) for word in OF_A_LOG[command]]
        first = output_of(*words, "model=llama3_8b", "device=h100").splitlines()[0]
    lost = {reason: kinds.count(reason) for reason in reasons}
    assert named(first, lost) == []
    kept = len(kinds) - sum(lost.values())
    assert re.match(rf"Simulated: (all {kept}|{kept} of {len(kinds)}) requests", first)
    assert ("Left out" in first) == (kept < len(kinds))


def test_a_log_that_its_model_does_not_take_is_refused_with_the_number(capsys) -> None:
    with tempfile.TemporaryDirectory() as folder:
        csv_log([""] * 5, Path(folder))
        file = Path(folder) / "requests.csv"
        file.write_text(file.read_text().replace("1,100,", "1,3000,"))
        words = ("--no-fit", "--what-if", "load=1", "model=opt_13b", "device=h100")
        assert main(["twin", folder, *words]) == 2
    assert "1 of 5 requests can never fit" in capsys.readouterr().err
