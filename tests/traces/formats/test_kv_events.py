"""KV cache events: the messages of vLLM in all their forms, and a file of them as a trace of blocks."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from traces.errors import RowError, TraceError
from traces.formats.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode,
    encode,
)
from traces.formats.pagetwin import write_jsonl
from traces.reading import detect_format, read_trace

msgpack = pytest.importorskip("msgpack", reason="KV events need pagetwin[events]")

STORED = BlockStored([b"b", b"c"], b"a", [1, 2, 3, 4], 2, "adapter", [["adapter"], ["adapter"]])
# What vLLM 0.26 published for a prompt of 16 tokens (github.com/volcano-sh/kthena/issues/1535).
VLLM_26: list[Any] = [
    1789095808.8378847,
    [
        {
            "type": "BlockStored",
            "block_hashes": [15760518052499183552],
            "parent_block_hash": None,
            "token_ids": list(range(16)),
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ],
    0,
]


def write(path: Path, *batches: EventBatch) -> Path:
    path.write_bytes(b"".join(map(encode, batches)))
    return path


def stored(ts: float, hashes: list[bytes], parent: bytes | None = None) -> EventBatch:
    return EventBatch(ts, [BlockStored(hashes, parent, [], 16)])


def test_a_batch_is_read_back_as_it_was_written() -> None:
    batch = EventBatch(1.5, [STORED, BlockRemoved([7]), AllBlocksCleared()], 3)
    assert decode(encode(batch)) == batch


def test_a_message_of_vllm_is_read() -> None:
    batch = decode(msgpack.packb(VLLM_26))
    assert batch.data_parallel_rank == 0
    expected = BlockStored([15760518052499183552], None, list(range(16)), 16, None, [None], "GPU", 0)
    assert batch.events == [replace(expected, kv_cache_spec_kind="full_attention")]


def test_a_batch_in_the_form_of_a_map_is_read() -> None:
    ts, events, rank = VLLM_26
    as_map = decode(msgpack.packb({"ts": ts, "events": events, "data_parallel_rank": rank}))
    assert as_map == decode(msgpack.packb(VLLM_26))


def test_an_event_in_the_older_form_of_an_array_is_read() -> None:
    old = [
        2.0,
        [["BlockStored", [5], 4, [8, 9], 2, None, "GPU"], ["BlockRemoved", [4]], ["AllBlocksCleared"]],
    ]
    batch = decode(msgpack.packb(old))
    assert batch.events == [BlockStored([5], 4, [8, 9], 2), BlockRemoved([4], None), AllBlocksCleared()]


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ([1.0], "a batch of time and events expected"),
        (["now", []], "ts: seconds expected"),
        ([math.nan, []], "ts: seconds expected, found nan"),
        ([1789095808837, []], "ts: seconds expected, found 1789095808837"),
        ([1.0, {}], "events: list expected"),
        ([1.0, [["BlockLost", [1]]]], r"events\[0\]: an event expected \(BlockStored, BlockRemoved"),
        ([1.0, [["BlockRemoved", "x"]]], r"events\[0\].block_hashes: list of bytes or numbers expected"),
        ([1.0, [["BlockStored", [1], None, [1, 2], 16]]], r"events\[0\].token_ids: 16 token ids expected"),
        ([1.0, [["BlockStored", [1], None, [], 0]]], r"events\[0\].block_size: tokens, at least 1, expected"),
        (
            [1.0, [["BlockStored", [1], [], [], 16]]],
            r"events\[0\].parent_block_hash: bytes, a number or nothing",
        ),
    ],
)
def test_a_wrong_value_is_named(message: object, match: str) -> None:
    with pytest.raises(RowError, match=match):
        decode(msgpack.packb(message))


def test_bytes_that_are_no_msgpack_are_refused() -> None:
    with pytest.raises(RowError, match="not msgpack"):
        decode(b"\xc1")
    with pytest.raises(RowError, match="not msgpack: unhashable"):
        decode(b"\x81\x91\x01\x02")


def test_the_format_is_found_from_the_content(tmp_path: Path) -> None:
    assert detect_format(write(tmp_path / "events", stored(0.0, [b"a"]))) == "kv_events"


def test_a_prompt_is_its_chain_of_blocks_and_one_token(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "e", stored(5.0, [b"a" * 8, b"b" * 8])))
    (request,) = trace.requests
    assert (request.prompt_tokens, request.output_tokens) == (33, 1)
    assert [segment.tokens for segment in request.segments] == [16, 16, 1]


def test_prompts_with_a_common_beginning_share_their_first_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "e", stored(0.0, [b"a" * 8, b"b" * 8]), stored(4.0, [b"c" * 8], b"a" * 8))
    one, other = read_trace(path).requests
    assert one.segments[0] == other.segments[0]
    assert one.segments[1].key != other.segments[1].key
    assert other.arrival_us == 4_000_000


def test_chunks_and_generated_blocks_stay_with_their_request(tmp_path: Path) -> None:
    path = write(tmp_path / "e", stored(0.0, [b"a" * 8]), stored(0.5, [b"b" * 8], b"a" * 8))
    (request,) = read_trace(path).requests
    assert request.prompt_tokens == 33


def test_a_later_turn_is_a_request_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "e", stored(0.0, [b"a" * 8]), stored(9.0, [b"b" * 8], b"a" * 8))
    assert [request.prompt_tokens for request in read_trace(path).requests] == [17, 33]


def test_what_stores_nothing_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "e", stored(0.0, [b"a" * 8]), EventBatch(1.0, [BlockRemoved([b"a" * 8])]))
    assert read_trace(path).header.noted == {"events that store no block here: BlockRemoved": 1}


def test_blocks_that_ranks_store_at_one_time_stay_with_their_prompts(tmp_path: Path) -> None:
    batches = [
        stored(n / 4, hashes, parent)._replace(data_parallel_rank=rank)
        for n, (hashes, parent) in enumerate([([b"a"], None), ([b"b"], b"a")])
        for rank in range(2)
    ]
    assert [row.prompt_tokens for row in read_trace(write(tmp_path / "e", *batches)).requests] == [33, 33]


def test_a_block_whose_parent_is_shown_later_stands_behind_it(tmp_path: Path) -> None:
    """It was in the cache before the file began, and left it. The trace can be written and read back."""
    late = stored(0.0, [b"b"], b"a"), stored(9.0, [b"a"]), stored(9.5, [b"b"], b"a")
    trace = read_trace(write(tmp_path / "e", *late))
    assert [row.prompt_tokens for row in trace.requests] == [33, 33]
    write_jsonl(trace, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl") == trace


def test_a_prompt_that_began_before_the_file_is_noted(tmp_path: Path) -> None:
    noted = read_trace(write(tmp_path / "e", stored(0.0, [b"b" * 8], b"a" * 8))).header.noted
    assert noted == {"prompts whose first blocks entered the cache before the file begins": 1}


def test_a_cut_file_is_refused_with_its_batch(tmp_path: Path) -> None:
    path = write(tmp_path / "e", stored(0.0, [b"a" * 8]), stored(1.0, [b"b" * 8]))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(TraceError, match="batch 2: the file is cut"):
        read_trace(path)


def test_blocks_of_two_sizes_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "e", stored(0.0, [b"a"]), EventBatch(1.0, [BlockStored([b"c"], None, [], 32)]))
    with pytest.raises(TraceError, match="blocks of 16 and of 32 tokens in one file"):
        read_trace(path)


def test_blocks_of_another_size_in_other_groups_are_left_out(tmp_path: Path) -> None:
    """Of a model whose windows or states lie in pages of their own."""
    other = EventBatch(
        1.0, [BlockStored([b"w"], None, [], 64, group_idx=1), BlockStored([b"c"], None, [], 32, medium="CPU")]
    )
    trace = read_trace(write(tmp_path / "one.events", other, stored(1.0, [b"a" * 8, b"b" * 8])))
    assert [request.prompt_tokens for request in trace.requests] == [33]
    assert trace.header.noted["events left out: GPU, group 1 of layers (unnamed)"] == 1
    assert trace.header.noted["events left out: CPU, group 0 of layers (unnamed)"] == 1


def test_the_group_that_keeps_every_token_is_read(tmp_path: Path) -> None:
    """The first group of gpt-oss has windows, whose blocks are a part of each prompt; vLLM 0.33 names the kinds."""
    window = {
        "type": "BlockStored",
        "block_hashes": [b"w" * 8],
        "parent_block_hash": b"v" * 8,
        "token_ids": [],
    }
    window |= {"block_size": 16, "group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    whole = window | {"block_hashes": [b"a" * 8, b"b" * 8], "parent_block_hash": None}
    whole |= {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    path = tmp_path / "two.events"
    path.write_bytes(msgpack.packb([1.0, [window, whole]]))
    trace = read_trace(path)
    assert [request.prompt_tokens for request in trace.requests] == [33]
    assert trace.header.noted["events left out: GPU, group 0 of layers (sliding_window)"] == 1


def test_a_block_in_front_of_itself_is_refused(tmp_path: Path) -> None:
    """The chain of its prompt would have no begin."""
    path = write(tmp_path / "one.events", stored(1.0, [b"a"], b"b"), stored(9.0, [b"b"], b"a"))
    with pytest.raises(TraceError, match="a block stands in front of itself"):
        read_trace(path)
