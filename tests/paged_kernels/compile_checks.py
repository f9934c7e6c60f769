"""Compile the Triton kernels without a GPU. Run by `test_triton.py` in a process of its own."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from paged_kernels.triton.configurations import kernel_configurations
from paged_kernels.triton.launch import (
    AttentionShape,
    chunks_of,
    decode_config,
    prefill_config,
    shared_bytes,
)

CONFIGURATIONS = {configuration.key: configuration for configuration in kernel_configurations()}
# Every configuration compiles in the resource gate; these are the shapes that differ most.
SAMPLE = (
    "decode/bf16/d128/g4/bs16/vector",
    "decode/fp32/d128/g4/bs16/vector",
    "decode/bf16/d256/g4/bs16/vector",
    "decode/bf16-kv-fp8e4nv/d128/g4/bs16/vector",
    "decode/bf16/d128/g4/bs16/window+softcap+sinks+alibi+lse/vector",
    "combine/bf16/d128",
    "prefill/bf16/d128/g4/bs16/vector/sm_90",
)


def compiled(key, capability):
    """The kernel for one architecture, with the facts that the launcher guarantees."""
    case = CONFIGURATIONS[key]
    return triton.compile(case.source, target=GPUTarget("cuda", capability, 32), options=case.options)


@pytest.mark.parametrize("key", SAMPLE)
def test_kernels_compile_within_shared_memory(key):
    assert compiled(key, 90).metadata.shared <= shared_bytes(90)


def test_bfloat16_keys_are_loaded_sixteen_bytes_at_a_time_and_two_tiles_ahead():
    text = compiled("decode/bf16/d128/g4/bs16/vector", 90).asm
    assert "cp.async.cg.shared.global [" in text["ptx"]
    assert "memdesc<2x64x128xbf16" in text["ttgir"]


@pytest.mark.parametrize("element", ["fp8e4nv", "fp8e5"])
def test_eight_bit_keys_go_through_shared_memory_in_pairs(element):
    """Operands of the products are read from shared memory in matrices, not byte by byte, and 128 keys are staged."""
    text = compiled(f"decode/bf16-kv-{element}/d128/g4/bs16/vector", 90).asm
    assert "ld.shared.b8" not in text["ptx"]
    assert "ldmatrix" in text["ptx"]
    assert "memdesc<2x128x64xi16" in text["ttgir"]


def test_prefill_multiplies_in_warp_groups():
    assert "wgmma" in compiled("prefill/bf16/d128/g4/bs16/vector/sm_90", 90).asm["ptx"]


def test_every_key_is_unique_and_every_argument_is_typed():
    assert len(CONFIGURATIONS) == len(kernel_configurations())
    for case in CONFIGURATIONS.values():
        assert list(case.signature) == case.kernel.arg_names
        assert set(case.constants) <= set(case.signature)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("capability", [86, 89, 120])
def test_without_warp_groups_prefill_has_the_tile_of_sm_80(dim, capability):
    shape = AttentionShape(torch.bfloat16, torch.bfloat16, 32, 8, dim, dim, 16)
    assert prefill_config(shape, capability)[:3] == prefill_config(shape, 80)[:3]


def test_an_architecture_without_a_figure_gets_the_smallest_shared_memory():
    assert shared_bytes(130) == min(map(shared_bytes, (80, 86, 89, 90, 100, 120)))


@pytest.mark.parametrize("kind", ["prefill", "prefix"])
def test_wide_heads_fit_the_smaller_shared_memories(kind):
    key = f"{kind}/bf16/d256/g4/bs16/vector/sm_86"
    assert compiled(key, 86).metadata.shared <= shared_bytes(86)


def test_a_large_group_takes_several_programs():
    for group, programs in ((32, 1), (33, 2), (128, 4)):
        shape = AttentionShape(torch.bfloat16, torch.bfloat16, group, 1, 128, 128, 16)
        assert chunks_of(shape, decode_config(shape)) == programs
