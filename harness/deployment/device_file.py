"""A fitted device as a file that `device=FILE` reads: its constants, where each comes from, and the error held out."""

import json
from dataclasses import fields, replace
from math import isfinite
from pathlib import Path

from harness.config.schema import DeviceConfig
from harness.deployment.fit import Fit, doubts
from harness.deployment.log import Deployment
from harness.deployment.settings import EngineSettings
from harness.store.atomic import write_files


def write_device(
    fit: Fit, deployment: Deployment, settings: EngineSettings, command: str, path: Path
) -> None:
    """Write the device. Raises StoreError where the file cannot be written."""
    write_files(path.parent, {path.name: device_text(fit, deployment, settings, command).encode()})


def fitted_device(fit: Fit, deployment: Deployment) -> DeviceConfig:
    """The device of a fit, with the name of the log that it was fitted to."""
    ran = f" of {deployment.settings.model}" if deployment.settings.model else ""
    return replace(
        fit.device, fitted_from=f"{deployment.name}, first {fit.fitted_on} of {fit.requests} requests{ran}"
    )


def device_text(fit: Fit, deployment: Deployment, settings: EngineSettings, command: str) -> str:
    """The file's text: comments that say where it comes from, then one key and value a line."""
    engine = " ".join(filter(None, (settings.engine, settings.version)))
    lines = [
        f"# {fit.device.name} as the log of a deployment shows it: choose with device=FILE.",
        f"# Made by: {command}",
        f"# Log: {deployment.name} ({', '.join(deployment.sources)}), {engine}, model {settings.model or 'not named'}.",
        f"# Digest of its requests: {deployment.workload.digest[:16]}",
        f"# Fitted on the first {fit.fitted_on} of {fit.requests} requests. Errors on the others:",
        f"#   {errors_text(fit.held_out)}",
        f"#   with the constants of the description, before the fit: {errors_text(fit.before)}",
        *(f"# Warning: {doubt}" for doubt in doubts(fit)),
        "# Constants: value before the fit, and whether the log taught it (to half of the prior's spread or less).",
    ]
    learned = {constant.key: constant for constant in fit.constants}
    device = fitted_device(fit, deployment)
    for one in fields(DeviceConfig):
        value = getattr(device, one.name)
        if value is None:
            continue
        constant = learned.get(one.name)
        comment = ""
        if constant is not None:
            how = "learned from the log" if constant.learned else "mostly the prior"
            comment = f"  # before {constant.prior:.4g}; {how}, spread {100 * constant.spread:.0f} %"
        lines.append(f"{one.name}: {_written(value)}{comment}")
    return "\n".join(lines) + "\n"


def errors_text(errors: object) -> str:
    """Signed errors of the medians and of the 90th percentiles, as text."""
    shown = {
        "TPOT p50": getattr(errors, "tpot_p50"),  # noqa: B009
        "TTFT p50": getattr(errors, "ttft_p50"),  # noqa: B009
        "TPOT p90": getattr(errors, "tpot_p90"),  # noqa: B009
        "TTFT p90": getattr(errors, "ttft_p90"),  # noqa: B009
    }
    return ", ".join(
        f"{name} {100 * value:+.1f} %" if isfinite(value) else f"{name} unknown"
        for name, value in shown.items()
    )


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
