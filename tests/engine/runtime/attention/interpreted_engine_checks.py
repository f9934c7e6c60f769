"""The engine's Triton path in Triton's interpreter, token for token beside torch. `test_triton.py` runs it.

TRITON_INTERPRET is read when a kernel is defined, so this file is not collected with the others. Models are tiny: a
pass through the interpreter takes about a second.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import build, prompts
from interpreted_cases import cut_short_rows, spec_of
from tiers import cases, tier

from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from engine.runtime.attention import metadata as cascading
from engine.runtime.attention import metadata as kernels
from engine.runtime.graphs import EagerRecorder, GraphOptions
from engine.runtime.llm import LLM
from engine.runtime.models.load import load_model, original_model, wrap_model
from engine.runtime.models.spec import ModelSpec
from engine.runtime.params import SamplingParams
from engine.runtime.runner import Runner
from gpu_acceptance.contact import engine_step
from paged_kernels import Workspace, WorkspaceError
from paged_kernels.arguments import Scoring
from paged_kernels.cascade_groups import CascadeCost
from paged_kernels.case import TOLERANCE, build_case, exact_attention, relative_error
from paged_kernels.triton import cascade as triton_cascade
from paged_kernels.triton import decode as triton_decode

ALWAYS = CascadeCost(memory_bytes_per_s=1.0, cache_bytes_per_s=1.0, cache_bytes=0, overhead_s=0.0)
NEVER = CascadeCost(memory_bytes_per_s=1e30, cache_bytes_per_s=1e30, cache_bytes=0, overhead_s=1.0)
LAYERS = tier(1, 2)
SHAPE = {
    "layers": LAYERS,
    "hidden": 32,
    "heads": tier(2, 4),
    "kv_heads": tier(1, 2),
    "head_dim": 8,
    "intermediate": 32,
    "vocab": 64,
}


def original_tokens(family, sizes, count):
    """transformers' answers of a random model."""
    with original_model(latent_model(family)) as whole:
        return [
            whole.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in prompts(sizes)
        ]


@functools.cache
def latent_model(family):
    return wrap_model(build(family), name=family)


def say(family, sizes, count):
    """The engine's answers of the same model, on Triton."""
    limits = {"limits": SchedulerLimits(40, 8, max_model_len=64), "pool_tokens": 256, "block_size": 4}
    llm = LLM(latent_model(family), audit="full", groups="uniform", backend="triton", **limits)
    done = llm.generate(prompts(sizes), SamplingParams(max_tokens=count, temperature=0))
    return [answer.outputs[0].token_ids for answer in done]


PREFIX = list(range(3, 16))  # 13 tokens: three whole blocks of four, and one token more
SHARED = [[*PREFIX, 20, 21], [*PREFIX, 30], [*PREFIX, 40, 41, 42], [50, 51]]


@functools.cache
def model(**other):
    torch.set_num_threads(1)
    return load_model(ModelSpec(**{**SHAPE, **other}, max_position=64))


def serve(prompts, backend, *, width=1, graphs=None, tokens=3, loaded=None):
    """Outputs of every request; all of them enter at once, so that they decode together."""
    scheduler = Scheduler(PagedManager(120, 4), SchedulerLimits(256, 32, max_model_len=64))
    runner = Runner(
        loaded or model(), num_blocks=120, block_size=4, audit="full", graphs=graphs, backend=backend
    )
    kind = Decoding.beam if width > 1 else Decoding.greedy
    for number, prompt in enumerate(prompts):
        request = Request(number, len(prompt), tokens, width, kind, identity=identity(number, prompt))
        scheduler.submit(request)
        runner.add(request, np.array(prompt))
    while scheduler.has_work:
        plan = scheduler.schedule()
        result, _ = runner.execute(plan)
        scheduler.commit(plan, result)
    return [runner.outputs(number) for number in range(len(prompts))], runner


def identity(number, prompt):
    from engine.core.identity import TokenIdentity

    return TokenIdentity(number, np.array(prompt))


