/* Experts: MLPs of one size, of which a router chooses some for each row. A slot is a row's choice: slot s is that of
 * row s / chosen.
 *
 * Which rows go to which expert is known only when the router has run, but a region's units must be known to every
 * thread, late ones too. So a unit is a unit of outputs of a share of the experts that are chosen at all, every
 * `chosen`-th of them, whichever these are; its parts are groups of rows of one expert each. Threads sort the slots
 * for themselves, all alike.
 *
 * The file that includes this has the types before, and `team.h` behind it.
 */

/* Sorts slots by expert into the thread's own memory: `rows * chosen` slots by five, and `experts + chosen + 2`. Late
 * threads may read choices that others are writing; those of any moment are experts that there are.
 *
 * Worked example: 3 rows choose 2 each, (4, 0), (0, 1), (4, 1). In order of experts the slots are 1 2 | 3 5 | 0 4. Of
 * the chosen experts 0, 1, 4 the first share has 0 and 4, the second 1. */
__attribute__((noinline, no_sanitize("thread"))) static void sort_slots(Region *r, const int64_t *choices, int32_t *own) {
    const int64_t slots = r->rows * r->chosen, experts = r->experts;
    int32_t *expert = own, *order = expert + slots, *end = order + slots, *share = end + experts + 1;
    Part *part = (Part *)(share + r->chosen + 1);
    memset(end, 0, (experts + 1) * sizeof *end);
    for (int64_t s = 0; s < slots; s++) end[(expert[s] = (int32_t)((const volatile int64_t *)choices)[s]) + 1]++;
    for (int64_t e = 0; e < experts; e++) end[e + 1] += end[e];
    for (int64_t s = 0; s < slots; s++) order[end[expert[s]]++] = (int32_t)s;
    int32_t parts = 0;
    r->parts = 0;
    for (int64_t each = 0; each < r->chosen; each++) {
        share[each] = parts;
        for (int64_t e = 0, number = 0; e < experts; e++) {
            const int32_t first = e ? end[e - 1] : 0, count = end[e] - first, groups = (count + GROUP - 1) / GROUP;
            if (!count || number++ % r->chosen != each) continue;
            for (int32_t g = 0; g < groups; g++) {
                const int32_t from = count * g / groups, to = count * (g + 1) / groups;
                part[parts++] = (Part){(int32_t)e, first + from, to - from};
            }
        }
        if (parts - share[each] > r->parts) r->parts = parts - share[each];
    }
    share[r->chosen] = parts;
    r->order = order, r->share = share, r->part = part;
}

/* Makes a thread's own inputs of the products of experts: part by part, each row once for every expert that it chose. */
static void prepare_experts(const Job *job, Region *r, int me) {
    const Scratch *s = &job->scratch;
    const int64_t width = r->linear->read, stride = job->stride;
    element *rows = s->fetched + me * s->rows * stride;
    float *inputs = s->inputs + me * s->room;
    r->inputs = inputs;
    sort_slots(r, s->choices, s->sorted + me * s->listed);
    for (const Part *p = r->part; p < r->part + r->share[r->chosen]; p++) {
        for (int64_t i = 0; i < p->count; i++)
            fetch(r->x + r->order[p->first + i] / r->slots_of_x * r->x_stride, 0, 1, width, rows + i * stride, 0);
        arrange(r->linear, rows, stride, p->count, inputs + p->first * input_floats(r->linear));
    }
}

/* A part of a unit's share; of no rows where the share has fewer. */
static Part part_of(const Region *r, int64_t at, int64_t part) {
    const int64_t share = at / r->each, number = r->share[share] + part;
    return number < r->share[share + 1] ? r->part[number] : (Part){0, 0, 0};
}

static void compute_experts(const Region *r, int64_t at, int64_t part, lanes (*sum)[SUMS]) {
    const Part p = part_of(r, at, part);
    Linear l = *r->linear;
    l.weights += p.expert * r->each * unit_cells(&l);
    if (p.count) unit(&l, at % r->each, r->inputs + p.first * input_floats(&l), p.count, tile_rows(&l, p.count), r->far, sum);
}

static void write_experts(const Region *r, int64_t at, int64_t part, lanes (*sum)[SUMS]) {
    const Part p = part_of(r, at, part);
    const float *bias = r->linear->bias ? r->linear->bias + p.expert * r->each * UNIT : NULL;
    for (int64_t i = 0; i < p.count; i++)
        finish(r->kind, sum + i, 1, bias, NULL, 0, r->y + r->order[p.first + i] * r->y_stride, r->y_stride, at % r->each);
}

/* A row's experts, the likeliest first, by the router's logits, with their probabilities; and its norm, which all of
 * them read. */
static void choose_experts(const Job *job, const Region *r, int64_t row) {
    const Model *m = job->model;
    const Scratch *s = &job->scratch;
    const element *logits = s->projected + row * job->stride;
    float *shares = s->shares + row * m->chosen, sum = 0;
    largest(logits, m->experts, m->chosen, shares, s->choices + row * m->chosen);
    log_probabilities(logits, m->experts, m->chosen, 1.0f, shares);
    for (int64_t i = 0; i < m->chosen; i++) sum += shares[i] = exponential(all(shares[i]))[0];
    for (int64_t i = 0; i < m->chosen && m->normed; i++) shares[i] /= sum;
    norm(s->stream + row * job->stride, r->norm, r->eps, r->norms, m->width, s->mixed + row * job->stride);
}

/* Adds what a row's experts gave, each times its probability, to the residual stream. */
static void merge_experts(const Job *job, int64_t row) {
    const Model *m = job->model;
    const element *given = job->scratch.given + row * m->chosen * m->spread;
    element *stream = job->scratch.stream + row * job->stride;
    const float *shares = job->scratch.shares + row * m->chosen;
    for (int64_t i = 0; i < m->width; i += LANES) {
        lanes sum = {0};
        for (int64_t e = 0; e < m->chosen; e++) sum = sum + load(given + e * m->spread + i) * shares[e];
        store(stream + i, load(stream + i) + rounded(sum));
    }
}
