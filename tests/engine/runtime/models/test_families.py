"""Every family equals transformers' `generate()` token for token in float32, however memory and work are cut up.

By night every pair of (family, block size, tokens a step, prefix caching, preemption, lengths) runs for most families,
a row for each of the others, and the whole grid; by day the families that differ most have their rows of the pairs.
`test_every_type.py` runs every other type.
"""

import functools

import pytest
from families import (
    BUDGETS,
    CONTIGUOUS,
    DISTINCT,
    FAMILIES,
    NEW,
    all_runs,
    build,
    pairwise,
    prompts,
    runs_of,
)
from tiers import cases

from engine.core.options import Preemption, SchedulerLimits


@functools.cache
def loaded(family):
    from engine.runtime.models.load import wrap_model

    return wrap_model(build(family), name=family)


@functools.cache
def expected(family, sizes):
    """transformers' answers, how many tokens differ in them, and the smallest lead of a chosen token."""
    import torch

    from engine.runtime.models.load import original_model

    said, gaps = [], []
    with original_model(loaded(family)) as model:
        for prompt in prompts(sizes):
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NEW,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
            said.append(out.sequences[0, len(prompt) :].tolist())
            gaps += [float(top[0] - top[1]) for score in out.scores for top in score.topk(2).values]
    return said, len({token for text in said for token in text}), min(gaps)


def serve(family, block_size, budget, prefix_caching, store, sizes):
    """The engine's answers; tight memory holds the prompts and not a block more."""
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    blocks = sum(-(-size // block_size) for size in sizes)
    preemption = Preemption.swap if store == "swap" else Preemption.recompute
    limits = SchedulerLimits(budget, 8, max_model_len=520, preemption=preemption)
    options = {"pool_tokens": blocks * block_size, "host_blocks": blocks}
    if store == "calm":
        options = {"pool_tokens": 2048}
    if store in CONTIGUOUS:
        options = {"pool_tokens": 1600, "cache": store}
    llm = LLM(
        loaded(family),
        limits=limits,
        block_size=block_size,
        prefix_caching=prefix_caching,
        audit_every=8,
        **options,
    )
    params = SamplingParams(max_tokens=NEW, temperature=0)
    said = [done.outputs[0].token_ids for done in llm.generate(prompts(sizes), params)]
    if store in ("recompute", "swap") and budget == max(BUDGETS) and not prefix_caching:
        assert llm.engine.counters.preemptions > 0
    llm.scheduler.manager.check()
    return said


@functools.cache
def chosen_runs():
    return runs_of(FAMILIES)


@cases("family", FAMILIES, day=DISTINCT)
def test_a_family_equals_generate(family):
    check(family, [run for run in chosen_runs() if run[0] == family])


def check(family, runs):
    for run in runs:
        said, distinct, gap = expected(family, run[-1])
        what = f"{distinct} distinct tokens, smallest lead {gap:.1e}"
        assert distinct >= 4, f"{family} repeats itself, which proves nothing: {what}"
        assert serve(*run) == said, (run, what)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_grid_of_a_family(family):
    check(family, [run for run in all_runs() if run[0] == family])


def test_rows_hold_every_pair():
    rows = pairwise((1, 2, 3), "ab", (True, False))
    assert {(row[0], row[1]) for row in rows} == {(one, two) for one in (1, 2, 3) for two in "ab"}
    assert {(row[1], row[2]) for row in rows} == {(one, two) for one in "ab" for two in (True, False)}
    assert len(rows) <= 7


def test_layers_with_unequal_widths_get_the_widths_they_send():
    assert loaded("deepseek_v3").kv_shapes == (((4, 16), (4, 12)),) * 2
