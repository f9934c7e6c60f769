/* Attention of a prompt's chunk over paged KV in bfloat16, on CPUs with AVX512_BF16. Sums are in float32.
 *
 * Products are made by matrix units (AMX) where there are any, else by dot products of pairs (vdpbf16ps). Keys and
 * values of one KV head are copied out of the pool once, into tiles of 1 KB as both multiply them: keys in pairs along
 * the width, values in pairs of tokens. The softmax is the online softmax of FlashAttention. Only keys
 * that some query of the chunk may see are read: none before the first window, none after the last query. */
#include <stdint.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

enum { ROWS = 32, KEYS = 128, LANES = 16, DEPTH = 32 }; /* queries and keys of a block; lanes, and depth, of a tile */
enum { TILE = LANES * DEPTH };                          /* bfloat16 numbers of a tile */
enum { SOME = 8 };                                      /* rows whose sums stay in registers without the unit */

__attribute__((always_inline)) static inline void copy_head(
    const uint16_t *keys, const uint16_t *values, const int64_t *table, int64_t first, int64_t count, int64_t block,
    int64_t kv_heads, int64_t head, const int dk, const int dv, uint16_t *turned, uint16_t *paired) {
    const int64_t padded = (count + KEYS - 1) / KEYS * KEYS;
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t t = 0; t < padded; t += LANES) {
        const uint16_t *k[LANES], *v[LANES];
        for (int r = 0; r < LANES; r++) {
            const int64_t at = first + t + r;
            const int64_t slot = t + r < count ? table[at / block] * block + at % block : 0;
            k[r] = t + r < count ? keys + (slot * kv_heads + head) * dk : 0;
            v[r] = t + r < count ? values + (slot * kv_heads + head) * dv : 0;
        }
        const __m512i steps = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
        for (int i = 0; i < dk; i += DEPTH) { /* a tile: pairs along the width by keys */
            uint16_t *tile = turned + (t / LANES * (dk / DEPTH) + i / DEPTH) * TILE;
            for (int r = 0; r < LANES; r++) /* of keys that are not there scores are never used, but 0 * NaN would be */
                _mm512_i32scatter_epi32(tile + 2 * r, steps, k[r] ? _mm512_loadu_si512(k[r] + i) : zero, 4);
        }
        for (int r = 0; r < LANES; r += 2) /* a row of a tile: two tokens by the width */
            for (int i = 0; i < dv; i += LANES) {
                uint16_t *tile = paired + (t / DEPTH * (dv / LANES) + i / LANES) * TILE;
                const __m512i even = v[r] ? _mm512_cvtepu16_epi32(*(const __m256i_u *)(v[r] + i)) : zero;
                const __m512i odd = v[r + 1] ? _mm512_cvtepu16_epi32(*(const __m256i_u *)(v[r + 1] + i)) : zero;
                _mm512_storeu_si512(tile + (t % DEPTH + r) * LANES, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
            }
    }
}

static inline __m512bh pair_of(const uint16_t *both) {
    int32_t bits;
    memcpy(&bits, both, 4);
    return (__m512bh)_mm512_set1_epi32(bits);
}

/* Scores of `rows` queries [ROWS, dk], rounded up to SOME, and `count` keys, a multiple of 2 * LANES, into score
 * [ROWS, KEYS]. */
__attribute__((always_inline)) static inline void add_scores(
    const uint16_t *query, const uint16_t *turned, int rows, int count, const int dk, float *score) {
    for (int t = 0; t < count; t += 2 * LANES)
        for (int r = 0; r < rows; r += SOME) {
            const uint16_t *low = turned + t * dk, *high = low + LANES * dk;
            __m512 dot[SOME][2];
            for (int j = 0; j < SOME; j++) dot[j][0] = dot[j][1] = _mm512_setzero_ps();
            for (int i = 0; i < dk; i += 2) {
                const __m512bh one = (__m512bh)_mm512_loadu_si512(low + i * LANES);
                const __m512bh other = (__m512bh)_mm512_loadu_si512(high + i * LANES);
                for (int j = 0; j < SOME; j++) {
                    const __m512bh mine = pair_of(query + (r + j) * dk + i);
                    dot[j][0] = _mm512_dpbf16_ps(dot[j][0], one, mine);
                    dot[j][1] = _mm512_dpbf16_ps(dot[j][1], other, mine);
                }
            }
            for (int j = 0; j < SOME; j++)
                for (int half = 0; half < 2; half++)
                    _mm512_storeu_ps(score + (r + j) * KEYS + t + half * LANES, dot[j][half]);
        }
}

