"""The kernel benchmark as a section of a sweep's report: found, named, left out, and never mistaken for the sweep's."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_store import write_store
from tiers import cases

from harness.bench.cases import KernelCase
from harness.bench.page import _not_predicted, kernel_section, table_of
from harness.bench.results import Problem, ProblemKind, Timing, note, rows_of
from harness.cli.main import main
from harness.cost.timings import MadeOn
from harness.environment import kernel_digest
from harness.metrics.record import PointRecord
from harness.report import write, write_report

POINT = {"cache.policy": "paged", "cache.block_size": 16, "decoding.beam_width": 1}
SWEPT_ON = "a device"


def timing(spec: KernelCase, provider: str, us: float) -> Timing:
    extra = {
        "case": spec.values(),
        "provider": provider,
        "how": "CUDA graph",
        "error": 1e-3,
        "bytes": spec.kv_bytes,
        "flat_bytes": spec.kv_bytes,
        "flops": 4 * spec.heads * spec.head_dim * sum(spec.lengths),
    }
    samples = (us * 0.99e-6, us * 1e-6, us * 1.01e-6)
    return Timing(f"test_attention[{spec.name}|{provider}]", spec.name, extra, samples, us * 1e-6)


def ceiling(name: str, moved: float, flops: float) -> Timing:
    extra = {"bytes": moved, "flops": flops, "how": "CUDA graph"}
    return Timing(f"test_ceiling[{name}]", "ceiling", extra, (1e-3, 1e-3, 1e-3), 1e-3)


def write_kernels(folder: Path, device: str = SWEPT_ON, kernels: str | None = None) -> Path:
    """The table of a run of two block sizes beside the contiguous twin, and of a shared prefix."""
    small, large = (KernelCase(batch=32, context=4096, block_size=size) for size in (16, 64))
    shared = KernelCase(batch=32, context=4096, shared_prefix=2048)
    timings = [
        *(ceiling("copy", 4e9, 0), ceiling("read", 4.5e9, 0), ceiling("matmul", 0, 8e11)),
        *(timing(small, "paged", 150), timing(small, "contiguous", 147), timing(large, "paged", 149)),
        *(timing(shared, "paged", 141), timing(shared, "cascade", 82)),
    ]
    facts = MadeOn(device, kernels or kernel_digest(), "2.13.0", "3.6.0", 0, "2026-01-01")
    folder.mkdir(parents=True)
    table_of(rows_of(timings), facts).to_parquet(folder / "kernels.parquet", index=False)
    return folder


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernels(tmp_path_factory.mktemp("bench") / "kernels")


@pytest.fixture(autouse=True)
def _no_other_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.report.write._pictures", lambda study, axes: write._not_drawn())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A measured sweep of one point that ran on `SWEPT_ON`."""
    import json

    root = write_store(tmp_path / "sweep", [POINT])
    record = next(root.glob("points/*/record.json"))
    content = json.loads(record.read_text())
    content["environment"]["device"] = SWEPT_ON
    record.write_text(json.dumps(content))
    return root


def report_of(store: Path, *words: str, figures: str = "none") -> str:
    assert main(["report", str(store), "--figures", figures, *words]) == 0
    return (store / "report" / "index.html").read_text()


def test_the_section_shows_four_figures_device_and_digest(store: Path, kernels: Path) -> None:
    page = write_report(store, additions=[kernel_section(kernels)])
    text = page.read_text()
    section = text[text.index('<section id="kernels">') : text.index('<section id="tables">')]
    assert section.count("<svg") == 4
    assert f"<td>device</td><td>{SWEPT_ON}</td>" in section
    assert f"<td>kernel sources</td><td>{kernel_digest()}</td>" in section
    assert "All 3 cases" in section
    assert 'class="finished bad"' not in section
    assert {file.stem for file in (page.parent / "figures").glob("kernel_*.svg")} == {
        *("kernel_roofline", "kernel_block_size", "kernel_paging", "kernel_shared_prefix")
    }


@cases("place", ["sweep/kernels", "kernels", "bench/kernels"], day=1)
def test_a_run_inside_or_beside_the_results_is_found(
    place: str, store: Path, kernels: Path, tmp_path: Path
) -> None:
    shutil.copytree(kernels, tmp_path / place)
    assert '<section id="kernels">' in report_of(store)


def test_without_a_run_there_is_no_section(store: Path) -> None:
    assert '<section id="kernels">' not in report_of(store)


