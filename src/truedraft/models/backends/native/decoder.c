/* One forward of a Llama-like decoder over many requests with a token tree each, from embedding to logits.
 *
 * Compiled on the user's machine, once for bfloat16 (BF16=1) and once for float32 (BF16=0), for any processor: vectors are
 * GNU C's, which the compiler maps to what there is.
 *
 * Every sum runs in one fixed order that depends on the row alone: products over k from 0 up, attention over the
 * row's own keys in the order of their positions, CHUNK of them at a time, and over these chunks in their order. So a
 * row's result does not depend, to the last bit, on the other rows, on the tree around it, or on the number of threads.
 *
 * Numbers are rounded to the model's dtype where its own modules round them, but for attention, which stays in
 * float32 from scores to mixed values (its weights have 16 bits by AMX's tiles, and are bfloat16 where pairs of it are
 * multiplied by one instruction).
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if !defined(PAIRED) || !defined(__AVX512BF16__)
#undef PAIRED
#define PAIRED 0 /* whether inputs of bfloat16 are multiplied in pairs, by one instruction */
#endif
#if !defined(TILES) || !TILES || !defined(__AMX_BF16__) || !defined(__AMX_INT8__) || !defined(__AVX512BW__)
#undef TILES
#define TILES 0 /* whether products go by AMX's tiles */
#endif

/* A vector is one register: of wider ones a compiler keeps sums in memory and takes comparisons apart. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define BLOCK 16 /* outputs whose weights lie side by side */
#define UNIT 64  /* outputs that a thread takes at a time: 4 blocks */
#define SUMS (UNIT / LANES)
#if LANES == 16
#define ROWS 12  /* most rows of a product that are computed together: 24 sums in 32 registers */
#define MOST 4   /* most vectors of outputs that are computed together */
#define MIXED 4  /* entries of a head, in vectors, that are mixed together */
#else
#define ROWS 6   /* 12 sums in 16 registers */
#define MOST 8
#define MIXED 2
#endif
#define FEW (BF16 ? 2 : ROWS / 2) /* rows for which more vectors of outputs are computed together */
#define NEAR (1 << 23) /* weights of all MLPs' gates that caches hold with all others */
#define GROUP 96 /* rows whose sums are kept while a unit's weights are read once */
#define TILE 8   /* queries of attention that are computed together */
#define QUERIES (TILES ? 16 : TILE) /* most of them */
#define CHUNK 256 /* positions that a query sees together, with a softmax of their own */
#define WIDEST 256 /* entries of a head, at most */
#define MOST_TAPS 8 /* rows that a convolution along a block reads, at most */
#define SHARED 8 /* rows from which on inputs of products are made once for all threads, and attention is cut into pieces */
#define PIECE (TILES ? 16 : 8) /* rows of such a piece; half as many where there are few, for both of two threads to have some */

/* Whoever has it reads inputs that others may be writing over, where its thread comes late: see team.h. */
#define MAY_BE_LATE __attribute__((no_sanitize("thread")))

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

#if BF16
typedef uint16_t element;
typedef uint32_t cell; /* two neighbouring inputs */
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
#define PER_CELL 2
#if LANES == 16 /* compilers take this conversion apart, too */
static inline lanes widen(halves h) { return (lanes)((words)_mm512_cvtepu16_epi32((__m256i)h) << 16); }
#else
static inline lanes widen(halves h) { return (lanes)(__builtin_convertvector(h, words) << 16); }
#endif
static inline lanes load(const element *p) { halves h; memcpy(&h, p, sizeof h); return widen(h); }
#if defined(__AVX512BF16__)
static inline halves narrow(lanes v) { return (halves)_mm512_cvtneps_pbh((__m512)v); }
#else /* ties to even; of what is no number the highest bits, with one that stays */
static inline halves narrow(lanes v) {
    const words bits = (words)v, nearest = bits + 0x7fffu + (bits >> 16 & 1u), none = (words)(v != v);
    return __builtin_convertvector(((nearest & ~none) | ((bits | 0x400000u) & none)) >> 16, halves);
}
#endif
static inline void store(element *p, lanes v) { halves h = narrow(v); memcpy(p, &h, sizeof h); }
static inline lanes rounded(lanes v) { return widen(narrow(v)); }
static inline float wide(element x) { const uint32_t bits = (uint32_t)x << 16; float v; memcpy(&v, &bits, sizeof v); return v; }
/* Of two neighbouring inputs' weights those of the first, or of the second. */
static inline lanes part(ints weights, int second) {
    return (lanes)(second ? (words)weights & 0xffff0000u : (words)weights << 16);
}
#if PAIRED
/* Adds the products of two neighbouring inputs, in one place, with their weights. */
static inline lanes plus_products(lanes sum, ints weights, const float *inputs) {
    int32_t both;
    memcpy(&both, inputs, sizeof both);
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(both));
}
#endif
#if PAIRED || TILES
/* Pairs of numbers with those as far in the next row: of the first 16 of a row's 32 numbers, or of the others. */
static inline ints pairs(const element *row, const element *next, int others) {
    typedef uint16_t some __attribute__((vector_size(64)));
    some places;
    for (int i = 0; i < 32; i++) places[i] = (uint16_t)(16 * others + i / 2 + 32 * (i % 2));
    return (ints)_mm512_permutex2var_epi16(_mm512_loadu_si512(row), (__m512i)places, _mm512_loadu_si512(next));
}
#endif
#else
typedef float element;
typedef float cell;
#define PER_CELL 1
static inline lanes load(const element *p) { lanes v; memcpy(&v, p, sizeof v); return v; }
static inline void store(element *p, lanes v) { memcpy(p, &v, sizeof v); }
static inline lanes rounded(lanes v) { return v; }
static inline float wide(element x) { return x; }
static inline lanes part(ints weights, int second) { return (lanes)weights; }
#endif

static inline lanes all(float x) { return x - (lanes){0}; }
static inline lanes choose(ints mask, lanes yes, lanes no) { return (lanes)(((ints)yes & mask) | ((ints)no & ~mask)); }
/* The second of two numbers where one is none. */
#if LANES == 16
static inline lanes larger(lanes a, lanes b) { return (lanes)_mm512_max_ps((__m512)a, (__m512)b); }
static inline lanes smaller(lanes a, lanes b) { return (lanes)_mm512_min_ps((__m512)a, (__m512)b); }
static inline float largest_of(lanes v) { return _mm512_reduce_max_ps((__m512)v); }
#else
static inline lanes larger(lanes a, lanes b) { return choose(a > b, a, b); }
static inline lanes smaller(lanes a, lanes b) { return choose(a < b, a, b); }
static inline float largest_of(lanes v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}
#endif
static inline ints load_cells(const cell *p) { ints v; memcpy(&v, p, sizeof v); return v; }

/* e^x to about 2 ulp (Cephes); 0 below -87, NaN stays. */
static inline lanes exponential(lanes x) {
    const lanes magic = all(12582912.0f); /* adding and subtracting it rounds to a whole number */
    lanes low = larger(all(-87.0f), smaller(all(88.0f), x)); /* silu goes that far */
    lanes n = (low * 1.44269504f + magic) - magic;
    lanes r = low - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    lanes p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    p = p * (lanes)((__builtin_convertvector(n, ints) + 127) << 23);
    return choose(x < -87.0f, all(0.0f), p);
}

/* A linear layer. Weights lie as [blocks of 16 outputs][input cells][16 outputs]; blocks come in fours. */
typedef struct {
    const cell *weights;
    const float *bias; /* [outputs, up to whole units] or NULL */
    int64_t inputs, outputs, read; /* read: the first inputs that are used; the others are known to be 0 */
    int64_t bits, scales; /* of a weight, where they are quantised as quantized.h says; else 0 */
    int64_t own; /* units before those of `more` */
    const void *more; /* a Linear of the last outputs, where they are quantised in another way than the first; or NULL */
    const int32_t *order; /* which input of a row each input is, where a quantised weight has them in an order of its own; or NULL */
} Linear;

/* What a file says of some outputs of a quantised layer; NULL what its layout has not, see quantized.h. */
typedef struct {
    const uint8_t *codes;            /* [rows][inputs] */
    const uint16_t *scales, *shifts; /* [rows][groups], or of heads [rows][heads]: in float16, of WIDE ones in float32 */
    const uint8_t *inner, *lesser;   /* [rows][groups]: of NESTED, inner scales and shifts; of ZEROED, zeros; of HALVES,
                                      * inner scales [rows][2 groups] */
} Coded;

#if TILES
#include "tiles.h"
#else
#define TILE_ROWS 0
#endif
#include "quantized.h"
#ifndef FORM_BITS /* to the end of the file */

/* Rows of a weight [rows][cells] as blocks of 16 outputs [cells][16], each `apart` blocks behind the one before. */
void truedraft_pack(const cell *weight, int64_t rows, int64_t cells, cell *target, int64_t apart) {
    for (int64_t from = 0; from < rows; from += BLOCK) {
        const int64_t some = rows - from < BLOCK ? rows - from : BLOCK;
        cell *block = target + from / BLOCK * apart * BLOCK * cells;
        for (int64_t c = 0; c < cells; c += BLOCK)
            for (int64_t o = 0; o < some; o++)
                for (int64_t k = c; k < c + BLOCK && k < cells; k++) block[k * BLOCK + o] = weight[(from + o) * cells + k];
    }
}

