/* Runs decoder.c, in float32, with threads that are late when it suits the test worst, and compares every number.
 *
 * A late thread stops in the middle of a unit that it has announced, or before it reads the rows of a region that it is to
 * work at, and stays there until the forward that it belongs
 * to has returned. If the forward waited for it, this program would never end. Prints "as alone" where all forwards gave
 * the bits of one thread.
 */
#include <stdint.h>
static void stop_here(int me, int where);
#define LATE_IN_A_UNIT(me) stop_here(me, 0);
#define LATE_IN_A_REGION(me) stop_here(me, 1);
#define LEAST_PATIENCE_NS 1000
#include DECODER

#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 64, HEADS = 2, KV = 1, HEAD = 32, INNER = 192, LAYERS = 2, VOCAB = 400, MOST_ROWS = 100, ALL = 4, CALLERS = 3, FORWARDS = 60, TAKEN = 24, TAPS = 2 };
enum { EXPERTS = 7, CHOSEN = 3, STRIDE = INNER + 64, ROOM = MOST_ROWS * CHOSEN * INNER, LISTED = 5 * MOST_ROWS * CHOSEN + EXPERTS + CHOSEN + 2 };

static int late = -1, place;           /* the thread that is to stop, -1: none; and where */
static int stopped, released, taken;   /* how often one stopped, and up to which time it may go on */