/* Adds the values of `count` keys, a multiple of DEPTH, weighted, to the sums [ROWS, dv] of `rows` rows. */
__attribute__((always_inline)) static inline void add_values(
    const uint16_t *chance, const uint16_t *paired, int rows, int count, const int dv, float *sums) {
    for (int i = 0; i < dv; i += 2 * LANES)
        for (int r = 0; r < rows; r += SOME) {
            __m512 kept[SOME][2];
            for (int j = 0; j < SOME; j++)
                for (int half = 0; half < 2; half++)
                    kept[j][half] = _mm512_loadu_ps(sums + (r + j) * dv + i + half * LANES);
            for (int t = 0; t < count; t += 2) {
                const uint16_t *row = paired + (t / DEPTH * (dv / LANES) + i / LANES) * TILE + t % DEPTH * LANES;
                const __m512bh one = (__m512bh)_mm512_loadu_si512(row);
                const __m512bh other = (__m512bh)_mm512_loadu_si512(row + TILE);
                for (int j = 0; j < SOME; j++) {
                    const __m512bh mine = pair_of(chance + (r + j) * KEYS + t);
                    kept[j][0] = _mm512_dpbf16_ps(kept[j][0], one, mine);
                    kept[j][1] = _mm512_dpbf16_ps(kept[j][1], other, mine);
                }
            }
            for (int j = 0; j < SOME; j++)
                for (int half = 0; half < 2; half++)
                    _mm512_storeu_ps(sums + (r + j) * dv + i + half * LANES, kept[j][half]);
        }
}

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define BARRIER __asm__ volatile("" ::: "memory") /* gcc does not know that loads of tiles read memory */
enum { PERMISSION_ASKED = 0x1022, PERMISSION_ASK = 0x1023, TILE_DATA = 18 }; /* of Linux: asm/prctl.h */

/* Whether this process may use the matrix unit. Linux must be asked once. */
static int has_unit(void) {
    uint64_t allowed = 0;
    if (syscall(SYS_arch_prctl, PERMISSION_ASKED, &allowed) == 0 && allowed >> TILE_DATA & 1) return 1;
    return syscall(SYS_arch_prctl, PERMISSION_ASK, TILE_DATA) == 0;
}

/* The two above by the unit, which computes all ROWS rows at once. */
__attribute__((always_inline)) static inline void add_scores_amx(
    const uint16_t *query, const uint16_t *turned, int rows, int count, const int dk, float *score) {
    BARRIER;
    const int apart = dk / DEPTH * TILE; /* between the tiles of LANES keys and of the next ones */
    for (int t = 0; t < count; t += 2 * LANES) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (int i = 0; i < dk; i += DEPTH) {
            const uint16_t *tile = turned + t / LANES * apart + i / DEPTH * TILE;
            _tile_loadd(4, query + i, 2 * dk); _tile_loadd(5, query + LANES * dk + i, 2 * dk);
            _tile_loadd(6, tile, 64); _tile_loadd(7, tile + apart, 64);
            _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, score + t, 4 * KEYS); _tile_stored(1, score + t + LANES, 4 * KEYS);
        _tile_stored(2, score + LANES * KEYS + t, 4 * KEYS); _tile_stored(3, score + LANES * KEYS + t + LANES, 4 * KEYS);
    }
}

__attribute__((always_inline)) static inline void add_values_amx(
    const uint16_t *chance, const uint16_t *paired, int rows, int count, const int dv, float *sums) {
    BARRIER;
    for (int i = 0; i < dv; i += 2 * LANES) {
        float *low = sums + i, *high = sums + LANES * dv + i;
        _tile_loadd(0, low, 4 * dv); _tile_loadd(1, low + LANES, 4 * dv);
        _tile_loadd(2, high, 4 * dv); _tile_loadd(3, high + LANES, 4 * dv);
        for (int t = 0; t < count; t += DEPTH) {
            const uint16_t *tile = paired + (t / DEPTH * (dv / LANES) + i / LANES) * TILE;
            _tile_loadd(4, chance + t, 2 * KEYS); _tile_loadd(5, chance + LANES * KEYS + t, 2 * KEYS);
            _tile_loadd(6, tile, 64); _tile_loadd(7, tile + TILE, 64);
            _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, low, 4 * dv); _tile_stored(1, low + LANES, 4 * dv);
        _tile_stored(2, high, 4 * dv); _tile_stored(3, high + LANES, 4 * dv);
    }
}
#else
#define add_scores_amx add_scores
#define add_values_amx add_values
#endif

