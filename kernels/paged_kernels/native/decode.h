/* Attention of one query per row over paged KV. STORED, LOAD, STORE and NAME give the element type.
 *
 * Keys and values are read directly from the pool, once each and in memory order, because memory bandwidth limits decode
 * on a CPU. The scores of a tile of tokens are kept until its values are added; the softmax is the online softmax of
 * FlashAttention. Slots after a sequence's length, before its window, or outside of its block table are never read. */

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

__attribute__((always_inline)) static inline void PASTE(NAME, _row)(
    const STORED *q, const STORED *keys, const STORED *values, const int64_t *table, int64_t first, int64_t length,
    int64_t block, int heads, int kv_heads, const int dk, const int dv, const int pair, float scale, STORED *out,
    float *partial, float *scratch) {
    const int group = heads / kv_heads;
    float *query = scratch, *sums = query + heads * dk, *scores = sums + heads * dv;
    float *top = scores + heads * TILE, *total = top + heads;
    for (int i = 0; i < heads * dk; i += LANES) *(vec *)(query + i) = LOAD(q + i) * scale;
    memset(sums, 0, sizeof(float) * heads * dv);
    for (int h = 0; h < heads; h++) top[h] = -INFINITY, total[h] = 0;

    for (int64_t start = first; start < length; start += TILE) {
        const int count = length - start < TILE ? (int)(length - start) : TILE;
        const STORED *key[TILE], *value[TILE];
        for (int t = 0; t < count; t++) {
            const int64_t slot = table[(start + t) / block] * block + (start + t) % block;
            key[t] = keys + slot * kv_heads * dk, value[t] = values + slot * kv_heads * dv;
        }
        for (int t = 0; t < count; t++) {
            for (int i = 0; i < kv_heads * dv; i += 64 / (int)sizeof(STORED)) __builtin_prefetch(value[t] + i);
            for (int h = 0; h < heads; h += pair) {
                const STORED *k = key[t] + h / group * dk;
                const float *mine = query + h * dk;
                vec dot[2] = {{0}, {0}};
                for (int i = 0; i < dk; i += LANES) {
                    const vec part = LOAD(k + i);
                    for (int p = 0; p < pair; p++) dot[p] += part * *(const vec *)(mine + p * dk + i);
                }
                for (int p = 0; p < pair; p++) scores[(h + p) * TILE + t] = sum(dot[p]);
            }
        }
        for (int h = 0; h < heads; h++) {
            float *score = scores + h * TILE, most = top[h];
            for (int t = 0; t < count; t++) most = score[t] > most ? score[t] : most;
            for (int t = count; t < TILE; t++) score[t] = most;
            vec chance = exp_negative(*(vec *)score - most);
            for (int t = count; t < TILE; t++) chance[t] = 0;
            *(vec *)score = chance;
            const float keep = total[h] == 0 ? 0 : expf(top[h] - most);
            total[h] = total[h] * keep + sum(chance), top[h] = most;
            if (keep != 1)
                for (int i = 0; i < dv; i += LANES) *(vec *)(sums + h * dv + i) *= keep;
        }
        for (int h = 0; h < heads; h += pair)
            for (int i = 0; i < dv; i += WIDTH * LANES) {
                float *mine = sums + h * dv + i;
                const int rest = (dv - i) / LANES, wide = rest < WIDTH ? rest : WIDTH;
                vec kept[2][WIDTH];
                for (int p = 0; p < pair; p++)
                    for (int j = 0; j < wide; j++) kept[p][j] = *(vec *)(mine + p * dv + j * LANES);
                for (int t = 0; t < count; t++) {
                    const STORED *v = value[t] + h / group * dv + i;
                    for (int j = 0; j < wide; j++) {
                        const vec part = LOAD(v + j * LANES);
                        for (int p = 0; p < pair; p++) kept[p][j] += part * scores[(h + p) * TILE + t];
                    }
                }
                for (int p = 0; p < pair; p++)
                    for (int j = 0; j < wide; j++) *(vec *)(mine + p * dv + j * LANES) = kept[p][j];
            }
    }
    if (partial) { /* sums, tops and totals of a part of a row, for the merge */
        memcpy(partial, sums, sizeof(float) * heads * dv);
        memcpy(partial + heads * dv, top, sizeof(float) * heads * 2);
        return;
    }
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < dv; i += LANES) STORE(out + h * dv + i, *(vec *)(sums + h * dv + i) / total[h]);
}

