"""Tables, figures and the page of the kernel benchmark, from timings whose answers are known."""

from pathlib import Path
from typing import Any

import pytest

from harness.bench.cases import KernelCase
from harness.bench.results import (
    Problem,
    ProblemKind,
    Timing,
    ceilings_of,
    note,
    read_problems,
    rows_of,
)
from harness.cost.timings import Ceilings, KernelRunError, MadeOn, read_run

BASE = {"batch": 32, "context": 4096}


def timing(spec: KernelCase, provider: str, *samples_us: float) -> Timing:
    extra: dict[str, Any] = {
        "case": spec.values(),
        "provider": provider,
        "how": "CUDA graph",
        "error": 1e-3,
        "input_sets": 1,
        "bytes": spec.kv_bytes,
        "flat_bytes": spec.kv_bytes,
        "flops": 4 * spec.heads * spec.head_dim * sum(spec.lengths),
    }
    samples = tuple(sample * 1e-6 for sample in samples_us)
    return Timing(f"test_attention[{spec.name}|{provider}]", spec.name, extra, samples, sorted(samples)[1])


def ceiling(name: str, moved: float, flops: float) -> Timing:
    extra = {"bytes": moved, "flops": flops, "how": "CUDA graph"}
    return Timing(f"test_ceiling[{name}]", "ceiling", extra, (1e-3, 1.1e-3, 1.2e-3), 1.1e-3)


MADE_ON = MadeOn("a device", "feed", "2.13.0", "3.6.0", 0, "2026-01-01")
CEILINGS = [ceiling("copy", 4e9, 0), ceiling("read", 4.5e9, 0), ceiling("matmul", 0, 8e11)]
PAGED16, PAGED64 = KernelCase(**BASE), KernelCase(**BASE, block_size=64)
SHARED = KernelCase(**BASE, shared_prefix=2048)
TIMINGS = [
    *CEILINGS,
    timing(PAGED16, "paged", 148, 150, 152),
    timing(PAGED16, "contiguous", 146, 147, 148),
    timing(PAGED16, "gather", 595, 600, 605),
    timing(PAGED64, "paged", 148, 149, 150),
    timing(SHARED, "paged", 140, 141, 142),
    timing(SHARED, "cascade", 80, 82, 84),
]


@pytest.fixture(scope="module")
def table() -> Any:
    pytest.importorskip("pandas")
    from harness.bench.page import table_of

    return table_of(rows_of(TIMINGS), MADE_ON)


def test_ceilings_are_those_of_the_fastest_round() -> None:
    assert ceilings_of(TIMINGS) == Ceilings(pytest.approx(4e12), pytest.approx(4.5e12), pytest.approx(8e14))


def test_a_row_gives_speed_share_and_ratio() -> None:
    row = rows_of(TIMINGS)[2]
    moved = 2 * 8 * 128 * 2 * 32 * 4096
    assert row.provider == "gather"
    assert row.median_us == pytest.approx(600)
    assert row.gbytes_s == pytest.approx(moved / 600e-6 / 1e9)
    assert row.copy_share == pytest.approx(moved / 600e-6 / 4e12)
    assert row.against_ours == pytest.approx(4.0)
    assert row.spread == pytest.approx(5 / 600)


def test_the_printed_table_has_a_line_a_case_and_a_column_a_provider(table: Any) -> None:
    from harness.bench.page import printed

    head, *body = printed(table).splitlines()
    assert head.split()[-3:] == ["contiguous", "gather", "cascade"]
    assert len(body) == 3
    assert body[0].split()[1] == "150.0"
    assert "4.00 ×" in body[0]


def test_a_case_that_we_did_not_serve_still_shows_the_others() -> None:
    from harness.bench.page import printed, table_of

    rows = rows_of([*CEILINGS, timing(PAGED16, "gather", 595, 600, 605)])
    assert "600.0 µs" in printed(table_of(rows, MADE_ON)).splitlines()[1]


def test_the_table_has_exactly_the_documented_columns(table: Any) -> None:
    from harness.cost.timings import COLUMNS

    assert list(table.columns) == list(COLUMNS)
    assert set(table["device"]) == {"a device"}


