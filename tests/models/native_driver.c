/* Runs the kernels of decoder.c over inputs that are the same on every processor, and prints what they give, by names:
 * numbers whose name begins with "codes" are whole and must be equal, others up to the order of sums. */
#include "decoder.c"
#include <stdio.h>
#include <stdlib.h>

static uint32_t state = 1;
static uint32_t drawn(uint32_t below) { state = state * 1664525u + 1013904223u; return (uint32_t)((uint64_t)(state >> 8) * below >> 24); }
static float number(float scale) {
    volatile float drawn_one = scale * ((float)drawn(1 << 16) / 32768.0f - 1.0f); /* no sum is merged with it */
    return drawn_one;
}
static void *memory(int64_t bytes) { void *p = aligned_alloc(128, (bytes + 255) / 128 * 128); memset(p, 0, (bytes + 255) / 128 * 128); return p; }

static element as_element(float v) {
#if BF16
    uint32_t bits; memcpy(&bits, &v, sizeof bits); return (element)(bits >> 16);
#else
    return v;
#endif
}

static element *elements(int64_t count, float scale, float around) {
    element *p = memory(count * sizeof *p);
    for (int64_t i = 0; i < count; i++) p[i] = as_element(around + number(scale));
    return p;
}

static void print(const char *name, const element *v, int64_t count) {
    printf("%s:", name);
    for (int64_t i = 0; i < count; i++) printf(" %.9g", wide(v[i]));
    printf("\n");
}

static void print_floats(const char *name, const float *v, int64_t count) {
    printf("%s:", name);
    for (int64_t i = 0; i < count; i++) printf(" %.9g", v[i]);
    printf("\n");
}

static void print_codes(const char *name, const uint8_t *v, int64_t count) {
    printf("codes of %s:", name);
    for (int64_t i = 0; i < count; i++) printf(" %d", v[i]);
    printf("\n");
}

static Linear packed_linear(int64_t outputs, int64_t inputs, float scale) {
    Linear l = {.inputs = inputs, .outputs = outputs, .read = inputs};
    element *weights = elements(outputs * inputs, scale, 0.0f);
    cell *cells = memory((outputs + UNIT) * inputs * sizeof(element));
    truedraft_pack((const cell *)weights, outputs, inputs / PER_CELL, cells, 1);
    l.weights = cells;
    free(weights);
    return l;
}

/* Products with rows of x, through the same steps as a region's. */
static void print_products(const char *name, const Linear *l) {
    static const int counts[] = {1, 2, 3, 4, 5, 7, 8, 13};
    const int64_t units = (l->outputs + UNIT - 1) / UNIT;
    for (int c = 0; c < 8; c++) {
        const int rows = counts[c];
        char both[64];
        element *x = elements(rows * l->inputs, 1.0f, 0.0f);
        float *inputs = memory(rows * input_floats(l) * sizeof(float)), *out = memory(rows * UNIT * units * sizeof(float));
        lanes(*sum)[SUMS] = memory(GROUP * sizeof *sum);
        arrange(l, x, l->inputs, rows, inputs);
        for (int64_t at = 0; at < units; at++) {
            unit(l, at, inputs, rows, tile_rows(l, rows), 0, sum);
            for (int r = 0; r < rows; r++) memcpy(out + (r * units + at) * UNIT, sum[r], UNIT * sizeof(float));
        }
        snprintf(both, sizeof both, "%s by %d rows", name, rows);
        print_floats(both, out, rows * UNIT * units);
    }
}

