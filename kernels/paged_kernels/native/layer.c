/* What a layer computes beside attention: norm, gate, rotation, products with its weights; and the choice of a token. */
#include "vectors.h"

/* Root-mean-square norm of rows. It rounds where transformers' LlamaRMSNorm does: after the norm, after the weight. */
#define RMS_NORM(NAME, STORED, LOAD, STORE, ROUNDED)                                                       \
    void NAME(const STORED *x, const STORED *weight, int64_t rows, int64_t width, float eps, STORED *out) { \
        for (int64_t r = 0; r < rows; r++, x += width, out += width) {                                     \
            vec squares = {0};                                                                             \
            for (int64_t i = 0; i < width; i += LANES) {                                                   \
                const vec part = LOAD(x + i);                                                              \
                squares += part * part;                                                                    \
            }                                                                                              \
            const float factor = 1 / sqrtf(sum(squares) / width + eps);                                    \
            for (int64_t i = 0; i < width; i += LANES)                                                     \
                STORE(out + i, ROUNDED(LOAD(x + i) * factor) * LOAD(weight + i));                          \
        }                                                                                                  \
    }

RMS_NORM(rms_norm_f32, float, load_f32, store_f32, rounded_f32)
RMS_NORM(rms_norm_bf16, uint16_t, load_bf16, store_bf16, rounded_bf16)

/* The middle of a gated MLP: silu(gate) * up. It rounds where transformers does: after silu, after the product. */
#define SILU_MUL(NAME, STORED, LOAD, STORE, ROUNDED)                                                      \
    /* x [rows, 2 * width] has the gate, then up; out is [rows, width], width a multiple of LANES */      \
    void NAME(const STORED *x, int64_t rows, int64_t width, STORED *out) {                                \
        for (int64_t r = 0; r < rows; r++, x += 2 * width, out += width)                                  \
            for (int64_t i = 0; i < width; i += LANES) {                                                  \
                const vec gate = LOAD(x + i), small = exp_negative((vec)((ints)gate | INT32_MIN));        \
                /* -88.72: exp of its negative has no float32, and torch's silu is 0 */                   \
                const ints positive = gate > 0, seen = ~(gate < (vec){0} - 88.72f);                       \
                const vec one = (vec){0} + 1;                                                             \
                const vec above = (vec)((positive & (ints)one) | (~positive & seen & (ints)small));       \
                STORE(out + i, ROUNDED(gate * above / (1 + small)) * LOAD(x + width + i));                \
            }                                                                                             \
    }

SILU_MUL(silu_mul_f32, float, load_f32, store_f32, rounded_f32)
SILU_MUL(silu_mul_bf16, uint16_t, load_bf16, store_bf16, rounded_bf16)

/* Rotary position embedding of heads whose halves are rotated. It rounds where transformers does: after every product. */
#define ROTATE(NAME, STORED, LOAD, STORE, ROUNDED)                                                            \
    /* x [tokens, heads, 2 * half] with strides in numbers; cos and sin [tokens, 2 * half] and out are dense */ \
    void NAME(const STORED *x, const STORED *cos, const STORED *sin, int64_t tokens, int64_t heads,           \
              int64_t half, int64_t token_stride, int64_t head_stride, STORED *out) {                         \
        for (int64_t t = 0; t < tokens; t++, cos += 2 * half, sin += 2 * half)                                \
            for (int64_t h = 0; h < heads; h++, out += 2 * half) {                                            \
                const STORED *head = x + t * token_stride + h * head_stride;                                  \
                for (int64_t i = 0; i < half; i += LANES) {                                                   \
                    const vec a = LOAD(head + i), b = LOAD(head + half + i);                                  \
                    STORE(out + i, ROUNDED(a * LOAD(cos + i)) - ROUNDED(b * LOAD(sin + i)));                  \
                    STORE(out + half + i,                                                                     \
                          ROUNDED(b * LOAD(cos + half + i)) + ROUNDED(a * LOAD(sin + half + i)));             \
                }                                                                                             \
            }                                                                                                 \
    }

