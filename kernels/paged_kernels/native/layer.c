/* The small kernels of a layer, and of the choice of a token. */
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
