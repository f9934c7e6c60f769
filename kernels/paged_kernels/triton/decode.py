"""Triton decode: split-KV attention of a few queries per sequence. The query heads of a group are the rows of one tile.

A program computes one part (split) of one sequence's keys for one KV head. A sequence with one part is written directly
to the output. `combine_kernel` merges the parts of others.

The device lists the parts once per step, and every layer reads the list. It computes the number of parts of each row
from the lengths, by the launch policy (`paged_kernels.launch_policy`): parts of nearly equal size that fill the device
in whole waves. So one long sequence among short ones does not slow the batch down, and a captured graph follows lengths
that change. A decode program reads one entry of the list. To compute it there, each program of each layer would read
the lengths of all rows.

A sequence may have several queries, its last tokens: drafts that are verified, and ends of chunks. They are the rows of
the tile with their heads, as many as it holds (`cut_rows`); further ones are a row of the list of their own.

Keys of latent attention (MLA, absorbed) are their own values (`latent`): a tile is read once for both.

The same kernel runs over contiguous KV (`run_contiguous_decode`), to measure the cost of paging.
"""

# Triton types the arguments of kernels itself, and its decorators have no types.
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803, N806

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from paged_kernels.arguments import Scoring, Workspace
from paged_kernels.launch_policy import IntArray, Room, one_part
from paged_kernels.triton.launch import (
    ENTRY,
    AttentionShape,
    Features,
    LaunchConfig,
    capability_of,
    chunks_of,
    combine_constants,
    decode_config,
    decode_constants,
    plan_constants,
    room_of,
    tokens_of,
)
from paged_kernels.triton.scan import as_operands, finished, joined, nothing_seen, scan_keys

# numbers of the launch policy, all of one kernel: one specialisation for each would be compiled anew
ROOM = ("multiprocessors", "seats", "latency", "programs", "tile_bytes", "partial_bytes")
MAX_ROWS = 4096  # rows per launch: the program of a row reads the lengths of all of them


