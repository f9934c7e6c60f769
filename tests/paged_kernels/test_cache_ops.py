"""Cache writes, block copies, merging of partial attentions, and the choice of a backend."""

import pytest
import torch

from paged_kernels import (
    BackendUnavailableError,
    KernelError,
    Workspace,
    copy_blocks,
    merge_attn_states,
    reshape_and_cache,
    resolve_backend,
)
from paged_kernels.arguments import Scoring
from paged_kernels.native import why_unavailable
from paged_kernels.reference import attend


def empty_caches(blocks=6, block_size=4, heads=2, dim=3):
    return [torch.full((blocks, block_size, heads, dim), float("nan")) for _ in range(2)]


def test_tokens_land_in_their_slots_and_nowhere_else():
    key_cache, value_cache = empty_caches()
    key, value = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([9, 4, 23]))
    assert torch.equal(key_cache[2, 1], key[0])
    assert torch.equal(value_cache[5, 3], value[2])
    assert int((~key_cache[..., 0, 0].isnan()).sum()) == 3


def test_slot_minus_one_is_skipped():
    key_cache, value_cache = empty_caches()
    key = torch.randn(2, 2, 3)
    reshape_and_cache(key, key, key_cache, value_cache, torch.tensor([-1, 7]))
    assert torch.equal(key_cache[1, 3], key[1])
    assert int((~value_cache[..., 0, 0].isnan()).sum()) == 1


def test_strided_keys_are_written_as_they_are_seen():
    key_cache, value_cache = empty_caches()
    key = torch.randn(2, 5, 3).transpose(0, 1)
    reshape_and_cache(key, key, key_cache, value_cache, torch.arange(4, 9))
    assert torch.equal(key_cache.view(-1, 2, 3)[4:9], key)


def test_copies_are_simultaneous():
    key_cache, value_cache = (torch.arange(6.0).view(6, 1, 1, 1).repeat(1, 4, 2, 3) for _ in range(2))
    copy_blocks(key_cache, value_cache, torch.tensor([[1, 2], [2, 1], [3, 4]]))
    assert key_cache[:, 0, 0, 0].tolist() == [0, 2, 1, 3, 3, 5]
    assert torch.equal(key_cache, value_cache)


def test_a_copy_takes_the_poison_along():
    key_cache, value_cache = empty_caches()
    key_cache[1, :2] = 1.0
    key_cache[2] = 5.0
    copy_blocks(key_cache, value_cache, torch.tensor([[1, 2]]))
    assert key_cache[2, :2].eq(1.0).all()
    assert key_cache[2, 2:].isnan().all()


def test_a_stack_of_layers_is_copied_in_one_call():
    stack = torch.randn(3, 6, 4, 2, 3)
    expected = stack.clone()
    expected[:, 5] = expected[:, 1]
    copy_blocks(stack, stack.clone(), torch.tensor([[1, 5]]))
    assert torch.equal(stack, expected)


def test_prefix_and_suffix_merge_to_the_whole():
    q, k, v = torch.randn(1, 4, 8), torch.randn(30, 2, 8), torch.randn(30, 2, 8)
    q, k, v = q.double(), k.double(), v.double()
    scoring = Scoring(0.4)
    whole, whole_lse = attend(q, k, v, scoring)
    merged, lse = merge_attn_states(*attend(q, k[:11], v[:11], scoring), *attend(q, k[11:], v[11:], scoring))
    assert torch.allclose(merged, whole)
    assert torch.allclose(lse, whole_lse)


def test_an_empty_side_takes_no_part():
    out, lse = torch.randn(2, 4, 8), torch.randn(2, 4)
    nothing, void = torch.zeros(2, 4, 8), torch.full((2, 4), float("-inf"))
    merged, merged_lse = merge_attn_states(out, lse, nothing, void)
    assert torch.allclose(merged, out)
    assert torch.allclose(merged_lse, lse)


def test_two_empty_sides_give_zeros_and_minus_infinity():
    void = torch.full((2, 4), float("-inf"))
    merged, lse = merge_attn_states(torch.zeros(2, 4, 8), void, torch.zeros(2, 4, 8), void)
    assert not merged.any()
    assert torch.equal(lse, void)


def test_triton_on_the_cpu_is_refused_with_the_reason():
    with pytest.raises(BackendUnavailableError, match="CUDA device and this run is on 'cpu'"):
        resolve_backend("triton", "cpu")


def test_an_unknown_backend_is_refused_with_the_choices():
    with pytest.raises(
        KernelError, match="'cuda' does not exist; choose auto, native, torch, torch_ref, triton"
    ):
        resolve_backend("cuda", "cpu")


def test_auto_is_compiled_c_on_a_cpu_with_a_compiler_and_else_torch():
    assert resolve_backend("auto", "cpu") == ("torch" if why_unavailable() else "native")


def test_a_workspace_is_reused_and_grows_by_doubling():
    workspace, like = Workspace(), torch.empty(0)
    first = workspace.take("k", 10, like)
    assert workspace.take("k", 8, like).data_ptr() == first.data_ptr()
    grown = workspace.take("k", 11, like)
    assert workspace.take("k", 20, like).data_ptr() == grown.data_ptr()
    assert workspace.take("v", 10, like).data_ptr() != grown.data_ptr()
