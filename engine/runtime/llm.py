"""The public face: give it a model and prompts, get tokens. Four lines of loop around scheduler and runner."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.contiguous import ContiguousMaxManager
from engine.core.errors import CoreError
from engine.core.identity import TokenIdentity
from engine.core.limits import SchedulerLimits
from engine.core.manager import KVCacheManager
from engine.core.paged import PagedManager
from engine.core.request import Decoding, Request
from engine.core.scheduler import Scheduler
from engine.runtime.model import LoadedModel, ModelSpec, load_model
from engine.runtime.runner import Runner


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt: exactly `max_tokens` tokens, greedily, as `n` samples, or as `beam_width` beams."""

    max_tokens: int = 16
    n: int | None = None  # parallel samples; None: no sampling
    beam_width: int = 1  # above 1: beam search

    @property
    def decoding(self) -> Decoding:
        """The way of decoding that these parameters ask for."""
        if self.beam_width > 1 and self.n is not None:
            raise CoreError("beam search and sampling exclude each other: set beam_width or n, not both")
        if self.beam_width > 1:
            return Decoding.BEAM
        return Decoding.GREEDY if self.n is None else Decoding.SAMPLE

    @property
    def width(self) -> int:
        """Sequences per request."""
        return self.beam_width if self.beam_width > 1 else self.n or 1


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt led to."""

    token_ids: list[list[int]]  # one list per sequence; beams best first
    scores: list[float]  # of beams; 0 otherwise


class LLM:
    """A model with a paged KV cache of `pool_tokens` slots behind a continuous-batching scheduler.

    `contiguous` replaces paging by reservations of `max_model_len` slots (the classic baseline).
    """

    def __init__(
        self,
        model: ModelSpec | LoadedModel,
        *,
        pool_tokens: int = 16384,
        block_size: int = 16,
        prefix_caching: bool = True,
        contiguous: bool = False,
        limits: SchedulerLimits | None = None,
        backend: str = "auto",
        audit: str = "sampled",
        temperature: float = 1.0,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.loaded = load_model(model, device=device) if isinstance(model, ModelSpec) else model
        limits = limits or SchedulerLimits(max_model_len=self.loaded.max_position)
        manager: KVCacheManager
        if contiguous:
            manager = ContiguousMaxManager(pool_tokens, limits.max_model_len or self.loaded.max_position)
        else:
            manager = PagedManager(pool_tokens // block_size, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(manager, limits)
        self.runner = Runner(
            self.loaded,
            num_blocks=manager.num_blocks,
            block_size=manager.block_size,
            backend=backend,
            audit=audit,
            temperature=temperature,
            seed=seed,
        )
        self._next_id = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Continue prompts of token ids; all must fit (NeverFitsError). The prefix cache lives on between calls."""
        ids = [
            self._submit(np.asarray(prompt, dtype=np.int64), params or SamplingParams()) for prompt in prompts
        ]
        while self.scheduler.has_work:
            self.step()
        done = [Completion(self.runner.outputs(request), self.runner.scores(request)) for request in ids]
        for request in ids:
            self.runner.forget(request)
        return done

    def step(self) -> None:
        """One engine step."""
        plan = self.scheduler.schedule()
        result, _ = self.runner.execute(plan)
        self.scheduler.commit(plan, result)

    def _submit(self, prompt: "np.ndarray[tuple[int], np.dtype[np.int64]]", params: SamplingParams) -> int:
        request = Request(
            self._next_id,
            len(prompt),
            params.max_tokens,
            params.width,
            params.decoding,
            TokenIdentity(self._next_id, prompt),
        )
        self.scheduler.submit(request)
        self.runner.add(request, prompt)
        self._next_id += 1
        return request.request_id
