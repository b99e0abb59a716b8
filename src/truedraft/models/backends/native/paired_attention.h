/* Weighted values by the instruction that multiplies pairs of bfloat16: those of two neighbouring positions at a time.
 *
 * Weights are rounded to bfloat16, as the models' own modules round them; sums are float32. Pairs begin at even
 * positions, and what a row does not see of one counts as 0. So a row's sum is the same whether a token that it sees is
 * committed, or a node of a tree somewhere behind these.
 */
typedef element Narrowed[CHUNK + 2 + LANES];

/* A view's weights by position, that of `base` first, and 0 beside them; of coded values with their scales. */
static void narrow_pairs(const View *v, const code *values, int64_t head, int64_t length, int64_t base, int coded, element *to) {
    const int64_t count = v->count + v->own_count, before = v->first - base;
    for (int64_t i = 0; i < count && coded; i++) {
        float scale;
        memcpy(&scale, values + (i < v->count ? v->first + i : length + v->own[i - v->count]) * (head + SCALE_BYTES) + head, sizeof scale);
        v->weights[i] *= scale;
    }
    for (int64_t i = 0; i < count; i += LANES) {
        lanes w;
        memcpy(&w, v->weights + i, sizeof w);
        store(to + before + i, w);
    }
    if (before % 2) to[before - 1] = 0;
    to[before + count] = 0;
}

/* 16 entries of two slots' values in pairs, from entry d + 16 others on. */
static inline ints value_pairs(const code *slot, const code *next, int64_t d, int others, const int coded) {
    if (coded) return pairs_of_codes(slot + d + others * LANES, next + d + others * LANES);
    return pairs((const element *)slot + d, (const element *)next + d, others);
}

static inline __attribute__((always_inline)) lanes plus_pairs(lanes sum, ints values, const element *weights) {
    int32_t both;
    memcpy(&both, weights, sizeof both);
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)values, (__m512bh)_mm512_set1_epi32(both));
}

/* Adds what a view sees of positions from .. to - 1, which is its own or may be: slots are looked up one by one. */
static inline __attribute__((always_inline)) void add_own_pairs(
    const View *v, const element *weights, const code *values, int64_t head, int64_t length, int64_t base, int64_t d, int64_t from,
    int64_t to, const int vectors, const int coded, lanes *acc) {
    const int64_t bytes = entry_bytes(head, coded), of_path = v->first + v->count, end = v->first + v->count + v->own_count;
    for (int64_t p = from / 2 * 2; p < to; p += 2) {
        const code *slot[2];
        for (int i = 0; i < 2; i++) {
            const int64_t at = p + i;
            slot[i] = at < v->first || at >= end ? (const code *)nothing : values + (at < of_path ? at : length + v->own[at - of_path]) * bytes;
        }
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) acc[j] = plus_pairs(acc[j], value_pairs(slot[0], slot[1], d + j / 2 * 32, j % 2, coded), weights + p - base);
    }
}

/* Weighted values of some views, for some of a head's entries: what all of them see is read once. */
static inline __attribute__((always_inline)) void mix_some_pairs(
    const View *view, const int rows, const Narrowed *weights, const code *values, int64_t head, int64_t length, int64_t base,
    const code *next, int64_t apart, int64_t d, const int vectors, const int coded) {
    const int64_t bytes = entry_bytes(head, coded);
    int64_t from = 0, to = INT64_MAX;
    lanes acc[TILE][4];
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < vectors; j++) acc[r][j] = (lanes){0};
        from = view[r].first > from ? view[r].first : from;
        to = view[r].first + view[r].count < to ? view[r].first + view[r].count : to;
    }
    from = (from + 1) / 2 * 2, to = to / 2 * 2;
    if (to < from) to = from;
    for (int r = 0; r < rows; r++) {
        const int64_t end = view[r].first + view[r].count + view[r].own_count;
        add_own_pairs(view + r, weights[r], values, head, length, base, d, view[r].first, from < end ? from : end, vectors, coded, acc[r]);
    }
    for (int64_t p = from; p < to; p += 2) {
        const code *slot = values + p * bytes;
        ints value[4];
        if (next)
            for (int j = 0; j < vectors; j++) {
                const int64_t line = (p - base) / 2 * vectors + j;
                __builtin_prefetch(next + (d + line / 8) * apart + line % 8 * 64, 0, 2);
            }
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) value[j] = value_pairs(slot, slot + bytes, d + j / 2 * 32, j % 2, coded);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) acc[r][j] = plus_pairs(acc[r][j], value[j], weights[r] + p - base);
    }
    for (int r = 0; r < rows; r++) {
        const int64_t end = view[r].first + view[r].count + view[r].own_count;
        add_own_pairs(view + r, weights[r], values, head, length, base, d, to, end, vectors, coded, acc[r]);
        for (int j = 0; j < vectors; j++) memcpy(view[r].out + d + j * LANES, &acc[r][j], sizeof(lanes));
    }
}

/* Mix all views, up to 4 with 64 entries at a time, more with 32. */
static inline __attribute__((always_inline)) void mix_all_pairs(
    const View *view, int views, const Narrowed *weights, const code *values, int64_t head, int64_t length, int64_t base, const code *next,
    int64_t apart, const int coded) {
    const int most = views > 4 ? 2 : 4;
    for (int64_t d = 0; d < head; d += most * LANES) {
        const int half = most == 2 || head - d < most * LANES;
#define MIX(n)                                                                                                                \
    case n:                                                                                                                   \
        if (n > 4 || half) mix_some_pairs(view, n, weights, values, head, length, base, next, apart, d, 2, coded);            \
        else mix_some_pairs(view, n, weights, values, head, length, base, next, apart, d, 4, coded);                          \
        break;
        switch (views) { MIX(1) MIX(2) MIX(3) MIX(4) MIX(5) MIX(6) MIX(7) MIX(8) }
#undef MIX
    }
}

/* Weighted values of up to 8 views of the chunk that begins at position `base`; meanwhile the keys of the next chunk are
 * prefetched, where there is one, whose entries lie so many bytes `apart`. */
static void mix_pairs(const View *view, int views, const code *values, int64_t head, int64_t length, int64_t base, const code *next, int64_t apart, int64_t coded) {
    _Alignas(64) Narrowed weights[TILE];
    for (int r = 0; r < views; r++) narrow_pairs(view + r, values, head, length, base, coded != 0, weights[r]);
    if (coded) mix_all_pairs(view, views, weights, values, head, length, base, next, apart, 1);
    else mix_all_pairs(view, views, weights, values, head, length, base, next, apart, 0);
}