static void stop_here(int me, int where) {
    int who = me;
    if (where != __atomic_load_n(&place, __ATOMIC_SEQ_CST) || !__atomic_compare_exchange_n(&late, &who, -1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return;
    const int mine = __atomic_add_fetch(&stopped, 1, __ATOMIC_SEQ_CST);
    if (!me) { /* the caller, who cannot return by itself */
        while (STATE(LOAD(&teams->word)) != OVER) sched_yield();
        return;
    }
    while (__atomic_load_n(&released, __ATOMIC_SEQ_CST) < mine) sched_yield();
}

static uint64_t state = 1;
static float *random_numbers(int64_t count, float size) {
    float *made = aligned_alloc(64, (count * 4 + 63) / 64 * 64);
    for (int64_t i = 0; i < count; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        made[i] = size * ((float)(state >> 40) / (float)(1 << 24) - 0.5f);
    }
    return made;
}

static Linear linears_of(int64_t inputs, int64_t outputs, int64_t several) {
    return (Linear){random_numbers(several * inputs * ((outputs + UNIT - 1) / UNIT) * UNIT, 0.3f), NULL, inputs, outputs, inputs, 0};
}

static Linear linear_of(int64_t inputs, int64_t outputs) { return linears_of(inputs, outputs, 1); }

/* A caller: a model's caches and numbers on the way. */
typedef struct {
    Scratch scratch;
    element *keys[LAYERS], *values[LAYERS];
    element *logits, *hidden, *expected;
    int64_t tokens[MOST_ROWS], positions[MOST_ROWS], rows[MOST_ROWS], first[MOST_ROWS];
} Caller;

static Model model;
static element *rotary;

static Caller *new_caller(void) {
    Caller *c = calloc(1, sizeof *c);
    c->scratch = (Scratch){
        .stream = random_numbers(MOST_ROWS * STRIDE, 0), .projected = random_numbers(MOST_ROWS * STRIDE, 0),
        .mixed = random_numbers(MOST_ROWS * STRIDE, 0), .active = random_numbers(MOST_ROWS * STRIDE, 0),
        .fetched = random_numbers(ALL * MOST_ROWS * STRIDE, 0), .inputs = random_numbers(ALL * ROOM, 0),
        .scores = random_numbers(ALL * 2 * TILE * 256, 0), .between = random_numbers(MOST_ROWS * CHOSEN * INNER, 0),
        .given = random_numbers(MOST_ROWS * CHOSEN * INNER, 0), .choices = calloc(MOST_ROWS * CHOSEN, sizeof(int64_t)),
        .shares = random_numbers(MOST_ROWS * CHOSEN, 0), .sorted = calloc(ALL * LISTED, sizeof(int32_t)),
        .rows = MOST_ROWS, .keys = 256, .room = ROOM, .listed = LISTED};
    for (int i = 0; i < LAYERS; i++) {
        c->keys[i] = random_numbers(KV * HEAD * 256, 0);
        c->values[i] = random_numbers(KV * HEAD * 256, 0);
    }
    c->logits = random_numbers(MOST_ROWS * (VOCAB + UNIT), 0);
    c->expected = random_numbers(MOST_ROWS * (VOCAB + UNIT), 0);
    c->hidden = random_numbers(MOST_ROWS * WIDTH, 0);
    return c;
}

static void forward(Caller *c, int64_t count, uint64_t seed, element *logits, int threads) {
    const Segment segment = {0, count, 0, 0, 256, 0, c->keys, c->values, NULL, NULL};
    for (int64_t i = 0; i < count; i++) {
        c->tokens[i] = (int64_t)((seed + 31 * i) % VOCAB);
        c->positions[i] = c->rows[i] = i;
        c->first[i] = 0;
    }
    const Batch batch = {count, 1, count, c->tokens, c->positions, c->rows, (const element *const *)&rotary, c->first, &segment};
    if (truedraft_forward(&model, &batch, &c->scratch, logits, c->hidden, threads)) abort();
}

static int differ(const Caller *c, int64_t count) {
    const int64_t wide = (VOCAB + UNIT - 1) / UNIT * UNIT;
    for (int64_t i = 0; i < count; i++)
        if (memcmp(c->logits + i * wide, c->expected + i * wide, VOCAB * sizeof(element))) return 1;
    return 0;
}

/* Several callers at once, with as many threads as can but disturb each other. */
static void *call(void *given) {
    Caller *c = given;
    for (int i = 0; i < FORWARDS; i++) {
        const int64_t count = 1 + i * 37 % MOST_ROWS;
        forward(c, count, i, c->expected, 1);
        forward(c, count, i, c->logits, 2 + i % (ALL - 1));
        if (differ(c, count)) { puts("another result"); exit(1); }
    }
    truedraft_settle(c->scratch.inputs, c->scratch.inputs + ALL * ROOM);
    return c;
}

/* "sandwich": the sums of a layer are normed before they are added to the stream; "experts": its MLP is of experts; "blocks":
 * convolutions are around its parts. */
int main(int arguments, char **given) {
    const int blocks = arguments > 1 && !strcmp(given[1], "blocks");
    const int sandwich = arguments > 1 && !strcmp(given[1], "sandwich"), routed = arguments > 1 && !strcmp(given[1], "experts");
    const int experts = routed ? EXPERTS : 1;
    static Layer layers[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        layers[i] = (Layer){
            .before_attention = random_numbers(WIDTH, 1), .before_mlp = random_numbers(WIDTH, 1),
            .after_attention = sandwich ? random_numbers(WIDTH, 1) : NULL, .after_mlp = sandwich ? random_numbers(WIDTH, 1) : NULL,
            .qkv = linear_of(WIDTH, (HEADS + 2 * KV) * HEAD), .out = linear_of(WIDTH, WIDTH),
            .gate_up = linears_of(WIDTH, 2 * INNER, experts), .down = linears_of(INNER, WIDTH, experts), .router = linear_of(WIDTH, EXPERTS),
            .attention_eps = 1e-5f, .mlp_eps = 1e-5f, .after_attention_eps = 1e-5f, .after_mlp_eps = 1e-5f, .scaling = 0.18f,
            .attention_conv = linear_of(WIDTH, 2 * TAPS * WIDTH / 16), .mlp_conv = linear_of(WIDTH, 2 * TAPS * WIDTH / 16),
            .attention_kernel = random_numbers(2 * TAPS * WIDTH, 1), .mlp_kernel = random_numbers(2 * TAPS * WIDTH, 1)};
    model = (Model){
        .width = WIDTH, .heads = HEADS, .kv_heads = KV, .head = HEAD, .inner = INNER, .layers = LAYERS, .stride = STRIDE, .gate = GATE,
        .experts = routed ? EXPERTS : 0, .chosen = CHOSEN, .normed = 1, .spread = INNER,
        .embedded = VOCAB, .turned = HEAD, .embedding = random_numbers(VOCAB * WIDTH, 1), .norm = random_numbers(WIDTH, 1),
        .block = 5, .taps = blocks ? TAPS : 0, .eps = 1e-5f, .scale = 1.0f, .lm_head = linear_of(WIDTH, VOCAB), .layer = layers};
    rotary = random_numbers(MOST_ROWS * (HEAD + HEAD / 2), 1);
    Caller *callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) callers[i] = new_caller();

    /* Each thread in turn, the calling one too, comes late: its unit is computed by another, and it wakes afterwards, when the
     * next forward has begun or its memory is asked back. */
    for (int i = 0; taken < TAKEN; i++) {
        Caller *c = callers[0];
        const int64_t count = 1 + i * 37 % MOST_ROWS;
        forward(c, count, i, c->expected, 1);
        const int before = __atomic_load_n(&stopped, __ATOMIC_SEQ_CST);
        __atomic_store_n(&place, i / ALL % 2, __ATOMIC_SEQ_CST);
        __atomic_store_n(&late, i % ALL, __ATOMIC_SEQ_CST);
        forward(c, count, i, c->logits, ALL);
        __atomic_store_n(&late, -1, __ATOMIC_SEQ_CST);
        taken += __atomic_load_n(&stopped, __ATOMIC_SEQ_CST) > before;
        if (i % 2) __atomic_store_n(&released, __atomic_load_n(&stopped, __ATOMIC_SEQ_CST), __ATOMIC_SEQ_CST);
        if (differ(c, count)) { puts("another result"); return 1; }
        if (i % 2) truedraft_settle(c->scratch.inputs, c->scratch.inputs + ALL * ROOM);
    }
    __atomic_store_n(&released, 1 << 30, __ATOMIC_SEQ_CST);

    pthread_t made[CALLERS];
    for (int i = 0; i < CALLERS; i++) pthread_create(made + i, NULL, call, callers[i]);
    for (int i = 0; i < CALLERS; i++) pthread_join(made[i], NULL);
    puts("as alone");
    return 0;
}
