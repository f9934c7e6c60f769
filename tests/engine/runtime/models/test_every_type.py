"""Every causal type of the installed transformers equals `generate()` on paged KV, or is refused with a reason.

`engine/MODELS.md` says which, and this file writes it: `PAGETWIN_NIGHTLY=1 PAGETWIN_WRITE=1`. By day a type of each
kind of answer runs, by night all of them.
"""

import os
import re
from pathlib import Path

import pytest
from causal_types import QUICK, answer, names
from families import FAMILIES
from tiers import cases

DOCUMENT = Path(__file__).resolve().parents[4] / "engine" / "MODELS.md"
WRITES = "PAGETWIN_WRITE" in os.environ
UNTESTED = "not built: "


def documented():
    """What the document says of each type."""
    types = DOCUMENT.read_text(encoding="utf-8").partition("Refused RoPE types")[0]
    rows = re.findall(r"^\| (\S+) \| (.*) \|$", types, flags=re.MULTILINE)
    return dict(rows)


def said(name):
    found = answer(name)
    if found != "equal":
        return found
    kind = name.partition("+")[0]
    special = FAMILIES[kind][0] if kind in FAMILIES else None
    return "equal" if special is None else f"equal, whole grid{f': {special}' if special else ''}"


@cases("name", QUICK, day=("bert+decoder", "phimoe+window", "mamba"))
def test_a_type_is_what_the_document_says(name):
    assert said(name) == documented()[name]


def test_the_document_names_every_causal_type_that_transformers_has():
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if f"causal types of transformers {__version__}:" not in DOCUMENT.read_text(encoding="utf-8"):
        pytest.skip(f"the document is of another transformers than {__version__}")
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(documented()) == set()


def test_no_type_fails_with_an_error_that_names_no_reason():
    assert [name for name, text in documented().items() if not text or "!!!" in text] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(documented().keys() - set(QUICK)))
def test_every_other_type_is_what_the_document_says(name):
    assert said(name) == documented()[name]


@pytest.mark.nightly
def test_the_document_is_what_this_file_writes():
    found = {name: said(name) for name in names()} if WRITES else documented()
    if WRITES:
        DOCUMENT.write_text(document(found), encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == document(found)


def document(found):
    import transformers

    from engine.runtime.models.spec import REFUSED_ROPE

    equal = {name: text for name, text in found.items() if text.startswith("equal")}
    untested = {name: text for name, text in found.items() if text.startswith(UNTESTED)}
    refused = {name: text for name, text in found.items() if name not in equal and name not in untested}
    return "\n".join(
        [
            "# Models",
            "",
            "`tests/engine/runtime/models/test_every_type.py` writes this file and tests what it says. To write it "
            "again: `PAGETWIN_NIGHTLY=1 PAGETWIN_WRITE=1 python -m pytest "
            "tests/engine/runtime/models/test_every_type.py`.",
            "",
            f"These are all causal types of transformers {transformers.__version__}: {len(equal)} rows are equal, "
            f"{len(refused)} are refused, {len(untested)} could not be built. Each row is a small random model with "
            "the values that its configuration has by default. `+window` switches on a sliding window that the "
            "defaults leave out, `+decoder` makes a decoder of an encoder.",
            "",
            "*Equal*: tokens and log-probabilities are those of transformers' `generate()` in float32, in chunks and "
            "with preemption. *Whole grid*: so also with block sizes 1 to 128, prompts of 1 to 512 tokens, prefix "
            "caching on and off, recomputation and swapping, paged and contiguous memory "
            "(`tests/engine/runtime/models/test_families.py`).",
            "",
            "A model is judged when it is loaded, by what it computes and not by its name: a small copy of it runs "
            "natively and on paged KV (`engine/runtime/models/guard.py`). So a type that is not in this list, or has "
            "other values, is refused too where it would give wrong tokens.",
            "",
            "*Equal* is said of tokens, on a CPU. On CUDA a model runs on torch's attention where a layer asks what "
            "the Triton kernels do not serve, such as heads wider than 256 (Gemma 4's full layers have 512); the log "
            "says what, and `engine.backend=triton` refuses it.",
            "",
            "Layers in groups (`cache.groups`, `LLM(groups=...)`): gemma2, gemma3_text, gemma4_text, ministral, "
            "cohere2, gpt_oss (windows beside full layers), mistral (windows alone), deepseek_v2, deepseek_v3 (latent "
            "vectors, kept as they are, and decoded without expanding them; without groups the engine keeps the "
            "expanded K and V) and "
            "llama are tested so: tokens equal to `generate()`, with blocks behind windows freed and used again, hits, "
            "preemption, samples, beams, drafts and 8-bit KV (`tests/engine/runtime/test_groups.py`). Layers that read "
            "K and V of others (Gemma 4) keep a copy each, which vLLM does not.",
            "",
            "*In groups: recurrent state*: some layers keep a state in place of K and V (`cache.groups`, "
            "`LLM(groups=...)`; without groups the model is refused). The states lie in pages of the same pool, one is "
            "kept at the end of each block, and a prefix hit begins with one. *Prompts token by token*: transformers "
            "begins every piece of a prompt but the first without the state before it, so the engine runs these layers "
            "by one token at a time there, which is slower and gives the same tokens. Models whose layers keep states "
            "alone are refused: a pool is sized in tokens. The state has the bytes that transformers' cache holds: its "
            "convolution keeps one column more than that of vLLM "
            "(`tests/engine/runtime/test_states.py`).",
            "",
            *_table("Equal", "answer", equal),
            *_table("Refused", "reason", refused),
            *_table("Not built", "transformers says to its default configuration", untested),
            *_table(
                "Refused RoPE types, in any model",
                "reason",
                REFUSED_ROPE,
            ),
        ]
    )


def _table(title, column, rows):
    lines = [f"| {name} | {text} |" for name, text in rows.items()]
    return [f"## {title}", "", f"| model type | {column} |", "|---|---|", *lines, ""]
