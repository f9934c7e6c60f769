/* Attention over paged KV on a CPU. STORED, LOAD, STORE, DECODE and PREFILL give the element type and the names of the
 * functions; products and sums are in float32. In both the softmax is the online softmax of FlashAttention. */

/* One query per row. Keys and values are read directly from the pool, once each and in memory order, because memory
 * bandwidth limits decode on a CPU. The scores of a tile of tokens are kept until its values are added. Slots after a
 * sequence's length, before its window, or outside of its block table are never read. */

__attribute__((always_inline)) static inline void PASTE(DECODE, _row)(
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
            for (int i = 0; i < dv; i += HELD * LANES) {
                float *mine = sums + h * dv + i;
                const int rest = (dv - i) / LANES, wide = rest < HELD ? rest : HELD;
                vec kept[2][HELD];
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
static void PASTE(DECODE, _some)(const STORED *mine, const STORED *keys, const STORED *values, const int64_t *table,
                               int64_t first, int64_t length, int64_t block, int64_t heads, int64_t kv_heads, int64_t dk,
                               int64_t dv, float scale, STORED *result, float *partial, float *scratch) {
    const int even = heads / kv_heads % 2 == 0; /* pairs of heads of a group read each key once */
#define ROW(k, v, pair) \
    PASTE(DECODE, _row)(mine, keys, values, table, first, length, block, heads, kv_heads, k, v, pair, scale, result, \
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
void DECODE(const STORED *q, const STORED *keys, const STORED *values, const int64_t *tables, const int64_t *lengths,
          int64_t from, int64_t to, int64_t width, int64_t block, int64_t heads, int64_t kv_heads, int64_t dk,
          int64_t dv, int64_t window, float scale, STORED *out, float *scratch) {
    for (int64_t r = from; r < to; r++) {
        const int64_t length = lengths[r], first = window && length > window ? length - window : 0;
        PASTE(DECODE, _some)(q + r * heads * dk, keys, values, tables + r * width, first, length, block, heads, kv_heads, dk,
                           dv, scale, out + r * heads * dv, 0, scratch);
    }
}

/* Tokens `from` to `to - 1` of the row with query q [heads, dk]: heads * (dv + 2) floats of a partial result. */
void PASTE(DECODE, _part)(const STORED *q, const STORED *keys, const STORED *values, const int64_t *table, int64_t from,
                        int64_t to, int64_t block, int64_t heads, int64_t kv_heads, int64_t dk, int64_t dv, float scale,
                        float *partial, float *scratch) {
    PASTE(DECODE, _some)(q, keys, values, table, from, to, block, heads, kv_heads, dk, dv, scale, 0, partial, scratch);
}

/* The output [heads, dv] of a row from `count` partial results, one behind the other. */
void PASTE(DECODE, _merge)(const float *partial, int64_t count, int64_t heads, int64_t dv, STORED *out,
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

/* A prompt's chunk. In bfloat16 on CPUs that multiply it: prefill_bf16.c.
 *
 * Keys and values of one KV head are copied out of the pool once, keys in blocks of KEYS with the width first, so that
 * the scores of ROWS queries and 2 * LANES keys are sums that stay in registers. Only keys that some query of the chunk
 * may see are read: none before the first window, none after the last query. */

__attribute__((always_inline)) static inline void PASTE(PREFILL, _copy_head)(
    const STORED *keys, const STORED *values, const int64_t *table, int64_t first, int64_t count, int64_t block,
    int64_t kv_heads, int64_t head, const int dk, const int dv, float *turned, float *value) {
    const int64_t padded = (count + KEYS - 1) / KEYS * KEYS;
    for (int64_t t = 0; t < padded; t++) {
        float *column = turned + t / KEYS * KEYS * dk + t % KEYS, *row = value + t * dv;
        if (t >= count) { /* scores of these are never used, but 0 * NaN would be */
            for (int i = 0; i < dk; i++) column[i * KEYS] = 0;
            memset(row, 0, sizeof(float) * dv);
            continue;
        }
        const int64_t slot = table[(first + t) / block] * block + (first + t) % block;
        const STORED *k = keys + (slot * kv_heads + head) * dk, *v = values + (slot * kv_heads + head) * dv;
        for (int i = 0; i < dk; i += LANES) {
            const vec part = LOAD(k + i);
            for (int j = 0; j < LANES; j++) column[(i + j) * KEYS] = part[j];
        }
        for (int i = 0; i < dv; i += LANES) *(vec *)(row + i) = LOAD(v + i);
    }
}

__attribute__((always_inline)) static inline void PASTE(PREFILL, _one_head)(
    const STORED *q, const float *turned, const float *value, int64_t queries, int64_t seen, int64_t heads,
    int64_t head, const int dk, const int dv, int64_t window, float scale, STORED *out, float *scratch) {
    float *query = scratch, *sums = query + ROWS * dk, *score = sums + ROWS * dv;
    for (int64_t start = 0; start < queries; start += ROWS) {
        const int rows = queries - start < ROWS ? (int)(queries - start) : ROWS;
        float top[ROWS], total[ROWS];
        int64_t low[ROWS], high[ROWS]; /* the first key that a row sees, and the first that it does not */
        for (int r = 0; r < ROWS; r++) {
            const int64_t own = start + (r < rows ? r : rows - 1);
            for (int i = 0; i < dk; i += LANES)
                *(vec *)(query + r * dk + i) = LOAD(q + (own * heads + head) * dk + i) * scale;
            high[r] = seen - queries + own + 1, low[r] = window && high[r] > window ? high[r] - window : 0;
            top[r] = -INFINITY, total[r] = 0;
        }
        memset(sums, 0, sizeof(float) * ROWS * dv);
        for (int64_t at = low[0] / KEYS * KEYS; at < high[ROWS - 1]; at += KEYS) {
            add_scores(query, turned + at * dk, dk, score);
            for (int r = 0; r < ROWS; r++) {
                float *mine = score + r * KEYS, most = top[r];
                const int from = low[r] > at ? (int)(low[r] - at) : 0;
                const int to = high[r] - at < KEYS ? (int)(high[r] - at) : KEYS;
                if (from >= KEYS || to <= 0) { /* the row sees none of these keys */
                    memset(mine, 0, sizeof(float) * KEYS);
                    continue;
                }
                for (int t = 0; t < from; t++) mine[t] = -INFINITY;
                for (int t = to; t < KEYS; t++) mine[t] = -INFINITY;
                vec high4 = *(vec *)mine;
                for (int t = LANES; t < KEYS; t += LANES) {
                    const vec part = *(vec *)(mine + t);
                    const ints above = part > high4;
                    high4 = (vec)((above & (ints)part) | (~above & (ints)high4));
                }
                for (int i = 0; i < LANES; i++) most = high4[i] > most ? high4[i] : most;
                vec sum_of = {0};
                for (int t = 0; t < KEYS; t += LANES) {
                    const vec part = *(vec *)(mine + t);
                    const ints hidden = part == (vec){0} - INFINITY;
                    const vec chance = (vec)(~hidden & (ints)exp_negative(part - most));
                    *(vec *)(mine + t) = chance, sum_of += chance;
                }
                const float keep = total[r] == 0 ? 0 : expf(top[r] - most);
                total[r] = total[r] * keep + sum(sum_of), top[r] = most;
                if (keep != 1)
                    for (int i = 0; i < dv; i += LANES) *(vec *)(sums + r * dv + i) *= keep;
            }
            add_values(score, value + at * dv, high[ROWS - 1] - at < KEYS ? high[ROWS - 1] - at : KEYS, dv, sums);
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < dv; i += LANES)
                STORE(out + ((start + r) * heads + head) * dv + i, *(vec *)(sums + r * dv + i) / total[r]);
    }
}

/* Query heads `from` to `to - 1` of a chunk: q [queries, heads, dk] are the last of `length` tokens, out
 * [queries, heads, dv]. Window 0 means no window. scratch holds ROWS * (dk + dv + KEYS) floats, and dk + dv floats for
 * each key that is seen, their number rounded up to KEYS. */
void PREFILL(const STORED *q, const STORED *keys, const STORED *values, const int64_t *table, int64_t queries,
          int64_t length, int64_t from, int64_t to, int64_t block, int64_t heads, int64_t kv_heads, int64_t dk,
          int64_t dv, int64_t window, float scale, STORED *out, float *scratch) {
    const int64_t oldest = length - queries + 1, first = window && oldest > window ? oldest - window : 0;
    const int64_t seen = length - first, padded = (seen + KEYS - 1) / KEYS * KEYS, group = heads / kv_heads;
    float *turned = scratch + ROWS * (dk + dv + KEYS), *value = turned + padded * dk;
    for (int64_t h = from; h < to; h++) {
#define HEAD(k, v)                                                                                             \
    {                                                                                                          \
        if (h == from || h % group == 0)                                                                       \
            PASTE(PREFILL, _copy_head)(keys, values, table, first, seen, block, kv_heads, h / group, k, v, turned, value); \
        PASTE(PREFILL, _one_head)(q, turned, value, queries, seen, heads, h, k, v, window, scale, out, scratch);      \
    }
        if (dk == 64 && dv == 64) HEAD(64, 64) /* constant sizes let the compiler unroll the loops */
        else if (dk == 128 && dv == 128) HEAD(128, 128)
        else HEAD((int)dk, (int)dv)
#undef HEAD
    }
}

#undef DECODE
#undef PREFILL
#undef STORED
#undef LOAD
#undef STORE
