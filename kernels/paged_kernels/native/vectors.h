/* Vectors of floats by the vector extensions of gcc and clang, as wide as the CPU's: a wider one lies in memory, not in
 * registers, and is several times slower. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 }; /* two registers where there is no AVX */
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

static inline vec load_f32(const float *from) { return *(const vec *)from; }

/* gcc converts by halves, in three times the instructions, where it is not given the instruction. */
static inline vec load_bf16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    return (vec)(__builtin_convertvector(*(const halves *)from, words) << 16);
#endif
}

/* Round to nearest, ties to even, as torch does. The result is the upper half of every number; the lower half is 0. */
static inline vec rounded_bf16(vec v) {
    const words bits = (words)v, near = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    const words strange = (words)(v != v);
    return (vec)((near & ~strange) | (strange & 0x7fc00000u));
}

static inline vec rounded_f32(vec v) { return v; }

static inline void store_f32(float *to, vec v) { *(vec *)to = v; }

static inline void store_bf16(uint16_t *to, vec v) {
    *(halves *)to = __builtin_convertvector((words)rounded_bf16(v) >> 16, halves);
}

static inline float widen_f32(float x) { return x; }

static inline float widen_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static inline float sum(vec v) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    union { vec whole; v8 part[LANES / 8]; } wide = {v};
    union { v8 whole; v4 part[2]; } narrow = {LANES == 16 ? wide.part[0] + wide.part[LANES / 8 - 1] : wide.part[0]};
    v4 four = narrow.part[0] + narrow.part[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* exp(x) for x <= 0, exact to 2 units in the last place (coefficients of Cephes' expf). NaN stays NaN. */
static inline vec exp_negative(vec x) {
    const vec zero = {0}, least = zero - 87.0f, magic = zero + 12582912.0f; /* 1.5 * 2^23 rounds to whole numbers */
    const ints below = x < least;
    x = (vec)((below & (ints)least) | (~below & (ints)x));
    vec power = (x * 1.44269504f + magic) - magic;
    vec rest = x - power * 0.693359375f + power * 2.12194440e-4f;
    vec p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    return p * (vec)((__builtin_convertvector(power, ints) + 127) << 23);
}
