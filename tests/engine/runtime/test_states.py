"""Models with recurrent state on the engine: tokens of `generate()`, states kept at block ends, and planted bugs.

The models are random ones of unmodified transformers classes. Every step is audited, in each group.
"""

import numpy as np
import pytest
import served_groups
import torch
from families import STATEFUL, build, unowned_are_void
from served_groups import SHORT, expected, loaded, serve
from tiers import cases

from engine.core.errors import CoreError
from engine.core.memory.group_layout import KVGroup, LayerSet, separate_layout
from engine.core.memory.group_pages import PoolPages
from engine.core.memory.prefix_cache import GroupHits
from engine.core.options import GroupKind
from engine.runtime.attention import state
from engine.runtime.attention.metadata import PrefillRow, StepLayout
from engine.runtime.errors import AuditError, EngineOptionError, ModelError, NaNLogitsError
from engine.runtime.group_pool import StatePart, StateView, new_ends

PAGES = ("uniform", "separate", "lcm")


def make_llm(family="qwen3_next", **options):
    return served_groups.make_llm(
        family, **{"running": 8, "pool_tokens": 900, "groups": "separate"} | options
    )


RUNS = [
    *(("qwen3_next", pages) for pages in PAGES),
    *((family, "separate") for family in STATEFUL if family != "qwen3_next"),
    ("falcon_h1", "uniform"),
    ("lfm2", "lcm"),
]

# -- the same tokens ---------------------------------------------------------------------------------------


@cases(("family", "groups"), RUNS, day=(("qwen3_next", "separate"),))
def test_chunked_prompts_and_hits_on_kept_states_give_the_tokens_of_generate(family, groups):
    llm = make_llm(family, groups=groups, pool_tokens=6000)
    assert serve(llm, turns=2) == [expected(family)] * 2
    assert llm.engine.counters.prefix_hits > 0
    assert llm.runner.audits == llm.engine.counters.steps


@pytest.mark.nightly  # by day test_groups.py has one
@cases("groups", PAGES, day=("separate",))
def test_preemption_changes_no_token(groups):
    llm = make_llm(groups=groups, pool_tokens=256)
    assert serve(llm, sizes=SHORT) == [expected("qwen3_next", SHORT)]
    assert llm.engine.counters.preemptions > 0


@pytest.mark.nightly
@cases(
    "options",
    [{"prefix_caching": False}, {"states": "every_block"}, {"state_every": 12}, {"block_size": 16}],
    day=1,
)
def test_options_change_no_token(options):
    assert serve(make_llm(pool_tokens=6000, **options), turns=2) == [expected("qwen3_next")] * 2


@pytest.mark.nightly
def test_states_are_kept_as_often_as_asked():
    llm = make_llm(state_every=12, pool_tokens=6000)
    serve(llm)
    assert llm.scheduler.manager.block_size == 12  # no hit ends between two states


# -- refused -----------------------------------------------------------------------------------------------


def test_without_groups_a_model_with_states_is_refused_by_name():
    with pytest.raises(ModelError, match=r"2 of its layers keep a recurrent state.* set groups"):
        make_llm(groups="off")


def test_a_model_with_states_drafts_for_no_other():
    from engine.runtime.llm import LLM
    from engine.runtime.models.load import wrap_model

    with pytest.raises(ModelError, match="keep a recurrent state"):
        LLM(wrap_model(build("llama"), name="llama"), draft=loaded("qwen3_next"), pool_tokens=64)


def test_a_layout_with_states_of_another_size_is_refused():
    from engine.runtime.runner import Runner

    sets = [LayerSet(GroupKind.full, 2, 128), LayerSet(GroupKind.state, 2, 64)]
    said = (
        "group 1 has 2 state layers of 64 bytes a sequence, the model has 0 .* 2 with a state of 2048 bytes"
    )
    with pytest.raises(ModelError, match=said):
        Runner(
            loaded("qwen3_next"),
            num_blocks=1,
            block_size=4,
            groups=separate_layout(sets, 4),
            page_counts=[9, 9],
        )


# -- the tensors -------------------------------------------------------------------------------------------


def test_a_row_is_cut_where_a_state_is_kept():
    row = PrefillRow(np.array([7, 8, 9]), 0, 8, 11)  # tokens 3 to 10 of a sequence, in blocks of 4
    pieces = state.pieces_of(StepLayout(np.zeros((0, 0), int), np.zeros(0, int), [row]), 4)
    assert [piece.flat.tolist() for piece in pieces] == [[[0]], [[1, 2, 3, 4]], [[5, 6, 7]]]
    assert [(int(piece.sources[0]), int(piece.targets[0])) for piece in pieces] == [(7, 7), (7, 8), (8, 9)]


def test_a_row_that_leaves_the_block_of_an_aligned_state_keeps_none_there():
    row = PrefillRow(
        np.array([7, 0, 9]), 0, 8, 11
    )  # another branch may begin with the state after token 2, in page 7
    pieces = state.pieces_of(StepLayout(np.zeros((0, 0), int), np.zeros(0, int), [row]), 4, aligned=True)
    assert [(int(piece.sources[0]), int(piece.targets[0])) for piece in pieces] == [(7, 9)]


