"""The calibration's cases, measured in passes: what is kept of each is its quietest run.

Other work on the machine only ever makes a step slower, by up to a half where two cores share their hardware, and comes
and goes within seconds. And the first run of a case meets shapes for which the libraries have no code yet. So every
case runs again at another time, with the same plans, and the run with the smallest sum of seconds counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.config.schema import RunConfig
from harness.measured.budget import Budget
from harness.measured.engine import MeasuredRun, measure
from harness.measured.pace import probe_s
from harness.measured.plan import SEED, CalibrationCase, case_workload
from harness.measured.stability import off_pace

PASSES = 2
"""Of every case where there is no budget; with one, as many as its share allows, up to MOST_PASSES."""

MOST_PASSES = 4
FITTING = 0.5
"""Share of the budget after which no case is begun."""

_FEWEST_CASES = 3


@dataclass(frozen=True)
class Timed:
    """A case's quietest run, and the quietest pace of the device beside any of its runs."""

    case: CalibrationCase
    run: MeasuredRun
    probe_s: float

    @property
    def seconds(self) -> float:
        """Of all its steps."""
        return float(self.run.log.steps["seconds"].sum())


class Passes:
    """Measures cases again and again while time is left; a probe of the pace stands before and after each."""

    def __init__(
        self,
        config: RunConfig,
        cases: Sequence[CalibrationCase],
        lone_request_s: float,
        report: Callable[[str], None],
        clock: Budget,
    ) -> None:
        self._config = config
        self._cases = cases
        self._lone = lone_request_s
        self._report = report
        self._clock = clock
        self._probe = probe_s(config)
        self.probes = [self._probe]
        self._kept: dict[CalibrationCase, Timed] = {}

    def measure(self) -> list[Timed]:
        """The quietest run of every case for which there was time, the first few in any case."""
        for number in range(MOST_PASSES if self._clock.limited else PASSES):
            for case in self._cases if number % 2 == 0 else reversed(self._cases):
                if len(self._kept) >= _FEWEST_CASES and not self._clock.left(FITTING):
                    break
                self._run(case, number)
        found = self._found()
        for place in off_pace([entry.probe_s for entry in found]):
            if self._clock.left(FITTING):
                self._run(found[place].case, MOST_PASSES)
        return self._found()

    def _run(self, case: CalibrationCase, number: int) -> None:
        self._report(case.name if number == 0 else f"{case.name}, pass {number + 1}")
        before, known = self._probe, self._kept.get(case)
        workload = case_workload(self._config, case, self._lone)
        run = measure(
            self._config, workload, seed=SEED, step_ns=known.run.recorder.step_ns if known else None
        )
        self._probe = probe_s(self._config)
        self.probes.append(self._probe)
        found = Timed(case, run, (before + self._probe) / 2)
        if known is not None:
            quietest = min(known, found, key=lambda timed: timed.seconds)
            found = replace(quietest, probe_s=min(known.probe_s, found.probe_s))
        self._kept[case] = found

    def _found(self) -> list[Timed]:
        """In the order of the cases."""
        return [self._kept[case] for case in self._cases if case in self._kept]