@pytest.fixture
def cascades(monkeypatch):
    """(rows, groups) of every cascade that was launched."""
    seen = []
    run = triton_cascade.run_cascade

    def counted(q, keys, values, shared, *rest, **options):
        seen.append((len(q), len(shared.lens)))
        return run(q, keys, values, shared, *rest, **options)

    monkeypatch.setattr(triton_cascade, "run_cascade", counted)
    return seen


def price(monkeypatch, cost):
    monkeypatch.setattr(cascading, "cost_of", lambda device: cost)


def test_greedy_tokens_are_those_of_torch(cascades, monkeypatch):
    price(monkeypatch, ALWAYS)
    prompts = tier([[5, 9, 2, 7], [8]], [[5, 9, 2, 7], [8], list(range(3, 20))])
    found, wanted = (serve(prompts, backend, tokens=tier(2, 3))[0] for backend in ("triton", "torch"))
    assert found == wanted
    assert cascades == []


@pytest.mark.nightly  # by day the test above has the engine, and `interpreted_checks.py` the cascade
def test_a_shared_prefix_is_read_once_and_tokens_stay(cascades, monkeypatch):
    price(monkeypatch, ALWAYS)
    serve_first = [[*PREFIX, 60], *SHARED]
    found, _ = serve_staggered(serve_first, "triton")
    expected, _ = serve_staggered(serve_first, "torch")
    assert found == expected
    assert {groups for _, groups in cascades} == {1}
    assert max(rows for rows, _ in cascades) >= 4


def serve_staggered(prompts, backend):
    """The first request is served alone, so that the others find its blocks."""
    scheduler = Scheduler(PagedManager(120, 4), SchedulerLimits(256, 32, max_model_len=64))
    runner = Runner(model(), num_blocks=120, block_size=4, audit="full", backend=backend)
    for number, prompt in enumerate(prompts):
        tokens = 2 if number else 1
        request = Request(number, len(prompt), tokens, 1, Decoding.greedy, identity=identity(number, prompt))
        scheduler.submit(request)
        runner.add(request, np.array(prompt))
        while scheduler.has_work and (number == 0 or number == len(prompts) - 1):
            plan = scheduler.schedule()
            result, _ = runner.execute(plan)
            scheduler.commit(plan, result)
    return [runner.outputs(number) for number in range(len(prompts))], runner


@pytest.mark.nightly
def test_drafts_are_verified_over_what_they_share_and_tokens_stay(cascades, monkeypatch):
    """The model drafts for itself, so that all drafts are accepted."""
    price(monkeypatch, ALWAYS)

    def tokens(backend):
        llm = LLM(
            model(),
            draft=model(),
            draft_tokens=3,
            backend=backend,
            pool_tokens=480,
            block_size=4,
            audit="full",
        )
        llm.generate([PREFIX], SamplingParams(max_tokens=1, temperature=0))
        cascades.clear()
        done = llm.generate(SHARED, SamplingParams(max_tokens=4, temperature=0))
        return [answer.outputs[0].token_ids for answer in done]

    found = tokens("triton")
    assert {queries for queries, _ in cascades} >= {4, 16}  # passes of the draft model, and the verification
    assert found == tokens("torch")


@pytest.mark.nightly
def test_beams_read_what_they_share_once_and_stay_what_they_are(cascades, monkeypatch):
    price(monkeypatch, ALWAYS)
    prompts = [[*PREFIX, 20], [7, 8, 9, 10, 11, 12]]
    assert serve(prompts, "triton", width=3)[0] == serve(prompts, "torch", width=3)[0]
    assert {groups for _, groups in cascades} == {2}


@pytest.mark.nightly
def test_where_it_does_not_pay_the_batch_stays_flat(cascades, monkeypatch):
    price(monkeypatch, NEVER)
    assert serve([[*PREFIX, 20]], "triton", width=3)[0] == serve([[*PREFIX, 20]], "torch", width=3)[0]
    assert cascades == []


