"""The static model's limits: bytes, latency, issue slots, occupancy. Nothing here was measured."""

from dataclasses import replace

import pytest

from harness.kernel_speed.gpus import GPUS, LATENCIES, MULTIPROCESSORS
from harness.kernel_speed.predict import LAUNCH_S, Kernel, WarpCycles, predict

H200 = GPUS["h200"]
WARP = WarpCycles(
    prologue=4000.0,
    loop=1500.0,
    epilogue=900.0,
    pipe=377.0,
    shared=201.0,
    copied=8192,
    ahead=2.0,
    product_waits=0,
)
KERNEL = Kernel(registers=146, shared_bytes=71_680, warps=4, replay=WARP)


def test_a_long_decode_reaches_what_reading_reaches_of_the_bandwidth() -> None:
    size = 8192 * 64 * KERNEL.tile_bytes
    share = predict(KERNEL, H200, items=8192, tiles=64).share(size, H200)
    assert share == pytest.approx(H200.reached, rel=0.02)
    assert share < H200.reached


def test_one_program_takes_the_latency_of_its_warp() -> None:
    found = predict(KERNEL, H200, items=1, tiles=10)
    assert found.limit == "latency"
    assert found.seconds == pytest.approx(LAUNCH_S + (4000 + 15_000 + 900) / H200.clock, rel=1e-3)


def test_a_slow_loop_is_limited_by_latency_and_gains_nothing_from_a_faster_memory() -> None:
    slow = replace(KERNEL, replay=replace(WARP, loop=9000.0))
    once, twice = (predict(slow, replace(H200, bandwidth=rate), 8192, 64) for rate in (4.8e12, 9.6e12))
    assert twice.limit == "latency"
    assert twice.seconds == pytest.approx(once.seconds, rel=0.05)


def test_the_limit_is_that_of_most_of_the_time_not_of_the_last_wave() -> None:
    """Full waves are limited by bytes; a wave of one program waits for its warp."""
    seats = KERNEL.seats(90) * H200.multiprocessors
    assert predict(KERNEL, H200, items=1, tiles=64).limit == "latency"
    assert predict(KERNEL, H200, items=8 * seats + 1, tiles=64).limit == "bytes"


def test_issue_slots_limit_a_loop_with_many_instructions() -> None:
    busy = replace(KERNEL, replay=replace(WARP, pipe=4000.0))
    assert predict(busy, H200, 8192, 64).limit == "pipes"


@pytest.mark.parametrize(
    ("registers", "shared", "programs"),
    [(146, 71_680, 3), (146, 38_912, 3), (190, 38_912, 2), (255, 1024, 2), (32, 512, 16), (64, 120_000, 1)],
)
def test_registers_shared_memory_and_warps_limit_the_programs_of_a_multiprocessor(
    registers: int, shared: int, programs: int
) -> None:
    assert replace(KERNEL, registers=registers, shared_bytes=shared).seats(90) == programs


def test_bytes_in_flight_are_those_of_all_programs() -> None:
    assert KERNEL.in_flight(90) == 3 * 2 * 4 * 8192
    assert KERNEL.in_flight(120) == 2 * 4 * 8192


def test_a_kernel_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit sm_90"):
        predict(replace(KERNEL, shared_bytes=240_000), H200, 1, 1)


def test_a_last_wave_that_is_nearly_empty_costs_a_wave() -> None:
    seats = KERNEL.seats(90) * H200.multiprocessors
    full, more = (predict(KERNEL, H200, items, 8) for items in (seats, seats + 1))
    assert more.waves == full.waves + 1
    assert more.seconds > 1.2 * full.seconds


def test_partial_results_are_written_and_read_again() -> None:
    plain, parted = (predict(KERNEL, H200, 1024, 8, partial_bytes=size) for size in (0.0, 1e8))
    assert parted.seconds - plain.seconds == pytest.approx(2e8 / (H200.bandwidth * H200.reached))


def test_every_gpu_has_latencies_and_limits() -> None:
    assert {gpu.capability for gpu in GPUS.values()} <= LATENCIES.keys() & MULTIPROCESSORS.keys()


def test_bandwidth_clock_and_multiprocessors_are_those_of_the_presets() -> None:
    import yaml

    from harness.config.groups import option_file

    for gpu in GPUS.values():
        preset = yaml.safe_load(option_file("device", gpu.name).read_text(encoding="utf-8"))
        known = (preset["bandwidth_gbs"] * 1e9, preset["clock_ghz"] * 1e9, preset["multiprocessors"])
        assert known == pytest.approx((gpu.bandwidth, gpu.clock, gpu.multiprocessors)), gpu.name
