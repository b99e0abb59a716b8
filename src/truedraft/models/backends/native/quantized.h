/* Products with weights of 8, 6, 5 or 4 bits: those of quantised files, kept as the file has them, and those of drafts that
 * a model makes of itself.
 *
 * A weight is scale * (code - zero) + shift. Scales, zeros and shifts belong to an output and a group of 32 inputs (16 in
 * one layout, see `Scales`). Inputs are quantised as well, by the same groups, to 8 bits with a sign, so that sums of
 * products are whole numbers and exact. Groups are added in their order, in float32, so a row's sums depend on that row
 * alone.
 *
 * A unit of 64 outputs lies in one piece, as it is read, so that what follows can be prefetched while a group is multiplied
 * (with 8 rows memory and products take a third to three quarters longer without): [groups][head of 8 groups, before the first of them][scales][4 blocks of codes]. Of 8 bits
 * a block is [8 quads][16 outputs][4 inputs]; of 4 bits [4 pairs][16 outputs][4 inputs], where a byte holds codes of two
 * quads, that of the first in its lower half. Of 5 and 6 bits the lower 4 lie like that, and behind them the others:
 * of 5 [16 outputs][4 inputs], where bit q of a byte belongs to quad q; of 6 [2 halves][16 outputs][4 inputs], where bits
 * 2q and 2q + 1 belong to quad q of that half. Inputs behind the last have scales and shifts of 0.
 *
 * The file that includes this has vectors and Linear before, and `unit` behind it.
 */
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PER_SCALE 32
#define QUADS (PER_SCALE / 4)
#define PER_HEAD 8 /* groups that share a head */
#if TILES
#define TOGETHER (2 * TILE_ROWS) /* most rows that are computed together */
#else
#define TOGETHER 24
#endif
#ifndef PREFETCH_NEAR /* bytes from a group's weights to what is prefetched into the first cache; 0 for none */
#define PREFETCH_NEAR 0
#endif
#ifndef PREFETCH_FAR /* the same for the second */
#define PREFETCH_FAR 0
#endif
#ifndef PASSING /* whether weights that are read once are prefetched past the outer caches, where the processor can */
#define PASSING 0
#endif
#ifndef LEAST_TILED
#define LEAST_TILED 10 /* rows from which on tiles are quicker */
#endif
#if LANES == 16
#define EACH_VECTOR _Pragma("GCC unroll 4")
#else /* sums of more vectors find no room in registers */
#define EACH_VECTOR _Pragma("GCC unroll 1")
#endif

/* How scales lie, 64 of everything: in float16, but for whole numbers of 8 bits.
 * ONE: a scale; zero is the middle code. SHIFTED: a scale and a shift. ZEROED: a scale and a zero of 8 bits.
 * NESTED: in the head a scale of scales and one of shifts, which these, without a sign and of 8 bits, are multiplied by;
 * shifts are subtracted. HALVES: in the head a scale of scales, with a sign and of 8 bits, each for 16 inputs; zero is the
 * middle code. WIDE and WIDE_ZEROED: as ONE and ZEROED, scales in float32. */
enum { ONE, SHIFTED, ZEROED, NESTED, HALVES, WIDE, WIDE_ZEROED };

typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t octets __attribute__((vector_size(LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

static int64_t groups_of(const Linear *l) { return (l->inputs + PER_SCALE - 1) / PER_SCALE; }
static int64_t head_bytes(int64_t scales) { return scales == NESTED ? 4 * UNIT : scales == HALVES ? 2 * UNIT : 0; }
static int64_t scale_bytes(int64_t scales) {
    const int64_t each = scales == SHIFTED || scales == WIDE || scales == WIDE_ZEROED ? 4 : 2;
    return (each + (scales == ZEROED || scales == WIDE_ZEROED)) * UNIT;
}
static int64_t code_bytes(int64_t bits) { return UNIT * PER_SCALE * bits / 8; }
static int64_t unit_bytes(const Linear *l) {
    const int64_t groups = groups_of(l), heads = (groups + PER_HEAD - 1) / PER_HEAD;
    return heads * head_bytes(l->scales) + groups * (scale_bytes(l->scales) + code_bytes(l->bits));
}

/* Cells that a unit of outputs takes, whatever its weights are. */
static int64_t unit_cells(const Linear *l) {
    return l->bits ? unit_bytes(l) / (int64_t)sizeof(cell) : UNIT * (l->inputs / PER_CELL);
}

static inline lanes whole(lanes v) { const lanes magic = all(12582912.0f); return (v + magic) - magic; }
static inline lanes absolute(lanes v) { return (lanes)((words)v & 0x7fffffffu); }

/* Compilers take conversions over several sizes apart where they are not told the instruction. */
#if LANES == 16
static inline ints load_octets(const uint8_t *p) { return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline ints load_bytes(const int8_t *p) { return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline bytes as_bytes(ints v) { return (bytes)_mm512_cvtepi32_epi8((__m512i)v); }
static inline int32_t sum_of(ints v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
#if defined(__AVX2__) && LANES == 8
static inline ints load_octets(const uint8_t *p) { return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline ints load_bytes(const int8_t *p) { return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
#else
static inline ints load_octets(const uint8_t *p) { octets v; memcpy(&v, p, sizeof v); return __builtin_convertvector(v, ints); }
static inline ints load_bytes(const int8_t *p) { bytes v; memcpy(&v, p, sizeof v); return __builtin_convertvector(v, ints); }
#endif
static inline bytes as_bytes(ints v) { return __builtin_convertvector(v, bytes); }
static inline int32_t sum_of(ints v) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}
#endif

/* A group of a row's inputs: codes, their scale, their sum, and sums of each half. It takes less room than as floats. */
typedef struct {
    int8_t codes[PER_SCALE];
    float scale, sum;
    int32_t sums[2];
} Inputs;

/* Quantises the inputs of a group. */
static inline void quantize_inputs(const element *from, Inputs *to) {
    enum { VECTORS = PER_SCALE / LANES };
    lanes v[VECTORS], most = all(0.0f);
    ints sums[2] = {{0}, {0}};
    for (int i = 0; i < VECTORS; i++) v[i] = load(from + i * LANES), most = larger(absolute(v[i]), most);
    const float top = largest_of(most), finer = top > 0.0f ? 127.0f / top : 0.0f;
    for (int i = 0; i < VECTORS; i++) {
        const ints code = __builtin_convertvector(whole(v[i] * finer), ints);
        const bytes narrow = as_bytes(code);
        memcpy(to->codes + i * LANES, &narrow, sizeof narrow);
        sums[2 * i / VECTORS] += code;
    }
    to->scale = top / 127.0f;
    for (int h = 0; h < 2; h++) to->sums[h] = sum_of(sums[h]);
    to->sum = (float)(to->sums[0] + to->sums[1]);
}

/* A row of x as quantised inputs in the weight's order, groups `apart` from each other. */
static void gather_quantized(const Linear *l, const element *x, int64_t apart, Inputs *out) {
    for (int64_t g = 0; g < groups_of(l); g++) {
        const int64_t first = g * PER_SCALE, count = l->read - first < PER_SCALE ? l->read - first : PER_SCALE;
        if (!l->order && count == PER_SCALE) quantize_inputs(x + first, out + g * apart);
        else {
            element some[PER_SCALE] = {0};
            for (int64_t i = 0; i < count; i++) some[i] = x[l->order ? l->order[first + i] : first + i];
            quantize_inputs(some, out + g * apart);
        }
    }
}

/* Adds the products of 4 codes of each output with 4 inputs: by one instruction, or by two that multiply pairs of numbers
 * of 16 bits, or one by one. */
static inline MAY_BE_LATE ints dot(ints sum, words codes, const int8_t *inputs) {
    int32_t four;
    memcpy(&four, inputs, sizeof four);
#if defined(__AVX512VNNI__) && LANES == 16
#define DOT 2
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVX512BW__) && LANES == 16
#define DOT 1
    const __m512i in = _mm512_set1_epi32(four), even = _mm512_srai_epi16(_mm512_slli_epi16(in, 8), 8);
    sum += (ints)_mm512_madd_epi16((__m512i)(codes & 0x00ff00ffu), even);
    return sum + (ints)_mm512_madd_epi16((__m512i)(codes >> 8 & 0x00ff00ffu), _mm512_srai_epi16(in, 8));
#elif defined(__AVX2__) && LANES == 8
#define DOT 1
    const __m256i in = _mm256_set1_epi32(four), even = _mm256_srai_epi16(_mm256_slli_epi16(in, 8), 8);
    sum += (ints)_mm256_madd_epi16((__m256i)(codes & 0x00ff00ffu), even);
    return sum + (ints)_mm256_madd_epi16((__m256i)(codes >> 8 & 0x00ff00ffu), _mm256_srai_epi16(in, 8));
#else
#define DOT 0
    for (int i = 0; i < 4; i++) sum += (ints)(codes >> 8 * i & 255u) * (int32_t)(int8_t)(four >> 8 * i);
    return sum;
#endif
}

static inline words load_codes(const uint8_t *p) { words v; memcpy(&v, p, sizeof v); return v; }
static inline lanes octets_as_numbers(const uint8_t *p) { return __builtin_convertvector(load_octets(p), lanes); }
static inline lanes codes_as_numbers(const int8_t *p) { return __builtin_convertvector(load_bytes(p), lanes); }

/* Numbers of float16. */
static inline lanes load_scales(const uint8_t *p) {
    shorts v;
    memcpy(&v, p, sizeof v);
#if defined(__AVX512F__) && LANES == 16
    return (lanes)_mm512_cvtph_ps((__m256i)v);
#else
    const words bits = __builtin_convertvector(v, words); /* shifted to float32's places, exponents are 112 too small */
    return (lanes)((words)((lanes)((bits & 0x7fffu) << 13) * 0x1p112f) | (bits & 0x8000u) << 16);
#endif
}

/* The same rounded, ties to even. */
static inline shorts as_scales(lanes v) {
#if defined(__AVX512F__) && LANES == 16
    return (shorts)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#else
    const lanes size = absolute(v);
    const words bits = (words)size, normal = ((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - (112u << 10);
    const words small = (words)(size + 0.5f) - 0x3f000000u; /* the last place of 0.5 is float16's least step */
    const words whole = (words)choose(size < 0x1p-14f, (lanes)small, (lanes)normal);
    return __builtin_convertvector(whole | ((words)v >> 16 & 0x8000u), shorts);
#endif
}

static inline lanes as_float16(lanes v) { const shorts bits = as_scales(v); return load_scales((const uint8_t *)&bits); }

/* What makes a group's weights of codes, of one vector of outputs: scale of either half * (code - zero) + shift. */
typedef struct { lanes scale[2], shift; ints zero; } Maker;

static inline __attribute__((always_inline)) Maker maker_of(const uint8_t *head, const uint8_t *scales, const int bits, const int kind, int b) {
    const int at = b * LANES, each = kind == WIDE || kind == WIDE_ZEROED ? 4 : 2;
    Maker m = {.shift = all(0.0f), .zero = {0}};
    if (kind == ONE || kind == HALVES || kind == WIDE) m.zero = m.zero + (1 << (bits - 1));
    if (kind == HALVES)
        for (int h = 0; h < 2; h++) m.scale[h] = load_scales(head + 2 * at) * codes_as_numbers((const int8_t *)scales + h * UNIT + at);
    else if (kind == NESTED) {
        m.scale[0] = m.scale[1] = load_scales(head + 2 * at) * octets_as_numbers(scales + at);
        m.shift = -(load_scales(head + 2 * (UNIT + at)) * octets_as_numbers(scales + UNIT + at));
    } else if (each == 4) m.scale[0] = m.scale[1] = (lanes)load_codes(scales + 4 * at);
    else m.scale[0] = m.scale[1] = load_scales(scales + 2 * at);
    if (kind == SHIFTED) m.shift = load_scales(scales + 2 * (UNIT + at));
    if (kind == ZEROED || kind == WIDE_ZEROED) m.zero = load_octets(scales + each * UNIT + at);
    return m;
}

/* Codes of quad q of one vector of outputs. */
static inline __attribute__((always_inline)) words codes_at(const uint8_t *codes, const int bits, int q) {
    if (bits == 8) return load_codes(codes + q * BLOCK * 4);
    words low = load_codes(codes + q / 2 * BLOCK * 4) >> (q % 2 * 4) & 0x0f0f0f0fu;
    const uint8_t *others = codes + QUADS / 2 * BLOCK * 4;
    if (bits == 5) low |= (load_codes(others) >> q & 0x01010101u) << 4;
    if (bits == 6) low |= (load_codes(others + q / 4 * BLOCK * 4) >> (q % 4 * 2) & 0x03030303u) << 4;
    return low;
}

/* Prefetches as many bytes of what follows as a group's weights have. Weights that are read `once` before others have
 * taken their place in all caches are not kept in them: a draft's weights, keys and the host's own data are, then. */
static inline __attribute__((always_inline)) void prefetch_after(const uint8_t *w, int64_t bytes, const int once) {
    for (int64_t i = 0; i < bytes; i += 64) {
        if (PREFETCH_NEAR && PASSING && once) __builtin_prefetch(w + i + PREFETCH_NEAR, 0, 0);
        else if (PREFETCH_NEAR) __builtin_prefetch(w + i + PREFETCH_NEAR, 0, 3);
        if (PREFETCH_FAR) __builtin_prefetch(w + i + PREFETCH_FAR, 0, 2);
    }
}

/* What is taken off sums of codes and inputs, of a group or of one of its halves. */
static inline __attribute__((always_inline)) MAY_BE_LATE ints zeros_of(const Maker made, const int kind, const Inputs *in, int half) {
    return made.zero * (kind == HALVES ? in->sums[half] : in->sums[0] + in->sums[1]);
}

/* Adds a group's products with a row, or those of its halves, to its sums. */
static inline __attribute__((always_inline)) MAY_BE_LATE void add_row(
    const Maker made, const int kind, ints products, ints of_others, const Inputs *in, lanes *sum) {
    lanes group = __builtin_convertvector(products, lanes) * made.scale[0];
    if (kind == HALVES) group += __builtin_convertvector(of_others, lanes) * made.scale[1];
    if (kind == SHIFTED || kind == NESTED) group += made.shift * in->sum;
    *sum += group * in->scale;
}

/* Adds a group's products, of some rows with one vector of outputs, to their sums. */
static inline __attribute__((always_inline)) MAY_BE_LATE void add_group(
    const Maker made, const words *codes, const int kind, const Inputs *in, const int rows, lanes (*sum)[SUMS]) {
    const int halves = kind == HALVES ? 2 : 1;
    ints acc[4][2];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) acc[r][h] = (ints){0} - zeros_of(made, kind, in + r, h);
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; q++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            ints *to = &acc[r][halves * q / QUADS];
            *to = dot(*to, codes[q], in[r].codes + q * 4);
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) add_row(made, kind, acc[r][0], acc[r][1], in + r, sum[r]);
}

#if TILES
/* Products of a group with the rows of two sets, or of one, for each block of outputs: codes lie `apart` from each other. */
static inline __attribute__((always_inline)) void tiled_group(
    const uint8_t *codes, int64_t apart, const Inputs *x, int64_t first, int64_t second, const int half, ints *to, int64_t stride) {
    _tile_loadd(4, x->codes + half, sizeof *x);
    if (!second) {
        no_sums();
        ADD_PRODUCTS(_tile_dpbsud, codes, apart);
        put_sums(to, stride);
        return;
    }
    _tile_loadd(5, x[first].codes + half, sizeof *x);
    for (int b = 0; b < 4; b += 2, codes += 2 * apart, to += 2) {
        no_sums();
        _tile_loadd(6, codes, TILE_BYTES);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(2, 5, 6);
        _tile_loadd(7, codes + apart, TILE_BYTES);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(3, 5, 7);
        _tile_stored(0, to, stride);
        _tile_stored(1, to + 1, stride);
        _tile_stored(2, (char *)to + first * stride, stride);
        _tile_stored(3, (char *)to + first * stride + TILE_BYTES, stride);
    }
}

/* The same sums as those of `quantized_rows`, to the last bit. */
static inline __attribute__((always_inline)) void quantized_tiles(
    const uint8_t *w, int64_t groups, const int bits, const int kind, const Inputs *x, int64_t rows, int once, lanes (*sum)[SUMS]) {
    const int halves = kind == HALVES ? 2 : 1;
    const int64_t second = rows > TILE_ROWS ? rows / 2 : 0, first = rows - second, block = code_bytes(bits) / SUMS;
    const uint8_t *head = w;
    words codes[SUMS][QUADS];
    ints products[2][TOGETHER][SUMS];
    shape_tiles(first, second, PER_SCALE / halves);
    memset(sum, 0, rows * sizeof *sum);
    for (int64_t g = 0; g < groups; g++, w += code_bytes(bits), x += rows) {
        prefetch_after(w, scale_bytes(kind) + code_bytes(bits), once);
        if (g % PER_HEAD == 0) head = w, w += head_bytes(kind);
        const uint8_t *scales = w;
        w += scale_bytes(kind);
        for (int b = 0; b < SUMS && bits < 8; b++)
            for (int q = 0; q < QUADS; q++) codes[b][q] = codes_at(w + b * block, bits, q);
        ALL_IS_WRITTEN;
        const uint8_t *from = bits < 8 ? (const uint8_t *)codes : w;
        const int64_t apart = bits < 8 ? (int64_t)sizeof codes[0] : block;
        for (int h = 0; h < halves; h++)
            tiled_group(from + h * QUADS / 2 * TILE_BYTES, apart, x, first, second, h * PER_SCALE / 2, products[h][0], sizeof products[h][0]);
        EACH_VECTOR for (int b = 0; b < SUMS; b++) {
            const Maker made = maker_of(head, scales, bits, kind, b);
            for (int64_t r = 0; r < rows; r++)
                add_row(made, kind, products[0][r][b] - zeros_of(made, kind, x + r, 0),
                        products[1][r][b] - zeros_of(made, kind, x + r, 1), x + r, &sum[r][b]);
        }
    }
}
#endif

/* Some rows against one unit of outputs: what a group's codes are is found out once for all of them. What follows is
 * prefetched in equal shares between products: all at once, it holds these up where there are several rows. */
static inline __attribute__((always_inline)) MAY_BE_LATE void quantized_rows(
    const uint8_t *w, int64_t groups, const int bits, const int kind, const Inputs *x, int64_t rows, int once, lanes (*sum)[SUMS]) {
    const int64_t share = (scale_bytes(kind) + code_bytes(bits)) / SUMS;
    const uint8_t *head = w;
    memset(sum, 0, rows * sizeof *sum);
    for (int64_t g = 0; g < groups; g++, w += code_bytes(bits), x += rows) {
        const uint8_t *first = w;
        if (g % PER_HEAD == 0) head = w, w += head_bytes(kind);
        const uint8_t *scales = w;
        w += scale_bytes(kind);
        EACH_VECTOR for (int b = 0; b < SUMS; b++) {
            prefetch_after(first + b * share, share, once);
            const uint8_t *at = w + b * LANES / BLOCK * (code_bytes(bits) / (UNIT / BLOCK)) + b * LANES % BLOCK * 4;
            const Maker made = maker_of(head, scales, bits, kind, b);
            words codes[QUADS];
#pragma GCC unroll 8
            for (int q = 0; q < QUADS; q++) codes[q] = codes_at(at, bits, q);
            int64_t r = 0;
            for (; r + 4 <= rows; r += 4) add_group(made, codes, kind, x + r, 4, (lanes(*)[SUMS])&sum[r][b]);
            for (; r + 2 <= rows; r += 2) add_group(made, codes, kind, x + r, 2, (lanes(*)[SUMS])&sum[r][b]);
            if (r < rows) add_group(made, codes, kind, x + r, 1, (lanes(*)[SUMS])&sum[r][b]);
        }
    }
}

/* A tile of rows of quantised inputs against one unit of outputs, of one form that weights come in: sums `[rows][SUMS]`. */
typedef void Form(const uint8_t *w, int64_t groups, const Inputs *x, int64_t rows, int once, lanes (*sum)[SUMS]);
#if TILES
#define TILE_OF(B, K) \
    if (rows < LEAST_TILED * (K == HALVES ? 2 : 1)) quantized_rows(w, groups, B, K, x, rows, once, sum); \
    else quantized_tiles(w, groups, B, K, x, rows, once, sum);
#else
#define TILE_OF(B, K) quantized_rows(w, groups, B, K, x, rows, once, sum);
#endif
#define FORM(NAME, B, K) MAY_BE_LATE void NAME(const uint8_t *w, int64_t groups, const Inputs *x, int64_t rows, int once, lanes (*sum)[SUMS]) { TILE_OF(B, K) }

/* All forms, bits and kind, take longer to compile than all else, and a model has one to three of them. So a library may have
 * none (SEPARATE), and each be a library of its own (FORM_BITS, FORM_KIND), whose function is handed to the first. */
#define FORMS(F) F(8, ONE) F(8, SHIFTED) F(8, ZEROED) F(6, HALVES) F(5, ONE) F(5, SHIFTED) F(5, NESTED) F(4, ONE) F(4, SHIFTED) \
    F(4, ZEROED) F(4, NESTED) F(8, WIDE) F(8, WIDE_ZEROED) F(4, WIDE) F(4, WIDE_ZEROED)
#ifdef FORM_BITS
FORM(truedraft_form, FORM_BITS, FORM_KIND)
#else
#ifdef SEPARATE
static Form *forms[9 * 8];
#else
#define NAMED(B, K) static FORM(form_##B##_##K, B, K)
#define LISTED(B, K) [B * 8 + K] = form_##B##_##K,
FORMS(NAMED)
static Form *forms[9 * 8] = {FORMS(LISTED)};
#endif

void truedraft_take_form(int64_t bits, int64_t kind, Form *form) { forms[bits * 8 + kind] = form; }

/* By which of these products are made here: 2, 1 or 0. */
int truedraft_dot(void) { return DOT; }

static MAY_BE_LATE void quantized_tile(const Linear *l, int64_t at, const Inputs *x, int64_t rows, int once, lanes (*sum)[SUMS]) {
    forms[l->bits * 8 + l->scales]((const uint8_t *)(l->weights + at * unit_cells(l)), groups_of(l), x, rows, once, sum);
}

/* Some weights of a layer as numbers, as whoever wrote the file reads them: every product and sum is rounded. Outputs are
 * those of one vector of a unit, inputs those of a group. */
static __attribute__((noinline)) lanes times(lanes a, lanes b) { return a * b; } /* no sum is merged with it */
static __attribute__((noinline)) void decode(const Linear *l, int64_t at, int64_t g, int b, lanes weight[PER_SCALE]) {
    const int bits = (int)l->bits, kind = (int)l->scales;
    const int64_t both = scale_bytes(kind) + code_bytes(bits);
    const uint8_t *w = (const uint8_t *)(l->weights + at * unit_cells(l));
    const uint8_t *head = w + g / PER_HEAD * (head_bytes(kind) + PER_HEAD * both);
    const uint8_t *scales = head + head_bytes(kind) + g % PER_HEAD * both;
    const uint8_t *codes = scales + scale_bytes(kind) + b * LANES / BLOCK * (code_bytes(bits) / (UNIT / BLOCK)) + b * LANES % BLOCK * 4;
    const Maker made = maker_of(head, scales, bits, kind, b);
    for (int k = 0; k < PER_SCALE; k++) {
        const ints code = (ints)(codes_at(codes, bits, k / 4) >> k % 4 * 8 & 255u) - made.zero;
        weight[k] = times(made.scale[2 * k / PER_SCALE], __builtin_convertvector(code, lanes)) + made.shift;
    }
}

int64_t truedraft_unit_bytes(const Linear *l) { return unit_cells(l) * (int64_t)sizeof(cell); }

/* All weights of a layer as `[outputs][inputs]`. */
void truedraft_decode(const Linear *l, float *to) {
    lanes weight[PER_SCALE];
    for (int64_t at = 0; at * UNIT < l->outputs; at++)
        for (int64_t g = 0; g < groups_of(l); g++)
            for (int b = 0; b < SUMS; b++) {
                decode(l, at, g, b, weight);
                for (int i = 0; i < LANES && at * UNIT + b * LANES + i < l->outputs; i++)
                    for (int64_t k = 0, in = g * PER_SCALE; k < PER_SCALE && in < l->inputs; k++, in++)
                        to[(at * UNIT + b * LANES + i) * l->inputs + (l->order ? l->order[in] : in)] = weight[k][i];
            }
}

/* The weights of one output: of an embedding, a token's vector. */
static void decode_row(const Linear *l, int64_t output, element *to) {
    lanes weight[PER_SCALE];
    float some[LANES];
    const int64_t within = output % UNIT;
    for (int64_t g = 0; g < groups_of(l); g++) {
        decode(l, output / UNIT, g, (int)(within / LANES), weight);
        for (int64_t k = 0; k < PER_SCALE; k += LANES) {
            if (g * PER_SCALE + k >= l->inputs) return;
            for (int i = 0; i < LANES; i++) some[i] = weight[k + i][within % LANES];
            lanes read;
            memcpy(&read, some, sizeof read);
            store(to + g * PER_SCALE + k, read);
        }
    }
}

/* The same of some outputs: of an embedding, the vectors of tokens, `[count][inputs]`. */
void truedraft_look_up(const Linear *l, const int64_t *outputs, int64_t count, element *to) {
    for (int64_t i = 0; i < count; i++) decode_row(l, outputs[i], to + i * l->inputs);
}

static inline void add_bits(uint8_t *to, uint32_t four) { uint32_t v; memcpy(&v, to, 4), v |= four, memcpy(to, &v, 4); }

/* Lays `rows` outputs out, in blocks of 16 from block `first` on, each `apart` blocks behind the one before. */
void truedraft_lay_out(const Linear *l, const Coded *from, int64_t rows, int64_t first, int64_t apart) {
    const int64_t groups = groups_of(l), heads = (groups + PER_HEAD - 1) / PER_HEAD, bits = l->bits, kind = l->scales;
    const int64_t in_head = head_bytes(kind), both = scale_bytes(kind) + code_bytes(bits), each = in_head ? heads : groups;
    for (int64_t o = 0; o < rows; o++) {
        const int64_t block = first + o / BLOCK * apart, at = block % (UNIT / BLOCK) * BLOCK + o % BLOCK;
        uint8_t *unit = (uint8_t *)l->weights + block / (UNIT / BLOCK) * unit_bytes(l);
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *head = unit + g / PER_HEAD * (in_head + PER_HEAD * both), *own = head + in_head + g % PER_HEAD * both;
            uint8_t *codes = own + scale_bytes(kind) + block % (UNIT / BLOCK) * (code_bytes(bits) / (UNIT / BLOCK)) + o % BLOCK * 4;
            uint16_t *sixteen = (uint16_t *)(in_head ? head : own);
            const int64_t place = o * each + (in_head ? g / PER_HEAD : g);
            if (kind == WIDE || kind == WIDE_ZEROED) memcpy(own + 4 * at, from->scales + 2 * place, 4);
            else sixteen[at] = from->scales[place];
            if (from->shifts) sixteen[UNIT + at] = from->shifts[place];
            if (kind == NESTED) own[at] = from->inner[o * groups + g], own[UNIT + at] = from->lesser[o * groups + g];
            if (kind == HALVES) for (int h = 0; h < 2; h++) own[h * UNIT + at] = from->inner[(o * groups + g) * 2 + h];
            if (kind == ZEROED) own[2 * UNIT + at] = from->inner[o * groups + g];
            if (kind == WIDE_ZEROED) own[4 * UNIT + at] = from->inner[o * groups + g];
            const int64_t left = l->inputs - g * PER_SCALE;
            for (int64_t q = 0; q < QUADS && 4 * q < left; q++) { /* four codes at a time, a byte each */
                uint32_t four = 0;
                memcpy(&four, from->codes + o * l->inputs + g * PER_SCALE + 4 * q, left - 4 * q < 4 ? left - 4 * q : 4);
                uint8_t *others = codes + QUADS / 2 * BLOCK * 4;
                if (bits == 8) add_bits(codes + q * BLOCK * 4, four);
                else add_bits(codes + q / 2 * BLOCK * 4, (four & 0x0f0f0f0fu) << q % 2 * 4);
                if (bits == 5) add_bits(others, (four >> 4 & 0x01010101u) << q);
                if (bits == 6) add_bits(others + q / 4 * BLOCK * 4, (four >> 4 & 0x03030303u) << q % 4 * 2);
            }
        }
    }
}

/* Copies one output's weights to a place of another layer of the same form. */
static void copy_codes(const Linear *from, int64_t output, const Linear *to, int64_t place) {
    static const int64_t each[][2] = {[ONE] = {2}, [SHIFTED] = {2, 2}, [ZEROED] = {2, 1}, [NESTED] = {1, 1}, [HALVES] = {1, 1}, [WIDE] = {4}, [WIDE_ZEROED] = {4, 1}};
    const int64_t kind = from->scales, block = code_bytes(from->bits) / (UNIT / BLOCK), a = output % UNIT, b = place % UNIT;
    const uint8_t *w = (const uint8_t *)from->weights + output / UNIT * unit_bytes(from);
    uint8_t *out = (uint8_t *)to->weights + place / UNIT * unit_bytes(to);
    for (int64_t g = 0; g < groups_of(from); g++) {
        const int64_t heads = g % PER_HEAD ? 0 : head_bytes(kind) / (2 * UNIT);
        for (int64_t i = 0; i < heads; i++, w += 2 * UNIT, out += 2 * UNIT) memcpy(out + 2 * b, w + 2 * a, 2);
        for (int i = 0; i < 2; w += each[kind][i] * UNIT, out += each[kind][i] * UNIT, i++)
            memcpy(out + each[kind][i] * b, w + each[kind][i] * a, each[kind][i]);
        for (int64_t i = 0; i < block; i += BLOCK * 4)
            memcpy(out + b / BLOCK * block + i + b % BLOCK * 4, w + a / BLOCK * block + i + a % BLOCK * 4, 4);
        w += code_bytes(from->bits), out += code_bytes(from->bits);
    }
}

/* 0 of scales whose inverse is beyond numbers: weights that small become 0. */
static inline lanes inverse(lanes scale) { return choose(absolute(scale) < 1e-37f, all(0.0f), 1.0f / scale); }
static inline lanes clamped(lanes v, float low, float high) {
    return choose(v < low, all(low), choose(v > high, all(high), v));
}

/* The scales of some outputs' weights of one group: of 8 bits by the largest; of 4 bits what leaves the least squares, of
 * scales that put the weight of largest size near one of both ends. */
static lanes scales_for(const lanes *weight, int64_t bits) {
    lanes largest = all(0.0f), best = all(0.0f), least = all(__builtin_inff());
    for (int k = 0; k < PER_SCALE; k++) largest = larger(absolute(weight[k]), largest);
    if (bits == 8) return as_float16(largest / 127.0f);
    for (int n = 24; n <= 40; n++)
        for (int sign = -1; sign <= 1; sign += 2) {
            const lanes scale = as_float16(largest * (float)(sign * 4) / (float)n), finer = inverse(scale);
            lanes squares = all(0.0f);
            for (int k = 0; k < PER_SCALE; k++) {
                const lanes error = weight[k] - clamped(whole(weight[k] * finer), -8.0f, 7.0f) * scale;
                squares = squares + error * error;
            }
            const ints less = squares < least;
            best = choose(less, scale, best);
            least = choose(less, squares, least);
        }
    return best;
}

/* Quantises some units of a layer, to whose first `to` points, in the layout ONE. */
void truedraft_quantize(const Linear *from, int64_t first, int64_t units, int64_t bits, uint8_t *to) {
    const int64_t cells = from->inputs / PER_CELL, block = cells * BLOCK, groups = groups_of(from);
    const int64_t each = scale_bytes(ONE) + code_bytes(bits);
    to += first * groups * each;
    for (int64_t at = first; at < first + units; at++)
        for (int64_t g = 0; g < groups; g++, to += each) {
            memset(to, 0, each);
            for (int b = 0; b < SUMS; b++) {
                lanes weight[PER_SCALE];
                if (from->bits) {
                    const Linear *l = from;
                    int64_t own = at;
                    for (; l->more && own >= l->own; l = l->more) own -= l->own;
                    decode(l, own, g, b, weight);
                }
                else for (int k = 0; k < PER_SCALE; k++) {
                    const cell *w = from->weights + (at * (UNIT / BLOCK) + b * LANES / BLOCK) * block + b * LANES % BLOCK;
                    const int64_t input = g * PER_SCALE + k;
                    weight[k] = input < from->inputs ? part(load_cells(w + input / PER_CELL * BLOCK), input % PER_CELL) : all(0.0f);
                }
                const shorts kept = as_scales(scales_for(weight, bits));
                memcpy(to + b * LANES * sizeof(uint16_t), &kept, sizeof kept);
                const lanes finer = inverse(load_scales(to + b * LANES * sizeof(uint16_t)));
                uint8_t *codes = to + scale_bytes(ONE) + b * LANES / BLOCK * (code_bytes(bits) / (UNIT / BLOCK)) + b * LANES % BLOCK * 4;
                for (int k = 0; k < PER_SCALE; k++) {
                    const float end = bits == 8 ? 127.0f : 8.0f, middle = bits == 8 ? 128.0f : 8.0f;
                    const lanes code = clamped(whole(weight[k] * finer), -end, bits == 8 ? end : 7.0f) + middle;
                    const int64_t quad = k / 4, line = bits == 8 ? quad : quad / 2, up = bits == 8 ? 0 : quad % 2 * 4;
                    for (int i = 0; i < LANES; i++) codes[line * BLOCK * 4 + i * 4 + k % 4] |= (uint8_t)code[i] << up;
                }
            }
        }
}
#endif
