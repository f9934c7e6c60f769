"""The claims ledger: every row is computed, wrong ones are explained, and a wrong formula of the core breaks rows."""

import csv
import json
import sys
from collections import Counter

import pytest

from engine.core.memory.paged import PagedManager
from engine.core.memory.prefix_cache import PrefixCache
from harness.cli.main import main
from harness.cost.model_shape import ModelShape
from harness.papers.ledger import chosen, claims, judge

CLAIMS = {claim.id: claim for claim in claims()}
LESSONS = {"S0": 39, "S1": 20, "S2": 16, "S3": 24, "S4": 30}
WRONG = """
    S0.2 S0.4 S0.10 S0.14 S0.17 S0.21 S0.22 S0.23 S0.27 S0.34 S0.36 S1.1 S1.10 S1.11 S1.16 S2.4 S2.7
    S3.1 S3.2 S3.3 S3.9 S3.14 S3.18 S3.19 S3.21 S3.22 S4.6 S4.7 S4.16 S4.21
"""


def test_every_row_holds() -> None:
    assert {claim.id: found.faults for claim in claims() if (found := judge(claim)).faults} == {}


def test_every_claim_of_the_five_lessons_has_a_row() -> None:
    assert [claim.id for claim in claims()] == [
        f"{lesson}.{number}" for lesson, count in LESSONS.items() for number in range(1, count + 1)
    ]


def test_30_claims_are_wrong() -> None:
    assert [claim.id for claim in claims() if claim.verdict == "wrong"] == WRONG.split()


def test_a_wrong_claim_is_explained_in_two_sentences() -> None:
    reasons = {name: CLAIMS[name].why for name in WRONG.split()}
    assert [name for name, why in reasons.items() if not why.endswith(".") or why.count(". ") != 1] == []


def test_what_is_not_computed_says_why() -> None:
    left_out = [claim for claim in claims() if claim.compute is None or not claim.found]
    assert [claim.id for claim in left_out if not claim.missing] == []


@pytest.mark.parametrize("name", ["S0.14", "S0.28", "S0.30", "S0.36", "S3.10", "S3.17", "S3.18"])
def test_kernel_times_need_a_gpu(name: str) -> None:
    assert CLAIMS[name].missing.startswith("needs a GPU")


def broken(*names: str) -> set[str]:
    """Of these rows, those that no longer hold."""
    return {name for name in names if not judge(CLAIMS[name]).holds}


def test_a_doubled_kv_size_breaks_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake counts K and V twice, as S4.6 does."""
    right = ModelShape.layer_kv_bytes.fget
    assert right is not None
    monkeypatch.setattr(ModelShape, "layer_kv_bytes", property(lambda shape: 2 * right(shape)))
    assert broken("S0.6", "S0.31", "S3.1", "S4.6", "S4.7") == {"S0.6", "S0.31", "S3.1", "S4.6", "S4.7"}


def test_a_lookup_that_leaves_no_token_breaks_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake asks for length / size blocks, not (length - 1) / size."""

    def lookup(manager: PagedManager, group) -> list[int]:
        return manager.prefix_cache.find(group, group.root_target // manager.block_size)[0]

    monkeypatch.setattr(PagedManager, "lookup", lookup)
    assert broken("S1.11", "S2.9", "S2.11") >= {"S1.11", "S2.11"}


def test_a_copy_for_the_last_owner_too_breaks_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake never lets a reference go when it copies, so the last owner copies as well."""
    monkeypatch.setattr("engine.core.memory.block_pool.BlockPool.leave", lambda pool, block: None)
    assert "S4.19" in broken("S4.19")


def test_a_cache_that_finds_nothing_breaks_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(cache: PrefixCache, group, asked: int) -> tuple[list[int], object]:
        return [], None

    monkeypatch.setattr(PrefixCache, "find", find)
    assert broken("S1.8", "S1.13", "S1.14", "S2.8") == {"S1.8", "S1.13", "S1.14", "S2.8"}


def test_a_lesson_names_all_its_claims() -> None:
    assert Counter(claim.id.partition(".")[0] for claim in chosen(["S3", "S0.1"])) == {"S3": 24, "S0": 1}


def test_the_command_prints_and_writes_the_page(tmp_path, capsys) -> None:
    assert main(["claims", "S0.21", "S4.21", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "copied blocks 20" in printed
    assert "No such table is in the paper" in printed
    assert "2 claims: 2 wrong as stated" in printed
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "74 tokens need 5 blocks" in page
    rows = list(csv.DictReader((tmp_path / "claims.csv").open(encoding="utf-8")))
    assert [(row["id"], row["verdict"], row["row holds"]) for row in rows] == [
        ("S0.21", "wrong", "yes"),
        ("S4.21", "wrong", "yes"),
    ]


def test_the_command_fails_where_a_row_does_not_hold(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(ModelShape, "layer_kv_bytes", property(lambda shape: 1))
    assert main(["claims", "S4.6", "--out", str(tmp_path)]) == 1
    assert "S4.6 does not hold: bytes: our code gives 40, the row has 819,200" in capsys.readouterr().out


def test_without_torch_a_claim_about_attention_is_not_computed_and_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (name,) = (claim.id for claim in claims() if claim.compute and claim.compute[0] == "permuted_table")
    judged = judge(CLAIMS[name])
    assert (judged.computed, judged.faults) == ({}, ())
    assert judged.shown.startswith("needs the engine: pip install")


def test_an_unknown_claim_is_refused(tmp_path, capsys) -> None:
    assert main(["claims", "S9.1", "--out", str(tmp_path)]) == 2
    assert "there is no claim 'S9.1'" in capsys.readouterr().err


def test_the_rows_are_data_that_json_can_hold() -> None:
    json.dumps([claim.found for claim in claims()])