@pytest.fixture(scope="module")
def drawn(table: Any) -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    from harness.bench.figures import pictures
    from harness.report.style import style

    with style():
        return {picture.name: picture for picture in pictures(table, ceilings_of(TIMINGS))}


def test_the_paging_figure_shows_the_overhead(drawn: dict[str, Any]) -> None:
    data = drawn["kernel_paging"].data
    assert list(data["name"]) == [PAGED16.name]
    assert data["overhead"].item() == pytest.approx((150 / 147 - 1) * 100)
    assert data["least"].item() < data["overhead"].item() < data["most"].item()


def test_the_prefix_figure_shows_gain_and_what_bytes_allow(drawn: dict[str, Any]) -> None:
    data = drawn["kernel_shared_prefix"].data
    assert data["gain"].item() == pytest.approx(141 / 82)
    assert data["possible"].item() == pytest.approx(4096 / (2048 / 32 + 2048))


def test_the_block_size_figure_compares_nothing_but_block_sizes(drawn: dict[str, Any]) -> None:
    data = drawn["kernel_block_size"].data
    assert sorted(data.loc[data["provider"] == "paged", "block_size"]) == [16, 64]
    assert set(data["shared_prefix"]) == {0}


def drawing_of(draw: str, *timings: Timing) -> Any:
    from harness.bench import figures
    from harness.bench.page import table_of
    from harness.report.style import style

    with style():
        return getattr(figures, draw)(table_of(rows_of([*CEILINGS, *timings]), MADE_ON))


def test_a_line_of_the_prefix_figure_is_of_one_kind_of_case() -> None:
    pytest.importorskip("matplotlib")
    kinds: list[dict[str, Any]] = [{}, {"ragged": True}, {"queries": 4}]
    cases = [KernelCase(**BASE, **kind, shared_prefix=prefix) for kind in kinds for prefix in (1024, 2048)]
    pairs = [timing(case, name, 80, 82, 84) for case in cases for name in ("paged", "cascade")]
    (panel,) = drawing_of("draw_shared_prefix", *pairs).figure.axes
    lines = {line.get_label(): list(line.get_xdata()) for line in panel.lines if line.get_linestyle() == "-"}
    named = [f"32 × 4,096, blocks of 16{kind}" for kind in ("", ", ragged", ", 4 queries")]
    assert {name: lines[name] for name in named} == {key: [1024, 2048] for key in named}


def test_sets_of_block_sizes_that_have_no_panel_are_counted_and_in_the_data() -> None:
    pytest.importorskip("matplotlib")
    cases = [KernelCase(batch=b, block_size=size) for b in (1, 2, 4, 8) for size in (16, 32)]
    found = drawing_of("draw_block_sizes", *(timing(case, "paged", 1, 2, 3) for case in cases))
    assert "Shown: 3 of 4 sets of cases" in found.caption
    assert set(found.data["batch"]) == {1, 2, 4, 8}


def test_the_page_says_which_providers_were_not_timed_in_a_graph(table: Any) -> None:
    from harness.bench.page import scope

    assert scope(table).endswith("past the L2 cache.")
    table = table.assign(how=table["how"].where(table["provider"] != "gather", "events around launches"))
    assert scope(table).endswith("not from a graph: gather.")


def test_the_roofline_shows_every_call(drawn: dict[str, Any]) -> None:
    data = drawn["kernel_roofline"].data
    assert len(data) == 6
    assert data["flop_per_byte"].iloc[0] == pytest.approx(4.0)


def test_a_figure_without_data_says_why() -> None:
    from harness.bench.figures import pictures
    from harness.bench.page import table_of
    from harness.report.style import Missing, style

    alone = table_of(rows_of([*CEILINGS, timing(PAGED16, "paged", 1, 2, 3)]), MADE_ON)
    with style():
        missing = [found for found in pictures(alone, ceilings_of(CEILINGS)) if isinstance(found, Missing)]
    assert [one.name for one in missing] == ["kernel_block_size", "kernel_paging", "kernel_shared_prefix"]
    assert all(one.reason.startswith("No ") for one in missing)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from harness.bench.page import table_of, write_run

    problems = [
        Problem(PAGED16.name, "flex", ProblemKind.unsupported, "no <block> of 16"),
        Problem(PAGED16.name, "mine", ProblemKind.wrong, "relative error 0.5"),
    ]
    folder = tmp_path_factory.mktemp("kernels")
    rows = table_of(rows_of(TIMINGS), MADE_ON)
    write_run(rows, ceilings_of(TIMINGS), problems, {"flashinfer": "not installed"}, MADE_ON, folder)
    return folder


