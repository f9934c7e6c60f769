"""Scripts in vLLM's style run with their imports changed, and each argument of vLLM's is taken or refused by name."""

import json
import os
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from serve_cases import tokenizer
from tiers import NIGHT_SEED, cases

IMPORTS = (
    "from engine.runtime.llm import (LLM, SamplingParams, BeamSearchParams, StructuredOutputsParams,\n"
    "    RequestOutputKind, TextPrompt, TokensPrompt)\n"
)
SHARED = {  # scripts over one `llm`, whose model, tokenizer and prefix cache they share
    "several prompts": """
outputs = llm.generate(["the cat", "a mat"], SamplingParams(temperature=0.8, top_p=0.95))
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
assert [output.prompt for output in outputs] == ["the cat", "a mat"]
""",
    "named sampling_params": """
out = llm.generate(prompts="the cat", sampling_params=SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
assert len(out[0].outputs[0].token_ids) == 5 and out[0].outputs[0].finish_reason == "length"
""",
    "one of parameters for each prompt": """
each = [SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(max_tokens=4, ignore_eos=True)]
outputs = llm.generate(["the cat", "a dog"], each, use_tqdm=False)
assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 4]
""",
    "a list of one for all": """
outputs = llm.generate(["the cat", "a dog"], [SamplingParams(max_tokens=3)])
assert len(outputs) == 2
""",
    "no parameters at all": """
assert len(llm.generate("the cat")[0].outputs[0].token_ids) <= 16
""",
    "a prompt as a mapping": """
out = llm.generate({"prompt": "the cat"}, SamplingParams(max_tokens=2))[0]
assert out.prompt == "the cat" and list(out.prompt_token_ids) == llm.get_tokenizer().encode("the cat")
""",
    "TokensPrompt": """
ids = llm.get_tokenizer().encode("the cat sat")
out = llm.generate(TokensPrompt(prompt_token_ids=ids), SamplingParams(max_tokens=2))[0]
assert list(out.prompt_token_ids) == ids and out.prompt is None
""",
    "prompt_token_ids in a list": """
outs = llm.generate([{"prompt_token_ids": [5, 6, 7]}, TextPrompt(prompt="the dog")], SamplingParams(max_tokens=2))
assert list(outs[0].prompt_token_ids) == [5, 6, 7]
""",
    "cached tokens": """
prompt = "the quick brown fox jump over that lazy dog, again; the quick brown fox jump over that lazy dog"
llm.generate(prompt, SamplingParams(max_tokens=1))
out = llm.generate(prompt, SamplingParams(max_tokens=1))[0]
assert out.num_cached_tokens >= 16
""",
    "reset_prefix_cache": """
prompt = "that lazy dog saw the brown fox, that lazy dog saw the brown fox, that lazy dog saw"
llm.generate(prompt, SamplingParams(max_tokens=1))
assert llm.reset_prefix_cache() is True
assert llm.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens == 0
""",
    "salts": """
prompt = "brown fox saw a mat, brown fox saw a mat, brown fox saw a mat, brown fox saw"
llm.generate({"prompt": prompt, "cache_salt": "a"}, SamplingParams(max_tokens=1))
assert llm.generate({"prompt": prompt, "cache_salt": "b"}, SamplingParams(max_tokens=1))[0].num_cached_tokens == 0
""",
    "logprobs by token id": """
out = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=4, logprobs=3))[0].outputs[0]
for token, position in zip(out.token_ids, out.logprobs):
    chosen = position[token]
    assert chosen.rank == 1 and chosen.logprob == max(entry.logprob for entry in position.values())
    assert chosen.decoded_token == llm.get_tokenizer().decode([token])
    assert len(position) == 3 and next(iter(position)) == token
assert abs(out.cumulative_logprob - sum(p[t].logprob for t, p in zip(out.token_ids, out.logprobs))) < 1e-9
""",
    "prompt_logprobs": """
out = llm.generate("the cat sat", SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
assert out.prompt_logprobs[0] is None
for token, position in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:]):
    assert list(position) == [token] and position[token].logprob <= 0
""",
    "n samples": """
out = llm.generate("the cat", SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=4))[0]
assert [one.index for one in out.outputs] == [0, 1, 2] and all(one.finished() for one in out.outputs)
""",
    "a seed repeats": """
ask = SamplingParams(temperature=1.0, seed=11, max_tokens=8)
assert llm.generate("a dog", ask)[0].outputs[0].token_ids == llm.generate("a dog", ask)[0].outputs[0].token_ids
""",
    "stop strings": """
free = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0].text
stop = free[4:6]
out = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=12, stop=[stop]))[0].outputs[0]
assert out.finish_reason == "stop" and out.stop_reason == stop and stop not in out.text
""",
    "stop token ids": """
free = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].outputs[0].token_ids
out = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[free[2]]))[0].outputs[0]
assert out.stop_reason == free[2] and out.finish_reason == "stop"
""",
    "the text of a stop token": """
free = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].outputs[0].token_ids
ask = {"temperature": 0, "max_tokens": 6, "stop_token_ids": [free[2]]}
hidden, shown = (llm.generate("the cat", SamplingParams(**ask, include_stop_str_in_output=one))[0].outputs[0]
    for one in (False, True))
assert shown.token_ids == hidden.token_ids and shown.stop_reason == free[2]
assert shown.text.startswith(hidden.text) and len(shown.text) > len(hidden.text)
""",
    "no seed, as vLLM's benchmarks say it": """
assert SamplingParams(seed=-1).seed is None and SamplingParams(seed=0).seed == 0
""",
    "defaults written out": """
params = SamplingParams(n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=1.0,
    top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=None, stop_token_ids=None, bad_words=None, ignore_eos=False,
    max_tokens=16, min_tokens=0, logprobs=None, prompt_logprobs=None, detokenize=True, skip_special_tokens=True,
    spaces_between_special_tokens=True, include_stop_str_in_output=False, output_kind=RequestOutputKind.FINAL_ONLY,
    logit_bias=None, allowed_token_ids=None, extra_args=None)
assert len(llm.generate("the cat", params)) == 1
""",
    "fields that are set later": """
params = llm.get_default_sampling_params()
params.temperature = 0.0
params.max_tokens = 3
other = params.clone()
other.max_tokens = 5
first, second = (llm.generate("the cat", one)[0].outputs[0].token_ids for one in (params, other))
assert second[:3] == first and len(second) == 5
""",
    "from_optional": """
params = SamplingParams.from_optional(temperature=None, top_p=0.9, max_tokens=None)
assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 0.9, None)
params = SamplingParams.from_optional(logit_bias={"3": 500, 4: -1e9, 5: 7})
assert params.logit_bias == {3: 100.0, 4: -100.0, 5: 7}
assert SamplingParams(logit_bias={3: 500.0}).logit_bias == {3: 500.0}  # which no client gets
assert SamplingParams(stop=["a"] * 17).stop == ["a"] * 17
""",
    "penalties and bias": """
ask = SamplingParams(temperature=0, max_tokens=4, repetition_penalty=1.2, presence_penalty=0.1, logit_bias={41: 100.0})
assert llm.generate("the cat", ask)[0].outputs[0].token_ids == [41] * 4
""",
    "allowed tokens and bad words": """
ask = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[5, 6], bad_words=["zebra"])
assert set(llm.generate("the cat", ask)[0].outputs[0].token_ids) <= {5, 6}
""",
    "a longer answer than the model's longest sequence": """
out = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True))[0]
assert out.outputs[0].finish_reason == "length"
assert len(out.prompt_token_ids) + len(out.outputs[0].token_ids) == 256
""",
    "chat": """
conversation = [{"role": "system", "content": "You are a cat"}, {"role": "user", "content": "Hello"}]
out = llm.chat(conversation, sampling_params=SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0]
assert llm.get_tokenizer().decode(out.prompt_token_ids).endswith("user: Hello\\nassistant: ")
""",
    "several chats of parts": """
parts = [{"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "cat"}]}]
outs = llm.chat([parts, parts], SamplingParams(max_tokens=2), False)
assert len(outs) == 2
assert "Hello \\ncat" in llm.get_tokenizer().decode(outs[0].prompt_token_ids)
""",
    "a chat template of one's own": """
out = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1),
    chat_template="{{ messages[0].content }}!")
assert llm.get_tokenizer().decode(out[0].prompt_token_ids) == "Hi!"
""",
    "tools in the template": """
template = "{{ tools | length }} tools: {{ messages[0].content }}"
tools = [{"type": "function", "function": {"name": "look"}}]
out = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1), chat_template=template, tools=tools)
assert llm.get_tokenizer().decode(out[0].prompt_token_ids) == "1 tools: Hi"
""",
    "calls of tools in the template": """
template = "{{ messages[1].tool_calls[0].function.arguments.city | default('nowhere') }}!"
rome, cut = '{"city": "Rome"}', '{"city"'
for arguments, said in ((rome, "Rome!"), ({"city": "Rome"}, "Rome!"), (cut, "nowhere!"), ("", "nowhere!")):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    out = llm.chat(talk, SamplingParams(max_tokens=1), chat_template=template)
    assert llm.get_tokenizer().decode(out[0].prompt_token_ids) == said
    assert call["function"]["arguments"] == arguments
""",
    "beam_search": """
params = BeamSearchParams(beam_width=3, max_tokens=5)
outputs = llm.beam_search([{"prompt": "the cat"}, {"prompt": "a dog"}], params)
prompt = llm.get_tokenizer().encode("the cat")
for sequence in outputs[0].sequences:
    assert sequence.tokens[: len(prompt)] == prompt and sequence.text.startswith("the cat")
scores = [sequence.cum_logprob / (len(sequence.tokens) - len(prompt)) for sequence in outputs[0].sequences]
assert len(scores) == 3 and scores == sorted(scores, reverse=True)
""",
    "beam_search of one beam": """
one = llm.beam_search(["the cat"], BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True))[0].sequences[0]
greedy = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0))[0]
assert one.tokens == [*greedy.prompt_token_ids, *greedy.outputs[0].token_ids]
assert abs(one.cum_logprob - greedy.outputs[0].cumulative_logprob) < 1e-6
""",
    "outputs in the order of their ids": """
outputs = llm.generate(["the cat", "a dog", "a mat"], SamplingParams(max_tokens=2), use_tqdm=False)
ordered = sorted(outputs[::-1], key=lambda output: int(output.request_id))
assert [output.prompt for output in ordered] == ["the cat", "a dog", "a mat"]
""",
    "an end token and why": """
ask = SamplingParams(temperature=0, max_tokens=5, logit_bias={llm.get_tokenizer().eos_token_id: 100.0})
out = llm.generate("the cat", ask)[0].outputs[0]
assert (out.finish_reason, out.stop_reason) == ("stop", None)
""",
    "beams with the text of their end token": """
words = llm.get_tokenizer()
ends = [token for token in range(1, 512) if words.decode([token]).isascii()]
ask = {"beam_width": 3, "max_tokens": 8, "stop_token_ids": ends}
plain, whole = (
    llm.generate("the cat", SamplingParams(**ask, include_stop_str_in_output=kept))[0].outputs for kept in (False, True)
)
pairs = [(one, other) for one, other in zip(plain, whole) if one.stop_reason]
assert pairs and [one.token_ids for one in plain] == [one.token_ids for one in whole]
for one, other in pairs:
    assert other.text == one.text + words.decode([one.stop_reason])
""",
    "a temperature too small to divide by": """
assert SamplingParams(temperature=1e-7).temperature == SamplingParams(temperature=0.009).temperature == 0.01
""",
    "a shared system prompt": """
system = "You saw the quick brown fox jump over that lazy dog, again and again; what is on the mat? " * 2
prompts, sampling_params = [system + one for one in ("a cat", "a dog")], SamplingParams(temperature=0.0, max_tokens=3)
cold = [output.outputs[0].text for output in llm.generate(prompts, sampling_params)]
warm = llm.generate(prompts, sampling_params)
assert [output.outputs[0].text for output in warm] == cold
assert all(output.num_cached_tokens >= 32 for output in warm)
""",
    "a choice of words": """
form = StructuredOutputsParams(choice=["a cat", "a dog"])
out = llm.generate("the ", SamplingParams(structured_outputs=form, max_tokens=20))[0].outputs[0]
assert out.text in ("a cat", "a dog")
""",
    "a regular expression": """
form = StructuredOutputsParams(regex=r"[a-c]{3}")
prompts = ["the ", "a "]
for output in llm.generate(prompts=prompts, sampling_params=SamplingParams(structured_outputs=form, max_tokens=20)):
    assert len(output.outputs[0].text) == 3 and set(output.outputs[0].text) <= set("abc")
""",
    "a word of a schema": """
import json
schema = {"type": "string", "enum": ["cat", "dog"]}
ask = SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema))
assert json.loads(llm.generate("the cat ", ask)[0].outputs[0].text) in schema["enum"]
""",
    "several turns": """
turns, ask = [{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=3)
for said in ("and the dog", "and the mat"):
    turns.append({"role": "assistant", "content": llm.chat(turns, ask, use_tqdm=False)[0].outputs[0].text})
    turns.append({"role": "user", "content": said})
assert llm.chat(messages=turns, sampling_params=ask)[0].num_cached_tokens >= 0 and len(turns) == 5
""",
    "an answer that is begun": """
turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The cat sat on"}]
out = llm.chat(turns, SamplingParams(max_tokens=2), add_generation_prompt=False, continue_final_message=True)[0]
assert llm.get_tokenizer().decode(out.prompt_token_ids).rstrip().endswith("The cat sat on")
""",
    "ids in, ids out": """
outs = llm.generate([TokensPrompt(prompt_token_ids=[7, 8, 9])] * 2, SamplingParams(max_tokens=4, detokenize=False,
    ignore_eos=True, temperature=0))
assert [out.outputs[0].text for out in outs] == ["", ""]
assert outs[0].outputs[0].token_ids == outs[1].outputs[0].token_ids
assert llm.get_tokenizer().decode(outs[0].outputs[0].token_ids)
""",
    "stop strings that stay": """
free = llm.generate("a dog", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0].text
ask = SamplingParams(temperature=0, max_tokens=12, stop=[free[3:5], "never"], include_stop_str_in_output=True)
assert llm.generate("a dog", ask)[0].outputs[0].text.endswith(free[3:5])
""",
    "at least so many tokens": """
ask = SamplingParams(max_tokens=9, min_tokens=6, seed=2, temperature=1.2, top_k=50, top_p=0.9, min_p=0.01)
assert 6 <= len(llm.generate("a mat", ask)[0].outputs[0].token_ids) <= 9
""",
    "only the end of a long prompt": """
out = llm.generate("the cat sat on a mat and saw the dog", SamplingParams(max_tokens=1, truncate_prompt_tokens=4))[0]
assert list(out.prompt_token_ids) == llm.get_tokenizer().encode("the cat sat on a mat and saw the dog")[-4:]
""",
    "no prompts": """
assert llm.generate([], SamplingParams()) == [] and llm.beam_search([], BeamSearchParams(2, 3)) == []
""",
    "beams of a conversation's ids": """
ids = llm.get_tokenizer().encode("the cat")
params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True, length_penalty=0.6, skip_special_tokens=False)
out = llm.beam_search([TokensPrompt(prompt_token_ids=ids)], params)[0]
assert all(len(one.tokens) == len(ids) + 4 and one.cum_logprob < 0 for one in out.sequences)
""",
    "a bar of one's own": """
seen = []
class Bar:
    def __init__(self, total, desc): seen.append(total)
    def __enter__(self): return self
    def __exit__(self, *error): return None
    def update(self, count): seen.append(count)
llm.generate(["the cat", "a dog"], SamplingParams(max_tokens=2), use_tqdm=Bar)
assert seen == [2, 1, 1]
""",
}
OWN = {  # scripts that make their own LLM
    "the quickstart": """
llm = LLM(model=MODEL)
outputs = llm.generate(["the cat", "a mat"], SamplingParams(temperature=0.8, top_p=0.95))
assert all(output.finished for output in outputs)
""",
    "a constructor full of names": """
llm = LLM(MODEL, tokenizer=MODEL, tokenizer_mode="auto", trust_remote_code=False, tensor_parallel_size=1, dtype="half",
    quantization=None, revision=None, seed=3, gpu_memory_utilization=0.9, max_model_len=128, max_num_seqs=8,
    max_num_batched_tokens=256, enable_prefix_caching=True, enable_chunked_prefill=True, block_size=16,
    enforce_eager=True, disable_log_stats=True, hf_overrides=None, async_scheduling=False, load_format="auto",
    swap_space=4, cpu_offload_gb=0, compilation_config=None, kv_cache_dtype="auto", max_logprobs=20)
assert str(llm.loaded.dtype) == "torch.float16" and llm.engine.limits.max_running == 8
""",
    "no tokenizer": """
llm = LLM(MODEL, skip_tokenizer_init=True, max_model_len=64)
out = llm.generate({"prompt_token_ids": [4, 5, 6]}, SamplingParams(max_tokens=3, detokenize=False))[0]
assert out.outputs[0].text == "" and len(out.outputs[0].token_ids) <= 3
""",
    "priorities": """
llm = LLM(MODEL, scheduling_policy="priority", max_num_seqs=1, max_model_len=64)
outs = llm.generate(["the cat", "a dog"], SamplingParams(max_tokens=2, ignore_eos=True), priority=[1, 0])
assert outs[1].metrics.finished_s < outs[0].metrics.finished_s
""",
    "a draft model by its short names": """
assert LLM(MODEL, spec_model=MODEL, spec_tokens=2, max_model_len=64).engine.options.draft_tokens == 2
""",
    "sequences longer than the model's": """
from engine.runtime.errors import ModelError
try:
    LLM(MODEL, max_model_len=257)
except ModelError as error:
    assert "max_model_len 257, and its positions are known up to 256" in str(error)
else:
    raise AssertionError
""",
    "a draft model": """
llm = LLM(MODEL, speculative_config={"model": MODEL, "num_speculative_tokens": 3}, max_model_len=64)
plain = LLM(MODEL, max_model_len=64)
ask = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
assert llm.generate("the cat", ask)[0].outputs[0].token_ids == plain.generate("the cat", ask)[0].outputs[0].token_ids
""",
}


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder, words = tmp_path_factory.mktemp("model"), tokenizer()
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ends = {"bos_token_id": None, "eos_token_id": words.eos_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape, **heads, **ends)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(name="llm", scope="module")
def llm_fixture(model):
    from engine.runtime.llm import LLM

    return LLM(str(model))


