"""The block manager that lessons on PagedAttention describe: allocate, free, share, cow, and slot mapping.

A thin face over `PagedManager`, for learning and for small programs of one's own. Sequences have names, and any tokens
may be added to any of them at any time. The scheduler does not use it: a scheduler knows how long each request becomes.
"""

from collections.abc import Hashable, Sequence

from engine.core.errors import CoreError, OutOfBlocksError, UnknownSequenceError
from engine.core.identity import TokenIdentity
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding
from engine.core.plan import SlotUsage
from engine.core.request import Request
from engine.core.sequence import Group, ScheduledRow, SequenceState


class BlockManager:
    """Blocks of `block_size` tokens in a pool of `num_blocks`, by the name of a sequence.

    >>> blocks = BlockManager(num_blocks=8, block_size=4)
    >>> blocks.allocate("a", 6)  # two blocks, the second half full
    [1, 2]
    >>> blocks.share("a", "b")  # b reads the same blocks; nothing is copied
    [1, 2]
    >>> blocks.cow("b")  # b is about to write into block 2, which a reads too
    (2, 3)
    >>> blocks.allocate("b", 1)
    [1, 3]
    >>> blocks.get_slot_mapping("b", [0, 6])  # block 1, offset 0; block 3, offset 2
    [4, 14]
    >>> blocks.free("a")  # block 1 stays: b reads it
    [2]

    Block 0 is the null block, which no sequence gets. What is not yet written counts as `reserved` in `usage`, because
    no final length is known here. `manager` is the real manager, with all its counters. With `prefix_caching`, prompts
    that are given as token ids share their full blocks with equal beginnings of earlier prompts; appended tokens are
    private.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = False) -> None:
        self.manager = PagedManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self._sequences: dict[Hashable, SequenceState] = {}
        self._made = 0

    def allocate(self, sequence: Hashable, tokens: int | Sequence[int]) -> list[int]:
        """Give `sequence` room for `tokens` more tokens; returns its block table.

        The first call for a name opens the sequence, and may give the ids of its tokens, which the prefix cache knows
        again. Appending into a partial last block that is shared copies the block first, as `cow` does. Raises
        OutOfBlocksError, with nothing changed, where too few blocks are free, and CoreError for fewer than 1 token.
        """
        count = tokens if isinstance(tokens, int) else len(tokens)
        if count < 1:
            raise CoreError(f"sequence {sequence!r}: {count} tokens asked for, must be at least 1")
        state = self._sequences.get(sequence)
        if state is None:
            self._open(sequence, count, () if isinstance(tokens, int) else tokens)
        elif isinstance(tokens, int):
            self._append(sequence, state, count)
        else:
            raise CoreError(f"sequence {sequence!r} exists already: give a number of tokens, not their ids")
        return self.table(sequence)

    def _open(self, sequence: Hashable, count: int, ids: Sequence[int]) -> None:
        if count > self.manager.num_blocks * self.manager.block_size:
            raise self._full(sequence, count)
        group = Group(self._request(count, ids))
        hits = self.manager.lookup(group)
        if not self.manager.can_admit(group, hits, 0):
            raise self._full(sequence, count)
        (state,) = group.sequences
        self.manager.admit(group, hits)
        self.manager.extend(ScheduledRow(state, count - state.computed, True))
        state.computed = count
        self._sequences[sequence] = state

    def _append(self, sequence: Hashable, state: SequenceState, count: int) -> None:
        end, size = state.computed + count, self.manager.block_size
        copies = bool(state.computed % size) and self.references(state.table[-1]) > 1
        need = self.manager.tables.blocks_of(end) - len(state.table) + copies
        if need > self.free_blocks or end > state.request.final_kv_tokens:
            raise self._full(sequence, count)
        self.manager.extend(ScheduledRow(state, count, True))
        state.computed = end

    def _full(self, sequence: Hashable, count: int) -> OutOfBlocksError:
        return OutOfBlocksError(
            f"sequence {sequence!r}: {count} tokens need more blocks than the {self.free_blocks} of "
            f"{self.manager.num_blocks} that are free"
        )

    def share(self, parent: Hashable, child: Hashable) -> list[int]:
        """Let the new sequence `child` read all blocks of `parent`; returns its table.

        Each block gets one more reference. No block is taken and nothing is copied. Raises UnknownSequenceError
        without such a parent, and CoreError if the name of the child is in use.
        """
        state = self._known(parent)
        if child in self._sequences:
            raise CoreError(f"sequence {child!r} exists already: free it first, or take another name")
        branch = SequenceState(state.request, self._made, state.computed)
        self._made += 1
        self.manager.fork(state, [branch])
        self._sequences[child] = branch
        return list(branch.table)

    def cow(self, sequence: Hashable) -> tuple[int, int] | None:
        """Copy on write: make the last block of `sequence` its own before it writes there; returns (source, copy).

        None where no copy is needed: the block has one reference, or it is full, so that the next token opens a new
        block. Raises OutOfBlocksError, with nothing changed, where no block is free. The caller copies the content.
        """
        state = self._known(sequence)
        table = self.manager.tables.get(state)
        if not state.computed % self.manager.block_size or self.references(table[-1]) < 2:
            return None
        source = table[-1]
        self.manager.tables.copy_tail(state, self.manager.pool.take_one())
        return source, table[-1]

    def free(self, sequence: Hashable) -> list[int]:
        """End `sequence` and drop one reference to each of its blocks; returns the blocks that are free now."""
        state = self._known(sequence)
        gone = [block for block in state.table if self.references(block) == 1]
        self.manager.release(state)
        del self._sequences[sequence]
        return gone

    def get_slot_mapping(self, sequence: Hashable, positions: Sequence[int]) -> list[int]:
        """The slots of tokens of `sequence`: table[position // block_size] x block_size + position % block_size.

        Raises CoreError for a position that has no block yet.
        """
        state, size = self._known(sequence), self.manager.block_size
        for position in positions:
            if not 0 <= position < state.computed:
                raise CoreError(
                    f"sequence {sequence!r} has tokens 0 to {state.computed - 1}, not {position}: allocate it first"
                )
        return [state.table[position // size] * size + position % size for position in positions]

    def table(self, sequence: Hashable) -> list[int]:
        """The block table of `sequence`."""
        return list(self._known(sequence).table)

    def tokens(self, sequence: Hashable) -> int:
        """How many tokens `sequence` has."""
        return self._known(sequence).computed

    def references(self, block: int) -> int:
        """How many sequences read `block`."""
        return self.manager.pool.references(block)

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence reads."""
        return self.manager.pool.free_blocks

    def usage(self) -> SlotUsage:
        """The slots of the pool by state."""
        return self.manager.usage(None)

    def _request(self, prompt: int, ids: Sequence[int]) -> Request:
        """A request that may become as long as the pool. Only its prompt is cached, as of beams."""
        self._made += 1
        room = self.manager.num_blocks * self.manager.block_size
        identity = TokenIdentity(self._made, ids) if len(ids) else None
        return Request(self._made, prompt, room - prompt + 1, decoding=Decoding.beam, identity=identity)

    def _known(self, sequence: Hashable) -> SequenceState:
        state = self._sequences.get(sequence)
        if state is None:
            known = ", ".join(map(repr, self._sequences)) or "none"
            raise UnknownSequenceError(f"there is no sequence {sequence!r}; there are: {known}")
        return state