@triton.jit
def tiles_of_rows(length, window, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles of each row's keys that a window (if any) leaves, int32."""
    tiles = tl.cdiv(length, TILE)
    if HAS_WINDOW:
        tiles -= tl.maximum(length - window, 0) // TILE
    return tiles.to(tl.int32)


@triton.jit
def wave_cost(reading, working):  # type: ignore[no-untyped-def]
    """The fourth root of the sum of both to the fourth."""
    one, other = reading * reading, working * working
    return tl.sqrt(tl.sqrt(one * one + other * other))


@triton.jit
def share_of_rows(  # type: ignore[no-untyped-def]
    tiles, most, multiprocessors, seats, latency, programs, tile_bytes, partial_bytes,
    MIN_TILES: tl.constexpr, MOST_PARTS: tl.constexpr, WAVES: tl.constexpr, START: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Tiles of a part, as `paged_kernels.launch_policy.share_of`: at most `most` parts of all rows with keys."""
    total, longest = tl.sum(tiles, 0), tl.max(tiles, 0)
    best = tl.maximum(longest, MIN_TILES)
    least = tl.full([], float("inf"), tl.float64)
    processors, pace = multiprocessors.to(tl.float64), latency.to(tl.float64)
    for number in range(MOST_PARTS + WAVES):
        filled = tl.maximum(seats * (number + 1 - MOST_PARTS) // programs, 1)
        cut = tl.where(number < MOST_PARTS, tl.cdiv(longest, number + 1), tl.cdiv(total, filled))
        share = tl.maximum(cut, MIN_TILES)
        parts = tl.sum(tl.cdiv(tiles, share), 0)
        launched = parts * programs
        full = tl.maximum(launched - 1, 0) // seats
        mean = total.to(tl.float64) / tl.maximum(parts, 1).to(tl.float64)
        reading = mean * tile_bytes.to(tl.float64) / processors
        cost = full.to(tl.float64) * wave_cost(reading * seats.to(tl.float64), (mean + START) * pace)
        last = (launched - full * seats).to(tl.float64)
        cost += wave_cost(reading * last, (share + START).to(tl.float64) * pace)
        written = launched.to(tl.float64) * partial_bytes.to(tl.float64)
        merged = MERGE * pace + 2.0 * written / processors
        cost += tl.where(share < longest, merged, 0.0)
        lower = (cost < least) & ((parts <= most) | (share >= longest))
        best, least = tl.where(lower, share, best), tl.where(lower, cost, least)
    return best


@triton.jit
def share_of_part(length, split, parts, window, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """First tile, and last tile + 1, of part number `split` of a row's `parts`."""
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0) // TILE
    last = tl.cdiv(length, TILE)
    share = tl.cdiv(last - first, parts)
    begin = first + split * share
    return begin, tl.minimum(begin + share, last)


@triton.jit(do_not_specialize=["window", "rows", "extra", *ROOM])
def plan_kernel(  # type: ignore[no-untyped-def]
    lengths, entries, spans, window, rows, extra,
    multiprocessors, seats, latency, programs, tile_bytes, partial_bytes,
    ROWS_PAD: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ENTRY: tl.constexpr, CHUNK: tl.constexpr,
    MOST_PARTS: tl.constexpr, WAVES: tl.constexpr, START: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The entries [rows + extra, ENTRY] of one row's parts, and its span [2]: first part and number of parts.

    The program after the last row marks the entries that are left by the row number `rows`.
    """
    row = tl.program_id(0)
    index = tl.arange(0, ROWS_PAD)
    all_lengths = tl.load(lengths + index, mask=index < rows, other=0)
    tiles = tiles_of_rows(all_lengths, window, TILE, HAS_WINDOW)
    share = share_of_rows(
        tiles, tl.sum((tiles > 0).to(tl.int32), 0) + extra,
        multiprocessors, seats, latency, programs, tile_bytes, partial_bytes,
        MIN_TILES, MOST_PARTS, WAVES, START, MERGE,
    )  # fmt: skip
    counts = tl.where(index < rows, tl.maximum(tl.cdiv(tiles, share), 1), 0)
    start = tl.sum(tl.where(index < row, counts, 0), 0)
    parts = tl.sum(tl.where(index == row, counts, 0), 0)
    length = tl.sum(tl.where(index == row, all_lengths, 0), 0)
    if row < rows:
        tl.store(spans + 2 * row, start)
        tl.store(spans + 2 * row + 1, parts)
    else:
        parts = rows + extra - start
    for first in range(0, parts, CHUNK):
        split = first + tl.arange(0, CHUNK)
        begin, end = share_of_part(length, split, parts, window, TILE, HAS_WINDOW)
        entry, kept = entries + (start + split) * ENTRY, split < parts
        tl.store(entry, tl.zeros([CHUNK], tl.int32) + row, mask=kept)
        tl.store(entry + 1, begin, mask=kept)
        tl.store(entry + 2, end, mask=kept)
        tl.store(entry + 3, tl.zeros([CHUNK], tl.int32) + length.to(tl.int32), mask=kept)
        tl.store(entry + 4, tl.zeros([CHUNK], tl.int32) + parts, mask=kept)


class Parts(NamedTuple):
    """The parts of a batch of rows, on the device."""

    entries: torch.Tensor  # int32 [rows + extra, ENTRY], flat
    spans: torch.Tensor  # int32 [rows, 2], flat: first part and number of parts


class Queries(NamedTuple):
    """Sequences with several queries, their last tokens: sequence i owns `bounds[i] : bounds[i + 1]` of q."""

    bounds: torch.Tensor  # int32 [sequences + 1]
    most: int  # of a sequence


class Rows(NamedTuple):
    """Rows of a decode on the device. Row r has query r, or those from `bounds[r]` to `bounds[r + 1]`."""

    table: torch.Tensor  # [rows, blocks]
    lengths: torch.Tensor  # [rows]: keys that the row's last query sees
    bounds: torch.Tensor  # int32 [rows + 1]; not read if `tokens` is 0
    tokens: int = 0  # queries of a row at most; 0: one
    most: int = 1  # queries of a sequence, which may be several rows

    def some(self, first: int) -> "Rows":
        """The rows of one launch."""
        rows, bounds = slice(first, first + MAX_ROWS), self.bounds[first : first + MAX_ROWS + 1]
        return self._replace(table=self.table[rows], lengths=self.lengths[rows], bounds=bounds)


def cut_rows(queries: Queries, table: torch.Tensor, lengths: torch.Tensor, tokens: int) -> Rows:
    """Cut sequences into rows of at most `tokens` queries, without waiting for the device; some rows are empty."""
    starts, stops = queries.bounds[:-1, None], queries.bounds[1:, None]
    pieces = -(-queries.most // tokens)
    begins = torch.minimum(starts + tokens * torch.arange(pieces, device=table.device), stops)
    ends = torch.minimum(begins + tokens, stops)
    seen = torch.where(ends > begins, lengths[:, None] - (stops - ends), 0).clamp_(min=0)
    bounds = torch.cat([begins.flatten(), stops[-1]]).int()
    wide = table.repeat_interleave(pieces, 0) if pieces > 1 else table
    return Rows(wide, seen.flatten().int(), bounds, tokens, queries.most)


class PartsOfStep:
    """The lists of one step, each made when a layer asks for it first. Layers with other windows or tiles have others.

    The lengths on the device must not change while it is used: an engine makes a new one for each step. In a captured
    graph the list is made again by every replay, if the first layer asked for it while the graph was captured.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int, Room], Parts] = {}
        self._cut: dict[tuple[int, int], Rows] = {}

    def rows(
        self, shape: AttentionShape, queries: Queries | None, table: torch.Tensor, lengths: torch.Tensor
    ) -> Rows:
        """The rows of a decode: one query each, or what sequences with `queries` are cut into, see `cut_rows`."""
        if queries is None:
            return Rows(table, lengths, lengths)
        tokens = tokens_of(shape, decode_config(shape, queries.most, capability_of(table.device)))
        key = (lengths.data_ptr(), tokens)
        if key not in self._cut:
            self._cut[key] = cut_rows(queries, table, lengths, tokens)
        return self._cut[key]

    def of(self, lengths: torch.Tensor, room: Room, window: int, workspace: Workspace) -> Parts:
        """The parts of rows of `lengths` [rows], as the launch policy cuts them."""
        rows = len(lengths)
        key = (lengths.data_ptr(), rows, window, room)
        if key not in self._made:
            # Each list of a step has a buffer of its own, so that none replaces another that is still read.
            number = len(self._made)
            made = Parts(
                workspace.take(f"decode_list_{number}", (rows + room.extra) * ENTRY, lengths, torch.int32),
                workspace.take(f"decode_spans_{number}", 2 * rows, lengths, torch.int32),
            )
            plan_kernel[(rows + 1,)](
                lengths, *made, window, rows, room.extra,
                room.multiprocessors, room.seats, room.latency, room.programs, room.tile_bytes, room.partial_bytes,
                **plan_constants(room, rows=rows, window=window > 0), num_warps=4,
            )  # fmt: skip
            self._made[key] = made
        return self._made[key]


