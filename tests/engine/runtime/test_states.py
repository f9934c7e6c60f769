"""Models with recurrent state on the engine: tokens of `generate()`, states kept at block ends, and planted bugs.

The models are random ones of unmodified transformers classes. Every step is audited, in each group.
"""

import functools

import pytest
from families import STATEFUL, build, prompts

from engine.core.memory.group_layout import KVGroup
from engine.core.memory.grouped import GroupedManager
from engine.core.options import GroupKind, SchedulerLimits

PAGES = ("uniform", "separate", "lcm", "moving", "two_ended")
SIZES = (5, 32, 61, 90)  # tokens of the prompts; the last one begins as the one before it
SHORT = (6, 7, 8, 9, 10)
NEW = 20


@functools.cache
def loaded(family="qwen3_next"):
    from engine.runtime.models.load import wrap_model

    return wrap_model(build(family), name=family)


@functools.cache
def expected(family="qwen3_next", sizes=SIZES):
    """transformers' answers."""
    import torch

    from engine.runtime.models.load import original_model

    with original_model(loaded(family)) as model:
        said = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NEW,
                do_sample=False,
            )[0, len(prompt) :].tolist()
            for prompt in prompts(sizes)
        ]
    assert len({token for text in said for token in text}) >= 12, "a model that repeats itself proves nothing"
    return said


def make_llm(family="qwen3_next", *, budget=16, pool_tokens=900, groups="separate", **options):
    from engine.runtime.llm import LLM

    limits = SchedulerLimits(budget, 8, max_model_len=128)
    return LLM(
        loaded(family),
        limits=limits,
        **{"block_size": 4, "audit": "full", "pool_tokens": pool_tokens, "groups": groups} | options,
    )


def serve(llm, turns=1, sizes=SIZES):
    """Answers to the prompts, each time they are asked."""
    from engine.runtime.params import SamplingParams

    params = SamplingParams(max_tokens=NEW, temperature=0)
    said = [
        [done.outputs[0].token_ids for done in llm.generate(prompts(sizes), params)] for _ in range(turns)
    ]
    llm.scheduler.manager.check()
    return said


# -- the same tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", PAGES)
@pytest.mark.parametrize("family", STATEFUL)
def test_chunked_prompts_and_hits_on_kept_states_give_the_tokens_of_generate(family, groups):
    llm = make_llm(family, groups=groups, pool_tokens=6000)
    print(llm.scheduler.manager.layout, llm.runner.pool.bytes)
    assert serve(llm, turns=2) == [expected(family)] * 2
    assert llm.engine.counters.prefix_hits > 0
    assert llm.runner.audits == llm.engine.counters.steps


@pytest.mark.parametrize("groups", PAGES)
@pytest.mark.parametrize("family", STATEFUL)
def test_preemption_changes_no_token(family, groups):
    llm = make_llm(family, groups=groups, pool_tokens=256)
    assert serve(llm, sizes=SHORT) == [expected(family, SHORT)]
    assert llm.engine.counters.preemptions > 0
