"""Models whose layers are in groups: served, and beside `generate()` of transformers. Every step is audited."""

import functools

from families import build, prompts

from engine.core.options import SchedulerLimits

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = {  # family: its layers
    "gemma2": (SLIDING, FULL, SLIDING, FULL),
    "gemma3_text": (SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL),
    "gemma4_text": (SLIDING, SLIDING, FULL) * 2,
    "ministral": (SLIDING, SLIDING, SLIDING, FULL),
    "gpt_oss": (SLIDING, FULL),
    "cohere2": (SLIDING, SLIDING, SLIDING, FULL),
}
SIZES = (5, 32, 61, 90)  # tokens of the prompts; the last one begins as the one before it
SHORT = (6, 7, 8, 9, 10)
NEW = 20


@functools.cache
def loaded(family):
    from engine.runtime.models.load import wrap_model

    return wrap_model(build(family, MIXED.get(family, ())), name=family)


@functools.cache
def expected(family, sizes=SIZES):
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


def make_llm(family, *, budget=16, running=15, pool_tokens=408, groups="uniform", **options):
    from engine.runtime.llm import LLM

    limits = SchedulerLimits(budget, running, max_model_len=128, **options.pop("scheduling", {}))
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