/* 2 to the power of x; x is at most 0, or NaN. Taylor series of 2^f for -1/2 <= f <= 1/2: exact to 3e-6. */
static inline __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200), x); /* gives x where it is NaN */
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.3333558e-3f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* The lanes of keys t to t + 15 that lie in `from` to `to - 1`. */
static inline __mmask16 lanes_of(int t, int from, int to) {
    if (t >= from && t + LANES <= to) return 0xffff;
    const int low = from - t < 0 ? 0 : from - t > LANES ? LANES : from - t;
    const int high = to - t < 0 ? 0 : to - t > LANES ? LANES : to - t;
    return (__mmask16)(((1u << high) - 1) & ~((1u << low) - 1));
}

/* One row: scores to chances [count] that are relative to the largest score so far; rescales its sums [dv]. */
__attribute__((always_inline)) static inline void one_row(
    float *score, uint16_t *chance, int from, int to, int count, float scale, const int dv, float *sums, float *top,
    float *total) {
    const __m512 lowest = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(scale);
    __m512 high = lowest, added = _mm512_setzero_ps();
    for (int t = 0; t < count; t += LANES) {
        const __m512 part = _mm512_mul_ps(_mm512_loadu_ps(score + t), factor);
        _mm512_storeu_ps(score + t, part);
        high = _mm512_mask_max_ps(high, lanes_of(t, from, to), part, high);
    }
    const float most = fmaxf(*top, _mm512_reduce_max_ps(high));
    for (int t = 0; t < count; t += LANES) {
        const __m512 power = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(score + t), _mm512_set1_ps(most)));
        const __m512 kept = _mm512_maskz_mov_ps(lanes_of(t, from, to), power);
        added = _mm512_add_ps(added, kept);
        *(__m256i_u *)(chance + t) = (__m256i)_mm512_cvtneps_pbh(kept);
    }
    const float keep = *total == 0 ? 0 : exp2f(*top - most);
    *total = *total * keep + _mm512_reduce_add_ps(added), *top = most;
    if (keep != 1)
        for (int i = 0; i < dv; i += LANES)
            _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(keep)));
}

__attribute__((always_inline)) static inline void one_head(
    const int unit, const uint16_t *q, const uint16_t *turned, const uint16_t *paired, int64_t queries, int64_t seen, int64_t heads,
    int64_t head, const int dk, const int dv, int64_t window, float scale, uint16_t *out, float *scratch) {
    float *sums = scratch, *score = sums + ROWS * dv;
    uint16_t *chance = (uint16_t *)(score + ROWS * KEYS), *query = chance + ROWS * KEYS;
    for (int64_t start = 0; start < queries; start += ROWS) {
        const int rows = queries - start < ROWS ? (int)(queries - start) : ROWS;
        const int64_t oldest = seen - queries + start + 1, end = oldest + rows - 1; /* first keys not seen */
        float top[ROWS], total[ROWS];
        for (int r = 0; r < ROWS; r++) {
            if (r < rows) memcpy(query + r * dk, q + ((start + r) * heads + head) * dk, 2 * dk);
            else memset(query + r * dk, 0, 2 * dk);
            top[r] = -INFINITY, total[r] = 0;
        }
        memset(sums, 0, sizeof(float) * ROWS * dv);
        memset(chance, 0, sizeof(uint16_t) * ROWS * KEYS);
        const int64_t low = window && oldest > window ? oldest - window : 0;
        for (int64_t at = low / KEYS * KEYS; at < end; at += KEYS) {
            const int wanted = end - at < KEYS ? (int)(end - at) : KEYS, count = (wanted + DEPTH - 1) / DEPTH * DEPTH;
            (unit ? add_scores_amx : add_scores)(query, turned + at * dk, rows, count, dk, score);
            for (int r = 0; r < rows; r++) {
                const int64_t high = oldest + r - at, first = window && high + at > window ? high - window : 0;
                const int from = first > 0 ? (int)(first < KEYS ? first : KEYS) : 0;
                const int to = (int)(high < count ? high : count);
                if (from >= to) memset(chance + r * KEYS, 0, sizeof(uint16_t) * count); /* sees none of these keys */
                else
                    one_row(score + r * KEYS, chance + r * KEYS, from, to, count, scale, dv, sums + r * dv, top + r,
                            total + r);
            }
            (unit ? add_values_amx : add_values)(chance, paired + at * dv, rows, count, dv, sums);
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < dv; i += LANES) {
                const __m512 mean = _mm512_div_ps(_mm512_loadu_ps(sums + r * dv + i), _mm512_set1_ps(total[r]));
                *(__m256i_u *)(out + ((start + r) * heads + head) * dv + i) = (__m256i)_mm512_cvtneps_pbh(mean);
            }
    }
}