@triton.jit
def item_of_program(KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Work item, KV head (int64: strides of heads may be large) and chunk of ROWS of the head's group of queries."""
    CHUNKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    program = tl.program_id(0)
    slot = program % (KV_HEADS * CHUNKS)
    return program // (KV_HEADS * CHUNKS), (slot // CHUNKS).to(tl.int64), slot % CHUNKS


@triton.jit(do_not_specialize=["window", "rows", "table_row"])
def decode_kernel(  # type: ignore[no-untyped-def]
    q, key_cache, value_cache, table, lengths, entries, bounds, sinks, alibi, out, lse, part, part_lse,
    scale, softcap, v_scale, window, rows,
    q_row, q_head, k_head, v_head, table_row, out_row, out_head,
    K_BLOCK: tl.constexpr, K_SLOT: tl.constexpr, V_BLOCK: tl.constexpr, V_SLOT: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, LATENT: tl.constexpr, WIDE: tl.constexpr, WIDE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PATH: tl.constexpr, TOKENS: tl.constexpr,
    SPLITS: tl.constexpr, ENTRY: tl.constexpr, DIRECT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    FOLD: tl.constexpr, HAS_LSE: tl.constexpr, PAIRS: tl.constexpr, DOT_F32: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """One part of one row and KV head. `SPLITS` 0 reads `entries`; `DIRECT` writes rows of one part to `out`.

    Row r owns the queries `bounds[r] : bounds[r + 1]`, at most TOKENS, the last of which sees all of the row's keys;
    with TOKENS 0 its query is number r. Parts are stored normalised, [parts, queries, heads, WIDE], with their
    natural-log LSE [parts, queries, heads]. WIDE is the width of an output: DV, or DK with LATENT.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    SHORT: tl.constexpr = TOKENS > 1  # queries of a row see different keys
    EACH: tl.constexpr = TOKENS if TOKENS > 1 else 1
    # tiles that all queries see are read without a mask, in a loop of their own; 64 latent rows would spill there
    TWICE: tl.constexpr = not HAS_WINDOW and (ROWS < 64 if LATENT else SHORT)
    item, kv_head, chunk = item_of_program(KV_HEADS, GROUP * EACH, ROWS)
    if SPLITS > 0:
        row, parts = item // SPLITS, SPLITS
    else:
        entry = entries + item * ENTRY
        row = tl.load(entry)
    if row < rows:
        if SPLITS > 0:
            length = tl.load(lengths + row).to(tl.int32)
            begin, end = share_of_part(length, item % SPLITS, SPLITS, window + EACH - 1, TILE, HAS_WINDOW)
        else:
            begin, end = tl.load(entry + 1), tl.load(entry + 2)
            length, parts = tl.load(entry + 3), tl.load(entry + 4)
        wide_row = row.to(tl.int64)
        member, column = chunk * ROWS + tl.arange(0, ROWS), tl.arange(0, DK_PAD)
        asked = tl.zeros([ROWS], tl.int32) + (length - 1)
        seen_by_all = length
        if TOKENS > 0:
            start = tl.load(bounds + row)
            queries = (tl.load(bounds + row + 1) - start).to(tl.int32)
            token = member // GROUP
            member = member % GROUP
            real = (token < EACH) & (token < queries)
            seen_by_all = tl.maximum(length - queries + 1, 0)
            asked = tl.minimum(length - queries + token, asked)
            flat = (start + token).to(tl.int64)
            query_place = flat[:, None]
        else:
            real = member < GROUP
            flat, query_place = wide_row, wide_row
        head = (kv_head * GROUP + member).to(tl.int64)
        asking = q + query_place * q_row + head[:, None] * q_head
        query = tl.load(asking + column[None, :], mask=real[:, None] & (column < DK)[None, :], other=0.0)
        slope = tl.zeros([ROWS], tl.float32)
        if HAS_ALIBI:
            slope = tl.load(alibi + head, mask=real, other=0.0).to(tl.float32)
        query, odd_query, power = as_operands(query, PAIRS)
        if LATENT:
            second = tl.arange(0, DV_PAD)
            kept = real[:, None] & (second < DV)[None, :]
            odd_query = tl.load(asking + DK + second[None, :], mask=kept, other=0.0)
        keys, values = key_cache + kv_head * k_head, value_cache + kv_head * v_head
        if PATH == "contiguous":
            keys, values = keys + wide_row * K_BLOCK, values + wide_row * V_BLOCK
        top, total, acc, odd_acc = nothing_seen(ROWS, WIDE_PAD, PAIRS)
        my_table = table + wide_row * table_row
        whole = tl.minimum(tl.maximum(seen_by_all // TILE, begin), end) if TWICE else begin
        for MASKED in tl.static_range(0 if TWICE else 1, 2):
            top, total, acc, odd_acc = scan_keys(
                query, odd_query, power, asked, slope, keys, values, my_table, top, total, acc, odd_acc,
                whole if MASKED else begin, end if MASKED else whole, length, scale, softcap, window,
                K_BLOCK, K_SLOT, V_BLOCK, V_SLOT, DK, DK_PAD, DV, DV_PAD, LATENT, BLOCK_SIZE, TILE, PATH,
                MASKED > 0, SHORT and MASKED > 0, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, FOLD, PAIRS, DOT_F32, LOG2E,
            )  # fmt: skip

        acc = joined(acc, odd_acc, PAIRS)
        wide = tl.arange(0, WIDE_PAD)
        kept = real[:, None] & (wide < WIDE)[None, :]
        if DIRECT & (parts == 1):
            sink = tl.zeros([ROWS], tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            whole_acc, whole_lse = finished(top, total, acc, sink, v_scale, HAS_SINKS, LOG2E)
            tl.store(
                out + query_place * out_row + head[:, None] * out_head + wide[None, :], whole_acc, mask=kept
            )
            if HAS_LSE:
                tl.store(lse + flat * HEADS + head, whole_lse, mask=real)
        else:
            piece, piece_lse = finished(top, total, acc, top, v_scale, False, LOG2E)
            place = item.to(tl.int64) * (EACH * HEADS) + head
            if TOKENS > 0:
                place += token * HEADS
            tl.store(part + place[:, None] * WIDE + wide[None, :], piece, mask=kept)
            tl.store(part_lse + place, piece_lse, mask=real)


@triton.jit
def merge_parts(  # type: ignore[no-untyped-def]
    part, part_lse, place, count, step, top, total, acc,
    DV: tl.constexpr, DV_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Carry (top, total, acc) of one head over `count` parts that lie `step` apart. Empty parts are ignored."""
    column = tl.arange(0, DV_PAD)
    for begin in range(0, count, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        where = place + index * step
        sums = tl.load(part_lse + where, mask=index < count, other=float("-inf"))
        filled = sums != float("-inf")  # a part whose LSE is NaN takes part, so the NaN reaches the output
        pieces = tl.load(
            part + where[:, None] * DV + column[None, :],
            mask=filled[:, None] & (column < DV)[None, :],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(sums, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(sums - base)
        keep = tl.exp(top - base)
        total = total * keep + tl.sum(weight, 0)
        acc = acc * keep + tl.sum(pieces * weight[:, None], 0)
        top = higher
    return top, total, acc


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    part, part_lse, prefix, prefix_lse, group_ids, spans, bounds, sinks, out, lse, out_row, out_head,
    HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One query and head: merge its parts, and those of a shared prefix ([queries, PREFIX_SPLITS, heads, DV]) if any.

    A row has one query, or with TOKENS those between its `bounds`, at most so many.
    """
    EACH: tl.constexpr = TOKENS if TOKENS > 1 else 1
    row, head = tl.program_id(0).to(tl.int64) // EACH, tl.program_id(1).to(tl.int64)
    if SPLITS > 0:
        start, count = row * SPLITS, SPLITS
    else:
        start, count = tl.load(spans + 2 * row).to(tl.int64), tl.load(spans + 2 * row + 1)
    first = start * (EACH * HEADS) + head
    if TOKENS > 0:
        token, span = tl.program_id(0) % EACH, bounds + row
        row = tl.load(span).to(tl.int64) + token
        first += token * HEADS
        count = tl.where(row < tl.load(span + 1), count, 0)
    if count > (0 if PREFIX_SPLITS > 0 else 1):
        column = tl.arange(0, DV_PAD)
        top, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        acc = tl.zeros([DV_PAD], tl.float32)
        top, total, acc = merge_parts(
            part, part_lse, first, count, EACH * HEADS, top, total, acc, DV, DV_PAD, CHUNK
        )
        if PREFIX_SPLITS > 0:
            shared = tl.where(tl.load(group_ids + row) >= 0, PREFIX_SPLITS, 0)
            top, total, acc = merge_parts(
                prefix, prefix_lse, row * PREFIX_SPLITS * HEADS + head, shared, HEADS, top, total, acc,
                DV, DV_PAD, CHUNK,
            )  # fmt: skip
        seen = total != 0
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            base = tl.where(seen, top, 0.0)
            higher = tl.maximum(base, sink)
            total = tl.where(seen, total * tl.exp(base - higher) + tl.exp(sink - higher), 0.0)
            acc = acc * tl.exp(base - higher)
            top = higher
        safe = tl.where(seen, total, 1.0)
        tl.store(out + row * out_row + head * out_head + column, acc / safe, mask=column < DV)
        if HAS_LSE:
            logsum = tl.where(seen, tl.where(seen, top, 0.0) + tl.log(safe), float("-inf"))
            tl.store(lse + row * HEADS + head, logsum)


class DecodeLaunch(NamedTuple):
    """One decode over rows: the arguments of both of its kernels."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    rows: Rows
    scoring: Scoring
    shape: AttentionShape
    config: LaunchConfig
    features: Features
    splits: int  # parts of every row; 0: as listed in `parts`
    parts: Parts
    path: str
    part: torch.Tensor  # float32 [parts, queries of a row, heads, dv], flat
    part_lse: torch.Tensor  # float32 [parts, queries of a row, heads], flat


def run_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    *,
    queries: Queries | None = None,
    workspace: Workspace | None = None,
    path: str = "auto",
    parts: PartsOfStep | None = None,
    latent: bool = False,
) -> None:
    """Attention of one query per row, q `[rows, heads, dk]`, into `out` `[rows, heads, dv]` and `lse` `[rows, heads]`.

    With `queries` a sequence has several; what belongs to no sequence stays unchanged. With `latent` the keys are those
    of both caches, one beside the other, and the values those of `key_cache`: absorbed latent attention, q `[queries,
    heads, rank + rope_dim]`, out `[queries, heads, rank]`.

    Tables (int32) and lengths (int32) are read on the device. `num_splits` None balances the parts there; layers that
    share `parts` list them once. The last stride of each tensor must be 1; the others are free. `lse` is float32 and
    contiguous.
    """
    listed, shape = parts or PartsOfStep(), shape_of(q, key_cache, value_cache, latent=latent)
    rows = listed.rows(shape, queries, block_table, seq_lens)
    for first in range(0, len(rows.lengths), MAX_ROWS):
        some = rows.some(first)
        mine = slice(None) if queries else slice(first, first + MAX_ROWS)
        inputs, has_lse = (q[mine], key_cache, value_cache, some), lse is not None
        launch = prepare_launch(
            inputs, scoring, num_splits, workspace, path, listed, lse=has_lse, latent=latent
        )
        sums = seq_lens if lse is None else lse[mine]
        launch_decode(launch, out[mine], sums, direct=True)
        if launch.splits != 1:
            launch_combine(launch, out[mine], sums)


def run_contiguous_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    scoring: Scoring,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    *,
    workspace: Workspace | None = None,
    parts: PartsOfStep | None = None,
) -> None:
    """The decode over contiguous KV `[rows, length, kv_heads, dim]`: the paged kernel with plain addresses."""
    inputs = (q, keys, values, seq_lens.unsqueeze(1), seq_lens)  # the table is not read
    run_decode(*inputs, scoring, out, lse, num_splits, workspace=workspace, path="contiguous", parts=parts)


def prepare_launch(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Rows],
    scoring: Scoring,
    num_splits: int | None,
    workspace: Workspace | None,
    path: str,
    parts: PartsOfStep,
    *,
    lse: bool,
    latent: bool = False,
) -> DecodeLaunch:
    """Compute the shape, launch numbers and scratch buffers of one decode: of q, K, V and the rows."""
    q, key_cache, value_cache, rows = inputs
    shape = shape_of(q, key_cache, value_cache, latent=latent)
    config = decode_config(shape, rows.most, capability_of(q.device))
    splits, room, count = num_splits or 0, room_of(shape, q.device, rows.most), len(rows.lengths)
    most = 0 if splits == 1 else count * splits if splits else count + room.extra
    scratch, wide = workspace or Workspace(), max(1, rows.tokens) * shape.heads
    part = scratch.take("decode_parts", most * wide * shape.dv, q, torch.float32)
    part_lse = scratch.take("decode_part_lse", most * wide, q, torch.float32)
    features = Features.of(scoring, lse=lse)
    listed = Parts(rows.lengths, rows.lengths)  # not read
    if not splits:
        window = scoring.window and scoring.window + max(1, rows.tokens) - 1
        listed = parts.of(rows.lengths, room, window, scratch)
    return DecodeLaunch(*inputs, scoring, shape, config, features, splits, listed, path, part, part_lse)


def pick_splits(
    lengths: Sequence[int] | IntArray,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    window: int = 0,
    queries: Sequence[int] = (),
) -> int | None:
    """The `num_splits` of rows whose `lengths` the host knows: 1, or None where the device lists the parts.

    `queries` are the rows' numbers of queries, without which each has one.
    """
    shape, most = shape_of(q, key_cache, value_cache), max(queries, default=1)
    if queries:
        tokens = tokens_of(shape, decode_config(shape, most, capability_of(q.device)))
        lengths = np.repeat(lengths, [-(-count // tokens) for count in queries])
    return one_part(lengths, room_of(shape, q.device, most), window)


def shape_of(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *, latent: bool = False
) -> AttentionShape:
    """The shape that the kernels are compiled for."""
    block_size, kv_heads, dk = key_cache.shape[1:]
    strides = (key_cache.stride(0), key_cache.stride(1), value_cache.stride(0), value_cache.stride(1))
    dv, rotary = (dk, value_cache.shape[3]) if latent else (value_cache.shape[3], 0)
    return AttentionShape(q.dtype, key_cache.dtype, q.shape[1], kv_heads, dk, dv, block_size, strides, rotary)


def launch_decode(launch: DecodeLaunch, out: torch.Tensor, lse: torch.Tensor, *, direct: bool) -> None:
    """Launch the first kernel. Rows of one part are written to `out` if `direct`, all others to the scratch buffers."""
    q, scoring, shape, rows = launch.q, launch.scoring, launch.shape, launch.rows
    count, caches = (
        len(rows.lengths),
        [shape.as_read(cache) for cache in (launch.key_cache, launch.value_cache)],
    )
    parts = count * launch.splits if launch.splits else len(launch.parts.entries) // ENTRY
    constants = decode_constants(
        shape, launch.config, launch.features,
        splits=launch.splits, direct=direct, path=launch.path, tokens=rows.tokens,
    )  # fmt: skip
    decode_kernel[(parts * shape.kv_heads * chunks_of(shape, launch.config),)](
        q, *caches, rows.table, rows.lengths, launch.parts.entries, rows.bounds,
        or_any(scoring.sinks, q), or_any(scoring.alibi, q), out, lse, launch.part, launch.part_lse,
        scoring.scale * scoring.k_scale, scoring.softcap, scoring.v_scale, scoring.window, count,
        q.stride(0), q.stride(1), *(cache.stride(2) for cache in caches),
        rows.table.stride(0), out.stride(0), out.stride(1),
        **constants, num_warps=launch.config.warps, num_stages=launch.config.stages,
    )  # fmt: skip


def launch_combine(
    launch: DecodeLaunch,
    out: torch.Tensor,
    lse: torch.Tensor,
    prefix: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    prefix_splits: int = 0,
) -> None:
    """Launch the second kernel: merge the parts, and those of a shared `prefix` (parts, their LSE, group ids)."""
    shape, rows = launch.shape, launch.rows
    shared, shared_lse, group_ids = prefix or (launch.part, launch.part_lse, rows.lengths)
    constants = combine_constants(
        shape, launch.features, splits=launch.splits, prefix_splits=prefix_splits, tokens=rows.tokens
    )
    combine_kernel[(len(rows.lengths) * max(1, rows.tokens), shape.heads)](
        launch.part, launch.part_lse, shared, shared_lse, group_ids, launch.parts.spans, rows.bounds,
        or_any(launch.scoring.sinks, launch.q), out, lse, out.stride(0), out.stride(1), **constants, num_warps=4,
    )  # fmt: skip


def or_any(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """`tensor`, or `other` as a placeholder pointer that the kernel does not read."""
    return other if tensor is None else tensor
