"""Layers in groups on the engine: tokens of `generate()`, blocks behind windows freed and used again, and planted bugs.

The models are random ones of unmodified transformers classes. Every step is audited, in each group.
"""

import functools
import random
from contextlib import suppress

import pytest
from families import build, prompts, unowned_are_void
from served_groups import MIXED, NEW, SHORT, expected, loaded, make_llm, serve
from tiers import NIGHT, NIGHT_SEED, cases, nights_share, tier

from engine.core.errors import CoreError
from engine.core.memory.block_tables import BlockTables
from engine.core.memory.group_layout import KVGroup, LayerSet, separate_layout
from engine.core.memory.group_pages import PoolPages
from engine.core.memory.prefix_cache import GroupHits
from engine.core.options import GroupKind

ALIKE = (
    "llama",
    "mistral",
    "deepseek_v2",
)  # one group alone: of all tokens, of a window, of expanded latent vectors
FAMILIES = (*MIXED, *ALIKE)
PAGES = ("separate", "lcm")
RUNS = [
    *((family, "uniform") for family in FAMILIES),
    *(("gemma2", pages) for pages in PAGES),
    *((family, "separate") for family in ("gemma3_text", "gpt_oss", "deepseek_v2")),
    *(("gemma3_text", "lcm"), ("ministral", "lcm")),
]
PREEMPTED = [*((family, "uniform") for family in FAMILIES), *(("gemma2", pages) for pages in PAGES)]


class Reuse:
    """Watches the plans for pages that a running sequence has left behind and another one holds."""

    def __init__(self, llm):
        self.found = 0
        self._holder = {}
        self._execute = llm.runner.execute
        llm.runner.execute = self

    def __call__(self, plan):
        held = {
            row.request_id: {page for table in row.table.groups for page in table if page}
            for row in plan.rows
        }
        for request, pages in held.items():
            for page in pages:
                before = self._holder.get(page, request)
                self.found += before != request and before in held and page not in held[before]
        self._holder |= {page: request for request, pages in held.items() for page in pages}
        return self._execute(plan)


def expand_as_it_is(*sent):
    from engine.runtime.attention.layer import expand

    return expand(*sent)


# -- the same tokens ---------------------------------------------------------------------------------------


@cases(
    ("family", "groups"),
    RUNS,
    day=(("gpt_oss", "separate"),),
)
def test_chunked_prompts_and_prefix_hits_give_the_tokens_of_generate(family, groups):
    llm = make_llm(family, groups=groups)
    assert serve(llm, turns=2) == [expected(family)] * 2
    assert llm.engine.counters.prefix_hits > 0
    assert llm.runner.audits == llm.engine.counters.steps


@cases(("family", "groups"), PREEMPTED, day=(("gemma2", "lcm"),))
def test_preemption_changes_no_token(family, groups):
    llm = make_llm(family, groups=groups, pool_tokens=90)
    assert serve(llm, sizes=SHORT) == [expected(family, SHORT)]
    assert llm.engine.counters.preemptions > 0


@cases("family", MIXED, day=("gemma2",))
def test_a_block_behind_a_window_is_used_by_another_sequence_while_its_own_runs(family):
    llm = make_llm(family, pool_tokens=150)
    reuse = Reuse(llm)
    assert serve(llm) == [expected(family)]
    assert reuse.found > 0


@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_kernels")
def test_c_reads_the_pages_of_groups_and_is_refused_at_load_where_a_page_holds_several_layers(monkeypatch):
    import families
    import served_groups

    from engine.runtime.models.load import wrap_model
    from paged_kernels.arguments import BackendUnavailableError

    monkeypatch.setitem(families.COMMON, "head_dim", 16)  # what C reads; the other models have 8
    wide = wrap_model(build("ministral", MIXED.get("ministral", ())), name="ministral")
    monkeypatch.setattr(served_groups, "loaded", lambda family: wide)
    with pytest.raises(BackendUnavailableError, match="contiguous caches"):
        make_llm("ministral", groups="lcm", backend="native")
    assert make_llm("ministral", groups="lcm").engine.runner.backend == "torch"
    assert serve(make_llm("ministral", backend="native")) == [expected.__wrapped__("ministral")]


