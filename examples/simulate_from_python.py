"""Simulate a workload from Python: how does the block size change memory and latency?

Run it with `python examples/simulate_from_python.py`. Nothing is measured, so it needs no GPU and no model.
"""

from harness.config.schema import CostKind, RunConfig
from harness.point import check_point, run_point


def simulate(block_size: int) -> dict[str, float]:
    """The simulated metrics of 200 generated requests, by the names of `harness/metrics/__init__.py`."""
    config = RunConfig(measure=False)  # every key that `python -m harness show` prints is an attribute
    config.workload.num_requests = 200
    config.workload.length_scale = 0.1
    config.workload.request_rate = 40.0  # requests a second
    config.workload.prefix_share = 0.5  # half of the prompt tokens stood in an earlier prompt
    config.cache.block_size = block_size
    config.cache.pool_tokens = 4096
    config.cache.max_model_len = 1024
    config.cost.kind = CostKind.roofline  # the datasheet of `config.device`; no calibration
    check_point(config)  # raises ConfigError, which names the key, before anything runs
    metrics: dict[str, float] = run_point(config).record.simulated
    return metrics


def main() -> None:
    """Print one line for each block size."""
    print("block size   prefix hits   never filled   TTFT p99   output tokens/s")
    # never filled: of the slots in use, time-weighted
    for block_size in (1, 8, 16, 32, 64):
        found = simulate(block_size)
        print(
            f"{block_size:10}   {found['hit_ratio']:11.1%}   {found['internal_of_allocated']:12.1%}"
            f"   {found['ttft_p99'] * 1000:5.1f} ms   {found['output_throughput']:15.0f}"
        )


if __name__ == "__main__":
    main()
