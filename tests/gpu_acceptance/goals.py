"""Every goal, by part. The numbers of the goals stand only in this file."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

LARGE_BYTES = 256e6
"""Bytes of KV that a call must read to count for bandwidth. Kernel launches limit smaller calls."""
PAGED_BLOCKS = 16
"""The smallest block size that counts for bandwidth and paging."""
DTYPE, GROUPS = "bf16", (1, 4, 8)
"""KV dtype, and query heads for each KV head, of the calls that count for bandwidth and paging."""
LONG_QUERIES = 512
"""Queries of a sequence from which arithmetic limits a prefill."""
GAIN_ROWS, GAIN_SHARED = 16, 8192
"""Sequences and shared tokens of the case in which a cascade's gain is judged."""
RATES = {"H100": (3350e9, 989.5e12), "H200": (4800e9, 989.5e12)}
"""Bytes/s and dense bfloat16 FLOP/s of the datasheets (SXM), by a word of the device's name."""
PUBLIC_DECODE = {
    "H100": {
        (64, 1024): 0.78,
        (128, 1024): 0.84,
        (256, 1024): 0.88,
        (32, 4096): 0.87,
        (64, 4096): 0.91,
        (128, 4096): 0.93,
        (8, 16_384): 0.87,
        (8, 32_768): 0.90,
    },
    "H200": {
        (64, 1024): 0.72,
        (128, 1024): 0.81,
        (256, 1024): 0.87,
        (32, 4096): 0.85,
        (64, 4096): 0.89,
        (128, 4096): 0.91,
        (8, 16_384): 0.85,
        (8, 32_768): 0.87,
    },
}
"""Share of the datasheet's bandwidth that the best published kernel reaches, by (sequences, keys): bfloat16, 32 query
heads, 8 KV heads of 128. The fastest of vLLM 0.24, SGLang 0.5.14 and TensorRT-LLM 1.3.0rc20 in the tables of
aiconfigurator-core 0.12.0 (Apache-2.0)."""
PUBLIC_PREFILL = {
    "H100": {(1, 4096): 0.55, (4, 4096): 0.55},
    "H200": {(1, 4096): 0.52, (4, 4096): 0.58},
}
"""The same for whole prompts: share of the datasheet's FLOP/s."""
_TABLES = "best of vLLM 0.24, SGLang 0.5.14, TensorRT-LLM 1.3.0rc20 (aiconfigurator-core 0.12.0)"
_SOSP = "Kwon et al., SOSP 2023: kernel 20–26 % slower than on contiguous KV"
_ORCA = "Kwon et al., SOSP 2023: 2–4× the throughput of reserved memory"
ERRORS = (
    ("output_throughput", "throughput", 0.02),
    ("tpot_mean", "TPOT", 0.02),
    ("ttft_p50", "median TTFT", 0.05),
)
"""Metric, its name in a goal, and the largest allowed median error over the points of a sweep."""
SWEEPS = (("default", "default sweep"), ("azure", "Azure window"))
BASELINES = ("contiguous_max", "contiguous_pow2", "contiguous_oracle")


class Sense(StrEnum):
    """On which side of the aim a figure must lie."""

    most = "at most"
    least = "at least"
    shown = "shown"  # the figure is only reported


class Unit(StrEnum):
    """How a figure is printed."""

    share = "share"
    ratio = "ratio"
    number = "number"


@dataclass(frozen=True)
class Goal:
    """One figure of one part. `row` describes the goal in words; `source` says where the aim comes from."""

    key: str
    row: str
    figure: str
    sense: Sense
    aim: float | None
    unit: Unit
    source: str = "project goal for the H200"

    def met(self, found: float | None) -> bool | None:
        """Whether a figure reaches the aim; None where nothing was measured or there is no aim.

        NaN never reaches an aim.
        """
        if found is None or self.aim is None:
            return None
        return found <= self.aim if self.sense is Sense.most else found >= self.aim

    def shown(self, value: float) -> str:
        """A figure in the goal's unit."""
        if self.unit is Unit.share:
            return f"{value:.1%}"
        return f"{value:.3g}×" if self.unit is Unit.ratio else f"{value:g}"

    @property
    def wanted(self) -> str:
        """The aim in words."""
        return "–" if self.aim is None else f"{self.sense} {self.shown(self.aim)}"


@dataclass(frozen=True)
class Found:
    """The figure of a goal and the case it comes from (mostly the worst one), or the reason why there is none."""

    value: float | None
    where: str


def missing(reason: str) -> Found:
    """No figure, with the reason."""
    return Found(None, reason)


@dataclass(frozen=True)
class Judged:
    """A goal with what was found."""

    goal: Goal
    found: Found

    @property
    def met(self) -> bool | None:
        """See `Goal.met`."""
        return self.goal.met(self.found.value)

    @property
    def verdict(self) -> str:
        """`yes`, `no`, `shown` (no aim) or `not measured`."""
        if self.found.value is None:
            return "not measured"
        return "shown" if self.met is None else "yes" if self.met else "no"