typedef struct {
    const element *before_attention, *before_mlp, *query_norm, *key_norm, *after_attention, *after_mlp; /* all but the first two may be NULL */
    const float *sinks; /* [heads]: scores of something that is seen and has no value; or NULL */
    Linear qkv, out, gate_up, down, router; /* gate_up: blocks of gate and up take turns; with experts those of the first, the others' behind */
    float attention_eps, mlp_eps, head_eps, after_attention_eps, after_mlp_eps, scaling;
    int64_t pattern, rotary; /* which of the batch's tables of first visible positions, and of rotations */
    Linear attention_conv, mlp_conv; /* of blocks: corrections of their convolutions, see blocks.h */
    const element *attention_kernel, *mlp_kernel; /* [2][taps][width]: what is corrected, before a part and behind it */
} Layer;

/* What all norms of a model do: `offset` is added to their weights, and numbers are rounded before these multiply them,
 * too, or only then. */
typedef struct {
    float offset;
    int32_t rounds_once;
} Norms;

typedef struct {
    int64_t width, heads, kv_heads, head, inner, layers, stride, embedded; /* stride: of all scratch rows, in elements; embedded: tokens that exist */
    int64_t turned, interleaved, gate; /* turned: the first entries of a head that are rotated; interleaved: with their neighbours; gate: kind */
    int64_t experts, chosen, normed, spread; /* MLPs of a layer, 0 where it has one; normed: the chosen ones' probabilities sum to 1; spread: of slots' rows */
    const element *embedding, *norm;
    float eps, scale; /* scale: of embeddings */
    Norms norms;
    Linear lm_head, coded; /* coded: the embedding where it is quantised, which `embedding` then is not */
    const Layer *layer;
    /* Of a model of pairs: what merges observed vectors into one, and the norms of each part of theirs, or NULL; the norm of
     * merged vectors (the first layer's is that of embeddings); whether the residual stream begins with normed ones. */
    Linear merge;
    const element *part_norms, *vector_norm;
    int64_t part, normed_stream;
    int64_t block, taps; /* of a model of blocks: rows of a block, and those that a convolution reads, or 0 */
} Model;

/* One request's share: rows start .. start + count - 1 behind `length` cached tokens and `written` uncommitted ones. */
typedef struct {
    int64_t start, count, length, written, capacity, coded;
    element *const *keys;   /* [layers]: [kv_heads, head, capacity]; where coded see codes.h */
    element *const *values; /* [layers]: [kv_heads, capacity, head] */
    const int32_t *own_start, *own; /* of each row the uncommitted slots of its path, or of its block; NULL in a chain */
} Segment;

typedef struct {
    int64_t total, segments, wanted;
    const int64_t *tokens, *positions, *rows;
    const element *const *rotary; /* tables [positions][3/2 turned]: cosines, then half of the sines */
    const int64_t *first;  /* [patterns][total]: first position that a row may see */
    const Segment *segment;
    int64_t shown;         /* layers whose output is shown */
    const int64_t *layers; /* their numbers, rising */
    element *vectors;      /* [shown][wanted][width]: what they give */
    const element *embedded, *before; /* [total][width]: of a model of pairs: embeddings of tokens, and the vectors beside them; of blocks: embeddings; or NULL */
    int64_t observed;                 /* whether the vectors are observed ones, [total][inputs of merge] */
} Batch;

/* Numbers on the way: rows that all threads share, then what each thread has for itself. */
typedef struct {
    element *stream, *projected, *mixed, *active;
    element *fetched; /* [threads][rows][stride] */
    float *inputs;    /* [threads][room] */
    float *scores; /* [threads][2 QUERIES][keys, up to whole 32s and some more] */
    element *between, *given; /* [rows * chosen][spread]: of experts */
    int64_t *choices;         /* [rows][chosen] */
    float *shares;            /* likewise */
    int32_t *sorted;          /* [threads][listed]: see sort_slots */
    float *found;             /* [rows][heads][chunks][head + 2]: what queries find in chunks, see join_chunk */
    int64_t rows, keys, room, listed, found_room; /* room: of a thread's inputs; found_room: floats */
} Scratch;

enum { STORE, ADD, GATE, GATE_GELU, GATE_CLIPPED, RESIDUAL, ATTEND, JOIN, READY, REMEMBER, REGARD, SETTLE, PICK, RANK, CHOOSE, MERGE, ENTER, LEAVE };

/* Whether a layer of bfloat16 goes by AMX's tiles, whatever its rows are. */
static int is_tiled(const Linear *l) { return BF16 && TILES && !l->bits && l->read % 32 == 0; }

/* Into how many rows a tile of `rows` is cut: as few tiles as fit, of nearly equal size, but of full ones for AMX, where
 * they cost as much as others. */
static int64_t tile_rows(const Linear *l, int64_t rows) {
    const int full = TILES && (l->bits || is_tiled(l));
    const int64_t most = l->bits ? TOGETHER : full ? TILE_ROWS : ROWS, tiles = (rows + most - 1) / most;
    return rows == 0 ? 1 : full && tiles > 1 ? most : (rows + tiles - 1) / tiles;
}

/* Floats that a row takes as inputs of a product. */
static int64_t input_floats(const Linear *l) {
    return l->bits ? groups_of(l) * (int64_t)(sizeof(Inputs) / sizeof(float)) : is_tiled(l) ? l->read / 2 : l->read;
}

/* Copies rows, which another thread may be writing over: what a thread that comes late reads is of no use to it, nor used. */
__attribute__((noinline, no_sanitize("thread"))) static void fetch(
    const element *x, int64_t x_stride, int64_t rows, int64_t width, element *to, int64_t stride) {
    typedef lanes some __attribute__((may_alias, aligned(4)));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < width; i += (int64_t)(sizeof(some) / sizeof *x))
            *(some *)(to + r * stride + i) = *(const volatile some *)(x + r * x_stride + i);
}

/* What products of a layer with rows of x `[rows][stride]` read, one behind another: `[tiles][inputs][rows of the tile]`,
 * or groups of quantised inputs in place of inputs. Where inputs are multiplied in pairs, a pair lies in the place of one;
 * for AMX's tiles 32 inputs of each row lie together. */
static void arrange(const Linear *l, const element *x, int64_t stride, int64_t rows, float *out) {
    const int64_t size = tile_rows(l, rows), inputs = input_floats(l);
    for (int64_t r = 0; r < rows; r += size) {
        const int64_t n = rows - r < size ? rows - r : size;
        for (int64_t i = 0; i < n; i++) {
            const element *from = x + (r + i) * stride;
            float *to = out + r * inputs + i;
            if (l->bits) gather_quantized(l, from, n, (Inputs *)(out + r * inputs) + i);
            else if (is_tiled(l)) for (int64_t k = 0; k < inputs; k += 16) memcpy(out + r * inputs + k * n + i * 16, from + 2 * k, 64);
#if PAIRED
            else for (int64_t k = 0; k < inputs / 2; k++) memcpy(to + k * n, from + 2 * k, sizeof *to);
#else
            else for (int64_t k = 0; k < inputs; k++) to[k * n] = wide(from[k]);
#endif
        }
    }
}

/* Adds the products of some cells to the sums `[rows][SUMS]` of a tile, for some vectors of outputs; meanwhile parts of
 * `fetch` blocks behind these, from `ahead` on, are brought near, `apart` of each for a cell: memory would wait for the
 * sums otherwise. */
static inline __attribute__((always_inline)) MAY_BE_LATE void tile(
    const cell *w, int64_t block, int64_t cells, const float *x, const int rows, const int vectors, lanes (*sum)[SUMS],
    const cell *ahead, const int fetch, int64_t apart) {
    lanes acc[MOST][ROWS];
#pragma GCC unroll 8
    for (int b = 0; b < vectors; b++)
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) acc[b][r] = sum[r][b];
    for (int64_t k = 0; k < cells; k++) {
        ints wk[MOST];
#pragma GCC unroll 8
        for (int b = 0; b < vectors; b++) wk[b] = load_cells(w + b * LANES / BLOCK * block + k * BLOCK + b * LANES % BLOCK);
#pragma GCC unroll 4
        for (int b = 0; b < fetch; b++) __builtin_prefetch(ahead + b * block + k * apart, 0, 2);
#if PAIRED
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int b = 0; b < vectors; b++) acc[b][r] = plus_products(acc[b][r], wk[b], x + k * rows + r);
#else
#pragma GCC unroll 2
        for (int p = 0; p < PER_CELL; p++) {
            const float *xk = x + (k * PER_CELL + p) * rows;
            lanes wp[MOST];
#pragma GCC unroll 8
            for (int b = 0; b < vectors; b++) wp[b] = part(wk[b], p);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int b = 0; b < vectors; b++) acc[b][r] = acc[b][r] + wp[b] * xk[r];
        }
#endif
    }
#pragma GCC unroll 8
    for (int b = 0; b < vectors; b++)
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) sum[r][b] = acc[b][r];
}

/* Two vectors of outputs and any rows; the first tiles of a group bring the blocks behind these near, shared out so that
 * memory and sums keep each other waiting least. */
