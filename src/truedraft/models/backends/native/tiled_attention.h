/* Attention by AMX's tiles: scores and weighted values of up to 16 queries of one key head.
 *
 * Weights are two numbers of bfloat16 each, which add up to 16 of their bits; sums are float32. A row's sum of
 * weighted values goes over pieces of 32 positions, from position 0 on, with weights of 0 where it sees nothing: so it is
 * the same whether a token that it sees is committed, or a node of a tree somewhere behind these. Values that a row does
 * not see may be no numbers, which times 0 are none either: such pieces are taken for each row by itself, as are those
 * of a tree's paths.
 */
#define SPAN 32 /* positions of a piece */

/* Scores of queries `[n][head]` with slots from .. to - 1, `from` a whole piece. */
static void tiled_scores(
    const float *query, float scaling, int n, const element *keys, int64_t capacity, int64_t head, int64_t from, int64_t to,
    float *scores, int64_t stride) {
    _Alignas(64) ints key[2][TILE_ROWS];
    shape_tiles(n, 0, TILE_BYTES);
    for (int64_t s = from; s < to; s += SPAN) {
        no_sums();
        for (int64_t d = 0; d < head; d += 32) {
            for (int i = 0; i < TILE_ROWS; i++) {
                const element *first = keys + (d + 2 * i) * capacity + s;
                for (int others = 0; others < 2; others++) key[others][i] = pairs(first, first + capacity, others);
            }
            ALL_IS_WRITTEN;
            _tile_loadd(4, (const element *)query + d, head * sizeof(element));
            _tile_loadd(6, key[0], TILE_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, key[1], TILE_BYTES);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, scores + s, stride * sizeof *scores);
        _tile_stored(1, scores + s + BLOCK, stride * sizeof *scores);
        for (int r = 0; r < n; r++)
            for (int j = 0; j < 2; j++) {
                float *at = scores + r * stride + s + j * LANES;
                lanes v;
                memcpy(&v, at, sizeof v);
                v = v * scaling;
                memcpy(at, &v, sizeof v);
            }
    }
}

/* Where the values of a piece of positions lie that a view sees; those of others are 0. */
static void find_values(const View *v, const element *values, int64_t head, int64_t length, int64_t piece, const element **at) {
    const int64_t of_path = v->first + v->count, end = of_path + v->own_count;
    for (int64_t p = piece; p < piece + SPAN; p++)
        at[p - piece] = p < v->first || p >= end ? nothing : values + (p < of_path ? p : length + v->own[p - of_path]) * head;
}

/* Values of a piece for `blocks` of 16 entries from d on: `[blocks][16 pairs of positions][16 entries][2]`. */
static inline void pair_values(const element *const *values, int64_t d, int blocks, ints (*to)[TILE_ROWS]) {
    for (int i = 0; i < TILE_ROWS; i++)
        for (int b = 0; b < blocks; b++) to[b][i] = pairs(values[2 * i] + d + b / 2 * 32, values[2 * i + 1] + d + b / 2 * 32, b % 2);
    ALL_IS_WRITTEN;
}

/* Whether a product with 0 of each of these is 0. */
static int are_numbers(const element *const *values, int64_t d, int blocks) {
    __mmask32 none = 0;
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int i = 0; i < SPAN; i++)
        for (int b = 0; b < blocks; b += 2)
            none |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(values[i] + d + b * BLOCK), exponent), exponent);
    return !none;
}

