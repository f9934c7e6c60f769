/* The middle of a gated MLP: silu(gate) * up. It rounds where transformers does: after silu, after the product. */
#include "vectors.h"

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
