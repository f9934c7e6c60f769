import hashlib
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import CoreError
from engine.core.identity import KeyIdentity, MultimodalItem, TokenIdentity, process_seed
from engine.core.options import HashAlgorithm

SEGMENTS = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.integers(1, 13)), min_size=1, max_size=5
)


def tokens_of(request_id: int, segments: list[tuple[int | None, int]]) -> np.ndarray:
    """Tokens that depend on (key, position in the segment) alone, unique ones on the request too."""
    parts = []
    for index, (key, tokens) in enumerate(segments):
        stream = (key + 1) * 1_000 if key is not None else 1_000_000 + request_id * 10_000 + index * 100
        parts.append(stream + np.arange(tokens))
    return np.concatenate(parts)


def shared_blocks(one: list, other: list) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(SEGMENTS, SEGMENTS, st.sampled_from([1, 2, 4, 8]))
def test_keys_and_tokens_share_the_same_blocks(one: list, other: list, block_size: int) -> None:
    by_key = [KeyIdentity(i, s).prompt_hashes(block_size) for i, s in enumerate((one, other))]
    by_token = [
        TokenIdentity(i, tokens_of(i, s)).prompt_hashes(block_size) for i, s in enumerate((one, other))
    ]
    assert shared_blocks(*by_key) == shared_blocks(*by_token)


@given(SEGMENTS, st.sampled_from([1, 3, 16]))
def test_blocks_are_named_up_to_the_first_unique_token(segments: list, block_size: int) -> None:
    keyed = 0
    for key, tokens in segments:
        if key is None:
            break
        keyed += tokens
    assert len(KeyIdentity(0, segments).prompt_hashes(block_size)) == keyed // block_size


@given(
    st.lists(st.integers(0, 9), max_size=40),
    st.lists(st.integers(0, 9), max_size=40),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(HashAlgorithm),
)
def test_naming_as_tokens_come_equals_naming_all_at_once(
    prompt: list[int], output: list[int], block_size: int, algorithm: HashAlgorithm
) -> None:
    growing = TokenIdentity(0, np.array(prompt, dtype=np.int64), algorithm=algorithm, share_outputs=True)
    for token in output:
        growing.extend(0, [token])
        growing.generated_hashes(0, block_size)
    whole = TokenIdentity(1, np.array(prompt + output, dtype=np.int64), algorithm=algorithm)
    assert growing.generated_hashes(0, block_size) == whole.prompt_hashes(block_size)


def test_an_adapter_and_a_salt_are_never_confused() -> None:
    tokens = np.arange(8)
    pairs = [(None, ""), (None, "a"), ("a", ""), ("", "a"), ("a", "a"), ("aa", ""), (None, "+a")]
    hashes = {TokenIdentity(0, tokens, salt, adapter=adapter).prompt_hashes(4)[0] for adapter, salt in pairs}
    assert len(hashes) == len(pairs)


def test_branches_that_diverge_have_different_names() -> None:
    identity = TokenIdentity(0, np.arange(6), share_outputs=True)
    identity.extend(0, [1, 2])
    identity.extend(1, [1, 3])
    one, other = identity.generated_hashes(0, 4), identity.generated_hashes(1, 4)
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_tokens_that_can_be_read_only_once_are_all_kept() -> None:
    one, other = (TokenIdentity(0, range(4), share_outputs=True) for _ in range(2))
    one.extend(0, iter(range(4)))
    other.extend(0, range(4))
    assert one.generated_hashes(0, 4) == other.generated_hashes(0, 4)


def test_outputs_are_private_unless_shared() -> None:
    identity = TokenIdentity(0, np.arange(8))
    identity.extend(0, [1, 2, 3, 4])
    assert identity.generated_hashes(0, 4) == []


def test_a_prompt_behind_an_answer_has_the_names_of_the_answers_blocks() -> None:
    answered = KeyIdentity(0, [(1, 10)], output=(7, 30))
    later = KeyIdentity(1, [(1, 10), (7, 22), (8, 40)])
    assert answered.shares_outputs
    assert list(answered.generated_hashes(0, 16)[:2]) == list(later.prompt_hashes(16)[:2])
    assert answered.generated_hashes(0, 16)[:0] == answered.prompt_hashes(16)


def test_an_answer_behind_tokens_that_no_other_prompt_has_is_private() -> None:
    identity = KeyIdentity(0, [(1, 10), (None, 4)], output=(7, 30))
    assert not identity.shares_outputs
    assert identity.generated_hashes(0, 16) == ()


def test_token_ids_beyond_the_range_are_refused() -> None:
    with pytest.raises(CoreError, match="request 7: token ids run from -1 to 2"):
        TokenIdentity(7, np.array([-1, 2]))


def test_equal_blocks_behind_different_prefixes_have_different_names() -> None:
    one = TokenIdentity(0, np.array([1, 2, 9, 9])).prompt_hashes(2)
    other = TokenIdentity(1, np.array([3, 4, 9, 9])).prompt_hashes(2)
    assert one[1] != other[1]


