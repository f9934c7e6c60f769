"""Output tokens per CPU-second of our engine beside transformers, on the same requests, on one CPU thread.

The model is a random Llama of 8 layers. `reference` is the workload of the documentation; `prefill` and `decode` are
its halves. In float32 the outputs must be those of ours, token for token. Beside vLLM: `engine_matrix.py`.
"""

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.engines import (
    BenchRequest,
    Outputs,
    PeerError,
    Serve,
    ours,
    reference_requests,
    transformers_cb,
)
from benchmarks.engines import transformers_one_by_one as one_by_one
from engine.runtime.models.load import LoadedModel, load_model
from engine.runtime.models.spec import ModelSpec

pytestmark = pytest.mark.benchmark(timer=time.process_time, disable_gc=True)
ROUNDS, BLOCK_SIZE, POOL_TOKENS = 3, 16, 40_960
ENGINES: dict[str, Callable[[LoadedModel], Serve]] = {
    "pagetwin": lambda loaded: ours(loaded, block_size=BLOCK_SIZE, pool_tokens=POOL_TOKENS),
    "transformers": one_by_one,
    "transformers_cb": lambda loaded: transformers_cb(loaded, block_size=BLOCK_SIZE, pool_tokens=POOL_TOKENS),
}


@cache
def model(dtype: str, layers: int) -> LoadedModel:
    """The reference model."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    spec = ModelSpec(
        name="bench-llama", dtype=dtype, layers=layers, hidden=512, heads=8, kv_heads=4, head_dim=64, vocab=32_000,
        intermediate=1408, initializer_range=0.05,
    )  # fmt: skip
    return load_model(spec, device="cpu")


def requests_of(load: str, vocab: int, small: bool) -> list[BenchRequest]:
    """The reference workload, its prompts with one token each, or single tokens with all its outputs."""
    requests = reference_requests(64, vocab)
    if small:
        requests = [BenchRequest(one.prompt[:40], 4) for one in requests[:2]]
    if load == "prefill":
        return [BenchRequest(one.prompt, 1) for one in requests]
    if load == "decode":
        return [BenchRequest(one.prompt[:1], one.output_tokens) for one in requests]
    return requests


@cache
def our_outputs(dtype: str, load: str, small: bool) -> Outputs:
    """What our engine answers."""
    loaded = model(dtype, 1 if small else 8)
    return ENGINES["pagetwin"](loaded)(requests_of(load, loaded.vocab_size, small))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("load", ["reference", "prefill", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine(benchmark: Any, small: bool, dtype: str, load: str, engine: str) -> None:
    """One engine on one workload."""
    benchmark.group = f"engine: {load}, {dtype}"
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor multiplies no bfloat16 matrices")
    loaded = model(dtype, 1 if small else 8)
    requests = requests_of(load, loaded.vocab_size, small)

    try:
        serve = ENGINES[engine](loaded)
        serve(requests[:2])  # warms it up
    except PeerError as error:
        pytest.skip(str(error))
    outputs = benchmark.pedantic(serve, args=(requests,), rounds=ROUNDS)
    reference = our_outputs(dtype, load, small)
    equal = sum(one == other for one, other in zip(outputs, reference, strict=True))
    tokens = sum(request.output_tokens for request in requests)
    if benchmark.enabled:
        rate = tokens / benchmark.stats.stats.median
        benchmark.extra_info.update({"output tokens per CPU-second": rate, "equal": equal})
    assert dtype != "float32" or equal == len(requests)
