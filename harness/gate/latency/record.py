"""Recorded latency runs: measured on a GPU, kept as a file, judged anywhere while the kernels are the same."""

from pathlib import Path

from harness.config.errors import UserError
from harness.gate.baseline import read_baseline, write_baseline
from harness.gate.finding import Finding, LayerResult, Verdict
from harness.gate.kernels import kernel_digest
from harness.gate.measured import Measured, accepted


def write_record(measured: Measured, file: Path) -> None:
    """Keep a run. A record has a baseline's form, so that it can become one."""
    write_baseline(file, accepted(measured, "record of a run"))


def read_record(file: Path) -> Measured:
    """The run in `file`.

    Raises:
        UserError: there is no such file, or it is no latency record.
    """
    found = read_baseline(file, "latency")
    if found is None:
        raise UserError(f"there is no record {file}; bench gpu writes one as latency.json")
    return Measured(
        layer="latency",
        name=latency_name(str(found.made_on["device"])),
        made_on=found.made_on,
        kernels=found.kernels,
        cases=found.cases,
        environment=found.environment,
        remarks=(f"recorded on {found.date}; nothing was timed now",),
    )


def latency_name(device: str) -> str:
    """File name of a device's baseline: `latency-nvidia-h200`."""
    words = "".join(letter if letter.isalnum() else " " for letter in device.lower()).split()
    return "-".join(["latency", *words])


def fresh_or_stale(record: Measured) -> LayerResult | None:
    """None for a record of this tree's kernels; else the finding that says it proves nothing about them."""
    if record.kernels == kernel_digest():
        return None
    reason = f"stale: the record is of kernels {record.kernels}, this tree's are {kernel_digest()}; time them again"
    finding = Finding("latency", Verdict.inconclusive, reason)
    return LayerResult("latency", (finding,), str(record.made_on["device"]), record.remarks)