static MAY_BE_LATE void narrow_tile(const cell *w, int64_t block, int64_t cells, const float *x, int rows, lanes (*sum)[SUMS], int number, int tiles) {
#if LANES == 16
    const cell *ahead = w + (2 + (number == 1)) * block;
    const int fetch = tiles == 1 ? 2 : number < 2, apart = BLOCK;
#else
    const int sharing = tiles < 2 ? 1 : tiles < 4 ? 2 : 4, apart = BLOCK / sharing, fetch = number < sharing;
    const cell *ahead = w + block + number * cells * apart;
#endif
    switch (rows) {
#define CASE(R) case R: \
        if (LANES == 16 && fetch == 2) tile(w, block, cells, x, R, 2, sum, ahead, 2, BLOCK); \
        else if (fetch == 1) tile(w, block, cells, x, R, 2, sum, ahead, 1, apart); \
        else tile(w, block, cells, x, R, 2, sum, ahead, 0, BLOCK); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* So few rows that more vectors of outputs fit the registers; returns how many were taken. */
static MAY_BE_LATE int wide_tile(const cell *w, int64_t block, int64_t cells, const float *x, int rows, lanes (*sum)[SUMS]) {
    switch (rows) {
#define CASE(R, V) case R: tile(w, block, cells, x, R, V, sum, w + V * LANES / BLOCK * block, LANES == 16 ? 0 : V * LANES / BLOCK, BLOCK); return V;
#if BF16
        CASE(1, 4) CASE(2, 4)
#elif LANES == 16
        CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(5, 4) CASE(6, 4)
#else
        CASE(1, 8) CASE(2, 4) CASE(3, 4)
#endif
#undef CASE
    }
    return SUMS;
}

/* A group of rows against one unit of outputs: sums `[rows][SUMS]`. Where bfloat16 weights are far, in memory, even few
 * rows take the tiles that bring the next ones near. */
static void unit(const Linear *l, int64_t at, const float *x, int64_t rows, int64_t size, int far, lanes (*sum)[SUMS]) {
    for (; l->more && at >= l->own; l = l->more) at -= l->own;
    if (l->bits) {
        for (int64_t r = 0; r < rows; r += size)
            quantized_tile(l, at, (const Inputs *)(x + r * input_floats(l)), rows - r < size ? rows - r : size,
                           far && rows <= size, sum + r);
        return;
    }
    const int64_t cells = l->read / PER_CELL, block = l->inputs / PER_CELL * BLOCK;
    const cell *w = l->weights + at * (UNIT / BLOCK) * block;
#if BF16 && TILES
    if (is_tiled(l)) {
        tiled_unit(w, block, l->read / 32, (const char *)x, rows, size, sum);
        return;
    }
#endif
    memset(sum, 0, rows * sizeof *sum);
#define WEIGHTS(b) (w + (b) * LANES / BLOCK * block + (b) * LANES % BLOCK)
#define FROM(r, b) (lanes(*)[SUMS])((lanes *)sum[r] + (b))
    if (rows <= FEW && !(BF16 && far)) {
        for (int b = 0; b < SUMS;) b += wide_tile(WEIGHTS(b), block, cells, x, (int)rows, FROM(0, b));
        return;
    }
    const int tiles = (int)((rows + size - 1) / size);
    for (int b = 0; b < SUMS; b += 2)
        for (int t = 0; t < tiles; t++) {
            const int64_t r = t * size;
            const int n = (int)(rows - r < size ? rows - r : size);
            narrow_tile(WEIGHTS(b), block, cells, x + r * l->read, n, FROM(r, b), t, tiles);
        }
#undef WEIGHTS
#undef FROM
}

static inline lanes silu(lanes x) { return x / (1.0f + exponential(-x)); }
/* The approximation by a tangent: (1 + tanh(k)) / 2 is 1 / (1 + e^(-2k)). */
static inline lanes gelu(lanes x) { return x / (1.0f + exponential(x * (x * x * 0.044715f + 1.0f) * -1.5957691216f)); }

/* silu with a steeper slope, of numbers up to a limit; the other factor is from 1 less up to 1 more than the limit. */
static inline lanes clipped(lanes gate, lanes up) {
    gate = choose(gate > 7.0f, all(7.0f), gate);
    up = choose(up > 7.0f, all(7.0f), choose(up < -7.0f, all(-7.0f), up));
    return rounded(up + 1.0f) * rounded(gate * rounded(1.0f / (1.0f + exponential(-rounded(gate * 1.702f)))));
}

static void finish(int kind, lanes (*sum)[SUMS], int64_t rows, const float *bias, const element *x, int64_t x_stride, element *y, int64_t stride, int64_t at) {
    for (int64_t r = 0; r < rows; r++) {
        lanes v[SUMS];
        for (int b = 0; b < SUMS; b++) {
            v[b] = sum[r][b];
            if (bias) { lanes add; memcpy(&add, bias + at * UNIT + b * LANES, sizeof add); v[b] = v[b] + add; }
            v[b] = rounded(v[b]);
        }
        if (kind >= GATE && kind <= GATE_CLIPPED) {
            element *out = y + r * stride + at * (UNIT / 2);
            for (int b = 0; b < SUMS / 2; b++) {
                const int gate = b / (BLOCK / LANES) * (BLOCK / LANES) + b, up = gate + BLOCK / LANES;
                store(out + b * LANES, kind == GATE_CLIPPED ? clipped(v[gate], v[up]) : rounded(kind == GATE ? silu(v[gate]) : gelu(v[gate])) * v[up]);
            }
        } else if (kind == RESIDUAL) {
            const element *in = x + r * x_stride + at * UNIT;
            element *out = y + r * stride + at * UNIT;
            for (int b = 0; b < SUMS; b++) store(out + b * LANES, load(in + b * LANES) + rounded(silu(v[b])));
        } else {
            element *out = y + r * stride + at * UNIT;
            for (int b = 0; b < SUMS; b++) store(out + b * LANES, kind == ADD ? load(out + b * LANES) + v[b] : v[b]);
        }
    }
}

static float total_of(lanes v) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}

#include "codes.h"

static void norm(const element *x, const element *weight, float eps, Norms norms, int64_t width, element *y) {
    lanes squares = {0};
    for (int64_t i = 0; i < width; i += LANES) { lanes v = load(x + i); squares = squares + v * v; }
    const float scale = 1.0f / __builtin_sqrtf(total_of(squares) / (float)width + eps);
    if (norms.rounds_once)
        for (int64_t i = 0; i < width; i += LANES) store(y + i, load(x + i) * scale * (load(weight + i) + norms.offset));
    else
        for (int64_t i = 0; i < width; i += LANES) store(y + i, rounded(load(x + i) * scale) * load(weight + i));
}

/* Halves a, b of a head's first `head` entries, or its even and odd ones, become a cos - b sin, b cos + a sin. */
static void rotate(element *x, const element *table, int64_t head, int64_t interleaved) {
    const int64_t half = head / 2;
    if (interleaved) {
        element even[256], odd[256]; /* whole vectors: what is behind the half is not looked at */
        for (int64_t i = 0; i < half; i++) even[i] = x[2 * i], odd[i] = x[2 * i + 1];
        for (int64_t i = 0; i < half; i += LANES) {
            const lanes a = load(even + i), b = load(odd + i), c = load(table + i), s = load(table + head + i);
            store(even + i, rounded(a * c) - rounded(b * s));
            store(odd + i, rounded(b * c) + rounded(a * s));
        }
        for (int64_t i = 0; i < half; i++) x[2 * i] = even[i], x[2 * i + 1] = odd[i];
        return;
    }
    for (int64_t i = 0; i < half; i += LANES) {
        const lanes a = load(x + i), b = load(x + half + i), c = load(table + i), s = load(table + head + i);
        store(x + i, rounded(a * c) - rounded(b * s));
        store(x + half + i, rounded(b * c) + rounded(a * s));
    }
}

/* Scores of some queries with all slots of one key head, some vectors of slots at a time. Queries are already scaled, but
 * for those that are multiplied in pairs. The slots' values are prefetched, an even share for each entry of a head. */
static inline __attribute__((always_inline)) void score_some(
    const float *query, float scaling, const int rows, const int vectors, const int coded, const element *keys, const element *values,
    int64_t capacity, int64_t head, int64_t from, int64_t to, float *scores, int64_t stride) {
    const code *codes = (const code *)keys, *fetched = (const code *)values;
    const int64_t bytes_of_slot = entry_bytes(head, coded), size = coded ? 1 : sizeof *values;
    for (int64_t s = from; s < to; s += vectors * LANES) {
        lanes acc[TILE][4];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) acc[r][j] = (lanes){0};
#if PAIRED
        for (int64_t d = 0; d < head / 2; d++) {
            const element *first = keys + 2 * d * capacity + s;
            const code *of_codes = codes + 2 * d * capacity + s;
            ints key[2];
            for (int i = 0; i < 2; i++) {
                __builtin_prefetch(fetched + s * bytes_of_slot + (2 * d + i) * vectors * LANES * size, 0, 2);
                key[i] = coded ? pairs_of_codes(of_codes + i * LANES, of_codes + capacity + i * LANES) : pairs(first, first + capacity, i);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int j = 0; j < vectors; j++) acc[r][j] = plus_products(acc[r][j], key[j], query + r * head + d);
        }
#else
        for (int64_t d = 0; d < head; d++) {
            lanes key[4];
            __builtin_prefetch(fetched + s * bytes_of_slot + d * vectors * LANES * size, 0, 3);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) {
                const int64_t at = d * capacity + s + j * LANES;
                key[j] = coded ? codes_as_numbers(codes + at) : load(keys + at);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const float q = query[r * head + d];
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++) acc[r][j] = acc[r][j] + key[j] * q;
            }
        }
#endif
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) {
                if (PAIRED) acc[r][j] = acc[r][j] * scaling;
                if (coded) acc[r][j] = acc[r][j] * key_scales(codes + head * capacity + s + j * LANES, capacity);
                memcpy(scores + r * stride + s + j * LANES, &acc[r][j], sizeof(lanes));
            }
    }
}

/* The same for up to 8 queries; those that are not there are computed for nothing. */
static inline __attribute__((always_inline)) void score(
    const float *query, float scaling, int rows, const int coded, const element *keys, const element *values, int64_t capacity,
    int64_t head, int64_t from, int64_t to, float *scores, int64_t stride) {
    if (rows <= 2) score_some(query, scaling, 2, LANES == 16 ? 2 : 4, coded, keys, values, capacity, head, from, to, scores, stride);
    else if (rows <= 4) score_some(query, scaling, 4, 2, coded, keys, values, capacity, head, from, to, scores, stride);
    else score_some(query, scaling, TILE, LANES == 16 ? 2 : 1, coded, keys, values, capacity, head, from, to, scores, stride);
}

