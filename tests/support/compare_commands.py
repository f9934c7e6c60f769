"""Check that the commands, options and exit codes of a checkout are still those of another one.

`run` gives a fixed list of command lines to `python -m harness` with the code of one checkout and writes down how each
ended. `diff` compares two such lists.

    python tests/support/compare_commands.py run CHECKOUT --traces TRACES --out OLD
    python tests/support/compare_commands.py run . --traces TRACES --out NEW
    python tests/support/compare_commands.py diff OLD NEW

Texts may be worded anew, so they are not compared. What is compared: the exit code; whether standard output is
empty and, where a command refuses or fails, whether standard error is; and what `Answer` takes from standard output:
the options, subcommands and choices of a help text, the YAML of `show`, the labels of planned points, numbers of a JSON
document, digests of traces. Of a trace written as `.jsonl` the content is compared too.

The commands run in the order of `COMMANDS` in one empty working directory, so a later one sees what an earlier one
wrote. Nothing is measured and nothing is downloaded. `bench gpu` may move to another place: a difference
there is printed as a note and does not count. Exit codes: 0 equal, 1 different, 2 wrong input.
"""

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from compare_records import (
    INPUTS,
    POLICY_MODULE,
    Checkout,
    WrongInputError,
    empty_folder,
    print_differences,
    say,
    write_inputs,
)

OUTPUTS = "commands.json"
LIMIT_S = 120  # of one command
TIMED_OUT = "timed out"


class Answer(StrEnum):
    """What is taken from standard output, beside whether there is any."""

    NOTHING = "nothing"
    HELP = "help"
    YAML = "yaml"
    GROUPS = "groups"
    LABELS = "labels"
    NUMBERS = "numbers"
    DIGEST = "digest"
    MARGINS = "margins"
    CASES = "cases"
    LINES = "lines"


@dataclass(frozen=True)
class Command:
    """A command line without `python -m harness`."""

    words: str
    answer: Answer = Answer.NOTHING
    may_move: bool = False


def _help(*paths: str) -> Iterator[Command]:
    for path in paths:
        yield Command(f"{path} --help".strip(), Answer.HELP)


def _plain(*lines: str) -> Iterator[Command]:
    yield from map(Command, lines)


def _asking(answer: Answer, *lines: str) -> Iterator[Command]:
    for line in lines:
        yield Command(line, answer)


_SIM = "measure=false cost=roofline workers=1 workload.num_requests=8"
_AZURE, _MOONCAKE = f"{INPUTS}/azure_conv.csv", f"{INPUTS}/mooncake_conversation.jsonl"