@pytest.mark.parametrize("name", SHARED)
def test_a_script_runs_on_an_llm(name, llm):
    exec(compile(IMPORTS + SHARED[name], name, "exec"), {"llm": llm})


@pytest.mark.parametrize("name", OWN)
def test_a_script_runs_with_an_llm_of_its_own(name, model):
    exec(compile(IMPORTS + OWN[name], name, "exec"), {"MODEL": str(model)})


def test_the_tokenizers_end_token_ends_too_as_in_vllm(model, tmp_path):
    """A chat model often names another one in its config.json, and has no generation_config.json."""
    from engine.runtime.llm import LLM, SamplingParams

    shutil.copytree(model, tmp_path / "chat")
    (tmp_path / "chat" / "generation_config.json").unlink()
    config = tmp_path / "chat" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 300}))
    llm = LLM(str(tmp_path / "chat"))
    end = llm.get_tokenizer().eos_token_id
    for token, said in ((end, None), (300, 300)):
        ask = SamplingParams(temperature=0, max_tokens=5, logit_bias={token: 100.0})
        out = llm.generate("the cat", ask)[0].outputs[0]
        assert (out.token_ids, out.finish_reason, out.stop_reason) == ([token], "stop", said)
        on = llm.generate("the cat", replace(ask, ignore_eos=True))[0].outputs[0]
        assert on.token_ids == [token] * 5


