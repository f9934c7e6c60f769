"""What a command must not import: the answer to a question about settings may not cost seconds of torch or plots."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.main import main

HEAVY = ["torch", "transformers", "triton", "seaborn", "scipy.stats", "pandas", "matplotlib"]
LETTERS = ["fontTools", "PIL"]
SUPPORT = Path(__file__).resolve().parents[1] / "support"
SCRIPT = """
import json, sys
from harness.cli.main import main
for words in json.loads(sys.argv[1]):
    report = None if {"--with-report", "--help"} & {*words} else __import__("fake_point")
    try:
        code = main([word for word in words if word != "--with-report"], report=report)
    except SystemExit as stop:
        code = stop.code
    print("IMPORTED", json.dumps([code, sorted(sys.modules)]))
"""


def start(folder: Path, *lines: str) -> list[tuple[int, set[str]]]:
    """Exit code of each command line, run in one fresh process, and the modules imported until its end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([line.split() for line in lines])],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = [
        line.removeprefix("IMPORTED ") for line in done.stdout.splitlines() if line.startswith("IMPORTED ")
    ]
    return [(code, set(modules)) for code, modules in map(json.loads, printed)]


def test_help_does_not_even_import_hydra(tmp_path: Path) -> None:
    ((code, modules),) = start(tmp_path, "--help")
    assert code == 0
    assert modules.isdisjoint({*HEAVY, "hydra", "omegaconf", "numpy", "rich", "pyarrow", "yaml"})


SIMULATED = "sweep measure=false cost=roofline workload.num_requests=8 decoding.beam_width=1 workers=1"


def test_light_commands_import_nothing_heavy_and_a_simulation_no_torch(tmp_path: Path) -> None:
    (tmp_path / "store" / "points").mkdir(parents=True)
    lines = ["sweep --help", "show", "trace ls", "status store", "sweep cache.pool_tokens=1"]
    lines += ["sweep --dry-run", "sweep --dry-run measure=false", "trace inspect azure_conv"]
    *light, (code, modules) = start(tmp_path, *lines, SIMULATED)
    found = {line: (code, modules & {*HEAVY}) for line, (code, modules) in zip(lines, light, strict=True)}
    assert found == {line: (2 if "pool_tokens" in line else 0, set()) for line in lines}
    assert code == 0
    assert modules.isdisjoint({*HEAVY, *LETTERS} - {"pandas"})
    assert (tmp_path / "results" / "default" / "report.html").exists()

    (code, repeated), (drawn, modules) = start(
        tmp_path, SIMULATED, f"{SIMULATED} report.figures=none --with-report"
    )
    assert (code, drawn) == (0, 0)
    assert repeated.isdisjoint(HEAVY)
    assert modules.isdisjoint({*HEAVY, *LETTERS} - {"scipy.stats", "pandas"})
    assert "report.figures=none" in (tmp_path / "results/default/report/index.html").read_text()


@pytest.mark.nightly
def test_a_server_is_checked_without_what_a_report_needs(tmp_path: Path) -> None:
    log = Path(__file__).resolve().parents[1] / "data" / "deployments" / "servingsim-recorder"
    (tmp_path / "page.txt").write_text("vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.1\n")
    words = "--no-fit --check page.txt device=rtx_pro_6000 model=llama31_8b"
    ((code, modules),) = start(tmp_path, f"twin {log} {words}")
    assert code in (0, 1)
    assert modules.isdisjoint({*HEAVY, *LETTERS})


@pytest.mark.nightly
def test_a_report_without_pdfs_subsets_no_fonts(tmp_path: Path) -> None:
    ((code, modules),) = start(tmp_path, f"{SIMULATED} report.figures=svg --with-report")
    assert code == 0
    assert modules.isdisjoint({"torch", "transformers", "triton", "fontTools.subset"})
    figures = tmp_path / "results/default/report/figures"
    assert {file.suffix for file in figures.iterdir()} == {".svg", ".csv"}


WITHOUT_ENGINE = """
import sys

class Absent:  # as if they were not installed; a None in sys.modules would be taken for a module by scipy
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent)
from harness.cli.main import main
sys.exit(main())
"""


@pytest.mark.nightly  # by day the test above sees what a prediction imports
def test_a_prediction_and_its_report_need_neither_torch_nor_transformers(tmp_path: Path) -> None:
    words = (*SIMULATED.split(), "report.figures=svg")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ENGINE, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "results/default/report/figures").glob("*.svg"))


@pytest.mark.parametrize("gone", ["torch", "transformers"])
@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["sweep", "cache.block_size=8,16"],
        ["sweep", "--dry-run"],
        ["serve"],
        ["calibrate"],
        ["bench", "kernels"],
        ["gate", "--layer", "cpu"],
        ["lesson", "replay", "measure=true"],
    ],
    ids=" ".join,
)
def test_without_the_engine_what_measures_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    gone: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, gone, None)
    assert main(words) == 2
    out, err = capsys.readouterr()
    *remarks, last = err.splitlines()
    assert not out
    assert f"does not have ({gone})" in last
    assert "pip install '.[" in last
    assert "measure=false" in last
    assert not any("error" in line for line in remarks)
    assert not list(tmp_path.iterdir())
