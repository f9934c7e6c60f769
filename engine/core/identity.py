"""Block identity: opaque names for the content of full blocks, chained over the prefix.

Two blocks with equal names hold equal K and V. The engine derives names from token ids, the simulator from the
trace's prefix keys without ever making tokens; `tests/engine/test_identity.py` shows that both give the same
sharing. Blocks that hold a generated token are named after their request and branch: no public trace says that an
output is reused by another request, so replay keeps outputs private (a preempted sequence still finds its own).
"""

import hashlib
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

BlockName = Hashable

_BRANCH_BITS = 12
_BLOCK_BITS = 32


def private_name(request_id: int, branch: int, block: int) -> int:
    """A name that no other request, branch or block position can have."""
    return (((request_id << _BRANCH_BITS) | branch) << _BLOCK_BITS) | block


class BlockIdentity(Protocol):
    """Names the full blocks of one request."""

    def prompt_names(self, block_size: int) -> Sequence[BlockName]:
        """Names of the blocks that the prompt fills, in order: `prompt_tokens // block_size` of them."""
        ...

    def generated_name(self, branch: int, block: int) -> BlockName:
        """Name of block number `block` of sequence `branch`, where it holds at least one generated token."""
        ...


class _PrivateOutputs:
    """Outputs stay private to their request and branch."""

    def __init__(self, request_id: int) -> None:
        self._request_id = request_id

    def generated_name(self, branch: int, block: int) -> BlockName:
        """A name that only this request's branch can have."""
        return private_name(self._request_id, branch, block)


class TokenIdentity(_PrivateOutputs):
    """Identity from token ids: SHA-256 over (parent digest, the block's token bytes), seeded with a tenant salt."""

    def __init__(self, request_id: int, token_ids: npt.NDArray[np.int64], salt: str = "") -> None:
        super().__init__(request_id)
        self._tokens = np.ascontiguousarray(token_ids, dtype=np.int64)
        self._root = hashlib.sha256(b"pagetwin:" + salt.encode()).digest()

    def prompt_names(self, block_size: int) -> list[BlockName]:
        """Chained digests of the prompt's full blocks."""
        data, width = self._tokens.tobytes(), block_size * self._tokens.itemsize
        names: list[BlockName] = []
        parent = self._root
        for start in range(0, len(data) - width + 1, width):
            parent = hashlib.sha256(parent + data[start : start + width]).digest()
            names.append(parent)
        return names


class KeyIdentity(_PrivateOutputs):
    """Identity from a trace's ordered prefix segments `(key, tokens)`; key None means unique to this request.

    A block is named by the pieces of segments that it covers. From the first unique piece on every block is private,
    so nothing needs to be hashed there: that is what makes a million requests cheap.
    """

    def __init__(self, request_id: int, segments: Sequence[tuple[int | None, int]], salt: str = "") -> None:
        super().__init__(request_id)
        self._request_id = request_id
        self._segments = segments
        self._root = hashlib.blake2b(salt.encode(), digest_size=16).digest()

    def prompt_names(self, block_size: int) -> list[BlockName]:
        """Chained digests while the prefix is keyed, private names from there on."""
        total = sum(tokens for _, tokens in self._segments)
        names: list[BlockName] = list(self._shared_names(block_size))
        names.extend(
            private_name(self._request_id, 0, block) for block in range(len(names), total // block_size)
        )
        return names

    def _shared_names(self, block_size: int) -> list[bytes]:
        """Names of the leading blocks that are covered by keyed segments alone."""
        keyed = self._leading_keyed()
        starts = [0]
        for _, tokens in keyed:
            starts.append(starts[-1] + tokens)
        spans = [(key, start, end) for (key, _), (start, end) in zip(keyed, pairwise(starts), strict=True)]
        names: list[bytes] = []
        parent, first = self._root, 0
        for low in range(0, starts[-1] - block_size + 1, block_size):
            high = low + block_size
            while spans[first][2] <= low:
                first += 1
            pieces, index = [], first
            while index < len(spans) and spans[index][1] < high:
                key, start, end = spans[index]
                pieces.append(b"%d:%d:%d" % (key, max(low, start) - start, min(high, end) - max(low, start)))
                index += 1
            parent = hashlib.blake2b(parent + b"|".join(pieces), digest_size=16).digest()
            names.append(parent)
        return names

    def _leading_keyed(self) -> list[tuple[int, int]]:
        keyed: list[tuple[int, int]] = []
        for key, tokens in self._segments:
            if key is None:
                break
            keyed.append((key, tokens))
        return keyed
