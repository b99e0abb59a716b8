/* Convolutions along a block, around attention and MLP: row i becomes the sum over taps t of coefficients [i][t] times row
 * i - t of its block. A coefficient is that of a learned kernel plus a correction, which neighbouring entries share.
 *
 * The file that includes this has the types before.
 */

static int64_t shared_entries(const Model *m, const Linear *corrections) { return m->width / (corrections->outputs / (2 * m->taps)); }

/* Where a row's corrections lie, `[2][taps][groups]`: behind what the MLP's factors become. */
static element *corrections_of(const Model *m, const Scratch *s, int64_t row) {
    return s->active + row * m->stride + (m->inner + UNIT - 1) / UNIT * UNIT;
}

/* Some entries of a row's convolution, in float32. `side`: 0 before a part, 1 behind it. Row t of x is row `row - t`. */
static inline lanes convolved(const Model *m, const Region *r, const element *corrections, int side, const element *const *x, int64_t taps, int64_t at) {
    const int64_t shared = shared_entries(m, r->linear), groups = m->width / shared;
    lanes sum = {0};
    for (int64_t t = 0; t < taps; t++) {
        const float own = wide(corrections[(side * m->taps + t) * groups + at / shared]);
        sum = sum + (load(r->x + (side * m->taps + t) * m->width + at) + own) * load(x[t] + at);
    }
    return sum;
}

/* Rows of its block that a row's convolution reads. */
static int64_t taps_of(const Model *m, int64_t row) { return row % m->block < m->taps ? row % m->block + 1 : m->taps; }

/* What enters a part: the convolution of normed rows. */
static void enter_part(const Job *job, const Region *r, int64_t row, int me) {
    const Model *m = job->model;
    const Scratch *s = &job->scratch;
    const int64_t taps = taps_of(m, row);
    const element *x[MOST_TAPS];
    for (int64_t t = 0; t < taps; t++) {
        element *normed = s->fetched + (me * s->rows + t) * m->stride;
        norm(s->stream + (row - t) * m->stride, r->norm, r->eps, r->norms, m->width, normed);
        x[t] = normed;
    }
    for (int64_t i = 0; i < m->width; i += LANES)
        store(s->mixed + row * m->stride + i, convolved(m, r, corrections_of(m, s, row), 0, x, taps, i));
}

/* Adds the convolution of what a part gives to the residual stream. */
static void leave_part(const Job *job, const Region *r, int64_t row) {
    const Model *m = job->model;
    const Scratch *s = &job->scratch;
    const int64_t taps = taps_of(m, row);
    const element *x[MOST_TAPS];
    element *stream = s->stream + row * m->stride;
    for (int64_t t = 0; t < taps; t++) x[t] = s->projected + (row - t) * m->stride;
    for (int64_t i = 0; i < m->width; i += LANES)
        store(stream + i, load(stream + i) + rounded(convolved(m, r, corrections_of(m, s, row), 1, x, taps, i)));
}