def test_the_space_before_the_first_word_stays(model):
    """Decoders of SentencePiece leave out the space in front of a text, which an output is not."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from engine.runtime.llm import LLM, SamplingParams

    base = Tokenizer(models.WordLevel({f"▁w{number}": number for number in range(512)}, unk_token="▁w0"))
    base.decoder = decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=base)
    llm = LLM(str(model), tokenizer=words)
    assert words.decode([7, 8]) == "w7 w8"
    for ask in (SamplingParams(temperature=0, max_tokens=4), SamplingParams(beam_width=2, max_tokens=4)):
        for out in llm.generate([[5, 6]], ask)[0].outputs:
            assert out.text == "".join(
                f" w{token}" for token in out.token_ids if token or not out.stop_reason
            )


def test_a_prompt_of_no_tokens_is_refused_where_an_empty_text_has_one(llm, monkeypatch):
    monkeypatch.setattr(type(llm.get_tokenizer()), "encode", lambda self, text, **_: [5])
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate({"prompt_token_ids": []})


@pytest.mark.parametrize(
    ("text", "stops", "found"),
    [
        ("a User:", ["User:", " User:"], (2, "User:")),  # both end here: the first of the list
        ("a User:", [" User:", "User:"], (1, " User:")),
        ("xabcz", ["abcz", "b"], (2, "b")),  # whole before the other is
        ("xa", ["b"], None),
    ],
)
def test_the_stop_string_that_is_whole_first_ends_a_text(text, stops, found):
    from engine.runtime.text import find_stop

    assert find_stop(text, stops, 1) == found


def test_a_bad_word_is_hidden_at_the_begin_of_a_text_too():
    from engine.runtime.requests import encode_bad_words

    words = tokenizer()
    assert encode_bad_words([" cat"], words) == encode_bad_words(["cat"], words)
    assert words.encode("cat") in encode_bad_words([" cat"], words)


def test_bad_words_are_those_of_vllm():
    """`SamplingParams.update_from_tokenizer`: a form behind a space counts where it is as long and begins otherwise."""
    from engine.runtime.requests import encode_bad_words

    forms = {
        "cat": [1],
        " cat": [2],
        "dog": [3, 4],
        " dog": [5],
        "at": [6],
        " at": [6],
        "no": [7, 8],
        " no": [7, 9],
    }

    class Words:
        def encode(self, text, add_special_tokens=True):
            return forms.get(text, [ord(text[-1])] if text.strip() else [])

    assert encode_bad_words(["cat", " cat", "cat", "dog", "at", "no"], Words()) == [
        *([1], [2], [1], [2]),
        *([3, 4], [6], [7, 8]),
    ]
    many = [chr(300 + number) for number in range(128)]
    assert len(encode_bad_words([*many, *many], Words())) == 128
    with pytest.raises(ValueError, match="are 129 in tokens, 128 at most"):
        encode_bad_words([*many, "x"], Words())
    with pytest.raises(ValueError, match="has no token"):
        encode_bad_words([" "], Words())


# -- what vLLM takes and this engine does not -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            "LLM(MODEL, hf_overrides={'rope_theta': 1e6})",
            "hf_overrides: {'rope_theta': 1000000.0} is not offered",
        ),
        ("LLM(MODEL, tensor_parallel_size=2)", "tensor_parallel_size: 2 is not offered here, only 1"),
        ("LLM(MODEL, enable_lora=True)", "enable_lora: True is not offered"),
        ("LLM(MODEL, speculative_config={'method': 'ngram'})", "speculative_config: .* no other method"),
        ("LLM(MODEL, max_logprobs=100)", "max_logprobs: 100 is not offered"),
        ("SamplingParams(thinking_token_budget=5)", "thinking_token_budget: 5 is not offered"),
        ("SamplingParams(extra_args={'a': 1})", "extra_args: {'a': 1} is not offered"),
        ("llm.generate('a', lora_request=1)", "lora_request: 1 is not offered here, only None"),
        ("llm.generate({'prompt': 'a', 'multi_modal_data': {'image': 1}})", "prompt 0 .* multi_modal_data"),
        (
            "llm.beam_search(['a'], BeamSearchParams(2, 4, temperature=0.5))",
            "temperature: 0.5: beam search takes no",
        ),
        ("LLM(llm.loaded, device='cuda')", "device: cuda, but the model is loaded: cpu"),
        ("LLM(llm.loaded, dtype='half')", "dtype: float16, but the model is loaded: float32"),
        (
            "llm.chat([], chat_template_content_format='xml')",
            "chat_template_content_format: 'xml' is not auto",
        ),
        (
            "SamplingParams.from_optional(logit_bias={'3': float('nan')})",
            "logit_bias: 3: nan is not a token id",
        ),
        (
            "llm.chat([{'role': 'user', 'content': [{'type': 'image_url'}]}])",
            "content of a message is a text",
        ),
        ("llm.embed(['a'])", "LLM.embed: vLLM has it, but this engine generates text"),
        (
            "llm.llm_engine.add_request('0', 'a', None)",
            "LLM.llm_engine: vLLM has it, but the engine is `llm.engine`",
        ),
        ("llm.update_weights({})", "LLM.update_weights: vLLM has it, but weights stay"),
        ("llm.beam_search(['a'], BeamSearchParams(2, 4, allowed_token_ids=[1]))", "beam search supports no"),
        (
            "llm.beam_search(['a'], BeamSearchParams(2, 4, watermarking=True))",
            "watermarking: True is not offered",
        ),
    ],
)
def test_what_is_not_offered_is_refused_by_name(call, says, model, llm):
    with pytest.raises((ValueError, AttributeError), match=says):
        exec(IMPORTS + call, {"MODEL": str(model), "llm": llm})


def test_a_field_that_was_set_wrong_is_refused_when_the_request_is_added(llm):
    from engine.runtime.llm import SamplingParams

    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(ValueError, match=r"top_p: 7\.0 is not above 0 and at most 1"):
        llm.generate("the cat", params)


def test_a_hub_id_fetches_nothing_that_can_hold_code(monkeypatch, model):
    import huggingface_hub

    from engine.runtime.llm import LLM

    asked = {}

    def fetched(repo, **given):
        asked.update(given, repo=repo)
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    LLM("owner/tiny", max_model_len=64, revision="main")
    assert (asked["repo"], asked["revision"]) == ("owner/tiny", "main")
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in asked["allow_patterns"])


# -- default sampling parameters --------------------------------------------------------------------------------


@pytest.fixture(name="opinionated")
def opinionated_fixture(model, tmp_path):
    """The model with a generation_config.json that says how to sample."""
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    said = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
        "max_new_tokens": 7,
        "do_sample": True,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(said | {"eos_token_id": 0}))
    return tmp_path


def test_a_checkpoint_says_how_to_sample(opinionated):
    from engine.runtime.llm import LLM, SamplingParams

    llm = LLM(opinionated)
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05, "max_tokens": 7}
    assert llm.get_default_sampling_params() == SamplingParams(**wanted)
    assert len(llm.generate("the cat", use_tqdm=False)[0].outputs[0].token_ids) <= 7


def test_neutral_parameters_and_parameters_of_ones_own_go_before_it(opinionated):
    from engine.runtime.llm import LLM, SamplingParams

    assert LLM(opinionated, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    llm = LLM(opinionated, generation_config="vllm", override_generation_config={"top_k": 3})
    assert llm.get_default_sampling_params() == SamplingParams(top_k=3)


@pytest.mark.parametrize("text", ["{", '{"temperature": -1}'])
def test_a_damaged_file_is_named(text, opinionated):
    from engine.runtime.errors import ModelError
    from engine.runtime.llm import sampling_defaults

    (opinionated / "generation_config.json").write_text(text)
    with pytest.raises(
        ModelError, match=r"generation_config\.json: .*; generation_config='vllm' leaves it out"
    ):
        sampling_defaults(str(opinionated))


# -- beams ------------------------------------------------------------------------------------------------------


def beams_of(logprobs_of, prompt, width, most, ends, penalty):
    """vLLM's beam search, without its engine: (ids, log-probability), best first."""
    going, ended = [([], 0.0)], []
    for _ in range(most):
        found = []
        for ids, score in going:
            values, tokens = logprobs_of(prompt + ids).topk(2 * width)
            for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
                (ended if token in ends else found).append(([*ids, token], score + value))
        going = sorted(found, key=lambda each: each[1], reverse=True)[:width]
    ranked = sorted([*ended, *going], key=lambda each: each[1] / len(each[0]) ** penalty, reverse=True)
    return ranked[:width]