/* Tokens `first` to `length - 1` of one row, with constant sizes where the compiler can unroll the loops for them. */
static void PASTE(NAME, _some)(const STORED *mine, const STORED *keys, const STORED *values, const int64_t *table,
                               int64_t first, int64_t length, int64_t block, int64_t heads, int64_t kv_heads, int64_t dk,
                               int64_t dv, float scale, STORED *result, float *partial, float *scratch) {
    const int even = heads / kv_heads % 2 == 0; /* pairs of heads of a group read each key once */
#define ROW(k, v, pair) \
    PASTE(NAME, _row)(mine, keys, values, table, first, length, block, heads, kv_heads, k, v, pair, scale, result, \
                      partial, scratch)
    if (dk == 64 && dv == 64 && even) ROW(64, 64, 2);
    else if (dk == 64 && dv == 64) ROW(64, 64, 1);
    else if (dk == 128 && dv == 128 && even) ROW(128, 128, 2);
    else if (dk == 128 && dv == 128) ROW(128, 128, 1);
    else if (even) ROW((int)dk, (int)dv, 2);
    else ROW((int)dk, (int)dv, 1);
#undef ROW
}

/* Attention of rows `from` to `to - 1` of q [rows, heads, dk], into out [rows, heads, dv]. Tables are [rows, width];
 * window 0 means no window. scratch holds heads * (dk + dv + TILE + 2) floats. */
void NAME(const STORED *q, const STORED *keys, const STORED *values, const int64_t *tables, const int64_t *lengths,
          int64_t from, int64_t to, int64_t width, int64_t block, int64_t heads, int64_t kv_heads, int64_t dk,
          int64_t dv, int64_t window, float scale, STORED *out, float *scratch) {
    for (int64_t r = from; r < to; r++) {
        const int64_t length = lengths[r], first = window && length > window ? length - window : 0;
        PASTE(NAME, _some)(q + r * heads * dk, keys, values, tables + r * width, first, length, block, heads, kv_heads, dk,
                           dv, scale, out + r * heads * dv, 0, scratch);
    }
}

/* Tokens `from` to `to - 1` of the row with query q [heads, dk]: heads * (dv + 2) floats of a partial result. */
void PASTE(NAME, _part)(const STORED *q, const STORED *keys, const STORED *values, const int64_t *table, int64_t from,
                        int64_t to, int64_t block, int64_t heads, int64_t kv_heads, int64_t dk, int64_t dv, float scale,
                        float *partial, float *scratch) {
    PASTE(NAME, _some)(q, keys, values, table, from, to, block, heads, kv_heads, dk, dv, scale, 0, partial, scratch);
}

/* The output [heads, dv] of a row from `count` partial results, one behind the other. */
void PASTE(NAME, _merge)(const float *partial, int64_t count, int64_t heads, int64_t dv, STORED *out,
                         float *sums) {
    for (int64_t h = 0; h < heads; h++) {
        float most = -INFINITY, total = 0;
        for (int64_t p = 0; p < count; p++) {
            const float top = partial[p * heads * (dv + 2) + heads * dv + h];
            most = top > most || top != top ? top : most;
        }
        memset(sums, 0, sizeof(float) * dv);
        for (int64_t p = 0; p < count; p++) {
            const float *part = partial + p * heads * (dv + 2), weight = expf(part[heads * dv + h] - most);
            total += weight * part[heads * (dv + 1) + h];
            for (int64_t i = 0; i < dv; i += LANES)
                *(vec *)(sums + i) += *(const vec *)(part + h * dv + i) * weight;
        }
        for (int64_t i = 0; i < dv; i += LANES) STORE(out + h * dv + i, *(vec *)(sums + i) / total);
    }
}

#undef NAME
#undef STORED
#undef LOAD
#undef STORE