@pytest.mark.nightly
def test_all_layers_share_one_plan(cascades, monkeypatch):
    price(monkeypatch, ALWAYS)
    plans = []
    plan = cascading.find_cascade_groups
    monkeypatch.setattr(cascading, "find_cascade_groups", lambda *a, **k: plans.append(1) or plan(*a, **k))
    serve([[*PREFIX, 20]], "triton", width=2)
    assert len(cascades) == SHAPE["layers"] * len(plans)


def short_chunks(monkeypatch, lengths, queries, **options):
    """Chunks of a few queries through the engine's metadata: output, and that of float64."""
    cut_short_rows(monkeypatch)
    case = build_case(spec_of(lengths, queries, **options))
    return read_by_engine(case), exact_attention(case)[0]


def pool_of(block_size):
    return SimpleNamespace(block_size=block_size, device=torch.device("cpu"))


def read_by_engine(case):
    """The rows of a case as the engine's metadata reads them; its rows of one query come first."""
    out = case.q.new_full((*case.q.shape[:2], case.value_cache.shape[3]), float("nan"))
    engine_step(case, out)()
    return out


@pytest.mark.nightly
@cases(
    ("lengths", "queries"),
    [((150, 135, 190), (3, 7, 2)), ((131, 170, 150, 139), (1, 1, 4, 9)), ((140, 150, 193), (1, 1, 64))],
    day=(((131, 170, 150, 139), (1, 1, 4, 9)),),
)
@cases("options", [{"softcap": 2.0, "sinks": True}, {"alibi": True}], day=1)
def test_chunks_and_single_queries_read_what_they_share_once(
    cascades, monkeypatch, lengths, queries, options
):
    price(monkeypatch, ALWAYS)
    cut_short_rows(monkeypatch)
    case = build_case(spec_of(lengths, queries, block_size=16, shared_tokens=128, **options))
    assert relative_error(read_by_engine(case), exact_attention(case)[0]) < TOLERANCE[torch.float32]
    several = [count for count in queries if count > 1]
    expected = [(queries.count(1), 1)] if queries.count(1) > 1 else []
    assert cascades == expected + ([(sum(several), 1)] if len(several) > 1 else [])


@pytest.mark.nightly
@cases(
    "options",
    [
        {},
        {"softcap": 2.0, "sinks": True},
        {"alibi": True},
        {"window": 1000},
        {"window": 40},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
        {"block_size": 1},
        {"block_size": 48},
        {"heads": 7, "kv_heads": 1},
        {"dv": 32},
    ],
    day=({"softcap": 2.0, "sinks": True},),
)
@cases(
    ("lengths", "queries"),
    [
        ((150, 135, 190), (3, 7, 2)),
        ((300,), (5,)),
        ((129, 130), (1, 9)),
        ((192,), (64,)),
        ((261,), (3,)),
    ],
    day=(((150, 135, 190), (3, 7, 2)),),
)
def test_a_few_queries_over_a_long_context_read_it_in_parts(monkeypatch, lengths, queries, options):
    options = {"block_size": 16, **options}
    out, exact = short_chunks(monkeypatch, lengths, queries, **options)
    assert relative_error(out, exact) < TOLERANCE[options.get("dtype", torch.float32)]


@pytest.mark.nightly  # by day `interpreted_checks.py` has the kernel, and `test_families.py` the engine on torch
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_vectors_are_decoded_by_the_kernel_with_the_tokens_of_generate(family, monkeypatch):
    ran = []
    run = triton_decode.run_decode
    monkeypatch.setattr(
        triton_decode, "run_decode", lambda *a, **k: ran.append(k["queries"] is None) or run(*a, **k)
    )
    assert say(family, (5, 32), 3) == original_tokens(family, (5, 32), 3)
    assert set(ran) == {True, False}  # single queries, and those of short chunks


