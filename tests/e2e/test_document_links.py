"""Links and file names in the documents lead somewhere: to files and headings of this repository."""

import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("conf", "docs", "engine", "examples", "harness", "kernels", "results", "tests", "traces")
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted(
    file for name in FOLDERS for file in (ROOT / name).rglob("*.md")
)
ELSEWHERE = ("harness/conf",)  # where the wheel has conf/
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([\w./-]+)`")


def links(text: str) -> list[str]:
    """Targets of Markdown links outside code blocks, those to the web left out."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [target for target in LINK.findall(prose) if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """What `#...` may point at: headings, spelt as GitHub does."""
    headings = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(document: Path) -> list[str]:
    wrong = []
    for target in links(document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        known = (
            file.is_file() and anchor in anchors(file.read_text(encoding="utf-8"))
            if anchor
            else file.exists()
        )
        wrong += [] if known else [target]
    return wrong


def is_of_ours(name: str) -> bool:
    """Whether a name in backticks looks like a file or folder of this repository, not like one that a run writes."""
    in_folder = "/" in name and name.partition("/")[0] in FOLDERS and not name.startswith("results/")
    return name not in ELSEWHERE and (in_folder or name.endswith((".py", ".yaml", ".toml")))


def missing(document: Path) -> list[str]:
    """Files named in backticks that exist neither from the root nor from the document's folder."""
    prose = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    names = [name for name in CODE.findall(prose) if is_of_ours(name)]
    near = (ROOT, document.parent, document.parent / "paged_kernels")  # kernels/ itself is no package
    return [name for name in names if not any((folder / name).exists() for folder in near)]


def by_document(faults: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    return {str(file.relative_to(ROOT)): found for file in DOCUMENTS if (found := faults(file))}


def test_links_lead_somewhere() -> None:
    assert by_document(broken) == {}


def test_named_files_exist() -> None:
    assert by_document(missing) == {}


def test_a_missing_file_is_seen(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text(
        "`engine/none.py` `none.yaml` `engine/core/plan.py` `harness/cli/` `results/x.md` `a.csv` `LLM`\n"
    )
    assert missing(document) == ["engine/none.py", "none.yaml"]


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text(
        "# A heading\n[a](x.md) [b](none.md) [c](#a-heading) [d](#none) [e](https://example.org)\n"
    )
    assert broken(document) == ["none.md", "#none"]
