"""What makes a point the same point again, beside its configuration."""

from engine.runtime.models.spec import checkpoint_stamp
from harness.config.schema import RunConfig
from harness.environment import code_version, device_identity
from harness.point.clock import clock_of
from harness.point.devices import engine_kernels
from harness.point.parents import recording_stamp
from harness.point.trace import reshaped_trace


def point_identity(config: RunConfig) -> dict[str, str]:
    """Digest of the trace, version of the code, and, where it matters, the device and the cost model's device."""
    from harness.measured.calibration import calibration_fingerprint
    from harness.point.cost import needs_fit, resolve_cost_kind, takes_timed_kernels

    kind = resolve_cost_kind(config)
    identity = {"trace": reshaped_trace(config).digest, "code": code_version(), "cost": str(kind)}
    if needs_fit(config):
        identity["calibration"] = calibration_fingerprint(config)
    if takes_timed_kernels(config):
        from harness.measured.kernel_shapes import kernels_digest

        identity["kernels"] = kernels_digest(config)
    if config.model.path:
        identity["checkpoint"] = checkpoint_stamp(config.model.path)
    if config.decoding.draft_path:
        identity["draft"] = checkpoint_stamp(config.decoding.draft_path)
    if config.decoding.beam_parents:
        identity["beam_parents"] = recording_stamp(config.decoding.beam_parents)
    if config.measure:
        identity |= {"device": device_identity(config.engine.device), "clock": str(clock_of(config))}
        identity["engine"] = " ".join(engine_kernels(config.engine))
    return identity
