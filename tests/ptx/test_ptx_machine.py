"""The PTX interpreter itself, on small kernels that are written here. No Triton."""

import numpy as np
import pytest
import torch
from ptx import conversions, interpreter
from ptx.arithmetic import NUMPY, OPERATIONS, value_of
from ptx.global_memory import GlobalMemory, spans_of
from ptx.interpreter import Machine
from ptx.matrix import multiply
from ptx.program import AccessError, HazardError, PtxError, UnsupportedError, parse

HEAD = """.version 8.7
.target sm_80
.extern .shared .align 16 .b8 global_smem[];
.visible .entry tried({parameters})
.reqntid {threads}
{{
.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<20>;
mov.u32 %r90, %tid.x; mov.u32 %r91, %ctaid.x; mov.b32 %r92, global_smem;
{loads}
{body}
ret;
}}
"""


def ran(body, *tensors, threads=32, programs=1, shared=1024, seed=0):
    """Run a body: %rd0, %rd1 ... point to the tensors, %r90 is the lane, %r91 the program, %r92 the shared memory."""
    parameters = ", ".join(f".param .u64 p{index}" for index in range(len(tensors)))
    loads = " ".join(f"ld.param.b64 %rd{index}, [p{index}];" for index in range(len(tensors)))
    text = HEAD.format(parameters=parameters, threads=threads, loads=loads, body=body)
    memory = GlobalMemory({f"t{index}": tensor for index, tensor in enumerate(tensors)})
    addresses = [np.uint64(memory.address(tensor)) for tensor in tensors]
    Machine(parse(text)).run((programs,), addresses, memory, shared_bytes=shared, seed=seed)
    memory.write_back()


def words(count, value=0):
    return torch.full((count,), value, dtype=torch.int32)


PUT = "mad.wide.u32 %rd9, %r90, 4, %rd0; st.global.b32 [%rd9], %r1;"  # %r1 of each lane into the first tensor


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        ("add.s32", (2**31 - 1, 1), -(2**31)),
        ("div.s32", (-7, 2), -3),
        ("rem.s32", (-7, 2), -1),
        ("mul.hi.u32", (2**31, 6), 3),
        ("mul.wide.s32", (-3, 2**31 - 1), -3 * (2**31 - 1)),
        ("mad.wide.u32", (2**32 - 1, 2, 5), 2**33 + 3),
        ("shl.b32", (1, 32), 0),
        ("shr.s32", (-8, 40), -1),
        ("shr.u32", (2**31, 31), 1),
        ("bfe.u32", (0b1011000, 3, 4), 0b1011),
        ("bfe.s32", (0b1011000, 3, 4), -5),
        ("prmt.b32", (0x33221100, 0x77665544, 0x7531), 0x77553311),
        ("selp.b32", (5, 6, 0), 6),
        ("setp.lt.u32", (2**32 - 1, 0), False),
        ("setp.lt.s32", (-1, 0), True),
        ("max.f32", (float("nan"), 2.0), 2.0),
        ("setp.ne.f32", (float("nan"), 2.0), False),
        ("setp.neu.f32", (float("nan"), 2.0), True),
        ("fma.rn.ftz.f32", (2.0**-126, 0.5, 0.0), 0.0),
        ("fma.rn.f32", (2.0**-126, 0.5, 0.0), 2.0**-127),
        ("cvt.s64.s32", (-5,), -5),
        ("cvt.u64.u32", (2**32 - 5,), 2**32 - 5),
        ("cvt.rz.f16.f32", (-2049.9,), -2048.0),
        ("cvt.rn.f16.f32", (2049.9,), 2050.0),
    ],
)
def test_arithmetic(opcode, operands, expected):
    operation = OPERATIONS[opcode]
    given = [
        np.array([[value]]).astype(NUMPY[kind])
        for value, kind in zip(operands, operation.sources, strict=True)
    ]
    assert operation.compute(*given).view(NUMPY[operation.result]).item() == expected


