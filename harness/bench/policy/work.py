"""The work of the lines on prompts, apart from its timing: `fresh` prepares a round, which is not timed, `run` is."""

from collections.abc import Sequence as Values

import numpy as np

from engine.core.identity import TokenIdentity
from engine.core.memory.paged import PagedManager
from engine.core.plan import IntArray
from engine.core.request import Request
from engine.core.sequence import Group, ScheduledRow

BLOCK_SIZE = 16
_VOCABULARY = 32_000


def tokens_of(seed: int, count: int) -> IntArray:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, _VOCABULARY, count)


def token_request(number: int, tokens: int) -> Request:
    """A request whose prompt nobody shares; 8 tokens of output."""
    return Request(number, tokens, 8, identity=TokenIdentity(number, tokens_of(number, tokens)))


def prefill(manager: PagedManager, group: Group) -> None:
    """Look nothing up; compute the whole prompt in one step."""
    hits: list[int] = []
    if not manager.can_admit(group, hits, 0):
        raise RuntimeError(f"{group.request.request_id} does not fit: the benchmark's pool is too small")
    manager.admit(group, hits)
    root = group.sequences[0]
    manager.extend(ScheduledRow(root, group.request.prompt_tokens, True))
    root.computed = group.request.prompt_tokens


class Allocation:
    """Prompts whose blocks were named beforehand; `evicting` pools hold exactly one round."""

    def __init__(self, sequences: int, tokens: int, *, evicting: bool) -> None:
        self.blocks = sequences * (tokens // BLOCK_SIZE)
        self._manager = PagedManager(self.blocks * (1 if evicting else 2), BLOCK_SIZE)
        self._evicting = evicting
        self._sequences, self._tokens = sequences, tokens
        self._round = 0
        for _ in range(1 if evicting else 2):
            self.run(*self.fresh()[0])
        self._clear()

    def _clear(self) -> None:
        if not self._evicting:
            self._manager.reset_prefix_cache()
        self._manager.drain_frees()

    def fresh(self) -> tuple[tuple[list[Group]], dict[str, object]]:
        """Groups with names that no round had before."""
        self._clear()
        groups = []
        for number in range(self._sequences):
            identity = TokenIdentity(number, tokens_of(number, self._tokens), salt=f"round {self._round}")
            group = Group(Request(number, self._tokens, 1, identity=identity))
            group.names = identity.prompt_names(BLOCK_SIZE)
            groups.append(group)
        self._round += 1
        return (groups,), {}

    def run(self, groups: list[Group]) -> None:
        """Allocate all, then free all."""
        manager = self._manager
        for group in groups:
            prefill(manager, group)
        for group in groups:
            manager.release(group.sequences[0])


class Prompts:
    """Prompts of which the first half is one system prompt, one after the other."""

    def __init__(self, count: int, tokens: int, *, evicting: bool) -> None:
        self.count = count
        self._tokens = tokens
        blocks = tokens // BLOCK_SIZE
        self._manager = PagedManager(blocks * (200 if evicting else count + 2), BLOCK_SIZE)
        self._evicting = evicting
        self._shared = tokens_of(0, tokens // 2)
        self._round = 0
        for _ in range(1 + 400 // count if evicting else 1):  # until the pool is full
            self.run(*self.fresh()[0])

    def fresh(self) -> tuple[tuple[list[IntArray]], dict[str, object]]:
        """Prompts with second halves that no round had before."""
        if not self._evicting:
            self._manager.reset_prefix_cache()
            self._serve(np.concatenate([self._shared, tokens_of(1, self._tokens // 2)]))
        self._manager.drain_frees()
        self._round += 1
        own = [
            tokens_of(self._round * self.count + number, self._tokens // 2) for number in range(self.count)
        ]
        return ([np.concatenate([self._shared, half]) for half in own],), {}

    def fresh_lists(self) -> tuple[tuple[list[list[int]]], dict[str, object]]:
        """The same as lists."""
        (prompts,), _ = self.fresh()
        return ([prompt.tolist() for prompt in prompts],), {}

    def run(self, prompts: Values[IntArray]) -> None:
        """Serve each from tokens to release."""
        for prompt in prompts:
            self._serve(prompt)

    def run_lists(self, prompts: list[list[int]]) -> None:
        """Serve each from a list of tokens to release."""
        for prompt in prompts:
            self._serve(np.array(prompt, dtype=np.int64))

    def _serve(self, prompt: IntArray) -> int:
        manager = self._manager
        group = Group(Request(0, self._tokens, 1, identity=TokenIdentity(0, prompt)))
        hits = manager.lookup(group)
        if not manager.can_admit(group, hits, 0):
            raise RuntimeError("a prompt does not fit: the benchmark's pool is too small")
        manager.admit(group, hits)
        root = group.sequences[0]
        manager.extend(ScheduledRow(root, self._tokens - BLOCK_SIZE * len(hits), True))
        root.computed = self._tokens
        manager.release(root)
        return len(hits)