@pytest.fixture(name="ending", scope="module")
def ending_fixture(model, tmp_path_factory):
    """The model with many end tokens, so that some of them lie behind the first of a beam's best."""
    from engine.runtime.llm import LLM

    folder = tmp_path_factory.mktemp("ending")
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(3, 512, 17)]}))
    return LLM(folder, block_size=4, audit="full")


@cases("width", [1, 2, 4], day=(2,))
@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
def test_an_end_token_behind_the_first_ends_a_beam_as_in_vllm(width, penalty, ending):
    import torch

    from engine.runtime.llm import BeamSearchParams
    from engine.runtime.models.load import original_model

    ends = {*ending.loaded.end_ids, ending.get_tokenizer().eos_token_id}
    prompts = [[5, 6, 7], [40, 41, 42, 43, 44]]
    params = BeamSearchParams(width, 7, length_penalty=penalty)
    found = ending.beam_search([{"prompt_token_ids": ids} for ids in prompts], params)
    with original_model(ending.loaded) as original, torch.inference_mode():
        for prompt, output in zip(prompts, found, strict=True):

            def logprobs_of(ids):
                return original(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)

            wanted = beams_of(logprobs_of, prompt, width, 7, ends, penalty)
            assert [one.tokens for one in output.sequences] == [prompt + ids for ids, _ in wanted]
            assert [one.cum_logprob for one in output.sequences] == pytest.approx(
                [each for _, each in wanted]
            )
            ended = any(one.finish_reason == "stop" for one in output.sequences)
            assert ended or (width, penalty) != (4, -1.0)


