"""One launch policy: engine, benchmark and static model cut every batch alike, and better than what they did before."""

import json
import random
from dataclasses import replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiers import cases

from engine.runtime.attention import metadata as engine_metadata
from harness.kernel_speed.block_sizes import (
    HEADS,
    KV_HEADS,
    decode_case,
    decode_shares,
    kernel_of,
    newest_baseline,
    predict,
    room_of,
)
from harness.kernel_speed.gpus import GPUS
from paged_kernels import Workspace, providers
from paged_kernels.backends import BackendChoice
from paged_kernels.case import CaseSpec, build_case
from paged_kernels.launch_policy import parts_of_rows

launch = pytest.importorskip("paged_kernels.triton.launch", reason="the kernels need pagetwin[gpu]")
from paged_kernels.triton import decode as triton_decode  # noqa: E402 - after the check
from paged_kernels.triton.configurations import kernel_configurations  # noqa: E402

CASES = json.loads(newest_baseline(Path(__file__).parents[2] / "results" / "baselines").read_text("utf-8"))[
    "cases"
]
DEVICES = ("a100_80gb", "a10g", "l40s", "h100", "b200", "rtx_pro_6000")
DIM = 128


def kernel(name):
    return kernel_of(decode_case(CASES, 2, 16, GPUS[name].capability))


@pytest.fixture
def launched(monkeypatch):
    """The parts of each row of every decode that would be launched; nothing is."""
    found = []

    def listed(self, lengths, room, window, workspace):
        found.append(parts_of_rows(lengths.tolist(), room, window).tolist())
        return triton_decode.Parts(lengths, lengths)

    def launch_decode(launch, out, lse, *, direct):
        if launch.splits:
            found.append([launch.splits] * len(launch.q))

    monkeypatch.setattr(triton_decode.PartsOfStep, "of", listed)
    monkeypatch.setattr(triton_decode, "launch_decode", launch_decode)
    monkeypatch.setattr(triton_decode, "launch_combine", lambda *_: None)
    monkeypatch.setattr(providers, "choose_backend", lambda *_: BackendChoice("triton"))
    return found


def on(monkeypatch, name):
    """Let the launchers find the GPU of that name."""
    gpu = GPUS[name]
    monkeypatch.setattr(launch, "multiprocessors", lambda device: gpu.multiprocessors)
    monkeypatch.setattr(launch, "capability_of", lambda device: gpu.capability)
    monkeypatch.setattr(launch, "device_name", lambda device: f"NVIDIA {name}".replace("_", " "))


def batch(seed):
    draw = random.Random(seed)
    longest = draw.choice((300, 3000, 12_000))
    return tuple(draw.randint(1, longest) for _ in range(draw.choice((1, 2, 5, 16, 40))))


