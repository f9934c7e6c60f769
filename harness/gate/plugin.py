"""The gate for anybody's kernels and functions, as a plugin of pytest (`pytest --gate`).

Two fixtures ask it. `gated` times a function beside its accepted version: the baseline holds the file of the function
as it was accepted, which is loaded beside today's, and both are timed in turns in this process. So the ratio of
unchanged code is 1 on every machine and under every load. `kernel_resources` compiles a Triton kernel without a GPU and
compares registers, spills, shared memory, loads, instructions and resident programs with the accepted ones.

Baselines lie in the caller's repository. pytest ends with 1 where something regressed, with 3 where something could not
be decided and nothing failed.
"""

import inspect
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from harness.config.errors import UserError
from harness.gate.beside import load, package_sources, ratios_of
from harness.gate.findings import (
    EXIT_CODES,
    Baseline,
    Finding,
    GateVerdict,
    LayerResult,
    Measured,
    coverage,
    lines,
    markdown,
    new_baseline,
    read_baseline,
    write_baseline,
)
from harness.gate.settings import Margins, default_settings, effect

LATENCY, RESOURCE = "latency", "resource"
_SCOPES = {
    LATENCY: "functions beside their accepted versions, in turns in one process",
    RESOURCE: "what the compiler makes of each kernel; nothing was timed",
}

Function = Callable[..., object]


