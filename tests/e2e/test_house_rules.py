"""Rules that a reader relies on: short functions, a docstring in every file, and no package named `kernels`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FUNCTION_LINES = 80  # without the docstring; the norm is ten
FOLDERS = ("traces", "engine", "harness", "kernels/paged_kernels")
KERNELS = "kernels/paged_kernels"


@cache
def shipped() -> dict[str, ast.Module]:
    """The syntax tree of every file of ours, by its path in the repository."""
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, lines of the body without the docstring) of every function of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    long = [
        (file, name, lines)
        for file, tree in shipped().items()
        if not file.startswith(KERNELS)  # a kernel is one piece
        for name, lines in functions(tree)
        if lines > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_every_file_has_a_docstring() -> None:
    assert [file for file, tree in shipped().items() if not ast.get_docstring(tree)] == []


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


@pytest.mark.slow
def test_importing_transformers_imports_nothing_of_ours() -> None:
    script = (
        "import sys, transformers.models.llama.modeling_llama\n"
        "print(*(getattr(module, '__file__', None) for module in list(sys.modules.values())), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folders = tuple(str(ROOT / folder) for folder in FOLDERS)
    assert [file for file in done.stdout.splitlines() if file.startswith(folders)] == []
