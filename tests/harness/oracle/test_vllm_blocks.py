"""Block hashes, extra keys and residency beside vLLM's own functions. Needs PAGETWIN_VLLM=PATH/bin/python."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from oracle_cases import PYTHON

from engine.core import (
    HashAlgorithm,
    MultimodalItem,
    PagedManager,
    Request,
    ResidencySampler,
    Scheduler,
    SchedulerLimits,
    StepResult,
    TokenIdentity,
)
from engine.core.sequence import Group, ScheduledRow
from harness.config.errors import ConfigError
from harness.oracle.check import vllm_version
from harness.replay.memory import KvEvents
from traces.formats.kv_events import BlockStored


def in_vllm(script: str, question: object) -> Any:
    """What `script` prints as JSON in vLLM's interpreter, given the question as JSON."""
    try:
        vllm_version(PYTHON)
    except ConfigError:
        pytest.skip("vLLM is not installed; PAGETWIN_VLLM=PATH/bin/python names an environment that has it")
    words = [PYTHON or sys.executable, "-c", script]
    done = subprocess.run(words, input=json.dumps(question), capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


_EXTRA_KEYS = """
import json, sys
from types import SimpleNamespace as Is
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils as core
core.init_none_hash(sha256_cbor)
answers = []
for case in json.load(sys.stdin):
    items = [Is(identifier=n, mm_position=Is(offset=f, length=t)) for n, f, t in case["items"]]
    lora = Is(lora_name=case["adapter"][0], lora_path=case["adapter"][1]) if case["adapter"] else None
    request = Is(mm_features=items, lora_request=lora, cache_salt=case["salt"], prompt_embeds=None)
    size, tokens, parent, at, hashes, events = case["size"], case["tokens"], None, 0, [], []
    for start in range(0, len(tokens) - size + 1, size):
        keys, at = core.generate_block_hash_extra_keys(request, start, start + size, at)
        parent = core.hash_block_tokens(sha256_cbor, parent, tokens[start : start + size], keys)
        hashes.append(parent.hex())
        events.append(keys)
    answers.append([hashes, core.to_event_extra_keys(events)])
print(json.dumps(answers))
"""


def random_prompt(draw: random.Random) -> dict[str, Any]:
    """A prompt with items, and perhaps a salt and an adapter."""
    tokens = [draw.randrange(9) for _ in range(draw.randrange(1, 60))]
    items, free = [], 0
    while (first := free + draw.randrange(8)) < len(tokens):
        items.append((draw.choice("abc"), first, draw.randrange(1, min(20, len(tokens) - first) + 1)))
        free = first + items[-1][2]
    return {
        "tokens": tokens,
        "items": items[: draw.randrange(4)],
        "size": draw.choice([1, 4, 16]),
        "salt": draw.choice(["", "tenant"]),
        "adapter": draw.choice([None, ["sql", "/adapters/sql"]]),
    }


def test_hashes_and_extra_keys_of_prompts_with_pictures_are_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cbor2", reason="hashes of CBOR need pagetwin[events]")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    draw = random.Random(0)
    cases = [random_prompt(draw) for _ in range(200)]
    found = in_vllm(_EXTRA_KEYS, cases)
    for case, (hashes, keys) in zip(cases, found, strict=True):
        name, path = case["adapter"] or (None, "")
        items = [MultimodalItem(*item) for item in case["items"]]
        identity = TokenIdentity(
            0,
            case["tokens"],
            case["salt"],
            adapter=name,
            adapter_path=path,
            items=items,
            algorithm=HashAlgorithm.sha256_cbor,
        )
        assert [one.hex() for one in identity.prompt_hashes(case["size"])] == hashes
        assert published_keys(identity, case["size"], len(hashes)) == (keys if any(keys or ()) else None)


def published_keys(identity: TokenIdentity, size: int, blocks: int) -> Any:
    """The extra keys in the event of a prompt's blocks, as JSON gives them."""
    if not blocks:
        return None
    manager = PagedManager(64, size, keep_events=True)
    group = Group(Request(0, blocks * size + 1, 1, identity=identity))
    manager.admit(group, manager.lookup(group))
    manager.extend(ScheduledRow(group.sequences[0], blocks * size, True))
    batch = KvEvents(manager).batch(0.0)
    assert batch is not None
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    return json.loads(json.dumps(event.extra_keys))


_RESIDENCY = """
import json, sys, time
from types import SimpleNamespace as Is
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
collector, now = KVCacheMetricsCollector(1.0), [0]
time.monotonic_ns = lambda: now[0]
for at, kind, blocks in json.load(sys.stdin):
    now[0] = at
    for block in map(lambda n: Is(block_id=n), blocks):
        if kind == "used":
            collector.on_block_accessed(block)
        else:
            collector.on_block_evicted(block)
            collector.on_block_allocated(block)
print(json.dumps([[e.lifetime_seconds, e.idle_seconds, e.reuse_gaps_seconds] for e in collector.drain_events()]))
"""


class _Noted(ResidencySampler):
    """A sampler of all blocks that notes what the pool tells it."""

    def __init__(self) -> None:
        super().__init__(1.0, clock=lambda: self.now)
        self.now = 0
        self.told: list[tuple[int, str, list[int]]] = []

    def allocated(self, blocks: Sequence[int]) -> None:
        self.told.append((self.now, "allocated", list(blocks)))
        super().allocated(blocks)

    def used(self, blocks: Sequence[int]) -> None:
        self.told.append((self.now, "used", list(blocks)))
        super().used(blocks)


def test_the_residency_of_blocks_is_what_vllms_collector_says() -> None:
    sampler, draw = _Noted(), random.Random(1)
    scheduler = Scheduler(PagedManager(40, 4, residency=sampler), SchedulerLimits(64, 8))
    for number in range(200):
        prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 40))]
        scheduler.submit(Request(number, len(prompt), 12, identity=TokenIdentity(number, prompt)))
    while scheduler.has_work:
        sampler.now += draw.randrange(1, 10**9)
        scheduler.commit(scheduler.schedule(), StepResult())
    found = in_vllm(_RESIDENCY, sampler.told)
    ours = [[one.lifetime_s, one.idle_s, list(one.reuse_gaps_s)] for one in sampler.drain()]
    assert len(found) > 500
    assert any(gaps for _, _, gaps in found)
    assert found == ours