/* The same with keys in codes, apart from the kernels of numbers, which are slower where both lie in one function. */
static __attribute__((noinline)) void score_codes(
    const float *query, float scaling, int rows, const element *keys, const element *values, int64_t capacity, int64_t head,
    int64_t from, int64_t to, float *scores, int64_t stride) {
    score(query, scaling, rows, 1, keys, values, capacity, head, from, to, scores, stride);
}

/* Softmax in place over `count` scores, in float32. The weights sum to 1; `about` gets the largest score and the sum of all
 * exponentials of what lies below it. */
static void soften(float *s, int64_t count, float *about) {
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < whole; i++) s[i] = -__builtin_inff();
    lanes most = all(-__builtin_inff()), sum = {0};
    for (int64_t i = 0; i < whole; i += LANES) { lanes v; memcpy(&v, s + i, sizeof v); most = larger(v, most); }
    const float top = largest_of(most);
    for (int64_t i = 0; i < whole; i += LANES) {
        lanes v;
        memcpy(&v, s + i, sizeof v);
        v = exponential(v - top);
        sum = sum + v;
        memcpy(s + i, &v, sizeof v);
    }
    about[0] = top, about[1] = total_of(sum);
    const lanes scale = all(1.0f / about[1]);
    for (int64_t i = 0; i < whole; i += LANES) { lanes v; memcpy(&v, s + i, sizeof v); v = v * scale; memcpy(s + i, &v, sizeof v); }
}

/* What one query sees of a chunk: slots first .. first + count - 1, whose positions are the same numbers, then, in a tree,
 * uncommitted slots of its own path. */
typedef struct {
    int64_t first, count, own_count;
    const int32_t *own;
    float *weights, *out;
} View;

/* Joins what a query finds in a chunk to what it found before: the weighted mean of values `[head]`, the largest score,
 * and the sum of exponentials, which is 0 where nothing was seen. */
static void join_chunk(float *before, const float *chunk, int64_t head) {
    const float *about = chunk + head;
    float *so_far = before + head;
    if (so_far[1] == 0.0f) { memcpy(before, chunk, (head + 2) * sizeof *chunk); return; }
    const float most = so_far[0] > about[0] ? so_far[0] : about[0];
    const lanes a = exponential(all(so_far[0] - most)) * so_far[1], b = exponential(all(about[0] - most)) * about[1], sum = a + b;
    const lanes share = a / sum, other = b / sum;
    for (int64_t d = 0; d < head; d += LANES) {
        lanes x, y;
        memcpy(&x, before + d, sizeof x);
        memcpy(&y, chunk + d, sizeof y);
        x = x * share + y * other;
        memcpy(before + d, &x, sizeof x);
    }
    so_far[0] = most, so_far[1] = sum[0];
}

static void put_mean(const float *mean, int64_t head, element *to) {
    for (int64_t d = 0; d < head; d += LANES) {
        lanes v;
        memcpy(&v, mean + d, sizeof v);
        store(to + d, v);
    }
}

static const element nothing[WIDEST];

#if BF16 && TILES
#include "tiled_attention.h"
#elif PAIRED
#include "paired_attention.h"
#endif

/* Adds weighted values of slots from .. to - 1 to the sums of some views that see them all. */
static inline __attribute__((always_inline)) void mix_slots(
    const View *view, const int rows, const element *values, int64_t head, int64_t d, int64_t from, int64_t to, const int vectors,
    const int coded, lanes (*acc)[4]) {
    for (int64_t i = from; i < to; i++) {
        lanes value[4];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) value[j] = value_of(values, i, head, d + j * LANES, coded);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const float w = factor_of(view[r].weights[i - view[r].first], values, i, head, coded);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) acc[r][j] = acc[r][j] + value[j] * w;
        }
    }
}

/* Weighted values of up to 8 views, for some of a head's entries: what all of them see is read once. */
static inline __attribute__((always_inline)) void mix_some(
    const View *view, const int rows, const element *values, int64_t head, int64_t length, int64_t d, const int vectors, const int coded) {
    lanes acc[TILE][4];
    int64_t first = 0, last = INT64_MAX;
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < vectors; j++) acc[r][j] = (lanes){0};
        if (view[r].first > first) first = view[r].first;
        if (view[r].first + view[r].count < last) last = view[r].first + view[r].count;
    }
    if (last < first) last = first;
    for (int r = 0; r < rows && rows > 1; r++) {
        const int64_t end = view[r].first + view[r].count;
        mix_slots(view + r, 1, values, head, d, view[r].first, end < first ? end : first, vectors, coded, acc + r);
    }
    mix_slots(view, rows, values, head, d, first, last, vectors, coded, acc);
    for (int r = 0; r < rows; r++) {
        if (rows > 1) mix_slots(view + r, 1, values, head, d, last, view[r].first + view[r].count, vectors, coded, acc + r);
        for (int64_t i = 0; i < view[r].own_count; i++) {
            const int64_t own = length + view[r].own[i];
            const float w = factor_of(view[r].weights[view[r].count + i], values, own, head, coded);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) acc[r][j] = acc[r][j] + value_of(values, own, head, d + j * LANES, coded) * w;
        }
        for (int j = 0; j < vectors; j++) memcpy(view[r].out + d + j * LANES, &acc[r][j], sizeof(lanes));
    }
}

/* Mix all views, up to 4 together, or 8 and half as many entries. */
static inline __attribute__((always_inline)) void mix(
    const View *view, int views, const int coded, const element *values, int64_t head, int64_t length) {
    for (int r = 0, some; r < views; r += some) {
        some = LANES == 16 && views == TILE ? TILE : views - r < 4 ? views - r : 4;
        const int most = some == TILE ? MIXED / 2 : MIXED;
        for (int64_t d = 0; d < head; d += most * LANES) {
            const int rest = (int)((head - d) / LANES);
            if (rest < most) for (int i = 0; i < some; i++) mix_some(view + r + i, 1, values, head, length, d, rest, coded);
            else if (some == TILE) mix_some(view, TILE, values, head, length, d, MIXED / 2, coded);
            else if (some == 4) mix_some(view + r, 4, values, head, length, d, MIXED, coded);
            else if (some == 3) mix_some(view + r, 3, values, head, length, d, MIXED, coded);
            else if (some == 2) mix_some(view + r, 2, values, head, length, d, MIXED, coded);
            else mix_some(view + r, 1, values, head, length, d, MIXED, coded);
        }
    }
}

static __attribute__((noinline)) void mix_codes(const View *view, int views, const element *values, int64_t head, int64_t length) {
    mix(view, views, 1, values, head, length);
}

/* The position behind the last that a row of a request sees. */
static int64_t end_of(const Segment *s, int64_t row) {
    return s->own ? s->length + s->own_start[row + 1] - s->own_start[row] : s->length + s->written + row + 1;
}

/* What a row sees of positions from .. to - 1, whose slots' scores begin with that of slot `scored`. In a tree the scores
 * of its path are put behind those of the context: along a path positions rise by one. */
static void find_visible(const Segment *s, int64_t row, int64_t from, int64_t to, float *scores, int64_t scored, float *ordered, View *see) {
    const int64_t context = !s->own || to < s->length ? to : s->length, path = from > s->length ? from : s->length;
    see->first = from;
    see->count = context > from ? context - from : 0;
    see->own_count = to - from - see->count;
    see->weights = scores + from - scored;
    if (!see->own_count) return;
    see->own = s->own + s->own_start[row] + path - s->length;
    see->weights = ordered + from - scored;
    memcpy(see->weights, scores + from - scored, see->count * sizeof *ordered);
    for (int64_t i = 0; i < see->own_count; i++) see->weights[see->count + i] = scores[s->length + see->own[i] - scored];
}

/* Some rows of a request, from .. to - 1, one key head, and chunks of what they see. */
typedef struct {
    const Segment *segment;
    int64_t group, from, to, chunk, end_chunk;
} Piece;

/* Rotates a piece's keys and writes them and its values to the cache. */
static void remember(const Model *m, const Layer *l, const Batch *b, Piece p, int64_t number, const Scratch *scratch) {
    const Segment *s = p.segment;
    const int64_t head = m->head, base = s->length + s->written, turned = m->turned;
    const int64_t bytes = entry_bytes(head, s->coded), group = p.group * s->capacity * bytes;
    code *keys = (code *)s->keys[number] + group, *values = (code *)s->values[number] + group;
    element *first = scratch->projected + (s->start + p.from) * m->stride + (m->heads + p.group) * head;
    for (int64_t i = p.from; i < p.to; i++) {
        const int64_t row = s->start + i;
        element *k = first + (i - p.from) * m->stride, *v = k + m->kv_heads * head;
        if (l->key_norm) norm(k, l->key_norm, l->head_eps, m->norms, head, k);
        rotate(k, b->rotary[l->rotary] + b->positions[row] * (turned + turned / 2), turned, m->interleaved);
        if (s->coded) encode(k, head, (code *)k), encode(v, head, values + (base + i) * bytes);
        else memcpy(values + (base + i) * bytes, v, bytes);
    }
    for (int64_t d = 0; d < (s->coded ? bytes : head); d++) /* a line of the cache has an entry of several rows */
        for (int64_t i = p.from; i < p.to; i++) {
            const element *k = first + (i - p.from) * m->stride;
            if (s->coded) keys[d * s->capacity + base + i] = ((const code *)k)[d];
            else ((element *)keys)[d * s->capacity + base + i] = k[d];
        }
}