@pytest.mark.nightly
@cases("backend", ["torch", "auto"], day=("auto",))
def test_every_backend_reads_the_pages_of_each_group(backend):
    assert serve(make_llm("cohere2", backend=backend)) == [expected("cohere2")]


@pytest.mark.nightly
@cases(
    "options",
    [{"block_size": 16}, {"prefix_caching": False}, {"window_hits": "all"}, {"retention_interval": None}],
    day=({"window_hits": "all"},),
)
def test_options_change_no_token(options):
    assert serve(make_llm("gemma2", **options), turns=2) == [expected("gemma2")] * 2


def test_an_interval_that_does_not_fit_the_blocks_is_refused():
    from engine.runtime.errors import ModelError

    with pytest.raises(ModelError, match="retention interval 7: must be 0 or a multiple of"):
        make_llm("gemma2", retention_interval=7)


def test_latent_layers_keep_latent_vectors_and_not_what_they_expand_to():
    llm = make_llm("deepseek_v2")
    view = llm.runner.pool.views[0]
    assert view.group.kind is GroupKind.latent
    assert view.group.layer_bytes == (16 + 8) * 4  # kv_lora_rank and qk_rope_head_dim, in float32
    assert view.keys[0].shape[2:] == (1, 16)
    assert view.values[0].shape[2:] == (1, 8)


@cases("family", ["deepseek_v2", "deepseek_v3"], day=1)
def test_a_latent_layer_decodes_from_its_vectors_without_expanding_the_history(family, monkeypatch):
    from engine.runtime.attention import layer

    assert serve(make_llm(family)) == [expected(family)]  # now the products of each layer are known
    lengths = []
    own = layer.expand
    monkeypatch.setattr(layer, "expand", lambda *sent: lengths.append(sent[1].shape[2]) or own(*sent))
    llm = make_llm(family)
    assert serve(llm) == [expected(family)]
    steps = llm.engine.counters.steps
    assert 0 < len(lengths) < steps * len(llm.runner.loaded.kv_shapes)


def test_products_of_a_layer_are_what_its_own_method_computes():
    import torch

    from engine.runtime.attention.layer import absorbed, expand, latent_layers

    module = latent_layers(loaded("deepseek_v2").model)[0]
    torch.manual_seed(3)
    latent, rotary = torch.randn(1, 1, 5, 16), torch.randn(1, 1, 5, 8)
    products = absorbed(module, latent, rotary)
    keys, values = expand(module, latent, rotary)
    assert torch.allclose(latent[0] @ products.keys + rotary[0] @ products.rotary, keys[0], atol=1e-5)
    assert torch.allclose(latent[0] @ products.values, values[0], atol=1e-5)


def test_a_layer_whose_expansion_is_not_linear_has_no_products():
    import torch

    from engine.runtime.attention.layer import absorbed

    class Squared(torch.nn.Module):
        def expand_kv(self, latent, rotary):
            return (latent**2).expand(1, 2, -1, -1), (latent + 1).expand(1, 2, -1, -1)

    assert absorbed(Squared(), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 2)) is None


@pytest.mark.parametrize("size", [1.0, 3.0, 10.0])
def test_latent_rows_in_bfloat16_are_wrong_by_rounding_alone(size):
    import numpy as np
    import torch

    from engine.runtime.attention.layer import _read_rows
    from engine.runtime.attention.metadata import PrefillRow
    from paged_kernels import Scoring

    torch.manual_seed(0)
    sent = [torch.randn(4, 1, width).bfloat16() for width in (64, 16)]
    caches = [(torch.randn(200, width) * size).bfloat16() for width in (64, 16)]
    rest = [PrefillRow(np.zeros(1, dtype=np.int64), 0, 1, 200)], Scoring(80**-0.5)
    found = _read_rows(sent, caches, *rest).double()
    exact = _read_rows([one.double() for one in sent], [one.double() for one in caches], *rest)
    assert (found - exact).norm() < 2**-9 * exact.norm()


def test_without_groups_latent_layers_keep_expanded_keys_and_values():
    llm = make_llm("deepseek_v2", groups="off")
    assert llm.runner.pool.keys[0].shape[2:] == (4, 16)
    assert serve(llm) == [expected("deepseek_v2")]


