"""Rules that a reader relies on: few files and lines, short functions, a docstring in every file."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import harness

ROOT = Path(__file__).resolve().parents[2]
MAX_FUNCTION_LINES = 80  # without the docstring; the norm is ten
MAX_FILE_LINES = 700
# The budget of the house: who adds takes away. A change that needs more lowers another place first.
MOST_FILES, MOST_CODE_LINES = 331, 58_991
FOLDERS = ("traces", "engine", "harness", "kernels/paged_kernels")
KERNELS = "kernels/paged_kernels"


@cache
def shipped() -> dict[str, ast.Module]:
    """The syntax tree of every file of ours, by its path in the repository."""
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


@cache
def walked(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a tree: several rules look at them, and finding them takes longer than looking."""
    return tuple(ast.walk(tree))


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, lines of the body without the docstring) of every function of a file."""
    for node in walked(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines of a file that hold code: no blank line, no comment, no docstring."""
    stripped = enumerate((line.strip() for line in text.split("\n")), 1)
    lines = {number for number, line in stripped if line and not line.startswith("#")}
    described = set[int]()
    for node in walked(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            lines |= {
                *range(node.lineno + 1, (node.end_lineno or 0) + 1)
            }  # what looks empty in a long text too
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            described |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines - described)


def test_the_house_keeps_to_its_budget() -> None:
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in shipped()}
    total = sum(code_lines(texts[file], tree) for file, tree in shipped().items())
    assert len(texts) <= MOST_FILES
    assert total <= MOST_CODE_LINES


def test_no_file_is_too_long() -> None:
    lengths = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in shipped()}
    assert {file: lines for file, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_lines_without_code_do_not_count() -> None:
    text = '"""Doc."""\n\n# why\nX = (\n    1,\n)\n\n\ndef f() -> None:\n    """Doc."""\n    return None\n'
    assert code_lines(text, ast.parse(text)) == 5


def test_functions_are_short() -> None:
    long = [
        (file, name, lines)
        for file, tree in shipped().items()
        if not file.startswith(KERNELS)  # a kernel is one piece
        for name, lines in functions(tree)
        if lines > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_public_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for file, tree in shipped().items():
        for node in walked(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_every_file_has_a_docstring() -> None:
    assert [file for file, tree in shipped().items() if not ast.get_docstring(tree)] == []


def test_no_compiled_file_hides_a_source() -> None:
    assert [
        file for folder in FOLDERS for file in (ROOT / folder).rglob("*.so")
    ] == []  # `make compiled` leaves none


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


@pytest.mark.nightly
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


def test_version_citation_and_release_note_agree() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert version is not None
    assert cited is not None
    assert version[1] == cited[1] == harness.__version__
    noted = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {version[1]}" in noted or f"this says what {version[1].removesuffix('.0')} can do" in noted


def test_actions_of_ci_are_named_by_commit() -> None:
    used = re.findall(r"uses: (\S+)", "".join(file.read_text() for file in (ROOT / ".github").rglob("*.yml")))
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Private names that a file takes from an object or a module: `x._name`, `from a._b import _c`."""
    for node in walked(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)


def _own_names(tree: ast.Module) -> Iterator[str]:
    for node in walked(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_one_file_alone_touches_private_names_of_torch_and_transformers() -> None:
    own = {name for tree in shipped().values() for name in _own_names(tree)}
    # of argparse, namedtuple, seaborn, os, omegaconf, Triton and numba
    others = {
        "_SubParsersAction",
        "_asdict",
        "_replace",
        "_fields",
        "_make",
        "_colorbar_info",
        "_exit",
        "_get_node",
        "_runtime",
        "_getvalue",
    }
    touching = {
        file
        for file, tree in shipped().items()
        for name in _private_names(tree)
        if re.match(r"_[a-zA-Z]", name) and name not in own | others
    }
    assert touching == {"kernels/paged_kernels/private.py"}
