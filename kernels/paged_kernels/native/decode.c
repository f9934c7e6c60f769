/* Decode attention on a CPU, in float32 and in bfloat16 (sums in float32). */
#include "vectors.h"

enum { TILE = LANES, WIDTH = 4 }; /* tokens per tile; vectors of sums that stay in registers */

#define NAME decode_f32
#define STORED float
#define LOAD load_f32
#define STORE store_f32
#include "decode.h"

#define NAME decode_bf16
#define STORED uint16_t
#define LOAD load_bf16
#define STORE store_bf16
#include "decode.h"
