/* Threads that share a forward, region by region, and never wait for one of them that comes late.
 *
 * A region is a number of units of work, in any order. Each thread begins with a share of its own and then takes what
 * is left of the others' shares, from behind, so a thread that has no processor loses its units. A region is over when
 * its units are; each thread sees that for itself and goes on to the next, which it describes and prepares for itself, too.
 *
 * A thread may lose its processor in the middle of a unit. Most units are therefore computed into the thread's own
 * memory, in parts, and written in one short moment: to that end a thread announces what it computes, and whoever has
 * waited long enough computes it, too. The first to turn the announcement from COMPUTING to WRITING writes; the other
 * forgets what it has. A thread that has lost may still be computing when the region, or the forward, is over, and one
 * that wakes late may prepare or compute from rows that others are writing. Neither does harm: what it needs is its own or stays
 * (`reading`; `truedraft_settle` waits before memory is given back), and nothing comes of it, for whatever is claimed or
 * written is claimed by a word that carries the region's epoch: while a region has units that are not over, its
 * inputs are as they were, and when it has none there is nothing left to claim.
 *
 * The file that includes this says what a Region and a Job are, and gives `prepare`, `compute_part`, `write_part` and
 * `whole_unit`.
 */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#define MOST_THREADS 128
#define TEAMS 8     /* callers at once; further ones work alone */
#define SPINS 2000  /* looks at memory before a waiting thread offers its processor to others */
#ifndef LEAST_PATIENCE_NS
#define LEAST_PATIENCE_NS 20000 /* before a part is computed that another thread is at */
#endif
#ifndef LATE_IN_A_UNIT /* tests make threads late here */
#define LATE_IN_A_UNIT(me)
#define LATE_IN_A_REGION(me)
#endif
#define AWAKE_NS 2000000 /* how long a thread looks for the next forward before it sleeps: a step computes other things between two */

#define LOAD(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define STORE_TO(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define LOAD_IN_ORDER(p) __atomic_load_n(p, __ATOMIC_SEQ_CST)
#define STORE_IN_ORDER(p, v) __atomic_store_n(p, v, __ATOMIC_SEQ_CST)