/* A quantised layer of random codes: of 130 outputs and 3 groups of inputs, the last of which is not whole. */
static void print_quantized(int64_t bits, int64_t kind) {
    const int64_t outputs = 130, inputs = 80, groups = 3;
    Linear l = {.inputs = inputs, .outputs = outputs, .read = inputs, .bits = bits, .scales = kind};
    uint8_t *codes = memory(outputs * inputs), *inner = memory(2 * outputs * groups), *lesser = memory(outputs * groups);
    uint16_t *scales = memory(4 * outputs * groups), *shifts = memory(2 * outputs * groups);
    for (int i = 0; i < outputs * inputs; i++) codes[i] = (uint8_t)drawn(1u << bits);
    for (int i = 0; i < outputs * groups; i++) {
        const float own = (float)(1 + drawn(1000)) / 65536.0f;
        if (kind == WIDE || kind == WIDE_ZEROED) memcpy((float *)scales + i, &own, sizeof own);
        else scales[i] = (uint16_t)(0x2000 + drawn(0x800));
        shifts[i] = (uint16_t)(0x2800 + drawn(0x800) + 0x8000 * drawn(2)), lesser[i] = (uint8_t)drawn(64);
        inner[2 * i] = (uint8_t)drawn(64), inner[2 * i + 1] = (uint8_t)drawn(256);
    }
    l.weights = memory((outputs + UNIT - 1) / UNIT * unit_bytes(&l));
    const Coded from = {codes, scales, kind == SHIFTED || kind == NESTED ? shifts : NULL, inner, lesser};
    truedraft_lay_out(&l, &from, outputs, 0, 1);
    char name[64];
    snprintf(name, sizeof name, "%d bits of kind %d", (int)bits, (int)kind);
    print_codes(name, (const uint8_t *)l.weights, (outputs + UNIT - 1) / UNIT * unit_bytes(&l));
    float *numbers = memory(outputs * inputs * sizeof *numbers);
    truedraft_decode(&l, numbers);
    snprintf(name, sizeof name, "numbers of %d bits of kind %d", (int)bits, (int)kind);
    print_floats(name, numbers, outputs * inputs);
    const int64_t some[] = {3, 129, 64};
    element *rows = memory(3 * (inputs + 32) * sizeof *rows);
    truedraft_look_up(&l, some, 3, rows);
    print("vectors looked up", rows, 3 * inputs);
    snprintf(name, sizeof name, "%d bits of kind %d", (int)bits, (int)kind);
    print_products(name, &l);
}

enum { WIDTH = 64, HEADS = 4, KV_HEADS = 2, HEAD = 32, INNER = 96, LAYERS = 2, VOCAB = 100, CAPACITY = 64, ROWS_FED = 11 };

static Scratch scratch_of(int64_t stride, int threads, int64_t chosen, int64_t experts) {
    const int64_t rows = GROUP, room = rows * stride * (1 + chosen), keys = 128, slots = rows * (chosen + 1);
    return (Scratch){
        memory(rows * stride * sizeof(element)), memory(rows * stride * sizeof(element)), memory(rows * stride * sizeof(element)),
        memory(rows * stride * sizeof(element)), memory(threads * rows * stride * sizeof(element)), memory(threads * room * 4),
        memory(threads * 2 * QUERIES * keys * 4), memory(slots * stride * sizeof(element)), memory(slots * stride * sizeof(element)),
        memory(slots * 8), memory(slots * 4), memory(threads * (5 * slots + experts + chosen + 2) * 4), NULL, rows, keys,
        room, 5 * slots + experts + chosen + 2, 0};
}

/* A line of the cache for each key or value of a head: numbers as codes, transposed or not, and back. */
static element *as_codes(const element *numbers, int transposed) {
    const int64_t bytes = entry_bytes(HEAD, 1);
    code *made = memory(KV_HEADS * bytes * CAPACITY), codes[HEAD + SCALE_BYTES];
    for (int64_t h = 0; h < KV_HEADS; h++)
        for (int64_t t = 0; t < CAPACITY; t++) {
            encode(numbers + (h * CAPACITY + t) * HEAD, HEAD, codes);
            for (int64_t d = 0; d < bytes; d++) made[h * bytes * CAPACITY + (transposed ? d * CAPACITY + t : t * bytes + d)] = codes[d];
        }
    return (element *)made;
}

static void print_decoded(const char *name, const element *stored, int transposed) {
    const int64_t bytes = entry_bytes(HEAD, 1);
    float *numbers = memory(KV_HEADS * HEAD * CAPACITY * sizeof *numbers), scale;
    for (int64_t h = 0; h < KV_HEADS; h++)
        for (int64_t t = 0; t < CAPACITY; t++) {
            code codes[HEAD + SCALE_BYTES];
            for (int64_t d = 0; d < bytes; d++) codes[d] = ((const code *)stored)[h * bytes * CAPACITY + (transposed ? d * CAPACITY + t : t * bytes + d)];
            memcpy(&scale, codes + HEAD, sizeof scale);
            for (int64_t d = 0; d < HEAD; d++) numbers[(h * CAPACITY + t) * HEAD + d] = codes[d] * scale;
        }
    print_floats(name, numbers, KV_HEADS * HEAD * CAPACITY);
}

