/* Attention on a CPU, in float32 and in bfloat16 (sums in float32): attention.h. */
#include "vectors.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

/* Of decode: tokens of a tile; vectors of sums that stay in registers. */
enum { TILE = LANES, HELD = 4 };

/* Of prefill: queries and keys of a block; rows of scores, and vectors of sums of four rows, that stay in registers.
 * Without AVX-512 more queries share a block, which then comes from slower memory half as often. */
enum { ROWS = LANES == 16 ? 8 : 16, KEYS = 64, SOME = LANES == 16 ? 8 : 4, WIDTH = LANES == 16 ? 4 : 2 };

/* Scores of ROWS queries [ROWS, dk] and a block of keys, into score [ROWS, KEYS]. */
__attribute__((always_inline)) static inline void add_scores(
    const float *query, const float *turned, const int dk, float *score) {
    for (int half = 0; half < KEYS; half += 2 * LANES)
        for (int row = 0; row < ROWS; row += SOME) {
            vec dot[SOME][2];
            for (int r = 0; r < SOME; r++) dot[r][0] = dot[r][1] = (vec){0};
            for (int i = 0; i < dk; i++) {
                const vec a = *(const vec *)(turned + i * KEYS + half), b = *(const vec *)(turned + i * KEYS + half + LANES);
                const float *mine = query + row * dk + i;
                for (int r = 0; r < SOME; r++) dot[r][0] += a * mine[r * dk], dot[r][1] += b * mine[r * dk];
            }
            for (int r = 0; r < SOME; r++)
                for (int j = 0; j < 2; j++) *(vec *)(score + (row + r) * KEYS + half + j * LANES) = dot[r][j];
        }
}

/* Adds the values of `count` keys, weighted, to the sums [ROWS, dv]. */
__attribute__((always_inline)) static inline void add_values(
    const float *chance, const float *value, int64_t count, const int dv, float *sums) {
    for (int half = 0; half < ROWS; half += 4)
        for (int i = 0; i < dv; i += WIDTH * LANES) {
            const int rest = (dv - i) / LANES, wide = dv % (WIDTH * LANES) == 0 || rest > WIDTH ? WIDTH : rest;
            vec kept[4][WIDTH];
            for (int r = 0; r < 4; r++)
                for (int j = 0; j < wide; j++) kept[r][j] = *(vec *)(sums + (half + r) * dv + i + j * LANES);
            for (int64_t t = 0; t < count; t++)
                for (int j = 0; j < wide; j++) {
                    const vec part = *(const vec *)(value + t * dv + i + j * LANES);
                    for (int r = 0; r < 4; r++) kept[r][j] += part * chance[(half + r) * KEYS + t];
                }
            for (int r = 0; r < 4; r++)
                for (int j = 0; j < wide; j++) *(vec *)(sums + (half + r) * dv + i + j * LANES) = kept[r][j];
        }
}

#define DECODE decode_f32
#define PREFILL prefill_f32
#define STORED float
#define LOAD load_f32
#define STORE store_f32
#include "attention.h"

#define DECODE decode_bf16
#define PREFILL prefill_bf16_wide
#define STORED uint16_t
#define LOAD load_bf16
#define STORE store_bf16
#include "attention.h"
