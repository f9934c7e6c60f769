/* Root-mean-square norm of rows. It rounds where transformers' LlamaRMSNorm does: after the norm, after the weight. */
#include "vectors.h"

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