def test_a_layer_whose_latent_vectors_expand_to_something_else_keeps_what_it_sends(monkeypatch):
    from engine.runtime.models import probe

    model = loaded("deepseek_v2").model
    monkeypatch.setattr(probe, "expand", lambda *sent: [each + 1 for each in expand_as_it_is(*sent)])
    assert probe.probe_latents(model, 0, 2) is None


# -- several sequences of a request ------------------------------------------------------------------------

BRANCHED = [  # family, pages, tokens of the pool: with the smaller ones requests are preempted
    *(
        (family, pages, 110)
        for family in ("gemma3_text", "gemma4_text", "gpt_oss", "cohere2")
        for pages in ("uniform", "lcm")
    ),
    *(("gemma2", pages, 110) for pages in ("uniform", "lcm")),
    *(("gemma3_text", "separate", 110), ("deepseek_v2", "uniform", 110)),
    *((family, "uniform", 300) for family in ("qwen3_next", "falcon_h1", "lfm2")),
    *(("falcon_h1", "lcm", 300), ("kimi_linear", "lcm", 500), ("jamba", "uniform", 500)),
    ("kimi_linear", "uniform", 1500),  # blocks of 128 tokens
    *(("qwen3_next", "separate", 500), ("lfm2", "separate", 500)),
]
MEMORY = {"recompute": {}, "swap": {"host_blocks": 200}}


def asked_of(model, prompt, new, width):
    """The `width` beams of transformers after a prompt; of one beam its greedy tokens."""
    import torch

    ids = torch.tensor([prompt])
    kept = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": new, "do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **kept)[:, len(prompt) :].tolist()


def branched(family, pages, pool_tokens, memory, **params):
    """Requests of three sequences each, in a pool that is too small for all of them; those that share a sequence's
    prompt share its pages.
    """
    from engine.runtime.params import SamplingParams

    scheduling = {"preemption": memory}
    llm = make_llm(family, groups=pages, pool_tokens=pool_tokens, scheduling=scheduling, **MEMORY[memory])
    done = llm.generate(prompts(SHORT), SamplingParams(max_tokens=NEW, **params))
    llm.scheduler.manager.check()
    assert llm.engine.counters.copies > 0
    assert (llm.engine.counters.swaps if memory == "swap" else llm.engine.counters.preemptions) > 0
    assert llm.runner.audits == llm.engine.counters.steps
    return done


@cases(
    ("family", "pages", "pool_tokens", "memory"),
    [(*setup, memory) for setup in BRANCHED for memory in MEMORY],
    day=(("gemma2", "lcm", 110, "swap"),),
    night=14,
)
def test_beams_are_those_of_generate(family, pages, pool_tokens, memory):
    from engine.runtime.models.load import original_model

    done = branched(family, pages, pool_tokens, memory, beam_width=3)
    with original_model(loaded(family)) as model:
        for prompt, found in zip(prompts(SHORT), done, strict=True):
            assert [each.token_ids for each in found.outputs] == asked_of(model, prompt, NEW, 3)


@pytest.mark.nightly
@cases(
    ("family", "pages", "pool_tokens", "memory"),
    [(*setup, memory) for setup in BRANCHED for memory in MEMORY],
    day=(("gemma3_text", "separate", 110, "swap"),),
    night=14,
)
def test_samples_have_the_probabilities_that_the_model_gives_them(family, pages, pool_tokens, memory):
    import torch

    from engine.runtime.models.load import original_model

    done = branched(family, pages, pool_tokens, memory, n=3, temperature=1.0, seed=3, logprobs=0)
    assert any(each.outputs[0].token_ids != each.outputs[1].token_ids for each in done)
    with original_model(loaded(family)) as model, torch.inference_mode():
        for prompt, output in (
            (prompt, each)
            for prompt, found in zip(prompts(SHORT), done, strict=True)
            for each in found.outputs
        ):
            ids = torch.tensor([prompt + output.token_ids])
            wanted = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            wanted = wanted.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
            found = torch.tensor([each.logprob for each in output.logprobs])
            assert torch.allclose(found, wanted, rtol=0, atol=1e-3)


# -- drafts ------------------------------------------------------------------------------------------------


@functools.cache
def draft_of(family):
    """The model with noise on its weights, so that it is right with some of its proposals."""
    import torch

    from engine.runtime.models.load import wrap_model

    model = build(family, MIXED.get(family, ()))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.003)
    return wrap_model(model, name=f"{family} with noise")


