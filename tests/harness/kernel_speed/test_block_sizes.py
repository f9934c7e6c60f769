"""The table of block sizes is made of the accepted kernels, and the roofline reads it where it is asked to."""

import json
import re
from pathlib import Path

import pytest

from harness.config.compose import compose_config, normalise
from harness.config.errors import ConfigError
from harness.config.schema import RunConfig
from harness.cost import roofline as table
from harness.kernel_speed.block_sizes import (
    BLOCK_SIZES,
    DIM,
    KV_HEADS,
    decode_case,
    decode_time,
    halves_sums,
    kernel_of,
    main,
    newest_baseline,
    products,
    share_lines,
    table_text,
)
from harness.kernel_speed.gpus import GPUS, Gpu
from harness.point.cost import check_cost, cost_model
from harness.sweep.plan import run_request
from harness.workload.deployment import deployment_of

ROOT = Path(__file__).resolve().parents[3]
BASELINES = ROOT / "results" / "baselines"
ASKED = ("measure=false", "model=llama31_8b", "cost=roofline", "cost.block_sizes=true")


def config(*overrides: str) -> RunConfig:
    request = run_request(("decoding.beam_width=1", *overrides))
    return normalise(compose_config(axis.settings[0] for axis in request.axes))


def decode_seconds(*overrides: str) -> float:
    """Seconds of reading 100,000 KV slots by decode rows."""
    from harness.replay.features import AT

    cost = cost_model(deployment_of(config(*overrides)))
    features = [0.0] * 64
    features[AT.decode_kv] = 1e5
    return float(cost.parts(features).decodes)  # type: ignore[attr-defined]


def test_the_table_is_that_of_the_accepted_kernels() -> None:
    """If this fails, the kernels changed: run `python -m harness.kernel_speed.block_sizes`."""
    assert table.table_file().read_text(encoding="utf-8") == table_text(newest_baseline(BASELINES))


def test_a_stale_table_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "block_sizes.csv"
    monkeypatch.setattr("harness.kernel_speed.block_sizes.table_file", lambda: file)
    words = ["--baselines", str(BASELINES)]
    assert main([*words, "--check"]) == 1
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    file.write_text(file.read_text(encoding="utf-8").replace("h200,2,16,", "h200,2,16,9"), encoding="utf-8")
    assert main([*words, "--check"]) == 1


def test_every_gpu_and_block_size_is_in_the_table() -> None:
    found = table.read_table()
    for gpu in GPUS.values():
        widths = (2,) if gpu.capability < 89 else (2, 1)
        assert {(gpu.name, width, size) for width in widths for size in BLOCK_SIZES} <= found.keys()


def test_the_factor_is_1_at_the_reference() -> None:
    assert {one.factor for (_, _, size), one in table.read_table().items() if size == table.REFERENCE} == {
        1.0
    }


def test_a_header_says_that_nothing_was_measured() -> None:
    assert "not measured" in table.table_file().read_text(encoding="utf-8").splitlines()[1]


def test_decode_takes_the_factor_of_its_block_size() -> None:
    plain = decode_seconds("device=b200", "cache.block_size=16", *ASKED[:-1])
    asked = decode_seconds("device=b200", "cache.block_size=16", *ASKED)
    assert asked / plain == pytest.approx(table.read_table()["b200", 2, 16].factor)


def test_without_the_switch_nothing_changes() -> None:
    one, other = (decode_seconds("device=h200", f"cache.block_size={size}", *ASKED[:-1]) for size in (8, 64))
    assert one == other


def test_the_record_says_that_the_factor_is_a_model() -> None:
    provenance = cost_model(
        deployment_of(config("device=h200", "cache.block_size=8", *ASKED))
    ).source.provenance
    said = provenance["block size"]
    assert said["what"] == "static model of our Triton decode kernel, not measured"
    assert said["uncertainty"] == table.UNCERTAINTY
    assert "block size" not in provenance["not priced"]


def test_the_bound_has_no_factor() -> None:
    cost = cost_model(deployment_of(config("device=h200", "cache.block_size=8", *ASKED)))
    assert cost.device.bound.block_size_factor is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("device=h200", "cache.block_size=24", *ASKED), "block size 24; it holds 1, 8, 16, 32, 64, 128"),
        (("device=h200", "device.name=mine", *ASKED), "device mine; it holds a100_40gb"),
        (("device=h200", *ASKED[:1], "model=gpt2_tiny", *ASKED[2:]), "heads of "),
        (
            ("device=a100_80gb", "model.kv_dtype=fp8_e4m3", *ASKED),
            "a cache of 1 bytes an element on a100_80gb",
        ),
    ],
)
def test_what_the_table_does_not_hold_is_refused_by_name(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=r"cost\.block_sizes") as caught:
        check_cost(deployment_of(config(*overrides)))
    assert message in str(caught.value)