@pytest.mark.parametrize("opcode", ["ex2.approx.f32", "rcp.approx.f32", "div.full.f32", "lg2.approx.f32"])
def test_approximate_functions_err_but_not_more_than_the_isa_allows(opcode):
    values = np.linspace(2.1, 9.9, 1000, dtype=np.float32)[None]
    given = [values, values[:, ::-1].copy()][: len(OPERATIONS[opcode].sources)]
    exact = {"ex2": np.exp2, "rcp": np.reciprocal, "div": np.divide, "lg2": np.log2}[opcode[:3]](
        *(value.astype(np.float64) for value in given)
    )
    error = np.abs(OPERATIONS[opcode].compute(*given) / exact - 1)
    assert 2.0**-25 < error.max() < 2.0**-21.4  # 2 ulp, and the rounding of the result


def test_floats_are_written_as_their_bits():
    assert value_of("0f3FB8AA3B", "f32").item() == np.float32(np.log2(np.e))
    assert value_of("-8388608", "b32").view(np.float32).item() == -np.inf


def test_bfloat16_rounds_as_torch_does():
    values = torch.randn(4096) * torch.logspace(-30, 30, 4096)
    found = conversions.narrow_bf16(values.numpy())
    assert np.array_equal(found.view(np.int16), values.bfloat16().view(torch.int16).numpy())


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_8_bit_floats_are_those_of_torch(kind, dtype):
    codes = torch.arange(256).to(torch.uint8)
    known = conversions.small_values(kind)
    assert np.array_equal(known, codes.view(dtype).float().numpy(), equal_nan=True)
    values = (torch.randn(4096) * 20).clamp(-400, 400)
    found = conversions.encode_small(values.numpy(), kind)
    assert np.array_equal(known[found], values.to(dtype).float().numpy())
    most = float(torch.finfo(dtype).max)
    assert known[conversions.encode_small(np.array([[1e9, -1e9]], np.float32), kind)].tolist() == [
        [most, -most]
    ]


