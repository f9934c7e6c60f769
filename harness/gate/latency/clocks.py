"""Whether the device slowed itself down under a measurement, from its driver; this changes no setting."""

from dataclasses import dataclass

# NVML's nvmlClocksEventReason…: what means that the device could not go as fast as it was asked to.
_SLOWDOWNS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
}
_HARMLESS = 0x4  # a power cap is how a full load runs on many devices: reported, no reason to doubt a ratio


@dataclass(frozen=True)
class ClockState:
    """Clocks in MHz and the reasons why they are not higher; zeros and nothing where the driver does not say."""

    sm_mhz: int = 0
    memory_mhz: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Reasons for which a measurement should not be trusted."""
        return tuple(reason for reason in self.reasons if reason != _SLOWDOWNS[_HARMLESS])


def clock_state(index: int = 0) -> ClockState:
    """The clocks of the GPU `index` now; an empty state without NVML, which says nothing and stops nothing."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return ClockState()
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        mask = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        sm, memory = (
            int(pynvml.nvmlDeviceGetClockInfo(handle, kind))
            for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
        )
    except pynvml.NVMLError:  # an old driver, or a virtual device that hides its clocks
        return ClockState()
    return ClockState(sm, memory, tuple(name for bit, name in _SLOWDOWNS.items() if mask & bit))