def test_a_window_that_hides_the_prefix_keeps_the_batch_flat(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "share_step", lambda *rows, **sizes: asked.append(rows))
    monkeypatch.setattr(triton_decode, "run_decode", lambda *inputs, **options: None)
    layout = kernels.StepLayout(np.ones((2, 1), dtype=np.int64), np.array([9, 20]), [])
    q = torch.zeros(2, 1, 16)
    keys = torch.zeros(2, 32, 1, 16)

    def is_cut(window):
        asked.clear()
        step = kernels.TritonMetadata(layout, pool_of(block_size=32), Workspace())
        step.attend(q, keys, keys, Scoring(1.0, window), q)
        return not asked

    assert [is_cut(window) for window in (0, 8, 19, 20, 64)] == [False, True, True, False, False]


@pytest.mark.nightly
def test_recorded_steps_stay_flat_and_say_the_same_tokens(cascades, monkeypatch):
    price(monkeypatch, ALWAYS)
    prompts = [[*PREFIX, 20], [5, 9, 2]]
    found, runner = serve(prompts, "triton", width=2, graphs=GraphOptions(4, 64, EagerRecorder()))
    assert runner.graphs.replays > 0
    assert found == serve(prompts, "torch", width=2)[0]
    assert cascades == []


@pytest.mark.nightly
def test_scratch_of_recorded_steps_never_moves(monkeypatch):
    places = []
    run = triton_decode.launch_decode

    def noted(launch, out, lse, *, direct):
        places.append((launch.part.data_ptr(), launch.part_lse.data_ptr()))
        return run(launch, out, lse, direct=direct)

    monkeypatch.setattr(triton_decode, "launch_decode", noted)
    serve([[5, 9, 2], [7] * 20], "triton", graphs=GraphOptions(4, 64, EagerRecorder()), tokens=4)
    recorded = [place for place in places if place == places[0]]
    assert len(recorded) >= 2 * SHAPE["layers"]


@pytest.mark.nightly
def test_a_recording_refuses_more_rows_than_its_scratch_was_made_for():
    _, runner = serve([[5, 9, 2]], "triton", graphs=GraphOptions(2, 64, EagerRecorder()), tokens=2)
    workspace = runner.graphs._workspace
    with pytest.raises(WorkspaceError, match="frozen workspace"):
        workspace.take("decode_parts", 10**9, torch.empty(0), torch.float32)


def decode_beside_nan(block, *, splits=None, width=1, monkeypatch):
    """Run a long prompt, make one block of its K and V NaN, and run a decode step; `splits` parts per row."""
    if splits is not None:
        monkeypatch.setattr(kernels.TritonMetadata, "_one_part", lambda self, *kind: splits)
    scheduler = Scheduler(PagedManager(120, 4), SchedulerLimits(256, 32, max_model_len=64))
    runner = Runner(model(), num_blocks=120, block_size=4, audit="off", backend="triton")
    prompt = list(range(3, 14))
    scheduler.submit(Request(0, len(prompt), 4, width, Decoding.beam if width > 1 else Decoding.greedy))
    runner.add(
        Request(0, len(prompt), 4, width, Decoding.beam if width > 1 else Decoding.greedy), np.array(prompt)
    )
    plan = scheduler.schedule()
    result, _ = runner.execute(plan)
    scheduler.commit(plan, result)
    plan = scheduler.schedule()
    for layer in range(SHAPE["layers"]):
        runner.pool.keys[layer][plan.rows[0].table[block]] = float("nan")
    return runner.execute(plan)


@pytest.mark.nightly
@cases("block", [2, 0], day=1)
def test_nan_in_any_part_of_a_split_row_reaches_the_logits(block, monkeypatch):
    from engine.runtime.errors import NaNLogitsError

    with pytest.raises(NaNLogitsError, match="request 0 branch 0: NaN in the logits"):
        decode_beside_nan(block, splits=3, monkeypatch=monkeypatch)


@pytest.mark.nightly
def test_nan_in_a_shared_prefix_reaches_the_logits(cascades, monkeypatch):
    from engine.runtime.errors import NaNLogitsError

    price(monkeypatch, ALWAYS)
    with pytest.raises(NaNLogitsError, match="request 0 branch 0: NaN in the logits"):
        decode_beside_nan(1, width=2, monkeypatch=monkeypatch)
    assert cascades