def test_a_run_that_is_found_can_be_left_out(store: Path, kernels: Path, tmp_path: Path) -> None:
    shutil.copytree(kernels, tmp_path / "kernels")
    assert '<section id="kernels">' not in report_of(store, "--kernels", "none")


@pytest.mark.nightly
def test_figures_of_a_run_that_is_gone_go_too(store: Path, kernels: Path) -> None:
    report_of(store, "--kernels", str(kernels), figures="svg")
    assert list((store / "report" / "figures").glob("kernel_*"))
    report_of(store)
    assert list((store / "report" / "figures").glob("kernel_*")) == []


@pytest.mark.nightly
def test_a_run_of_another_device_is_said_loudly(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = report_of(store, "--kernels", str(write_kernels(tmp_path / "other", device="NVIDIA H200")))
    warning = f"Another device: these kernels were timed on NVIDIA H200, the sweep ran on {SWEPT_ON}."
    assert f'<div class="finished bad"><p>{warning}' in text
    assert warning in text[: text.index('<section id="trust">')]
    assert f"warning: {warning}" in capsys.readouterr().err


@cases(("timed", "warned"), [("NVIDIA H200", False), ("NVIDIA H100", True)], day=(("NVIDIA H100", True),))
def test_a_prediction_is_matched_by_the_device_that_it_is_for(
    timed: str, warned: bool, tmp_path: Path
) -> None:
    point = {**POINT, "device.name": "h200"}
    store = write_store(tmp_path / "sweep", [point], measure=False)
    text = report_of(store, "--kernels", str(write_kernels(tmp_path / "timed", device=timed)))
    assert ("the sweep predicts h200" in text) is warned


@pytest.mark.parametrize(
    ("predicted", "timed", "other"),
    [
        ("l4", "NVIDIA L40S", True),
        ("rtx4090", "NVIDIA GeForce RTX 4090", False),
        ("rtx_pro_6000", "NVIDIA GeForce RTX 4090", True),
        ("a100_40gb", "NVIDIA A100-SXM4-80GB", True),
        ("a100_80gb", "NVIDIA A100-SXM4-80GB", False),
        ("cpu", "CPU, 2 cores", False),
    ],
)
def test_a_device_is_told_from_those_with_a_like_name(predicted: str, timed: str, other: bool) -> None:
    how = "CPU time" if predicted == "cpu" else "CUDA graph"
    run: Any = SimpleNamespace(devices=[timed], rows=[{"device": timed, "how": how}])
    study: Any = SimpleNamespace(records=[PointRecord(config={"device": {"name": predicted}})])
    assert _not_predicted(run, study) == [timed] * other


@pytest.mark.nightly
def test_figures_of_other_kernel_sources_are_said_loudly(store: Path, tmp_path: Path) -> None:
    text = report_of(store, "--kernels", str(write_kernels(tmp_path / "old", kernels="0ld")))
    assert "these figures are of kernel sources 0ld" in text


def test_our_own_failures_are_loud_and_those_of_others_are_noted(store: Path, tmp_path: Path) -> None:
    folder = write_kernels(tmp_path / "kernels-of-mine")
    note(folder / "problems.jsonl", Problem("a case", "paged", ProblemKind.wrong, "error 0.5"))
    note(folder / "problems.jsonl", Problem("a case", "flex", ProblemKind.failed, "no compiler"))
    text = report_of(store, "--kernels", str(folder))
    assert "<p>wrong: a case by paged: error 0.5</p>" in text
    assert "<li>failed: a case by flex: no compiler</li>" in text


@pytest.mark.nightly
def test_notes_that_cannot_be_read_are_said_to_be_lost(store: Path, tmp_path: Path) -> None:
    folder = write_kernels(tmp_path / "kernels-of-mine")
    (folder / "problems.jsonl").write_text('{"case": "a"')
    text = report_of(store, "--kernels", str(folder))
    assert "problems.jsonl cannot be read" in text
    assert text.count("figure-kernel_roofline") == 1


def test_a_run_that_cannot_be_read_costs_the_section_and_not_the_report(store: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "kernels.parquet").write_bytes(b"PAR1 cut")
    text = report_of(store)
    assert "The kernel benchmark cannot be shown" in text
    assert '<section id="tables">' in text


@pytest.mark.nightly
def test_a_folder_without_a_run_is_refused_by_name(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(store), "--kernels", str(tmp_path)]) == 2
    assert "--kernels: no kernels.parquet in" in capsys.readouterr().err
    assert main(["sweep", f"report.kernels={tmp_path}", "--dry-run"]) == 2
    assert "report.kernels: no kernels.parquet in" in capsys.readouterr().err
