/* The thread pool: fork, barrier, parallel_for. See bessemer.h for the contract.
 *
 * How a job runs. The caller takes `queue` (one job at a time), writes the job, and publishes it by
 * one store to `signal`, which holds a generation number and the number of workers. A worker that
 * takes part keeps the job's fields alive until it has counted itself out of `running`; one that
 * does not take part reads nothing but `signal`. So a late or spurious wake-up is harmless.
 *
 * How anyone waits. Spin for a bounded time, offering the processor to others now and then, then
 * sleep on a condition variable. A sleeper counts itself into `sleepers` before it looks at the
 * awaited value a last time; whoever changes the value looks at `sleepers` after. Both are
 * sequentially consistent, so one of them sees the other and no wake-up is lost.
 */
#define _GNU_SOURCE
#include "bessemer.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CACHE_LINE 64
/* A wait spins in rounds: PAUSES looks, then the processor is offered to others, since the worker
 * waited for may need it. All rounds together take some 50 to 200 microseconds: longer than the gap
 * between two groups of a decode step, and little on an idle machine. */
#define PAUSES 200
#define ROUNDS 20
/* Rounds of a wait for the next job: some 250 to 1000 microseconds, longer than a caller needs
 * between two decode steps to choose a token and to show it. Waking a sleeper would cost the next
 * step more than that. */
#define ROUNDS_BETWEEN_JOBS 100
/* With more workers than processors spinning is in the way: one look, and offer it at once. */
#define PAUSES_OVERSUBSCRIBED 1
/* Compiled code keeps no large scratch on the stack; musl's and macOS's defaults are small. */
#define STACK_BYTES (2u << 20)
/* `signal` = generation << WORKER_BITS | workers of the job */
#define WORKER_BITS 16
#define MAX_WORKERS ((1 << WORKER_BITS) - 1)

/* A value that others wait for. */
typedef struct event {
    _Alignas(CACHE_LINE) _Atomic uint64_t value;
    _Atomic int64_t sleepers;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} event;

typedef struct job {
    bsm_task fn;
    void *args;
    int64_t threads;
} job;

typedef struct worker {
    bsm_pool *pool;
    int64_t index;
    pthread_t thread;
} worker;

struct bsm_pool {
    int64_t size;
    int64_t pauses; /* of a round of a wait */
    _Atomic int64_t owner; /* process id whose threads these are; negated while they are made */
    pthread_mutex_t queue; /* held by the caller of the running job */
    job job;
    worker *workers; /* [1 .. size - 1] */
    uint64_t start;  /* `signal` when the threads were made */
    _Atomic int stop;
    event signal;
    event running;                                   /* workers that have not finished */
    _Alignas(CACHE_LINE) _Atomic int64_t arrived;    /* at the barrier */
    event barrier;                                   /* its generation */
};

/* How many jobs this thread is inside of; nested ones run serially. */
static _Thread_local int depth;
/* How many of those are serial nested ones: a barrier there has one participant. */
static _Thread_local int serial;

