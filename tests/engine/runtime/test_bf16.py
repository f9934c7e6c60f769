"""In bfloat16 tokens may differ where two are nearly equal; what the model thinks of given tokens may not."""

import torch
from tiers import cases
from tiny_models import SHAPE

from engine.core.options import SchedulerLimits


@cases("family", ["llama", "gemma2"], day=1)
def test_teacher_forced_logits_are_those_of_transformers(family, prompts):
    from engine.runtime.llm import LLM
    from engine.runtime.models.load import load_model, original_model
    from engine.runtime.models.spec import ModelSpec
    from engine.runtime.params import SamplingParams

    loaded = load_model(ModelSpec(family=family, kv_heads=2, dtype="bfloat16", **SHAPE))
    limits = SchedulerLimits(19, 8, max_model_len=96)  # chunks, and one preemption or more
    llm = LLM(loaded, limits=limits, pool_tokens=160, block_size=8, audit="full")
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=0)
    errors = []
    for prompt, done in zip(prompts, llm.generate(prompts, params), strict=True):
        one = done.outputs[0]
        with original_model(loaded) as model, torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *one.token_ids]])).logits[0, len(prompt) - 1 : -1]
        theirs = torch.log_softmax(logits.float(), dim=-1)[range(12), one.token_ids]
        errors.append((torch.tensor([entry.logprob for entry in one.logprobs]) - theirs).abs())
    error = torch.cat(errors)
    assert float(error.mean()) < 0.05
    assert float(error.max()) < 0.5
