/* Products of rows and a weight in bfloat16 on CPUs that multiply float32 alone, and of few rows in either type. Sums are
 * in float32, and results are rounded once. */
#include "vectors.h"

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
                    for (int j = 0; j < FOUR; j++) kept[j] += LOAD(weight + (o + j) * in + i) * mine;                \
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
