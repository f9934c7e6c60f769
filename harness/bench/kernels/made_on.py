"""What a run of `bench kernels` was made on and with: without it a figure is about nothing in particular."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True)
class MadeOn:
    """Device, kernel sources and packages of a run, as they stand in every row of its table.

    `kernels` is the digest of the kernel sources; `threads` are those of a CPU, 0 on a GPU.
    """

    device: str
    kernels: str
    torch: str
    triton: str
    threads: int
    date: str

    def values(self) -> dict[str, Any]:
        """The fields as columns."""
        return asdict(self)


def made_on(device: str, threads: int) -> MadeOn:
    """This machine and this tree now; `device` is `cpu` or `cuda`."""
    from harness.environment import versions
    from harness.gate.kernels import kernel_digest

    found = versions()
    return MadeOn(
        device=device_name(device),
        kernels=kernel_digest(),
        torch=found["torch"] or "none",
        triton=found["triton"] or "none",
        threads=threads if device == "cpu" else 0,
        date=datetime.now(UTC).date().isoformat(),
    )


def device_name(device: str) -> str:
    """The name that a sweep's record would give what ran: the GPU's, or the CPU's with its cores."""
    from harness.config.schema import EngineDevice
    from harness.environment import device_identity, gpu_names

    if (
        device == "cuda" and not gpu_names()
    ):  # some containers hide the driver's files and still have the device
        import torch

        return str(torch.cuda.get_device_name())
    return device_identity(EngineDevice(device))