DRAFTED = [
    *((family, "uniform") for family in (*MIXED, "llama", "deepseek_v2", "deepseek_v3")),
    *((family, pages) for family in ("gemma2", "gpt_oss") for pages in PAGES),
]


@cases(("mode", "memory"), [("lookahead", "recompute"), ("fork", "swap"), ("whole", "recompute")], day=1)
@cases(("family", "pages"), DRAFTED, day=(("gemma2", "lcm"),), night=5)
def test_drafts_change_no_token(family, pages, mode, memory):
    from engine.runtime.params import SamplingParams

    llm = make_llm(
        family, groups=pages, pool_tokens=90 if pages == "separate" else 70, draft=draft_of(family),
        draft_mode=mode, draft_tokens=3, scheduling={"preemption": memory}, **MEMORY[memory],
    )  # fmt: skip
    for _ in range(2):  # the second time with hits
        done = llm.generate(prompts(SHORT), SamplingParams(max_tokens=NEW, temperature=0))
        assert [each.outputs[0].token_ids for each in done] == expected(family, SHORT)
    llm.scheduler.manager.check()
    counted = llm.engine.counters
    assert 0 < counted.accepted_tokens < counted.drafted_tokens
    assert llm.runner.audits == counted.steps
    assert (counted.swaps if memory == "swap" else counted.preemptions) > 0


@pytest.mark.parametrize("groups", ["uniform", "lcm"])
def test_a_draft_models_pages_are_part_of_the_memory(groups):
    given = {"groups": groups, "pool_tokens": None, "kv_cache_memory_bytes": 1 << 20}
    llm = make_llm("gemma2", draft=draft_of("gemma2"), **given)
    whole = llm.runner.pool.draft_view
    nulls = sum(each.layers * 4 * each.layer_bytes for each in llm.runner.pool.layout.groups) + 4 * 4 * 128
    assert 0.9 * (1 << 20) < llm.runner.pool.bytes <= (1 << 20) + nulls
    assert whole.group.kind is GroupKind.full


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("mistral", "every layer of the model has a window"),
        ("qwen3_next", "a state takes no draft token back"),
    ],
)
def test_a_model_that_takes_no_draft_model_in_groups_is_refused_when_it_is_loaded(family, said):
    from engine.runtime.errors import ModelError

    with pytest.raises(ModelError, match=said):
        make_llm(family, draft=draft_of("llama"))


# -- drawn requests ----------------------------------------------------------------------------------------

SEEDS = (3, 8)
KINDS = ("samples", "beams", "drafts")
DRAWN = (*MIXED, "llama", "deepseek_v2", "qwen3_next", "falcon_h1", "lfm2")


@pytest.mark.nightly
@cases("kind", KINDS, day=1)
@cases("seed", (*SEEDS, *nights_share(range(100, 10_000), 14)), day=SEEDS[:1])
def test_drawn_requests_in_groups_are_answered_as_by_transformers(seed, kind):
    import torch

    from engine.runtime.models.load import original_model
    from engine.runtime.params import SamplingParams

    rng = random.Random(f"{seed} {kind}")
    family = rng.choice(DRAWN[:-3] if kind == "drafts" else DRAWN)  # a state takes no draft token back
    new, width = rng.randint(2, 24), rng.randint(2, 5)
    asked = [[rng.randrange(256) for _ in range(rng.randint(1, 70))] for _ in range(rng.randint(2, 5))]
    asked.append([*asked[0][: rng.randint(1, 70)], rng.randrange(256)])
    memory, groups = rng.choice(sorted(MEMORY)), rng.choice(("uniform", *PAGES))
    drafts = {"draft": draft_of(family), "draft_tokens": rng.randint(1, 5)} if kind == "drafts" else {}
    modes = {"draft_mode": rng.choice(("lookahead", "fork", "whole"))} if drafts else {}
    llm = make_llm(
        family, budget=rng.choice((9, 16, 33, 64)), groups=groups,
        pool_tokens=rng.randint(600, 900) * (4 if family in DRAWN[-3:] else 1),
        block_size=rng.choice((1, 2, 3, 4, 6, 8, 16)), prefix_caching=rng.random() < 0.7,
        scheduling={"preemption": memory}, **MEMORY[memory], **drafts, **modes,
    )  # fmt: skip
    params = {
        "samples": {"n": width, "temperature": 1.0, "seed": seed, "logprobs": 0},
        "beams": {"beam_width": width},
        "drafts": {"temperature": 0},
    }[kind]
    for _ in range(2):  # the second time with hits
        done = llm.generate(asked, SamplingParams(max_tokens=new, **params))
        with original_model(loaded(family)) as model, torch.inference_mode():
            for prompt, found in zip(asked, done, strict=True):
                said = [one.token_ids for one in found.outputs]
                if kind != "samples":
                    assert said == asked_of(model, prompt, new, len(said))
                    continue
                assert len(said) == width
                for one in found.outputs:
                    ids = torch.tensor([prompt + one.token_ids])
                    wanted = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                    wanted = wanted.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0].tolist()
                    assert [each.logprob for each in one.logprobs] == pytest.approx(wanted, abs=1e-3)
    llm.scheduler.manager.check()
    assert llm.runner.audits == llm.engine.counters.steps