ROTATE(rotate_f32, float, load_f32, store_f32, rounded_f32)
ROTATE(rotate_bf16, uint16_t, load_bf16, store_bf16, rounded_bf16)

/* The largest number of every row and its first index. For a row with a NaN: NaN and an undefined index. */
#define BEST(NAME, STORED, LOAD, WIDEN)                                                                   \
    void NAME(const STORED *x, int64_t rows, int64_t width, float *best, int64_t *place) {                \
        for (int64_t r = 0; r < rows; r++, x += width) {                                                  \
            const int64_t whole = width / LANES * LANES;                                                  \
            vec most = (vec){0} - INFINITY;                                                               \
            ints strange = {0};                                                                           \
            for (int64_t i = 0; i < whole; i += LANES) {                                                  \
                const vec part = LOAD(x + i);                                                             \
                const ints above = part > most;                                                           \
                most = (vec)((above & (ints)part) | (~above & (ints)most));                               \
                strange |= part != part;                                                                  \
            }                                                                                             \
            float top = -INFINITY;                                                                        \
            int nan = 0;                                                                                  \
            for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top, nan |= strange[i];       \
            for (int64_t i = whole; i < width; i++) {                                                     \
                const float one = WIDEN(x[i]);                                                            \
                top = one > top ? one : top, nan |= one != one;                                           \
            }                                                                                             \
            int64_t at = 0;                                                                               \
            while (at < width - 1 && WIDEN(x[at]) != top) at++;                                           \
            best[r] = nan ? NAN : top, place[r] = at;                                                     \
        }                                                                                                 \
    }

BEST(best_f32, float, load_f32, widen_f32)
BEST(best_bf16, uint16_t, load_bf16, widen_bf16)

/* Products of rows and a weight in bfloat16 on CPUs that multiply float32 alone, and of few rows in either type. Sums are
 * in float32, and results are rounded once. */
enum { SIDE = 16, VECTORS = SIDE / LANES }; /* outputs of a panel, and their vectors */
enum { SOME = 6, DEPTH = 256, MANY = 192 }; /* rows whose sums stay in registers; inputs and rows that stay near */

/* Adds `count` inputs of `rows` rows, x [rows, in], and of a wide panel [count, SIDE] to sums [rows, SIDE]. */
__attribute__((always_inline)) static inline void add_block(
    const float *x, int64_t in, const float *panel, int64_t count, const int rows, float *sums) {
    vec kept[SOME][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < VECTORS; j++) kept[r][j] = *(vec *)(sums + r * SIDE + j * LANES);
    for (int64_t i = 0; i < count; i++)
        for (int j = 0; j < VECTORS; j++) {
            const vec part = *(const vec *)(panel + i * SIDE + j * LANES);
            for (int r = 0; r < rows; r++) kept[r][j] += part * x[r * in + i];
        }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < VECTORS; j++) *(vec *)(sums + r * SIDE + j * LANES) = kept[r][j];
}

static void some_rows(const uint16_t *x, const uint16_t *panels, const uint16_t *bias, int64_t rows, int64_t in, int64_t out,
                      int64_t from, int64_t to, uint16_t *result, float *scratch) {
    float *wide = scratch, *sums = wide + rows * in, *panel = sums + rows * SIDE;
    for (int64_t i = 0; i < rows * in; i += LANES) *(vec *)(wide + i) = load_bf16(x + i);
    for (int64_t p = from; p < to; p++) {
        memset(sums, 0, sizeof(float) * rows * SIDE);
        for (int64_t at = 0; at < in; at += DEPTH) {
            const int64_t count = in - at < DEPTH ? in - at : DEPTH;
            const uint16_t *narrow = panels + (p * in + at) * SIDE;
            for (int64_t i = 0; i < count * SIDE; i += LANES) *(vec *)(panel + i) = load_bf16(narrow + i);
            for (int64_t r = 0; r < rows; r += SOME) {
                const float *mine = wide + r * in + at;
                float *own = sums + r * SIDE;
                switch (rows - r) {
                case 1: add_block(mine, in, panel, count, 1, own); break;
                case 2: add_block(mine, in, panel, count, 2, own); break;
                case 3: add_block(mine, in, panel, count, 3, own); break;
                case 4: add_block(mine, in, panel, count, 4, own); break;
                case 5: add_block(mine, in, panel, count, 5, own); break;
                default: add_block(mine, in, panel, count, SOME, own);
                }
            }
        }
        for (int64_t r = 0; r < rows; r++)
            for (int j = 0; j < SIDE; j += LANES) {
                vec found = *(vec *)(sums + r * SIDE + j);
                if (bias) found += load_bf16(bias + p * SIDE + j);
                store_bf16(result + r * out + p * SIDE + j, found);
            }
    }
}

