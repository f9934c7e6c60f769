"""Part `prediction`: calibrate, predict and measure, beside contiguous memory of the same size, and try the gate."""

from harness.bench.gpu.parts import Setting
from harness.bench.gpu.parts.words import HARNESS, program, step
from harness.bench.gpu.step import Step

CALIBRATION_S = 65
_MODEL = ("model=small_llama", "model.dtype=bfloat16")
_POLICIES = "cache=paged,contiguous_max,contiguous_pow2,contiguous_oracle"


def prediction_steps(setting: Setting) -> list[Step]:
    """A calibration, three sweeps that find it, and the trial of the latency gate."""
    same = (
        "engine=cuda",
        f"device={setting.device}",
        f"cost.cache_dir={setting.out / 'calibration'}",
        *_MODEL,
    )
    one = (*same, "cache=paged", "cache.block_size=16", "decoding.beam_width=1")
    calibrate = (*HARNESS, "calibrate", *one, "--budget", str(CALIBRATION_S))
    return [
        step("calibration", calibrate, (*calibrate, "engine=auto", "--dry-run"), 100),
        _sweep(setting, "default", (*same, "experiment=default", "replay.repeats=2"), 150),
        _sweep(setting, "azure", (*_azure(setting.trace), *same), 75),
        _sweep(setting, "contiguous", (*_equal_memory(), *same), 70),
        _gate(setting),
    ]


def _sweep(setting: Setting, name: str, overrides: tuple[str, ...], limit: float) -> Step:
    command = (*HARNESS, "sweep", *overrides, f"out={setting.out / name}")
    return step(name, command, (*command, "engine=auto", "--dry-run"), limit)


def _azure(trace: str | None) -> tuple[str, ...]:
    """The first requests of the recorded conversation trace, or of one calibrated on it, with lengths as they are.

    Arrivals keep their shape and come six times as fast: one model of this size would be idle most of the time.
    """
    source = ("trace=azure", f"trace.path={trace}") if trace else ("trace=azure_conv",)
    load = ("workload=window", "workload.num_requests=100", "workload.request_rate=30")
    sizes = ("cache.max_model_len=4096", "cache.pool_tokens=65536")
    return ("experiment=azure_window", *source, *load, *sizes, "replay.repeats=2")


def _equal_memory() -> tuple[str, ...]:
    """Lengths of the PagedAttention paper's ShareGPT workload, all there at once, on a pool that few of them fill."""
    load = ("trace=sosp23_sharegpt", "replay=offline", "workload=window", "workload.num_requests=96")
    return (_POLICIES, *load, "cache.pool_tokens=16384", "cache.max_model_len=2048", "replay.repeats=1")


def _gate(setting: Setting) -> Step:
    out = ("--out", str(setting.out / "gate.json"))
    return step("gate", (*program("gate_trial"), *out), (*program("gate_trial"), *out, "--dry-run"), 175)
