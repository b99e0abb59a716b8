/* Distributions over the vocabulary and draws from them: what `probs.py` defines, in few passes over a row.
 *
 * Vectors are GNU C's. Sums over a row have one fixed order, so a row's result does not depend on other rows.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define PIECE 512 /* entries whose sum is known when a token is looked for */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline lanes all(float x) { return x - (lanes){0}; }
static inline lanes choose(ints mask, lanes yes, lanes no) { return (lanes)(((ints)yes & mask) | ((ints)no & ~mask)); }

/* Up to LANES numbers of a row's rest, the others `otherwise`. */
static inline lanes load(const float *from, int64_t count, float otherwise) {
    lanes v = all(otherwise);
    if (count >= LANES) memcpy(&v, from, sizeof v);
    else memcpy(&v, from, count * sizeof *from);
    return v;
}
/* The same of bfloat16. */
static inline lanes load_halves(const uint16_t *from, int64_t count, float otherwise) {
    halves h = {0};
    if (count >= LANES) memcpy(&h, from, sizeof h);
    else memcpy(&h, from, count * sizeof *from);
    lanes v = (lanes)(__builtin_convertvector(h, words) << 16);
    for (int64_t i = count; i < LANES; i++) v[i] = otherwise;
    return v;
}
static inline void store(float *to, int64_t count, lanes v) {
    if (count >= LANES) memcpy(to, &v, sizeof v);
    else memcpy(to, &v, count * sizeof *to);
}
static inline float sum_of(lanes v) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

/* e^x for x <= 0 to about 2 ulp (Cephes); 0 below -87. */
static inline lanes exponential(lanes x) {
    const lanes magic = all(12582912.0f), least = all(-87.0f); /* adding and subtracting magic rounds to a whole number */
    const ints small = x < least;
    const lanes low = choose(small, least, x), n = (low * 1.44269504f + magic) - magic;
    const lanes r = (low - n * 0.693359375f) + n * 2.12194440e-4f;
    lanes p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    p = p * (lanes)((__builtin_convertvector(n, ints) + 127) << 23);
    return choose(small, all(0.0f), p);
}

/* Of `[rows][vocab]` softmax(logits / temperature), and that of one token of each row at temperature 1; NaN in rows with NaN,
 * or without a finite largest logit. */
#define DISTRIBUTIONS(SUFFIX, TYPE, LOAD) \
static float largest_of##SUFFIX(const TYPE *logits, int64_t vocab) { \
    lanes most = all(-INFINITY); \
    ints none = {0}; \
    for (int64_t v = 0; v < vocab; v += LANES) { \
        const lanes x = LOAD(logits + v, vocab - v, -INFINITY); \
        most = choose(x > most, x, most); \
        none |= x != x; \
    } \
    float top = -INFINITY; \
    int32_t any = 0; \
    for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top, any |= none[i]; \
    return any || !(top < INFINITY && top > -INFINITY) ? NAN : top; \
} \
void truedraft_softmax##SUFFIX(const TYPE *logits, int64_t rows, int64_t vocab, const float *temperature, float *probs) { \
    for (int64_t row = 0; row < rows; row++, logits += vocab, probs += vocab) { \
        const float top = largest_of##SUFFIX(logits, vocab), inverse = fminf(1.0f / temperature[row], 3e38f); \
        if (top != top) { \
            for (int64_t v = 0; v < vocab; v++) probs[v] = NAN; \
            continue; \
        } \
        double total = 0.0; \
        for (int64_t from = 0; from < vocab; from += PIECE) { \
            const int64_t end = from + PIECE < vocab ? from + PIECE : vocab; \
            lanes sum = all(0.0f); \
            for (int64_t v = from; v < end; v += LANES) { \
                const lanes e = exponential((LOAD(logits + v, end - v, -INFINITY) - top) * inverse); \
                sum += e; \
                store(probs + v, end - v, e); \
            } \
            total += sum_of(sum); \
        } \
        const float scale = (float)(1.0 / total); \
        for (int64_t v = 0; v < vocab; v++) probs[v] *= scale; \
    } \
} \
void truedraft_token_probs##SUFFIX(const TYPE *logits, int64_t rows, int64_t vocab, const int64_t *tokens, float *probs) { \
    for (int64_t row = 0; row < rows; row++, logits += vocab) { \
        const float top = largest_of##SUFFIX(logits, vocab); \
        double total = 0.0; \
        for (int64_t from = 0; from < vocab && top == top; from += PIECE) { \
            const int64_t end = from + PIECE < vocab ? from + PIECE : vocab; \
            lanes sum = all(0.0f); \
            for (int64_t v = from; v < end; v += LANES) sum += exponential(LOAD(logits + v, end - v, -INFINITY) - top); \
            total += sum_of(sum); \
        } \
        const int64_t token = tokens[row]; \
        probs[row] = token == vocab ? 0.0f : exponential(LOAD(logits + token, 1, -INFINITY) - top)[0] / (top == top ? total : NAN); \
    } \
}
DISTRIBUTIONS(, float, load)
DISTRIBUTIONS(_halves, uint16_t, load_halves)

/* Of each of `[rows][vocab]` the largest entry, or a NaN, and its place: the first of equal ones. To `[2][rows]`.
 * Floats are in the order of the whole numbers `key`; 0.0 and -0.0 have the same, and NaN lies beyond the infinities. */
