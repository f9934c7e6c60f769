/* Rotary position embedding of heads whose halves are rotated. It rounds where transformers does: after every product. */
#include "vectors.h"

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