/* Attends from a piece's queries, which are rotated here, to its chunks of what the cache has. What they find goes to
 * `mixed`, or, where other threads have further chunks of as many as `apart`, to `found`. */
static void attend(const Model *m, const Layer *l, const Batch *b, Piece p, int64_t number, const Scratch *scratch, int me, int64_t apart) {
    const Segment *s = p.segment;
    const int64_t group = p.group, head = m->head, each = m->heads / m->kv_heads, stride = m->stride, end = s->length + s->written + s->count;
    const int64_t score_stride = scratch->keys, turned = m->turned, bytes = entry_bytes(head, s->coded), size = bytes / head;
    const element *rotary = b->rotary[l->rotary];
    const code *keys = (const code *)s->keys[number] + group * s->capacity * bytes, *values = (const code *)s->values[number] + group * s->capacity * bytes;
    float *scores = scratch->scores + me * 2 * QUERIES * score_stride, *ordered = scores + QUERIES * score_stride;
    const int tiled = BF16 && TILES && head % 32 == 0 && !s->coded, most = tiled ? QUERIES : TILE;
    const int64_t *first = b->first + l->pattern * b->total, queries = p.to * each;
    float query[TILE * WIDEST]; /* or as many in pairs */
    for (int64_t q = p.from * each; q < queries; q += most) {
        const int n = queries - q < most ? (int)(queries - q) : most;
        int64_t lowest = INT64_MAX, behind = 0;
        float mean[QUERIES][WIDEST + 2], of_chunk[QUERIES][WIDEST + 2];
        if (n < TILE) memset(query + n * head, 0, (TILE - n) * head * sizeof *query);
        for (int r = 0; r < n; r++) {
            const int64_t i = (q + r) / each, row = s->start + i;
            element x[WIDEST];
            memcpy(x, scratch->projected + row * stride + (group * each + (q + r) % each) * head, head * sizeof *x);
            if (l->query_norm) norm(x, l->query_norm, l->head_eps, m->norms, head, x);
            rotate(x, rotary + b->positions[row] * (turned + turned / 2), turned, m->interleaved);
            if (tiled) memcpy(query + r * head / 2, x, head * sizeof *x);
            else if (PAIRED) memcpy(query + r * head, x, head * sizeof *x);
            else for (int64_t d = 0; d < head; d += LANES) { lanes v = load(x + d) * l->scaling; memcpy(query + r * head + d, &v, sizeof v); }
            lowest = first[row] < lowest ? first[row] : lowest;
            behind = end_of(s, i) > behind ? end_of(s, i) : behind;
            mean[r][head + 1] = 0.0f;
        }
        for (int64_t c = p.chunk > lowest / CHUNK ? p.chunk : lowest / CHUNK; c < p.end_chunk && c * CHUNK < behind; c++) {
            const int64_t begin = c * CHUNK, until = begin + CHUNK < behind ? begin + CHUNK : behind, context = s->length < lowest ? s->length : lowest;
            /* With positions of a tree's paths all its slots are scored. */
            const int with_paths = s->own && until > s->length;
            const int64_t from = (with_paths && s->length < begin ? s->length : begin > context ? begin : context) / 32 * 32, to = with_paths ? end : until;
            const element *key = (const element *)(keys + from * size), *value = (const element *)(values + from * bytes);
#if BF16 && TILES
            if (tiled) tiled_scores(query, l->scaling, n, key, s->capacity, head, 0, to - from, scores, score_stride);
            else
#endif
            if (s->coded) score_codes(query, l->scaling, n, key, value, s->capacity, head, 0, to - from, scores, score_stride);
            else score(query, l->scaling, n, 0, key, value, s->capacity, head, 0, to - from, scores, score_stride);
            View view[QUERIES];
            int views = 0;
            for (int r = 0; r < n; r++) {
                const int64_t i = (q + r) / each, row = s->start + i, h = group * each + (q + r) % each, last = end_of(s, i);
                const int64_t sees_from = first[row] > begin ? first[row] : begin, sees_to = last < until ? last : until;
                of_chunk[r][head + 1] = 0.0f;
                if (sees_from >= sees_to) continue;
                View *see = view + views++;
                find_visible(s, i, sees_from, sees_to, scores + r * score_stride, from, ordered + r * score_stride, see);
                see->out = apart ? scratch->found + ((row * m->heads + h) * apart + c) * (head + 2) : of_chunk[r];
                const int with_sink = l->sinks && sees_to == last;
                if (with_sink) see->weights[sees_to - sees_from] = l->sinks[h];
                soften(see->weights, sees_to - sees_from + with_sink, see->out + head);
            }
#if BF16 && TILES
            if (tiled) tiled_mix(view, views, (const element *)values, head, s->length, scores, score_stride);
            else
#endif
#if PAIRED && !TILES
            if (head % 32 == 0) {
                const int is_new = !s->coded && q == p.from * each && until + CHUNK <= s->length;
                mix_pairs(view, views, values, head, s->length, begin, is_new ? keys + until * size : NULL, s->capacity * size, s->coded);
            } else
#endif
            if (s->coded) mix_codes(view, views, (const element *)values, head, s->length);
            else mix(view, views, 0, (const element *)values, head, s->length);
            for (int r = 0; r < n && !apart; r++)
                if (of_chunk[r][head + 1] != 0.0f) join_chunk(mean[r], of_chunk[r], head);
        }
        for (int r = 0; r < n && !apart; r++)
            put_mean(mean[r], head, scratch->mixed + (s->start + (q + r) / each) * stride + (group * each + (q + r) % each) * head);
    }
}

/* The ids of the `ranks` largest of some logits, the largest first; of equal ones the lowest id first. */
static void largest(const element *logits, int64_t vocab, int64_t ranks, float *values, int64_t *ids) {
    for (int64_t i = 0; i < ranks; i++) { values[i] = -__builtin_inff(); ids[i] = i; }
    for (int64_t from = 0; from < vocab; from += LANES) {
        const int n = vocab - from < LANES ? (int)(vocab - from) : LANES;
        float v[LANES];
        if (n == LANES) {
            const lanes read = load(logits + from);
            const ints above = read > values[ranks - 1];
            int64_t any[LANES / 2], found = 0;
            memcpy(any, &above, sizeof any);
            for (int i = 0; i < LANES / 2; i++) found |= any[i];
            if (!found) continue;
            memcpy(v, &read, sizeof v);
        } else {
            element last[LANES] = {0};
            memcpy(last, logits + from, n * sizeof *last);
            const lanes read = load(last);
            memcpy(v, &read, sizeof v);
        }
        for (int i = 0; i < n; i++) {
            if (!(v[i] > values[ranks - 1])) continue;
            int64_t at = ranks - 1;
            for (; at > 0 && v[i] > values[at - 1]; at--) { values[at] = values[at - 1]; ids[at] = ids[at - 1]; }
            values[at] = v[i];
            ids[at] = from + i;
        }
    }
}

/* Turns the largest logits of a row, in falling order, into log probabilities; `factor` is what the model scales by.
 * Behind the vocabulary there is room for the rest of a unit, of any content. */
static void log_probabilities(const element *logits, int64_t vocab, int64_t ranks, float factor, float *values) {
    const lanes top = all(values[0]), scale = all(factor);
    lanes sums = all(0.0f);
    for (int64_t from = 0; from < vocab; from += LANES) {
        lanes e = exponential((load(logits + from) - top) * scale);
        if (vocab - from < LANES)
            for (int i = (int)(vocab - from); i < LANES; i++) e[i] = 0.0f;
        sums += e;
    }
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    const float log_sum = __builtin_logf(sum);
    for (int64_t i = ranks - 1; i >= 0; i--) values[i] = (values[i] - values[0]) * factor - log_sum;
}

/* Residual heads that end in the LM head. Their vectors lie in rows of whole units. */
typedef struct {
    const Linear *lm_head, *block; /* block: [layers][heads], as many outputs as inputs */
    int64_t layers, heads, used, wide; /* used: the first heads that run; wide: of a row of vectors */
} Heads;

/* What is asked of them: of the first `vocab` logits of each row the ids of the `ranks` largest, with the logs of their
 * probabilities; the model multiplies its logits by `factor`. */
typedef struct {
    int64_t rows, vocab, ranks;
    double factor;
    const element *hidden; /* [rows][wide] */
    element *logits;       /* [used rows][outputs, up to whole units] */
    float *values;         /* [used rows][ranks] */
    int64_t *ids;          /* likewise */
} Asked;

typedef struct Job Job;

/* Some rows of one expert: slots of `order`. */
typedef struct {
    int32_t expert, first, count;
} Part;

/* What the threads of a job do at a time: products of a unit of outputs with all rows each, a group of rows at a time;
 * or attention, norms, or ranking, some items to a unit. */
typedef struct {
    int kind;
    int64_t units, parts;
    const Linear *linear; /* layers of equal sizes, each for rows of its own: one, or those of several heads */
    int64_t each;         /* units of a layer, or items of a unit */
    const element *x, *norm; /* norm: weights of one that comes before the product, or NULL */
    element *y;
    const float *inputs; /* what this thread made of x, or all threads did */
    int64_t sources; /* layers whose rows are not those of the first */
    int64_t x_stride, y_stride, x_apart, y_apart, inputs_apart; /* apart: what lies between two layers' rows */
    int64_t rows, size, group;
    int far; /* whether the weights of all layers are more than caches hold */
    float eps;
    Norms norms;
    int64_t number; /* of the decoder layer */
    int64_t experts, chosen, slots_of_x; /* experts: 0 for other products; slots_of_x: slots that read one row of x */
    const int32_t *order, *share;        /* see sort_slots */
    const Part *part;
} Region;