# -- 8 bits ------------------------------------------------------------------------------------------------


def rounded(family, prompt):
    """transformers' answer with a cache that rounds K and V to 8 bits where it takes them."""
    import torch
    from transformers import DynamicCache

    from engine.runtime.models.load import original_model

    def eight(numbers):
        return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).to(numbers.dtype)

    class Rounding(DynamicCache):
        def update(self, key_states, value_states, *more, **named):
            return super().update(eight(key_states), eight(value_states), *more, **named)

    ids = torch.tensor([prompt])
    with original_model(loaded(family)) as model:
        cache = Rounding(config=model.config)
        kept = {"max_new_tokens": NEW, "do_sample": False, "past_key_values": cache}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **kept)[0, len(prompt) :].tolist()


EIGHT = [
    *((family, "uniform") for family in (*MIXED, "llama", "qwen3_next", "falcon_h1", "lfm2")),
    *((family, pages) for family in ("gemma2", "ministral", "lfm2") for pages in PAGES),
]


@pytest.mark.nightly  # by day test_fp8.py has them without groups
@cases("memory", MEMORY, day=1)
@cases(("family", "pages"), EIGHT, day=(("gemma2", "uniform"),), night=6)
def test_8_bits_give_the_tokens_of_a_cache_that_rounds(family, pages, memory):
    from engine.runtime.params import SamplingParams

    size = (90 if pages == "separate" else 64) if family in FAMILIES else 400
    llm = make_llm(
        family, groups=pages, pool_tokens=size, kv_dtype="fp8_e4m3", scheduling={"preemption": memory},
        **MEMORY[memory],
    )  # fmt: skip
    wanted = [rounded(family, prompt) for prompt in prompts(SHORT)]
    assert wanted != expected(family, SHORT)
    for _ in range(2):  # the second time with hits
        done = llm.generate(prompts(SHORT), SamplingParams(max_tokens=NEW, temperature=0))
        said = [each.outputs[0].token_ids for each in done]
        # on some CPUs another batch rounds a number to the other side of a boundary between two of 8 bits
        assert sum(one != other for one, other in zip(said, wanted, strict=True)) <= 1
    llm.scheduler.manager.check()
    assert llm.runner.audits == llm.engine.counters.steps
    if family in FAMILIES:
        assert (llm.engine.counters.swaps if memory == "swap" else llm.engine.counters.preemptions) > 0


@cases(
    ("name", "kind"),
    [
        *((name, "drafts") for name in ("poison", "poison_slots", "swap_in")),
        ("poison", "8"),
        ("swap_in", "8"),
    ],
    day=2,
)
def test_a_page_operation_that_is_left_out_is_noticed(name, kind, monkeypatch):
    from engine.runtime.errors import AuditError, RunError
    from engine.runtime.group_pool import GroupedPool
    from engine.runtime.params import SamplingParams

    options = {"draft": draft_of("gemma2")} if kind == "drafts" else {"kv_dtype": "fp8_e4m3"}
    swapping = {"scheduling": {"preemption": "swap"}, "host_blocks": 200}
    llm = make_llm("gemma2", pool_tokens=64, **swapping, **options)
    monkeypatch.setattr(GroupedPool, name, lambda pool, pairs: None)
    with pytest.raises((AuditError, RunError)):
        llm.generate(prompts(SHORT), SamplingParams(max_tokens=NEW, temperature=0))


