"""What a checkpoint's config.json says of its shape: families and their names, experts, latent KV, windows, widths.

`checkpoint_shape` reads what `ModelShape` can describe, and `unknown_parts` names what it cannot.
"""

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from harness.config.errors import ConfigError
from harness.config.paths import CheckpointFile, read_checkpoint
from harness.cost.model_shape import Experts, LatentKV, ModelShape

# Families whose configuration in transformers ties input and output embeddings if the checkpoint does not say.
TIED = (
    *("bloom", "cohere", "cohere2", "ernie4_5", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2"),
    *("gpt_bigcode", "mpt", "opt", "smollm3", "starcoder2"),
)
# Families with two MLP matrices instead of three.
UNGATED = (
    *("apertus", "arcee", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "nemotron"),
    *("opt", "phi", "starcoder2"),
)
_LLAMA_4 = "llama4_text"
WITH_EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_next"),
    _LLAMA_4,
)
_LATENT = ("deepseek_v2", "deepseek_v3")
# Families whose every layer is attention (full or windowed) or linear attention, and an MLP or experts: what
# `ModelShape` describes.
KNOWN = (
    *(*TIED, *UNGATED, *WITH_EXPERTS),
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "stablelm", "olmo", "olmo2", "granite"),
    *("exaone4", "glm", "glm4", "helium", "seed_oss", "qwen3_5_text"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Families, and keys of any other, whose layers are of several kinds by a rule that is not read here.
_MIXED_WINDOWS = ("cohere2", "ministral", "smollm3")  # without a window all layers are alike
_MIXED = (*_MIXED_WINDOWS, "exaone4", "qwen3_next", "qwen3_5_text")
# Families that heed sliding_window: where use_sliding_window says so alone, in all layers alike, and all of them.
_ASKED_WINDOWS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
_ALIKE = ("mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2")
_WINDOWED = (*_ASKED_WINDOWS, *_ALIKE, *_MIXED_WINDOWS, "exaone4", "gemma2", "gemma3_text", "gpt_oss")
# What a family must write, because its class in transformers has a default of its own: asked where that is missing.
_UNSAID = {
    "head_dim": (
        *("ernie4_5", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss", "helium"),
        *("qwen3", "qwen3_5_text", "qwen3_next", "seed_oss", _LLAMA_4),
    ),
    "attention_chunk_size": (_LLAMA_4,),
    "sliding_window": ("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "ministral", "mistral"),
    "multi_query": ("falcon", "gpt_bigcode"),
    "shared_expert_intermediate_size": ("qwen2_moe", "qwen3_next"),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "first_k_dense_replace", "n_shared_experts"), _LATENT),
}
_RULES = ("full_attention_interval", "sliding_window_pattern")
_SLIDING = "sliding_attention"
_LINEAR = "linear_attention"
_CHUNKED = "chunked_attention"
_MOST_LAYERS = 10**6  # as of model.layers
_EVERY_EIGHT_BITS = ("fp8", "fbgemm_fp8")
_GROUPED = ("gptq", "awq")
# What is not quantised: norms, routers, embeddings and other parts than the text's alone, or layers differ in width.
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore")
_BY_RULE = ("dynamic", "modules_in_block_to_quantize", "lm_head")  # an embedding, which counts as whole
_NO_MATRIX = re.compile(
    r"(^|\.)((lm_head|\w*embed\w*|\w*norm|(\w+_)?gate|router)$|visual|vision|audio|merger|multi_modal|mm_)"
)
# Where quantisers write what they did beside a config.json that may not say it.
_SECTIONS = ("quantization", "compression")  # the second of compressed-tensors' first versions
_BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_MOST = 10**9  # of any number of a shape; more is a mistake, and sizes in bytes would not fit 64 bits


class CheckpointFacts:
    """The facts of the checkpoint folder `path`, asked under the names that its family uses.

    Families of transformers call the same number differently (`n_embd`, `d_model`, `hidden_size`). A missing or
    impossible number is refused, because a default in its place would be a silent error.

    Raises:
        ConfigError: config.json cannot be read, or is no object. `key` is the setting that named the folder.
    """

    def __init__(self, path: str, key: str = "model.path") -> None:
        self._key = key
        self._read = read_checkpoint(path, key)
        self._facts = self._read.text

    @cached_property
    def _filled(self) -> Any:
        return _as_transformers_reads(self._read, self._key)

    def written(self, name: str) -> Any:
        """The value under `name` in the file, or None."""
        return self._facts.get(name)

    def get(self, name: str) -> Any:
        """The value under `name` as transformers reads it where it is installed and knows the family, or as written."""
        if self._filled is None:
            return self.written(name)
        # A configuration of layers that differ raises where it is asked for such a value.
        values = vars(self._filled)
        return values[name] if name in values else getattr(self._filled, name, None)

    @property
    def quantisation(self) -> Any:
        """The section on quantised weights, which may stand outside of the part on text; else the file that has it."""
        sections = (
            part.get(f"{name}_config") for name in _SECTIONS for part in (self._facts, self._read.whole)
        )
        beside = (name for name in _BESIDE if self._read.file.with_name(name).is_file())
        return next(filter(None, sections), None) or next(beside, None)

    @property
    def ties_otherwise_outside(self) -> bool:
        """Whether a nested file ties the embeddings of the whole otherwise than those of its text: engines differ."""
        outside = self._read.whole.get("tie_word_embeddings")
        return outside is not None and bool(outside) != bool(self.get("tie_word_embeddings"))

    @property
    def family(self) -> str:
        """transformers' model_type."""
        return str(self._facts.get("model_type") or self._read.whole.get("model_type") or "")

    def check_unsaid(self) -> None:
        """Raise ConfigError where a value is missing whose default only transformers knows, which is missing too."""
        unsaid = [n for n, families in _UNSAID.items() if self.family in families and n not in self._facts]
        if unsaid and self._filled is None:
            reason = f"{unsaid[0]} is not written, and only transformers knows the default of {self.family}"
            more = f"install it (pip install '.[engine]'), or write {unsaid[0]}"
            raise ConfigError(self._key, f"{self._read.file}: {reason}: {more}")

    def wrong(self, name: str, allowed: str) -> ConfigError:
        """The error of the value under `name`; `allowed` says what it must be."""
        found = f"{self._read.file}: {name} is {self.written(name)!r}"
        return ConfigError(self._key, f"{found}, must be {allowed}")

    def number(self, *names: str, most: int = _MOST) -> int:
        """The first of `names` that is written: a whole number from 1 to `most`.

        Raises:
            ConfigError: none is written. A default of transformers would be the size of another model.
        """
        found = self._whole(names, self.written, most)
        if found is None:
            reason = f"{self._read.file}: has none of {', '.join(names)}, so the model's shape is not known"
            raise ConfigError(self._key, reason)
        return found

    def maybe(self, *names: str, most: int = _MOST) -> int | None:
        """The same of what transformers reads, or None where none is given.

        Raises:
            ConfigError: it is no whole number, below 1, or above `most`.
        """
        return self._whole(names, self.get, most)

    def _whole(self, names: tuple[str, ...], get: Callable[[str], Any], most: int) -> int | None:
        name = next((name for name in names if get(name) is not None), None)
        if name is None:
            return None
        value = get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a whole number of at least 1")
        if value > most:
            raise self.wrong(name, f"at most {most:,}")
        return value


def _as_transformers_reads(read: CheckpointFile, key: str) -> Any:
    """The configuration as the class of its family fills it in; None without transformers or for no family of it.

    The class knows the rules by which the layers of some families differ, and the defaults of values that are not
    written. It needs no torch, and no code of the checkpoint runs.
    """
    family = read.whole.get("model_type")
    if find_spec("transformers") is None:
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # takes seconds

    if family not in CONFIG_MAPPING:
        return None
    try:
        return CONFIG_MAPPING[family].from_dict(read.whole).get_text_config(decoder=True)
    except Exception as error:  # whatever that code raises, it is this file that it cannot read
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(key, f"{read.file}: transformers cannot read it as {family!r} ({what})") from error


def checkpoint_shape(facts: CheckpointFacts, element_bytes: int, kv_bytes: int | None) -> ModelShape:
    """The shape that the checkpoint describes.

    Raises:
        ConfigError: a number that it needs is missing or impossible.
    """
    heads = facts.number("num_attention_heads", "n_head", "n_heads")
    hidden = facts.number("hidden_size", "n_embd", "d_model")
    layers = facts.number("num_hidden_layers", "n_layer", "n_layers", most=_MOST_LAYERS)
    _check_kinds(facts, layers)
    mlp = facts.maybe("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    if facts.family in UNGATED:
        mlp = mlp or (facts.maybe("expansion_ratio") or 4) * hidden
    tied = facts.get("tie_word_embeddings")
    latent = _latent(facts)
    window, windowed = _windows(facts, layers)
    kv_heads = _kv_heads(facts, heads)
    if heads % kv_heads:
        raise facts.wrong("num_key_value_heads", f"a divisor of the number of heads, {heads}")
    bits = _quantised_bits(facts)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=facts.number("qk_nope_head_dim") if latent else facts.maybe("head_dim") or hidden // heads,
        intermediate=mlp or facts.number("intermediate_size"),
        vocab=facts.number("vocab_size"),
        bytes_per_element=element_bytes,
        mlp_matrices=2 if facts.family in UNGATED else 3,
        kv_bytes_per_element=kv_bytes,
        tied_embeddings=facts.family in TIED if tied is None else bool(tied),
        experts=_experts(facts, layers),
        latent=latent,
        window=window,
        windowed_layers=windowed,
        chunked=windowed > 0 and facts.family == _LLAMA_4,
        layer_bits=None if _method(facts) == "mxfp4" else bits,  # of experts alone
        expert_bits=bits,
    )


def unknown_parts(facts: CheckpointFacts, *, states: bool) -> list[str]:
    """What the checkpoint has that `ModelShape` does not describe, each in words.

    `states`: the bytes of its linear attention's states are set beside the checkpoint.
    """
    found = [*_unknown_experts(facts)]
    if facts.get("is_heterogeneous") or facts.written("per_layer_config"):
        found.append("layers whose heads differ in width or number (per_layer_config)")
    if shared := facts.get("num_kv_shared_layers"):
        found.append(f"layers that read K and V of others (num_kv_shared_layers = {shared})")
    if facts.get("add_cross_attention"):
        found.append("attention to an encoder's text (add_cross_attention)")
    if facts.ties_otherwise_outside:
        found.append("embeddings that are tied outside of its part on text and not in it, or the reverse")
    inner = facts.written("attn_config")
    if isinstance(inner, dict) and inner.get("kv_n_heads"):
        found.append(f"heads of K and V that transformers does not read (kv_n_heads = {inner['kv_n_heads']})")
    if facts.get("kv_lora_rank") and facts.family not in _LATENT:
        found.append(f"latent K and V (kv_lora_rank = {facts.get('kv_lora_rank')})")
    if (width := facts.get("word_embed_proj_dim")) not in (None, facts.get("hidden_size")):
        found.append(f"embeddings of another width (word_embed_proj_dim = {width})")
    if facts.family in _ALIKE and facts.get("sliding_window") and facts.written("layer_types"):
        found.append("a list of layers beside a window that transformers has in all of them (layer_types)")
    windows = _CHUNKED if facts.family == _LLAMA_4 else _SLIDING if facts.family in _WINDOWED else None
    known = {"full_attention", windows}
    other = sorted({str(kind) for kind in _layer_types(facts)} - known)
    if states and _LINEAR in other:
        other.remove(_LINEAR)
    if other:
        found.append(f"layers of other kinds ({', '.join(other)})")
    quantised = facts.quantisation
    if quantised and _quantised_bits(facts) is None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        some = ", and of some matrices alone" if _partly(facts) else ""
        found.append(f"quantised weights of a kind that it does not know (quant_method = {method}{some})")
    if not found and facts.family not in KNOWN:
        found.append(f"an architecture that it has not been taught (model_type {facts.family or 'missing'})")
    return found


def _unknown_experts(facts: CheckpointFacts) -> Iterator[str]:
    named = [name for name in _EXPERTS if facts.get(name) not in (None, 0, 1)]
    if facts.family not in WITH_EXPERTS:
        yield from (f"a mixture of experts ({name} = {facts.get(name)})" for name in named)
        return
    for name in ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"):
        if facts.get(name) not in (None, 1):
            yield f"experts in some layers only ({name} = {facts.get(name)})"
    listed = facts.written("moe_layers")
    if listed and len(listed) != facts.maybe("num_hidden_layers"):
        yield f"experts in some layers only (moe_layers = {listed})"
    if facts.get("mlp_only_layers"):
        yield f"experts in some layers only (mlp_only_layers = {facts.get('mlp_only_layers')})"


def _experts(facts: CheckpointFacts, layers: int) -> Experts | None:
    if facts.family not in WITH_EXPERTS:
        return None
    width = facts.maybe("moe_intermediate_size") or facts.number("intermediate_size")
    count = 1 if facts.family == _LLAMA_4 else facts.maybe("n_shared_experts") or 0
    shared = facts.maybe("shared_expert_intermediate_size") or width * count
    of_token = "num_experts_per_tok", "experts_per_token"
    count, active = facts.number(*_EXPERTS), facts.number(*of_token)
    if active > count:
        name = next(name for name in of_token if facts.get(name) is not None)
        raise facts.wrong(name, f"at most the number of experts, {count}")
    dense = facts.get("first_k_dense_replace") or 0
    if not isinstance(dense, int) or isinstance(dense, bool) or not 0 <= dense <= layers:
        raise facts.wrong("first_k_dense_replace", f"a whole number from 0 to the number of layers, {layers}")
    return Experts(count=count, active=active, intermediate=width, shared=shared, dense_layers=dense)


def _latent(facts: CheckpointFacts) -> LatentKV | None:
    if facts.family not in _LATENT or not facts.get("kv_lora_rank"):
        return None
    return LatentKV(
        rank=facts.number("kv_lora_rank"),
        rope_dim=facts.number("qk_rope_head_dim"),
        value_dim=facts.number("v_head_dim"),
        query_rank=facts.maybe("q_lora_rank") or 0,
    )


def _kv_heads(facts: CheckpointFacts, heads: int) -> int:
    """Grouped-query attention says how many; multi-query attention (gpt_bigcode, the first falcon) has one."""
    if facts.get("multi_query") and not facts.get("new_decoder_architecture"):
        return 1
    return facts.maybe("num_key_value_heads", "num_kv_heads") or heads


def _layer_types(facts: CheckpointFacts) -> list[Any]:
    kinds = facts.get("layer_types")
    return kinds if isinstance(kinds, list) else []


def _check_kinds(facts: CheckpointFacts, layers: int) -> None:
    """Raise ConfigError where the kinds of the layers are listed wrongly, or follow a rule of the family's code."""
    kinds = facts.written("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise facts.wrong("layer_types", f"a list of {layers} kinds, one for each layer")
    facts.check_unsaid()
    kinds = facts.get("layer_types")
    rule = next((name for name in _RULES if facts.get(name) is not None), None)
    if kinds is not None or facts.family == "gemma3_text":
        return
    windows = facts.family in _MIXED_WINDOWS and facts.get("sliding_window") is None
    if rule or (facts.family in _MIXED and not windows):
        given = f"{rule} is {facts.get(rule)!r}" if rule else f"model_type is {facts.family}"
        raise facts.wrong(
            "layer_types",
            f"a list of {layers} kinds, because {given}, which mixes kinds of layers; "
            "transformers writes the list with save_pretrained",
        )


def _chunks(facts: CheckpointFacts, layers: int) -> tuple[int | None, int]:
    """The chunk of attention and the number of layers that have it: those with rotary positions.

    Source: `Llama4Attention` in vllm/model_executor/models/llama4.py (0.33), `Llama4TextConfig` in transformers.
    """
    chunk, rotary = facts.maybe("attention_chunk_size"), facts.get("no_rope_layers")
    if not rotary:
        every = facts.maybe("no_rope_layer_interval") or 4
        rotary = [int((layer + 1) % every > 0) for layer in range(layers)]
    if not isinstance(rotary, list) or len(rotary) < layers:
        allowed = f"a list of {layers} numbers, 0 for a layer without rotary positions"
        raise facts.wrong("no_rope_layers", allowed)
    count = sum(bool(each) for each in rotary[:layers])
    return (chunk, count) if chunk and count else (None, 0)


def _windows(facts: CheckpointFacts, layers: int) -> tuple[int | None, int]:
    """The window and the number of layers that have it, by `layer_types` or by the rule of the family."""
    if facts.family == _LLAMA_4:
        return _chunks(facts, layers)
    used = facts.get("use_sliding_window")
    unasked = used is False or (used is None and facts.family in _ASKED_WINDOWS)
    if facts.family not in _WINDOWED or not facts.get("sliding_window") or unasked:
        return None, 0
    window = facts.maybe("sliding_window")
    kinds = _layer_types(facts)
    if kinds:
        count = kinds.count(_SLIDING)
    elif facts.family in ("gemma2", "gpt_oss"):  # every other layer, from the first on
        count = (layers + 1) // 2
    elif facts.family == "gemma3_text":
        count = layers - layers // (facts.maybe("sliding_window_pattern") or 6)
    elif facts.family in _ASKED_WINDOWS and facts.family not in _ALIKE:
        count = max(0, layers - facts.number("max_window_layers"))
    else:
        count = layers
    return (window, count) if count else (None, 0)


def _quantised_bits(facts: CheckpointFacts) -> float | None:
    """Bits with scales, of the kinds whose files say them; None without quantisation, or of another kind."""
    section, method = facts.quantisation, _method(facts)
    if _partly(facts) and method != "mxfp4":
        return None
    if method in _EVERY_EIGHT_BITS:
        return 8.0
    if method == "mxfp4" and facts.family == "gpt_oss":
        return 4.25
    if method in _GROUPED and isinstance(section, dict):
        bits, group = section.get("bits"), section.get("group_size")
        # A group has a scale of 16 bits and a zero of as many bits as an element.
        if type(bits) is int and type(group) is int and 1 <= bits <= 16 and group > 0:
            return bits + (16 + bits) / group
    return None


def _partly(facts: CheckpointFacts) -> bool:
    """Whether some matrices of the layers are left out of the quantisation, or have another width by a rule."""
    section = facts.quantisation
    if not isinstance(section, dict):
        return False
    left_out = [name for key in _LEFT_OUT for name in section.get(key) or ()]
    return any(section.get(key) for key in _BY_RULE) or any(
        not _NO_MATRIX.search(str(name)) for name in left_out
    )


def _method(facts: CheckpointFacts) -> str:
    section = facts.quantisation
    return str(section.get("quant_method") or "") if isinstance(section, dict) else ""
