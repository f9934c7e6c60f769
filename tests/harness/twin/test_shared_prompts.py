"""What prompts share where a plain log says it: block ids, named prefixes, numbers of cached tokens."""

import json
from pathlib import Path

import pytest

from harness.twin.log import EngineLog
from harness.twin.reading import EngineLogError, read_engine_log
from traces.trace import Segment

PLAIN = "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s"


def csv(folder: Path, columns: str, *rows: str) -> EngineLog:
    (folder / "log.csv").write_text("\n".join([f"{PLAIN},{columns}", *rows]) + "\n")
    return read_engine_log(folder)


def refused(folder: Path, columns: str, *rows: str) -> str:
    with pytest.raises(EngineLogError) as caught:
        csv(folder, columns, *rows)
    return str(caught.value)


def lengths(found: EngineLog) -> list[list[int]]:
    return [[one.tokens for one in row.segments] for row in found.workload.requests]


def test_equal_block_ids_are_equal_keys(tmp_path: Path) -> None:
    one, other = csv(tmp_path, "hash_ids", "0,40,2,1,2,7 8 9", "1,36,2,2,3,7 8 10").workload.requests
    assert [a.key == b.key for a, b in zip(one.segments, other.segments, strict=True)] == [True, True, False]


def test_the_tokens_of_an_id_follow_from_lengths(tmp_path: Path) -> None:
    found = csv(tmp_path, "hash_ids", "0,1300,2,1,2,7 8 9", "1,600,2,2,3,7 8")
    assert lengths(found) == [[512, 512, 276], [512, 88]]
    assert found.workload.header.source_block_tokens == 512


def test_ids_of_full_blocks_alone_leave_the_rest_to_the_request(tmp_path: Path) -> None:
    found = csv(tmp_path, "hash_ids,hash_block_tokens", "0,40,2,1,2,7 8,16", "1,36,2,2,3,7 8,16")
    assert found.workload.requests[0].segments[2] == Segment(None, 8)


def test_ids_of_no_usual_size_are_refused(tmp_path: Path) -> None:
    text = refused(tmp_path, "hash_ids", "0,40,2,1,2,7 8 9 10 11 12 13")
    assert "log.csv:2: hash_ids: 7 ids for 40 prompt tokens: no blocks of" in text
    assert "hash_block_tokens" in text


def test_ids_of_which_two_sizes_fit_are_refused(tmp_path: Path) -> None:
    text = refused(tmp_path, "hash_ids", "0,50,2,1,2,7")
    assert (
        "1 ids for 50 prompt tokens: blocks of 32 or 64 or 128 or 256 or 512 or 1024 tokens fit all rows"
        in text
    )


def test_json_lines_have_the_names_of_the_csv(tmp_path: Path) -> None:
    record = dict(zip(PLAIN.split(","), (0.5, 40, 2, 1.5, 2.25), strict=True))
    (tmp_path / "log.jsonl").write_text(
        "\n".join(json.dumps({**record, "hash_ids": [3, 4, last], "user": "ann"}) for last in (5, 6)) + "\n"
    )
    found = read_engine_log(tmp_path)
    assert found.requests.ttft_s.tolist() == [1.0, 1.0]
    assert lengths(found) == [[16, 16, 8]] * 2
    assert any("columns that are not read: user" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt_tokens": None}, "log.jsonl:1: prompt_tokens: number expected, found null"),
        ({"arrival_s": "soon"}, "log.jsonl:1: arrival_s: number expected, found string"),
        ({"hash_ids": 7}, "log.jsonl:1: hash_ids: list of numbers or strings expected, found 7"),
        ({"hash_ids": [True]}, "log.jsonl:1: hash_ids: list of numbers or strings expected"),
        ({"last_token_s": None}, "log.jsonl:1: last_token_s: is empty"),
        ({"cached_tokens": 41}, "log.jsonl:1: cached_tokens: 41 is more than prompt_tokens 40"),
        ({"prefix": "system"}, "log.jsonl:1: prefix_tokens: is empty"),
    ],
)
def test_a_wrong_value_of_json_lines_is_named(tmp_path: Path, change: dict[str, object], text: str) -> None:
    record = dict(zip(PLAIN.split(","), (0.5, 40, 2, 1.5, 2.25), strict=True))
    (tmp_path / "log.jsonl").write_text(json.dumps(record | change) + "\n")
    with pytest.raises(EngineLogError) as caught:
        read_engine_log(tmp_path)
    assert text in str(caught.value)


def test_named_prefixes_are_shared(tmp_path: Path) -> None:
    found = csv(tmp_path, "prefix,prefix_tokens", "0,40,2,1,2,help,30", "1,36,2,2,3,help,30", "2,9,2,4,5,,")
    first, second, third = (row.segments for row in found.workload.requests)
    assert first[0] == second[0]
    assert first[0].tokens == 30
    assert third == (Segment(None, 9),)


def test_cached_tokens_come_from_the_request_that_fits_best(tmp_path: Path) -> None:
    """The third request goes on where the first ended: 40 prompt tokens and 25 of output."""
    found = csv(tmp_path, "cached_tokens", "0,40,25,1,2,0", "1,300,2,2.5,3,0", "4,100,2,5,6,64")
    first, _, third = found.workload.requests
    assert [one.tokens for one in third.segments] == [40, 24, 36]
    assert third.segments[:2] == (first.segments[0], Segment(first.output_key, 24))


def test_cached_tokens_that_no_earlier_request_can_have_left_are_said(tmp_path: Path) -> None:
    found = csv(tmp_path, "cached_tokens", "0,40,5,1,2,32", "4,100,2,5,6,0")
    assert found.workload.requests[0].segments[0].tokens == 40
    assert any(
        "1 of these found tokens that no earlier request of the log can have left" in one
        for one in found.notes
    )


def test_no_cached_token_means_that_nothing_is_shared(tmp_path: Path) -> None:
    found = csv(tmp_path, "cached_tokens", "0,40,5,1,2,0", "4,100,2,5,6,0")
    assert any("no prompt token was found in the prefix cache" in note for note in found.notes)
