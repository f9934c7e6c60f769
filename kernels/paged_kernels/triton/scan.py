"""What all Triton attention kernels share: how keys are found, and how the softmax runs over them, tile by tile.

The number of keys in a tile does not depend on the block size, so a sweep over block sizes measures blocks and not
tiles. The block ids of the next tile are loaded one tile ahead, in a loop variable. If the table were part of the
address in the same iteration, the compiler would keep one buffer of K and V instead of two or three.
"""

# This file holds kernels alone. Triton types their arguments itself, and its decorators have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Code after an early return inside an `if` on a constant would be compiled too, so each return has its `else`.
# ruff: noqa: N803, N806, RET505

import triton
import triton.language as tl


@triton.jit
def block_ids(
    table, tile, limit, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PATH: tl.constexpr, MASKED: tl.constexpr
):
    """Blocks of a tile's keys before `limit`: one id for all, one per block or key, or none where KV is contiguous.

    Entries after the end are garbage and are not read. Without MASKED no tile holds keys on both sides of `limit`.
    """
    if PATH == "contiguous":
        return tile * 0
    elif PATH == "scalar":  # TILE divides BLOCK_SIZE
        return tl.load(table + tile * TILE // BLOCK_SIZE, mask=tile * TILE < limit, other=0)
    elif PATH == "blocks":
        block = tl.arange(0, TILE // BLOCK_SIZE)
        reached = tile * TILE + (block * BLOCK_SIZE if MASKED else tl.zeros([TILE // BLOCK_SIZE], tl.int32))
        return tl.load(table + tile * (TILE // BLOCK_SIZE) + block, mask=reached < limit, other=0)
    else:
        position = tile * TILE + tl.arange(0, TILE)
        return tl.load(table + position // BLOCK_SIZE, mask=position < limit, other=0)


@triton.jit
def of_keys(offset, STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Multiples of STRIDE of blocks [TILE / BLOCK_SIZE, 1] or slots [1, BLOCK_SIZE], as [TILE, 1].

    The compiler does not see through `reshape` what divides them. Without that, loads would be narrow.
    """
    offset = tl.reshape(tl.broadcast_to(offset, [TILE // BLOCK_SIZE, BLOCK_SIZE]), [TILE])
    return tl.multiple_of(offset, STRIDE & -STRIDE)[:, None]


@triton.jit
def slots(STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """Offsets of slots [COUNT] from the first one: of 32 bits where they fit, which takes fewer instructions."""
    return tl.arange(0, COUNT).to(tl.int64 if STRIDE * COUNT >= 2**31 else tl.int32) * STRIDE


@triton.jit
def load_tile(
    cache, block, tile, inside, BLOCK_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, DIM: tl.constexpr,
    PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PATH: tl.constexpr, MASKED: tl.constexpr,
    SPARE: tl.constexpr,
):  # fmt: skip
    """Rows [TILE, PAD] of one head. Keys not `inside` read as 0, because NaN times a zero weight is NaN.

    What is the same for all tiles is added to the cache's address first: once, before the loop. It takes registers, so
    it is not done where none are to SPARE. Within a block slots are added last, by pairs, and not by the numbers that
    tell positions: so the compiler sees constants, which the copies take as they are.
    """
    key, column = tl.arange(0, TILE), tl.arange(0, PAD)
    wide = block.to(tl.int64) * BLOCK_STRIDE
    if PATH == "contiguous":
        place = cache + ((tile * TILE + key).to(tl.int64) * SLOT_STRIDE)[:, None] + column[None, :]
    elif PATH == "blocks":
        slot = of_keys(slots(SLOT_STRIDE, BLOCK_SIZE)[None, :], SLOT_STRIDE, BLOCK_SIZE, TILE)
        place = cache + column[None, :] + slot + of_keys(wide[:, None], BLOCK_STRIDE, BLOCK_SIZE, TILE)
    elif PATH == "scalar" and SPARE:
        wide += tl.full([], tile * TILE % BLOCK_SIZE, tl.int64) * SLOT_STRIDE
        one = of_keys(slots(SLOT_STRIDE, 2)[None, :], SLOT_STRIDE, 2, TILE)
        two = of_keys(slots(2 * SLOT_STRIDE, TILE // 2)[:, None], SLOT_STRIDE, 2, TILE)
        place = cache + wide + column[None, :] + one + two
    else:
        inner = tile * TILE % BLOCK_SIZE + key if PATH == "scalar" else (tile * TILE + key) % BLOCK_SIZE
        place = cache + (wide + inner.to(tl.int64) * SLOT_STRIDE)[:, None] + column[None, :]
    real = (column < DIM)[None, :]
    if MASKED and PAD == DIM:
        return tl.load(place, mask=inside[:, None], other=0.0)
    elif MASKED:
        return tl.load(place, mask=inside[:, None] & real, other=0.0)
    elif PAD == DIM:
        return tl.load(place)
    else:
        return tl.load(place, mask=real & tl.full([TILE, 1], True, tl.int1), other=0.0)


@triton.jit
def matmul(a, b, acc, DOT_F32: tl.constexpr):
    """a @ b + acc in float32. The interpreter multiplies bfloat16 wrongly, so both become float32 there."""
    if DOT_F32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")


@triton.jit
def as_operands(query, PAIRS: tl.constexpr):
    """The `halves` of the query as the products take them, and the factor by which they are too small, [ROWS].

    8-bit keys become float16 in one instruction for two, but bfloat16 in two each, through a pipe with a quarter of the
    rate. So bfloat16 queries become float16 as well. They are exact there but for their range, which a power of two
    per row brings below 2; what underflows is less than 2^-24 of the row's largest element.
    """
    power = tl.full([query.shape[0]], 1.0, tl.float32)
    if PAIRS != "" and query.dtype == tl.bfloat16:
        wide = query.to(tl.float32)
        largest = tl.max(tl.abs(wide), 1)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where((power > 0) & (power < float("inf")), power, 1.0)
        query = (wide / power[:, None]).to(tl.float16)
    even, odd = halves(query, PAIRS)
    return even, odd, power


@triton.jit
def widened(pair, PAIRS: tl.constexpr, DOT_F32: tl.constexpr):
    """The two 8-bit numbers of each 16-bit element, as float16: those at even places of the row, those at odd ones.

    The shared memory of a GPU delivers operands of matrix products in elements of 16 bits. Single bytes are read one by
    one there, so pairs are read, and widened in the registers in which the products need them. A word holds the bytes
    b0 b1 b2 b3 of two elements; b0 and b2 become the first result. One instruction converts two numbers of e4m3, NaN
    included. A number of e5m2 is the upper half of a float16.
    """
    if DOT_F32:  # the interpreter knows no PTX
        return decoded(pair & 255, PAIRS), decoded((pair >> 8) & 255, PAIRS)
    elif PAIRS == "e4m3":
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 %sorted;
            .reg .b16 %even;
            .reg .b16 %odd;
            prmt.b32 %sorted, $2, 0, 0x3120;
            mov.b32 {%even, %odd}, %sorted;
            cvt.rn.f16x2.e4m3x2 $0, %even;
            cvt.rn.f16x2.e4m3x2 $1, %odd;
            }
            """,
            "=r,=r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $2, 0, 0x2404;
            prmt.b32 $1, $2, 0, 0x3414;
            """,
            "=&r,=r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def decoded(code, KIND: tl.constexpr):
    """The numbers of 8-bit codes (int16), float32, for the interpreter: its own conversion makes 480 of e4m3's NaN.

    Moved to the right place, the bits are a float16. The bias of e4m3's exponent is 7, of float16's 15.
    """
    if KIND == "e4m3":
        number = (((code & 128) << 8) | ((code & 127) << 7)).to(tl.float16, bitcast=True).to(
            tl.float32
        ) * 256.0
        return tl.where((code & 127) == 127, float("nan"), number)
    else:
        return (code << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def halves(rows, PAIRS: tl.constexpr):
    """The numbers at even and at odd places of `rows` [ROWS, PAD], each [ROWS, PAD / 2]; without PAIRS twice `rows`."""
    if PAIRS != "":
        return tl.split(tl.reshape(rows, [rows.shape[0], rows.shape[1] // 2, 2]))
    else:
        return rows, rows


@triton.jit
def joined(even, odd, PAIRS: tl.constexpr):
    """The opposite of `halves`."""
    if PAIRS != "":
        return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1] * 2])
    else:
        return even


@triton.jit
def tanh(x):
    """tanh without cancellation, for the interpreter too, which has no libdevice.

    1 - 2 / (exp(2x) + 1) cancels near 0. There it is the polynomial of tanhf in Moshier's Cephes library.
    """
    y = tl.abs(x)
    square = x * x
    near = -5.70498872745e-3 * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)
    return tl.where(y < 0.625, near * square * x + x, tl.where(x < 0, -far, far))


@triton.jit
def nothing_seen(ROWS: tl.constexpr, DV_PAD: tl.constexpr, PAIRS: tl.constexpr):
    """The state that `scan_keys` starts from: top (finite: -inf minus itself is NaN), total, acc, odd_acc."""
    EACH: tl.constexpr = 2 if PAIRS != "" else 1
    top, total = tl.full([ROWS], -3.4028234663852886e38, tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PAD // EACH], tl.float32)
    return top, total, acc, acc


@triton.jit
def scan_keys(
    query, odd_query, power, asked, slope, keys, values, table, top, total, acc, odd_acc,
    begin, end, limit, scale, softcap, window,
    K_BLOCK: tl.constexpr, K_SLOT: tl.constexpr, V_BLOCK: tl.constexpr, V_SLOT: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PATH: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, FOLD: tl.constexpr, PAIRS: tl.constexpr, DOT_F32: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Carry the softmax state (top in base 2, total, acc) of `query` [ROWS, DK_PAD] over tiles `begin` to `end`.

    With PAIRS (8-bit caches, read as `widened`; their strides count pairs) `query` and `acc` are the `halves` at even
    places, `odd_query` and `odd_acc` those at odd places. Without, these two are not used.

    With LATENT the keys are also the values, so a tile is read once. `values` then holds the keys' second part (the
    rotary one, of width DV), and `odd_query` the queries' part for it.

    `asked` [ROWS] are the rows' positions; padding rows have a large one. Keys from `limit` on are not read; MASKED is
    False if no tile reaches `limit`. CAUSAL hides keys after a row's own position. FOLD multiplies the products by the
    scale inside the exponent, one instruction for both. It needs a scale above 0 and products that are the scores.
    """
    EACH: tl.constexpr = 2 if PAIRS != "" else 1  # numbers per element that is loaded
    factor = power * (scale * LOG2E)
    ROWS: tl.constexpr = query.shape[0]
    # The compiler leaves no registers to spare where no matrix instruction takes products.
    SPARE: tl.constexpr = query.dtype != tl.float32
    # Warps share the rows of a small tile. So each thread adds up what it sees, and they meet behind the loop.
    APART: tl.constexpr = SPARE and PAIRS == "" and ROWS <= 32
    # A prefill with few keys a tile takes fewer cycles with one table entry a key than with one a block, though more
    # instructions.
    ENTRIES: tl.constexpr = ROWS >= 128 and TILE <= 32
    BLOCKS: tl.constexpr = PATH == "vector" and BLOCK_SIZE > 1 and TILE % BLOCK_SIZE == 0 and not ENTRIES
    HOW: tl.constexpr = "blocks" if BLOCKS else PATH
    if APART:
        total = tl.zeros([ROWS, TILE], tl.float32) + total[:, None] / TILE
    if BLOCKS and not MASKED:
        limit = end * TILE
    block = block_ids(table, begin, limit, BLOCK_SIZE, TILE, HOW, MASKED)
    for tile in range(begin, end):
        ahead = block_ids(table, tile + 1, limit, BLOCK_SIZE, TILE, HOW, MASKED)
        position = tile * TILE + tl.arange(0, TILE)
        inside = position < limit
        if HAS_WINDOW:  # keys that no row may see are not loaded: their block may be freed
            inside = inside & (position > tl.min(asked, 0) - window)
        k = load_tile(
            keys, block, tile, inside, K_BLOCK, K_SLOT, DK // EACH, DK_PAD // EACH,
            BLOCK_SIZE, TILE, HOW, MASKED, SPARE,
        )  # fmt: skip
        v = load_tile(
            values, block, tile, inside, V_BLOCK, V_SLOT, DV // EACH, DV_PAD // EACH,
            BLOCK_SIZE, TILE, HOW, MASKED, SPARE,
        )  # fmt: skip
        scores = tl.zeros([ROWS, TILE], tl.float32)
        if PAIRS != "":
            k, odd_k = widened(k, PAIRS, DOT_F32)
            scores = matmul(odd_query, tl.trans(odd_k), scores, DOT_F32)
        scores = matmul(query, tl.trans(k), scores, DOT_F32)
        if LATENT:
            scores = matmul(odd_query, tl.trans(v), scores, DOT_F32)
            v = k
        if HAS_SOFTCAP:
            scores = tanh(scores * (power * (scale / softcap))[:, None]) * (softcap * LOG2E)
        elif not FOLD:
            scores = scores * factor[:, None]
        if HAS_ALIBI:
            scores += slope[:, None] * (position[None, :] - asked[:, None]) * LOG2E
        if MASKED and not (CAUSAL and SPARE):  # nobody asks from `limit` on: CAUSAL hides these keys too
            scores = tl.where(inside[None, :], scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(position[None, :] <= asked[:, None], scores, float("-inf"))
        if HAS_WINDOW:
            scores = tl.where(position[None, :] > asked[:, None] - window, scores, float("-inf"))
        highest = tl.max(scores, 1)
        if FOLD:
            higher = tl.maximum(top, highest * factor)
            weight = tl.exp2(scores * factor[:, None] - higher[:, None])
        else:
            higher = tl.maximum(top, highest)
            weight = tl.exp2(scores - higher[:, None])
        keep = tl.exp2(top - higher)
        total = total * keep[:, None] + weight if APART else total * keep + tl.sum(weight, 1)
        if PAIRS != "":
            v, odd_v = widened(v, PAIRS, DOT_F32)
            odd_acc = matmul(weight.to(query.dtype), odd_v, odd_acc * keep[:, None], DOT_F32)
        acc = matmul(weight.to(query.dtype), v, acc * keep[:, None], DOT_F32)
        top = higher
        block = ahead
    if APART:
        total = tl.sum(total, 1)
    return top, total, acc, odd_acc


@triton.jit
def finished(top, total, acc, sink, v_scale, HAS_SINKS: tl.constexpr, LOG2E: tl.constexpr):
    """Output [ROWS, DV_PAD] and natural-log LSE [ROWS] of a state; a row that saw no key gives 0 and -inf.

    A sink is a key without a value: it counts in the denominator only.
    """
    seen = total != 0  # not `> 0`: a NaN among the keys must reach the output
    base = tl.where(seen, top, 0.0)
    if HAS_SINKS:
        higher = tl.maximum(base, sink * LOG2E)
        total = total * tl.exp2(base - higher) + tl.exp2(sink * LOG2E - higher)
        acc = acc * tl.exp2(base - higher)[:, None]
        base = higher
    safe = tl.where(seen, total, 1.0)
    logsum = tl.where(seen, (base + tl.log2(safe)) / LOG2E, float("-inf"))
    return acc * (tl.where(seen, v_scale / safe, 0.0))[:, None], logsum
