"""`advise --tokenizer`: chat requests through a tokenizer that is trained here, and what breaks their prefixes."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harness.capacity.chat import chat_answer, lost_prefixes, pool_sizes, read_chat, tokenizer_of
from harness.cli.main import main
from harness.config.errors import UserError
from traces.analysis.reuse import PrefixPaths, optimal_hit_tokens, reuse_profile, shared_prefix_tokens

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('the last message is an answer') }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RULES = "You are a patient helper. Answer in one sentence, name your source, and never guess. "
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} looks up one thing and says it"}}
    for name in ("weather", "search", "news")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 byte pairs with the chat template above."""
    place = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([RULES] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.save(str(place / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (place / "tokenizer_config.json").write_text(json.dumps(facts))
    return place


def request(question: str, *, system: str = RULES, tools: list | None = None, **more) -> dict:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, **({"tools": tools} if tools else {}), **more}


def written(tmp_path: Path, requests: list) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def lost(path: Path, folder: Path, least: int = 16):
    tokenizer = tokenizer_of(str(folder))
    log = read_chat(path, tokenizer)
    return list(lost_prefixes(log, shared_prefix_tokens(log.trace()), tokenizer, least))


def test_prompts_are_the_tokens_of_the_chat_template(tmp_path, folder):
    tokenizer = tokenizer_of(str(folder))
    asked = request("why?", tools=TOOLS)
    (prompt,) = read_chat(written(tmp_path, [asked]), tokenizer).prompts
    direct = tokenizer.apply_chat_template(
        asked["messages"], tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert prompt.tolist() == direct


def test_a_date_in_the_system_prompt_is_named_with_the_tokens_that_it_costs(tmp_path, folder):
    dated = [request("why?", system=f"Today is 2026-11-{day}. {RULES}") for day in (23, 24)]
    (found,) = lost(written(tmp_path, dated), folder)
    assert found.cause == "a number, date or identifier in the system message (number 1)"
    assert "2026-11-23" in found.example
    assert "2026-11-24" in found.example
    assert found.line == 2
    tokenizer = tokenizer_of(str(folder))
    after = len(tokenizer(f"3. {RULES}</system><user>why?")["input_ids"])
    assert abs(found.tokens - after) <= 3  # tokens may join over the ends of the text


@pytest.mark.parametrize(
    "when", [float("nan"), float("inf"), 10**400, 1_700_000_000_000, True, [1], {"s": 1}]
)
def test_a_time_that_is_none_or_of_milliseconds_is_refused_with_its_line(tmp_path, folder, when):
    path = written(tmp_path, [request("why?", timestamp=1.0), request("how?", timestamp=when)])
    with pytest.raises(UserError, match=r"chat.jsonl, line 2: timestamp: Unix time in seconds"):
        read_chat(path, tokenizer_of(str(folder)))


@pytest.mark.parametrize("calls", [[{"id": "a"}], [1], [{"function": "look"}]])
def test_calls_of_tools_without_a_function_are_refused_with_their_line(tmp_path, folder, calls):
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    path = written(tmp_path, [request("why?"), {"messages": [answer, *request("how?")["messages"]]}])
    with pytest.raises(UserError, match=r"chat.jsonl, line 2: .*a line is one chat request"):
        read_chat(path, tokenizer_of(str(folder)))


OTHER_PROMPTS = [
    {"chat_template": "{{ messages }}"},
    {"documents": [{"text": "a"}]},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
]


@pytest.mark.parametrize("more", [*OTHER_PROMPTS, {"messages": [{"role": "user", "content": "half \ud800"}]}])
def test_a_request_whose_prompt_would_be_another_is_left_out_and_counted(tmp_path, folder, more):
    path = written(tmp_path, [request("why?", add_generation_prompt=True), {**request("how?"), **more}])
    log = read_chat(path, tokenizer_of(str(folder)))
    assert len(log.prompts) == 1
    assert sum(log.left_out.values()) == 1


def test_a_template_that_writes_nothing_is_refused(tmp_path, folder):
    tokenizer = tokenizer_of(str(folder))
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(UserError, match="1 whose prompt is empty"):
        read_chat(written(tmp_path, [request("why?")]), tokenizer)


def test_tools_in_another_order_are_named(tmp_path, folder):
    path = written(tmp_path, [request("why?", tools=TOOLS), request("why?", tools=TOOLS[::-1])])
    (found,) = lost(path, folder)
    assert found.cause == "tools in another order"
    assert "weather, search, news against news, search, weather" in found.example


def test_the_first_of_two_messages_that_differ_is_the_one_that_breaks(tmp_path, folder):
    turns = [request(f"at {hour} o'clock, {RULES}", system=f"Turn {hour}. {RULES}") for hour in (1, 2)]
    (found,) = lost(written(tmp_path, turns), folder)
    assert "in the system message (number 1)" in found.cause


def test_a_next_turn_and_another_question_lose_nothing(tmp_path, folder):
    first = request("why?")
    more = [*first["messages"], {"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"}]
    assert lost(written(tmp_path, [first, {"messages": more}, request("who was it?")]), folder) == []


def test_a_salt_per_tenant_keeps_users_apart(tmp_path, folder):
    path = written(tmp_path, [request("why?", user=name) for name in "abab"])
    log = read_chat(path, tokenizer_of(str(folder)))
    hits = [
        reuse_profile(log.trace(tenants=salted), 16, spare_last_token=True).hit_tokens(1e9)
        for salted in (False, True)
    ]
    assert hits[0] * 2 == hits[1] * 3  # three of four prompts are found, and of two users one each


def test_the_bound_is_above_the_curve_at_every_pool(tmp_path, folder):
    questions = [request(f"{RULES * (1 + number % 3)} question {number % 7}") for number in range(60)]
    log = read_chat(written(tmp_path, questions), tokenizer_of(str(folder)))
    paths = PrefixPaths(log.trace())
    profile = reuse_profile(paths, 16, spare_last_token=True)
    sizes = pool_sizes(profile, max(map(len, log.prompts)))
    assert len(sizes) == 10
    assert all(profile.hit_tokens(size) <= optimal_hit_tokens(paths, 16, size) for size in sizes)


def test_what_the_template_refuses_and_what_is_no_text_is_named_first(tmp_path, folder):
    picture = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    ended = {"messages": [{"role": "assistant", "content": "so"}]}
    path = written(tmp_path, [request("why?"), {"messages": [{"role": "user", "content": picture}]}, ended])
    tokenizer = tokenizer_of(str(folder))
    first = next(iter(chat_answer(read_chat(path, tokenizer), tokenizer, 16, "DIR")))
    assert "1 of 3 requests" in first
    assert "Left out: 1, with parts that are no text, whose tokens are not known." in first
    assert "cannot render these messages" in first


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{}", "messages: list expected, missing"),
        ('{"messages": []}', "messages: is empty"),
        ('{"messages": [{"content": "a"}]}', "role: str expected"),
        ("[1", "line 2: "),
    ],
)
def test_a_line_that_is_no_chat_request_is_named(tmp_path, folder, line: str, reason: str):
    path = written(tmp_path, [request("why?")])
    path.write_text(path.read_text() + line)
    with pytest.raises(UserError, match=reason) as found:
        read_chat(path, tokenizer_of(str(folder)))
    assert "line 2" in str(found.value)


def test_code_in_the_folder_is_never_run(tmp_path, folder):
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    facts |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="no tokenizer can be loaded"):
        tokenizer_of(str(tmp_path))


def test_the_command_prints_the_curve(tmp_path, folder, capsys):
    path = written(tmp_path, [request(f"why {number}?", user="ab"[number % 2]) for number in range(8)])
    assert main(["advise", str(path), "--tokenizer", str(folder), "cache.block_size=8"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Counted: all 8 requests of chat.jsonl")
    assert "bound of any eviction (Belady)" in said
    assert "A salt per tenant (cache_salt, 2 users)" in said


def test_a_model_beside_the_tokenizer_is_refused(tmp_path, folder, capsys):
    path = written(tmp_path, [request("why?")])
    assert main(["advise", str(path), "--tokenizer", str(folder), "--model", "llama3_8b"]) == 2
    assert "not with --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 29, 30])
def test_few_chat_requests_are_said_to_be_too_few(tmp_path, folder, count):
    tokenizer = tokenizer_of(str(folder))
    log = read_chat(written(tmp_path, [request("why?")] * count), tokenizer)
    found = [line for line in chat_answer(log, tokenizer, 16, "DIR") if "too few" in line]
    assert found == [f"note: {count} requests are too few to answer from; give 30 or more"] * (count < 30)
