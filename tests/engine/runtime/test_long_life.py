"""A server that runs for days keeps nothing of requests that are over."""

import gc
from collections import deque

import numpy as np
from tiers import cases, tier

from engine.core.options import Preemption, SchedulerLimits
from engine.runtime.engine import Engine
from engine.runtime.options import EngineOptions
from engine.runtime.params import SamplingParams

CASES = {
    "greedy": ({}, {}, {}),
    "samples": ({}, {}, {"n": 3, "temperature": 1.0, "seed": 3}),
    "beams": ({}, {}, {"beam_width": 3}),
    "without prefix caching": ({"prefix_caching": False}, {}, {}),
    "contiguous": ({"cache": "contiguous_pow2"}, {}, {}),
    "one batch after the other": ({}, {"static_batch": True}, {}),
    "swapped": ({"host_blocks": 40}, {"preemption": Preemption.swap}, {}),
    "stop strings": ({}, {}, {"stop": ["zz"], "logprobs": 2}),
}

REQUESTS = tier(30, 60)  # of each round


def entries(root):
    """Entries of all containers that hang on `root`, tensors and the model left out."""
    import torch

    seen, pending, count = set(), [root], 0
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, type | torch.Tensor | torch.nn.Module) or callable(one):
            continue
        seen.add(id(one))
        if isinstance(one, deque) and one.maxlen is not None:
            continue  # it cannot grow without end
        if isinstance(one, dict | list | set | deque):
            count += len(one)
        elif not type(one).__module__.startswith(("engine.", "collections", "builtins")):
            continue
        pending.extend(gc.get_referents(one))
    return count


def serve(engine, draw, count, params, first):
    for number in range(first, first + count):
        prompt = draw.integers(0, 256, int(draw.integers(4, 40))).tolist()
        engine.add_request(f"request {number}", prompt, params)
        if number % 10 == 0:
            engine.abort(f"request {number}")
    assert all(output.error is None for output in engine.run())


@cases("case", CASES, day=("swapped",))
def test_the_books_do_not_grow_with_the_requests_that_were_served(case, model_of):
    from engine.runtime.text import ByteTokenizer

    options, limits, sampling = CASES[case]
    params = SamplingParams(**{"max_tokens": 6, "temperature": 0, "ignore_eos": True, **sampling})
    most = SchedulerLimits(48, 8, max_model_len=64, **limits)
    engine = Engine(
        model_of(),
        EngineOptions(pool_tokens=256, block_size=8, limits=most, **options),
        tokenizer=ByteTokenizer(),
    )
    draw, sizes = np.random.default_rng(5), []
    for round_number in range(4):
        serve(engine, draw, REQUESTS, params, REQUESTS * round_number)
        sizes.append(entries([engine.scheduler, engine.runner, vars(engine)]))
    assert not engine.scheduler.stats
    assert sizes[-1] < sizes[0] + REQUESTS / 2  # three times as many requests later
