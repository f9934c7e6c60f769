"""Values that no field expects, and bodies and parameters made of them; the same for the same seed."""

import random

FIELDS = (
    *(
        "prompt",
        "messages",
        "model",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
    ),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "use_beam_search", "length_penalty"),
    *(
        "early_stopping",
        "priority",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
    ),
    *(
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "cache_salt",
    ),
    *(
        "return_token_ids",
        "return_tokens_as_token_ids",
        "stream",
        "stream_options",
        "max_tokens",
        "logprobs",
        "echo",
    ),
    *(
        "add_special_tokens",
        "top_logprobs",
        "max_completion_tokens",
        "add_generation_prompt",
        "best_of",
        "suffix",
    ),
    *("continue_final_message", "chat_template_kwargs", "tools", "response_format", "user", "unheard_of"),
    *("structured_outputs",),
)
PARAMETERS = (
    *(
        "n",
        "beam_width",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "max_tokens",
        "stop",
        "stop_token_ids",
    ),
    *(
        "include_stop_str_in_output",
        "ignore_eos",
        "logprobs",
        "length_penalty",
        "early_stopping",
        "min_tokens",
    ),
    *(
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
    ),
    *("prompt_logprobs", "truncate_prompt_tokens", "skip_special_tokens", "detokenize", "output_kind"),
    *("structured_outputs",),
)
NUMBERS = (
    0,
    1,
    2,
    3,
    -1,
    7,
    0.5,
    1.0,
    1.5,
    -0.5,
    2.5,
    16,
    100,
    511,
    512,
    2**31,
    2**63,
    2**64,
    10**30,
    1e-9,
    1e300,
)
TEXTS = (
    "",
    " ",
    "a",
    "the cat",
    "0",
    "-1",
    "1e9",
    "null",
    "\u0000",
    "naïve café 日本 🙂",
    "<end>",
    "x" * 300,
    "never",
)
MESSAGES = ({"role": "user", "content": "the fox"}, {"role": "assistant", "content": None}, {"role": 5}, {})


def value(rng, depth=0):
    """Any JSON value, small ones more often."""
    kind = rng.randrange(9 if depth < 2 else 6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.choice((True, False, None))
    if kind == 4:
        return rng.randrange(512)
    if kind == 5:
        return rng.uniform(-2, 2)
    if kind == 6:
        return {rng.choice((*TEXTS, "41", "7")): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    if kind == 7:
        return [rng.randrange(512) for _ in range(rng.randrange(6))]
    return [value(rng, depth + 1) for _ in range(rng.randrange(4))]


def fitting(rng, name):
    """A value that the field might take."""
    choices = {
        "prompt": ("the cat", "a dog, again", [5, 9, 2], ["the cat", "a"], [[5, 6], [7]]),
        "messages": ([MESSAGES[0]], [MESSAGES[0], rng.choice(MESSAGES)]),
        "model": ("tiny",),
        "stop": (["a", " b"], "e"),
        "logit_bias": ({"41": 5, "7": -100}, {}),
        "bad_words": (["a", "the cat"], []),
        "allowed_token_ids": ([3, 41, 77],),
        "stop_token_ids": ([3, 41], []),
        "stream_options": ({"include_usage": True, "continuous_usage_stats": True},),
        "cache_salt": ("tenant",),
        "structured_outputs": (
            {"regex": "a+"},
            {"choice": ["a", "b"]},
            {"json_object": True},
            {"regex": "["},
        ),
        "response_format": ({"type": "json_object"}, {"type": "text"}),
        "chat_template_kwargs": ({"mood": "merry"}, {"tokenize": True}),
    }
    return (
        rng.choice(choices[name])
        if name in choices
        else rng.choice((0, 1, 2, 3, 0.5, 1.0, True, False, None))
    )


def body(rng, *, chat):
    """A request's body: a proper start, some fields that fit, and some that hold anything."""
    found = {"messages": [MESSAGES[0]]} if chat else {"prompt": "the cat"}
    found |= {"max_tokens": rng.randrange(1, 8)}
    for name in rng.sample(FIELDS, rng.randrange(1, 7)):
        found[name] = fitting(rng, name) if rng.random() < 0.6 else value(rng)
    return found


def parameters(rng):
    """Keywords of `SamplingParams`."""
    found = {"max_tokens": rng.randrange(1, 8)}
    for name in rng.sample(PARAMETERS, rng.randrange(1, 6)):
        found[name] = fitting(rng, name) if rng.random() < 0.6 else value(rng)
    if isinstance(bias := found.get("logit_bias"), dict):
        found["logit_bias"] = {int(key) if key.isdigit() else key: one for key, one in bias.items()}
    return found


def seeded(number):
    return random.Random(number)
