"""Outputs of a given form: every output that ends by itself has it, however the tokens are chosen."""

import json
import re
import sys

import pytest
import torch
from serve_cases import build_engine, tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed")
PROMPT = [5, 9, 2, 9, 30]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(name="llm")
def llm_fixture(model_of):
    from engine.runtime.llm import LLM

    return LLM(model_of(), pool_tokens=1024, block_size=8, tokenizer=tokenizer(), audit="full")


def form(**kinds):
    from engine.runtime.structured import StructuredOutputsParams

    return StructuredOutputsParams(**kinds)


def said(llm, kinds, **params):
    from engine.runtime.params import SamplingParams

    given = {"max_tokens": 48, "temperature": 0, "structured_outputs": form(**kinds)} | params
    return llm.generate(PROMPT, SamplingParams(**given))[0].outputs


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_the_output_follows_a_schema(llm, temperature):
    (output,) = said(llm, {"json": SCHEMA}, temperature=temperature, seed=3)
    answer = json.loads(output.text)
    assert answer["name"] in ("ann", "bob")
    assert 0 <= answer["age"] <= 99
    assert output.finish_reason == "stop"


def test_a_schema_may_be_given_as_text(llm):
    assert json.loads(said(llm, {"json": json.dumps(SCHEMA)})[0].text)["name"] in ("ann", "bob")


def test_the_output_matches_a_regular_expression(llm):
    (output,) = said(llm, {"regex": "[a-c]{3}-[0-9]+x"}, max_tokens=60, temperature=1.0, seed=1)
    assert re.fullmatch("[a-c]{3}-[0-9]+x", output.text)


@pytest.mark.parametrize(
    "more",
    [
        {"disable_any_whitespace": True},
        {"disable_additional_properties": True},
        {"whitespace_pattern": " ?"},
        {"structural_tag": "{}"},
    ],
)
def test_what_vllm_takes_beside_a_form_is_refused_by_name(more):
    from engine.runtime.errors import ParamsError

    with pytest.raises(ParamsError, match=f"{next(iter(more))} is not served"):
        form(json=SCHEMA, **more)


@pytest.mark.parametrize("texts", [["yes", "no"], ["naïve café", 'a "quoted" \\ text\n', "日本"]])
def test_the_output_is_one_of_the_texts(llm, texts):
    assert said(llm, {"choice": texts})[0].text in texts


def test_the_output_follows_a_grammar(llm):
    text = said(llm, {"grammar": 'root ::= "a" [0-9] [0-9] "z"'})[0].text
    assert re.fullmatch("a[0-9]{2}z", text)


def test_every_sample_has_a_state_of_its_own(llm):
    outputs = said(llm, {"json": SCHEMA}, n=6, temperature=2.0, seed=11)
    assert all(json.loads(output.text)["age"] <= 99 for output in outputs)
    assert len({output.text for output in outputs}) > 1


def test_requests_without_a_form_are_as_before(llm):
    from engine.runtime.params import SamplingParams

    free = SamplingParams(max_tokens=12, temperature=0)
    alone = llm.generate(PROMPT, free)[0].outputs[0].token_ids
    bound = SamplingParams(max_tokens=12, temperature=0, structured_outputs=form(choice=["yes", "no"]))
    together = llm.generate([PROMPT, PROMPT], [free, bound])
    assert together[0].outputs[0].token_ids == alone
    assert together[1].outputs[0].text in ("yes", "no")


def test_drafts_that_break_the_form_are_refused(model_of):
    """A draft model knows nothing of the form. The tokens are those of a run without drafts."""
    from engine.runtime.llm import LLM

    options = {"pool_tokens": 1024, "block_size": 8, "tokenizer": tokenizer(), "audit": "full"}
    plain = said(LLM(model_of(), **options), {"json": SCHEMA})
    drafted = said(LLM(model_of(), draft=model_of(), **options), {"json": SCHEMA})
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


def test_a_preempted_request_keeps_its_form(model_of):
    from engine.runtime.params import SamplingParams

    engine = build_engine(model_of(), pool_tokens=96, audit="full")
    wanted = SamplingParams(max_tokens=40, temperature=1.0, seed=5, structured_outputs=form(json=SCHEMA))
    for name in "abcdef":
        engine.add_request(name, PROMPT, wanted)
    texts = [output.outputs[0].text for output in engine.run() if output.finished]
    assert engine.counters.preemptions > 0
    assert len(texts) == 6
    assert all(json.loads(text)["age"] <= 99 for text in texts)


