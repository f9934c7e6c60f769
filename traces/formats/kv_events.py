"""KV cache events in vLLM's schema: the blocks that entered and left a prefix cache, as msgpack.

A message is a batch: its time, its events and the rank. vLLM publishes messages over ZeroMQ; a file of events holds
them one after the other. `encode` writes what vLLM 0.24 and newer publish: the batch as an array, each event as a map
with the key `type`. `decode` also reads the older form, in which an event is an array that starts with its type, and
the newest, in which the batch is a map too (vllm/distributed/kv_events.py; the forms changed with vLLM's pull request
42892).

`KvEventSource` reads a file as a trace of blocks. Needs msgpack (extra `events`).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from traces.errors import RowError, TraceError
from traces.formats.parsing import kind
from traces.formats.rows import Numbered, RowCounts, RowSource, TraceRow, note
from traces.formats.segments import BlockSegments

# A block hash as vLLM publishes it: bytes, or an unsigned 64-bit number.
EventHash = bytes | int

DEVICE = "GPU"  # vLLM's word for the medium of blocks that are not offloaded
JOINED_S = 1.0  # an event continues the prompt that ends with its parent if that grew so long ago at most
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
_MOST_S = 1e11  # a wall clock in milliseconds or nanoseconds has more, and NaN is not less
_WHOLE = ("full_attention", "mla_attention", "sink_full_attention")  # kinds that keep every token
_NEEDED = "KV events need msgpack, which is not installed; pip install msgpack"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of `block_size` tokens entered the cache, in prefix order, behind the block `parent_block_hash`.

    `token_ids` are the tokens of all these blocks, or empty where they are not known. `extra_keys` has, for each block,
    what was hashed beside its tokens: name of the adapter, salt.
    """

    block_hashes: Sequence[EventHash]
    parent_block_hash: EventHash | None
    token_ids: Sequence[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[object] | None] | None = None
    medium: str | None = DEVICE
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None  # of the group, in vLLM's words; not written


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left the cache."""

    block_hashes: Sequence[EventHash]
    medium: str | None = DEVICE
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was emptied."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(NamedTuple):
    """The events of a step; `ts` in seconds, of the wall clock or of a replay."""

    ts: float
    events: Sequence[KvEvent]
    data_parallel_rank: int | None = None


# The order of fields in the older form, in which events are arrays.
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def msgpack() -> Any:
    """The module msgpack. Raises TraceError, which says how to install it."""
    try:
        return import_module("msgpack")
    except ImportError as error:
        raise TraceError("msgpack", None, None, _NEEDED) from error


def encode(batch: EventBatch) -> bytes:
    """A message as vLLM publishes it."""
    packed: bytes = msgpack().packb(
        [batch.ts, [_record(event) for event in batch.events], batch.data_parallel_rank]
    )
    return packed


def _record(event: KvEvent) -> dict[str, Any]:
    name = type(event).__name__
    record: dict[str, Any] = {"type": name}
    if isinstance(event, BlockStored):
        record |= {"lora_id": None, "lora_name": event.lora_name}
        record |= {"parent_block_hash": event.parent_block_hash, "token_ids": list(event.token_ids)}
        record["block_size"] = event.block_size
        if event.extra_keys is not None:
            record["extra_keys"] = [None if keys is None else list(keys) for keys in event.extra_keys]
    if not isinstance(event, AllBlocksCleared):
        record |= {"block_hashes": list(event.block_hashes), "medium": event.medium}
        record |= {} if event.group_idx is None else {"group_idx": event.group_idx}
    return record


def decode(message: bytes) -> EventBatch:
    """A message of vLLM, in any of its forms. Raises RowError on what is none."""
    try:
        return batch_of(msgpack().unpackb(message, strict_map_key=False))
    except (TypeError, ValueError) as error:  # a map may have a key that Python cannot have
        raise error if isinstance(error, RowError) else RowError(None, f"not msgpack: {error}") from error


def batch_of(value: object) -> EventBatch:
    """A batch from unpacked msgpack. Raises RowError."""
    if isinstance(value, dict):
        value = [value.get("ts"), value.get("events"), value.get("data_parallel_rank")]
    if not isinstance(value, list) or not 2 <= len(value) <= 3:
        raise RowError(None, f"a batch of time and events expected, found {kind(value)}")
    ts, events, rank = (*value, None)[:3]
    if not isinstance(ts, int | float) or isinstance(ts, bool) or not abs(ts) <= _MOST_S:
        raise RowError("ts", f"seconds expected, found {kind(ts)}")
    if not isinstance(events, list):
        raise RowError("events", f"list expected, found {kind(events)}")
    found = [_event(event, f"events[{index}]") for index, event in enumerate(events)]
    return EventBatch(float(ts), found, rank if isinstance(rank, int) else None)


def _event(value: object, place: str) -> KvEvent:
    fields = _fields(value, place)
    name = fields.get("type")
    if name == "AllBlocksCleared":
        return AllBlocksCleared()
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(one, bytes | int) for one in hashes):
        raise RowError(f"{place}.block_hashes", f"list of bytes or numbers expected, found {kind(hashes)}")
    medium, group = fields.get("medium"), fields.get("group_idx")
    if name == "BlockRemoved":
        return BlockRemoved(hashes, medium, group)
    size, tokens, parent = fields.get("block_size"), fields.get("token_ids"), fields.get("parent_block_hash")
    if not isinstance(size, int) or size < 1:
        raise RowError(f"{place}.block_size", f"tokens, at least 1, expected, found {kind(size)}")
    if not isinstance(tokens, list) or len(tokens) not in (0, size * len(hashes)):
        raise RowError(f"{place}.token_ids", f"{size * len(hashes)} token ids expected, found {kind(tokens)}")
    if parent is not None and not isinstance(parent, bytes | int):
        reason = f"bytes, a number or nothing expected, found {kind(parent)}"
        raise RowError(f"{place}.parent_block_hash", reason)
    lora, extra = fields.get("lora_name"), fields.get("extra_keys")
    more = (lora, extra, medium, group, fields.get("kv_cache_spec_kind"))
    return BlockStored(hashes, parent, tokens, size, *more)


def _fields(value: object, place: str) -> Mapping[str, Any]:
    """The fields of an event by name, whichever form it has."""
    if isinstance(value, list) and value and value[0] in _FIELDS:
        return {"type": value[0], **dict(zip(_FIELDS[value[0]], value[1:], strict=False))}
    if isinstance(value, dict) and value.get("type") in _FIELDS:
        return value
    raise RowError(place, f"an event expected ({', '.join(_FIELDS)}), found {kind(value)}")


def read_batches(path: Path) -> Iterator[EventBatch]:
    """The batches of a file of events. Raises TraceError, which counts batches from 1."""
    number = 1
    try:
        with path.open("rb") as file:
            unpacker = msgpack().Unpacker(file, strict_map_key=False)
            for value in unpacker:
                yield batch_of(value)
                number += 1
            if unpacker.tell() != path.stat().st_size:
                raise RowError(None, "the file is cut inside of it")
    except RowError as error:
        raise TraceError(str(path), None, f"batch {number}", str(error)) from error
    except (OSError, TypeError, ValueError) as error:
        raise TraceError(str(path), None, f"batch {number}", f"cannot be read on: {error}") from error


def is_events(path: Path) -> bool:
    """Whether a file starts like a batch of events."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError:
        return False  # the caller opens it again, and reports the reason
    return head[:2] in (b"\x92\xcb", b"\x93\xcb") or head in (b"\x82\xa2ts", b"\x83\xa2ts")


