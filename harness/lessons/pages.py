"""Lesson pages as single HTML files: style, text, logic and data inline, nothing from elsewhere."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from harness.config.groups import groups
from harness.lessons.recording import Recording
from harness.papers.sizes import shape_of
from traces.synth.generator import generate_trace

_MODELS = (
    "opt_13b",
    "llama2_7b",
    "llama3_8b",
    "llama3_70b",
    "mistral_7b",
    "qwen3_8b",
    "qwen3_32b",
    "opt_66b",
    "opt_175b",
)
_WORKLOADS = ("sosp23_sharegpt", "sosp23_alpaca", "sosp23_chatbot", "azure_conv")
_SAMPLED = 200


@dataclass(frozen=True)
class Lesson:
    """A page: its title, the line above it, its scripts in order, and what makes its data."""

    title: str
    about: str
    scripts: tuple[str, ...]
    data: Callable[[], Mapping[str, object]] | None = None


def _accountant_data() -> Mapping[str, object]:
    """KV bytes of a token by model, and lengths drawn from the shipped calibrations."""
    known = groups()["model"]
    lengths = {}
    for name in _WORKLOADS:
        trace = generate_trace(name, num_requests=_SAMPLED, seed=0)
        lengths[name] = [(one.prompt_tokens, one.output_tokens) for one in trace.requests]
    return {
        "models": {name: shape_of(name).kv_bytes_per_token for name in _MODELS if name in known},
        "workloads": lengths,
    }


LESSONS: Mapping[str, Lesson] = {
    "pool": Lesson("A pool of blocks", "lesson: touch a block pool", ("pool.js", "pool_page.js")),
    "accountant": Lesson(
        "What do these lengths take?",
        "lesson: blocks, waste, tables and bytes",
        ("accountant.js", "accountant_page.js"),
        _accountant_data,
    ),
    "replay": Lesson("The pool of a run", "lesson: a run, block by block", ("replay.js", "replay_page.js")),
}
"""The lessons by name."""


def text_of(name: str) -> str:
    """A file of this package."""
    return files("harness.lessons").joinpath(name).read_text(encoding="utf-8")


def page(
    name: str,
    recording: Recording | None = None,
    lengths: tuple[str, Sequence[tuple[int, int]]] | None = None,
) -> str:
    """The page of a lesson; that of `replay` shows the recording, that of `accountant` the lengths of a trace."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    lesson = LESSONS[name]
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    known: Mapping[str, Any] = recording.data() if recording else lesson.data() if lesson.data else {}
    if lengths is not None:
        known = {**known, "workloads": {lengths[0]: lengths[1], **known["workloads"]}, "chosen": lengths[0]}
    data = json.dumps(known, separators=(",", ":")).replace("<", "\\u003c")
    label = recording.label if recording else ""
    body = environment.from_string(text_of(f"{name}.html.j2")).render(data=Markup(data), label=label)
    css = files("harness.report").joinpath("page.css").read_text(encoding="utf-8")
    return environment.from_string(text_of("lesson.html.j2")).render(
        lesson=lesson,
        style=Markup(css + text_of("lesson.css")),
        body=Markup(body),
        script=Markup("\n".join(text_of(script) for script in lesson.scripts)),
    )
