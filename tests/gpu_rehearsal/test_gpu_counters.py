"""ncu's table is told apart by call, from a table as ncu prints it."""

import json
from pathlib import Path

import pytest

from gpu_acceptance.counters import CALL_BEGINS, HITS, INSTRUCTIONS, READ, counter_lines, read_counters
from harness.config.errors import UserError

HEADER = ("ID", "Process ID", "Kernel Name", "Grid Size", READ, HITS, INSTRUCTIONS)
CASES = [("b32/bs16", "vector"), ("prefill", "paged"), ("prefix8192", "cascade-always"), ("b1", "paged")]
KERNELS = (
    *("decode_kernel", "combine_kernel", "prefill_kernel"),
    *("plan_kernel", "prefix_kernel", "decode_kernel", "combine_kernel", "decode_kernel"),
)


def write(out: Path, kernels: tuple[str, ...] = KERNELS, header: tuple[str, ...] = HEADER) -> None:
    rows = [
        (str(number), "7", name, "(8, 1, 1)", f"{1_000_000 * (number + 1):,}", "12.5", "3,000,000")[
            : len(header)
        ]
        for number, name in enumerate(kernels)
    ]
    units = ("", "", "", "", "byte", "%", "inst")[: len(header)]
    table = [",".join(f'"{cell}"' for cell in row) for row in (header, units, *rows)]
    out.mkdir(exist_ok=True)
    (out / "counters.csv").write_text(
        "\n".join(["==PROF== Connected to process 7", *table, "==PROF== Disconnected"])
    )
    (out / "counters").mkdir(exist_ok=True)
    calls = [{"case": case, "provider": provider} for case, provider in CASES]
    (out / "counters" / "cases.json").write_text(json.dumps(calls))


def test_each_kernel_belongs_to_the_call_that_launched_it(tmp_path: Path) -> None:
    write(tmp_path)
    found = read_counters(tmp_path)
    assert [(one.case, one.kernel) for one in found] == [
        *(("b32/bs16", "decode_kernel"), ("b32/bs16", "combine_kernel"), ("prefill", "prefill_kernel")),
        *(
            ("prefix8192", name)
            for name in ("plan_kernel", "prefix_kernel", "decode_kernel", "combine_kernel")
        ),
        ("b1", "decode_kernel"),
    ]
    assert (found[1].read_bytes, found[1].hit_share, found[1].instructions) == (2e6, 0.125, 3e6)


def test_the_page_shows_a_row_a_kernel(tmp_path: Path) -> None:
    write(tmp_path)
    lines = list(counter_lines(tmp_path))
    assert len(lines) == 2 + len(KERNELS)
    assert lines[2] == "| b32/bs16 | vector | decode_kernel | 1.0 | 12.5% | 3.00 |"


def test_without_a_run_of_ncu_there_is_no_table(tmp_path: Path) -> None:
    assert list(counter_lines(tmp_path)) == []


def test_a_table_of_other_calls_is_not_guessed_at(tmp_path: Path) -> None:
    write(tmp_path, KERNELS[:3])
    with pytest.raises(UserError, match="2 calls where 4 were made"):
        read_counters(tmp_path)


def test_columns_that_are_not_there_are_named_on_the_page(tmp_path: Path) -> None:
    write(tmp_path, header=HEADER[:5])
    assert HITS in "\n".join(counter_lines(tmp_path))


def test_the_words_of_a_profiler_that_was_refused_are_pointed_at(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "counters.csv").write_text("==ERROR== The user does not have permission\n")
    assert "no header" in "\n".join(counter_lines(tmp_path))


def test_the_kernels_by_which_calls_are_told_apart_are_ours() -> None:
    folder = Path(__file__).resolve().parents[2] / "kernels" / "paged_kernels"
    source = "".join(file.read_text(encoding="utf-8") for file in folder.glob("triton/*.py"))
    assert all(f"def {name}(" in source for name in CALL_BEGINS)
