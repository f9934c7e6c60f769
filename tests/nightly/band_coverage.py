"""How many measured figures lie in the bands that a twin states, over logs of real deployments.

    python tests/nightly/band_coverage.py FOLDER[,OVERRIDE…] …

Each argument is a log as `twin` takes it, with its overrides behind commas. Figures are medians, means and 99th
percentiles of TPOT and TTFT of the requests that the fit has not seen, each counted once for each log. Bands of nine of
ten should hold 80 to 97 of 100; a band that holds all is too wide. The last lines have the same with each log left out
when the width of bands was set.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.config.schema import RunConfig
from harness.point.bands import bands
from harness.twin.configured import configured
from harness.twin.fit import fit_log, fitted_device, not_in, requests_to_fit
from harness.twin.log import EngineLog, FloatArray, IntArray
from harness.twin.prediction import PredictedRun, figures_of_times, others, predictor
from harness.twin.reading import read_engine_log

FEWEST, MOST = 0.8, 0.97


def reached(log: EngineLog, config: RunConfig, places: IntArray) -> list[float]:
    """How far each figure of the requests at `places` lies from the middle of its band; 1 is an end. Prints them."""

    def figures(ttft_s: FloatArray, tpot_s: FloatArray) -> dict[str, float]:
        found = figures_of_times(ttft_s[places], tpot_s[places])
        return {name: value for name, value in found.items() if not name.endswith("p90")}

    def of(run: PredictedRun) -> dict[str, float]:
        return figures(run.ttft_s(log.requests), run.tpot_s)

    run = predictor(config, log.workload)(config.device)
    ours = of(run)
    found = bands(ours, [of(other) for other in others(config, log.workload, run)], config.device)
    true = figures(log.requests.ttft_s, log.requests.tpot_s)
    for name, band in found.items():
        low, high = (100 * share for share in band.shares(ours[name]))
        error, said = 100 * (ours[name] / true[name] - 1), "" if band.holds(true[name]) else "  outside"
        sys.stdout.write(f"    {name:10} error {error:+6.1f} %, band {low:+.0f} to {high:+.0f} %{said}\n")
    return [
        float(abs(np.log(true[name] / ours[name])) / np.log(band.high / ours[name]))
        for name, band in found.items()
    ]


def left_out(each: Sequence[Sequence[float]]) -> tuple[int, int]:
    """How many figures lie in bands whose width the other logs alone set, and of how many.

    The width of all bands is multiplied by what makes them hold nine of ten figures of the other logs. A rule that was
    made to fit these logs would hold fewer of a log that had no part in it.
    """
    held = total = 0
    for place, own in enumerate(each):
        rest = np.concatenate([one for at, one in enumerate(each) if at != place])
        held += int((np.array(own) <= np.quantile(rest, 0.9)).sum())
        total += len(own)
    return held, total


def main(words: Sequence[str] | None = None) -> int:
    """Print the bands of each log; 0 where the share that holds is that of bands of nine of ten, after a fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", nargs="+")
    counted: dict[str, list[list[float]]] = {"no fit": [], "fit": []}
    for word in parser.parse_args(words).log:
        folder, *overrides = word.split(",")
        log = read_engine_log(Path(folder))
        chosen, found = requests_to_fit(log), configured(log, overrides)
        sys.stdout.write(f"{folder}\n  no fit\n")
        counted["no fit"] += [reached(log, found.config, not_in(chosen, len(log.requests)))]
        log, found, fit = fit_log(log, found)
        sys.stdout.write(f"  fit, {fit.cpu_s:.0f} CPU-seconds\n")
        counted["fit"] += [reached(log, replace(found.config, device=fitted_device(fit, log)), fit.others)]
    for name, each in counted.items():
        ratios = np.concatenate(each)
        line = f"{name}: {int((ratios <= 1).sum())} of {len(ratios)} figures lie in their bands"
        if len(each) > 1:
            held, total = left_out(each)
            line += f"; with each log left out when the width was set, {held} of {total}"
        sys.stdout.write(f"{line}\n")
    return 0 if FEWEST <= np.mean(np.concatenate(counted["fit"]) <= 1) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