_BEAMS = """
import json, sys
from types import SimpleNamespace
import torch
from transformers import AutoModelForCausalLM
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.sampling_params import BeamSearchParams
folder, eos, cases = json.loads(sys.stdin.read())
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
ends = json.load(open(folder + "/generation_config.json"))
tokenizer = SimpleNamespace(eos_token_id=eos, decode=lambda ids, skip_special_tokens: "")
class Search(BeamSearchOfflineMixin):
    def __init__(self):
        kept = dict(resolve_watermarking=lambda params: None, vllm_config=None, generation_config_fields=ends)
        self.llm_engine = SimpleNamespace(input_processor=SimpleNamespace(**kept))
        self.renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    def _preprocess_cmpl(self, prompts): return [tokens_input(one) for one in prompts]
    def _lora_request_to_seq(self, given, count): return [None] * count
    def _priority_to_seq(self, given, count): return [0] * count
    def _params_to_seq(self, given, count): return [given] * count
    def _render_and_run_requests(self, prompts, params, **rest):
        return [self.answer(*each) for each in zip(prompts, params)]
    def answer(self, prompt, params):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt["prompt_token_ids"]])).logits[0, -1]
        best = logits.log_softmax(-1, dtype=torch.float32).topk(params.logprobs)
        ranked = enumerate(zip(best.indices.tolist(), best.values.tolist()), start=1)
        logprobs = {token: Logprob(value, rank) for rank, (token, value) in ranked}
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[logprobs], finish_reason="length")])
said = []
for prompt, given in cases:
    (output,) = Search().beam_search([prompt], BeamSearchParams(**given))
    said.append([(one.tokens, one.cum_logprob) for one in output.sequences])
print(json.dumps(said))
"""