/* How the tokens of a chain are drawn, each before the forward that reads it, and where drafting stops: see `Budget`. */
typedef struct {
    const void *softmax, *draw, *largest, *token_probs; /* functions of fused.c for logits of this dtype */
    int64_t levels, vocab, patterns;
    const int64_t *later; /* [levels - 1][patterns]: first positions that rows after the first forward's may see */
    float temperature;
    int32_t looks;        /* whether the tokens' probabilities are wanted, and end the chain */
    const double *uniforms;              /* [levels] */
    double least, floor, odds, odds_slope, least_known; /* least_known: of probabilities, and of their distance from 1 */
    const int64_t *names; /* ids of the logits' columns, rising; NULL: their numbers */
    int64_t named;        /* ids that there are */
    float *own, *probs;   /* own: [vocab]; probs: [levels][named], or NULL: each token is the likeliest one */
    float *chances;       /* [levels]: the tokens' probabilities */
    int64_t *tokens;      /* [levels] */
} Chain;

/* A forward, or a run of heads: `steps` regions. Late threads have copies, and may use no more than the model, heads and
 * numbers on the way; the rest is gone when the job is over. */
struct Job {
    void (*describe)(const Job *, int64_t step, Region *);
    int64_t begin, steps, stride; /* begin: the first layer */
    int64_t least; /* the first row that is wanted: of those before it the last layer gives keys and values alone; of experts 0 */
    int64_t piece, pieces, parts, chunks; /* of attention: rows of a piece, how many there are, and, if they are cut into chunks, of
                                           * these; chunks: most of a request, or 0. Requests are looked at only by who has one */
    const Model *model;
    Scratch scratch;
    Batch batch;
    Heads heads;
    Asked asked;
    element *logits, *hidden;
};

static int64_t units_of(const Linear *l) { return (l->outputs + UNIT - 1) / UNIT; }
static int is_in_parts(const Region *r) { return r->kind < ATTEND; }

static void rank(const Job *job, int64_t row) {
    const Asked *a = &job->asked;
    const element *logits = a->logits + row * units_of(job->heads.lm_head) * UNIT;
    largest(logits, a->vocab, a->ranks, a->values + row * a->ranks, a->ids + row * a->ranks);
    log_probabilities(logits, a->vocab, a->ranks, (float)a->factor, a->values + row * a->ranks);
}

#include "experts.h"
#include "blocks.h"

static void compute_part(const Region *r, int64_t at, int64_t part, lanes (*sum)[SUMS]) {
    if (r->experts) return compute_experts(r, at, part, sum);
    const int64_t which = r->each == r->units ? 0 : at / r->each;
    const Linear *l = r->linear + which;
    const int64_t first = part * r->group, n = r->rows - first < r->group ? r->rows - first : r->group;
    unit(l, at - which * r->each, r->inputs + which * r->inputs_apart + first * input_floats(l), n, r->size, r->far, sum);
}

static void write_part(const Region *r, int64_t at, int64_t part, lanes (*sum)[SUMS]) {
    if (r->experts) return write_experts(r, at, part, sum);
    const int64_t first = part * r->group, n = r->rows - first < r->group ? r->rows - first : r->group;
    const int64_t which = r->each == r->units ? 0 : at / r->each;
    finish(r->kind, sum, n, r->linear[which].bias, r->x + which * r->x_apart + first * r->x_stride, r->x_stride,
           r->y + which * r->y_apart + first * r->y_stride, r->y_stride, at - which * r->each);
}

/* Makes a thread's own inputs of the products of a region, where they were not made for all. */
static void prepare(const Job *job, Region *r, int me) {
    if (r->inputs) return;
    if (r->experts) return prepare_experts(job, r, me);
    const Scratch *s = &job->scratch;
    const int64_t stride = job->stride, width = r->linear->read;
    element *rows = s->fetched + me * s->rows * stride;
    float *inputs = s->inputs + me * s->room;
    r->inputs = inputs;
    for (int64_t i = 0; i < r->sources; i++) {
        fetch(r->x + i * r->x_apart, r->x_stride, r->rows, width, rows, stride);
        if (r->norm) for (int64_t t = 0; t < r->rows; t++) norm(rows + t * stride, r->norm, r->eps, r->norms, width, rows + t * stride);
        arrange(r->linear, rows, stride, r->rows, inputs + i * r->inputs_apart);
    }
}

/* Makes the inputs of some rows, a tile of them, for all threads. */
static void make_ready(const Job *job, const Region *r, int64_t at, int me) {
    const int64_t first = at * r->each, left = r->rows - first, count = left < r->each ? left : r->each, stride = job->stride;
    const element *x = r->x + first * r->x_stride;
    element *rows = job->scratch.fetched + me * job->scratch.rows * stride;
    for (int64_t t = 0; t < count && r->norm; t++) norm(x + t * r->x_stride, r->norm, r->eps, r->norms, r->linear->read, rows + t * stride);
    arrange(r->linear, r->norm ? rows : x, r->norm ? stride : r->x_stride, count, job->scratch.inputs + first * input_floats(r->linear));
}

/* Pieces of a request's rows, of at most so many each. */
static int64_t pieces_of(const Segment *s, int64_t rows) { return (s->count + rows - 1) / rows; }

/* Parts that a piece's chunks make: each is one, but those with uncommitted positions, which are the last together. */
static int64_t parts_of(const Job *job, const Segment *s) { return job->chunks ? s->length / CHUNK + 1 : 1; }

/* Attention of a piece, or of its part; pieces are those of the first request's first key head, of its next, then of the
 * next request. */
static void attention(const Job *job, const Region *r, int64_t at, int me) {
    const Model *m = job->model;
    const Segment *s = job->batch.segment;
    const int cut = r->kind != REMEMBER;
    for (int64_t some; at >= (some = pieces_of(s, job->piece) * m->kv_heads * (cut ? parts_of(job, s) : 1)); s++) at -= some;
    const int64_t parts = cut ? parts_of(job, s) : 1, part = at % parts, pieces = pieces_of(s, job->piece), from = at / parts % pieces * job->piece;
    const int is_last = part == parts - 1;
    Piece p = {s, at / parts / pieces, from, s->count - from < job->piece ? s->count : from + job->piece, part, is_last ? INT64_MAX : part + 1};
    const Layer *l = m->layer + r->number;
    if (r->kind != REGARD && is_last) remember(m, l, &job->batch, p, r->number, &job->scratch);
    if (r->number == m->layers - 1 && p.from < job->least - s->start) p.from = job->least - s->start;
    if (r->kind != REMEMBER) attend(m, l, &job->batch, p, r->number, &job->scratch, me, job->chunks);
}

/* Joins what a query of a row found in all chunks. */
static void join_all(const Job *job, const Region *r, int64_t at) {
    const Model *m = job->model;
    const Batch *b = &job->batch;
    const int64_t head = m->head, row = b->total - r->rows / m->heads + at / m->heads, query = at % m->heads;
    const Segment *s = b->segment;
    while (row >= s->start + s->count) s++;
    const int64_t first = b->first[m->layer[r->number].pattern * b->total + row] / CHUNK, last = (end_of(s, row - s->start) - 1) / CHUNK;
    const float *found = job->scratch.found + (row * m->heads + query) * job->chunks * (head + 2);
    float mean[WIDEST + 2];
    mean[head + 1] = 0.0f;
    for (int64_t c = first; c <= last; c++) join_chunk(mean, found + c * (head + 2), head);
    put_mean(mean, head, job->scratch.mixed + row * m->stride + query * head);
}

/* The norm of a row that is wanted, for the LM head and for the caller. */
static void pick(const Job *job, int64_t row) {
    const Model *m = job->model;
    element *hidden = job->hidden + row * m->width;
    norm(job->scratch.stream + job->batch.rows[row] * job->stride, m->norm, m->eps, m->norms, m->width, hidden);
    memcpy(job->scratch.mixed + row * job->stride, hidden, m->width * sizeof *hidden);
}

/* Adds the norm of what attention or the MLP gave to a row of the residual stream. */
static void settle(const Job *job, const Region *r, int64_t row) {
    const int64_t width = job->model->width;
    element *given = job->scratch.projected + row * job->stride, *stream = job->scratch.stream + row * job->stride;
    norm(given, r->norm, r->eps, r->norms, width, given);
    for (int64_t i = 0; i < width; i += LANES) store(stream + i, load(stream + i) + load(given + i));
}

static void whole_unit(const Job *job, const Region *r, int64_t at, int me) {
    if (r->kind == READY) return make_ready(job, r, at, me);
    for (int64_t w = at * r->each; w < r->rows && w < (at + 1) * r->each; w++)
        if (r->kind == RANK) rank(job, w);
        else if (r->kind == PICK) pick(job, w);
        else if (r->kind == SETTLE) settle(job, r, w);
        else if (r->kind == CHOOSE) choose_experts(job, r, w);
        else if (r->kind == MERGE) merge_experts(job, w);
        else if (r->kind == JOIN) join_all(job, r, w);
        else if (r->kind == ENTER) enter_part(job, r, w, me);
        else if (r->kind == LEAVE) leave_part(job, r, w);
        else attention(job, r, w, me);
}

#include "team.h"

/* y = x W (STORE), y += x W (ADD), silu(gate) * up (GATE), or x + silu(x W) (RESIDUAL). */
static void products(Region *r, const Linear *l, int kind, const element *x, int64_t x_stride, element *y, int64_t y_stride, int64_t rows) {
    const int64_t size = tile_rows(l, rows), group = GROUP / size * size;
    *r = (Region){.kind = kind, .units = units_of(l), .parts = (rows + group - 1) / group, .linear = l, .each = units_of(l), .x = x,
                  .y = y, .sources = 1, .x_stride = x_stride, .y_stride = y_stride, .rows = rows, .size = size, .group = group};
}

