"""Rules of the house that a reader relies on: small rooms, and a folder `kernels` that is nobody's package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 260
MAX_FUNCTION_LINES = 60  # the hard limit; ten is the norm
SHIPPED = sorted(
    file
    for folder in ("traces", "engine", "harness", "kernels/paged_kernels")
    for file in (ROOT / folder).rglob("*.py")
)


def functions(file: Path) -> list[tuple[str, int]]:
    """(name, lines of the body without the docstring) of every function of a file."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            found.append((node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0))
    return found


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(ROOT)))
def test_rooms_are_small(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) < MAX_FILE_LINES
    assert [pair for pair in functions(file) if pair[1] > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_says_why_it_is_there(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))


def test_no_folder_becomes_a_package_named_kernels() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels").exists()


def test_tests_are_no_packages_and_their_names_are_unique() -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    assert [file for file in files if file.name == "__init__.py"] == []
    names = [file.name for file in files if file.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def test_the_name_kernels_leads_to_no_file_of_ours() -> None:
    script = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert str(ROOT / "kernels") not in done.stdout


def test_importing_transformers_imports_nothing_of_ours() -> None:
    script = (
        "import sys, transformers.models.llama.modeling_llama\n"
        "print(*(getattr(module, '__file__', None) for module in list(sys.modules.values())), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rooms = tuple(str(ROOT / folder) for folder in ("engine", "harness", "traces", "kernels"))
    assert [file for file in done.stdout.splitlines() if file.startswith(rooms)] == []
