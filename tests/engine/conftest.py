"""Small random models and their reference outputs for the engine's tests; torch is imported only when asked for."""

import functools

import numpy as np
import pytest
from tiny_models import SHAPE


@pytest.fixture(scope="session")
def compiled_kernels():
    """The compiled CPU kernels are there; the test skips where they cannot be had."""
    from paged_kernels.native import why_unavailable

    if reason := why_unavailable():
        pytest.skip(f"no compiled kernels: {reason}")


@functools.cache
def loaded_model(family="llama"):
    """A model of the family on paged KV; one per process."""
    import torch

    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    torch.set_num_threads(1)
    kv_heads = 4 if family in ("gpt2", "opt") else 2
    return load_model(ModelSpec(name=f"test-{family}", family=family, kv_heads=kv_heads, **SHAPE))


@functools.cache
def generated(family, prompt, tokens, beams=1):
    """transformers' own answer with its own attention: sequences (best first) and beam scores."""
    import torch

    from engine.runtime.models.load import original_model

    options = {"num_beams": beams, "num_return_sequences": beams, "do_sample": False}
    with original_model(loaded_model(family)) as model:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    scores = out.sequences_scores.tolist() if beams > 1 else []
    return out.sequences[:, len(prompt) :].tolist(), scores


@pytest.fixture(name="model_of", scope="session")
def model_of_fixture():
    return loaded_model


@pytest.fixture(name="generate", scope="session")
def generate_fixture():
    return generated


@pytest.fixture(scope="session", name="prompts")
def prompts_fixture():
    """Ragged prompts, two of them sharing 24 tokens, one of exactly 32 tokens twice (a whole-prompt hit)."""
    rng = np.random.default_rng(7)
    draw = [tuple(rng.integers(0, 512, size).tolist()) for size in (3, 17, 32, 40, 33)]
    return [*draw, draw[3][:24] + draw[1][:9], draw[2]]
