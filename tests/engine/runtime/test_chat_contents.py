"""Contents of chat messages: parts for a template that goes through them, else one text; asked of vLLM too."""

import json
import os
import subprocess

import pytest
from serve_cases import tokenizer

PYTHON = os.environ.get("PAGETWIN_VLLM")
EACH = "{% for message in messages %}<{{ message.role }}>"
LOOP = "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
MACRO = (
    "{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}"
    "{% if item is mapping and item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)
TEMPLATES = {  # in the ways of public templates, and whether they take parts
    "the text alone": (EACH + "{{ message.content }}{% endfor %}", False),
    "a sum of texts": (EACH + "{{ '[' + message['content'] + ']' }}{% endfor %}", False),
    "nothing of what is no text": (
        EACH + "{% if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}"
        "{% endif %}{{ content }}{% endfor %}", False,
    ),
    "a text, or its parts": (
        EACH + "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}" + LOOP
        + "{% endif %}{% endfor %}", True,
    ),
    "parts that are trimmed": (EACH + LOOP.replace("['text'] }", "['text'] | trim }") + "{% endfor %}", True),
    "a macro": (MACRO + EACH + "{{ shown(message.content) }}{% endfor %}", True),
}  # fmt: skip
DETECT = """
import json, sys
from vllm.renderers.hf import _detect_content_format
print(json.dumps([_detect_content_format(one, default="string") for one in json.load(sys.stdin)]))
"""


def words_of(template):
    words = tokenizer()
    words.chat_template = template
    return words


def shown(template, content, **given):
    from engine.runtime.text import templated

    return templated(words_of(template), [{"role": "user", "content": content}], tokenize=False, **given)


PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gets_parts_where_it_goes_through_them(name):
    template, takes_parts = TEMPLATES[name]
    lines = shown(template, "one \ntwo", content_format="string")
    assert (shown(template, PARTS) == lines) == (not takes_parts)
    if takes_parts:
        assert shown(template, PARTS).replace(" ", "") == "<user>onetwo"


def test_a_text_is_one_part_where_parts_are_taken():
    """vLLM wraps it, so a template that trims texts and not parts leaves its spaces."""
    template, _ = TEMPLATES["a text, or its parts"]
    assert shown(template, " a ") == "<user> a "
    assert shown(template, " a ", content_format="string") == "<user>a"
    assert shown(template, None) == "<user>"


def test_a_form_that_was_asked_for_goes_before():
    template, _ = TEMPLATES["the text alone"]
    assert shown(template, "a", content_format="openai") == "<user>[{'type': 'text', 'text': 'a'}]"


def test_a_server_hands_parts_on():
    from harness.serve.protocol import ChatRequest

    asked = {"messages": [{"role": "user", "content": PARTS}], "add_generation_prompt": False}
    for name, text in (("a macro", "<user>one two"), ("the text alone", "<user>one \ntwo")):
        words = words_of(TEMPLATES[name][0])
        assert words.decode(ChatRequest(**asked).prompt_ids(words)) == text


def test_vllm_finds_the_same_forms():
    if not PYTHON:
        pytest.skip("PAGETWIN_VLLM=PATH/bin/python names an environment that has vLLM")
    asked = json.dumps([template for template, _ in TEMPLATES.values()])
    done = subprocess.run([PYTHON, "-c", DETECT], input=asked, capture_output=True, text=True, check=True)
    expected = ["openai" if takes_parts else "string" for _, takes_parts in TEMPLATES.values()]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