/* Few rows x [rows, in] by a weight [out, in] as it is, outputs `from` to `to - 1`, into result [rows, out]: each weight is
 * read once, in memory order. `in` is a multiple of LANES, and outputs are of FOUR. */
enum { FOUR = 4 };
#define FEW(NAME, STORED, LOAD, WIDEN, ROUND)                                                                        \
    static void NAME(const STORED *x, const STORED *weight, const STORED *bias, int64_t rows, int64_t in, int64_t out, \
              int64_t from, int64_t to, STORED *result) {                                                            \
        for (int64_t o = from; o < to; o += FOUR)                                                                    \
            for (int64_t r = 0; r < rows; r++) {                                                                     \
                vec kept[FOUR] = {{0}};                                                                              \
                for (int64_t i = 0; i < in; i += LANES) {                                                            \
                    const vec mine = LOAD(x + r * in + i);                                                           \
                    for (int j = 0; j < FOUR; j++) {                                                                 \
                        __builtin_prefetch(weight + (o + FOUR + j) * in + i);                                        \
                        kept[j] += LOAD(weight + (o + j) * in + i) * mine;                                           \
                    }                                                                                                \
                }                                                                                                    \
                for (int j = 0; j < FOUR; j++)                                                                       \
                    result[r * out + o + j] = ROUND(sum(kept[j]) + (bias ? WIDEN(bias[o + j]) : 0));                 \
            }                                                                                                        \
    }

static inline float round_f32(float x) { return x; }

static inline uint16_t round_bf16(float x) {
    uint16_t out[LANES];
    store_bf16(out, (vec){0} + x);
    return out[0];
}

FEW(few_f32, float, load_f32, widen_f32, round_f32)
FEW(few_bf16, uint16_t, load_bf16, widen_bf16, round_bf16)

/* Rows x [rows, in] by a weight [out, in], outputs `from` to `to - 1`, multiples of SIDE, into result [rows, out]. `in` is a
 * multiple of SIDE; bias [out] may be 0. The weight is given in panels too, [out / SIDE, in, SIDE], which many rows read.
 * scratch holds (rows, at most MANY) * (in + SIDE) + DEPTH * SIDE floats. */
void product_bf16(const uint16_t *x, const uint16_t *weight, const uint16_t *panels, const uint16_t *bias, int64_t rows,
                  int64_t in, int64_t out, int64_t from, int64_t to, uint16_t *result, float *scratch) {
    if (rows == 1) few_bf16(x, weight, bias, rows, in, out, from, to, result);
    else
        for (int64_t r = 0; r < rows; r += MANY)
            some_rows(x + r * in, panels, bias, rows - r < MANY ? rows - r : MANY, in, out, from / SIDE, to / SIDE,
                      result + r * out, scratch);
}

/* The same for few rows in float32; panels and scratch are not read. */
void product_f32(const float *x, const float *weight, const float *panels, const float *bias, int64_t rows, int64_t in,
                 int64_t out, int64_t from, int64_t to, float *result, float *scratch) {
    (void)panels, (void)scratch;
    few_f32(x, weight, bias, rows, in, out, from, to, result);
}