/* So many items, in as many units as can be counted. */
static void items(Region *r, int kind, int64_t number, int64_t count) {
    const int64_t each = count / MOST_UNITS + 1;
    *r = (Region){.kind = kind, .units = (count + each - 1) / each, .each = each, .rows = count, .number = number};
}

/* Products with the experts that rows chose: y has a row for every slot, x has one for every `slots_of_x`. */
static void of_experts(Region *r, const Model *m, const Linear *l, int kind, const element *x, int64_t x_stride, int64_t slots_of_x, element *y, int64_t rows) {
    products(r, l, kind, x, x_stride, y, m->spread, rows);
    r->units *= m->chosen;
    r->experts = m->experts, r->chosen = m->chosen, r->slots_of_x = slots_of_x;
}

enum { QKV, MIX, JOINED, OUT, SETTLE_OUT, ROUTE, CHOSE, GATE_UP, DOWN, MERGED, SETTLE_DOWN, CORRECT, ENTERED, LEFT, CORRECT_MLP, ENTERED_MLP, LEFT_MLP };

/* The steps of a layer; of one whose sums are normed before they are added to the stream; of one with experts; and of one
 * with convolutions. Where attention is not cut into chunks, nothing is joined. */
static const int plain[] = {QKV, MIX, JOINED, OUT, GATE_UP, DOWN};
static const int sandwich[] = {QKV, MIX, JOINED, OUT, SETTLE_OUT, GATE_UP, DOWN, SETTLE_DOWN};
static const int routed[] = {QKV, MIX, JOINED, OUT, ROUTE, CHOSE, GATE_UP, DOWN, MERGED};
static const int convolving[] = {CORRECT, ENTERED, QKV, MIX, JOINED, OUT, LEFT, CORRECT_MLP, ENTERED_MLP, GATE_UP, DOWN, LEFT_MLP};

static const int *steps_of_a_layer(const Job *job, int64_t *count) {
    const Model *m = job->model;
    const int *steps = m->taps ? convolving : m->experts ? routed : m->layer->after_attention ? sandwich : plain;
    const size_t size = m->taps ? sizeof convolving : steps == routed ? sizeof routed : steps == sandwich ? sizeof sandwich : sizeof plain;
    *count = size / sizeof *steps - !job->chunks;
    return steps;
}

/* A convolution's rows, or the products that correct it. */
static void of_convolution(Region *r, const Job *job, const Layer *l, int kind, int of_mlp) {
    const Model *m = job->model;
    const Linear *corrections = of_mlp ? &l->mlp_conv : &l->attention_conv;
    if (kind == STORE) products(r, corrections, STORE, job->scratch.stream, job->stride, corrections_of(m, &job->scratch, 0), job->stride, job->batch.total);
    else items(r, kind, l - m->layer, job->batch.total);
    if (kind != STORE) r->linear = corrections, r->x = of_mlp ? l->mlp_kernel : l->attention_kernel;
    r->norm = of_mlp ? l->before_mlp : l->before_attention, r->eps = of_mlp ? l->mlp_eps : l->attention_eps;
}

static void describe_forward(const Job *job, int64_t step, Region *r) {
    const Model *m = job->model;
    const Scratch *s = &job->scratch;
    int64_t steps;
    const int *of_a_layer = steps_of_a_layer(job, &steps);
    const int64_t stride = job->stride, rows = job->batch.total, number = job->begin + step / steps, at = step % steps, join = m->taps ? 4 : JOINED, which = at + (at >= join && !job->chunks);
    const Layer *l = m->layer + number;
    const int64_t least = number == m->layers - 1 ? job->least : 0, others = rows - least; /* behind attention */
    element *stream = s->stream + least * stride, *projected = s->projected + least * stride, *active = s->active + least * stride;
    const int far = m->layers * m->width * m->inner * (m->experts ? m->experts : 1) > NEAR;
    if (number == m->layers) {
        const int64_t wanted = job->batch.wanted;
        if (which == 0) items(r, PICK, number, wanted);
        else products(r, &m->lm_head, STORE, s->mixed, stride, job->logits, units_of(&m->lm_head) * UNIT, wanted);
        r->far = far;
        return;
    }
    switch (of_a_layer[which]) {
        case QKV:
            if (m->taps || (job->batch.before && number == 0)) { /* norms are done */
                products(r, &l->qkv, STORE, s->mixed, stride, s->projected, stride, rows);
                break;
            }
            products(r, &l->qkv, STORE, s->stream, stride, s->projected, stride, rows);
            r->norm = l->before_attention, r->eps = l->attention_eps;
            break;
        case MIX: items(r, ATTEND, number, job->parts); break;
        case JOINED: items(r, JOIN, number, others * m->heads); break;
        case OUT: {
            const int apart = l->after_attention || m->taps;
            products(r, &l->out, apart ? STORE : ADD, s->mixed + least * stride, stride, apart ? projected : stream, stride, others);
            break;
        }
        case SETTLE_OUT:
            items(r, SETTLE, number, rows);
            r->norm = l->after_attention, r->eps = l->after_attention_eps;
            break;
        case ROUTE:
            products(r, &l->router, STORE, s->stream, stride, s->projected, stride, rows);
            r->norm = l->before_mlp, r->eps = l->mlp_eps;
            break;
        case CHOSE:
            items(r, CHOOSE, number, rows);
            r->norm = l->before_mlp, r->eps = l->mlp_eps;
            break;
        case GATE_UP:
            if (m->experts) {
                of_experts(r, m, &l->gate_up, (int)m->gate, s->mixed, stride, m->chosen, s->between, rows);
                break;
            }
            products(r, &l->gate_up, (int)m->gate, m->taps ? s->mixed : stream, stride, active, stride, others);
            if (!m->taps) r->norm = l->before_mlp, r->eps = l->mlp_eps;
            break;
        case DOWN:
            if (m->experts) of_experts(r, m, &l->down, STORE, s->between, m->spread, 1, s->given, rows);
            else {
                const int apart = l->after_mlp || m->taps;
                products(r, &l->down, apart ? STORE : ADD, active, stride, apart ? projected : stream, stride, others);
            }
            break;
        case MERGED: items(r, MERGE, number, rows); break;
        case SETTLE_DOWN:
            items(r, SETTLE, number, rows);
            r->norm = l->after_mlp, r->eps = l->after_mlp_eps;
            break;
        case CORRECT: of_convolution(r, job, l, STORE, 0); break;
        case ENTERED: of_convolution(r, job, l, ENTER, 0); break;
        case LEFT: of_convolution(r, job, l, LEAVE, 0); break;
        case CORRECT_MLP: of_convolution(r, job, l, STORE, 1); break;
        case ENTERED_MLP: of_convolution(r, job, l, ENTER, 1); break;
        case LEFT_MLP: of_convolution(r, job, l, LEAVE, 1); break;
    }
    r->norms = m->norms;
    r->far = far;
}

/* The same of many rows, with a step before each: what all threads need of it is made by all of them together, and none
 * prepares anything by itself, which a late one would do where the others read. */
static void describe_shared(const Job *job, int64_t step, Region *r) {
    describe_forward(job, step / 2, r);
    if (r->kind == ATTEND) items(r, step % 2 ? REGARD : REMEMBER, r->number, step % 2 ? job->parts : job->pieces);
    else if (!is_in_parts(r)) r->units *= step % 2;
    else if (step % 2) r->inputs = job->scratch.inputs;
    else r->kind = READY, r->each = r->size, r->units = (r->rows + r->size - 1) / r->size;
}

static void describe_merge(const Job *job, int64_t step, Region *r) {
    products(r, &job->model->merge, STORE, job->scratch.mixed, job->stride, job->scratch.stream, job->stride, job->batch.total);
}

/* What blocks see of a text: each layer's keys and values of the merged vectors, which are normed. */
static void describe_context(const Job *job, int64_t step, Region *r) {
    const Model *m = job->model;
    const int64_t number = (step - 1) / 2;
    if (step == 0) return describe_merge(job, step, r);
    if (step % 2 == 0) return items(r, REMEMBER, number, job->pieces);
    products(r, &m->layer[number].qkv, STORE, job->scratch.stream, job->stride, job->scratch.projected, job->stride, job->batch.total);
    r->norm = m->vector_norm, r->eps = m->eps, r->norms = m->norms;
}

/* Reads observed vectors of texts into the caches, which blocks then see. */
void truedraft_context(const Model *m, const Batch *b, const Scratch *scratch, int threads) {
    const int64_t wide = m->merge.inputs;
    for (int64_t t = 0; t < b->total; t++) memcpy(scratch->mixed + t * m->stride, b->before + t * wide, wide * sizeof *b->before);
    Job job = {.describe = describe_context, .steps = 1 + 2 * m->layers, .stride = m->stride, .piece = PIECE, .model = m, .scratch = *scratch, .batch = *b};
    for (int64_t i = 0; i < b->segments; i++) job.pieces += pieces_of(b->segment + i, PIECE) * m->kv_heads;
    run_together(&job, threads);
}

/* Puts rows' vectors where the residual stream begins, and their pairs, normed and side by side, where the first layer's
 * attention reads them. */
