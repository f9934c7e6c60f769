"""Block hashes: which blocks hold the same K and V.

The hash of a full block covers the block and all tokens before it. Two blocks with equal hashes hold equal K and V.
The engine hashes token ids (`TokenIdentity`). The simulator hashes the prefix keys of the trace (`KeyIdentity`) and
never makes tokens. `tests/engine/core/test_identity.py` shows that both find the same shared blocks. Blocks that
cannot be shared are not hashed: the pool gives them a private number, and only their own request finds them.
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import xxhash

from engine.core.errors import CoreError
from engine.core.options import HashAlgorithm

BlockHash = Hashable
"""An opaque value: equal hashes mean equal K and V. An `int` is private: only its own request can find the block."""

_TOKEN_BYTES = 4


class _RunningHash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...

    def copy(self) -> Self: ...


_HASH_FUNCTIONS: dict[HashAlgorithm, Callable[[bytes], _RunningHash]] = {
    HashAlgorithm.sha256: hashlib.sha256,
    HashAlgorithm.xxh3_128: xxhash.xxh3_128,
}


class PrefixHasher:
    """Hashes data in blocks of `block_bytes` bytes. `hashes` has one entry for each full block, chained from `root`."""

    def __init__(
        self, root: bytes, block_bytes: int, algorithm: HashAlgorithm = HashAlgorithm.sha256
    ) -> None:
        self.hashes: list[bytes] = []
        self._running = _HASH_FUNCTIONS[algorithm](root)
        self._block_bytes = block_bytes
        self._rest = b""

    def extend(self, data: bytes) -> None:
        """Append `data`, and a hash for every block that it fills."""
        data, width = self._rest + data, self._block_bytes
        update, digest, append = self._running.update, self._running.digest, self.hashes.append
        whole = len(data) - len(data) % width
        for start in range(0, whole, width):
            update(data[start : start + width])
            append(digest())
        self._rest = data[whole:]

    def copy(self) -> "PrefixHasher":
        """An independent hasher with the same state."""
        copied = object.__new__(PrefixHasher)
        copied.hashes, copied._running = list(self.hashes), self._running.copy()
        copied._block_bytes, copied._rest = self._block_bytes, self._rest
        return copied


@cache
def process_seed() -> str | bytes:
    """What seeds hashes that a client could collide on purpose: 32 random bytes of this process.

    Where PYTHONHASHSEED is a number, it is the seed instead, as in vLLM, so that several processes agree.
    """
    named = os.environ.get("PYTHONHASHSEED", "random")
    return named if named.isdecimal() else os.urandom(32)


_DIGESTS: dict[HashAlgorithm, Callable[[bytes], bytes]] = {
    HashAlgorithm.sha256_cbor: lambda data: hashlib.sha256(data).digest(),
    HashAlgorithm.xxh3_128_cbor: lambda data: bytes(xxhash.xxh3_128_digest(data)),
}


class CborHasher:
    """vLLM's hashes: a block hashes (hash before, token ids, extra keys) as CBOR, so that others can compute it too.

    The extra keys are those of vLLM: the adapter in every block, the salt in the first one. So, as in vLLM, a salt that
    is also the name of an adapter gives the first block the same hash. An epoch is one more key. The hash before the
    first block is that of the seed (`init_none_hash` in vLLM's kv_cache_utils.py).
    """

    def __init__(
        self, algorithm: HashAlgorithm, block_bytes: int, salt: str, adapter: str | None, epoch: int
    ) -> None:
        self.hashes: list[bytes] = []
        seed = process_seed()
        self._digest = _DIGESTS[algorithm]
        self._dumps = _cbor()
        self._before = seed if isinstance(seed, bytes) else self._digest(self._dumps(seed, canonical=True))
        always = [*([] if adapter is None else [adapter]), *([("epoch", epoch)] if epoch else [])]
        self._extra = tuple(always) or None
        self._first = (*always, salt) if salt else self._extra
        self._block_bytes = block_bytes
        self._rest = b""

    def extend(self, data: bytes) -> None:
        """Append `data`, and a hash for every block that it fills."""
        data, width = self._rest + data, self._block_bytes
        whole = len(data) - len(data) % width
        for start in range(0, whole, width):
            tokens = tuple(np.frombuffer(data[start : start + width], dtype="<i4").tolist())
            extra = self._extra if self.hashes else self._first
            self._before = self._digest(self._dumps((self._before, tokens, extra), canonical=True))
            self.hashes.append(self._before)
        self._rest = data[whole:]


def _cbor() -> Callable[..., bytes]:
    try:
        dumps: Callable[..., bytes] = import_module("cbor2").dumps
    except ImportError as error:
        raise CoreError("hashes of CBOR need cbor2; pip install 'pagetwin[events]'") from error
    return dumps


class BlockIdentity(Protocol):
    """The hashes of one request's full blocks.

    `shares_outputs`: whether `generated_hashes` may name blocks, so that a generated block is cached in the step that
    fills it.
    """

    @property
    def shares_outputs(self) -> bool:
        """Whether other requests may find generated blocks."""
        ...

    @property
    def salt(self) -> str:
        """The tenant: only requests of equal salt share blocks."""
        ...

    @property
    def adapter(self) -> str | None:
        """The adapter (LoRA) whose K and V these are."""
        ...

    def token_ids(self, branch: int, first: int, end: int) -> Sequence[int]:
        """Tokens `first` to `end - 1` of a branch, prompt included; empty where they are not known."""
        ...

    def prompt_hashes(self, block_size: int) -> Sequence[BlockHash]:
        """Hashes of the prompt's leading full blocks, as far as another request could have the same blocks."""
        ...

    def generated_hashes(self, branch: int, block_size: int) -> Sequence[BlockHash]:
        """Hashes of all leading full blocks of a branch that are known now, generated tokens included.

        Empty if outputs are private. Otherwise it begins with `prompt_hashes`.
        """
        ...


def _root(salt: str, adapter: str | None, epoch: int = 0) -> bytes:
    """The bytes that every hash chain of a tenant, an adapter and an epoch starts with. A length separates the keys."""
    adapter_key = b"-" if adapter is None else b"+" + adapter.encode()
    return b"pagetwin:%d:%d:" % (epoch, len(adapter_key)) + adapter_key + salt.encode()


class TokenIdentity:
    """Block hashes from token ids, an int64 array or a sequence of integers in [0, 2³¹); raises CoreError for others.

    `salt` isolates tenants and `adapter` isolates the K and V of different adapters: requests that differ in one of
    them share no block. A higher `epoch` gives no hits on blocks of an earlier one: it makes blocks void whose content
    is in doubt, for all tenants at once. With `share_outputs`, generated tokens (given to `extend`) are hashed too, so
    that a later turn of the conversation finds their blocks.
    """

    def __init__(
        self,
        request_id: int,
        token_ids: npt.NDArray[np.int64] | Sequence[int],
        salt: str = "",
        *,
        adapter: str | None = None,
        epoch: int = 0,
        algorithm: HashAlgorithm = HashAlgorithm.sha256,
        share_outputs: bool = False,
    ) -> None:
        self.salt, self.adapter = salt, adapter
        self._request_id = request_id
        self._tokens = _token_bytes(request_id, token_ids)
        self._root, self._epoch = _root(salt, adapter, epoch), epoch
        if algorithm is HashAlgorithm.xxh3_128:
            seed = process_seed()
            self._root = (seed if isinstance(seed, bytes) else seed.encode()) + self._root
        self._algorithm = algorithm
        self.shares_outputs = share_outputs
        self._outputs: dict[int, bytearray] = {}
        self._hashers: dict[tuple[int, int], tuple[PrefixHasher | CborHasher, int]] = {}

    def prompt_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of the prompt up to the end of each full block."""
        return self._prompt_hasher(block_size).hashes

    def _prompt_hasher(self, block_size: int) -> PrefixHasher | CborHasher:
        width = block_size * _TOKEN_BYTES
        hasher: PrefixHasher | CborHasher
        if self._algorithm in _HASH_FUNCTIONS:
            hasher = PrefixHasher(self._root, width, self._algorithm)
        else:
            hasher = CborHasher(self._algorithm, width, self.salt, self.adapter, self._epoch)
        hasher.extend(self._tokens)
        return hasher

    def token_ids(self, branch: int, first: int, end: int) -> list[int]:
        """Tokens `first` to `end - 1` of a branch, prompt included."""
        whole = self._tokens + bytes(self._outputs.get(branch, b""))
        tokens = np.frombuffer(whole[first * _TOKEN_BYTES : end * _TOKEN_BYTES], dtype="<i4")
        return list(tokens.tolist())

    def extend(self, branch: int, token_ids: Sequence[int]) -> None:
        """Append tokens that `branch` generated."""
        generated = self._outputs.setdefault(branch, bytearray())
        generated += _token_bytes(self._request_id, token_ids)

    def generated_hashes(self, branch: int, block_size: int) -> list[bytes]:
        """Hashes up to the end of each full block of the branch; empty unless outputs are shared."""
        if not self.shares_outputs:
            return []
        hasher, hashed = self._hashers.get((branch, block_size)) or (self._prompt_hasher(block_size), 0)
        generated = self._outputs.get(branch, bytearray())
        hasher.extend(bytes(generated[hashed:]))
        self._hashers[branch, block_size] = hasher, len(generated)
        return hasher.hashes


def _token_bytes(request_id: int, token_ids: npt.NDArray[np.int64] | Sequence[int]) -> bytes:
    if not isinstance(token_ids, np.ndarray):
        try:
            token_ids = np.frombuffer(array("i", token_ids), dtype=np.int32)  # quicker than np.array
        except OverflowError:
            raise _out_of_range(request_id, min(token_ids), max(token_ids)) from None
    if (token_ids >> 31).any():  # negative, or too large: one pass finds both
        raise _out_of_range(request_id, token_ids.min(), token_ids.max())
    return token_ids.astype("<i4").tobytes()


def _out_of_range(request_id: int, lowest: int, highest: int) -> CoreError:
    return CoreError(
        f"request {request_id}: token ids run from {lowest} to {highest}, must be at least 0 and below 2^31"
    )


class KeyIdentity:
    """Block hashes from a trace's ordered prefix segments `(key, tokens)`; key None means unique to this request.

    The hash of a block covers the pieces of segments that lie in it. From the first unique piece on, every block is
    private and is not hashed: so a million requests cost little.
    """

    shares_outputs = False

    def __init__(
        self,
        request_id: int,
        segments: Sequence[tuple[int | None, int]],
        salt: str = "",
        *,
        adapter: str | None = None,
    ) -> None:
        self._segments = segments
        self.salt, self.adapter = salt, adapter

    def prompt_hashes(self, block_size: int) -> list[bytes]:
        """Chained hashes of the leading blocks that lie completely in segments with a key."""
        keyed = self._leading_keyed()
        if sum(tokens for _, tokens in keyed) < block_size:
            return []
        root = hashlib.blake2b(_root(self.salt, self.adapter), digest_size=16).digest()
        return _segment_hashes(keyed, block_size, root)

    def generated_hashes(self, branch: int, block_size: int) -> list[bytes]:
        """Always empty: outputs are private."""
        return []

    def token_ids(self, branch: int, first: int, end: int) -> list[int]:
        """Always empty: a trace names its texts and has no tokens."""
        return []

    def _leading_keyed(self) -> list[tuple[int, int]]:
        keyed: list[tuple[int, int]] = []
        for key, tokens in self._segments:
            if key is None:
                break
            keyed.append((key, tokens))
        return keyed


def _segment_hashes(keyed: Sequence[tuple[int, int]], block_size: int, root: bytes) -> list[bytes]:
    starts = [0]
    for _, tokens in keyed:
        starts.append(starts[-1] + tokens)
    spans = [(key, start, end) for (key, _), (start, end) in zip(keyed, pairwise(starts), strict=True)]
    hashes: list[bytes] = []
    parent, first = root, 0
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
        hashes.append(parent)
    return hashes
