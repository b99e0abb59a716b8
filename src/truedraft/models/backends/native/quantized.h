/* Products with weights of 8 or 4 bits, for drafts that a model makes of itself.
 *
 * The weights of an output are quantised by groups of 32 inputs, each with a scale in bfloat16: a weight is scale times
 * (code - 128) of 8 bits, or scale times (code - 8) of 4. Inputs are quantised as well, by the same groups, to 8 bits
 * with a sign, so that sums of 32 products are whole numbers and exact. Groups are added in their order, in float32, so
 * a row's sums depend on that row alone.
 *
 * A unit of 64 outputs lies in one piece, as it is read, so that processors bring it near by themselves (asking for it
 * ahead took an eighth longer): [groups][64 scales, then 4 blocks of codes]. Of 8 bits a block is
 * [8 quads][16 outputs][4 inputs]; of 4 bits [4 pairs][16 outputs][4 inputs], where a byte holds codes of two quads, that
 * of the first in its lower half. Inputs behind the last have weights of 0.
 *
 * The file that includes this has vectors and Linear before, and `unit` behind it.
 */
#if defined(__AVX512VNNI__) && LANES == 16 && !BF16
#include <immintrin.h>
#endif

#define PER_SCALE 32
#define QUADS (PER_SCALE / 4)
#define TOGETHER 4 /* most rows that are computed together */

typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

static int64_t groups_of(const Linear *l) { return (l->inputs + PER_SCALE - 1) / PER_SCALE; }
static int64_t group_bytes(int64_t bits) { return UNIT * (int64_t)sizeof(uint16_t) + UNIT * PER_SCALE * bits / 8; }

/* Cells that a unit of outputs takes, whatever its weights are. */
static int64_t unit_cells(const Linear *l) {
    return l->bits ? groups_of(l) * group_bytes(l->bits) / (int64_t)sizeof(cell) : UNIT * (l->inputs / PER_CELL);
}

static inline lanes whole(lanes v) { const lanes magic = all(12582912.0f); return (v + magic) - magic; }
static inline lanes larger(lanes a, lanes b) { return choose(a > b, a, b); }
static inline lanes absolute(lanes v) { return (lanes)((words)v & 0x7fffffffu); }

/* A row as quantised inputs: codes of whole groups, then scales, then sums of codes. It takes less room than as floats. */
typedef struct {
    const int8_t *codes;
    const float *scales;
    const int32_t *sums;
} Row;

static inline Row row_at(const float *x, int64_t groups) {
    const int8_t *codes = (const int8_t *)x;
    const float *scales = (const float *)(codes + groups * PER_SCALE);
    return (Row){codes, scales, (const int32_t *)(scales + groups)};
}

/* Rows of x `[rows][stride]` as quantised inputs, one row for every `read` floats. */
static void gather_quantized(const Linear *l, const element *x, int64_t stride, int64_t rows, float *out) {
    const int64_t groups = groups_of(l), inputs = l->read;
    for (int64_t r = 0; r < rows; r++, x += stride, out += inputs) {
        const Row row = row_at(out, groups);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t count = inputs - g * PER_SCALE < PER_SCALE ? inputs - g * PER_SCALE : PER_SCALE;
            const element *from = x + g * PER_SCALE;
            int8_t *codes = (int8_t *)row.codes + g * PER_SCALE;
            lanes most = all(0.0f);
            for (int64_t i = 0; i < count; i += LANES) most = larger(absolute(load(from + i)), most);
            float top = most[0];
            for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
            const float finer = top > 0.0f ? 127.0f / top : 0.0f;
            ints sums = {0};
            memset(codes, 0, PER_SCALE);
            for (int64_t i = 0; i < count; i += LANES) {
                const ints code = __builtin_convertvector(whole(load(from + i) * finer), ints);
                const bytes narrow = __builtin_convertvector(code, bytes);
                memcpy(codes + i, &narrow, sizeof narrow);
                sums += code;
            }
            int32_t sum = 0;
            for (int i = 0; i < LANES; i++) sum += sums[i];
            ((float *)row.scales)[g] = top / 127.0f;
            ((int32_t *)row.sums)[g] = sum;
        }
    }
}

/* Adds the products of 4 codes of each output with 4 inputs. */
static inline ints dot(ints sum, words codes, const int8_t *inputs) {
    int32_t four;
    memcpy(&four, inputs, sizeof four);
#if defined(__AVX512VNNI__) && LANES == 16
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#else
    for (int i = 0; i < 4; i++) sum += (ints)(codes >> 8 * i & 255u) * (int32_t)(int8_t)(four >> 8 * i);
    return sum;
#endif
}

static inline words load_codes(const uint8_t *p) { words v; memcpy(&v, p, sizeof v); return v; }
static inline lanes load_scales(const uint8_t *p) {
    shorts v;
    memcpy(&v, p, sizeof v);
    return (lanes)(__builtin_convertvector(v, words) << 16);
}