@dataclass(slots=True)
class _Prompt:
    """A prompt that events have shown so far. `parent` is the block in front of its `hashes`."""

    first_s: float
    last_s: float
    parent: EventHash | None
    hashes: list[EventHash]


class KvEventSource(RowSource):
    """A file of events as a trace of blocks: a request for each prompt whose blocks entered the cache.

    A prompt is the chain of blocks from its first to its last one, and one more token, which no event shows. An event
    continues a prompt if its parent is the last block of that prompt, and if that was stored `JOINED_S` ago at most: so
    chunks and generated tokens stay with their request, and a later turn is a request of its own. Events show neither
    requests that found all their blocks, nor lengths of outputs: each has one output token. Of several groups of layers
    one is read: the first that keeps every token, since windows and states keep a part of a prompt's blocks.
    """

    format = "kv_events"

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise TraceError(str(path), None, None, f"cannot be read: {error.strerror}") from error
        super().__init__(path.name, sha256)
        self.path = path
        self._group: int | None = None
        self.assumed = [
            "KV events show neither outputs nor requests that found all their blocks: one output token each, "
            "and prompts of whole blocks and one token"
        ]

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """One row for each prompt, in order of its first event."""
        for number, prompt in enumerate(self._prompts()):
            if counts.limit_reached():
                return
            counts.read += 1
            assert self.source_block_tokens is not None
            # A block's key is its number, or the first 8 bytes of its hash.
            whole = (
                int.from_bytes(one[:8], "big") if isinstance(one, bytes) else one & _64_BITS
                for one in prompt.hashes
            )
            keys = np.fromiter(whole, np.uint64, len(prompt.hashes))
            tokens = len(keys) * self.source_block_tokens + 1
            segments = BlockSegments(keys, self.source_block_tokens, tokens)
            yield number, TraceRow(round(prompt.first_s * 1e9), tokens, 1, segments)

    def _prompts(self) -> list[_Prompt]:
        parents: dict[EventHash, EventHash | None] = {}
        open_prompts: dict[tuple[int | None, EventHash], _Prompt] = {}  # by their rank and last block
        prompts: list[_Prompt] = []
        for batch in read_batches(self.path):
            for event in batch.events:
                if not isinstance(event, BlockStored) or not event.block_hashes:
                    note(self.noted, f"events that store no block here: {type(event).__name__}")
                    continue
                if not self._counts(event):
                    continue
                parent, rank = event.parent_block_hash, batch.data_parallel_rank
                parents.update(zip(event.block_hashes, [parent, *event.block_hashes], strict=False))
                prompt = None if parent is None else open_prompts.pop((rank, parent), None)
                if prompt is None or batch.ts - prompt.last_s > JOINED_S:
                    prompt = _Prompt(batch.ts, batch.ts, parent, [])
                    prompts.append(prompt)
                prompt.hashes += event.block_hashes
                prompt.last_s = batch.ts
                open_prompts[rank, prompt.hashes[-1]] = prompt
        for prompt in prompts:  # at the end, since a block may be seen first without those before it
            prompt.hashes[:0] = self._chain(prompt.parent, parents)
        return prompts

    def _counts(self, event: BlockStored) -> bool:
        """Whether the event is about blocks on the device, of the group that is read. Raises TraceError."""
        medium, group, layers = event.medium or DEVICE, event.group_idx or 0, event.kv_cache_spec_kind
        if self._group is None and (layers in _WHOLE or not (layers or group)):
            self._group = group
        if medium != DEVICE or group != self._group:  # whose blocks may have another size
            note(self.noted, f"events left out: {medium}, group {group} of layers ({layers or 'unnamed'})")
            return False
        if self.source_block_tokens not in (None, event.block_size):
            sizes = f"{self.source_block_tokens} and of {event.block_size}"
            raise TraceError(str(self.path), None, "block_size", f"blocks of {sizes} tokens in one file")
        self.source_block_tokens = event.block_size
        return True

    def _chain(
        self, last: EventHash | None, parents: Mapping[EventHash, EventHash | None]
    ) -> list[EventHash]:
        """The blocks up to `last`, from the first one that the file shows. Raises TraceError."""
        chain: list[EventHash] = []
        while last is not None:
            if len(chain) > len(parents):
                reason = "a block stands in front of itself"
                raise TraceError(str(self.path), None, "parent_block_hash", reason)
            if last not in parents:
                note(self.noted, "prompts whose first blocks entered the cache before the file begins")
                break
            chain.append(last)
            last = parents[last]
        return chain[::-1]