/* A chain of 6 behind 9 cached tokens, and a tree of 5 behind 4; logits, vectors, cached keys, and the likeliest ids. */
static void print_forward(const char *name, int64_t experts, int gate, int threads, int coded) {
    state = 7;
    Layer layers[LAYERS];
    element *table = elements(CAPACITY * HEAD * 3 / 2, 1.0f, 0.0f), *keys[2][LAYERS], *values[2][LAYERS];
    for (int i = 0; i < LAYERS; i++) {
        Layer *l = layers + i;
        *l = (Layer){.before_attention = elements(WIDTH, 0.2f, 1.0f), .before_mlp = elements(WIDTH, 0.2f, 1.0f), .query_norm = elements(HEAD, 0.2f, 1.0f),
                     .key_norm = elements(HEAD, 0.2f, 1.0f), .qkv = packed_linear((HEADS + 2 * KV_HEADS) * HEAD, WIDTH, 0.3f), .out = packed_linear(WIDTH, HEADS * HEAD, 0.2f),
                     .attention_eps = 1e-5f, .mlp_eps = 1e-5f, .head_eps = 1e-5f, .scaling = 0.177f};
        const int64_t many = experts ? experts : 1;
        Linear *some = memory(2 * many * sizeof *some);
        for (int64_t e = 0; e < many; e++) some[e] = packed_linear(2 * INNER, WIDTH, 0.3f), some[many + e] = packed_linear(WIDTH, INNER, 0.2f);
        l->gate_up = some[0], l->down = some[many];
        if (experts) { /* all of a layer's lie behind each other */
            const int64_t up = (2 * INNER + UNIT - 1) / UNIT * UNIT * WIDTH / PER_CELL, down = (WIDTH + UNIT - 1) / UNIT * UNIT * INNER / PER_CELL;
            cell *ups = memory(many * up * sizeof *ups), *downs = memory(many * down * sizeof *downs);
            for (int64_t e = 0; e < many; e++) memcpy(ups + e * up, some[e].weights, up * sizeof *ups), memcpy(downs + e * down, some[many + e].weights, down * sizeof *downs);
            l->gate_up.weights = ups, l->down.weights = downs, l->router = packed_linear(experts, WIDTH, 0.5f);
        }
        for (int s = 0; s < 2; s++) keys[s][i] = elements(KV_HEADS * HEAD * CAPACITY, 1.0f, 0.0f), values[s][i] = elements(KV_HEADS * HEAD * CAPACITY, 1.0f, 0.0f);
        for (int s = 0; s < 2 && coded; s++) keys[s][i] = as_codes(keys[s][i], 1), values[s][i] = as_codes(values[s][i], 0);
    }
    const Model m = {.width = WIDTH, .heads = HEADS, .kv_heads = KV_HEADS, .head = HEAD, .inner = INNER, .layers = LAYERS, .stride = 256, .embedded = VOCAB,
                     .turned = HEAD, .gate = gate, .experts = experts, .chosen = experts ? 2 : 0, .normed = 1, .spread = experts ? 192 : 0,
                     .embedding = elements(VOCAB * WIDTH, 1.0f, 0.0f), .norm = elements(WIDTH, 0.2f, 1.0f), .eps = 1e-5f, .scale = 1.0f,
                     .lm_head = packed_linear(VOCAB, WIDTH, 0.5f), .layer = layers};
    const int32_t start[] = {0, 1, 3, 5, 8, 11}, own[] = {0, 0, 1, 0, 2, 0, 1, 3, 0, 2, 4}; /* parents -1, 0, 0, 1, 2 */
    const Segment segment[] = {{0, 6, 9, 0, CAPACITY, coded, keys[0], values[0], NULL, NULL}, {6, 5, 4, 0, CAPACITY, coded, keys[1], values[1], start, own}};
    const int64_t tokens[ROWS_FED] = {1, 5, 99, 40, 3, 7, 8, 60, 61, 2, 2}, positions[ROWS_FED] = {9, 10, 11, 12, 13, 14, 4, 5, 5, 6, 6};
    const int64_t rows[ROWS_FED] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    int64_t first[ROWS_FED] = {0}, ids[ROWS_FED * 4];
    for (int i = 3; i < 6; i++) first[i] = i; /* as with a window */
    const element *const tables[] = {table};
    const Batch b = {.total = ROWS_FED, .segments = 2, .wanted = ROWS_FED, .tokens = tokens, .positions = positions, .rows = rows, .rotary = tables, .first = first, .segment = segment};
    const Scratch scratch = scratch_of(256, threads, m.chosen, experts);
    element *logits = memory(ROWS_FED * 128 * sizeof *logits), *hidden = memory(ROWS_FED * WIDTH * sizeof *hidden);
    float probs[ROWS_FED * 4];
    if (truedraft_forward(&m, &b, &scratch, logits, hidden, threads)) exit(1);
    truedraft_settle(scratch.inputs, scratch.inputs + threads * scratch.room);
    char both[96];
    for (int r = 0; r < ROWS_FED; r++) {
        snprintf(both, sizeof both, "logits of %s, row %d", name, r);
        print(both, logits + r * 128, VOCAB);
    }
    snprintf(both, sizeof both, "vectors of %s", name);
    print(both, hidden, ROWS_FED * WIDTH);
    for (int s = 0; s < 2; s++)
        if (coded) print_decoded("keys", keys[s][1], 1), print_decoded("values", values[s][1], 0);
        else print("keys", keys[s][1], KV_HEADS * HEAD * CAPACITY), print("values", values[s][1], KV_HEADS * HEAD * CAPACITY);
    truedraft_likeliest(logits, ROWS_FED, 128, VOCAB, 4, probs, ids);
    snprintf(both, sizeof both, "log probabilities of %s", name);
    print_floats(both, probs, ROWS_FED * 4);
}

