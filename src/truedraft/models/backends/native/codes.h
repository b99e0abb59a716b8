/* Keys and values in codes of 8 bits, as truedraft/models/cache/buffers.py lays them out: a token's value in a head is its
 * codes, then their scale in float32; keys are the same, transposed, so that each byte of the scale has a line of its own.
 */
#define SCALE_BYTES 4
typedef int8_t code;

/* Bytes of a token's value in a head, or of its key. */
static inline int64_t entry_bytes(int64_t head, int64_t coded) { return coded ? head + SCALE_BYTES : head * (int64_t)sizeof(element); }

/* Entries of a head as codes. What is no number, or infinite, makes the scale none. `to` may lie in the place of x. */
static void encode(const element *x, int64_t head, code *to) {
    lanes most = {0}, none = {0};
    for (int64_t d = 0; d < head; d += LANES) {
        const lanes v = load(x + d);
        most = larger(absolute(v), most);
        none = none + v * 0.0f;
    }
    const float scale = largest_of(most) / 127.0f + total_of(none), divisor = scale > 0.0f ? scale : 1.0f;
    for (int64_t d = 0; d < head; d += LANES) {
        const bytes codes = as_bytes(__builtin_convertvector(whole(load(x + d) / divisor), ints));
        memcpy(to + d, &codes, sizeof codes);
    }
    memcpy(to + head, &scale, sizeof scale);
}

/* The scales of some slots' keys, whose first bytes lie here. */
static inline lanes key_scales(const code *first, int64_t capacity) {
    words scale = {0};
    for (int i = 0; i < SCALE_BYTES; i++) scale |= (words)load_octets((const uint8_t *)first + i * capacity) << 8 * i;
    return (lanes)scale;
}

#if PAIRED
/* Codes of 16 slots as pairs of bfloat16, which has them all, with those of the next entry of a head. */
static inline ints pairs_of_codes(const code *row, const code *next) {
    return (ints)((words)codes_as_numbers(row) >> 16 | (words)codes_as_numbers(next));
}
#endif

/* Some entries of a slot's value; codes are still to be multiplied by their scale. */
static inline lanes value_of(const element *values, int64_t slot, int64_t head, int64_t d, const int coded) {
    return coded ? codes_as_numbers((const code *)values + slot * (head + SCALE_BYTES) + d) : load(values + slot * head + d);
}

/* What these entries are multiplied by, for a weight. */
static inline float factor_of(float weight, const element *values, int64_t slot, int64_t head, const int coded) {
    float scale = 1.0f;
    if (coded) memcpy(&scale, (const code *)values + slot * (head + SCALE_BYTES) + head, sizeof scale);
    return coded ? weight * scale : weight;
}