def test_a_salt_isolates_tenants() -> None:
    tokens = np.arange(8)
    assert TokenIdentity(0, tokens, "a").prompt_hashes(4) != TokenIdentity(0, tokens, "b").prompt_hashes(4)
    assert KeyIdentity(0, [(5, 8)], "a").prompt_hashes(4) != KeyIdentity(0, [(5, 8)], "b").prompt_hashes(4)


def test_an_epoch_is_never_confused_with_a_salt() -> None:
    tokens = np.arange(8)
    pairs = [(0, ""), (1, ""), (0, "1"), (0, "epoch 1"), (1, "1:"), (11, ""), (2, "")]
    hashes = {TokenIdentity(0, tokens, salt, epoch=epoch).prompt_hashes(4)[0] for epoch, salt in pairs}
    assert len(hashes) == len(pairs)


def test_a_list_of_tokens_has_the_hashes_of_the_array() -> None:
    tokens = [5, 2**31 - 1, 0, 7]
    assert TokenIdentity(0, tokens).prompt_hashes(2) == TokenIdentity(0, np.array(tokens)).prompt_hashes(2)


@pytest.mark.parametrize("tokens", [[5, -1], [5, 2**31]])
def test_of_generated_tokens_beyond_the_range_none_is_kept(tokens: list[int]) -> None:
    identity = TokenIdentity(7, [1, 2], share_outputs=True)
    with pytest.raises(CoreError, match=f"request 7: token ids run from {min(tokens)} to {max(tokens)}"):
        identity.extend(0, tokens)
    identity.extend(0, [3, 4])
    assert identity.token_ids(0, 0, 9) == [1, 2, 3, 4]


@pytest.mark.parametrize("tokens", [[-1, 2], [0, 2**31], [0, 2**70]])
def test_token_ids_of_a_list_beyond_the_range_are_refused(tokens: list[int]) -> None:
    with pytest.raises(CoreError, match=f"run from {min(tokens)} to {max(tokens)}, must be at least 0"):
        TokenIdentity(7, tokens)


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    process_seed.cache_clear()
    yield
    process_seed.cache_clear()


def test_hashes_that_are_not_cryptographic_differ_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    found = set()
    for _ in range(2):
        process_seed.cache_clear()
        found.add(TokenIdentity(0, range(4), algorithm=HashAlgorithm.xxh3_128).prompt_hashes(4)[0])
    process_seed.cache_clear()
    assert len(found) == 2


@pytest.mark.usefixtures("seeded")
def test_processes_with_the_same_seed_agree() -> None:
    one = TokenIdentity(0, range(4), algorithm=HashAlgorithm.xxh3_128).prompt_hashes(4)
    process_seed.cache_clear()
    assert TokenIdentity(1, range(4), algorithm=HashAlgorithm.xxh3_128).prompt_hashes(4) == one


def test_a_salt_cannot_stand_for_another_salt_and_the_tokens_behind_it() -> None:
    tokens = [0x41414141] * 8
    longer = TokenIdentity(0, tokens, "a").prompt_hashes(4)
    assert TokenIdentity(1, tokens[:4], "a" + "A" * 16).prompt_hashes(4)[0] not in longer


def hashes_with(
    *items: MultimodalItem, tokens: int = 24, algorithm: HashAlgorithm = HashAlgorithm.sha256
) -> list:
    """Block hashes (blocks of 4) of a prompt of equal placeholder tokens."""
    return TokenIdentity(0, [7] * tokens, items=items, algorithm=algorithm).prompt_hashes(4)


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_prompts_with_different_pictures_share_the_blocks_before_them_alone(algorithm: HashAlgorithm) -> None:
    pytest.importorskip("cbor2", reason="hashes of CBOR need pagetwin[events]")
    cat, dog = (hashes_with(MultimodalItem(name, 9, 6), algorithm=algorithm) for name in ("cat", "dog"))
    assert shared_blocks(cat, dog) == 2
    assert set(cat[2:]).isdisjoint(dog[2:])


def test_the_same_picture_at_another_place_is_another_block() -> None:
    assert (
        shared_blocks(hashes_with(MultimodalItem("cat", 1, 2)), hashes_with(MultimodalItem("cat", 2, 2))) == 0
    )


def test_a_picture_is_in_every_block_that_has_one_of_its_tokens() -> None:
    identity = TokenIdentity(0, [7] * 24, items=[MultimodalItem("cat", 3, 6), MultimodalItem("dog", 9, 3)])
    assert identity.item_keys(4) == {0: [("cat", 3)], 1: [("cat", -1)], 2: [("cat", -5), ("dog", 1)]}


def test_a_prompt_with_the_bytes_of_a_picture_among_its_tokens_does_not_hit_it() -> None:
    plain = TokenIdentity(0, [7] * 24).prompt_hashes(4)
    assert set(plain).isdisjoint(hashes_with(MultimodalItem("cat", 0, 24)))


