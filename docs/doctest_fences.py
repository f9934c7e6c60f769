"""An extension of griffe: the doctests of a docstring are shown as code, and not as Markdown."""

import textwrap
from typing import Any

import griffe


class DoctestFences(griffe.Extension):
    """Puts each paragraph that begins with `>>>` into a fence."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(_fenced, obj.docstring.value.split("\n\n")))


def _fenced(paragraph: str) -> str:
    if not paragraph.lstrip().startswith(">>>"):
        return paragraph
    return f"```pycon\n{textwrap.dedent(paragraph).strip()}\n```"