/* Adds a piece's weighted values to sums of so many rows. */
static inline void add_piece(const element *weights, const element *rest, int64_t stride, const ints (*values)[TILE_ROWS], int blocks) {
    _tile_loadd(4, weights, stride);
    _tile_loadd(5, rest, stride);
    _tile_loadd(6, values[0], TILE_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, values[1], TILE_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(1, 5, 7);
    if (blocks < 4) return;
    _tile_loadd(6, values[2], TILE_BYTES);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, values[3], TILE_BYTES);
    _tile_dpbf16ps(3, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
}

static void take_sums(int64_t rows, lanes (*sum)[4]) {
    shape_tiles(rows, 0, TILE_BYTES);
    _tile_loadd(0, sum[0], sizeof *sum);
    _tile_loadd(1, sum[0] + 1, sizeof *sum);
    _tile_loadd(2, sum[0] + 2, sizeof *sum);
    _tile_loadd(3, sum[0] + 3, sizeof *sum);
}

/* A view's weights as numbers of bfloat16 and what these leave, from position `from` up to `to`, both whole pieces. Either
 * may lie in the place of the weights, whose first is as far from its beginning as from `from`, or further (see `attend`). */
static void narrow_weights(const View *v, int64_t from, int64_t to, element *weights, element *rest) {
    const int64_t before = v->first - from, count = v->count + v->own_count;
    for (int64_t i = 0; i < count; i += LANES) {
        lanes w;
        memcpy(&w, v->weights + i, sizeof w);
        store(weights + before + i, w);
        store(rest + before + i, w - rounded(w));
    }
    for (int p = 0; p < 2; p++) {
        element *own = p ? rest : weights;
        memset(own, 0, before * sizeof *own);
        memset(own + before + count, 0, (to - from - before - count) * sizeof *own);
    }
}

/* Weighted values of up to 16 views, whose weights are made bfloat16 in the place of their scores and behind these. */
static void tiled_mix(const View *view, int n, const element *values, int64_t head, int64_t length, float *scores, int64_t stride) {
    View any = *view; /* what one of them sees before its own path; from .. to: what all do */
    int64_t from = view->first, to = INT64_MAX, end = 0, paths = 0;
    for (int r = 0; r < n; r++) {
        const View *v = view + r;
        if (v->first < any.first) any.first = v->first;
        if (v->first > from) from = v->first;
        if (v->first + v->count < to) to = v->first + v->count;
        if (v->first + v->count + v->own_count > end) end = v->first + v->count + v->own_count;
        paths |= v->own_count;
    }
    any.own_count = 0, any.count = (paths ? to : end) - any.first;
    float *rest = scores + QUERIES * stride;
    const int64_t base = any.first / SPAN * SPAN, pieces = (end - base + SPAN - 1) / SPAN;
    for (int r = 0; r < n; r++) narrow_weights(view + r, base, base + pieces * SPAN, (element *)(scores + r * stride), (element *)(rest + r * stride));
    const element *at[SPAN];
    for (int64_t d = 0; d < head; d += 4 * BLOCK) {
        const int blocks = head - d < 4 * BLOCK ? 2 : 4;
        ints paired[4][TILE_ROWS];
        lanes sum[QUERIES][4] = {{{0}}};
        int together = 0;
        for (int64_t i = 0; i < pieces; i++) {
            const int64_t piece = base + i * SPAN;
            const element *weights = (const element *)scores + i * SPAN, *others = (const element *)rest + i * SPAN;
            find_values(&any, values, head, length, piece, at);
            const int seen = piece >= from && piece + SPAN <= to;
            if (seen || ((!paths || piece + SPAN <= to) && are_numbers(at, d, blocks))) {
                if (!together) take_sums(n, sum);
                together = 1;
                pair_values(at, d, blocks, paired);
                add_piece(weights, others, stride * sizeof *scores, paired, blocks);
                continue;
            }
            if (together) put_sums(sum, sizeof *sum);
            together = 0;
            for (int r = 0; r < n; r++) {
                find_values(view + r, values, head, length, piece, at);
                pair_values(at, d, blocks, paired);
                take_sums(1, sum + r);
                add_piece(weights + r * stride * 2, others + r * stride * 2, TILE_BYTES, paired, blocks);
                put_sums(sum + r, sizeof *sum);
            }
        }
        if (together) put_sums(sum, sizeof *sum);
        for (int r = 0; r < n; r++)
            for (int b = 0; b < blocks; b++) memcpy(view[r].out + d + b * BLOCK, &sum[r][b], sizeof(lanes));
    }
}