static void begin_pairs(const Model *m, const Batch *b, const Scratch *scratch, int threads) {
    const int64_t wide = b->observed ? m->merge.inputs : m->width;
    const float eps = m->layer->attention_eps;
    for (int64_t t = 0; t < b->total; t++) {
        element *row = (b->observed ? scratch->mixed : scratch->stream) + t * m->stride;
        memcpy(row, b->before + t * wide, wide * sizeof *row);
        for (int64_t i = 0; b->observed && m->part_norms && i < wide; i += m->part)
            norm(row + i, m->part_norms + i, eps, m->norms, m->part, row + i);
    }
    const Job job = {.describe = describe_merge, .steps = 1, .stride = m->stride, .model = m, .scratch = *scratch, .batch = *b};
    if (b->observed) run_together(&job, threads);
    for (int64_t t = 0; t < b->total; t++) {
        element *row = scratch->stream + t * m->stride, *both = scratch->mixed + t * m->stride;
        norm(b->embedded + t * m->width, m->layer->before_attention, eps, m->norms, m->width, both);
        norm(row, m->vector_norm, eps, m->norms, m->width, both + m->width);
        if (m->normed_stream) memcpy(row, both + m->width, m->width * sizeof *row);
    }
}

/* Returns 0; or, with nothing computed, 1 where a token is not in the embedding and 2 where a wanted row is not there. */
int truedraft_forward(const Model *m, const Batch *b, const Scratch *scratch, element *logits, element *hidden, int threads) {
    for (int64_t t = 0; t < b->total && !b->embedded; t++)
        if (b->tokens[t] < 0 || b->tokens[t] >= m->embedded) return 1;
    for (int64_t r = 0; r < b->wanted; r++)
        if (b->rows[r] < 0 || b->rows[r] >= b->total) return 2;
    if (b->before) begin_pairs(m, b, scratch, threads);
    else if (b->embedded)
        for (int64_t t = 0; t < b->total; t++) memcpy(scratch->stream + t * m->stride, b->embedded + t * m->width, m->width * sizeof(element));
    else for (int64_t t = 0; t < b->total; t++) {
        element *row = scratch->stream + t * m->stride;
        if (m->coded.bits) decode_row(&m->coded, b->tokens[t], row);
        else memcpy(row, m->embedding + b->tokens[t] * m->width, m->width * sizeof(element));
        if (m->scale != 1.0f) for (int64_t i = 0; i < m->width; i += LANES) store(row + i, load(row + i) * m->scale);
    }
    int64_t least = m->experts || m->taps ? 0 : b->total; /* convolutions read rows that are not wanted */
    for (int64_t r = 0; r < b->wanted; r++) least = b->rows[r] < least ? b->rows[r] : least;
    const int shared = threads > 1 && b->total >= SHARED && !m->experts; /* the caller's own inputs, of experts, lie where those of all threads do */
    const int64_t piece = !shared ? INT64_MAX / 2 : b->total < 4 * PIECE ? PIECE / 2 : PIECE;
    Job job = {.describe = shared ? describe_shared : describe_forward, .stride = m->stride, .least = least,
               .piece = piece, .model = m, .scratch = *scratch, .batch = *b, .logits = logits, .hidden = hidden};
    int64_t chunks = 0, longest = 0, steps;
    for (int64_t i = 0; i < b->segments; i++) {
        const Segment *s = b->segment + i;
        const int64_t of_request = (s->length + s->written + s->count + CHUNK - 1) / CHUNK;
        job.pieces += pieces_of(s, piece) * m->kv_heads;
        chunks = of_request > chunks ? of_request : chunks;
        longest = s->length > longest ? s->length : longest;
    }
    const int is_uneven = threads > 1 && job.pieces < 4 * threads; /* for one thread as much as for another there are too few */
    if (is_uneven && longest >= 2 * CHUNK && b->total * m->heads * chunks * (m->head + 2) <= scratch->found_room) job.chunks = chunks;
    for (int64_t i = 0; i < b->segments; i++) job.parts += pieces_of(b->segment + i, piece) * m->kv_heads * parts_of(&job, b->segment + i);
    steps_of_a_layer(&job, &steps);
    for (int64_t i = 0; i <= b->shown; i++) { /* up to each layer that is shown, then to the end */
        const int64_t end = i < b->shown ? b->layers[i] + 1 : m->layers;
        job.steps = ((end - job.begin) * steps + (i == b->shown && b->wanted ? 1 + (m->lm_head.outputs > 0) : 0)) * (1 + shared);
        if (job.steps) run_together(&job, threads);
        job.begin = end;
        for (int64_t r = 0; i < b->shown && r < b->wanted; r++)
            memcpy(b->vectors + (i * b->wanted + r) * m->width, scratch->stream + b->rows[r] * m->stride, m->width * sizeof(element));
    }
    return 0;
}

/* Draws token number `n` of a chain from a row of logits; returns 0 where there is none. */
static int draw_next(const Chain *c, const element *logits, int64_t n) {
    int64_t place;
    if (c->probs) {
        float *probs = c->probs + n * c->named, *own = c->names ? c->own : probs;
        ((void (*)(const element *, int64_t, int64_t, const float *, float *))c->softmax)(logits, 1, c->vocab, &c->temperature, own);
        ((void (*)(const float *, int64_t, int64_t, const double *, int64_t *))c->draw)(own, 1, c->vocab, c->uniforms + n, &place);
        if (place == c->vocab) return 0;
        c->chances[n] = own[place];
        if (c->names) {
            memset(probs, 0, c->named * sizeof *probs);
            for (int64_t i = 0; i < c->vocab; i++) probs[c->names[i]] = own[i];
        }
    } else {
        double found[2];
        ((void (*)(const element *, int64_t, int64_t, const void *, double *))c->largest)(logits, 1, c->vocab, NULL, found);
        if (found[0] == -INFINITY) return 0;
        place = (int64_t)found[1];
        if (c->looks) ((void (*)(const element *, int64_t, int64_t, const int64_t *, float *))c->token_probs)(logits, 1, c->vocab, &place, c->chances + n);
    }
    c->tokens[n] = c->names ? c->names[place] : place;
    return 1;
}

/* After a forward of one request's chain, which ends in the last token that is known, a chain of drawn ones, each read by a
 * forward of its own but for the last. `tokens` and `positions` have room for these. Returns how many were drawn; or less
 * than 0 for what a forward returns, with nothing computed. */
int64_t truedraft_chain(const Model *m, Batch *b, const Scratch *scratch, element *logits, element *hidden, int threads, const Chain *c) {
    static const int64_t only = 0;
    Segment own = *b->segment;
    double survival = 1.0;
    for (int64_t n = 0;; n++) {
        const int refused = truedraft_forward(m, b, scratch, logits, hidden, threads);
        if (refused) return -refused;
        if (!draw_next(c, logits, n)) return n;
        if (c->looks) {
            const double q = fmin(fmax(c->chances[n], c->least_known), 1.0 - c->least_known);
            survival *= 1.0 / (1.0 + exp(-c->odds) * pow((1.0 - q) / q, c->odds_slope));
            if (!(c->chances[n] >= c->least && survival >= c->floor)) return n + 1;
        }
        if (n + 1 == c->levels) return n + 1;
        b->tokens += b->total, b->positions += b->total;
        *(int64_t *)b->tokens = c->tokens[n];
        if (c->patterns) b->first = c->later + n * c->patterns;
        own.written += b->total, own.count = 1;
        b->segment = &own, b->total = 1, b->rows = &only;
    }
}

/* Copies the weights of some outputs, one behind another, to a layer that has no others. */
void truedraft_copy_outputs(const Linear *from, const int64_t *outputs, int64_t count, const Linear *to) {
    const int64_t cells = from->inputs / PER_CELL;
    for (int64_t o = 0; o < count; o++) {
        if (from->bits) copy_codes(from, outputs[o], to, o);
        else for (int64_t k = 0; k < cells; k++)
            ((cell *)to->weights)[(o / BLOCK * cells + k) * BLOCK + o % BLOCK] =
                from->weights[(outputs[o] / BLOCK * cells + k) * BLOCK + outputs[o] % BLOCK];
    }
}

/* Of rows of logits the ids of the `ranks` largest, with the logs of their probabilities. */
void truedraft_likeliest(const element *logits, int64_t rows, int64_t stride, int64_t vocab, int64_t ranks, float *values, int64_t *ids) {
    for (int64_t r = 0; r < rows; r++) {
        largest(logits + r * stride, vocab, ranks, values + r * ranks, ids + r * ranks);
        log_probabilities(logits + r * stride, vocab, ranks, 1.0f, values + r * ranks);
    }
}

static void describe_heads(const Job *job, int64_t step, Region *r) {
    const Heads *h = &job->heads;
    const Asked *a = &job->asked;
    const Scratch *s = &job->scratch;
    const int64_t stride = job->stride, all_rows = h->used * a->rows, each = a->rows * stride;
    const element *from = step == 0 ? s->stream : step % 2 ? s->mixed : s->active;
    if (step > h->layers) {
        items(r, RANK, 0, all_rows);
        return;
    }
    if (step == h->layers) {
        products(r, h->lm_head, STORE, from, stride, a->logits, units_of(h->lm_head) * UNIT, all_rows);
        return;
    }
    const Linear *l = h->block + step * h->heads;
    products(r, l, RESIDUAL, from, stride, step % 2 ? s->active : s->mixed, stride, a->rows);
    r->units *= h->used;
    r->y_apart = each;
    if (!step) return;
    r->sources = h->used;
    r->x_apart = each;
    r->inputs_apart = a->rows * input_floats(l);
}

/* Runs heads; without layers and with one head, the LM head alone. `stride` is that of the scratch. */
void truedraft_heads(const Heads *heads, const Asked *asked, const Scratch *scratch, int64_t stride, int threads) {
    for (int64_t r = 0; r < asked->rows; r++)
        memcpy(scratch->stream + r * stride, asked->hidden + r * heads->wide, heads->wide * sizeof(element));
    const Job job = {.describe = describe_heads, .steps = heads->layers + 1 + (asked->ranks > 0), .stride = stride, .scratch = *scratch,
                     .heads = *heads, .asked = *asked};
    run_together(&job, threads);
}
#endif
