"""The guard at load: does an architecture compute on paged KV what it computes natively?

Two requests run natively, one after the other and whole. The same requests run on paged KV, together, in two pieces
and three single tokens. The logits must agree in float32. Whatever an architecture does besides attention over its own
K and V shows here: a state that is carried on, keys that only a mask hides, positions that it counts itself, attention
to something else, layers that share a cache. No list of names is needed. A small copy of the model runs, so that it
takes a fraction of a second; the verdict is kept for the process.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.core.memory.group_layout import KVGroup
from engine.core.options import GroupKind
from engine.runtime.attention.layer import NO_TIMER, PagedStep, use_paged_attention
from engine.runtime.attention.metadata import PrefillRow, StepLayout, TorchMetadata, slots_of
from engine.runtime.attention.state import StateStep, find_mixers, mixing, state_shapes
from engine.runtime.errors import ModelError
from engine.runtime.group_pool import StateShape, StateView, new_ends, state_bytes, state_numbers
from engine.runtime.kv_pool import KVPool
from engine.runtime.models.probe import ShapeProbe, longest_sequence, probe_layers, run_flat, said
from paged_kernels import Workspace
from paged_kernels.private import attention_of, new_model

HEADS, HEAD_DIM = 4, 16
WINDOW = 5  # tokens of a sliding window or chunk in the copy
VOCAB = 96
FIRST_ID = 8  # the ids below it may be special tokens
_WEIGHTS = 0.125  # standard deviation of random weights: 1 / sqrt(64) keeps the scale of what passes a layer
_LONGEST = 8.0  # taken from biases of time steps: exp(-8) is below every limit of a step that a model has


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WIDTHS = _keys(
    """hidden_size d_model n_embd dim emb_dim embedding_dim embedding_size word_embed_proj_dim input_embedding_size
    output_embedding_size dim_model_base hidden_size_global vision_output_dim out_hidden_size ple_embed_dim
    ngram_embed_dim"""
)
_HEADS = _keys(
    """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads
    num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads index_n_heads indexer_n_heads
    linear_num_heads linear_num_value_heads linear_num_key_heads"""
)
_KV_HEADS = _keys(
    """num_key_value_heads num_kv_heads kv_n_heads n_head_kv swa_num_key_value_heads num_global_key_value_heads"""
)
_HEAD_DIMS = _keys(
    """head_dim d_head dim_head attention_head_size kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim
    swa_head_dim global_head_dim index_head_dim indexer_head_dim linear_head_dim linear_key_head_dim
    linear_value_head_dim rotary_dim swa_v_head_dim"""
)
_VOCABS = _keys("vocab_size decoder_vocab_size vocab_size_per_layer_input text_vocab_size")
_WINDOWS = _keys(
    """sliding_window sliding_window_size attention_chunk_size window_size local_attention attention_window_size
    keep_window_size"""
)
# A number, and the keys whose values are at most this number in the copy. What an indexer keeps, in tokens and
# in blocks, is less than the test sequences have.
_LARGEST = {
    32: """
        intermediate_size ffn_dim n_inner d_inner dff dim_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size dense_intermediate_size intermediate_size_mlp router_hidden_size
        feed_forward_size hidden_size_per_layer_input""",
    16: """
        kv_lora_rank q_lora_rank o_lora_rank gated_norm_rank adapter_rank laurel_rank hc_lowrank d_rel mamba_d_state
        mamba_chunk_size ssm_state_size""",
    4: """
        num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num index_topk index_block_size
        indexer_budget""",
    2: """
        num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k_experts n_group
        indexer_compress_ratio""",
    1: """
        topk_group num_expert_group n_shared_experts num_shared_experts index_topk_blocks index_local_blocks""",
    4096: "max_position_embeddings n_positions max_target_positions n_ctx max_seq_len",
}
_SMALL = {key: largest for largest, keys in _LARGEST.items() for key in keys.split()}
# a state beside attention: its heads x width = 2 x 64, the width of the residual stream; of Zamba's attention too
_EXACT = {
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_headdim": 16,
    "mamba_d_ssm": 128,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
_UNLIKE = "per_layer_config"  # what some layers have in place of the values of all: Gemma 4's wider heads
_WEIGHT_SCALES = _keys("initializer_range init_std initializer_factor")
_DROPPED = _keys(  # not about the architecture; some classes do not take their own defaults back
    """quantization_config dtype torch_dtype id2label label2id transformers_version _name_or_path output_attentions
    output_hidden_states return_dict"""
)


def small_copy(model: Any, *, head_dim: int = HEAD_DIM) -> Any:
    """A small model of the same classes in float32 on the CPU, always with the same random weights.

    Raises what the model's code raises for sizes that it does not allow.
    """
    config = small_config(model.config, head_dim=head_dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        copy = new_model(type(model), config)
        with torch.no_grad():
            for parameter in copy.parameters():
                if parameter.dim() == 1:  # norms, biases and sinks are all alike in a new model
                    parameter.add_(torch.randn_like(parameter) * _WEIGHTS)
            for name, parameter in copy.named_parameters():
                if name.endswith(".dt_bias"):  # a new model's states fade within a token
                    parameter.sub_(torch.linspace(_LONGEST, 0, parameter.numel()).view_as(parameter))
                elif name.endswith(".D"):  # what passes a state by hides it
                    parameter.zero_()
    return copy.eval()


def small_config(config: Any, *, head_dim: int = HEAD_DIM, **more: Any) -> Any:
    """The configuration of the small copy; `more` replaces values of it."""
    longest = longest_sequence(config.get_text_config()) or math.inf
    return type(config).from_dict(_reduced(config.to_dict(), longest, head_dim) | more)


def _reduced(values: Mapping[str, Any], longest: float, head_dim: int) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key not in _DROPPED}
    small = {key: _value(key, value, values, longest, head_dim) for key, value in kept.items()}
    for layer, own in (values.get(_UNLIKE) or {}).items():
        if own.get("head_dim", values.get("head_dim")) != values.get("head_dim"):
            small[_UNLIKE][layer]["head_dim"] = 2 * head_dim
    return small


def _value(key: str, value: Any, beside: Mapping[str, Any], longest: float, head_dim: int) -> Any:
    if isinstance(value, Mapping):
        return _reduced(value, longest, head_dim)
    if isinstance(value, list):
        return [_value(key, one, beside, longest, head_dim) for one in value]
    if key in _WEIGHT_SCALES and isinstance(value, float):
        return _WEIGHTS
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return _number(key, value, beside, longest, head_dim)


def _number(key: str, value: int, beside: Mapping[str, Any], longest: float, head_dim: int) -> int:
    if key.endswith(("token_id", "token_index", "token_ids")):
        return value if 0 <= value < FIRST_ID else 1
    if key in _WINDOWS:
        return min(value, WINDOW) if 0 < value < longest else value
    if key in _KV_HEADS:
        heads = next((beside[name] for name in _HEADS if isinstance(beside.get(name), int)), value)
        return HEADS if value >= heads else 1 if value == 1 else HEADS // 2
    if key == "qk_head_dim":
        return 2 * head_dim
    if key in _EXACT:
        return _EXACT[key]
    sizes = ((_WIDTHS, HEADS * head_dim), (_HEADS, HEADS), (_HEAD_DIMS, head_dim), (_VOCABS, VOCAB))
    for names, small in sizes:
        if key in names and value:
            return small
    return min(value, _SMALL.get(key, value))


# Relative to how far the logits of one request's tokens lie apart. Another attention moves them by about as much.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}  # relative to the largest logit
_BLOCK = 4
_BLOCKS = ((1, 3, 5, 7), (2, 4, 6, 8))  # of the two requests: they alternate in the pool
_LENGTHS = (14, 11)


class ArchitectureVerdict(NamedTuple):
    """What was found: why the model would give wrong tokens, or None; and whether its layers with a state go on from it
    by one token alone, because transformers begins longer pieces without a state."""

    reason: str | None
    singly: bool = False


_verdicts: dict[tuple[type, str], ArchitectureVerdict] = {}


class _Piece(NamedTuple):
    """Tokens `start` to `end` of one request."""

    request: int
    start: int
    end: int


_Step = Sequence[_Piece]  # pieces of one token come first
_WHOLE: tuple[_Step, ...] = ((_Piece(0, 0, 14),),)
_CHUNKS: tuple[_Step, ...] = (
    (_Piece(0, 0, 8),),
    (_Piece(0, 8, 11),),
    *((_Piece(0, token, token + 1),) for token in (11, 12, 13)),
)
_TOGETHER: tuple[_Step, ...] = (
    (_Piece(0, 0, 8), _Piece(1, 0, 6)),
    (_Piece(1, 6, 8), _Piece(0, 8, 11)),
    *((_Piece(0, 3 + token, 4 + token), _Piece(1, token, token + 1)) for token in (8, 9, 10)),
)
_COUNTS = "or counts positions itself"
_MORE_KEYS = f"it attends to other keys than it tells its attention (a mask, a bias, more inputs), {_COUNTS}"
_MORE_STATE = f"it carries more from step to step than K and V (a state), {_COUNTS}"
_REASONS = (  # tried in this order: the first that differs is the reason
    (_WHOLE, _MORE_KEYS),
    (_CHUNKS, _MORE_STATE),
    (_TOGETHER, "requests that run together change one another"),
)


def check_architecture(model: Any, name: str) -> ArchitectureVerdict:
    """Raise ModelError with the reason if the model does not compute on paged KV what it computes natively.

    `model` is on paged attention. Where no small copy can be built, the model itself runs, in its own data type.
    """
    verdict = _verdict(model)
    if verdict.reason is not None:
        raise ModelError(
            f"model {name}: {model.config.model_type} would give wrong tokens on paged KV: {verdict.reason}"
        )
    return verdict


def _verdict(model: Any) -> ArchitectureVerdict:
    # a config of unlike layers cannot be asked
    own = model.config.get_text_config().to_dict().get("head_dim")
    for head_dim in [16, own] if isinstance(own, int) and own not in (0, 16) else [16]:
        native = _small_native(model, head_dim)
        if native is None:
            continue
        copy, expected = native
        key = type(model), json.dumps(copy.config.to_dict(), sort_keys=True, default=str)
        if key not in _verdicts:
            _verdicts[key] = _difference(copy, expected)
        return _verdicts[key]
    paged = attention_of(model)  # no small copy can be built: the model itself is compared
    model.set_attn_implementation("eager")
    try:
        expected = _native(model)
    except Exception as error:
        return ArchitectureVerdict(f"it does not run natively either: {said(error)}")
    finally:
        model.set_attn_implementation(paged)
    return _difference(model, expected)


def _small_native(model: Any, head_dim: int) -> tuple[Any, list[torch.Tensor]] | None:
    """A small copy and its native logits; None for sizes that this architecture does not allow."""
    try:
        copy = small_copy(model, head_dim=head_dim)
        expected = _native(copy)
    except Exception:
        return None
    return (copy, expected) if all(bool(logits.isfinite().all()) for logits in expected) else None


def _ids(model: Any) -> list[torch.Tensor]:
    """The token ids of the two requests, each `[1, tokens]`."""
    generator = torch.Generator().manual_seed(1)
    vocab = min(model.config.get_text_config().vocab_size, VOCAB)
    ids = torch.randint(FIRST_ID, vocab, (1, sum(_LENGTHS)), generator=generator)
    return list(torch.split(ids.to(model.device), list(_LENGTHS), dim=1))


def _native(model: Any) -> list[torch.Tensor]:
    """Logits `[tokens, vocab]` of each request, alone and whole, with the model's own attention."""
    found = []
    for ids in _ids(model):
        with torch.inference_mode():
            try:  # with a cache, as `generate()` computes them
                logits = model(input_ids=ids, use_cache=True).logits
            except Exception:  # the model's own cache does not work
                logits = model(input_ids=ids, use_cache=False).logits
        found.append(logits[0].float())
    return found


