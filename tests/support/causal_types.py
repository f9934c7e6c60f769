"""Every causal type that the installed transformers knows, as a small random model, and what the engine says to it."""

import re

QUICK = (  # a type of each kind of answer
    *(
        "llama",
        "gemma3_text",
        "bert+decoder",
        "qwen2_moe+window",
        "phimoe+window",
        "bart",
        "zaya",
        "deepseek_v32",
    ),
    *("whisper", "big_bird", "diffllama", "mamba", "moshi", "nemotron_h", "gemma4_text"),
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ASSISTANT = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 6,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
INDEXER = {
    "num_hidden_layers": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
OWN_VALUES = {  # where the defaults of transformers give no model, a very large one, or one without attention
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2},
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "gemma4_assistant": {"text_config": ASSISTANT},
    "gemma4_unified_assistant": {"text_config": ASSISTANT},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 4},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
}
SMALL_VALUES = {  # after the reduction
    "blt": {},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "recurrent_gemma": {"lru_width": 64},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32]},
    "rwkv": {"attention_hidden_size": 64},
}


SWITCHES = {"window": {"sliding_window": 5, "use_sliding_window": True}, "decoder": {"is_decoder": True}}
PROMPTS, NEW = (3, 30, 21), 5  # tokens
NUMBERS = re.compile(r" \[step .*$")  # what a refusal says of the numbers that it found


def names():
    """Every causal type; with `+window` and `+decoder` the types whose defaults leave these switched off."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found.append(kind)
        values = default_config(kind).to_dict()
        if "sliding_window" in values and not (
            values["sliding_window"] and values.get("use_sliding_window", True)
        ):
            found.append(f"{kind}+window")
        if values.get("is_decoder") is False and not values.get("is_encoder_decoder"):
            found.append(f"{kind}+decoder")
    return found


def default_config(name):
    from transformers import AutoConfig

    kind, _, switch = name.partition("+")
    if kind in (
        "musicgen",
        "musicgen_melody",
    ):  # the causal model has the decoder's part of the configuration
        return AutoConfig.for_model(f"{kind}_decoder")
    return AutoConfig.for_model(kind, **OWN_VALUES.get(kind, {}) | SWITCHES.get(switch, {}))


def build(name):
    """A small random model of a type. Raises what transformers raises for it."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from engine.runtime.models.guard import small_config

    torch.set_num_threads(1)
    kind = name.partition("+")[0]
    config = small_config(default_config(name), **SMALL_VALUES.get(kind, {}))
    _complete(config, kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if kind in ("musicgen", "musicgen_melody"):
            made = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])._from_config
        else:
            made = AutoModelForCausalLM.from_config
        model = made(config, attn_implementation="eager").eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # no end tokens, no forced tokens
    return model


def _complete(config, kind):
    """Values that a model's code reads and its configuration does not take."""
    if kind == "dbrx":
        config.attn_config.rope_theta, config.attn_config.clip_qkv = ROPE["rope_theta"], 8.0
    if kind == "cohere_compass_text":
        config.rope_parameters = dict.fromkeys(
            ("sliding_attention", "full_attention"), ROPE | {"mrope_section": [2, 3, 3]}
        )


def answer(name):
    """`equal`, or why the type is refused or cannot be built here. AssertionError where the tokens are wrong.

    Types with a recurrent state are `equal, in groups`.
    """
    from engine.runtime.errors import ModelError
    from engine.runtime.models.load import wrap_model

    try:
        model = build(name)
    except Exception as error:
        return f"not built: {_one_line(error)}"
    try:
        loaded = wrap_model(model, name=name)
    except ModelError as error:
        return NUMBERS.sub("", str(error).removeprefix(f"model {name}: ").replace("|", "/"))
    check_tokens(loaded)
    if not loaded.mixers:
        return "equal"
    return "equal, in groups: recurrent state" + (", prompts token by token" if loaded.singly else "")


def _one_line(error):
    words = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {words}"[:160]


def check_tokens(loaded):
    """Tokens and log-probabilities must be those of `generate()`, in chunks and with preemption."""
    import numpy as np
    import torch

    from engine.core.options import SchedulerLimits
    from engine.runtime.group_pool import state_bytes
    from engine.runtime.llm import LLM
    from engine.runtime.models.load import original_model
    from engine.runtime.params import SamplingParams

    rng = np.random.default_rng(1)
    prompts = [rng.integers(8, 90, size).tolist() for size in PROMPTS]
    blocks = sum(-(-size // 4) for size in PROMPTS)
    limits = SchedulerLimits(16, 8, max_model_len=60)
    tokens, groups = 4 * blocks, "off"
    if loaded.mixers:  # K and V of the prompts, and the states of three sequences while a chunk of them runs
        kept = sum(state_bytes(shape) for shape in loaded.states.values()) * len(PROMPTS) * (16 // 4 + 2)
        token_bytes = 4 * sum(heads * dim for layer in loaded.group_shapes for heads, dim in layer)
        tokens, groups = 2 * tokens + -(-kept // token_bytes), "separate"
    llm = LLM(loaded, limits=limits, block_size=4, pool_tokens=tokens, groups=groups, audit="full")
    params = SamplingParams(max_tokens=NEW, temperature=0, logprobs=0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    with original_model(loaded) as model:
        for prompt, output in zip(prompts, outputs, strict=True):
            native = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NEW,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
            wanted = native.sequences[0, len(prompt) :].tolist()
            assert output.outputs[0].token_ids == wanted, (loaded.name, len(prompt))
            scores = torch.stack(native.scores)[:, 0].float().log_softmax(dim=-1)
            chosen = scores[torch.arange(NEW), torch.tensor(wanted)]
            found = torch.tensor([entry.logprob for entry in output.outputs[0].logprobs])
            assert torch.allclose(found, chosen, atol=2e-3), (loaded.name, found, chosen)