@pytest.mark.parametrize(
    "items",
    [
        [MultimodalItem("cat", 0, 0)],
        [MultimodalItem("cat", -1, 2)],
        [MultimodalItem("cat", 23, 2)],
        [MultimodalItem("cat", 4, 4), MultimodalItem("dog", 7, 2)],
        [MultimodalItem("cat", 8, 4), MultimodalItem("dog", 0, 2)],
    ],
)
def test_items_that_cannot_be_are_refused(items: list[MultimodalItem]) -> None:
    with pytest.raises(CoreError, match=r"request 5: item '.*' has .* must have tokens, not overlap"):
        TokenIdentity(5, [7] * 24, items=items)


def test_generated_tokens_continue_the_hashes_of_a_prompt_with_a_picture() -> None:
    items = [MultimodalItem("cat", 3, 6)]
    growing = TokenIdentity(0, [7] * 10, items=items, share_outputs=True)
    growing.extend(0, [7] * 14)
    assert growing.generated_hashes(0, 4) == hashes_with(*items)


def test_adapters_of_one_name_and_different_paths_share_nothing() -> None:
    one, other = (TokenIdentity(0, range(8), adapter="sql", adapter_path=path) for path in ("/a", "/b"))
    assert shared_blocks(one.prompt_hashes(4), other.prompt_hashes(4)) == 0


@pytest.mark.usefixtures("seeded")
def test_cbor_hashes_are_those_of_vllm() -> None:
    cbor2 = pytest.importorskip("cbor2", reason="hashes of CBOR need pagetwin[events]")
    before = hashlib.sha256(cbor2.dumps("0", canonical=True)).digest()
    assert before.hex().startswith("4e1195df020d")  # vLLM's NONE_HASH for PYTHONHASHSEED=0
    expected = []
    lora = ("lora", "sql", "/adapters/sql")
    for tokens, extra in (((7, 300), (lora, ("cache_salt", "salt"))), ((70_000, 200), (lora,))):
        before = hashlib.sha256(cbor2.dumps((before, tokens, extra), canonical=True)).digest()
        expected.append(before)
    identity = TokenIdentity(
        0,
        [7, 300, 70_000, 200, 5],
        "salt",
        adapter="sql",
        adapter_path="/adapters/sql",
        algorithm=HashAlgorithm.sha256_cbor,
    )
    assert identity.prompt_hashes(2) == expected


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_generated_tokens_continue_the_hashes_of_the_prompt(algorithm: HashAlgorithm) -> None:
    pytest.importorskip("cbor2", reason="hashes of CBOR need pagetwin[events]")
    growing = TokenIdentity(0, [1, 2, 3], algorithm=algorithm, share_outputs=True)
    growing.extend(0, [4, 5, 6])
    whole = TokenIdentity(1, range(1, 7), algorithm=algorithm)
    assert growing.generated_hashes(0, 2) == whole.prompt_hashes(2)


def test_cbor_hashes_without_cbor2_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cbor2", None)
    identity = TokenIdentity(0, range(4), algorithm=HashAlgorithm.sha256_cbor)
    with pytest.raises(CoreError, match="need cbor2; pip install"):
        identity.prompt_hashes(4)


@pytest.mark.parametrize("tokens", [511, 512, 513, 1400])
def test_a_prompt_that_begins_like_an_earlier_one_has_the_hashes_of_a_fresh_process(tokens: int) -> None:
    system = list(range(900))
    TokenIdentity(0, [*system, *range(5_000, 5_700)]).prompt_hashes(16)  # its pieces are remembered
    prompt = [*system, *range(9_000, 9_500)][:tokens]
    root = b"pagetwin:0:1:0:0:-"
    data = np.array(prompt, dtype="<i4").tobytes()
    expected = [hashlib.sha256(root + data[:end]).digest() for end in range(64, len(data) + 1, 64)]
    assert TokenIdentity(1, prompt).prompt_hashes(16) == expected


def test_remembered_prefixes_are_kept_apart_by_tenant_and_by_block_size() -> None:
    prompt = range(600)
    one, other = TokenIdentity(0, prompt, "a"), TokenIdentity(0, prompt, "b")
    assert set(one.prompt_hashes(16)).isdisjoint(other.prompt_hashes(16))
    assert len(one.prompt_hashes(8)) == 75
    assert one.prompt_hashes(8)[1::2] == one.prompt_hashes(16)


def test_hashes_of_generated_tokens_leave_those_of_the_prompt_as_they_are() -> None:
    identity = TokenIdentity(0, range(16), share_outputs=True)
    prompt = identity.prompt_hashes(16)
    identity.extend(0, range(16))
    assert len(identity.generated_hashes(0, 16)) == 2
    assert len(prompt) == len(identity.prompt_hashes(16)) == 1


def test_cbor_hashes_of_sha256_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cbor2", reason="hashes of CBOR need pagetwin[events]")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    found = set()
    for _ in range(2):
        process_seed.cache_clear()
        found.add(TokenIdentity(0, range(4), algorithm=HashAlgorithm.sha256_cbor).prompt_hashes(4)[0])
    process_seed.cache_clear()
    assert len(found) == 1