class Gate:
    """What the gate has found in a session of pytest, and its baselines."""

    def __init__(self, config: pytest.Config) -> None:
        self._update, self._reason = config.getoption("gate_update"), config.getoption("gate_reason").strip()
        self._only_changed = config.getoption("gate_changed")
        self._page = config.getoption("gate_markdown") or os.environ.get("GITHUB_STEP_SUMMARY")
        self.folder = Path(config.getoption("gate_baselines") or config.rootpath / "gate-baselines")
        self._cases: dict[str, dict[str, Any]] = {LATENCY: {}, RESOURCE: {}}
        self._findings: dict[str, list[Finding]] = {LATENCY: [], RESOURCE: []}
        # a run of named files, like one of chosen tests, misses cases: it neither drops them nor finds them missing
        self._whole = config.args_source is not pytest.Config.ArgsSource.ARGS
        if self._update and not self._reason:
            raise pytest.UsageError("--gate-update needs --gate-reason 'why the figures may change'")
        if config.getoption("numprocesses", None):
            raise pytest.UsageError("--gate times functions: run it without -n, alone on its cores")

    def gated(
        self,
        test: str,
        function: Function,
        *arguments: Any,
        name: str = "",
        packages: Sequence[str] = (),
        margins: Margins | None = None,
    ) -> None:
        """Fail where `function(*arguments)` is slower than the accepted version of the file that defines it.

        Args:
            test: the name of the test, which the fixture gives.
            function: a function of a module's top level. Its file must be importable alone.
            arguments: given to both versions. A CUDA tensor among them makes the device's clock the clock.
            name: of the case; default: the test's.
            packages: names of packages whose accepted version it calls; without them, all that it imports is today's.
            margins: slower by `negligible` is no alarm, by `material` never passes; default: those of layer cpu.

        Raises:
            UserError: the function is of no file, or of no top level.
        """
        case, (today, path) = name or test, _sources(function, packages)
        self._keep(LATENCY, case, {"module": function.__module__, "function": path, "sources": today})
        accepted = self._accepted(LATENCY, case)
        if accepted is None or self._update:
            function(*arguments)  # one that raises is never accepted
            self._end(LATENCY, self._new(LATENCY, case))
            return
        if self._only_changed and accepted["sources"] == today:
            self._end(LATENCY, Finding(case, GateVerdict.passed, "its file is the accepted one"))
            return
        cuda = any(getattr(one, "is_cuda", False) for one in arguments)
        with tempfile.TemporaryDirectory(prefix="pagetwin-gate-") as folder:

            def sides() -> tuple[Function, Function]:
                module = load(accepted["sources"], Path(folder))[accepted["module"]]
                before = attrgetter(accepted["function"])(module)
                return partial(function, *arguments), partial(before, *arguments)

            found = effect(ratios_of(sides, cuda=cuda))
        self._end(LATENCY, Finding(case, found.verdict(margins or default_settings().cpu), f"{found}"))

    def kernel_resources(
        self,
        test: str,
        kernel: Any,
        *,
        signature: Mapping[str, str] | None = None,
        constants: Mapping[str, Any] | None = None,
        aligned: Sequence[str] = (),
        num_warps: int = 4,
        num_stages: int = 3,
        capabilities: Sequence[int] = (80, 90),
        name: str = "",
    ) -> dict[int, Any]:
        """Fail where a Triton kernel, compiled without a GPU, takes more than accepted, spills, or cannot launch.

        Args:
            test: the name of the test, which the fixture gives.
            kernel: a function with `triton.jit`.
            signature: the type of every argument by name, as `"*fp16"`, `"i32"`; of a constant `"constexpr"`.
            constants: the constants by name.
            aligned: arguments that are multiples of 16, which makes wide loads possible.
            num_warps: as in a launch, like `num_stages`.
            num_stages: buffers of a loop.
            capabilities: compute capabilities to compile for: 80, 86, 89, 90, 100 or 120.
            name: of the case; default: the test's.

        Returns:
            The resources by capability (`harness.gate.resource.Resources`), for checks of your own.

        Raises:
            UserError: Triton runs in its interpreter, this is no kernel, an argument has no type, or a capability is
                not known.
        """
        from triton import JITFunction

        from harness.gate import resource
        from paged_kernels.triton.configurations import ARCHITECTURES, KernelConfiguration

        if os.environ.get("TRITON_INTERPRET") == "1":
            raise UserError("the gate compiles kernels; unset TRITON_INTERPRET")
        if not isinstance(kernel, JITFunction):
            raise UserError(f"kernel_resources: {kernel!r} is no kernel; give it a function with @triton.jit")
        types = dict(signature or {})
        if wrong := sorted(set(kernel.arg_names) ^ set(types)):
            names = ", ".join(kernel.arg_names)
            reason = f"signature: {', '.join(wrong)}: it must have a type for each of {names}, and no other"
            raise UserError(reason)
        if unknown := sorted(set(capabilities) - set(ARCHITECTURES)):
            raise UserError(
                f"capabilities: {unknown} are not known; allowed are {', '.join(map(str, ARCHITECTURES))}"
            )
        configuration = KernelConfiguration(
            name or test, kernel, types, dict(constants or {}), frozenset(aligned), num_warps, num_stages,
            capabilities=tuple(capabilities),
        )  # fmt: skip
        more = default_settings().resource.more_instructions
        found: dict[int, Any] = {}
        findings: list[Finding] = []
        for capability in capabilities:
            ((case, values),) = resource.compiled_cases([configuration], capability, [capability])
            if resource.UNCOMPILED in values:
                findings.append(Finding(case, GateVerdict.regressed, values[resource.UNCOMPILED]))
                continue
            now = found[capability] = resource.Resources(**values)
            self._keep(RESOURCE, case, values)
            accepted = self._accepted(RESOURCE, case)
            if broken := "; ".join(resource.broken(capability, now)):
                findings.append(Finding(case, GateVerdict.regressed, broken))
            elif accepted is None or self._update:
                findings.append(self._new(RESOURCE, case))
            else:
                before = resource.Resources(**accepted)
                findings.append(resource.compare_kernel(case, capability, now, before, more))
        self._end(RESOURCE, *findings)
        return found

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Remember that not all tests ran: then a case that is missing is no regression."""
        self._whole = self._whole and not items

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write new baselines, or find what is missing; set the exit code."""
        failed = session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._update:
            if not failed:
                self._write()
            return
        if self._whole:
            self._missing()
        verdicts = {one.verdict for found in self._findings.values() for one in found}
        if GateVerdict.regressed in verdicts:
            session.exitstatus = EXIT_CODES[GateVerdict.regressed]
        elif GateVerdict.inconclusive in verdicts and not failed:
            session.exitstatus = EXIT_CODES[GateVerdict.inconclusive]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The answer, on the terminal and as Markdown."""
        results = self._results()
        terminalreporter.section("gate")
        for line in lines(results, layers=()) if results else ["gate: no test asked it"]:
            terminalreporter.line(line)
        if self._page and results:
            with Path(self._page).open("a", encoding="utf-8") as file:
                file.write(markdown(results, layers=(), scopes=_SCOPES))

    def _results(self) -> list[LayerResult]:
        made_on = {LATENCY: platform.machine(), RESOURCE: _triton()}
        return [
            LayerResult(layer, tuple(found), made_on[layer])
            for layer, found in self._findings.items()
            if found
        ]

    def _file(self, layer: str) -> Path:
        return self.folder / f"{layer}{f'-{_triton()}' if layer == RESOURCE else ''}.json"

    def _baseline(self, layer: str) -> Baseline | None:
        return read_baseline(self._file(layer), layer, "write it again with pytest --gate-update")

    def _accepted(self, layer: str, case: str) -> Mapping[str, Any] | None:
        baseline = self._baseline(layer)
        return baseline.cases.get(case) if baseline else None

    def _keep(self, layer: str, case: str, values: Mapping[str, Any]) -> None:
        if case in self._cases[layer]:
            raise UserError(f"the gate has two cases '{case}': give them names (name='…')")
        self._cases[layer][case] = values

    def _new(self, layer: str, case: str) -> Finding:
        """A case without an accepted one: nothing to compare with, unless it is accepted now."""
        how = f"not in {self._file(layer)}; look at it, then pytest --gate-update --gate-reason '…'"
        verdict = GateVerdict.passed if self._update else GateVerdict.inconclusive
        return Finding(case, verdict, "accepted" if self._update else how)

    def _end(self, layer: str, *findings: Finding) -> None:
        """Keep the findings of a test. A regression fails it; what cannot be decided skips it."""
        self._findings[layer] += findings
        said = {verdict: [one for one in findings if one.verdict is verdict] for verdict in GateVerdict}
        if wrong := said[GateVerdict.regressed]:
            pytest.fail("\n".join(f"{one.case}: {one.reason}" for one in wrong), pytrace=False)
        if open_ := said[GateVerdict.inconclusive]:
            pytest.skip(f"inconclusive: {open_[0].reason}")

    def _write(self) -> None:
        for layer, cases in self._cases.items():
            if cases:
                old = self._baseline(layer)
                kept = {**old.cases, **cases} if old and not self._whole else cases
                measured = Measured(layer, self._file(layer).stem, {}, None, kept)
                write_baseline(self._file(layer), new_baseline(measured, self._reason))

    def _missing(self) -> None:
        for layer, cases in self._cases.items():
            if baseline := self._baseline(layer):
                run = Measured(layer, "", {}, None, {**baseline.cases, **cases})
                gone = replace(run, cases={name: run.cases[name] for name in cases})
                absent = [one for one in coverage(gone, baseline) if one.case in baseline.cases]
                self._findings[layer] += absent


def _triton() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"triton-{version('triton')}"
    except PackageNotFoundError:
        return "without Triton"


def _sources(function: Function, packages: Sequence[str]) -> tuple[dict[str, str], str]:
    """The sources of a function's file and of packages by module, and the function's name in its file."""
    plain = inspect.unwrap(function)
    path = getattr(plain, "__qualname__", "<")
    file = inspect.getsourcefile(plain) if inspect.isfunction(plain) and "<" not in path else None
    if file is None:
        reason = f"gated: {function!r} is no function of a module's top level, so its accepted version cannot be loaded"
        raise UserError(reason)
    found = {plain.__module__: Path(file).read_text(encoding="utf-8")}
    return {key: text for package in packages for key, text in package_sources(package).items()} | found, path