def test_drafts_make_rows_that_the_factor_does_not_price() -> None:
    drafts = "decoding.draft_tokens=3", "decoding.acceptance=0.5"
    with pytest.raises(ConfigError, match="a factor on rows of one token, and drafts make rows of several"):
        check_cost(deployment_of(config("device=h200", *ASKED, *drafts)))


def test_a_contiguous_cache_has_no_block_size_to_price() -> None:
    assert config("device=h200", "cache=contiguous_max", *ASKED).cost.block_sizes is False


def test_the_warps_are_those_of_the_launcher() -> None:
    launch = pytest.importorskip("paged_kernels.triton.launch")
    from harness.kernel_speed import block_sizes as made

    torch = pytest.importorskip("torch")
    shape = launch.AttentionShape(torch.bfloat16, torch.bfloat16, 32, 8, 128, 128, 16)
    assert launch.decode_config(shape).warps == made.WARPS


def test_the_keys_of_a_tile_are_those_of_the_launcher() -> None:
    import json

    torch = pytest.importorskip("torch")
    launch = pytest.importorskip("paged_kernels.triton.launch")
    from harness.kernel_speed.block_sizes import decode_case, kernel_of, keys_of

    cases = json.loads(newest_baseline(BASELINES).read_text(encoding="utf-8"))["cases"]
    for width, kept in ((2, torch.bfloat16), (1, torch.float8_e4m3fn)):
        shape = launch.AttentionShape(torch.bfloat16, kept, 32, 8, 128, 128, 16)
        kernel = kernel_of(decode_case(cases, width, 16, 90))
        assert keys_of(kernel, width) == launch.decode_config(shape).tile


def test_the_documents_print_the_shares_of_the_accepted_kernels() -> None:
    """If this fails, the kernels or the launch policy changed: write the tables of both documents again."""
    cases = json.loads(newest_baseline(BASELINES).read_text(encoding="utf-8"))["cases"]
    assert "\n".join(share_lines(cases)) in (ROOT / "docs/kernel-speed.md").read_text(encoding="utf-8")

    def share(device: str, rows: int, slots: int) -> str:
        """The model's column beside a goal of `docs/gpu.md`: 16-bit caches, blocks of 16."""
        gpu, size = GPUS[device], 4 * rows * slots * KV_HEADS * DIM
        kernel = kernel_of(decode_case(cases, 2, 16, gpu.capability))
        return f"{decode_time(kernel, gpu, rows, slots, 2).share(size, gpu):.2f}".lstrip("0")

    goals = re.findall(
        r"^\| (\d+) × (\d+)k \| \S+ \| (\S+) \| \S+ \| (\S+) \|$",
        (ROOT / "docs/gpu.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(goals) == 8
    for rows, thousands, *said in goals:
        shape = int(rows), 1024 * int(thousands)
        assert said == [share("h100", *shape), share("h200", *shape)], shape


def test_no_prefill_is_predicted_beyond_the_peak_of_a_datasheet() -> None:
    """A share is of the rate that the model has; of some GPUs that is twice what the datasheet gives."""
    cases = json.loads(newest_baseline(BASELINES).read_text(encoding="utf-8"))["cases"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in [*share_lines(cases)][2:]]
    shares = {cells[0].split(",")[0]: float(cells[-1]) for cells in rows if cells[-1] != "–"}
    assert len(shares) > 4
    for name, share in shares.items():
        gpu = GPUS[name]
        predicted = share * 2e-12 * products(gpu) * gpu.multiprocessors * gpu.clock
        assert predicted < config(f"device={name}").device.tflops


def test_whose_sums_in_float32_are_slow_follows_from_the_datasheet() -> None:
    """A consumer GPU that the static model does not hold yet is told from its preset alone."""
    more = Gpu("rtx5090", 120, 170, 2.407e9, 1792e9, 0.915)
    assert [gpu.name for gpu in (*GPUS.values(), more) if halves_sums(gpu)] == ["a10g", "rtx4090", "rtx5090"]
