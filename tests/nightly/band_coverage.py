"""How many measured figures lie in the bands that a twin states, over logs of real deployments.

    python tests/nightly/band_coverage.py FOLDER[,OVERRIDE…] …

Each argument is a log as `twin` takes it, with its overrides behind commas. Figures are medians, means and 99th
percentiles of TPOT and TTFT of the requests that the fit has not seen, each counted once for each log. Bands of nine of
ten should hold 80 to 97 of 100; a band that holds all is too wide.
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


def held(log: EngineLog, config: RunConfig, places: IntArray) -> list[bool]:
    """Whether each figure of the requests at `places` lies in its band, which is printed."""

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
    return [band.holds(true[name]) for name, band in found.items()]


def main(words: Sequence[str] | None = None) -> int:
    """Print the bands of each log; 0 where the share that holds is that of bands of nine of ten, after a fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", nargs="+")
    counted: dict[str, list[bool]] = {"no fit": [], "fit": []}
    for word in parser.parse_args(words).log:
        folder, *overrides = word.split(",")
        log = read_engine_log(Path(folder))
        chosen, found = requests_to_fit(log), configured(log, overrides)
        sys.stdout.write(f"{folder}\n  no fit\n")
        counted["no fit"] += held(log, found.config, not_in(chosen, len(log.requests)))
        log, found, fit = fit_log(log, found)
        sys.stdout.write(f"  fit, {fit.cpu_s:.0f} CPU-seconds\n")
        counted["fit"] += held(log, replace(found.config, device=fitted_device(fit, log)), fit.others)
    for name, each in counted.items():
        sys.stdout.write(f"{name}: {sum(each)} of {len(each)} figures lie in their bands\n")
    return 0 if FEWEST <= np.mean(counted["fit"]) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
