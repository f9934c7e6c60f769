"""Mistakes planted in the PTX of our kernels: each must be refused or give a wrong output.

A compiler or a kernel that makes such a mistake would be noticed by the tests in `test_ptx_kernels.py`.
"""

import functools
import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need pagetwin[gpu]")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 keeps Triton from compiling", allow_module_level=True)

from ptx.kernel_cases import TIGHT, hostile, run_compiled
from ptx.program import AccessError, HazardError, PtxError
from tiers import cases

from paged_kernels.case import exact_attention, relative_error

SIZE = r"cp\.async\.cg\.shared\.global (\[.*\]), (\[.*\]), 0x10, %r\d+;"
BARRIER, WAIT = r"^\tbar\.sync \t0;$", r"^\tcp\.async\.wait_group \t\d;$"
TABLE = r"@(%p\d+) ld\.global\.b32 (\{ %r\d+ \}, \[ %rd\d+ \+ 0 \];)"
QUERY = r"ld\.global\.v4\.b32 \{ (\S+), (\S+), \S+, \S+ \}"
MASKED = r"selp\.f32 \t(%r\d+), (%r\d+), 0fFF800000, %p\d+;"
HEADS = r"ld\.param\.b32 \t(%r\d+), \[decode_kernel_param_19\];"
WRONG = None  # no error, but an output that differs from float64
# name: which place of the pattern (-1: the last), the pattern, what stands there instead, what notices
PLANTED = {
    "a barrier is dropped": (1, BARRIER, "", HazardError),
    "a wait for copies is dropped": (0, WAIT, "", HazardError),
    "a wait is for one group too few": (0, r"wait_group \t2;", "wait_group \t3;", HazardError),
    "copies are half as wide": (-1, SIZE, r"cp.async.ca.shared.global \1, \2, 0x8;", WRONG),
    "a load of the query is half as wide": (0, QUERY, r"ld.global.v2.b32 { \1, \2 }", WRONG),
    "no zero-fill": (-1, SIZE, r"cp.async.cg.shared.global \1, \2, 0x10;", WRONG),
    "the table is loaded without a mask": (-1, TABLE, r"ld.global.b32 \2", AccessError),
    "the mask of the table is negated": (0, TABLE, r"@!\1 ld.global.b32 \2", WRONG),
    "scores behind the end are not masked": (0, MASKED, r"mov.b32 \1, \2;", WRONG),
    "the stride of a block is wrong": (0, r"(mul\.wide\.s32 \t%rd\d+, %r\d+), 4096;", r"\1, 4080;", WRONG),
    "the stride of the query's heads is wrong": (0, HEADS, r"mov.b32 \1, 80;", AccessError),
    "values are not transposed": (0, r"x4\.trans\.shared", "x4.shared", WRONG),
    "an ldmatrix reads the next row": (0, r"(ldmatrix.*\[%r\d+)\];", r"\1+128];", WRONG),
    "an output is stored at an odd place": (-1, r"(st\.global\.v4\.b32 \[ %rd\d+) \+ 0", r"\1 + 4", AccessError),
}  # fmt: skip
QUICK = [
    "a barrier is dropped",
    "a wait for copies is dropped",
    "copies are half as wide",
    "no zero-fill",
    "the table is loaded without a mask",
    "the stride of a block is wrong",
]


@functools.cache
def case_and_output():
    """Four whole tiles and one partly filled, so that every copy of the pipeline brings keys that count."""
    case = hostile((270,), heads=4, kv_heads=1, block_size=32)
    return case, exact_attention(case)[0]


def replaced(text, which, pattern, instead):
    """The text with one place of a pattern rewritten."""
    places = list(re.finditer(pattern, text, flags=re.MULTILINE))
    assert places, f"nothing looks like {pattern}"
    place = places[which]
    return text[: place.start()] + place.expand(instead) + text[place.end() :]


def outcome(case, exact, rewrite, **options):
    """The error that a rewritten kernel raises, None if its output is wrong, "unnoticed" if it is right."""
    try:
        out, _, _ = run_compiled(case, rewrite=rewrite, **options)
    except PtxError as error:
        return error
    return "unnoticed" if relative_error(out, exact) < TIGHT[torch.bfloat16] else None


@cases("name", PLANTED, day=QUICK)
def test_a_planted_mistake_is_noticed(name):
    which, pattern, instead, expected = PLANTED[name]
    found = outcome(
        *case_and_output(), lambda kernel, text: replaced(text, which, pattern, instead), num_splits=1
    )
    if expected is WRONG:
        assert found is None
    else:
        assert isinstance(found, expected)
        assert re.search(r"decode_kernel line \d+: ", str(found))  # the instruction is named


def test_the_kernel_without_a_mistake_is_right():
    assert outcome(*case_and_output(), lambda kernel, text: text, num_splits=1) == "unnoticed"


@pytest.mark.nightly
@pytest.mark.parametrize("queries", [(), (33,)])
def test_most_barriers_and_waits_are_missed_when_they_are_dropped(queries):
    """Triton puts some barriers where another one, or the order of the steps, already keeps the accesses apart."""
    case = hostile((270,), queries, heads=4, kv_heads=1, block_size=32)
    exact, texts = exact_attention(case)[0], {}

    def keep(kernel, text):
        texts[kernel] = text
        return text

    assert outcome(case, exact, keep, num_splits=None if queries else 1) == "unnoticed"
    (text,) = texts.values()
    found = []
    for pattern in (BARRIER, WAIT):
        for number, _ in enumerate(re.finditer(pattern, text, flags=re.MULTILINE)):
            edit = functools.partial(replaced, which=number, pattern=pattern, instead="")
            found.append(
                outcome(
                    case, exact, lambda kernel, text, edit=edit: edit(text), num_splits=None if queries else 1
                )
            )
    noticed = [one for one in found if one != "unnoticed"]
    assert all(isinstance(one, HazardError) for one in noticed)  # none only changes the output
    assert len(noticed) > 0.6 * len(found)