static inline int swap_if(uint64_t *at, uint64_t was, uint64_t now) {
    return __atomic_compare_exchange_n(at, &was, now, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}

/* What a thread shows the others; those who wait look at a line of the processor's cache of its own. Epochs are cut to 28 bits here: a thread would
 * have to sleep through 2^28 regions and wake within the same few instructions of the very next to be misled. */
typedef struct {
    _Alignas(128) uint64_t share; /* epoch 28 | first unit that nobody has taken 18 | behind the last 18 */
    uint64_t task;                /* epoch 28 | unit 18 | part 16 | COMPUTING or WRITING 2: where it stands */
    const void *reading;          /* inputs of the job that it is in; NULL outside */
    void *team;
    _Alignas(128) uint64_t finished; /* epoch 28 | units that it has finished 36 */
} Member;

enum { OVER, OPEN };
enum { COMPUTING = 1, WRITING = 2 };
#define TAG(epoch) ((epoch) & ((1u << 28) - 1))
#define MOST_UNITS ((1 << 18) - 1)
#define MOST_PARTS ((1 << 16) - 1)
#define FIRST(share) (int64_t)((share) >> 18 & MOST_UNITS)
#define BEHIND(share) (int64_t)((share) & MOST_UNITS)

/* The word says which job is on: epoch of its first region 52 | threads 8 | OVER or OPEN 4. */
#define WORD(epoch, threads, state) ((uint64_t)(epoch) << 12 | (uint64_t)(threads) << 4 | (state))
#define EPOCH(word) ((word) >> 12)
#define THREADS(word) (int)((word) >> 4 & 255)
#define STATE(word) (int)((word) & 15)

typedef struct {
    _Alignas(128) uint64_t word;
    const void *inputs; /* of the job */
    Job job;
    int busy, started; /* started: threads that there are, the caller's included */
    int sleeping;
    pthread_mutex_t lock;
    pthread_cond_t more;
    Member member[MOST_THREADS];
} Team;

static Team teams[TEAMS];

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void rest(int *rounds) {
    if (++*rounds > SPINS) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    else __builtin_ia32_pause();
#elif defined(__aarch64__)
    else __asm__ __volatile__("yield");
#endif
}

/* The share that a member begins a region with. */
static uint64_t whole_share(const Region *r, uint64_t tag, int member, int threads) {
    return tag << 36 | (uint64_t)(r->units * member / threads) << 18 | (uint64_t)(r->units * (member + 1) / threads);
}

/* Takes a unit of a share, the last or the first; -1 where there is none. A share of an earlier region is one that nobody
 * has taken from yet. */
static int64_t take(uint64_t *share, uint64_t whole, int last) {
    for (;;) {
        const uint64_t was = LOAD(share), ahead = TAG((was >> 36) - (whole >> 36)), now = ahead ? whole : was;
        if ((ahead && ahead < 1u << 27) || FIRST(now) >= BEHIND(now)) return -1;
        if (swap_if(share, was, last ? now - 1 : now + (1 << 18))) return last ? BEHIND(now) - 1 : FIRST(now);
    }
}

static void count_finished(Member *m, uint64_t tag) {
    const uint64_t done = m->finished;
    STORE_TO(&m->finished, done >> 36 == tag ? done + 1 : tag << 36 | 1);
}

/* A unit from one of its parts on. */
static void do_unit(Member *m, const Job *job, const Region *r, uint64_t tag, int64_t unit, int64_t part, int me) {
    if (!is_in_parts(r)) whole_unit(job, r, unit, me);
    else {
        lanes sum[GROUP][SUMS];
        for (; part < r->parts; part++) {
            const uint64_t task = tag << 36 | (uint64_t)unit << 18 | (uint64_t)part << 2;
            STORE_TO(&m->task, task | COMPUTING);
            LATE_IN_A_UNIT(me)
            compute_part(r, unit, part, sum);
            if (!swap_if(&m->task, task | COMPUTING, task | WRITING)) return; /* another thread has it */
            write_part(r, unit, part, sum);
        }
    }
    count_finished(m, tag);
}

/* Computes a part that another thread announced and has not written; returns 0 where there is none. */
static int do_anothers(Team *t, int me, const Job *job, const Region *r, uint64_t tag, int threads) {
    lanes sum[GROUP][SUMS];
    for (int i = 1; i < threads; i++) {
        uint64_t *theirs = &t->member[(me + i) % threads].task;
        const uint64_t task = LOAD(theirs);
        if (task >> 36 != tag || (task & 3) != COMPUTING) continue;
        const int64_t unit = (int64_t)(task >> 18 & MOST_UNITS), part = (int64_t)(task >> 2 & MOST_PARTS);
        compute_part(r, unit, part, sum);
        if (swap_if(theirs, task, task - COMPUTING + WRITING)) {
            write_part(r, unit, part, sum);
            do_unit(t->member + me, job, r, tag, unit, part + 1, me);
        }
        return 1;
    }
    return 0;
}

/* By how many regions a thread may go on: 0 while this one is not over, more than one where others are ahead. */
static int64_t over_by(Team *t, const Region *r, uint64_t tag, int threads) {
    int64_t units = 0;
    for (int i = 0; i < threads; i++) {
        const uint64_t done = LOAD(&t->member[i].finished), ahead = TAG((done >> 36) - tag);
        if (ahead == 0) units += (int64_t)(done & (((uint64_t)1 << 36) - 1));
        else if (ahead < 1u << 27) return (int64_t)ahead;
    }
    return units == r->units;
}

/* Whether a thread, other than of a team, is at work with inputs from `from` up to `to`. */
static int is_read(const void *from, const void *to, const Team *but) {
    for (int i = 0, threads; i < TEAMS && (threads = LOAD(&teams[i].started)); i++)
        for (int n = 1; n < threads && teams + i != but; n++) {
            const void *reading = LOAD_IN_ORDER(&teams[i].member[n].reading);
            if (reading >= from && reading < to) return 1;
        }
    return 0;
}

/* Works at a region until it is over; returns by how many to go on. `began`: when this thread was free for it. */
static int64_t work(Team *t, int me, const Job *job, const Region *r, uint64_t tag, int threads, int64_t *began) {
    Member *m = t->member + me;
    int64_t unit, units = 0, ahead;
    for (int i = 0; i < threads; i++) {
        const int whose = (me + i) % threads;
        const uint64_t whole = whole_share(r, tag, whose, threads);
        while ((unit = take(&t->member[whose].share, whole, i)) >= 0) do_unit(m, job, r, tag, unit, 0, me), units++;
    }
    const int64_t waiting = now_ns(), each = units ? (waiting - *began) / units : 0;
    const int64_t patience = 2 * each > LEAST_PATIENCE_NS ? 2 * each : LEAST_PATIENCE_NS;
    *began = waiting;
    for (int rounds = 0; !(ahead = over_by(t, r, tag, threads)); rest(&rounds))
        if (rounds % 32 == 31 && is_in_parts(r) && now_ns() - waiting > patience && do_anothers(t, me, job, r, tag, threads)) rounds = 0;
    return ahead;
}

/* Works at a job's regions until there are no more. */
static void take_part(Team *t, int me, uint64_t word, const Job *job) {
    int64_t began = now_ns();
    for (int64_t step = 0; LOAD(&t->word) == word;) {
        if (step >= job->steps) {
            swap_if(&t->word, word, WORD(EPOCH(word) + job->steps, THREADS(word), OVER));
            return;
        }
        Region r;
        job->describe(job, step, &r);
        LATE_IN_A_REGION(me)
        if (is_in_parts(&r)) prepare(job, &r, me);
        step += work(t, me, job, &r, TAG(EPOCH(word) + step), THREADS(word), &began);
    }
}

/* A job as it is known to other threads, which may be changing; whoever copies it looks at the word afterwards. */
__attribute__((noinline, no_sanitize("thread"))) static void copy_job(Job *to, const Job *from) {
    typedef uint64_t some __attribute__((may_alias));
    for (size_t i = 0; i < sizeof *to / sizeof(some); i++) ((some *)to)[i] = ((const volatile some *)from)[i];
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

/* The same for a thread that is not the caller's. */
static void join(Team *t, int me) {
    Job job;
    Member *m = t->member + me;
    const uint64_t word = LOAD(&t->word);
    if (STATE(word) == OVER || me >= THREADS(word)) return;
    STORE_IN_ORDER(&m->reading, __atomic_load_n(&t->inputs, __ATOMIC_RELAXED));
    copy_job(&job, &t->job);
    /* Had the job ended before the others could see that this thread reads, its memory might be gone. */
    if (LOAD_IN_ORDER(&t->word) == word) take_part(t, me, word, &job);
    STORE_IN_ORDER(&m->reading, NULL);
}

static int is_wanted(Team *t, int me) {
    const uint64_t word = LOAD_IN_ORDER(&t->word);
    return STATE(word) != OVER && me < THREADS(word);
}

static void *live(void *given) {
    Member *m = given;
    Team *t = m->team;
    const int me = (int)(m - t->member);
    for (;;) {
        const int64_t began = now_ns();
        for (int rounds = 0; !is_wanted(t, me); rest(&rounds)) {
            if (rounds % 32 || now_ns() - began < AWAKE_NS) continue;
            pthread_mutex_lock(&t->lock);
            __atomic_add_fetch(&t->sleeping, 1, __ATOMIC_SEQ_CST);
            while (!is_wanted(t, me)) pthread_cond_wait(&t->more, &t->lock);
            __atomic_add_fetch(&t->sleeping, -1, __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&t->lock);
        }
        join(t, me);
    }
    return NULL;
}

/* As many threads as asked for, or as the system gives. They get no signals: those are for the program's own. */
static void start(Team *t, int threads) {
    if (t->started == 0) STORE_TO(&t->started, 1);
    if (t->started >= threads) return;
#ifndef _WIN32
    sigset_t all_signals, before;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &before);
#endif
    while (t->started < threads) {
        pthread_t made;
        Member *m = t->member + t->started;
        m->team = t;
        if (pthread_create(&made, NULL, live, m)) break;
        pthread_detach(made);
        STORE_TO(&t->started, t->started + 1);
    }
#ifndef _WIN32
    pthread_sigmask(SIG_SETMASK, &before, NULL);
#endif
}

/* In a child of fork: of all threads it has one. */
static void begin_again(void) {
    for (int i = 0; i < TEAMS; i++) {
        Team *t = teams + i;
        t->busy = t->started = t->sleeping = 0;
        t->word = WORD(EPOCH(t->word) + 1, 0, OVER);
        for (int n = 0; n < MOST_THREADS; n++) t->member[n].reading = NULL;
        pthread_mutex_init(&t->lock, NULL);
        pthread_cond_init(&t->more, NULL);
    }
}

__attribute__((constructor)) static void prepare_teams(void) {
    begin_again();
#ifndef _WIN32
    pthread_atfork(NULL, NULL, begin_again);
#endif
}

static void run_alone(const Job *job) {
    lanes sum[GROUP][SUMS];
    Region r;
    for (int64_t step = 0; step < job->steps; step++) {
        job->describe(job, step, &r);
        if (is_in_parts(&r)) prepare(job, &r, 0);
        for (int64_t unit = 0; unit < r.units; unit++)
            if (!is_in_parts(&r)) whole_unit(job, &r, unit, 0);
            else for (int64_t part = 0; part < r.parts; part++) {
                compute_part(&r, unit, part, sum);
                write_part(&r, unit, part, sum);
            }
    }
}

/* Runs a job on this thread and as many others as make up `threads`. */
static void run_together(const Job *job, int threads) {
    Team *t = teams;
    while (threads > 1 && t < teams + TEAMS && __atomic_exchange_n(&t->busy, 1, __ATOMIC_ACQUIRE)) t++;
    if (threads < 2 || t == teams + TEAMS) {
        run_alone(job);
        return;
    }
    start(t, threads < MOST_THREADS ? threads : MOST_THREADS);
    if (t->started < threads) threads = t->started;
    /* Threads' own memory goes by their numbers: a late one of another team may have one of the same. */
    for (int rounds = 0; is_read(job->scratch.inputs, job->scratch.inputs + 1, t);) rest(&rounds);
    const uint64_t epoch = EPOCH(LOAD(&t->word)) + 1, word = WORD(epoch, threads, OPEN);
    t->job = *job;
    __atomic_store_n(&t->inputs, job->scratch.inputs, __ATOMIC_RELAXED);
    for (int i = 0; i < threads; i++) {
        STORE_TO(&t->member[i].share, TAG(epoch - 1) << 36);
        STORE_TO(&t->member[i].finished, TAG(epoch - 1) << 36);
    }
    STORE_IN_ORDER(&t->word, word);
    if (LOAD_IN_ORDER(&t->sleeping)) {
        pthread_mutex_lock(&t->lock);
        pthread_cond_broadcast(&t->more);
        pthread_mutex_unlock(&t->lock);
    }
    take_part(t, 0, word, job);
    STORE_TO(&t->busy, 0);
}

/* Returns when no thread is at work with inputs from `from` up to `to`; then the weights that go with them may go. */
void truedraft_settle(const void *from, const void *to) {
    for (int rounds = 0; is_read(from, to, NULL);) rest(&rounds);
}
