"""Run `pytest --gate`. A change that is meant: `pytest --gate-update --gate-reason 'why'`, then a commit."""

import torch
from kernel import rms_norm, rms_norm_kernel


def test_rms_norm_is_no_slower_than_the_accepted_one(gated):
    torch.set_num_threads(1)
    gated(rms_norm, torch.randn(512, 1024), torch.ones(1024), name="rms_norm/512x1024")


def test_the_kernel_takes_no_more_than_the_accepted_one(kernel_resources):
    found = kernel_resources(
        rms_norm_kernel,
        signature={
            **dict.fromkeys(("x", "weight", "out"), "*fp16"), "stride": "i32", "width": "i32", "eps": "fp32",
            "BLOCK": "constexpr",
        },
        constants={"BLOCK": 4096},
        aligned=("x", "weight", "out", "stride", "width"),
        num_warps=4,
        capabilities=(80, 90, 100),
        name="rms_norm/fp16/4096",
    )  # fmt: skip
    assert all(one.wide_loads for one in found.values())  # a check of one's own