def test_rows_of_one_token_run_together():
    layout = StepLayout(np.array([[5, 6], [7, 0]]), np.array([5, 4]), [])
    (piece,) = state.pieces_of(layout, 4)
    assert (piece.sources.tolist(), piece.targets.tolist()) == ([5, 7], [6, 7])


@pytest.mark.nightly
def test_pages_without_an_owner_hold_nothing_in_any_layer():
    llm = make_llm("falcon_h1", pool_tokens=6000)
    serve(llm)
    llm.runner.pool.poison(llm.scheduler.manager.drain_frees())
    assert unowned_are_void(llm.runner.pool)


def test_a_state_takes_the_memory_of_keys_and_values_and_keeps_its_own_type():
    part = StatePart("recurrent", 0, (3, 2), torch.float32)
    conv = StatePart("conv", 0, (4,), torch.bfloat16)
    group = KVGroup(GroupKind.state, 1, 0, 4, 32, 32)
    keys, values = (torch.full((3, 10), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    device = torch.device("cpu")
    view = StateView(0, group, (0,), [keys], [values], 0, device, {0: (conv, part)}, new_ends(1, 3))
    page, sent = torch.tensor([2]), {conv: torch.randn(1, 4).bfloat16(), part: torch.randn(1, 3, 2)}
    view.write(0, page, sent, np.array([9]))
    assert all(torch.equal(view.read(0, page)[each], sent[each]) for each in sent)
    assert (view.written(torch.tensor([1, 2])), view.ends.tolist()) == ({1}, [[-1, -1, 9]])


# -- planted bugs ------------------------------------------------------------------------------------------


def hit_without_its_state(real):
    return lambda hits, group, index, tokens, needed: tokens


def another_state(real):
    def pages(hits, group, tokens, ends):
        found = real(hits, group, tokens, ends)
        if tokens >= 8:
            found[0][-1] = hits._caches[0].block(group, 0)
        return found

    return pages


def freed_early(real):
    return lambda group, computed: real(group, computed + (group.kind is GroupKind.state))


def never_void(real):
    return lambda pages: [page for page in real(pages) if page % 2]


def not_copied(real):
    def pieces(layout, block_size, **more):
        found = real(layout, block_size, **more)
        return [each._replace(targets=np.where(each.sources, each.sources, each.targets)) for each in found]

    return pieces


def not_cut(real):
    return lambda layout, block_size, **more: [
        piece._replace(targets=np.full_like(piece.targets, last.targets[-1]))
        for pieces in [real(layout, block_size, **more)]
        for last in pieces[-1:]
        for piece in pieces
    ]


PLANTED = {
    "a hit without its state": (GroupHits, "_last_run", hit_without_its_state, "group 0"),
    "a hit on the state of a shorter prefix": (
        GroupHits,
        "_pages",
        another_state,
        r"begins with the state after \d+ tokens, page \d+ holds the state after 4 tokens",
    ),
    "a state page is released one token early": (KVGroup, "skipped", freed_early, "group 0|sees token"),
    "a state is not copied where it is kept": (state, "pieces_of", not_copied, "different numbers|group 0"),
    "a state is kept at the end of the row alone": (state, "pieces_of", not_cut, "different numbers|group 0"),
    "a void page is not set to NaN": (PoolPages, "drain_voided", never_void, "group"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_engine_notices_a_planted_bug(bug, monkeypatch):
    owner, name, make, said = PLANTED[bug]
    llm = make_llm(pool_tokens=900, retention_interval=None, states="every_block")
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    with pytest.raises((AuditError, NaNLogitsError, CoreError), match=said):
        serve(llm, turns=3)


@pytest.mark.nightly
@cases("unit", (1, 2, 4, 8), day=(4,))
def test_a_hit_inside_a_block_goes_on_from_a_copy_and_answers_as_generate(unit):
    llm = make_llm(groups="uniform", pool_tokens=3000, prefix_match_unit=unit)
    assert serve(llm, turns=2) == [expected("qwen3_next")] * 2
    block = llm.scheduler.manager.groups.layout.groups[0].block_size
    assert llm.engine.counters.copies > 0
    assert (llm.engine.counters.prefix_hits % block > 0) == (unit < block)


def test_a_hit_inside_a_block_is_refused_where_there_is_one_group():
    with pytest.raises(EngineOptionError, match="prefix_match_unit: 8, with one group of layers"):
        make_llm(groups="off", prefix_match_unit=8)


def test_a_part_of_a_state_that_one_layer_misses_is_noticed():
    llm = make_llm(pool_tokens=6000)
    serve(llm)
    view = llm.runner.pool.views[1]
    view.keys[view.layers[1]][1:, -1] = float("nan")
    with pytest.raises(AuditError, match="the layers of group 1 hold different numbers of"):
        llm.runner.pool.written_units()