MOST, LEAST, SHOWN = Sense.most, Sense.least, Sense.shown
SHARE, RATIO, COUNT = Unit.share, Unit.ratio, Unit.number


_TESTS = Goal("tests", "every kernel test at full size, all dtypes", "tests that fail", MOST, 0, COUNT)
_KERNELS = (
    Goal("decode_copy", "decode, bf16, ≥ 256 MB KV, block ≥ 16", "share of same-run copy speed", LEAST, 0.90, SHARE),
    Goal("decode_public", "decode, 32/8 heads, shape by shape", "bandwidth over the best public kernel's, worst", LEAST,
         1.0, RATIO, _TABLES),
    Goal("decode_model", "the same, every block size", "bandwidth over the static model's, worst", SHOWN, None, RATIO,
         "docs/kernel-speed.md: a model, mostly too fast"),
    Goal("prefill_public", "whole prompts of 4,096, 32/8 heads", "FLOP/s over the best public kernel's, worst", LEAST,
         1.0, RATIO, _TABLES),
    Goal("paging", "paged over contiguous twin, block ≥ 16", "time ratio, worst", MOST, 1.02, RATIO, _SOSP),
    Goal("blocks", "latency against block size, tile fixed", "slowest over fastest, block ≥ 16", SHOWN, None, RATIO),
    Goal("flashinfer_worst", "against FlashInfer", "our time over theirs, worst", MOST, 1.05, RATIO),
    Goal("flashinfer_median", "against FlashInfer", "our time over theirs, median", MOST, 1.0, RATIO),
    Goal("flex_median", "against flex attention", "our time over theirs, median", MOST, 1.0, RATIO),
    Goal("sdpa_median", "decode against torch SDPA, contiguous KV", "our time over theirs, median", MOST, 1.0, RATIO),
    Goal("prefill_ceiling", "prefill on cached prefixes", "share of same-run matrix ceiling", LEAST, 0.60, SHARE),
    Goal("prefill_sdpa", "prefill against torch SDPA", "their time over ours, worst", LEAST, 0.9, RATIO),
    Goal("prefill_hopper", "prefill kernel for Hopper, beside the plain one", "its time over the plain one's, worst",
         MOST, 1.0, RATIO, "it becomes the default where it is never slower"),
    Goal("cascade_flat", "cascade, rule asked", "time over flat, worst", MOST, 1.02, RATIO),
    Goal("cascade_gain", "cascade, 16 sequences × 8k shared", "flat time over ours", LEAST, 5.0, RATIO),
    Goal("cascade_rule", "the crossover, used by the cost rule", "cases decided wrongly by > 2 %", MOST, 0, COUNT),
)  # fmt: skip
_MEMCHECK = Goal("memcheck", "compute-sanitizer memcheck, small tests", "errors", MOST, 0, COUNT)
_ENGINE = (
    Goal("host_1b", "1B class, bf16, CUDA graphs", "host share of a decode step, worst", MOST, 0.05, SHARE),
    Goal("host_8b", "8B class, bf16, CUDA graphs", "host share of a decode step, worst", MOST, 0.05, SHARE),
    Goal("tokens_1b", "1B class, largest batch", "decoded tokens a second", SHOWN, None, COUNT),
    Goal("tokens_8b", "8B class, largest batch", "decoded tokens a second", SHOWN, None, COUNT),
    Goal("bytes_8b", "8B class, largest batch", "GB read a second", SHOWN, None, COUNT),
    Goal(
        "peer_1b", "beside transformers' continuous batching, 1B", "our rate over theirs", SHOWN, None, RATIO
    ),
    Goal(
        "peer_8b", "beside transformers' continuous batching, 8B", "our rate over theirs", SHOWN, None, RATIO
    ),
)


def _errors() -> tuple[Goal, ...]:
    return tuple(
        Goal(
            f"{sweep}_{metric}",
            f"{title}, predicted against measured",
            f"{name}, median error",
            MOST,
            aim,
            SHARE,
        )
        for sweep, title in SWEEPS
        for metric, name, aim in ERRORS
    )


_PREDICTION = (
    *_errors(),
    Goal("kernel", "kernel latency on held-out shapes", "mean error, worst axis", MOST, 0.03, SHARE),
    *(
        Goal(
            f"ratio_{policy}",
            f"paged beside {policy} at equal memory",
            "throughput ratio",
            SHOWN,
            None,
            RATIO,
            _ORCA,
        )
        for policy in BASELINES
    ),
    Goal("gate_alarms", "latency gate, A/A run", "false alarms", MOST, 0, COUNT),
    Goal("gate_caught", "latency gate, planted +5 %", "share of planted cases caught", LEAST, 1.0, SHARE),
)
GOALS: Mapping[str, tuple[Goal, ...]] = {
    "quick": (_TESTS, *_KERNELS),
    "kernels": (_TESTS, _MEMCHECK, *_KERNELS),
    "engine": _ENGINE,
    "prediction": _PREDICTION,
}
