"""Chains of hashes over data in blocks: one hash for each full block, which covers everything up to its end."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from struct import iter_unpack
from typing import Protocol, Self

import numpy as np
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


ItemKeys = Mapping[int, Sequence[tuple[str, int]]]
"""By block: the items (pictures, sounds) that lie in it, and where each begins, counted from the block's beginning."""


class PrefixHasher:
    """Hashes data in blocks of `block_bytes` bytes. `hashes` has one entry for each full block, chained from `root`.

    A block with `items` hashes them before its data.
    """

    def __init__(
        self,
        root: bytes,
        block_bytes: int,
        algorithm: HashAlgorithm = HashAlgorithm.sha256,
        items: ItemKeys | None = None,
    ) -> None:
        self.hashes: list[bytes] = []
        self._items = items
        self._running = HASH_FUNCTIONS[algorithm](root)
        self._block_bytes = block_bytes
        self._rest = b""

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

    def extend(self, data: bytes) -> None:
        """Append `data`, and a hash for every block that it fills."""
        data, width = self._rest + data, self._block_bytes
        whole = len(data) - len(data) % width
        if self._items:
            self._hash_with_items(data[:whole], self._items)
        else:
            self.hashes += _digests(self._running, data[:whole], width)
        self._rest = data[whole:]

    def _hash_with_items(self, data: bytes, items: ItemKeys) -> None:
        for start in range(0, len(data), self._block_bytes):
            for content, offset in items.get(len(self.hashes), ()):
                self._running.update(_item_bytes(content, offset))
            self._running.update(data[start : start + self._block_bytes])
            self.hashes.append(self._running.digest())

    def copy(self) -> "PrefixHasher":
        """An independent hasher with the same state."""
        copied = copy(self)
        copied.hashes, copied._running = list(self.hashes), self._running.copy()
        return copied


def _item_bytes(content: str, offset: int) -> bytes:
    """An item among the tokens: four bytes that begin no token id, and then always 40 bytes."""
    return (
        b"\xff\xff\xff\xff"
        + hashlib.sha256(content.encode()).digest()
        + offset.to_bytes(8, "little", signed=True)
    )


def _digests(running: _RunningHash, data: bytes, width: int) -> list[bytes]:
    """The digest after each `width` bytes of `data`, whose length is a multiple of `width`."""
    update, digest = running.update, running.digest
    return [digest() for (block,) in iter_unpack(f"{width}s", data) if update(block) is None]  # it always is


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


class CborHasher:
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
        self.hashes: list[bytes] = []
        seed = os.environ.get("PYTHONHASHSEED", _FIXED_SEED)
        if algorithm is not HashAlgorithm.sha256_cbor and isinstance(drawn := process_seed(), bytes):
            seed = drawn.hex()
        self._digest = _DIGESTS[algorithm]
        self._dumps = _cbor()
        self._before = self._digest(self._dumps(seed, canonical=True))
        self._adapter = [] if adapter is None else [("lora", *adapter)]
        self._salt = [("cache_salt", salt)] if salt else []
        self._epoch = [("epoch", epoch)] if epoch else []
        self._items = items or {}
        self._block_bytes = block_bytes
        self._rest = b""

    def extend(self, data: bytes) -> None:
        """Append `data`, and a hash for every block that it fills."""
        data, width = self._rest + data, self._block_bytes
        whole = len(data) - len(data) % width
        for start in range(0, whole, width):
            tokens = tuple(np.frombuffer(data[start : start + width], dtype="<i4").tolist())
            extra = self._extra_keys(len(self.hashes))
            self._before = self._digest(self._dumps((self._before, tokens, extra), canonical=True))
            self.hashes.append(self._before)
        self._rest = data[whole:]

    def _extra_keys(self, block: int) -> tuple[tuple[str | int, ...], ...] | None:
        items = [("mm", *key) for key in self._items.get(block, ())]
        return (*self._adapter, *items, *([] if block else self._salt), *self._epoch) or None

    def copy(self) -> "CborHasher":
        """An independent hasher with the same state."""
        copied = copy(self)
        copied.hashes = list(self.hashes)
        return copied


def _cbor() -> Callable[..., bytes]:
    try:
        dumps: Callable[..., bytes] = import_module("cbor2").dumps
    except ImportError as error:
        raise CoreError("hashes of CBOR need cbor2; pip install 'pagetwin[events]'") from error
    return dumps
