"""Block hashes: which blocks hold the same K and V, as chains of hashes over data in blocks.

The hash of a full block covers the block and all tokens before it. Two blocks with equal hashes hold equal K and V.
The engine hashes token ids (`TokenIdentity`). The simulator hashes the prefix keys of the trace (`KeyIdentity`) and
never makes tokens. `tests/engine/core/test_identity.py` shows that both find the same shared blocks. Blocks that
cannot be shared are not hashed: the pool gives them a private number, and only their own request finds them.
"""

import hashlib
import os
import sys
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from itertools import pairwise
from struct import iter_unpack
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import xxhash

from engine.core.errors import CoreError
from engine.core.options import HashAlgorithm


class _RunningHash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...

    def copy(self) -> Self: ...


HASH_FUNCTIONS: dict[HashAlgorithm, Callable[[bytes], _RunningHash]] = {
    HashAlgorithm.sha256: hashlib.sha256,
    HashAlgorithm.xxh3_128: xxhash.xxh3_128,
}


# By block: the items (pictures, sounds) that lie in it, and where each begins, counted from the block's beginning.
ItemKeys = Mapping[int, Sequence[tuple[str, int]]]


class _BlockHasher(ABC):
    """Hashes data in blocks of `block_bytes` bytes. `hashes` has one entry for each full block."""

    def __init__(self, block_bytes: int, items: ItemKeys | None) -> None:
        self.hashes: list[bytes] = []
        self._items = items or {}
        self._block_bytes = block_bytes
        self._rest = b""

    def extend(self, data: bytes) -> None:
        """Append `data`, and a hash for every block that it fills."""
        data = self._rest + data
        whole = len(data) - len(data) % self._block_bytes
        self._hash(data[:whole])
        self._rest = data[whole:]

    @abstractmethod
    def _hash(self, data: bytes) -> None:
        """Append a hash for each block of `data`, which are whole."""

    def copy(self) -> Self:
        """An independent hasher with the same state."""
        copied = self._bare()
        copied.hashes, copied._rest = list(self.hashes), self._rest
        return copied

    @abstractmethod
    def _bare(self) -> Self:
        """A hasher of the same settings, whose chain is where this one is."""


class PrefixHasher(_BlockHasher):
    """Hashes chained from `root`. A block with `items` hashes them before its data."""

    def __init__(
        self,
        root: bytes,
        block_bytes: int,
        algorithm: HashAlgorithm = HashAlgorithm.sha256,
        items: ItemKeys | None = None,
    ) -> None:
        super().__init__(block_bytes, items)
        self._running = HASH_FUNCTIONS[algorithm](root)

    @classmethod
    def of_prompt(
        cls,
        root: bytes,
        block_bytes: int,
        algorithm: HashAlgorithm,
        data: bytes,
        items: ItemKeys | None = None,
    ) -> "PrefixHasher":
        """A hasher that has taken `data`, quicker where earlier prompts began with the same pieces (`_hash_piece`)."""
        if items or algorithm is not HashAlgorithm.sha256:  # the others cost no more than remembering them
            hasher = cls(root, block_bytes, algorithm, items)
            hasher.extend(data)
            return hasher
        hasher, piece, piece_bytes = cls(b"", block_bytes), _first_piece(root), _PIECE_BLOCKS * block_bytes
        whole = len(data) - len(data) % piece_bytes
        for start in range(0, whole, piece_bytes):
            piece = _hash_piece(piece, data[start : start + piece_bytes], block_bytes)
            hasher.hashes += piece.hashes
        hasher._running = piece.running.copy()
        hasher.extend(data[whole:])
        return hasher

    def _hash(self, data: bytes) -> None:
        if not self._items:
            if len(data) == self._block_bytes:  # of a decoder, quicker
                self._running.update(data)
                self.hashes.append(self._running.digest())
                return
            self.hashes += _digests(self._running, data, self._block_bytes)
            return
        for start in range(0, len(data), self._block_bytes):
            for content, offset in self._items.get(len(self.hashes), ()):
                # An item among the tokens: four bytes that begin no token id, and then always 40 bytes.
                item = hashlib.sha256(content.encode()).digest() + offset.to_bytes(8, "little", signed=True)
                self._running.update(b"\xff\xff\xff\xff" + item)
            self._running.update(data[start : start + self._block_bytes])
            self.hashes.append(self._running.digest())

    def _bare(self) -> Self:
        bare = type(self)(b"", self._block_bytes, items=self._items)
        bare._running = self._running.copy()
        return bare


