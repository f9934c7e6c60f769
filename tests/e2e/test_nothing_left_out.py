"""No command leaves a request out without naming it, and why, before its first figure."""

import io
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from harness.cli.main import main
from tests.support.tiers import cases, tier

LENGTHS = {"fits": (500, 4), "long": (9_000, 4), "huge": (140_000, 4), "empty": (500, 0)}
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

    def gone(self, taken: int | None = None) -> Mapping[str, int]:
        """How many rows are left out, by what names their reason."""
        kept = [place for place, kind in enumerate(self.kinds) if kind != "empty"]
        cut = taken is not None and taken < len(kept)
        read = self.kinds[: kept[taken - 1] + 1] if taken is not None and cut else self.kinds
        lengths = [sum(LENGTHS[kind]) for kind in read if kind != "empty"]
        too_long = sum(length > LONGEST[self.model] for length in lengths)
        beyond = sum(length > POOL for length in lengths) - too_long if self.tiny else 0
        empty = sum(kind == "empty" for kind in read)
        return {"output_zero": empty, r"longer.than.the": too_long, r"(never.fit|larger.than.the)": beyond}


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


@cases("command", ["advise", "run", "trace inspect", "capacity", "sweep"], day=3)
@settings(max_examples=tier(2, 30), phases=DRAWN)
@given(asked=ASKED)
def test_what_is_left_out_is_named_before_any_figure(command: str, asked: Asked) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "trace.jsonl", f"{folder}/out"
        rows = [
            {"arrival_s": place / 2, "prompt_tokens": LENGTHS[kind][0], "output_tokens": LENGTHS[kind][1]}
            for place, kind in enumerate(asked.kinds)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        trace = ["trace=file", f"trace.path={file}", f"workload.num_requests={asked.taken or 'null'}"]
        taken = asked.taken
        if command == "trace inspect":
            head = output_of("trace", "inspect", str(file)).split("\nrequests ")[0]
            assert named(head, {"output_zero": asked.gone()["output_zero"]}) == []
            return
        if command == "advise":
            taken = None
            head = output_of("advise", str(file), *asked.words).splitlines()[0]
        elif command == "capacity":
            head = output_of(
                "capacity", "--slo", "ttft_p99<2", "--out", out, *trace, *asked.words
            ).splitlines()[0]
        else:
            sizes = "cache.block_size=16,32" if command == "sweep" else "cache.block_size=16"
            sent = (
                "replay.mode=trace",
                "measure=false",
                "workload.oversize=drop",
                "report.figures=none",
                f"out={out}",
                sizes,
            )
            head = output_of(command, *trace, *asked.words, *sent).partition("Simulation only")[0]
        assert named(head, asked.gone(taken)) == []
        kept = sum(kind != "empty" for kind in asked.kinds)
        assert ("the rest is unread" in head) == (taken is not None and taken < kept)


@settings(max_examples=tier(2, 30), phases=DRAWN)
@given(failed=st.lists(st.booleans(), min_size=4, max_size=20).map(lambda each: [False, False, *each]))
def test_rows_of_a_log_that_are_not_in_the_twin_are_named_first(failed: Sequence[bool]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        head = "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n"
        lines = [f"{at},100,{0 if bad else 3},{at}.1,{at}.2\n" for at, bad in enumerate(failed)]
        (Path(folder) / "requests.csv").write_text(head + "".join(lines))
        words = ("model=llama3_8b", "device=h100", "--no-fit", "--what-if", "load=1")
        first = output_of("twin", folder, *words).splitlines()[0]
        assert first.startswith(f"Simulated: {len(failed) - sum(failed)} of {len(failed)} requests")
        assert (f"Left out: {sum(failed)}, " in first) == any(failed)
