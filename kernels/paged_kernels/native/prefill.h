/* Attention of a prompt's chunk over paged KV on a CPU. STORED, LOAD, STORE and NAME give the element type; products and
 * sums are in float32. In bfloat16 on CPUs that multiply it: prefill_bf16.c.
 *
 * Keys and values of one KV head are copied out of the pool once, keys in blocks of KEYS with the width first, so that
 * the scores of ROWS queries and 2 * LANES keys are sums that stay in registers. The softmax is the online softmax of
 * FlashAttention. Only keys that some query of the chunk may see are read: none before the first window, none after
 * the last query. */

__attribute__((always_inline)) static inline void PASTE(NAME, _copy_head)(
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

__attribute__((always_inline)) static inline void PASTE(NAME, _one_head)(
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
void NAME(const STORED *q, const STORED *keys, const STORED *values, const int64_t *table, int64_t queries,
          int64_t length, int64_t from, int64_t to, int64_t block, int64_t heads, int64_t kv_heads, int64_t dk,
          int64_t dv, int64_t window, float scale, STORED *out, float *scratch) {
    const int64_t oldest = length - queries + 1, first = window && oldest > window ? oldest - window : 0;
    const int64_t seen = length - first, padded = (seen + KEYS - 1) / KEYS * KEYS, group = heads / kv_heads;
    float *turned = scratch + ROWS * (dk + dv + KEYS), *value = turned + padded * dk;
    for (int64_t h = from; h < to; h++) {
#define HEAD(k, v)                                                                                             \
    {                                                                                                          \
        if (h == from || h % group == 0)                                                                       \
            PASTE(NAME, _copy_head)(keys, values, table, first, seen, block, kv_heads, h / group, k, v, turned, value); \
        PASTE(NAME, _one_head)(q, turned, value, queries, seen, heads, h, k, v, window, scale, out, scratch);      \
    }
        if (dk == 64 && dv == 64) HEAD(64, 64) /* constant sizes let the compiler unroll the loops */
        else if (dk == 128 && dv == 128) HEAD(128, 128)
        else HEAD((int)dk, (int)dv)
#undef HEAD
    }
}

#undef NAME
#undef STORED
#undef LOAD
#undef STORE