COMMANDS: tuple[Command, ...] = (
    # every help text
    *_help("", "run", "sweep", "show", "report", "status", "serve", "gate", "calibrate", "capacity", "trace"),
    *_help(
        *(
            f"trace {name}"
            for name in ["ls", "get", "inspect", "convert", "slice", "scale", "synth", "validate"]
        )
    ),
    *_help("bench", "bench kernels"),
    Command("bench gpu --help", Answer.HELP, may_move=True),
    # no command, and commands that do not exist
    *_plain(
        "", "nonsense", "--nonsense", "trace", "trace nonsense", "bench", "bench nonsense", "shw", "run -h"
    ),
    # show: every group, values of every kind, and what is refused
    *_asking(Answer.GROUPS, "show --groups"),
    *_asking(
        Answer.YAML,
        "show",
        "show cache=contiguous_max",
        "show cache=contiguous_pow2 cache.placement=first_fit cache.prefix_caching=true cache.block_size=8",
        "show cache.prefix_caching=false cache.retention=none cache.hash=xxh3_128 cache.deduplicate=true",
        "show scheduler=swap cache.host_tokens=4096 scheduler.policy=priority scheduler.long_prefill_tokens=64",
        "show scheduler=static decoding=beam",
        "show scheduler=whole_prompt decoding=sample decoding.n=8 decoding.branch_hazard=0.1",
        "show decoding=speculative decoding.draft_place=fork decoding.acceptance=0.5",
        "show decoding.beam_width=3 decoding.mode=sample decoding.n=2 decoding.temperature=0.5",
        "show model=llama3_8b device=h200 cost=roofline measure=false cache.pool_tokens=null",
        "show model=opt_66b device=a100_40gb device.tensor_parallel=4 model.kv_dtype=fp8_e4m3",
        f"show trace=azure trace.path={_AZURE} workload=window",
        f"show trace=mooncake trace.path={_MOONCAKE} trace.ticks=random workload.length_scale=0.01",
        "show trace=system_prompts trace.share=0.7 workload=as_recorded trace.arrivals=gamma trace.arrival_rate=2",
        "show replay=closed replay.users=4 replay.think_s=1",
        "show replay=gamma replay.burstiness=3 replay.users=4",
        "show replay=streamed replay.duration_s=5 replay.compiled=never",
        "show engine=cpu engine.audit=full engine.backend=torch",
        "show cost=table cost.cache_dir=~/somewhere cost.follow_pace=false",
        "show experiment=default",
        "show experiment=sim_only",
        f"show experiment=mooncake trace.path={_MOONCAKE}",
        "show cache.block_size=8,16,32 workload.prefix_share=0,0.5",
        "show scheduler.order=some_module:Order scheduler.victim=a.b:C cache.eviction=m:E scheduler.admission=m:A",
        "show 'out=results/with space' name=a-b.c_1",
    ),
    *_plain(
        "show cache.blok_size=8",
        "show cache.block_size=0",
        "show cache.block_size=eight",
        "show cache.block_size=",
        "show cache.block_size",
        "show cache.block_size=8,,16",
        "show 'cache.block_size=[8,16]'",
        "show cache.block_size=range(8,8,8)",
        "show cache=nonsense",
        "show experiment=nonsense",
        "show +cache.extra=1",
        "show ~cache.block_size",
        "show cache@other=paged",
        "show =3",
        "show decoding.n=4",
        "show decoding.beam_width=100",
        "show decoding=speculative decoding.n=2 decoding.mode=sample",
        "show decoding=speculative decoding.draft_place=fork cache=contiguous_max",
        "show decoding.beam_parents=not/there decoding.beam_width=2",
        "show scheduler.preemption=swap",
        "show scheduler.watermark=1",
        "show scheduler.policy=lottery",
        "show scheduler.order=not-a-class",
        "show scheduler=whole_prompt scheduler.long_prefill_tokens=64",
        "show trace=azure",
        "show trace=azure trace.path=not/there.csv",
        f"show trace=azure_conv trace.path={_AZURE}",
        f"show trace=azure trace.path={_AZURE} trace.sharing=system",
        "show trace=lengths trace.arrivals=recorded trace.path=x",
        "show model.kv_heads=3",
        "show model.kv_dtype=fp8_e4m3 engine.backend=native",
        "show cache.max_model_len=100000",
        "show cache=contiguous_max cache.pool_tokens=100",
        "show name=a/b",
        "show out=",
        "show name=a,b",
        "show report.kernels=not/there",
        "show --nonsense",
        "show nonsense",
        "show measure=perhaps",
        "show device.memory_utilization=1.5",
    ),
    # status and report where there is nothing yet
    *_plain("status", "report", "status not/there", "report not/there", "status a b", "report --nonsense"),
    # run and sweep
    *_asking(
        Answer.LABELS,
        f"run {_SIM} out=stores/one --dry-run",
        f"sweep {_SIM} cache.block_size=8,16 cache=paged,contiguous_max out=stores/grid --dry-run",
        "sweep --dry-run measure=false cost=roofline",
        f"sweep experiment=azure_window trace.path={_AZURE} {_SIM} workload.oversize=drop --dry-run",
    ),
    *_plain(
        f"run {_SIM} out=stores/one",
        f"run {_SIM} out=stores/one",
        f"run {_SIM} out=stores/one --force",
        f"run {_SIM} out=stores/one cache.block_size=8,16",
        f"sweep {_SIM} cache.block_size=8,0 out=stores/bad",
        f"sweep {_SIM} cache.block_size=range(1,200000) out=stores/bad",
        f"sweep {_SIM} scheduler.order=not_there:Order cache.block_size=8,16 out=stores/bad",
        f"sweep {_SIM} scheduler.order={POLICY_MODULE}:OldestFirst cache.block_size=8,16 out=stores/bad",
        f"sweep {_SIM} workload.length_scale=50 cache.block_size=8,16 out=stores/bad",
        f"sweep {_SIM} replay.compiled=always decoding.beam_width=2 cache.block_size=8,16 out=stores/bad",
        f"sweep {_SIM} cost=fitted cache.block_size=8,16 out=stores/bad",
        f"sweep {_SIM} decoding=speculative cache.block_size=8,16 out=stores/bad",
        f"sweep {_SIM} out=a,b cache.block_size=8,16",
        f"sweep {_SIM} out={INPUTS}/rows.csv cache.block_size=8,16",
        f"sweep {_SIM} --nonsense",
        "sweep nonsense",
        "run measure=true replay.records=false out=stores/bad",
        "run measure=true engine=cuda out=stores/bad",
        f"run {_SIM} scheduler.order={POLICY_MODULE}:Broken out=stores/failed",
        f"run {_SIM} scheduler.order={POLICY_MODULE}:Broken out=stores/failed",
        "status stores/failed",
        "report stores/failed",
        "status stores/one",
        "status",
        "report stores/one --out reports/one",
        "report stores/one --kernels none",
        "report stores/one --kernels not/there",
    ),
    # traces
    *_asking(Answer.LINES, "trace ls --names"),
    *_plain("trace ls", "trace ls nonsense", "trace get nonsense", "trace get"),
    *_asking(
        Answer.NUMBERS,
        f"trace inspect {_AZURE} --json",
        f"trace inspect {_MOONCAKE} --json --requests 100 --block-sizes 512",
        "trace inspect chat --requests 50 --json",
    ),
    *_asking(
        Answer.DIGEST,
        f"trace convert {_AZURE} --out converted.jsonl",
        f"trace convert {_MOONCAKE} --to mooncake --out mooncake.jsonl --requests 50",
        f"trace slice {_MOONCAKE} --rows 10:40 --out slice.jsonl",
        f"trace slice {_AZURE} --time 5:20 --out time.jsonl",
        f"trace scale {_AZURE} --to-rate 2 --lengths 0.5 --out scaled.jsonl",
        "trace synth azure_code --requests 40 --sharing tree --share 0.4 --out synth.jsonl",
        "trace synth azure_conv --requests 40 --arrivals gamma --rate 3 --seed 2 --out synth.parquet",
        f"trace validate {_AZURE}",
        f"trace validate {_MOONCAKE} --ticks even",
        "trace validate converted.jsonl",
        f"trace validate {INPUTS}/rows.csv --format simple",
    ),
    *_plain(
        f"trace inspect {_AZURE}",
        f"trace inspect {_AZURE} --format mooncake",
        f"trace inspect {_AZURE} --format nonsense",
        f"trace inspect {_AZURE} --block-sizes 0",
        f"trace inspect {_AZURE} --requests -1",
        f"trace inspect {_AZURE} --ticks sometimes",
        "trace inspect not/there",
        "trace inspect",
        f"trace convert {_AZURE}",
        f"trace convert {_AZURE} --out converted.jsonl",
        f"trace convert {_AZURE} --out converted.jsonl --overwrite",
        f"trace convert {_AZURE} --out converted.csv",
        f"trace convert {_AZURE} --to mooncake --out x.parquet",
        f"trace slice {_AZURE} --rows 5:1 --out x.jsonl",
        f"trace slice {_AZURE} --out x.jsonl",
        f"trace scale {_AZURE} --out x.jsonl",
        f"trace scale {_AZURE} --to-rate -1 --out x.jsonl",
        "trace synth nonsense --out x.jsonl",
        "trace synth azure_conv --share 2 --sharing tree --out x.jsonl",
        "trace synth azure_conv --arrivals sometimes --out x.jsonl",
        f"trace validate {INPUTS}/checkpoint/config.json",
    ),
    # capacity, calibrate, gate, serve
    *_plain(
        "capacity --slo ttft_p99<0.1 --seeds 1 --precision 0.3 workload.num_requests=60 --out capacity",
        "capacity --slo ttft_p99<0.000001 --seeds 1 --precision 0.3 workload.num_requests=20 --out capacity",
        "capacity --find pool --slo ttft_p99<2 --seeds 1 workload.num_requests=20 replay=poisson --out capacity",
        "capacity --slo nonsense<2",
        "capacity --slo ttft_p99=2",
        "capacity --seeds 0",
        "capacity --precision 2",
        "capacity --find nonsense",
        "capacity cache.block_size=8,16",
        "calibrate --dry-run engine=cpu cost.cache_dir=calibration",
        "calibrate --budget 0",
        "calibrate --budget nan",
        "calibrate --nonsense",
        "calibrate cache.block_size=8,16",
        "calibrate model.kv_heads=3",
    ),
    *_asking(
        Answer.MARGINS,
        "gate --dry-run",
        "gate --dry-run --layer policy gate=quiet",
        "gate --dry-run --layer resource gate.latency.material=0.03",
    ),
    *_plain(
        "gate --layer nonsense",
        "gate gate.latency.nonsense=1",
        "gate gate.latency.material=-1",
        "gate gate=nonsense",
        "gate --record not/there",
        "gate --update --dry-run --layer policy",
        "gate cache.block_size=8",
        "serve --port nonsense",
        "serve --port 99999",
        "serve cache.block_size=8,16",
        "serve workload.num_requests=3",
        "serve model.path=not/there --port 0",
        "serve --nonsense",
    ),
    # bench
    *_asking(
        Answer.CASES,
        "bench kernels --dry-run --batch 1,8 --context 128,1024 --block-size 16,64 --device cpu",
        "bench kernels --dry-run --preset cpu",
    ),
    *_plain(
        "bench kernels --preset cpu --batch 1",
        "bench kernels --batch none --dry-run",
        "bench kernels --rounds 0",
        "bench kernels --seconds -1",
        "bench kernels --ragged perhaps --dry-run",
        "bench kernels --device tpu",
    ),
    Command("bench gpu --part nonsense", may_move=True),
    Command("bench gpu --minutes none", may_move=True),
)


