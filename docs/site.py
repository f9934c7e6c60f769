"""Hooks of MkDocs: the site shows the repository's documents where they lie, and what is generated from the code.

A document outside `docs/` gets the path that it has in the repository, one in `docs/` the path below it. Links between
them are rewritten. A linked source file becomes a page with its text; a linked picture or table is copied.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "docs")]

import site_pages  # noqa: E402  (beside this file)

_LINK = re.compile(r"(?<!`)(!?\[[^\]]*\])\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_COPIED = (".svg", ".png", ".csv", ".pdf", ".txt", ".json")
_START = "README.md"  # the first page of the site
_HIGHLIGHTED = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".js": "javascript", ".toml": "toml"}


def uri_of(path: str) -> str:
    """Where a file of the repository lies in the site's sources."""
    if path == _START:
        return "index.md"
    if path.endswith(".md"):
        return path.removeprefix("docs/")
    return path if path.endswith(_COPIED) else f"source/{path}.md"


def path_of(uri: str) -> str:
    """The document of the repository that a page shows; one that is generated has none, and stays as it is."""
    if uri == "index.md":
        return _START
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri


def targets(path: str, text: str) -> Iterator[str]:
    """Files of the repository that a document links to, from its root."""
    prose = _FENCE.sub("", text)
    for _, target in _LINK.findall(prose):
        found = resolved(path, target)
        if found is not None and (ROOT / found).is_file():
            yield found


def resolved(path: str, target: str) -> str | None:
    """The path in the repository that a link of a document means; None for the web and for the page itself."""
    name = target.partition("#")[0]
    if not name or re.match(r"[a-z]+:", target):
        return None
    return os.path.normpath(PurePosixPath(path).parent / name)


def on_files(files: Files, config: Any) -> Files:
    """Add generated pages, and everything that a document of the site links to."""
    for uri, content in site_pages.generated().items():
        files.append(File.generated(config, uri, content=content))
    named = [
        uri for uri in re.findall(r"'([^']+\.md)'", repr(config.nav)) if files.get_file_from_path(uri) is None
    ]
    open_ = [path_of(uri) for uri in named] + [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set[str]()
    while open_:
        path = open_.pop()
        if path in seen or not (ROOT / path).is_file():
            continue
        seen.add(path)
        uri = uri_of(path)
        if files.get_file_from_path(uri) is None:
            files.append(_file(config, path, uri))
        if path.endswith(".md"):
            open_ += targets(path, (ROOT / path).read_text(encoding="utf-8"))
    return files


def _file(config: Any, path: str, uri: str) -> File:
    if not uri.startswith("source/"):
        return File.generated(config, uri, abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text(encoding="utf-8")
    kind = _HIGHLIGHTED.get(Path(path).suffix, "text")
    return File.generated(config, uri, content=f"# {path}\n\n~~~~{kind}\n{text}~~~~\n")


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Point links at pages of the site."""
    path = path_of(page.file.src_uri)
    if page.file.src_uri.startswith(("source/", "reference/")):
        return markdown
    parts = _FENCE.split(markdown)
    text = "".join(
        part if index % 2 else _relinked(part, path, page, files) for index, part in enumerate(parts)
    )
    return text + site_pages.ADDED.get(path, "")


def _relinked(text: str, path: str, page: Page, files: Files) -> str:
    def point(found: re.Match[str]) -> str:
        label, target = found.groups()
        place = resolved(path, target)
        if place is None:
            return found[0]
        if (ROOT / place).is_dir():  # a folder has no page
            place = f"{place}/README.md"
        if files.get_file_from_path(uri_of(place)) is None:
            return label[1:-1] if (ROOT / place).parent.exists() else found[0]
        uri = os.path.relpath(uri_of(place), PurePosixPath(page.file.src_uri).parent)
        anchor = target.partition("#")[2]
        return f"{label}({uri}{'#' + anchor if anchor else ''})"

    return _LINK.sub(point, text)


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Take our own worker for search, instead of one from the web."""
    return _local(output, os.path.relpath(".", PurePosixPath(page.file.src_uri).parent))


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """The same for the page that a server shows where there is none."""
    return _local(output, ".")


def _local(html: str, root: str) -> str:
    return html.replace("https://unpkg.com/iframe-worker/shim", f"{root}/file_worker.js")
