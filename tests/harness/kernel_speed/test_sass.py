"""Machine code is decoded as the disassembler lists it, with its control codes."""

import pytest

from harness.kernel_speed.gpus import AMPERE, HOPPER
from harness.kernel_speed.predict import (
    Instruction,
    Warp,
    decode,
    exits,
    read_listing,
    replay,
    run,
    shortest_path,
    tile_loop,
)

# `nvdisasm -c -hex` of sm_80: lines as it prints them, of a kernel that was compiled for this test
LISTING = """
        /*0000*/                   S2R R0, SR_TID.X ;                             /* 0x0000000000007919 */
                                                                                  /* 0x000e620000002100 */
        /*0010*/                   LOP3.LUT R3, R0, 0x3f, RZ, 0xc0, !PT ;         /* 0x0000003f00037812 */
                                                                                  /* 0x002fc800078ec0ff */
        /*0020*/              @!P4 LDG.E R4, [R2.64] ;                            /* 0x0000000e0204c981 */
                                                                                  /* 0x0002a2000c1e1900 */
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R43], [R30.64], P1 ;      /* 0x0000000e0204c981 */
                                                                                  /* 0x000fe400078e00ff */
        /*0040*/               @P0 BRA `(.L_x_1) ;                                /* 0x0000000e0204c981 */
                                                                                  /* 0x000fe400078e00ff */
        /*0050*/                   EXIT ;                                         /* 0x000000000000794d */
                                                                                  /* 0x000fea0003800000 */
"""


def plain(opcode: str, stall: int = 1, **fields: object) -> Instruction:
    """An instruction without scoreboards, but for those that are named."""
    known = {
        "guard": "",
        "operands": "",
        "yields": False,
        "written": -1,
        "read": -1,
        "waits": (),
        "target": -1,
    }
    return Instruction(opcode, stall=stall, **(known | fields))  # type: ignore[arg-type]


def test_the_control_codes_of_an_instruction_are_decoded() -> None:
    load = decode(0x0002A2000C1E1900)
    assert load == (1, False, 2, 1, ())
    wait = decode(0x002FC800078EC0FF)
    assert wait == (4, True, -1, -1, (1,))


def test_a_listing_is_read_with_labels_and_guards() -> None:
    code = read_listing(LISTING)
    assert [one.opcode for one in code] == [
        *("S2R", "LOP3.LUT", "LDG.E", "LDGSTS.E.BYPASS.128", "BRA", "EXIT"),
    ]
    assert code[0].written == 1
    assert code[1].waits == (1,)
    assert code[2].guard == "!P4"
    assert code[4].target == 3


def test_the_shape_of_a_product_is_part_of_its_opcode() -> None:
    line = "        /*0010*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], R88, gsb0 ;   \n"
    (product,) = read_listing(line)
    assert product.opcode == "HGMMA.64x64x16.F32.BF16"
    assert product.operands.endswith("gsb0")


def test_addresses_are_targets_too() -> None:
    code = read_listing(LISTING.replace("`(.L_x_1)", "0x30").replace(".L_x_1:\n", ""))
    assert code[4].target == 3


def test_the_tile_loop_is_the_one_that_copies() -> None:
    assert tile_loop(read_listing(LISTING)) == range(3, 5)


def test_code_that_waits_behind_two_loops_makes_no_loop_of_both() -> None:
    """As on sm_100: a wait that must be repeated stands behind the kernel, and branches back into its loop."""
    waits = plain("SYNCS", guard="!P1")
    code = [
        plain("MOV"),
        *(waits, plain("BRA", guard="P2", target=9)),  # 1, 2
        *(plain("LDGSTS"), plain("BRA", guard="P0", target=1)),  # 3, 4: the first loop
        *(plain("LDGSTS"), plain("LDGSTS"), plain("BRA", guard="P0", target=5)),  # 5, 6, 7: the second
        plain("EXIT"),
        *(waits, plain("BRA", target=3)),  # 9, 10: behind the kernel
    ]
    assert tile_loop(code) == range(5, 8)


def test_a_loop_that_copies_nothing_is_no_tile_loop() -> None:
    assert not tile_loop([plain("IADD3"), plain("BRA", guard="P0", target=0), plain("EXIT")])


def test_the_shortest_way_skips_what_a_branch_skips() -> None:
    code = [plain("BRA", guard="P0", target=3), *[plain("IADD3", stall=9)] * 2, plain("EXIT")]
    assert shortest_path(code, 0, exits(code)) == (0,)


