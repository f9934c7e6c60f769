"""What a command must not import: the answer to a question about settings may not cost seconds of torch or plots."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ["torch", "transformers", "triton", "seaborn", "scipy.stats", "pandas", "matplotlib"]
SUPPORT = Path(__file__).resolve().parents[1] / "support"
SCRIPT = """
import json, sys
from harness.cli.main import main
import fake_point
report = None if "--with-report" in sys.argv else fake_point
try:
    code = main([word for word in sys.argv[1:] if word != "--with-report"], report=report)
except SystemExit as stop:
    code = stop.code
print(json.dumps([code, sorted(sys.modules)]))
"""


def start(folder: Path, *words: str) -> tuple[int, set[str]]:
    """Exit code of a command line run in a fresh process, and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        check=True,
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    return code, set(modules)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["sweep", "--help"],
        ["show"],
        ["sweep", "--dry-run"],
        ["sweep", "--dry-run", "measure=false"],
        ["trace", "ls"],
        ["trace", "inspect", "azure_conv"],
    ],
    ids=" ".join,
)
def test_a_light_command_imports_nothing_heavy(tmp_path: Path, words: list[str]) -> None:
    code, modules = start(tmp_path, *words)
    assert code == 0
    assert modules.isdisjoint(HEAVY)


def test_help_does_not_even_import_hydra(tmp_path: Path) -> None:
    _, modules = start(tmp_path, "--help")
    assert modules.isdisjoint({"hydra", "omegaconf", "numpy", "rich", "pyarrow", "yaml"})


def test_a_mistake_in_the_plan_does_not_import_torch(tmp_path: Path) -> None:
    code, modules = start(tmp_path, "sweep", "cache.pool_tokens=1")
    assert code == 2
    assert modules.isdisjoint(HEAVY)


def test_status_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "store" / "points").mkdir(parents=True)
    code, modules = start(tmp_path, "status", "store")
    assert code == 0
    assert modules.isdisjoint(HEAVY)


SIMULATED = [
    "sweep",
    "measure=false",
    "cost=roofline",
    "workload.num_requests=8",
    "decoding.beam_width=1",
    "workers=1",
]


def test_a_simulated_sweep_needs_no_torch_and_its_repetition_nothing_heavy(tmp_path: Path) -> None:
    code, modules = start(tmp_path, *SIMULATED)
    assert code == 0
    assert modules.isdisjoint({"torch", "transformers", "triton", "seaborn", "scipy.stats"})
    code, modules = start(tmp_path, *SIMULATED)
    assert code == 0
    assert modules.isdisjoint(HEAVY)
    assert (tmp_path / "results" / "default" / "report.html").exists()


def test_a_simulated_point_and_its_report_without_figures_draw_nothing(tmp_path: Path) -> None:
    code, modules = start(tmp_path, *SIMULATED, "report.figures=none", "--with-report")
    assert code == 0
    assert modules.isdisjoint(
        {"torch", "transformers", "triton", "seaborn", "matplotlib", "fontTools", "PIL"}
    )
    assert "report.figures=none" in (tmp_path / "results/default/report/index.html").read_text()


def test_a_report_without_pdfs_subsets_no_fonts(tmp_path: Path) -> None:
    code, modules = start(tmp_path, *SIMULATED, "report.figures=svg", "--with-report")
    assert code == 0
    assert modules.isdisjoint({"torch", "transformers", "triton", "seaborn", "fontTools.subset"})
    figures = tmp_path / "results/default/report/figures"
    assert {file.suffix for file in figures.iterdir()} == {".svg", ".csv"}
