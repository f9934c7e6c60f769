"""The book of a store and the journal of a task: what a driver that comes back can rely on."""

from pathlib import Path

import pytest

from harness.cluster.book import BEGAN, DONE, FAILED, LET_GO, STARTED, STOPPED, Book, Journal, Submission
from harness.config.errors import UserError

BOOK = """{"schema": 1, "submissions": [
    {"name": NAME, "folder": "f", "groups": [], "begun": 0, "number": null, "ended": false}]}"""


def kept(out: Path, *submissions: Submission) -> Book:
    Book(out / "jobs.json", list(submissions)).write()
    return Book.read(out)


def test_a_store_without_a_book_has_no_jobs(tmp_path: Path) -> None:
    assert Book.read(tmp_path).submissions == []


def test_a_book_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = Submission("pagetwin-a", "/private/a", [["p1", "p2"], ["p3"]], 12.5, "7", ended=True)
    two = Submission("pagetwin-b", "/private/b", [["p4"]], 13.5)
    assert kept(tmp_path, one, two).submissions == [one, two]
    assert list(kept(tmp_path, one, two).open_submissions()) == ["pagetwin-b"]


def test_tasks_of_an_array_are_numbered_and_a_single_job_is_not() -> None:
    assert Submission("n", "f", [["a"], ["b"]], number="7").tasks == {"7_0": ["a"], "7_1": ["b"]}
    assert Submission("n", "f", [["a"]], number="7").tasks == {"7": ["a"]}
    assert Submission("n", "f", [["a"]]).tasks == {}


def test_a_point_belongs_to_its_last_task(tmp_path: Path) -> None:
    book = kept(
        tmp_path,
        Submission("pagetwin-a", "f", [["p"]], number="1"),
        Submission("pagetwin-b", "f", [["p"]], number="2"),
    )
    found = [(point, task, each.name) for point, task, each in book.newest_of_points()]
    assert found == [("p", "2", "pagetwin-b")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 2, "submissions": []}',
        '{"schema": 1, "submissions": [{}]}',
        BOOK.replace("NAME", "1"),
        BOOK.replace("NAME", '"pagetwin-n"').replace("null", '"7; rm"'),
        BOOK.replace("NAME", '"my-training"'),
        BOOK.replace("NAME", '"pagetwin-a; rm -rf ~"'),
    ],
)
def test_a_damaged_book_is_refused_because_jobs_may_be_at_work(tmp_path: Path, text: str) -> None:
    (tmp_path / "jobs.json").write_text(text)
    with pytest.raises(UserError, match=r"jobs\.json: cannot be read as the list of jobs"):
        Book.read(tmp_path)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path, "7_0")


def test_a_journal_tells_what_ended_and_what_runs(journal: Journal) -> None:
    journal.add(STARTED)
    for what, name in ((BEGAN, "a"), (DONE, "a"), (BEGAN, "b"), (FAILED, "b"), (BEGAN, "c")):
        journal.add(what, name)
    told = journal.read()
    assert (told.done, told.failed, told.running) == ({"a"}, {"b"}, {"c"})


def test_a_point_that_was_running_at_the_next_start_was_cut_off(journal: Journal) -> None:
    for _ in range(2):
        journal.add(STARTED)
        journal.add(BEGAN, "a")
    told = journal.read()
    assert told.starts == 2
    assert told.cut_off == {"a": 1}
    assert told.running == {"a"}


def test_a_point_that_was_let_go_was_not_cut_off(journal: Journal) -> None:
    for what, value in ((STARTED, "1"), (BEGAN, "a"), (LET_GO, "1"), (STARTED, "1")):
        journal.add(what, value)
    assert journal.read().cut_off == {}


def test_a_line_that_is_not_whole_is_left_for_later(journal: Journal) -> None:
    journal.add(DONE, "a")
    with journal.path.open("ab") as file:
        file.write(b'{"done": "b"')
    assert journal.read().done == {"a"}


@pytest.mark.parametrize("line", [b"\x00\x00", b"[]", b"{}", b'{"done": "b", "more": 1}', b"7"])
def test_a_line_that_a_crash_damaged_is_passed_over(journal: Journal, line: bytes) -> None:
    with journal.path.open("ab") as file:
        file.write(line + b"\n")
    journal.add(STOPPED, "the disk is full")
    assert journal.read().stopped == "the disk is full"


def test_a_task_that_has_not_started_tells_nothing(journal: Journal) -> None:
    assert journal.size() == 0
    assert journal.read().starts == 0