# -- the tensors -------------------------------------------------------------------------------------------


@cases("groups", ["uniform", *PAGES], day=("lcm",))
def test_pages_without_an_owner_hold_nothing_in_any_layer(groups):
    llm = make_llm("ministral", groups=groups)
    serve(llm)
    llm.runner.pool.poison(llm.scheduler.manager.drain_frees())
    assert unowned_are_void(llm.runner.pool)
    view = llm.runner.pool.views[1]
    void = view.keys[view.layers[0]].isnan().flatten(1).all(1).nonzero()[0, 0]
    view.values[view.layers[0]][void, 0, 0, 0] = 1.0
    assert not unowned_are_void(llm.runner.pool)


def test_groups_of_one_pool_share_its_tensors():
    pool = make_llm("gemma2").runner.pool
    assert [view.layers for view in pool.views] == [(0, 2), (1, 3)]
    assert pool.views[0].keys[0].data_ptr() == pool.views[1].keys[1].data_ptr()


def test_separate_pools_take_the_memory_of_the_pool_and_a_null_page_each():
    llm = make_llm("ministral", groups="separate", pool_tokens=512)
    pages = sum(group.page_bytes for group in llm.scheduler.manager.groups.layout.groups)
    assert 0.95 * 512 * 4 * 128 < llm.runner.pool.bytes - pages <= 512 * 4 * 128


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([LayerSet(GroupKind.full, 4, 128)], r"group 0 has 4 full layers of 128 bytes .* the model has 2"),
        (
            [LayerSet(GroupKind.full, 2, 128), LayerSet(GroupKind.window, 2, 128, 20)],
            "group 1 has 2 window layers of 128 bytes a token and a window of 20, the model has 0",
        ),
        ([LayerSet(GroupKind.full, 2, 64), LayerSet(GroupKind.window, 2, 64, 19)], "the model has 0 such"),
        ([LayerSet(GroupKind.full, 2, 128)], "the groups have 2 layers, the model has 4"),
        (
            [LayerSet(GroupKind.full, 2, 128), LayerSet(GroupKind.state, 2, 64)],
            "group 1 has 2 state layers of 64",
        ),
    ],
)
def test_a_layout_of_another_model_is_refused(sets, said):
    from engine.runtime.errors import ModelError
    from engine.runtime.runner import Runner

    layout = separate_layout(sets, 4)
    with pytest.raises(ModelError, match=said):
        Runner(
            loaded("gemma2"), num_blocks=1, block_size=4, groups=layout, page_counts=[9] * len(layout.groups)
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"copy_at_fork": True}, "copy_at_fork"),
        ({"cache": "contiguous_max"}, "cache contiguous_max"),
    ],
)
def test_what_groups_do_not_serve_is_refused_by_name(options, said):
    from engine.runtime.errors import ModelError

    with pytest.raises(ModelError, match=f"layers in groups: .*{said}.* is not served"):
        make_llm("gemma2", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pool_tokens": 12, "groups": "separate"}, "needs 2 pages of group 0, its pool has 1"),
        ({"groups": "off", "cache": "contiguous_max", "drafts": True}, "has drafts"),
        ({"drafts": True, "draft_tokens": 16}, "verifies 16 draft tokens at once"),
    ],
)
def test_an_engine_that_could_serve_no_request_is_refused_at_load(options, said):
    from engine.runtime.errors import ModelError

    given = {"draft": draft_of("gemma2")} if options.pop("drafts", False) else {}
    with pytest.raises(ModelError, match=f"even the smallest request {said}"):
        make_llm("gemma2", **options, **given)


def drawn_layout(rng):
    """A family, and options of which many do not go together."""
    family = rng.choice((*FAMILIES, *DRAWN[-3:]))
    options = {
        "groups": rng.choice(("off", "uniform", *PAGES)),
        "block_size": rng.choice((1, 2, 3, 4, 8, 16, 32)),
        "pool_tokens": rng.choice((4, 16, 48, 100, 300, 600, 1200)),
        "budget": rng.choice((4, 16, 64)),
        "backend": rng.choice(("auto", "auto", "torch", "native")),
        "kv_dtype": rng.choice(("model", "fp8_e4m3")),
        "prefix_caching": rng.random() < 0.7,
        "states": rng.choice(("align", "align", "none")),
        "behind_first": rng.random() < 0.2,
    }
    for name, values, share in (
        ("cache", ("contiguous_max", "contiguous_pow2"), 0.1),
        ("retention_interval", (None, 16, 64), 0.2),
        ("state_every", (4, 8, 12, 64), 0.1),
        ("window_hits", ("all",), 0.2),
        ("host_blocks", (1, 40), 0.3),
        ("draft_mode", ("lookahead", "fork", "whole"), 0.3),
    ):
        if rng.random() < share:
            options[name] = rng.choice(values)
    if "draft_mode" in options:
        options |= {"draft": draft_of(family), "draft_tokens": rng.choice((1, 3, 8))}
    return family, options


