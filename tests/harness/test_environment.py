"""What a record depends on is found by its content."""

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