def _digests(running: _RunningHash, data: bytes, width: int) -> list[bytes]:
    """The digest after each `width` bytes of `data`, whose length is a multiple of `width`."""
    update, digest = running.update, running.digest
    digests = []
    for (block,) in iter_unpack(f"{width}s", data):
        update(block)
        digests.append(digest())
    return digests


_PIECE_BLOCKS = 32
_REMEMBERED = 1024  # pieces: some 5 MB at block size 16


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Blocks of a prompt: their hashes, and the running hash at their end, which is copied and never updated."""

    running: _RunningHash
    hashes: Sequence[bytes] = ()


@lru_cache(maxsize=_REMEMBERED)
def _first_piece(root: bytes) -> _Piece:
    """The empty piece that a prompt of this root starts with."""
    return _Piece(hashlib.sha256(root))


@lru_cache(maxsize=_REMEMBERED)
def _hash_piece(before: _Piece, data: bytes, block_bytes: int) -> _Piece:
    """The piece with the bytes `data` behind `before`.

    The cache compares all bytes. So a system prompt, or the earlier turns of a conversation, are hashed once while they
    are among the pieces that were used last.
    """
    running = before.running.copy()
    return _Piece(running, _digests(running, data, block_bytes))


@cache
def process_seed() -> str | bytes:
    """What seeds hashes that a client could collide on purpose: 32 random bytes of this process.

    Where PYTHONHASHSEED is a number, it is the seed instead, as in vLLM, so that several processes agree.
    """
    named = os.environ.get("PYTHONHASHSEED", "random")
    return named if named.isdecimal() else os.urandom(32)


_FIXED_SEED = "vllm-none-hash"

_DIGESTS: dict[HashAlgorithm, Callable[[bytes], bytes]] = {
    HashAlgorithm.sha256_cbor: lambda data: hashlib.sha256(data).digest(),
    HashAlgorithm.xxh3_128_cbor: lambda data: bytes(xxhash.xxh3_128_digest(data)),
}


class CborHasher(_BlockHasher):
    """vLLM's hashes: a block hashes (hash before, token ids, extra keys) as CBOR, so that others can compute it too.

    The extra keys are those of vLLM 0.33: name and path of the adapter in every block, the items in their blocks, the
    salt in the first one (`generate_block_hash_extra_keys` in its kv_cache_utils.py). An epoch is one more key. The
    hash before the first block is that of the seed (`resolve_none_hash_seed` there): PYTHONHASHSEED, or else for sha256
    a constant, so that several machines agree, and otherwise random bytes.
    """

    def __init__(
        self,
        algorithm: HashAlgorithm,
        block_bytes: int,
        salt: str,
        adapter: tuple[str, str] | None,
        epoch: int,
        items: ItemKeys | None = None,
    ) -> None:
        super().__init__(block_bytes, items)
        self._settings = algorithm, block_bytes, salt, adapter, epoch, items
        seed = os.environ.get("PYTHONHASHSEED", _FIXED_SEED)
        if algorithm is not HashAlgorithm.sha256_cbor and isinstance(drawn := process_seed(), bytes):
            seed = drawn.hex()
        self._digest = _DIGESTS[algorithm]
        try:
            self._dumps: Callable[..., bytes] = import_module("cbor2").dumps
        except ImportError as error:
            raise CoreError("hashes of CBOR need cbor2; pip install cbor2") from error
        self._before = self._digest(self._dumps(seed, canonical=True))
        self._adapter = [] if adapter is None else [("lora", *adapter)]
        self._salt = [("cache_salt", salt)] if salt else []
        self._epoch = [("epoch", epoch)] if epoch else []

    def _bare(self) -> Self:
        bare = type(self)(*self._settings)
        bare._before = self._before
        return bare

    def _hash(self, data: bytes) -> None:
        size = self._block_bytes // _TOKEN_BYTES
        tokens, ends = _cbor_of(np.frombuffer(data, dtype="<u4"))
        head = self._dumps((self._before,))[1 : -len(self._before)]
        begin, middle = b"\x83" + head, self._dumps([0] * size)[:-size]  # of three values; of as many tokens
        for start, end in pairwise(ends[::size]):
            items = [("mm", *key) for key in self._items.get(len(self.hashes), ())]
            salt = [] if self.hashes else self._salt
            extra = (*self._adapter, *items, *salt, *self._epoch)
            last = self._dumps(extra, canonical=True) if extra else _CBOR_NONE
            self._before = self._digest(begin + self._before + middle + tokens[start:end] + last)
            self.hashes.append(self._before)


_CBOR_NONE = b"\xf6"
_CBOR_HEADS = np.array([0, 0, 24, 25, 0, 26], dtype=np.uint8)  # of a number, by the bytes that it takes


def _cbor_of(numbers: npt.NDArray[np.uint32]) -> tuple[bytes, list[int]]:
    """The numbers in CBOR's shortest form, one after the other, and where each ends, from 0 on (RFC 8949, 3.1).

    Encoding a block's tokens takes cbor2 five times as long as hashing them.
    """
    sizes = 1 + (numbers > 23) + (numbers > 0xFF) + 2 * (numbers > 0xFFFF)
    padded = np.zeros((len(numbers), 5), dtype=np.uint8)
    padded[:, 1:] = numbers.astype(">u4").view(np.uint8).reshape(-1, 4)
    padded[np.arange(len(numbers)), 5 - sizes] = np.where(sizes > 1, _CBOR_HEADS[sizes], numbers)
    return padded[np.arange(5) >= 5 - sizes[:, None]].tobytes(), [0, *np.cumsum(sizes).tolist()]


# An opaque value: equal hashes mean equal K and V. An `int` is private: only its own request can find the block.
BlockHash = Hashable


class InnerHash(NamedTuple):
    """A name of a block of group `group` of layers by its first tokens: all up to the first `tokens` of the sequence.

    `prefix` is their hash, or where they are private the number of their request.
    """

    group: int
    prefix: BlockHash
    tokens: int


_TOKEN_BYTES = 4
_PREFIXES = 64  # of a trace; some 25 MB where each has 100,000 tokens


class MultimodalItem(NamedTuple):
    """A picture, sound or film in a prompt: the tokens `first` to `first + tokens - 1` stand for it.

    These tokens are placeholders, alike for every item of a kind. So `content`, a hash of the item, is hashed into each
    block that has one of them, with the place where the item begins, counted from the block's beginning.
    """

    content: str
    first: int
    tokens: int


class BlockIdentity(Protocol):
    """The hashes of one request's full blocks.

    `shares_outputs`: whether `generated_hashes` may name blocks, so that a generated block is cached in the step that
    fills it.
    """

    @property
    def shares_outputs(self) -> bool:
        """Whether other requests may find generated blocks."""

    @property
    def salt(self) -> str:
        """The tenant: only requests of equal salt share blocks."""

    @property
    def adapter(self) -> str | None:
        """The adapter (LoRA) whose K and V these are."""

    def token_ids(self, branch: int, first: int, end: int) -> Sequence[int]:
        """Tokens `first` to `end - 1` of a branch, prompt included; empty where they are not known."""

    def item_keys(self, block_size: int) -> ItemKeys:
        """The multimodal items of the prompt by block; blocks without one are left out."""

    def prompt_hashes(self, block_size: int) -> Sequence[BlockHash]:
        """Hashes of the prompt's leading full blocks, as far as another request could have the same blocks."""

    def generated_hashes(self, branch: int, block_size: int) -> Sequence[BlockHash]:
        """Hashes of all leading full blocks of a branch that are known now, generated tokens included.

        Empty if outputs are private. Otherwise it begins with `prompt_hashes`.
        """


