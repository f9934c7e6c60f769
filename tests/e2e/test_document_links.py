"""Links in the documents lead somewhere: files and headings of this repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "results").glob("*.md"))
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_links_lead_somewhere(document: Path) -> None:
    assert broken(document) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text(
        "# A heading\n[a](x.md) [b](none.md) [c](#a-heading) [d](#none) [e](https://example.org)\n"
    )
    assert broken(document) == ["none.md", "#none"]
