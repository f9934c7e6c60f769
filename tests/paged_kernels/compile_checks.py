"""Compile the Triton kernels for A100 and H100/H200 without a GPU. Run by `test_triton.py` in a process of its own."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_kernels.triton_config import LOG2E, decode_config, prefill_config
from paged_kernels.triton_decode import combine_kernel, decode_kernel
from paged_kernels.triton_prefill import prefill_kernel

SHARED_BYTES = {80: 166_912, 90: 232_448}  # what one program may use; the compiler does not check it
POINTERS = {
    "table": "*i32",
    "lengths": "*i32",
    "bounds": "*i32",
    "sinks": "*fp32",
    "lse": "*fp32",
    "part_lse": "*fp32",
}
SHAPE = {"GROUP": 4, "DK": 128, "DK_PAD": 128, "DV": 128, "DV_PAD": 128, "BLOCK_SIZE": 16, "LOG2E": LOG2E}
PLAIN = {"HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_SINKS": False, "DOT_F32": False}
FULL = PLAIN | {"HAS_WINDOW": True, "HAS_SOFTCAP": True, "HAS_SINKS": True}


def compiled(kernel, element, constants, config, capability):
    """The kernel for one architecture, with the facts about strides that the launcher guarantees."""
    values = {"q", "key_cache", "value_cache", "out", "part"}
    numbers = {"scale": "fp32", "softcap": "fp32"}
    signature, facts = {}, {}
    for index, name in enumerate(kernel.arg_names):
        pointer = f"*{element}" if name in values else POINTERS.get(name)
        signature[name] = "constexpr" if name in constants else pointer or numbers.get(name, "i32")
        if name not in constants and (pointer or name.endswith(("_row", "_block", "_slot", "_head"))):
            facts[index,] = [["tt.divisibility", 16]]
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=facts)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("element", "size"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("options", [PLAIN, FULL])
def test_attention_compiles_within_shared_memory(capability, element, size, options):
    decode, prefill = decode_config(4, 128 * size), prefill_config(4, 128 * size)
    constants = SHAPE | options | {"ROWS": decode.rows, "TILE": decode.tile, "SPLITS": 4}
    kernels = [compiled(decode_kernel, element, constants, decode, capability)]
    constants = SHAPE | options | {"ROWS": prefill.rows, "TILE": prefill.tile}
    kernels.append(compiled(prefill_kernel, element, constants, prefill, capability))
    assert max(kernel.metadata.shared for kernel in kernels) <= SHARED_BYTES[capability]


def test_bfloat16_keys_are_loaded_sixteen_bytes_at_a_time_and_two_tiles_ahead():
    config = decode_config(4, 256)
    constants = SHAPE | PLAIN | {"ROWS": config.rows, "TILE": config.tile, "SPLITS": 4}
    text = compiled(decode_kernel, "bf16", constants, config, 90).asm
    assert "cp.async.cg.shared.global [" in text["ptx"]
    assert "memdesc<2x64x128xbf16" in text["ttgir"]


def test_combining_compiles():
    constants = {"HEADS": 32, "DV": 128, "DV_PAD": 128, "SPLITS": 4, "SPLITS_PAD": 4}
    assert compiled(combine_kernel, "fp32", constants, decode_config(4, 256), 90).asm["cubin"]
