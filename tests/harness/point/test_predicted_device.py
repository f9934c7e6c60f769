"""Seconds measured on one device are never given out as those of another."""

import pytest

from harness.config.compose import compose_config
from harness.config.errors import ConfigError
from harness.config.schema import CostKind, RunConfig
from harness.point.cost import check_cost, cost_model, resolve_cost_kind
from harness.sweep.plan import run_request
from harness.workload.deployment import deployment_of


def config(*overrides: str) -> RunConfig:
    request = run_request(("engine.device=cpu", "decoding.beam_width=1", *overrides))
    return compose_config(axis.settings[0] for axis in request.axes)


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is calibrated for every model."""
    monkeypatch.setattr("harness.calibrate.store.is_calibrated", lambda config: True)


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("device", ["h100", "a100_80gb", "h200"])
def test_a_calibration_of_this_machine_does_not_price_another_device(device: str) -> None:
    other = config("measure=false", f"device={device}")
    assert resolve_cost_kind(deployment_of(other)) is CostKind.roofline
    assert cost_model(deployment_of(other)).source.name == device


@pytest.mark.usefixtures("calibrated")
def test_a_calibration_of_this_machine_prices_this_machine() -> None:
    assert resolve_cost_kind(deployment_of(config("measure=false"))) is CostKind.fitted


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("kind", ["fitted", "table"])
def test_measured_costs_of_another_device_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="cannot price device h100; use cost=roofline"):
        check_cost(deployment_of(config("measure=false", "device=h100", f"cost={kind}")))


def test_measuring_here_what_is_predicted_for_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="h200 would be predicted, but the engine measures on"):
        check_cost(deployment_of(config("device=h200", "model.dtype=bfloat16")))


@pytest.mark.parametrize(
    ("name", "gpu", "same"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("h100_sxm", "NVIDIA H100 80GB HBM3", True),
        ("cpu", "NVIDIA H100 80GB HBM3", True),
        ("h200", "NVIDIA H100 80GB HBM3", False),
        ("h200", "NVIDIA GH200 480GB", False),
        ("h100", "NVIDIA H100 PCIe", False),
        ("h100_pcie", "NVIDIA H100 PCIe", True),
        ("a100_40gb", "NVIDIA A100-SXM4-80GB", False),
        ("a100_80gb", "NVIDIA A100-SXM4-80GB", True),
        ("l4", "NVIDIA L40S", False),
        ("rtx_pro_6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("rtx_pro_6000", "NVIDIA GeForce RTX 4090", False),
        ("rtx_pro_6000", "NVIDIA RTX 6000 Ada Generation", False),
        ("nvidia_x", "NVIDIA L40S", False),
        ("''", "NVIDIA L40S", False),
    ],
)
def test_a_gpu_is_known_by_whole_words_of_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, gpu: str, same: bool
) -> None:
    monkeypatch.setattr("harness.workload.deployment.engine_device", lambda device: "cuda")
    monkeypatch.setattr("harness.workload.deployment.device_identity", lambda device: gpu)
    assert deployment_of(config(f"device.name={name}")).is_at_hand is same


@pytest.mark.usefixtures("calibrated")
def test_seconds_of_one_device_are_not_those_of_several() -> None:
    with pytest.raises(ConfigError, match="takes its seconds from one device"):
        check_cost(deployment_of(config("measure=false", "device.tensor_parallel=4")))
