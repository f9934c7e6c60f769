"""What a record depends on is found by its content."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES

import pytest


@pytest.mark.parametrize("name", ["kernel.c", "kernel.h", "part.py"])
def test_an_edited_source_file_of_any_language_makes_new_points(name, tmp_path, monkeypatch):
    from harness.environment import code_version

    package = tmp_path / "a_package_of_two_files"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / name).write_text("one")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_version.__wrapped__((package.name,))
    (package / name).write_text("two")
    assert code_version.__wrapped__((package.name,)) != before


def test_what_is_no_source_makes_none(tmp_path, monkeypatch):
    from harness.environment import code_version

    package = tmp_path / "a_package_with_notes"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_version.__wrapped__((package.name,))
    (package / "notes.md").write_text("two")
    assert code_version.__wrapped__((package.name,)) == before


@pytest.mark.parametrize(
    ("suffix", "said"), [(EXTENSION_SUFFIXES[0], "compiled"), (".cpython-39-x86_64-linux-gnu.so", "python")]
)
def test_the_core_is_called_compiled_where_its_machine_code_is_for_this_python(
    suffix, said, tmp_path, monkeypatch
):
    import engine.core
    from harness.environment import versions

    for file in ("sequence.py", f"sequence{suffix}"):
        (tmp_path / file).touch()
    monkeypatch.setattr(engine.core, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "engine.core.sequence", raising=False)
    assert versions.__wrapped__()["policy core"] == said
