"""The kernels and the engine on a CUDA device; skipped where there is none."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [300, 9, 1, 64]])
def test_attention_equals_the_float64_reference(make_case, backend, dtype, block_size, queries):
    from paged_kernels import paged_attention_prefill

    case = make_case([1000, 9, 33, 700], queries, block_size, (8, 2), (128, 128))
    q, keys, values, table, lengths, bounds = (value.cuda() for value in case.args(dtype))
    narrow = (table.int(), lengths.int(), bounds.int())
    found = paged_attention_prefill(q, keys, values, *narrow, scale=0.1, backend=backend)
    wide = (q.double(), keys.double(), values.double())
    exact = paged_attention_prefill(*wide, table, lengths, bounds, scale=0.1, backend="torch_ref")
    assert float((found.double() - exact).norm() / exact.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_engine_equals_generate(backend):
    from engine.core.limits import SchedulerLimits
    from engine.runtime.llm import LLM, SamplingParams
    from engine.runtime.model import ModelSpec, load_model, native_attention

    loaded = load_model(ModelSpec(layers=2, vocab=512, initializer_range=0.2), device="cuda")
    prompts = [list(range(3, 40)), [7, 8], list(range(100, 170))]
    limits = SchedulerLimits(24, 8, max_model_len=128)
    llm = LLM(loaded, backend=backend, pool_tokens=512, limits=limits, audit="full")
    found = [done.token_ids[0] for done in llm.generate(prompts, SamplingParams(12))]
    with native_attention(loaded) as model:
        expected = [
            model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=12, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in prompts
        ]
    assert found == expected
