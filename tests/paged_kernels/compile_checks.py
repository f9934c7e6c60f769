"""Compile the Triton kernels for A100 and H100/H200 without a GPU. Run by `test_triton.py` in a process of its own."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_kernels.triton.configurations import kernel_configurations

SHARED_BYTES = {80: 166_912, 90: 232_448}  # what one program may use; the compiler does not check it
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
    source = ASTSource(
        fn=case.kernel, signature=dict(case.signature), constexprs=case.fixed, attrs=case.facts
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=case.options)


@pytest.mark.parametrize("key", SAMPLE)
def test_kernels_compile_within_shared_memory(key):
    assert compiled(key, 90).metadata.shared <= SHARED_BYTES[90]


def test_bfloat16_keys_are_loaded_sixteen_bytes_at_a_time_and_two_tiles_ahead():
    text = compiled("decode/bf16/d128/g4/bs16/vector", 90).asm
    assert "cp.async.cg.shared.global [" in text["ptx"]
    assert "memdesc<2x64x128xbf16" in text["ttgir"]


def test_prefill_multiplies_in_warp_groups():
    assert "wgmma" in compiled("prefill/bf16/d128/g4/bs16/vector/sm_90", 90).asm["ptx"]


def test_every_key_is_unique_and_every_argument_is_typed():
    assert len(CONFIGURATIONS) == len(kernel_configurations())
    for case in CONFIGURATIONS.values():
        assert list(case.signature) == case.kernel.arg_names
        assert set(case.constants) <= set(case.signature)
