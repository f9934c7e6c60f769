"""The options and fixtures of the gate for pytest. They stand apart because pytest loads this file in every environment
that has PageTwin; everything else is imported when `--gate` is given.
"""

from typing import Any

import pytest

PLUGIN = "pagetwin-gate"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the gate."""
    group = parser.getgroup("gate", "regressions of kernels and functions (PageTwin)")
    flags = {
        "--gate": "time and compile what tests give to gated and kernel_resources",
        "--gate-update": "accept what is there now; needs --gate-reason",
        "--gate-changed": "time only functions whose file is not the accepted one",
    }
    for name, what in flags.items():
        group.addoption(name, action="store_true", help=what)
    group.addoption("--gate-reason", default="", help="why the figures may change; kept in the baselines")
    folder, page = "gate-baselines in pytest's root directory", "on GitHub $GITHUB_STEP_SUMMARY by default"
    group.addoption("--gate-baselines", metavar="DIR", help=f"default: {folder}")
    group.addoption("--gate-markdown", metavar="FILE", help=f"append the answer; {page}")


def pytest_configure(config: pytest.Config) -> None:
    """Load the gate where it is asked for."""
    if config.getoption("gate") or config.getoption("gate_update"):
        from harness.gate.plugin import Gate

        config.pluginmanager.register(Gate(config), PLUGIN)


def _of_gate(request: pytest.FixtureRequest, method: str) -> Any:
    gate = request.config.pluginmanager.get_plugin(PLUGIN)
    if gate is None:
        pytest.skip("runs with pytest --gate alone")

    def ask(*arguments: Any, **options: Any) -> Any:
        from harness.config.errors import UserError

        try:
            return getattr(gate, method)(request.node.name, *arguments, **options)
        except UserError as error:
            pytest.fail(str(error), pytrace=False)

    return ask


@pytest.fixture
def gated(request: pytest.FixtureRequest) -> Any:
    """`gated(function, *arguments)`: not slower than the accepted file of the function. See `Gate.gated`."""
    return _of_gate(request, "gated")


@pytest.fixture
def kernel_resources(request: pytest.FixtureRequest) -> Any:
    """`kernel_resources(kernel, signature=…)`: a Triton kernel's compiled code. See `Gate.kernel_resources`."""
    return _of_gate(request, "kernel_resources")