__attribute__((always_inline)) static inline void prefill(
    const int unit, const uint16_t *q, const uint16_t *keys, const uint16_t *values, const int64_t *table,
    int64_t queries, int64_t length, int64_t from, int64_t to, int64_t block, int64_t heads, int64_t kv_heads,
    int64_t dk, int64_t dv, int64_t window, float scale, uint16_t *out, float *scratch) {
    const int64_t oldest = length - queries + 1, first = window && oldest > window ? oldest - window : 0;
    const int64_t seen = length - first, padded = (seen + KEYS - 1) / KEYS * KEYS, group = heads / kv_heads;
    uint16_t *turned = (uint16_t *)(scratch + ROWS * (dk / 2 + dv + KEYS + KEYS / 2)), *paired = turned + padded * dk;
    for (int64_t h = from; h < to; h++) {
#define HEAD(k, v)                                                                                             \
    {                                                                                                          \
        if (h == from || h % group == 0)                                                                       \
            copy_head(keys, values, table, first, seen, block, kv_heads, h / group, k, v, turned, paired);     \
        one_head(unit, q, turned, paired, queries, seen, heads, h, k, v, window, scale * 1.44269504f, out, scratch); \
    }
        if (dk == 64 && dv == 64) HEAD(64, 64) /* constant sizes let the compiler unroll the loops */
        else if (dk == 128 && dv == 128) HEAD(128, 128)
        else HEAD((int)dk, (int)dv)
#undef HEAD
    }
}

/* Query heads `from` to `to - 1` of a chunk: q [queries, heads, dk] are the last of `length` tokens, out
 * [queries, heads, dv]. dk and dv are multiples of 32. Window 0 means no window. scratch holds
 * ROWS * (dk / 2 + dv + KEYS + KEYS / 2) floats, and (dk + dv) / 2 floats for each key that is seen, their number
 * rounded up to KEYS. */
void prefill_bf16(const uint16_t *q, const uint16_t *keys, const uint16_t *values, const int64_t *table,
          int64_t queries, int64_t length, int64_t from, int64_t to, int64_t block, int64_t heads, int64_t kv_heads,
          int64_t dk, int64_t dv, int64_t window, float scale, uint16_t *out, float *scratch) {
    prefill(0, q, keys, values, table, queries, length, from, to, block, heads, kv_heads, dk, dv, window, scale, out,
            scratch);
}

#if defined(__AMX_BF16__) && defined(__linux__)
/* The same by the unit. The caller's configuration of it is kept. */
void prefill_bf16_amx(const uint16_t *q, const uint16_t *keys, const uint16_t *values, const int64_t *table,
          int64_t queries, int64_t length, int64_t from, int64_t to, int64_t block, int64_t heads, int64_t kv_heads,
          int64_t dk, int64_t dv, int64_t window, float scale, uint16_t *out, float *scratch) {
    struct { uint8_t palette, row, rest[14]; uint16_t bytes[16]; uint8_t rows[16]; } own = {.palette = 1}, before;
    for (int i = 0; i < 8; i++) own.bytes[i] = 64, own.rows[i] = LANES;
    _tile_storeconfig(&before);
    _tile_loadconfig(&own);
    prefill(1, q, keys, values, table, queries, length, from, to, block, heads, kv_heads, dk, dv, window, scale, out,
            scratch);
    if (before.palette) _tile_loadconfig(&before);
    else _tile_release();
}
#endif

/* What multiplies here: 2 the matrix unit, 1 dot products of pairs. */
int64_t prefill_bf16_by(void) {
#if defined(__AMX_BF16__) && defined(__linux__)
    if (has_unit()) return 2;
#endif
    return 1;
}
#else
int64_t prefill_bf16_by(void) { return 0; }
#endif