#define LARGEST(NAME, TYPE, INT, INFINITE, AS_FLOAT) \
static inline INT NAME##_key(INT bits) { \
    const INT key = bits ^ (INT)((bits >> (8 * sizeof(INT) - 1)) & ((INFINITE) | ((INFINITE) - 1))); \
    return key + (key == -1); \
} \
void NAME(const TYPE *values, int64_t rows, int64_t vocab, const void *none, double *found) { \
    for (int64_t row = 0; row < rows; row++, values += vocab) { \
        const INT *bits = (const INT *)values; \
        INT most = NAME##_key(bits[0]), least = most; \
        int64_t piece = 0; \
        for (int64_t from = 0; from < vocab; from += PIECE) { \
            const int64_t end = from + PIECE < vocab ? from + PIECE : vocab; \
            INT high = most; \
            for (int64_t v = from; v < end; v++) { \
                const INT key = NAME##_key(bits[v]); \
                high = key > high ? key : high; \
                least = key < least ? key : least; \
            } \
            if (high > most) most = high, piece = from; \
        } \
        const int nan = most > (INFINITE) || least < -(INFINITE) - 1; \
        int64_t place = nan ? 0 : piece; \
        for (; place < vocab; place++) { \
            const INT key = NAME##_key(bits[place]); \
            if (nan ? key > (INFINITE) || key < -(INFINITE) - 1 : key == most) break; \
        } \
        const TYPE value = values[place]; \
        found[row] = AS_FLOAT(value), found[rows + row] = place; \
    } \
}
static inline float as_float(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
LARGEST(truedraft_largest, float, int32_t, 0x7f800000, )
LARGEST(truedraft_largest_halves, uint16_t, int16_t, 0x7f80, as_float)

/* norm(max(0, p - q)) of `[rows][vocab]`; p where nothing is left. */
void truedraft_residual(const float *p, int64_t rows, int64_t vocab, const float *q, float *left) {
    for (int64_t row = 0; row < rows; row++, p += vocab, q += vocab, left += vocab) {
        double total = 0.0;
        for (int64_t from = 0; from < vocab; from += PIECE) {
            const int64_t end = from + PIECE < vocab ? from + PIECE : vocab;
            lanes sum = all(0.0f);
            for (int64_t v = from; v < end; v += LANES) {
                const lanes d = load(p + v, end - v, 0.0f) - load(q + v, end - v, 0.0f), more = choose(d < 0.0f, all(0.0f), d);
                sum += more;
                store(left + v, end - v, more);
            }
            total += sum_of(sum);
        }
        if (total <= 0.0) memcpy(left, p, vocab * sizeof *p);
        const float scale = total <= 0.0 ? 1.0f : (float)(1.0 / total);
        for (int64_t v = 0; v < vocab; v++) left[v] *= scale;
    }
}

/* Of each of `[rows][vocab]` the sum, and the least entry, to `[2][rows]`; where an entry is NaN the sum is NaN. */
void truedraft_sums(const float *values, int64_t rows, int64_t vocab, const void *none, float *found) {
    for (int64_t row = 0; row < rows; row++, values += vocab) {
        double total = 0.0;
        lanes least = all(INFINITY);
        for (int64_t from = 0; from < vocab; from += PIECE) {
            const int64_t end = from + PIECE < vocab ? from + PIECE : vocab;
            lanes sum = all(0.0f);
            for (int64_t v = from; v < end; v += LANES) {
                const lanes x = load(values + v, end - v, 0.0f), low = load(values + v, end - v, INFINITY);
                least = choose(low < least, low, least);
                sum += x;
            }
            total += sum_of(sum);
        }
        float lowest = INFINITY;
        for (int i = 0; i < LANES; i++) lowest = least[i] < lowest ? least[i] : lowest;
        found[row] = (float)total, found[rows + row] = lowest;
    }
}

/* For each of rows `[rows][vocab]` the first token at which the cumulative sum exceeds `uniform` of the whole sum, in float64;
 * `vocab` for a row without mass, or not finite. */
void truedraft_draw(const float *weights, int64_t rows, int64_t vocab, const double *uniform, int64_t *tokens) {
    const int64_t pieces = (vocab + PIECE - 1) / PIECE;
    for (int64_t row = 0; row < rows; row++, weights += vocab) {
        double upto[pieces + 1];
        upto[0] = 0.0;
        for (int64_t b = 0; b < pieces; b++) {
            const int64_t end = (b + 1) * PIECE < vocab ? (b + 1) * PIECE : vocab;
            double sum[16] = {0}, piece = 0.0;
            int64_t v = b * PIECE;
            for (; v + 16 <= end; v += 16)
                for (int i = 0; i < 16; i++) sum[i] += weights[v + i];
            for (; v < end; v++) piece += weights[v];
            for (int i = 0; i < 16; i++) piece += sum[i];
            upto[b + 1] = upto[b] + piece;
        }
        const double wanted = upto[pieces] * fmin(uniform[row], 0x1.fffffffffffffp-1);
        int64_t b = 0, found = vocab;
        while (b < pieces && !(upto[b + 1] > wanted)) b++; /* also where a sum is no number */
        double reached = upto[b < pieces ? b : 0];
        for (int64_t v = b * PIECE; v < vocab && v < (b + 1) * PIECE; v++) {
            if (weights[v] > 0.0f) found = v; /* the last one of the piece, where rounding hides the crossing */
            if ((reached += weights[v]) > wanted) break;
        }
        tokens[row] = found;
    }
}
