/* The largest number of every row and its first index. For a row with a NaN: NaN and an undefined index. */
#include "vectors.h"

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