int main(void) {
    element *x = elements(4 * PER_SCALE, 3.0f, 0.0f);
    for (int g = 0; g < 4; g++) {
        Inputs in;
        quantize_inputs(x + g * PER_SCALE, &in);
        print_codes("inputs", (const uint8_t *)in.codes, PER_SCALE);
        print_floats("scales of inputs", &in.scale, 1);
    }
    float curves[3][256];
    for (int i = 0; i < 256; i += LANES) {
        lanes v;
        for (int j = 0; j < LANES; j++) v[j] = (float)(i + j - 128) / 8.0f;
        const lanes of[3] = {exponential(v), silu(v), gelu(v)};
        for (int k = 0; k < 3; k++) memcpy(curves[k] + i, &of[k], sizeof v);
    }
    print_floats("exponentials, SiLU and GELU", curves[0], 3 * 256);
    Linear l = packed_linear(130, 96, 0.5f);
    print_products("products", &l);
    const int64_t forms[][2] = {{8, ONE}, {8, SHIFTED}, {8, ZEROED}, {6, HALVES}, {5, ONE}, {5, SHIFTED}, {5, NESTED}, {4, ONE}, {4, SHIFTED},
                                {4, ZEROED}, {4, NESTED}, {8, WIDE}, {8, WIDE_ZEROED}, {4, WIDE}, {4, WIDE_ZEROED}};
    for (int i = 0; i < 15; i++) print_quantized(forms[i][0], forms[i][1]);
    for (int64_t bits = 4; bits <= 8; bits += 4) {
        uint8_t *to = memory(3 * 3 * (scale_bytes(ONE) + code_bytes(bits)));
        truedraft_quantize(&l, 0, 3, bits, to);
        print_codes(bits == 4 ? "4 bits made here" : "8 bits made here", to, 3 * 3 * (scale_bytes(ONE) + code_bytes(bits)));
    }
    const element *codes = as_codes(elements(KV_HEADS * HEAD * CAPACITY, 1.0f, 0.0f), 0);
    print_codes("keys and values", (const uint8_t *)codes, KV_HEADS * entry_bytes(HEAD, 1) * CAPACITY);
    print_forward("a dense model", 0, GATE, 1, 0);
    print_forward("a dense model", 0, GATE, 3, 0);
    print_forward("gelu", 0, GATE_GELU, 1, 0);
    print_forward("experts", 5, GATE, 1, 0);
    print_forward("experts", 5, GATE, 3, 0);
    print_forward("codes", 0, GATE, 1, 1);
    print_forward("codes", 0, GATE, 3, 1);
    return 0;
}