def test_a_run_leaves_tables_figures_and_a_page_that_needs_no_network(written: Path) -> None:
    import pandas as pd

    page = (written / "index.html").read_text()
    assert len(pd.read_parquet(written / "kernels.parquet")) == len(pd.read_csv(written / "kernels.csv")) == 6
    assert {file.suffix for file in (written / "figures").iterdir()} == {".svg", ".pdf", ".csv"}
    assert page.count("<svg") == 4
    assert "http" not in page.replace("http://www.w3.org", "")


def test_the_page_names_what_was_wrong_and_what_was_left_out(written: Path) -> None:
    page = (written / "index.html").read_text()
    assert f"wrong: {PAGED16.name} by mine: relative error 0.5" in page
    assert "flex does not offer" in page
    assert "no &lt;block&gt; of 16" in page
    assert "flashinfer cannot run here: not installed" in page


def test_the_page_says_what_it_was_made_with(written: Path) -> None:
    page = (written / "index.html").read_text()
    assert "Attention kernels on a device" in page
    assert "<dt>kernel sources</dt><dd>feed</dd>" in page


def test_a_run_comes_back_with_its_rows_and_ceilings(written: Path) -> None:
    run = read_run(written)
    assert run.made_on == MADE_ON
    assert [row["median_us"] for row in run.rows] == pytest.approx([150, 147, 600, 149, 141, 82])
    limits = ceilings_of(TIMINGS)
    assert run.ceilings.copy_bytes_s == pytest.approx(limits.copy_bytes_s)
    assert run.ceilings.read_bytes_s == pytest.approx(limits.read_bytes_s)
    assert run.ceilings.matmul_flop_s == pytest.approx(limits.matmul_flop_s)


def test_a_table_may_be_named_itself(written: Path) -> None:
    assert read_run(written / "kernels.parquet").digest == read_run(written).digest


def damaged(folder: Path, written: Path, how: str) -> None:
    import pandas as pd

    table = pd.read_parquet(written / "kernels.parquet")
    if how == "cut":
        (folder / "kernels.parquet").write_bytes((written / "kernels.parquet").read_bytes()[:200])
        return
    if how == "older":
        table = table.drop(columns=["kernels"])
    elif how == "empty":
        table = table.iloc[:0]
    elif how == "text":
        table["batch"] = table["batch"].astype(str)
    elif how == "nobody":
        table.loc[1, "provider"] = None
    elif how == "zero":
        table.loc[0, "copy_share"] = 0.0
    else:
        table.loc[2, "median_us"] = float("nan")
    table.to_parquet(folder / "kernels.parquet", index=False)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "cannot be read"),
        ("older", "lacks kernels; time the kernels again"),
        ("empty", "holds no timed case"),
        ("text", "row 0, batch: found '32', must be a number above 0"),
        ("nobody", "row 1, provider: found None, must be text"),
        ("zero", r"row 0, copy_share: found 0\.0, must be a number above 0"),
        ("nan", "row 2, median_us: found None, must be a number above 0"),
    ],
)
def test_a_damaged_run_is_refused_with_what_is_wrong(
    how: str, message: str, written: Path, tmp_path: Path
) -> None:
    damaged(tmp_path, written, how)
    with pytest.raises(KernelRunError, match=message):
        read_run(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelRunError, match=r"no kernels\.parquet in .*; name the folder that"):
        read_run(tmp_path)


def test_problems_come_back_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    assert read_problems(file) == []
    problem = Problem("case", "flex", ProblemKind.failed, "RuntimeError: boom")
    note(file, problem)
    note(file, problem)
    assert read_problems(file) == [problem, problem]