# ---------------------------------------------------------------------------------------------------------------- run

_HELP_LINE = re.compile(r"^  (-.*?)(?:  .*)?$", re.MULTILINE)  # without what the option is good for
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
_CHOICES = re.compile(r"\{[^{}]*\}")
_SUBCOMMAND = re.compile(r"^    ([a-z][\w-]*)(?:  .*)?$", re.MULTILINE)
_PLANNED = re.compile(r"^[0-9a-f]{12}  .*?  +(.*)$", re.MULTILINE)  # fingerprint, state, label
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
_GATE_LINE = re.compile(r"^(?:gate\.|\w+: ).*$", re.MULTILINE)
_CASE = re.compile(r"^\S+/\S+", re.MULTILINE)
_MOVABLE = frozenset({"gpu"})


def _help_facts(text: str) -> dict[str, Any]:
    """Options with their choices, and subcommands, from the lists of a help text; its prose does not count."""
    lines = "\n".join(_HELP_LINE.findall(text))
    commands = _SUBCOMMAND.findall(text.partition("positional arguments:")[2].partition("options:")[0])
    return {
        "options": sorted(set(_OPTION.findall(lines))),
        "choices": sorted(set(_CHOICES.findall(lines))),
        "subcommands": sorted(set(commands) - _MOVABLE),
    }


