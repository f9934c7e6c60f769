"""An installed wheel works from any directory, with its configuration inside."""

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from harness.store.commit import read_store

ROOT = Path(__file__).resolve().parents[2]


def call(*words: object, **options: object) -> str:
    """Standard output of a command; its error output is in the message if it fails."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (file,) = folder.glob("pagetwin-*.whl")
    return Path(file)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; the dependencies are borrowed from this one, nothing is downloaded."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    call(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        wheel,
    )
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    installed = {path for path in sys.path if path.endswith("site-packages")}
    # a plain path line is added without running the .pth files in it, so the checkout's editable install stays out
    (site / "borrowed.pth").write_text("\n".join(sorted(installed)) + "\n")
    return python


@pytest.mark.nightly
def test_the_wheel_brings_the_c_files_that_are_compiled_on_first_use(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {
        file.name
        for suffix in ("c", "h")
        for file in (ROOT / "kernels/paged_kernels/native").glob(f"*.{suffix}")
    }
    assert sources == {
        Path(name).name
        for name in names
        if name.startswith("paged_kernels/native/") and name[-2:] in (".c", ".h")
    }


@pytest.mark.nightly
def test_the_licences_of_excerpts_travel_with_them_in_the_source_distribution_alone(
    wheel: Path, tmp_path: Path
) -> None:
    call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT)
    (file,) = tmp_path.glob("pagetwin-*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    excerpts = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/data").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("tests/data/")} == excerpts
    assert not any("tests/" in name for name in zipfile.ZipFile(wheel).namelist())


def run(python: Path, folder: Path, *words: str) -> str:
    return call(python, "-m", "harness", *words, cwd=folder, env=without_paths())


def without_paths() -> dict[str, str]:
    """This environment without what would lead Python to the checkout."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def test_the_wheel_holds_the_packages_and_the_configuration(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "engine",
        "harness",
        "paged_kernels",
        "pagetwin_probe.py",  # `vllm serve --scheduler-cls pagetwin_probe.Scheduler`
        "traces",
    }
    assert {f"{package}/py.typed" for package in ("engine", "harness", "paged_kernels", "traces")} <= set(
        names
    )
    shipped = {name.removeprefix("harness/") for name in names if name.endswith(".yaml")}
    assert shipped >= {str(path.relative_to(ROOT)) for path in (ROOT / "conf").rglob("*.yaml")}


def test_every_module_of_ours_that_the_wheel_imports_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if name.endswith(".py")}
        trees = {name: ast.parse(packed.read(name)) for name in names}
    wanted = {
        (name, node.module)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }
    ours = {(name, module) for name, module in wanted if f"{module.partition('.')[0]}/__init__.py" in names}
    places = {(name, module): module.replace(".", "/") for name, module in ours}
    assert len(ours) > 1000
    missing = {
        each
        for each, place in places.items()
        if not {f"{place}.py", f"{place}/__init__.py"} & names
        and not any(n.startswith(f"{place}/") for n in names)
    }
    assert missing == set()


def test_show_reads_the_configuration_of_the_wheel(python: Path, tmp_path: Path) -> None:
    out = run(python, tmp_path, "show")
    assert f"# files: {python.parent.parent}" in out
    assert "block_size: 16" in out


@pytest.mark.nightly
def test_a_sweep_is_planned_from_another_directory(python: Path, tmp_path: Path) -> None:
    out = run(python, tmp_path, "sweep", "cache.block_size=8,16", "--dry-run")
    assert "2 points, 2 to run, results in results/default" in out


def test_traces_are_listed_from_the_wheel(python: Path, tmp_path: Path) -> None:
    assert "azure_conv" in run(python, tmp_path, "trace", "ls")


