/* Products by AMX's tiles: registers of up to 16 rows of 64 bytes, which one instruction multiplies.
 *
 * Of bfloat16 every product of a layer goes by them, those of a single row too, for they add in an order of their own: to
 * each sum 16 pairs of inputs by one instruction, whichever other rows and outputs it computes. Sums of quantised inputs
 * are whole numbers, so there either way gives the same bits, and few rows go by vectors.
 *
 * Of eight registers 0 to 3 hold sums, 4 and 5 rows of inputs, 6 and 7 weights of 16 outputs each, as they lie in memory:
 * of two sets of rows the sums are those of 2 by 2, of one set those of 1 by 4.
 */
#define TILE_ROWS 16
#define TILE_BYTES 64 /* of a row of a register */

typedef struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16]; /* of a row, by register */
    uint8_t rows[16];
} Shapes;

/* Compilers do not know that registers are loaded from memory. */
#define ALL_IS_WRITTEN __asm__ volatile("" ::: "memory")

/* Registers for two sets of rows, or for one where `second` is 0: so many bytes of each are multiplied at once. */
static void shape_tiles(int64_t first, int64_t second, int64_t bytes) {
    Shapes s = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        const int of_second = second && (t == 2 || t == 3 || t == 5);
        s.rows[t] = (uint8_t)(t > 5 ? bytes / 4 : of_second ? second : first);
        s.bytes[t] = (uint16_t)(t == 4 || t == 5 ? bytes : TILE_BYTES);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(s)); /* GCC 12 takes the function of that name to read 8 bytes of it */
}

static inline void no_sums(void) { _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); }

/* The four blocks of sums of one set of rows, which lie side by side. */
static inline void put_sums(void *to, int64_t stride) {
    _tile_stored(0, to, stride);
    _tile_stored(1, (char *)to + TILE_BYTES, stride);
    _tile_stored(2, (char *)to + 2 * TILE_BYTES, stride);
    _tile_stored(3, (char *)to + 3 * TILE_BYTES, stride);
}

/* Adds the products of one set of rows with four blocks of weights, so many bytes apart from each other. */
#define ADD_PRODUCTS(product, weights, apart) do { \
        _tile_loadd(6, weights, TILE_BYTES); \
        product(0, 4, 6); \
        _tile_loadd(7, (const char *)(weights) + (apart), TILE_BYTES); \
        product(1, 4, 7); \
        _tile_loadd(6, (const char *)(weights) + 2 * (apart), TILE_BYTES); \
        product(2, 4, 6); \
        _tile_loadd(7, (const char *)(weights) + 3 * (apart), TILE_BYTES); \
        product(3, 4, 7); \
    } while (0)

#if BF16
/* Sums of a unit of outputs with up to 16 rows. Inputs lie as `[pieces of 32][rows][32]`. */
static void few_tiled_rows(const cell *w, int64_t block, int64_t pieces, const char *x, int64_t rows, lanes (*sum)[SUMS]) {
    shape_tiles(rows, 0, TILE_BYTES);
    no_sums();
    for (int64_t k = 0; k < pieces; k++, w += TILE_ROWS * BLOCK) {
        _tile_loadd(4, x + k * rows * TILE_BYTES, TILE_BYTES);
        ADD_PRODUCTS(_tile_dpbf16ps, w, block * (int64_t)sizeof *w);
    }
    put_sums(sum, sizeof *sum);
}

/* Sums of two blocks of outputs with two sets of rows, which lie one behind the other, each as above. */
static inline void tiled_rows(const cell *w, int64_t block, int64_t pieces, const char *x, int64_t first, int64_t second, lanes (*sum)[SUMS]) {
    const char *y = x + pieces * first * TILE_BYTES;
    no_sums();
    for (int64_t k = 0; k < pieces; k++, w += TILE_ROWS * BLOCK) {
        _tile_loadd(4, x + k * first * TILE_BYTES, TILE_BYTES);
        _tile_loadd(6, w, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + block, TILE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, y + k * second * TILE_BYTES, TILE_BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sum[0], sizeof *sum);
    _tile_stored(1, sum[0] + 1, sizeof *sum);
    _tile_stored(2, sum[first], sizeof *sum);
    _tile_stored(3, sum[first] + 1, sizeof *sum);
}

/* A group of rows, in sets of `size`, against a unit of outputs: sums `[rows][SUMS]`. */
static void tiled_unit(const cell *w, int64_t block, int64_t pieces, const char *x, int64_t rows, int64_t size, lanes (*sum)[SUMS]) {
    const int64_t pairs = rows > size ? (rows + size - 1) / (2 * size) : 0, row = pieces * TILE_BYTES;
    for (int b = 0; b < SUMS; b += 2) /* weights of two blocks stay near while rows pass by */
        for (int64_t p = 0, r = 0; p < pairs; p++, r += 2 * size) {
            const int64_t second = rows - r < 2 * size ? rows - r - size : size;
            if (p == 0 || second < size) shape_tiles(size, second, TILE_BYTES);
            tiled_rows(w + b * block, block, pieces, x + r * row, size, second, (lanes(*)[SUMS])((lanes *)sum[r] + b));
        }
    if (rows > 2 * pairs * size) few_tiled_rows(w, block, pieces, x + 2 * pairs * size * row, rows - 2 * pairs * size, sum + 2 * pairs * size);
}
#endif