def test_an_unconditional_branch_does_not_fall_through() -> None:
    code = [plain("BRA", target=2), plain("EXIT"), plain("IADD3"), plain("EXIT")]
    assert shortest_path(code, 0, [1]) == ()
    assert shortest_path(code, 0, [3]) == (0, 2)


def test_stall_cycles_pass_before_the_next_instruction() -> None:
    warp = Warp()
    run(warp, [plain("IADD3", stall=4), plain("IADD3", stall=2)], AMPERE)
    assert warp.now == 6


def test_a_scoreboard_is_waited_for() -> None:
    warp = Warp()
    run(warp, [plain("LDS", written=0), plain("FADD", waits=(0,))], AMPERE)
    assert warp.now == AMPERE.shared + 1


def test_wide_loads_come_from_memory_and_narrow_ones_from_the_cache() -> None:
    times = []
    for opcode in ("LDG.E.128", "LDG.E"):
        warp = Warp()
        run(warp, [plain(opcode, written=0), plain("FADD", waits=(0,))], AMPERE)
        times.append(warp.now - 1)
    assert times == [AMPERE.memory, AMPERE.l2]


def test_a_group_of_copies_is_waited_for_and_the_last_one_is_not() -> None:
    copy, close = plain("LDGSTS.E.BYPASS.128"), plain("LDGDEPBAR", written=0)
    warp = Warp()
    run(warp, [copy, close, *[plain("IADD3")] * 98, copy, close], AMPERE)
    run(warp, [plain("DEPBAR.LE", operands="SB0, 0x1")], AMPERE)
    assert warp.now == AMPERE.memory + 1
    run(warp, [plain("DEPBAR.LE", operands="SB0, 0x0")], AMPERE)
    assert warp.now == 100 + AMPERE.memory + 1


def test_matrix_instructions_follow_each_other_at_the_rate_of_their_unit() -> None:
    warp = Warp()
    run(warp, [plain("HMMA.16816.F32.BF16")] * 4, AMPERE)
    assert warp.now == 3 * AMPERE.matrix + 1


def test_warp_group_products_are_waited_for() -> None:
    product = plain("HGMMA.64x128x16.F32.BF16", operands="R24, gdesc[UR8], R24, gsb0")
    warp = Warp()
    run(warp, [product, plain("WARPGROUP.DEPBAR.LE", operands="gsb0, 0x0")], HOPPER)
    assert warp.now == 64 * 128 * 16 / HOPPER.warp_group + 1


def test_a_listing_without_control_codes_is_refused() -> None:
    text = "\n".join(line for line in LISTING.splitlines() if "*/" in line and "/* 0x000f" not in line)
    text = "\n".join(line.partition("/* 0x")[0] for line in text.splitlines())
    with pytest.raises(ValueError, match="nvdisasm -c -hex"):
        replay(read_listing(text), AMPERE)


def looped(copies: int) -> list[Instruction]:
    """A kernel with `copies` copies of 16 bytes a thread in its loop and as many before it."""
    loads = [plain("LDGSTS.E.BYPASS.128")] * copies
    return [
        *(*loads, plain("LDGDEPBAR", written=0)),
        plain("DEPBAR.LE", operands="SB0, 0x0"),
        *(*loads, plain("LDGDEPBAR", written=0), plain("MUFU.EX2")),
        plain("BRA", guard="P0", target=copies + 1),
        plain("EXIT"),
    ]


def test_a_loop_that_waits_for_its_own_copies_takes_the_latency_of_the_memory() -> None:
    found = replay(looped(4), AMPERE)
    assert found.loop == pytest.approx(AMPERE.memory, abs=10)
    assert found.ahead == 1
    assert found.copied == 4 * 32 * 16


def test_the_busiest_pipe_counts_slow_instructions_by_their_rate() -> None:
    code = looped(1)
    special = [*code[:-2], *[plain("MUFU.EX2")] * 9, *code[-2:]]
    assert replay(special, AMPERE).pipe == 80


def test_warps_that_share_a_scheduler_wait_for_each_others_products() -> None:
    alone, crowded = Warp(), Warp()
    for warp, crowd in ((alone, 1), (crowded, 2)):
        run(warp, [plain("HMMA.16816.F32.BF16")] * 4 + [plain("IADD3")] * 10, AMPERE, crowd)
    assert crowded.now == 2 * alone.now