def test_bytes_are_tokens_where_the_model_has_no_tokenizer(model_of):
    from engine.runtime.text import ByteTokenizer

    engine = build_engine(model_of(), tokenizer=ByteTokenizer(first_id=10))
    from engine.runtime.params import SamplingParams

    engine.add_request(
        "a", PROMPT, SamplingParams(temperature=0, structured_outputs=form(choice=["yes", "née"]))
    )
    assert [*engine.run()][-1].outputs[0].text in ("yes", "née")


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({}, "set exactly one of json, regex, choice, grammar, json_object; found none"),
        ({"regex": "a", "choice": ["b"]}, "found regex and choice"),
        ({"choice": []}, "choice: 0 texts"),
        ({"choice": "ab"}, "choice: 'ab' is not a list"),
        ({"choice": [""]}, "none of them empty"),
        ({"regex": 5}, "regex: 5 is not a string"),
        ({"regex": "a" * 10_001}, "regex: 10,001 characters"),
        ({"regex": "((((b{100}){100}){100}){90})"}, "repeat one place more than 10,000 times"),
        ({"regex": r"(?:[({](\\){2,200}){51}"}, "repeat one place more than 10,000 times"),
        ({"json": [1]}, "json: \\[1\\] is not a JSON schema"),
        ({"json": {"a": {1, 2}}}, "the schema is not JSON"),
    ],
)
def test_a_senseless_form_is_refused(kinds, message):
    from engine.runtime.errors import ParamsError

    with pytest.raises(ParamsError, match=message):
        form(**kinds).source()


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"regex": "[ab"}, "invalid regex"),
        ({"json": "{"}, "expected"),
        ({"json": {"type": "obj"}}, "Invalid type: obj"),
        ({"grammar": "start: x"}, "unknown name"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_with_the_reason(llm, kinds, message):
    from engine.runtime.errors import ParamsError

    with pytest.raises(ParamsError, match=message):
        said(llm, kinds)


@pytest.mark.parametrize(
    "params", [{"min_tokens": 3}, {"bad_words": ["a"]}, {"allowed_token_ids": [1]}, {"ignore_eos": True}]
)
def test_what_could_leave_no_token_is_refused(params):
    from engine.runtime.errors import ParamsError
    from engine.runtime.params import SamplingParams

    with pytest.raises(ParamsError, match=f"cannot be combined with {next(iter(params))}"):
        SamplingParams(structured_outputs=form(regex="a"), **params)


def test_a_grammar_that_grows_too_large_ends_its_request_alone(model_of, monkeypatch):
    from engine.runtime.params import SamplingParams
    from engine.runtime.structured import Constraint, GrammarError

    def too_large(self, logits, branch, output):
        if len(output) == 3:
            self.failure = GrammarError("structured_outputs: the parser is too complex")

    monkeypatch.setattr(Constraint, "hide", too_large)
    engine = build_engine(model_of())
    engine.add_request("bound", PROMPT, SamplingParams(max_tokens=20, structured_outputs=form(regex="a+")))
    engine.add_request("free", PROMPT, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    last = {output.request_id: output for output in engine.run() if output.finished}
    assert isinstance(last["bound"].error, GrammarError)
    assert last["free"].error is None
    assert len(last["free"].outputs[0].token_ids) == 20


def test_a_missing_package_is_named(llm, monkeypatch):
    from engine.runtime.errors import ParamsError

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ParamsError, match="pip install llguidance"):
        said(llm, {"regex": "a"})


def test_a_token_that_cannot_follow_has_no_chance(model_of):
    from engine.runtime.structured import Grammars

    words = tokenizer()
    constraint = Grammars(words, 600, [words.eos_token_id]).constraint(form(choice=["no"]))
    logits = torch.zeros(600)
    constraint.hide(logits, 0, [])
    assert {words.decode([token]) for token in torch.isfinite(logits).nonzero()[:, 0].tolist()} <= {"n", "no"}


def test_a_token_taken_back_is_forgotten():
    from engine.runtime.structured import Grammars

    words = tokenizer()
    constraint = Grammars(words, 600, [words.eos_token_id]).constraint(form(regex="a|bc"))
    first, second = words.encode("a", add_special_tokens=False), words.encode("b", add_special_tokens=False)
    constraint.hide(torch.zeros(600), 0, first)
    logits = torch.zeros(600)
    constraint.hide(logits, 0, second)
    assert [words.decode([token]) for token in torch.isfinite(logits).nonzero()[:, 0].tolist()] == ["c"]