@pytest.mark.nightly
def test_a_drawn_layout_is_refused_at_load_or_serves():
    from engine.core.errors import CoreError, NeverFitsError
    from engine.runtime.errors import ModelError
    from engine.runtime.params import SamplingParams
    from paged_kernels.arguments import BackendUnavailableError

    rng, served = random.Random(NIGHT_SEED if NIGHT else 4), 0
    for _ in range(tier(12, 300)):
        family, options = drawn_layout(rng)
        try:
            llm = make_llm(family, **dict(options))
        except (ModelError, BackendUnavailableError, CoreError):
            continue
        ask = SamplingParams(max_tokens=2, temperature=0)
        assert all(done.outputs[0].token_ids for done in llm.generate([[5], [7, 8]], ask)), options
        for wide in ({"n": 2, "temperature": 1.0}, {"beam_width": 2}):
            with suppress(NeverFitsError):  # the pool is too small for several sequences
                assert llm.generate([[7, 8]], SamplingParams(max_tokens=2, **wide))[0].outputs
        served += 1
    assert served >= tier(3, 60)


# -- planted bugs ------------------------------------------------------------------------------------------


def one_token_early(real):
    return lambda group, computed: real(group, computed + 1)


def lose_a_reference(real):
    def open_hits(tables, part, table, *source):
        real(tables, part, table, *source)
        if tables.group.window is not None and table[part.held :]:
            tables.pool.release(table[-1:])

    return open_hits


def hit_without_its_window(real):
    return lambda hits, group, index, tokens, needed: tokens


def hit_of_the_wrong_group(real):
    return lambda hits, *asked: (lambda pages: [pages[1], pages[0]])(real(hits, *asked))


def never_void(real):
    return lambda pages: [page for page in real(pages) if page % 2]


PLANTED = {
    "a window block is released one token early": (KVGroup, "skipped", one_token_early, "sees token"),
    "a group's reference is lost": (BlockTables, "open_hits", lose_a_reference, "group|page|block"),
    "a hit without its window": (GroupHits, "_last_run", hit_without_its_window, "group 0 reads page"),
    "pages of one group given to the other": (
        GroupHits,
        "_pages",
        hit_of_the_wrong_group,
        "group 0 reads page .* which group 1 has written",
    ),
    "a void page is not set to NaN": (PoolPages, "drain_voided", never_void, "group"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_engine_notices_a_planted_bug(bug, monkeypatch):
    from engine.runtime.errors import AuditError, NaNLogitsError

    owner, name, make, said = PLANTED[bug]
    llm = make_llm("gemma2", pool_tokens=200, retention_interval=None)
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    with pytest.raises((AuditError, NaNLogitsError, CoreError), match=said):
        serve(llm, turns=3)


def test_a_counter_of_one_group_that_drifts_is_noticed(monkeypatch):
    from engine.runtime.errors import AuditError

    llm = make_llm("gemma2")
    real = BlockTables.wrote

    def wrote(tables, tokens):
        real(tables, tokens)
        tables.counters.written += tables.group.window is not None

    monkeypatch.setattr(BlockTables, "wrote", wrote)
    with pytest.raises(AuditError, match=r"step 0: group 0 \(window\) has \d+ tokens in its tensors"):
        serve(llm)


def test_a_token_that_only_one_layer_misses_is_noticed():
    from engine.runtime.errors import AuditError

    llm = make_llm("gemma2")
    serve(llm)
    view = llm.runner.pool.views[0]
    view.values[view.layers[1]][1:] = float("nan")
    with pytest.raises(AuditError, match="the layers of group 0 hold different numbers of tokens"):
        llm.runner.pool.written_units()