def one_block(lengths):
    """A decode of 32 query and 8 KV heads whose rows repeat one block: the lengths decide, and little is allocated."""
    case = build_case(
        CaseSpec((1,) * len(lengths), heads=HEADS, kv_heads=KV_HEADS, dk=DIM, dtype=torch.bfloat16)
    )
    table = case.block_table[:, :1].expand(len(lengths), -(-max(lengths) // case.block_size)).contiguous()
    return replace(
        case, lengths=lengths, block_table=table, seq_lens=torch.tensor(lengths, dtype=torch.int32)
    )


def by_engine(case):
    pool = SimpleNamespace(block_size=case.block_size, device=case.device)
    tables = np.arange(len(case.lengths))[:, None] + np.zeros((1, case.block_table.shape[1]), dtype=np.int64)
    layout = engine_metadata.StepLayout(tables, np.array(case.lengths), ())
    step = engine_metadata.TritonMetadata(layout, pool, Workspace())
    step.attend(case.q, case.key_cache, case.value_cache, case.scoring, providers.output_of(case))


@cases("name", DEVICES, day=2)
def test_benchmark_engine_and_model_launch_equal_parts(monkeypatch, launched, name):
    on(monkeypatch, name)
    room = room_of(kernel(name), GPUS[name], 2)
    for seed in range(50):
        lengths = batch(seed)
        case = one_block(lengths)
        launched.clear()
        providers.Paged().prepare(case)()
        by_engine(case)
        expected = parts_of_rows(lengths, room).tolist()
        assert launched == [expected, expected], (seed, lengths)


def share_with(one, gpu, rows, slots, parts):
    """The predicted share of bandwidth with so many parts of each row."""
    room = room_of(one, gpu, 2)
    items, tiles = rows * KV_HEADS * parts, slots / room.tile / parts
    partial = items * room.partial_bytes if parts > 1 else 0
    time = predict(one, gpu, items, tiles, launches=1 + (parts > 1), partial_bytes=partial)
    return time.share(rows * slots * 2 * KV_HEADS * DIM * 2, gpu)


def balanced_before(gpu, rows, slots, tile=64):
    """Parts of each row where the device balanced them for six programs a multiprocessor, whatever a GPU held."""
    target = ceil(6 * gpu.multiprocessors / KV_HEADS)
    return ceil(slots // tile / max(ceil(rows * (slots // tile) / target), 256 // tile))


@pytest.mark.parametrize("name", ["a100_80gb", "h100", "h200", "b200"])
@pytest.mark.parametrize(("rows", "slots"), [(8, 16_384), (16, 4096), (64, 1024), (256, 4096)])
def test_the_predicted_share_is_at_least_that_of_any_policy_before(name, rows, slots):
    """Benchmark (two parts of 8 rows, else one), engine (one part or balanced) and static model (balanced)."""
    gpu, one = GPUS[name], kernel(name)
    found = decode_shares(one, gpu, 2)[f"{rows} × {slots // 1024}k"]
    tried = {2 if rows == 8 else 1, balanced_before(gpu, rows, slots)}
    assert found >= max(share_with(one, gpu, rows, slots, parts) for parts in tried) - 1e-12


def shape_of(made):
    """The shape of a decode kernel of the resource gate; None for other kernels."""
    if not made.key.startswith("decode/"):
        return None
    dtypes = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp8e4nv": torch.float8_e4m3fn,
    }
    dtypes["fp8e5"] = torch.float8_e5m2
    query, _, kept = (
        made.key.removeprefix("decode/").removeprefix("latent64/").split("/")[0].partition("-kv-")
    )
    numbers = made.constants
    heads = numbers["KV_HEADS"] * numbers["GROUP"]
    sizes = (heads, numbers["KV_HEADS"], numbers["DK"], numbers["WIDE"], numbers["BLOCK_SIZE"])
    rotary = numbers["DV"] if numbers["LATENT"] else 0
    return launch.AttentionShape(dtypes[query], dtypes[kept or query], *sizes, rotary=rotary)


def test_the_programs_that_a_multiprocessor_holds_are_those_of_the_compiled_kernels():
    """The policy computes them from tiles, the static model from the shared memory that the resource gate reads."""
    wrong = {}
    for made in kernel_configurations():
        shape = shape_of(made)
        for capability in made.capabilities if shape else ():
            found = kernel_of(CASES[f"{made.key} sm_{capability}"]).staged(capability)
            numbers, several = made.constants, "/q" in made.key
            config = launch.LaunchConfig(numbers["TILE"], numbers["ROWS"], made.num_warps, made.num_stages)
            mine = launch.resident(shape, config, capability)
            if (
                abs(found - mine) > several
            ):  # queries that stay in registers are counted too, which is one too few
                wrong[made.key, capability] = found, mine
    assert not wrong


def test_a_window_leaves_few_tiles_to_cut():
    room = room_of(kernel("h100"), GPUS["h100"], 2)
    assert parts_of_rows([100_000], room)[0] > 1
    assert parts_of_rows([100_000], room, window=200)[0] == 1


def test_a_long_row_among_short_ones_is_cut_alone():
    room = room_of(kernel("h100"), GPUS["h100"], 2)
    first, *others = parts_of_rows([60_000, *[200] * 20], room)
    assert first > 8
    assert set(others) == {1}


def test_the_list_of_parts_has_room_for_every_batch():
    """A recorded graph has one list for all lengths: one part of each row, and `extra` more."""
    for name in DEVICES:
        room = room_of(kernel(name), GPUS[name], 2)
        for seed in range(200):
            lengths = (*batch(seed), *[0] * (seed % 3))
            assert parts_of_rows(lengths, room).sum() <= len(lengths) + room.extra


@pytest.mark.parametrize(("rows", "kept"), [(256, 133), (64, 33), (128, 65)])
def test_rows_without_keys_leave_room_for_their_own_parts(rows, kept):
    """A graph of `rows` rows is replayed with fewer; each that is left has one part in the list."""
    for programs in (2, 4, 8, 32):
        room = room_of(kernel("h100"), GPUS["h100"], 2)._replace(programs=programs)
        assert parts_of_rows([8192] * kept + [0] * (rows - kept), room).sum() <= rows + room.extra