/* Up to TOGETHER rows, `apart` floats from each other, against one unit of outputs. */
static inline __attribute__((always_inline)) void quantized_rows(
    const uint8_t *w, int64_t groups, const int bits, const float *x, int64_t apart, const int rows, lanes (*sum)[SUMS]) {
    const int32_t middle = bits == 8 ? 128 : 8;
    Row row[TOGETHER];
    lanes total[TOGETHER][SUMS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        row[r] = row_at(x + r * apart, groups);
#pragma GCC unroll 16
        for (int b = 0; b < SUMS; b++) total[r][b] = all(0.0f);
    }
    for (int64_t g = 0; g < groups; g++, w += group_bytes(bits)) {
#pragma GCC unroll 16
        for (int b = 0; b < SUMS; b++) {
            const int block = b * LANES / BLOCK, within = b * LANES % BLOCK * 4;
            const uint8_t *codes = w + UNIT * sizeof(uint16_t) + block * (BLOCK * PER_SCALE * bits / 8) + within;
            ints acc[TOGETHER];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) acc[r] = (ints){0} - middle * row[r].sums[g];
#pragma GCC unroll 8
            for (int q = 0; q < QUADS; q += 8 / bits) {
                const uint8_t *some = codes + q * bits / 8 * BLOCK * 4;
                const words read = load_codes(some);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    const int8_t *in = row[r].codes + g * PER_SCALE + q * 4;
                    if (bits == 8) acc[r] = dot(acc[r], read, in);
                    else acc[r] = dot(dot(acc[r], read & 0x0f0f0f0fu, in), read >> 4 & 0x0f0f0f0fu, in + 4);
                }
            }
            const lanes scale = load_scales(w + b * LANES * sizeof(uint16_t));
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) total[r][b] += __builtin_convertvector(acc[r], lanes) * (scale * row[r].scales[g]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int b = 0; b < SUMS; b++) sum[r][b] = total[r][b];
}

/* Rows of quantised inputs against one unit of outputs: sums `[rows][SUMS]`. */
static void quantized_unit(const Linear *l, int64_t at, const float *x, int64_t rows, lanes (*sum)[SUMS]) {
    const uint8_t *w = (const uint8_t *)(l->weights + at * unit_cells(l));
    const int64_t groups = groups_of(l);
    for (int64_t r = 0; r < rows; r += TOGETHER) {
        const int64_t rest = rows - r;
        switch (rest < TOGETHER ? rest : TOGETHER) {
#define CASE(R) case R: \
            if (l->bits == 8) quantized_rows(w, groups, 8, x + r * l->read, l->read, R, sum + r); \
            else quantized_rows(w, groups, 4, x + r * l->read, l->read, R, sum + r); \
            break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
    }
}

/* A number in bfloat16, as its bits and rounded. */
static inline lanes as_bfloat16(lanes v) {
    const words bits = (words)v;
    return (lanes)((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
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
    if (bits == 8) return as_bfloat16(largest / 127.0f);
    for (int n = 24; n <= 40; n++)
        for (int sign = -1; sign <= 1; sign += 2) {
            const lanes scale = as_bfloat16(largest * (float)(sign * 4) / (float)n), finer = inverse(scale);
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

/* Quantises some units of a layer, to whose first `to` points. */
void truedraft_quantize(const Linear *from, int64_t first, int64_t units, int64_t bits, uint8_t *to) {
    const int64_t cells = from->inputs / PER_CELL, block = cells * BLOCK, groups = groups_of(from);
    to += first * groups * group_bytes(bits);
    for (int64_t at = first; at < first + units; at++)
        for (int64_t g = 0; g < groups; g++, to += group_bytes(bits)) {
            memset(to, 0, group_bytes(bits));
            for (int b = 0; b < SUMS; b++) {
                const cell *w = from->weights + (at * (UNIT / BLOCK) + b * LANES / BLOCK) * block + b * LANES % BLOCK;
                lanes weight[PER_SCALE];
                for (int k = 0; k < PER_SCALE; k++) {
                    const int64_t input = g * PER_SCALE + k;
                    weight[k] = input < from->inputs ? part(load_cells(w + input / PER_CELL * BLOCK), input % PER_CELL) : all(0.0f);
                }
                const lanes scale = scales_for(weight, bits), finer = inverse(scale);
                const shorts kept = __builtin_convertvector((words)scale >> 16, shorts);
                memcpy(to + b * LANES * sizeof(uint16_t), &kept, sizeof kept);
                uint8_t *codes = to + UNIT * sizeof(uint16_t) + b * LANES / BLOCK * (BLOCK * PER_SCALE * bits / 8) + b * LANES % BLOCK * 4;
                for (int k = 0; k < PER_SCALE; k++) {
                    const float end = bits == 8 ? 127.0f : 8.0f, middle = bits == 8 ? 128.0f : 8.0f;
                    const lanes code = clamped(whole(weight[k] * finer), -end, bits == 8 ? end : 7.0f) + middle;
                    const int64_t quad = k / 4, line = bits == 8 ? quad : quad / 2, up = bits == 8 ? 0 : quad % 2 * 4;
                    for (int i = 0; i < LANES; i++) codes[line * BLOCK * 4 + i * 4 + k % 4] |= (uint8_t)code[i] << up;
                }
            }
        }
}