def test_a_matrix_product_takes_the_fragments_of_the_isa():
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    lane = np.arange(32)
    group, thread = lane // 4, lane % 4

    def pairs(matrix, row, column, along):
        both = [matrix[row + step * along[0], column + step * along[1]] for step in (0, 1)]
        return np.stack(both, axis=-1).astype(np.float16).view(np.uint32)[None, :, 0]

    rows = [pairs(a, group + 8 * (i % 2), 2 * thread + 8 * (i // 2), (0, 1)) for i in range(4)]
    columns = [pairs(b, 2 * thread + 8 * i, group, (1, 0)) for i in range(2)]
    places = [(group + 8 * (i // 2), 2 * thread + i % 2) for i in range(4)]
    found = multiply(rows, columns, [c[place][None].view(np.uint32) for place in places], "f16")
    for register, place in zip(found, places, strict=True):
        assert np.array_equal(register.view(np.float32)[0], (a @ b + c)[place])


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_gives_each_lane_a_pair_of_a_row(transposed):
    source, out = torch.arange(64, dtype=torch.int16), words(32)
    trans = ".trans" if transposed else ""
    ran(
        f"""mad.wide.u32 %rd3, %r90, 4, %rd1; ld.global.b32 %r2, [%rd3];
        shl.b32 %r3, %r90, 2; add.s32 %r3, %r3, %r92; st.shared.b32 [%r3], %r2; bar.sync 0;
        and.b32 %r4, %r90, 7; shl.b32 %r4, %r4, 4; add.s32 %r4, %r4, %r92;
        ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r1}}, [%r4]; {PUT}""",
        out,
        source,
    )
    matrix = source.view(8, 8).T if transposed else source.view(8, 8)
    assert torch.equal(out.view(torch.int16).view(8, 8), matrix)


@pytest.mark.parametrize(
    ("mode", "count", "clamp", "source"),
    [
        ("up", 2, 0, lambda lane: max(lane - 2, lane if lane < 2 else 0)),
        ("down", 3, 31, lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("idx", 7, 31, lambda lane: 7),
        ("idx", 1, 0x1C03, lambda lane: lane - lane % 4 + 1),
    ],
)
def test_shuffles(mode, count, clamp, source):
    out = words(32)
    ran(f"shfl.sync.{mode}.b32 %r1, %r90, {count}, {clamp}, -1; {PUT}", out)
    assert out.tolist() == [source(lane) for lane in range(32)]


def test_redux_adds_over_a_warp():
    out = words(64)
    ran(f"redux.sync.add.s32 %r1, %r90, -1; {PUT}", out, threads=64)
    assert out.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


def test_only_a_tensors_own_bytes_are_registered():
    rows = torch.zeros(4, 8, dtype=torch.int16)[:, :3]
    assert spans_of(rows).tolist() == [[0, 6], [16, 22], [32, 38], [48, 54]]
    assert spans_of(rows.T).tolist() == spans_of(rows).tolist()


@pytest.mark.parametrize(
    ("access", "error", "text"),
    [
        ("ld.global.b32 %r1, [%rd0+128]", AccessError, "outside every tensor: t0 \\+ 128"),
        ("ld.global.b32 %r1, [%rd0+-4]", AccessError, "outside every tensor: t0 \\+ -4"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd0+4]", AccessError, "16 bytes is no multiple"),
        ("st.global.b32 [%rd0+126], %r1", AccessError, "4 bytes is no multiple"),
        ("st.global.b32 [%rd0], %r90", HazardError, "two lanes store different values"),
        ("ld.shared.v2.b32 {%r1, %r2}, [%r92+1020]", AccessError, "outside the 1024 bytes of shared memory"),
        ("ld.shared.v2.b32 {%r1, %r2}, [%r92+4]", AccessError, "no multiple of its width"),
        ("st.shared.b32 [%r92], %r90", HazardError, "two lanes write different values"),
    ],
)
def test_a_wrong_access_names_its_instruction(access, error, text):
    with pytest.raises(error, match=text) as caught:
        ran(f"mov.b32 %r1, 0; {access};", words(32))
    assert access in str(caught.value)


def test_lanes_without_the_predicate_access_nothing():
    out = words(32)
    ran(f"setp.lt.u32 %p1, %r90, 3; mov.b32 %r1, 7; @%p1 ld.global.b32 %r1, [%rd0+64]; "
        f"@!%p1 ld.global.b32 %r1, [%rd1+4]; {PUT}", out, torch.arange(2, dtype=torch.int32))  # fmt: skip
    assert out.tolist() == [0] * 3 + [1] * 29


OWN = (
    "shl.b32 %r3, %r90, 2; add.s32 %r3, %r3, %r92; st.shared.b32 [%r3], %r90;"  # each lane writes its number
)
NEXT = "xor.b32 %r4, %r90, 32; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r92;"  # where the other warp writes


def test_what_another_warp_writes_is_there_behind_a_barrier():
    out = words(64)
    ran(f"{OWN} bar.sync 0; {NEXT} ld.shared.b32 %r1, [%r4]; {PUT}", out, threads=64)
    assert out.tolist() == [lane ^ 32 for lane in range(64)]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (f"{OWN} {NEXT} ld.shared.b32 %r1, [%r4];", "reads what another warp has written"),
        (
            f"{OWN} bar.sync 0; {NEXT} ld.shared.b32 %r1, [%r4]; {OWN}",
            "overwrites what another warp has read",
        ),
        (f"{OWN} {NEXT} st.shared.b32 [%r4], %r90;", "overwrites what another warp has written"),
    ],
)
def test_a_missing_barrier_is_noticed(body, text):
    with pytest.raises(HazardError, match=text):
        ran(body, words(64), threads=64)


def test_a_place_that_several_warps_read_may_not_be_overwritten_before_a_barrier():
    shared = "ld.shared.b32 %r1, [%r92]; setp.eq.u32 %p1, %r90, 0; @%p1 st.shared.b32 [%r92], %r90;"
    with pytest.raises(HazardError, match="overwrites what another warp has read"):
        ran(shared, words(64), threads=64)


COPY = """mad.wide.u32 %rd3, %r90, 4, %rd1; shl.b32 %r3, %r90, 2; add.s32 %r3, %r3, %r92;
cp.async.ca.shared.global [%r3], [%rd3], 4"""
COMMIT, WAIT, BARRIER = "cp.async.commit_group;", "cp.async.wait_group 0;", "bar.sync 0;"
READ = f"{NEXT} ld.shared.b32 %r1, [%r4]; {PUT}"


def test_an_asynchronous_copy_is_there_behind_wait_and_barrier():
    out = words(64)
    ran(f"{COPY}; {COMMIT} {WAIT} {BARRIER} {READ}", out, torch.arange(64, dtype=torch.int32), threads=64)
    assert out.tolist() == [lane ^ 32 for lane in range(64)]


@pytest.mark.parametrize(
    ("behind", "text"),
    [
        (f"{COMMIT} {BARRIER}", "for which nothing has waited"),
        (f"{WAIT} {BARRIER}", "for which nothing has waited"),
        (f"{COMMIT} cp.async.wait_group 1; {BARRIER}", "for which nothing has waited"),
        (f"{COMMIT} {WAIT}", "reads what another warp has written"),
    ],
)
def test_a_copy_is_not_there_without_commit_wait_and_barrier(behind, text):
    with pytest.raises(HazardError, match=text):
        ran(f"{COPY}; {behind} {READ}", words(64), words(64), threads=64)


def test_a_copy_of_no_bytes_writes_zeros_and_reads_nothing():
    out = words(64, 5)
    ran(f"{COPY}, 0; {COMMIT} {WAIT} {BARRIER} {READ}", out, words(1), threads=64)
    assert out.tolist() == [0] * 64


def test_programs_leave_a_loop_at_different_times():
    out = words(5)
    ran("mov.b32 %r1, 0; setp.eq.u32 %p2, %r90, 0;\n$again: add.s32 %r1, %r1, 2; add.s32 %r2, %r91, %r91;"
        "setp.lt.s32 %p1, %r1, %r2; @%p1 bra $again;"
        "mad.wide.u32 %rd9, %r91, 4, %rd0; @%p2 st.global.b32 [%rd9], %r1;", out, programs=5)  # fmt: skip
    assert out.tolist() == [2, 2, 4, 6, 8]


def test_lanes_that_part_at_a_branch_meet_again():
    out = words(32)
    ran("setp.lt.u32 %p1, %r90, 3; mov.b32 %r1, 1; @%p1 bra $other; mov.b32 %r1, 2; bra.uni $end;\n"
        f"$other: add.s32 %r1, %r1, %r90;\n$end: shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1; {PUT}", out)  # fmt: skip
    assert out.tolist() == [2, 1, 2, 3] + [2] * 28


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("madc.hi.u32 %r1, %r2, %r3, %r4;", "unknown opcode madc.hi.u32"),
        ("wgmma.fence.sync.aligned;", "unknown opcode wgmma.fence.sync.aligned"),
        ("atom.global.add.u32 %r1, [%rd0], %r2;", "unknown opcode atom.global.add.u32"),
        ("ld.local.b32 %r1, [%r2];", "unknown opcode ld.local.b32"),
        ("mov.u32 %r1, %clock;", "%clock"),
        ("@%p1 bar.sync 0;", "a predicated bar.sync"),
        ("bar.sync 1, 32;", "a barrier of a part of the warps"),
        ("shfl.sync.idx.b32 %r1, %r2, 0, 31, 15;", "leaves lanes of the warp out"),
        ("setp.eq.u32 %p1, %r90, 0; @%p1 bra $end; bar.sync 0;\n$end:", "needs all lanes"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(body, text):
    with pytest.raises(UnsupportedError, match=text):
        ran(body, words(1))


def test_a_kernel_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr(interpreter, "MOST_STEPS", 1000)
    with pytest.raises(PtxError, match="does not end"):
        ran("$again: bra $again;", words(1))


def test_unwritten_registers_and_shared_memory_are_not_zero():
    found = []
    for seed in (0, 1):
        out = words(64)
        ran(f"{PUT} add.s32 %r90, %r90, 32; ld.shared.b32 %r1, [%r92]; {PUT}", out, seed=seed)
        found.append(out)
    assert not (found[0] == found[1]).any()


def test_two_programs_may_not_store_to_one_address():
    with pytest.raises(HazardError, match="two programs store to one address"):
        ran("setp.eq.u32 %p1, %r90, 0; @%p1 st.global.b32 [%rd0], 5;", words(1), programs=40)