def _difference(model: Any, expected: Sequence[torch.Tensor]) -> ArchitectureVerdict:
    """Why the logits on paged KV differ from the expected ones, if they do."""
    try:
        use_paged_attention(model, model.config.model_type)
        runner = _PagedRuns(model)
        if runner.differs(_TOGETHER, expected) is None:
            return ArchitectureVerdict(None)
        if runner.mixers and runner.differs(_TOGETHER, expected, singly=True) is None:
            return ArchitectureVerdict(None, singly=True)
        for steps, reason in _REASONS:
            found = runner.differs(steps, expected)
            if found is not None:
                return ArchitectureVerdict(f"{reason} [{found}]")
    except ModelError as error:
        return ArchitectureVerdict(str(error))
    raise AssertionError("the runs together differed before and agree now")


class _PagedRuns:
    """Runs the two requests on paged KV and compares the logits."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.mixers = find_mixers(model, FIRST_ID, ShapeProbe())
        self._states = state_shapes(self.mixers)
        with mixing(self.mixers, None):
            self._shapes = probe_layers(model, model.config.model_type, FIRST_ID, list(self._states)).shapes
        self._ids = _ids(model)

    def differs(
        self, steps: Sequence[_Step], expected: Sequence[torch.Tensor], *, singly: bool = False
    ) -> str | None:
        """Where the logits of the steps first differ from the expected ones, or what failed; None if all agree."""
        pool = KVPool(
            self._shapes, num_blocks=8, block_size=_BLOCK, dtype=self._model.dtype, device=self._model.device
        )
        states = _state_pages(self._states, self._model)
        for number, step in enumerate(steps):
            try:
                found = self._run(step, pool, states, singly)
            except ModelError:
                raise
            except Exception as error:
                return f"step {number}: {said(error)}"
            wanted = torch.cat([expected[piece.request][piece.start : piece.end] for piece in step])
            wanted = wanted[self._kept(step)]
            if found.shape != wanted.shape:
                reason = f"asked for the logits of {len(wanted)} tokens of a step it gives {len(found)}"
                raise ModelError(reason)
            apart = self._error(found, wanted, expected)
            if not apart <= 1:  # NaN differs too
                return f"step {number}: logits differ by {apart:.3g} times the tolerance"
        return None

    def _error(self, found: torch.Tensor, wanted: torch.Tensor, expected: Sequence[torch.Tensor]) -> float:
        """The largest difference in units of the tolerance."""
        dtype, largest = self._model.dtype, max(float(logits.abs().max()) for logits in expected)
        apart = max(float((logits - logits.mean(dim=0)).abs().max()) for logits in expected)
        allowed = _TOLERANCE[dtype] * apart + _ROUNDING[dtype] * largest
        return float((found - wanted).abs().max() / allowed)

    def _kept(self, step: _Step) -> torch.Tensor:
        """The flat positions whose logits are compared: not all of them, as in the engine."""
        tokens = sum(piece.end - piece.start for piece in step)
        return torch.arange(1 if tokens > len(step) else 0, tokens, device=self._model.device)

    @torch.inference_mode()
    def _run(self, step: _Step, pool: KVPool, states: StateView, singly: bool) -> torch.Tensor:
        device = self._model.device
        ids = torch.cat([self._ids[piece.request][:, piece.start : piece.end] for piece in step], dim=1)
        positions = np.concatenate([np.arange(piece.start, piece.end) for piece in step])
        tables = [np.array(_BLOCKS[piece.request]) for piece in step]
        spans = [
            slots_of(table, piece.start, piece.end, _BLOCK) for table, piece in zip(tables, step, strict=True)
        ]
        layout, slots = _layout(step, tables), torch.from_numpy(np.concatenate(spans)).to(device)
        paged = PagedStep(TorchMetadata(layout, pool, Workspace()), slots, pool, NO_TIMER)
        flat = torch.from_numpy(positions)[None].to(device)
        mixed = dict.fromkeys(self._states, StateStep(layout, states, positions, singly=singly))
        with mixing(self.mixers, mixed):
            return run_flat(self._model, ids, flat, paged, self._kept(step)).float()


def _state_pages(states: Mapping[int, StateShape], model: Any) -> StateView:
    """Memory for the states of all layers that keep one, in pages that end with the blocks of K and V."""
    empty, pages = torch.empty(0, dtype=model.dtype, device=model.device), 1 + sum(map(len, _BLOCKS))
    keys = [empty] * (1 + max(states, default=0))
    for layer, shape in states.items():
        keys[layer] = empty.new_full((pages, state_numbers(shape, model.dtype)), torch.nan)
    nothing = [each[:, :0] if each.dim() > 1 else each for each in keys]
    size = max(map(state_bytes, states.values()), default=1)
    group = KVGroup(GroupKind.state, len(states), 0, _BLOCK, size, size * len(states))
    ends = new_ends(len(states), pages)
    return StateView(0, group, tuple(states), keys, nothing, 0, model.device, states, ends)


def _layout(step: _Step, tables: Sequence[np.ndarray]) -> StepLayout:
    """The layout of a step: all of its pieces are decode rows, or all are prefill rows."""
    if all(piece.end - piece.start == 1 for piece in step):
        return StepLayout(np.stack(tables), np.array([piece.end for piece in step]), [])
    rows, start = [], 0
    for piece, table in zip(step, tables, strict=True):
        length = piece.end - piece.start
        rows.append(PrefillRow(table[: -(-piece.end // _BLOCK)], start, length, piece.end))
        start += length
    return StepLayout(np.zeros((0, 0), dtype=np.int64), np.zeros(0, dtype=np.int64), rows)
