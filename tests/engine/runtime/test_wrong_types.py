"""A value of a wrong type is refused where it is given, by name, and no other request notices."""

import numpy as np
import pytest
import torch
from serve_cases import build_engine

from engine.core.options import GroupPages
from engine.runtime.errors import EngineOptionError
from engine.runtime.options import options_of

WRONG = [
    ("max_tokens", 2.5),
    ("max_tokens", "3"),
    ("max_tokens", True),
    ("n", 1.0),
    ("beam_width", "2"),
    ("top_k", 3.5),
    ("seed", 1.5),
    ("seed", "a"),
    ("logprobs", True),
    ("temperature", "0"),
    ("temperature", None),
    ("temperature", 1j),
    ("top_p", [0.5]),
    ("min_p", torch.tensor([0.1, 0.2])),
    ("length_penalty", {}),
    ("stop", 5),
    ("stop", [5]),
    ("stop", ""),
    ("stop", b"x"),
    ("stop_token_ids", 5),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", "12"),
    ("ignore_eos", "yes"),
    ("detokenize", 1),
    ("skip_special_tokens", None),
    ("early_stopping", "sometimes"),
    ("output_kind", "now"),
    ("output_kind", {}),
]


@pytest.mark.parametrize("most", [0, -1, 1.5, "2", True])
def test_no_prompt_is_left_out_by_a_wrong_concurrency_limit(most):
    from engine.runtime.errors import ParamsError
    from engine.runtime.llm import LLM, BeamSearchParams

    llm = LLM.__new__(LLM)  # what is refused needs no model
    with pytest.raises(ParamsError, match="concurrency_limit"):
        llm.beam_search([[1, 2]], BeamSearchParams(2, 4), concurrency_limit=most)


@pytest.mark.parametrize(("field", "value"), WRONG, ids=[f"{field}-{value!r}" for field, value in WRONG])
def test_a_parameter_of_a_wrong_type_is_refused_by_name(field, value):
    from engine.runtime.errors import ParamsError
    from engine.runtime.params import SamplingParams

    with pytest.raises(ParamsError) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field


def test_numbers_of_numpy_are_numbers():
    from engine.runtime.params import SamplingParams

    params = SamplingParams(max_tokens=np.int64(3), seed=np.uint32(5), stop_token_ids=np.array([3, 4]))
    assert params.rules([0]).end_ids == {0, 3, 4}
    assert params.max_tokens == 3


def test_numbers_of_numpy_reach_the_core_and_the_kernels_as_those_of_python(model_of):
    from engine.runtime.params import SamplingParams

    engine = build_engine(model_of(), block_size=np.int64(8))
    params = SamplingParams(n=np.int64(2), max_tokens=np.int64(3), seed=np.int64(5), temperature=1.0)
    engine.add_request("a", [1, 2], params, priority=np.int64(1))
    request = engine.scheduler.waiting.head.request
    lengths = request.prompt_tokens, request.output_tokens, request.width, request.priority
    assert {*map(type, lengths), type(engine.scheduler.manager.block_size)} == {int}
    while not (outputs := engine.step()):
        assert engine.has_unfinished_requests()
    assert len(outputs[0].outputs) == 2


@pytest.mark.parametrize(
    ("prompts", "names"),
    [
        ([5, "a", 6], "prompt 0 is 5"),
        (["a", 5], "prompt 1 is 5"),
        ([[1, 2], 3.5], "prompt 1 is 3.5"),
        (7, "not 7"),
        (b"abc", "not b'abc'"),
        ([[1, 2.5]], "2.5 in the prompt is not a token id"),
        ([[True]], "True in the prompt is not a token id"),
        ([{"text": "a"}], "prompt 0 is a mapping with text"),
        ([None], "prompt 0 is None"),
    ],
)
def test_what_is_no_prompt_is_refused_and_not_left_out(prompts, names, model_of):
    from engine.runtime.errors import PromptError
    from engine.runtime.llm import LLM

    llm = LLM(model_of(), pool_tokens=256)
    with pytest.raises(PromptError) as refused:
        llm.generate(prompts)
    assert names in str(refused.value)
    assert not llm.engine.has_unfinished_requests


def test_an_array_is_one_prompt(model_of):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    llm, params = LLM(model_of(), pool_tokens=256), SamplingParams(max_tokens=3, temperature=0)
    ours = llm.generate([5, 6, 7], params)[0].outputs[0].token_ids
    for array in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7]])):
        assert llm.generate(array, params)[0].outputs[0].token_ids == ours