@pytest.mark.nightly
@pytest.mark.skipif("PAGETWIN_VLLM" not in os.environ, reason="PAGETWIN_VLLM names no interpreter with vLLM")
def test_36_drawn_searches_give_the_beams_of_vllms_own_code(ending):
    from engine.runtime.llm import BeamSearchParams

    rng, cases = random.Random(NIGHT_SEED), []
    for number in range(36):
        prompt = [rng.randrange(1, 512) for _ in range(rng.randint(1, 40))]
        given = {
            "beam_width": rng.randint(1, 6),
            "max_tokens": rng.randint(1, 20),
            "ignore_eos": number % 6 == 0,
        }
        cases.append((prompt, given | {"length_penalty": rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0])}))
    folder, eos = str(ending.loaded.model.config._name_or_path), ending.get_tokenizer().eos_token_id
    answer = subprocess.run(
        [os.environ["PAGETWIN_VLLM"], "-c", _BEAMS], input=json.dumps([folder, eos, cases]), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    for (prompt, given), wanted in zip(cases, json.loads(answer.stdout.splitlines()[-1]), strict=True):
        (found,) = ending.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(**given))
        assert [one.tokens for one in found.sequences] == [ids for ids, _ in wanted], (prompt, given)
        scores = [one.cum_logprob for one in found.sequences]
        assert scores == pytest.approx([score for _, score in wanted], abs=1e-4)