def _numbers(text: str) -> dict[str, Any]:
    try:
        return dict(_number_leaves(json.loads(text), ""))
    except ValueError:
        return {"document": "is no JSON"}


def _number_leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _number_leaves(item, f"{prefix}.{key}")
    if isinstance(value, int | float):
        yield prefix, value


def _groups(text: str) -> list[str]:
    return [line[: len(line) - len(line.lstrip())] + line.split()[0] for line in text.splitlines() if line]


FACTS: Mapping[Answer, Callable[[str], Any]] = {
    Answer.NOTHING: lambda text: None,
    Answer.HELP: _help_facts,
    Answer.YAML: lambda text: [line for line in text.splitlines() if not line.startswith("#")],
    Answer.GROUPS: _groups,
    Answer.LABELS: _PLANNED.findall,
    Answer.NUMBERS: _numbers,
    Answer.DIGEST: _DIGEST.findall,
    Answer.MARGINS: _GATE_LINE.findall,
    Answer.CASES: _CASE.findall,
    Answer.LINES: str.splitlines,
}


def run(root: Path, traces: Path, out: Path) -> int:
    """Run all commands with the code of the checkout `root`; returns the exit code."""
    folder = empty_folder(out)
    checkout = Checkout(root, folder)
    checkout.check()
    write_inputs(folder, traces)
    started, results = time.perf_counter(), []
    for number, command in enumerate(COMMANDS):
        result = _outcome(checkout, command)
        results.append({"command": command.words, "may_move": command.may_move, **result})
        if number % 25 == 24:
            say(f"{number + 1} of {len(COMMANDS)} commands, {time.perf_counter() - started:.0f} s")
    facts = {"checkout": str(checkout.root), "commands": results}
    (folder / OUTPUTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    say(f"{len(results)} commands, {time.perf_counter() - started:.0f} s, kept in {folder / OUTPUTS}")
    return 0


def _outcome(checkout: Checkout, command: Command) -> dict[str, Any]:
    words = shlex.split(command.words)
    try:
        done = checkout.harness(*words, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"exit_code": TIMED_OUT}
    outcome: dict[str, Any] = {"exit_code": done.returncode, "prints": bool(done.stdout.strip())}
    if done.returncode:
        outcome["says_why"] = bool(done.stderr.strip())
        outcome["is_fault"] = "internal error" in done.stderr or "Traceback (most recent" in done.stderr
    if not done.returncode and command.answer is not Answer.NOTHING:
        outcome[str(command.answer)] = FACTS[command.answer](done.stdout)
    written = checkout.folder / words[words.index("--out") + 1] if "--out" in words[:-1] else None
    if written is not None and written.suffix == ".jsonl" and written.is_file():
        outcome["written"] = hashlib.sha256(written.read_bytes()).hexdigest()
    return outcome


# --------------------------------------------------------------------------------------------------------------- diff


@dataclass(frozen=True)
class Difference:
    """One fact about a command that differs, and both values."""

    command: str
    key: str
    left: object
    right: object

    @property
    def title(self) -> str:
        """What differs."""
        return f"python -m harness {self.command}"

    @property
    def line(self) -> str:
        """How it differs."""
        return f"{self.key}: {self.left!r} | {self.right!r}"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """What `run` wrote, by command; a command that is given several times is numbered."""
    try:
        rows = json.loads((folder / OUTPUTS).read_text(encoding="utf-8"))["commands"]
    except (OSError, ValueError, KeyError) as error:
        raise WrongInputError(f"{folder} holds no finished run ({error})") from None
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name, number = row["command"], 1
        while name in found:
            number += 1
            name = f"{row['command']}  (time {number})"
        found[name] = row
    return found


def diff(left: Mapping[str, dict[str, Any]], right: Mapping[str, dict[str, Any]]) -> Iterator[Difference]:
    """Every difference that counts; the others are printed at once as notes."""
    for command in dict.fromkeys([*left, *right]):
        one, other = left.get(command), right.get(command)
        if one is None or other is None:
            yield Difference(
                command, "the command", *("not run" if x is None else "run" for x in (one, other))
            )
            continue
        for key in dict.fromkeys([*one, *other]):
            for part, *values in _parts(key, one.get(key), other.get(key)):
                difference = Difference(command, part, *values)
                if one["may_move"]:
                    say(f"note: {difference.title}\n    {difference.line}")
                else:
                    yield difference


def _parts(key: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """The smallest parts of a fact that differ: entries of a mapping, and what only one of two lists has."""
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys([*one, *other]):
            yield from _parts(f"{key}.{name}", one.get(name), other.get(name))
    elif isinstance(one, list) and isinstance(other, list):
        only = [x for x in one if x not in other], [x for x in other if x not in one]
        yield (f"{key} (only there)", *only) if any(only) else (f"{key} (order or count)", one, other)
    else:
        yield key, one, other


def main() -> int:
    """Read the command line; returns the exit code."""
    first, _, rest = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawTextHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    runs = actions.add_parser("run", help="run the commands of a checkout")
    runs.add_argument("checkout", type=Path)
    runs.add_argument("--out", type=Path, required=True, help="an empty folder for the results")
    runs.add_argument("--traces", type=Path, required=True, help="the folder of the published traces")
    diffs = actions.add_parser("diff", help="compare the results of two runs")
    diffs.add_argument("left", type=Path)
    diffs.add_argument("right", type=Path)
    diffs.add_argument("--most", type=int, default=100, metavar="N", help="print so many differences (100)")
    flags = parser.parse_args()
    try:
        if flags.action == "run":
            return run(flags.checkout, flags.traces.resolve(), flags.out)
        return print_differences(diff(read(flags.left), read(flags.right)), flags.most)
    except WrongInputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