@pytest.mark.parametrize(
    "wrong", [{"params": {"max_tokens": 3}}, {"priority": "high"}, {"priority": 1.5}, {"request_id": 5}]
)
def test_a_wrong_request_ends_nobody_elses(wrong, model_of, prompts):
    from engine.runtime.errors import RequestError
    from engine.runtime.params import SamplingParams

    engine = build_engine(model_of())
    engine.add_request("a", prompts[0], SamplingParams(max_tokens=4, temperature=0))
    engine.step()
    with pytest.raises(RequestError):
        engine.add_request(**{"request_id": "b", "prompt": prompts[1]} | wrong)
    assert [output.request_id for output in engine.run() if output.finished] == ["a"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 0),
        ("block_size", 2.5),
        ("pool_tokens", 0),
        ("pool_tokens", "many"),
        ("kv_cache_memory_bytes", -1),
        ("host_blocks", -1),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 90),
        ("cache", "unpaged"),
        ("audit", "always"),
        ("kv_dtype", "int4"),
        ("draft_tokens", -1),
        ("hash", "md5"),
        ("hash", {}),
        ("no_such_option", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 2.5),
        ("tensor_parallel_size", 2),
        ("quantization", "awq"),
        ("scheduling_policy", "random"),
        ("prefix_caching", "false"),
        ("copy_at_fork", "no"),
        ("behind_first", 3),
        ("cuda_graphs", None),
        ("pack_weights", "no"),
        ("seed", "a"),
        ("seed", 1.5),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("limits", {"max_running": 3}),
        ("scheduler", "x"),
        ("num_gpu_blocks_override", "many"),
        ("num_gpu_blocks_override", 2.5),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(option, value, model_of):
    from engine.runtime.errors import EngineOptionError
    from engine.runtime.llm import LLM

    with pytest.raises(EngineOptionError, match=option):
        LLM(model_of(), **{option: value})


def test_vllms_names_of_options_are_understood(model_of):
    from engine.runtime.llm import LLM

    llm = LLM(
        model_of(),
        max_num_seqs=3,
        max_num_batched_tokens=40,
        max_model_len=64,
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        num_gpu_blocks_override=20,
        block_size=8,
        enforce_eager=True,
        tensor_parallel_size=1,
        swap_space=4,
    )
    limits = llm.engine.limits
    assert (limits.max_running, limits.max_batched_tokens, limits.max_model_len) == (3, 40, 64)
    # vLLM counts its null block, which holds no token
    assert (llm.engine.capacity.blocks, llm.engine.options.block_size) == (19, 8)
    assert (llm.engine.options.prefix_caching, llm.engine.options.cuda_graphs) == (False, False)


@pytest.mark.parametrize("groups", ["uniform", GroupPages.separate])
def test_a_number_of_vllms_blocks_is_refused_where_a_page_holds_a_part_of_the_layers(groups):
    with pytest.raises(EngineOptionError, match="num_gpu_blocks_override: a page of groups"):
        options_of({"num_gpu_blocks_override": 20, "groups": groups})
    assert options_of({"num_gpu_blocks_override": 20, "groups": "off"}).pool_tokens == 19 * 16


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("watermark", 1.0, "1.0 is not a number of at least 0 and below 1"),
        ("watermark", "0.1", "'0.1' is not a number of at least 0"),
        ("max_num_active_seqs", 8, "8 is not offered here, only None"),
        ("num_gpu_blocks_override", 1, "1 is not a whole number of at least 2"),
    ],
)
def test_names_of_vllm_are_no_unknown_options_and_are_refused_under_their_own_name(name, value, reason):
    with pytest.raises(EngineOptionError, match=f"^{name}: {reason}"):
        options_of({name: value})
    limits = options_of(
        {"watermark": 0.25, "max_num_active_seqs": None, "num_gpu_blocks_override": None}
    ).limits
    assert limits is not None
    assert limits.watermark == 0.25


def test_switches_a_missing_cap_and_hashes_are_taken_under_vllms_names():
    given = {"scheduler_reserve_full_isl": False, "long_prefill_token_threshold_adaptive": True}
    limits = options_of({**given, "long_prefill_token_threshold": 32}).limits
    assert limits is not None
    assert (limits.admit_whole_prompt, limits.long_prefill_adaptive) == (False, True)
    uncapped = options_of({"long_prefill_token_threshold": 0, "max_num_seqs": 3}).limits
    assert uncapped is not None
    assert (uncapped.long_prefill_tokens, uncapped.max_running) == (None, 3)
    assert options_of({"prefix_caching_hash_algo": "xxhash_cbor"}).hash == "xxh3_128_cbor"
    for name in given:
        with pytest.raises(EngineOptionError, match=f"{name}: 1 is not True or False"):
            options_of({name: 1})


@pytest.mark.parametrize("name", ["enable_prefix_caching", "enforce_eager"])
def test_a_text_is_no_flag_under_vllms_name_either(name, model_of):
    """`"false"` would count as True."""
    from engine.runtime.errors import EngineOptionError
    from engine.runtime.llm import LLM

    with pytest.raises(EngineOptionError, match="'false' is not True or False"):
        LLM(model_of(), **{name: "false"})


def test_a_device_that_torch_does_not_know_is_named():
    from engine.runtime.errors import EngineOptionError
    from engine.runtime.llm import LLM
    from engine.runtime.models.spec import ModelSpec

    with pytest.raises(EngineOptionError, match=r"device: .*gpu"):
        LLM(ModelSpec(), device="gpu")


def test_min_tokens_that_leave_no_token_are_named(model_of):
    from engine.runtime.errors import ParamsError
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    params = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=range(512))
    with pytest.raises(ParamsError, match="min_tokens: bad_words and min_tokens may leave"):
        LLM(model_of(), pool_tokens=256).generate([5, 6, 7], params)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_checkpoints_own_element_type_is_the_default(key, tmp_path, model_of):
    import json

    from engine.runtime.llm import LLM
    from engine.runtime.models.load import original_model

    with original_model(model_of()) as model:
        model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config.pop("dtype", None)
    file.write_text(json.dumps(config | {key: "bfloat16"}))
    assert LLM(tmp_path).loaded.dtype is torch.bfloat16
    assert LLM(tmp_path, dtype="float32").loaded.dtype is torch.float32