# -- asked from vLLM --------------------------------------------------------------------------------------------

_ASK = """
import inspect, json, dataclasses
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams
def plain(value):
    try:
        json.dumps(value)
        return value
    except TypeError:
        return "?"
def of(call):
    given = [p for n, p in inspect.signature(call).parameters.items() if n != "self" and p.kind not in (2, 4)]
    return {p.name: "?" if p.default is p.empty else plain(p.default) for p in given}
print(json.dumps({"LLM": of(LLM.__init__), "generate": of(LLM.generate), "chat": of(LLM.chat),
    "has": [n for n in dir(LLM) if n[0] != "_"],
    "beam_search": of(LLM.beam_search), "SamplingParams": of(SamplingParams),
    "BeamSearchParams": of(BeamSearchParams), "StructuredOutputsParams": of(StructuredOutputsParams)}))
"""


@pytest.mark.nightly
@pytest.mark.skipif("PAGETWIN_VLLM" not in os.environ, reason="PAGETWIN_VLLM names no interpreter with vLLM")
def test_each_argument_of_vllm_is_known_with_its_default(model):
    import inspect

    from engine.runtime import llm as face
    from engine.runtime.options import options_of

    answer = subprocess.run(
        [os.environ["PAGETWIN_VLLM"], "-c", _ASK], capture_output=True, text=True, check=True
    )
    asked = json.loads(answer.stdout.splitlines()[-1])
    assert {*asked["has"]} - {*dir(face.LLM)} <= face._REFUSED.keys()
    for name in ("generate", "chat", "beam_search"):
        ours = inspect.signature(getattr(face.LLM, name)).parameters
        assert asked[name].keys() <= ours.keys(), name
    for name, value in asked["SamplingParams"].items():
        if not name.startswith("_") and value != "?":
            face.SamplingParams(**{name: value})
    taken = inspect.signature(face.LLM.__init__).parameters
    for name, value in asked["LLM"].items():
        if name not in taken and value != "?":
            options_of({name: value})
    for name in ("BeamSearchParams", "StructuredOutputsParams"):
        assert asked[name].keys() <= inspect.signature(getattr(face, name)).parameters.keys(), name
