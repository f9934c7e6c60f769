"""Making a figure's SVG part of the page: no prologue, no metadata, ids that no other figure has."""

import re

_PROLOGUE = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_PATH = re.compile(r'\bd="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")  # a hundredth of a point is finer than any screen
_ID = re.compile(r'\bid="([^"]+)"')
_USE = re.compile(r'(href="#|url\(#)([^")]+)')
_SIZE = re.compile(r'(<svg\b[^>]*?)\s+width="[^"]*"', re.DOTALL)
_HEIGHT = re.compile(r'(<svg\b[^>]*?)\s+height="[^"]*"', re.DOTALL)


def inline(svg: bytes, name: str, title: str) -> str:
    """The `<svg>` element for a page, sized by the page's style sheet, with `title` as its accessible name."""
    from markupsafe import escape

    text = _METADATA.sub("", _PROLOGUE.sub("", svg.decode(), count=1))
    text = _PATH.sub(lambda found: _DIGITS.sub(r"\1", found[0]), text)
    text = _ID.sub(lambda found: f'id="{name}-{found[1]}"', text)
    text = _USE.sub(lambda found: f"{found[1]}{name}-{found[2]}", text)
    text = _HEIGHT.sub(r"\1", _SIZE.sub(r"\1", text, count=1), count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1).strip()