static void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` is a no-op on most cores */
#elif defined(__riscv)
    __asm__ volatile(".insn i 0x0F, 0, x0, x0, 0x010" ::: "memory"); /* pause */
#endif
}

static void event_init(event *e, uint64_t value) {
    atomic_init(&e->value, value);
    atomic_init(&e->sleepers, 0);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
}

static void event_destroy(event *e) {
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
}

static void event_wake(event *e) {
    if (atomic_load(&e->sleepers) > 0) {
        pthread_mutex_lock(&e->lock);
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->lock);
    }
}

static void event_set(event *e, uint64_t value) {
    atomic_store(&e->value, value);
    event_wake(e);
}

/* Wait while the value is `old`. */
static void event_wait_change(event *e, uint64_t old, int rounds, int64_t pauses) {
    for (int round = 0; round < rounds; round++) {
        for (int64_t i = 0; i < pauses; i++) {
            if (atomic_load_explicit(&e->value, memory_order_acquire) != old) return;
            cpu_pause();
        }
        sched_yield();
    }
    pthread_mutex_lock(&e->lock);
    atomic_fetch_add(&e->sleepers, 1);
    while (atomic_load(&e->value) == old) pthread_cond_wait(&e->changed, &e->lock);
    atomic_fetch_sub(&e->sleepers, 1);
    pthread_mutex_unlock(&e->lock);
}

static void *worker_main(void *arg) {
    worker *self = arg;
    bsm_pool *pool = self->pool;
    uint64_t seen = pool->start;
    for (;;) {
        event_wait_change(&pool->signal, seen, ROUNDS_BETWEEN_JOBS, pool->pauses);
        seen = atomic_load(&pool->signal.value);
        if (atomic_load(&pool->stop)) return NULL;
        if (self->index >= (int64_t)(seen & MAX_WORKERS)) continue;
        depth++;
        pool->job.fn(pool->job.args, self->index, pool->job.threads);
        depth--;
        /* The last one to finish wakes the caller. After this the job is not ours to touch. */
        if (atomic_fetch_sub(&pool->running.value, 1) == 1) event_wake(&pool->running);
    }
}

static int64_t processors(void) {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? n : 1;
}

/* Start the workers of a pool whose memory is ready; sets `size` to what the system allows. */
static void start_workers(bsm_pool *pool, int64_t threads) {
    sigset_t all, old;
    pthread_attr_t attr;
    /* Signals (Ctrl-C) go to the threads of the program, not to ours. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    int64_t made = 1;
    for (; made < threads; made++) {
        worker *w = &pool->workers[made];
        w->pool = pool;
        w->index = made;
        if (pthread_create(&w->thread, &attr, worker_main, w) != 0) break;
    }
    pthread_attr_destroy(&attr);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pool->size = made;
}

static void init_state(bsm_pool *pool, int64_t threads) {
    pool->start = 0;
    pool->pauses = threads <= processors() ? PAUSES : PAUSES_OVERSUBSCRIBED;
    pthread_mutex_init(&pool->queue, NULL);
    atomic_init(&pool->stop, 0);
    atomic_init(&pool->arrived, 0);
    event_init(&pool->signal, 0);
    event_init(&pool->running, 0);
    event_init(&pool->barrier, 0);
}

bsm_pool *bsm_pool_create(int64_t threads) {
    if (threads < 1) threads = 1;
    if (threads > MAX_WORKERS) threads = MAX_WORKERS;
    bsm_pool *pool = NULL;
    if (posix_memalign((void **)&pool, CACHE_LINE, sizeof *pool) != 0) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    if (pool->workers == NULL) {
        free(pool);
        return NULL;
    }
    init_state(pool, threads);
    start_workers(pool, threads);
    atomic_init(&pool->owner, (int64_t)getpid());
    return pool;
}

void bsm_pool_destroy(bsm_pool *pool) {
    if (pool == NULL) return;
    /* In a child of fork() the threads don't exist and the locks are in an unknown state. */
    if (atomic_load(&pool->owner) == (int64_t)getpid()) {
        atomic_store(&pool->stop, 1);
        event_set(&pool->signal, atomic_load(&pool->signal.value) + (1ull << WORKER_BITS));
        for (int64_t i = 1; i < pool->size; i++) pthread_join(pool->workers[i].thread, NULL);
        event_destroy(&pool->signal);
        event_destroy(&pool->running);
        event_destroy(&pool->barrier);
        pthread_mutex_destroy(&pool->queue);
    }
    free(pool->workers);
    free(pool);
}

int64_t bsm_pool_size(bsm_pool *pool) { return pool == NULL ? 1 : pool->size; }

/* In a child of fork(): make the threads and the locks anew. One caller does, others wait. */
static void revive(bsm_pool *pool) {
    int64_t self = (int64_t)getpid();
    for (;;) {
        int64_t owner = atomic_load(&pool->owner);
        if (owner == self) return;
        if (owner == -self) {
            sched_yield();
        } else if (atomic_compare_exchange_strong(&pool->owner, &owner, -self)) {
            init_state(pool, pool->size);
            start_workers(pool, pool->size);
            atomic_store(&pool->owner, self);
            return;
        }
    }
}

/* Run a job on `threads` (at least 2) workers of the pool; `active` (or NULL) learns how many. */
static void run(bsm_pool *pool, int64_t threads, bsm_task fn, void *args, uint64_t *active) {
    revive(pool);
    pthread_mutex_lock(&pool->queue);
    if (threads > pool->size) threads = pool->size;
    if (active != NULL) *active = (uint64_t)threads;
    depth++;
    if (threads > 1) {
        pool->job = (job){fn, args, threads};
        atomic_store(&pool->running.value, (uint64_t)threads - 1);
        uint64_t generation = (atomic_load(&pool->signal.value) >> WORKER_BITS) + 1;
        event_set(&pool->signal, generation << WORKER_BITS | (uint64_t)threads);
    }
    fn(args, 0, threads);
    if (threads > 1) {
        uint64_t left;
        while ((left = atomic_load(&pool->running.value)) != 0)
            event_wait_change(&pool->running, left, ROUNDS, pool->pauses);
    }
    depth--;
    pthread_mutex_unlock(&pool->queue);
}

void bsm_fork(bsm_context *ctx, bsm_task fn, void *args) {
    if (fn == NULL) return;
    if (depth > 0) {
        serial++;
        fn(args, 0, 1);
        serial--;
        return;
    }
    if (ctx != NULL) {
        ctx->status = BSM_OK;
        ctx->reserved[0] = 1;
    }
    if (ctx == NULL || ctx->pool == NULL || ctx->threads <= 1) {
        depth++;
        fn(args, 0, 1);
        depth--;
        return;
    }
    run(ctx->pool, ctx->threads, fn, args, &ctx->reserved[0]);
}

/* Meet at the barrier as one of `threads`. Its generation changes only when all have arrived. */
static void meet(bsm_pool *pool, uint64_t generation, int64_t threads) {
    if (atomic_fetch_add(&pool->arrived, 1) == threads - 1) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        event_set(&pool->barrier, generation + 1);
    } else {
        event_wait_change(&pool->barrier, generation, ROUNDS, pool->pauses);
    }
}

static int64_t participants(const bsm_context *ctx) {
    return serial > 0 || ctx == NULL || ctx->pool == NULL ? 1 : (int64_t)ctx->reserved[0];
}

void bsm_barrier(bsm_context *ctx, int64_t thread) {
    (void)thread;
    int64_t threads = participants(ctx);
    if (threads > 1) meet(ctx->pool, atomic_load(&ctx->pool->barrier.value), threads);
}

int32_t bsm_poll_cancel(bsm_context *ctx, int64_t thread) {
    if (ctx == NULL) return 0;
    int64_t threads = participants(ctx);
    /* Two slots, by the barrier's generation: worker 0 can write the next answer while a slow
     * worker still reads this one, and can't reach the one after before it has. */
    uint64_t generation = threads > 1 ? atomic_load(&ctx->pool->barrier.value) : 0;
    uint64_t *slot = &ctx->reserved[1 + (generation & 1)];
    if (threads <= 1 || thread == 0) {
        int32_t cancelled = __atomic_load_n(&ctx->cancel, __ATOMIC_RELAXED) != 0;
        if (threads <= 1) {
            if (cancelled) ctx->status = BSM_CANCELLED;
            return cancelled;
        }
        if (cancelled) ctx->status = BSM_CANCELLED;
        *slot = (uint64_t)cancelled;
    }
    meet(ctx->pool, generation, threads);
    return (int32_t)*slot;
}

typedef struct range {
    int64_t begin;
    uint64_t length;
    uint64_t grain;
    uint64_t pieces;
    void (*body)(void *, int64_t, int64_t);
    void *arg;
    _Atomic uint64_t next;
} range;

static void run_pieces(void *args, int64_t thread, int64_t threads) {
    (void)thread;
    (void)threads;
    range *r = args;
    uint64_t piece;
    while ((piece = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed)) < r->pieces) {
        uint64_t first = piece * r->grain;
        uint64_t count = r->length - first < r->grain ? r->length - first : r->grain;
        int64_t begin = (int64_t)((uint64_t)r->begin + first);
        r->body(r->arg, begin, (int64_t)((uint64_t)begin + count));
    }
}

void bsm_parallel_for(bsm_pool *pool, int64_t begin, int64_t end, int64_t grain,
                      void (*body)(void *, int64_t, int64_t), void *arg) {
    if (begin >= end || body == NULL) return;
    range r = {.begin = begin, .body = body, .arg = arg};
    r.length = (uint64_t)end - (uint64_t)begin;
    r.grain = grain < 1 ? 1 : (uint64_t)grain;
    r.pieces = (r.length - 1) / r.grain + 1;
    int64_t threads = bsm_pool_size(pool);
    if (r.pieces < (uint64_t)threads) threads = (int64_t)r.pieces;
    if (depth > 0 || threads <= 1) {
        depth++;
        body(arg, begin, end);
        depth--;
        return;
    }
    run(pool, threads, run_pieces, &r, NULL);
}