@pytest.mark.nightly
def test_the_compiled_core_passes_the_tests_of_the_core_and_gives_the_records_of_python(
    tmp_path: Path,
) -> None:
    """Without tests that plant a bug, which compiled classes do not take, or look into objects or docstrings."""
    shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "build", "results"))
    building = {**os.environ, "HATCH_BUILD_HOOK_ENABLE_MYPYC": "1"}
    source, site = tmp_path / "source", tmp_path / "site"
    call(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source, env=building
    )
    (built,) = tmp_path.glob("pagetwin-*.whl")
    zipfile.ZipFile(built).extractall(site)
    assert list(site.glob("engine/core/scheduling/scheduler.*.so"))

    away = {**without_paths(), "PYTHONPATH": str(site), "PAGETWIN_NIGHTLY": "0"}
    left_out = "not (planted or notice or fingerprint or docstrings or overwritten)"
    options = ("-o", f"pythonpath={site} tests tests/support", "-p", "no:cacheprovider", "-q", "-k", left_out)
    call(sys.executable, "-P", "-m", "pytest", *options, "tests/engine/core", env=away, cwd=ROOT)

    words = ("measure=false", "cost=roofline", "replay.compiled=never", "trace=azure_conv", "decoding=beam")
    for out, paths in (("compiled", away), ("python", {**away, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"})):
        call(
            sys.executable,
            "-P",
            "-m",
            "harness",
            "run",
            *words,
            f"out={tmp_path / out}",
            env=paths,
            cwd=tmp_path,
        )
    (compiled,), (python,) = (read_store(tmp_path / out).records.values() for out in ("compiled", "python"))
    assert (compiled.environment["policy core"], python.environment["policy core"]) == ("compiled", "python")
    assert compiled.simulated == python.simulated


def test_an_editable_install_has_no_copy_of_a_package_that_would_hide_the_checkout(tmp_path: Path) -> None:
    build = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
    built = call(sys.executable, "-c", build, tmp_path, cwd=ROOT).strip()
    names = zipfile.ZipFile(tmp_path / built).namelist()
    assert [name for name in names if name.endswith(".py")] == ["pagetwin_probe.py"]


def test_the_console_script_is_there(python: Path, tmp_path: Path) -> None:
    out = call(python.parent / "pagetwin", "--help", cwd=tmp_path, env=without_paths())
    assert "Predict a paged KV cache" in out


@pytest.fixture(scope="module")
def repository(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A fresh environment with `wheel[gate]` and all that it asks for, and the example as a repository of its own."""
    place = tmp_path_factory.mktemp("stranger")
    venv.create(place / "venv", with_pip=True)
    python = place / "venv" / "bin" / "python"
    for wanted in (
        ["torch==2.13.0", "numpy<2.4"],
        [f"{wheel}[gate]", "triton==3.6.0"],
    ):  # that of the baseline
        call(python, "-m", "pip", "install", "--quiet", *wanted, env=without_paths())
    shutil.copytree(ROOT / "examples" / "own_kernel", place / "mine")
    for words in (["init", "--quiet"], ["add", "."]):
        call("git", *words, cwd=place / "mine")
    return python, place / "mine"


def gate(repository: tuple[Path, Path], *words: str, page: str = "") -> subprocess.CompletedProcess[str]:
    python, folder = repository
    environment = without_paths() | {"GITHUB_STEP_SUMMARY": page}
    asked = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--gate", *words]
    return subprocess.run(asked, capture_output=True, text=True, cwd=folder, env=environment, check=False)


# plainly slower, on a busy machine too; a fifth is decided on drawn ratios (tests/harness/gate/test_gate_cpu.py)
TWICE = """
    _rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x"""
GATHER = "    values = tl.gather(values.to(tl.float64) * 1.5, columns // 2, 0).to(tl.float32)\n    tl.store("
PLANTED = {
    "twice the time": ("kernel.py", "\n    return x", TWICE, "of the baseline"),
    "spills": ("test_kernel.py", '{"BLOCK": 4096}', '{"BLOCK": 32768}', "spills: "),
    "half the warps": ("test_kernel.py", "num_warps=4", "num_warps=2", "instructions 288"),
    "narrow loads": (
        "test_kernel.py", 'aligned=("x", "weight", "out", "stride", "width")', "aligned=()", "16-byte loads 8 → 0",
    ),
    "shared memory that halves the resident programs": ("kernel.py", "    tl.store(", GATHER, "holds 9 → 4"),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_regression_of_a_strangers_repository_is_caught(
    repository: tuple[Path, Path], planted: str
) -> None:
    name, before, after, said = PLANTED[planted]
    file = repository[1] / name
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))
    done = gate(repository)
    file.write_text(text)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout


@pytest.mark.nightly
def test_an_unchanged_repository_passes_and_its_page_says_so(
    repository: tuple[Path, Path], tmp_path: Path
) -> None:
    for words in ((), ("-k", "kernel_takes"), ("--gate-changed",)):
        done = gate(repository, *words, page=str(tmp_path / "page.md"))
        assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.count("## Regression gate: pass") == 3
    assert "its file is the accepted one" in page


@pytest.mark.nightly
def test_without_its_baseline_a_strangers_repository_is_not_decided(repository: tuple[Path, Path]) -> None:
    done = gate(repository, "--gate-baselines", "elsewhere")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "accept them with a reason" in done.stdout