def _root(salt: str, adapter: tuple[str, str] | None, epoch: int = 0) -> bytes:
    """The bytes that every hash chain of a tenant, an adapter and an epoch starts with. Lengths separate the keys.

    So no salt can stand for another salt and the tokens behind it.
    """
    name, path = (b"-", b"") if adapter is None else (b"+" + adapter[0].encode(), adapter[1].encode())
    tenant = salt.encode()
    return b"pagetwin:%d:%d:%d:%d:" % (epoch, len(name), len(path), len(tenant)) + name + path + tenant


class TokenIdentity:
    """Block hashes from token ids, an int64 array or a sequence of integers in [0, 2³¹); raises CoreError for others.

    `salt` isolates tenants, and `adapter` with `adapter_path` the K and V of different adapters: requests that differ
    in one of them share no block. `items` are the prompt's multimodal items in order. A higher `epoch` gives no hits on
    blocks of an earlier one: it makes blocks void whose content is in doubt, for all tenants at once. With
    `share_outputs`, generated tokens (given to `extend`) are hashed too, so that a later turn of the conversation finds
    their blocks.

    Raises CoreError for items that overlap, are out of order, or lie beyond the prompt.
    """

    def __init__(
        self,
        request_id: int,
        token_ids: npt.NDArray[np.int64] | Sequence[int],
        salt: str = "",
        *,
        adapter: str | None = None,
        adapter_path: str = "",
        items: Sequence[MultimodalItem] = (),
        epoch: int = 0,
        algorithm: HashAlgorithm = HashAlgorithm.sha256,
        share_outputs: bool = False,
    ) -> None:
        self.salt, self.adapter = salt, adapter
        self._request_id = request_id
        self._tokens = _token_bytes(request_id, token_ids)
        self._named = None if adapter is None else (adapter, adapter_path)
        self._root, self._epoch = _root(salt, self._named, epoch), epoch
        self._items = tuple(items)
        if self._items:
            _check_items(request_id, self._items, len(self._tokens) // _TOKEN_BYTES)
        if algorithm is HashAlgorithm.xxh3_128:
            seed = process_seed()
            self._root = (seed if isinstance(seed, bytes) else seed.encode()) + self._root
        self._algorithm = algorithm
        self.shares_outputs = share_outputs
        self._outputs: defaultdict[int, list[int]] = defaultdict(list)  # by branch
        self._prompt_hashers: dict[int, PrefixHasher | CborHasher] = {}
        self._hashers: dict[tuple[int, int], tuple[PrefixHasher | CborHasher, int]] = {}

    def prompt_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of the prompt up to the end of each full block."""
        return self._prompt_hasher(block_size).hashes

    def _prompt_hasher(self, block_size: int) -> PrefixHasher | CborHasher:
        found = self._prompt_hashers.get(block_size)
        if found is not None:
            return found
        width = block_size * _TOKEN_BYTES
        hasher: PrefixHasher | CborHasher
        items = self.item_keys(block_size) if self._items else None
        if self._algorithm in HASH_FUNCTIONS:
            hasher = PrefixHasher.of_prompt(self._root, width, self._algorithm, self._tokens, items)
        else:
            hasher = CborHasher(self._algorithm, width, self.salt, self._named, self._epoch, items)
            hasher.extend(self._tokens)
        if self.shares_outputs:  # its branches go on from here
            self._prompt_hashers[block_size] = hasher
        return hasher

    def token_ids(self, branch: int, first: int, end: int) -> list[int]:
        """Tokens `first` to `end - 1` of a branch, prompt included."""
        prompt = np.frombuffer(self._tokens, dtype="<i4")
        generated = slice(max(0, first - len(prompt)), max(0, end - len(prompt)))
        return [*prompt[first:end].tolist(), *self._outputs[branch][generated]]

    def item_keys(self, block_size: int) -> ItemKeys:
        """The multimodal items of the prompt by block."""
        found: dict[int, list[tuple[str, int]]] = {}
        for item in self._items:
            for block in range(item.first // block_size, -((-item.first - item.tokens) // block_size)):
                found.setdefault(block, []).append((item.content, item.first - block * block_size))
        return found

    def extend(self, branch: int, token_ids: Iterable[int]) -> None:
        """Append tokens that `branch` generated; none of them where one is refused."""
        for token in (given := [*token_ids]):  # an iterator could be read only once
            if token >> 31:
                raise _out_of_range(self._request_id, min(given), max(given))
        self._outputs[branch].extend(given)

    def generated_hashes(self, branch: int, block_size: int) -> list[bytes]:
        """Hashes up to the end of each full block of the branch; empty unless outputs are shared."""
        if not self.shares_outputs:
            return []
        known = self._hashers.get((branch, block_size))
        hasher, hashed = known or (self._prompt_hasher(block_size).copy(), 0)
        generated = self._outputs[branch]
        hasher.extend(_token_bytes(self._request_id, generated[hashed:]))
        self._hashers[branch, block_size] = hasher, len(generated)
        return hasher.hashes


def _check_items(request_id: int, items: Sequence[MultimodalItem], prompt_tokens: int) -> None:
    free = 0
    for item in items:
        if item.tokens < 1 or item.first < free or item.first + item.tokens > prompt_tokens:
            raise CoreError(
                f"request {request_id}: item '{item.content}' has {item.tokens} tokens from token {item.first} on; "
                "items must have tokens, not overlap, stand in order, and lie within the prompt, which has "
                f"{prompt_tokens} tokens"
            )
        free = item.first + item.tokens


def _token_bytes(request_id: int, token_ids: npt.NDArray[np.int64] | Sequence[int]) -> bytes:
    """The ids as four bytes each, the lowest first."""
    if isinstance(token_ids, np.ndarray):
        if (token_ids >> 31).any():  # negative, or too large: one pass finds both
            raise _out_of_range(request_id, int(token_ids.min()), int(token_ids.max()))
        return token_ids.astype("<i4").tobytes()
    try:
        # "I" refuses what is negative; three times as fast as "i" and as np.array
        numbers = array("I", token_ids)
    except OverflowError:
        raise _out_of_range(request_id, min(token_ids), max(token_ids)) from None
    if sys.byteorder == "big":
        numbers.byteswap()
    data = numbers.tobytes()
    if not data[3::4].isascii():  # the highest byte of an id is 128 or more
        raise _out_of_range(request_id, min(token_ids), max(token_ids))
    return data


def _out_of_range(request_id: int, lowest: int, highest: int) -> CoreError:
    return CoreError(
        f"request {request_id}: token ids run from {lowest} to {highest}, must be at least 0 and below 2^31"
    )


class KeyIdentity:
    """Block hashes from a trace's ordered prefix segments `(key, tokens)`; key None means unique to this request.

    The hash of a block covers the pieces of segments that lie in it. From the first unique piece on, every block is
    private and is not hashed: so a million requests cost little. With `output`, the key and the tokens of what the
    request generates, a later prompt that goes on behind it with the same key finds these blocks too.
    """

    def __init__(
        self,
        request_id: int,
        segments: Sequence[tuple[int | None, int]],
        salt: str = "",
        *,
        adapter: str | None = None,
        output: tuple[int, int] | None = None,
    ) -> None:
        self._segments = segments
        self.salt, self.adapter = salt, adapter
        self._output = output
        self.shares_outputs = output is not None and all(key is not None for key, _ in segments)

    def prompt_hashes(self, block_size: int) -> Sequence[bytes]:
        """Chained hashes of the leading blocks that lie completely in segments with a key."""
        return self._hashes(self._leading_keyed(), block_size)

    def generated_hashes(self, branch: int, block_size: int) -> Sequence[bytes]:
        """Empty if outputs are private; else the hashes of the whole sequence, whose end is known from the start."""
        if not self.shares_outputs or self._output is None:
            return ()
        return self._hashes([*self._leading_keyed(), self._output], block_size)

    def _hashes(self, keyed: list[tuple[int, int]], block_size: int) -> Sequence[bytes]:
        if sum(tokens for _, tokens in keyed) < block_size:
            return ()
        named = None if self.adapter is None else (self.adapter, "")
        return _segment_hashes(tuple(keyed), block_size, _root(self.salt, named))

    def token_ids(self, branch: int, first: int, end: int) -> list[int]:
        """Always empty: a trace names its texts and has no tokens."""
        return []

    def item_keys(self, block_size: int) -> ItemKeys:
        """Always empty: the key of a piece of prompt stands for all that is in it."""
        return {}

    def _leading_keyed(self) -> list[tuple[int, int]]:
        keyed: list[tuple[int, int]] = []
        for key, tokens in self._segments:
            if key is None:
                break
            keyed.append((key, tokens))
        return keyed


@lru_cache(maxsize=_PREFIXES)
def _segment_hashes(keyed: tuple[tuple[int, int], ...], block_size: int, root: bytes) -> tuple[bytes, ...]:
    """The hashes for a prefix; the last ones are kept, because requests that share one arrive close together."""
    starts = [0]
    for _, tokens in keyed:
        starts.append(starts[-1] + tokens)
    spans = [(key, start, end) for (key, _), (start, end) in zip(keyed, pairwise(starts), strict=True)]
    hashes: list[bytes] = []
    parent, first = hashlib.blake2b(root, digest_size=16).digest(), 0
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
    return tuple(hashes)
