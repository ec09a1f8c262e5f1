/* Exercises the pool with random delays and checks every result; run plainly and under
 * ThreadSanitizer. Usage: stress ROUNDS SEED. Prints "ok", or what went wrong and exits with 1. */
#define _GNU_SOURCE
#include "bessemer.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_THREADS = 8, CALLERS = 4, LENGTH = 1000 };

static int rounds;
static uint64_t seed;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Mostly nothing, sometimes long enough for others to fall asleep. */
static void random_delay(uint64_t *state) {
    uint64_t r = next_random(state) % 64;
    if (r < 2) {
        struct timespec t = {0, r == 0 ? 300000 : 20000};
        nanosleep(&t, NULL);
    } else {
        for (volatile uint64_t i = 0; i < r * 4; i++) {
        }
    }
}

typedef struct exchange {
    bsm_context *ctx;
    int64_t values[MAX_THREADS];
    int64_t left_at[MAX_THREADS]; /* the round in which each worker saw the cancel */
    int64_t expected_threads;
} exchange;

/* Every round each worker writes a value, meets the others, and reads all values. */
static void exchange_task(void *args, int64_t thread, int64_t threads) {
    exchange *e = args;
    uint64_t state = seed + (uint64_t)thread * 7919 + 1;
    CHECK(threads == e->expected_threads);
    for (int64_t round = 0; round < rounds; round++) {
        random_delay(&state);
        e->values[thread] = round * 100 + thread;
        bsm_barrier(e->ctx, thread);
        for (int64_t t = 0; t < threads; t++) CHECK(e->values[t] == round * 100 + t);
        e->left_at[thread] = round;
        if (bsm_poll_cancel(e->ctx, thread)) return;
        /* Polls in a row: worker 0 may publish the next answer while others read this one. */
        for (int i = 0; i < round % 4; i++)
            if (bsm_poll_cancel(e->ctx, thread)) return;
        if (next_random(&state) % 8 == 0) random_delay(&state);
    }
    e->left_at[thread] = rounds;
}

static void *cancel_later(void *arg) {
    bsm_context *ctx = arg;
    uint64_t state = seed + 5;
    struct timespec t = {0, (long)(next_random(&state) % 3000000)};
    nanosleep(&t, NULL);
    __atomic_store_n(&ctx->cancel, 1, __ATOMIC_RELAXED);
    return NULL;
}

static void test_exchange(bsm_pool *pool, int64_t threads, int with_cancel) {
    bsm_context ctx = {.pool = pool, .threads = threads};
    exchange e = {.ctx = &ctx};
    int64_t size = bsm_pool_size(pool);
    e.expected_threads = threads < 1 ? 1 : threads > size ? size : threads;
    pthread_t canceller;
    if (with_cancel) CHECK(pthread_create(&canceller, NULL, cancel_later, &ctx) == 0);
    bsm_fork(&ctx, exchange_task, &e);
    if (with_cancel) pthread_join(canceller, NULL);
    for (int64_t t = 1; t < e.expected_threads; t++) CHECK(e.left_at[t] == e.left_at[0]);
    CHECK(ctx.status == (e.left_at[0] < rounds ? BSM_CANCELLED : BSM_OK));
    if (!with_cancel) CHECK(e.left_at[0] == rounds);
}

typedef struct count {
    bsm_pool *pool;
    int hits[LENGTH];
    int64_t begin;
    bsm_context *ctx; /* of the call around, or NULL */
} count;

static void count_body(void *arg, int64_t begin, int64_t end) {
    count *c = arg;
    CHECK(end > begin);
    for (int64_t i = begin; i < end; i++) c->hits[i - c->begin]++;
}

static void check_counts(const count *c, int64_t length) {
    for (int64_t i = 0; i < LENGTH; i++) CHECK(c->hits[i] == (i < length ? 1 : 0));
}

static void test_parallel_for(bsm_pool *pool) {
    static const int64_t lengths[] = {0, 1, 2, 7, 64, LENGTH};
    static const int64_t grains[] = {-1, 1, 3, 64, INT64_MAX};
    static const int64_t begins[] = {0, -500, INT64_MAX - LENGTH, INT64_MIN};
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
        for (size_t g = 0; g < sizeof grains / sizeof *grains; g++)
            for (size_t b = 0; b < sizeof begins / sizeof *begins; b++) {
                count c = {.begin = begins[b]};
                bsm_parallel_for(pool, begins[b], begins[b] + lengths[l], grains[g], count_body,
                                 &c);
                check_counts(&c, lengths[l]);
            }
}

/* Nested calls run serially on the worker, whichever call they are nested in. */
static void nested_fork(void *args, int64_t thread, int64_t threads) {
    CHECK(thread == 0 && threads == 1);
    count *c = args;
    bsm_context inner = {.pool = c->pool, .threads = MAX_THREADS};
    bsm_barrier(&inner, 0);
    CHECK(bsm_poll_cancel(&inner, 0) == 0);
    if (c->ctx != NULL) {
        bsm_barrier(c->ctx, 0);
        CHECK(bsm_poll_cancel(c->ctx, 0) == 0);
    }
    c->hits[0]++;
}

static void nested_body(void *arg, int64_t begin, int64_t end) {
    (void)arg;
    for (int64_t i = begin; i < end; i++) {
        count c = {.pool = arg};
        bsm_parallel_for(c.pool, 0, 10, 1, count_body, &c);
        check_counts(&c, 10);
        bsm_context ctx = {.pool = c.pool, .threads = MAX_THREADS};
        memset(c.hits, 0, sizeof c.hits);
        bsm_fork(&ctx, nested_fork, &c);
        check_counts(&c, 1);
    }
}

static void nested_task(void *args, int64_t thread, int64_t threads) {
    bsm_context *ctx = args;
    nested_body(ctx->pool, 0, 3);
    /* The same context, inside its own fork: the barrier of the inner one has one participant. */
    count c = {.pool = ctx->pool, .ctx = ctx};
    if (thread == 0) bsm_fork(ctx, nested_fork, &c);
    bsm_barrier(ctx, thread);
    CHECK(threads >= 1);
}

static void test_nested(bsm_pool *pool) {
    bsm_parallel_for(pool, 0, 16, 1, nested_body, pool);
    bsm_context ctx = {.pool = pool, .threads = MAX_THREADS};
    bsm_fork(&ctx, nested_task, &ctx);
}

static void *caller(void *arg) {
    bsm_pool *pool = arg;
    uint64_t state = seed + (uint64_t)(uintptr_t)&state;
    for (int i = 0; i < 10; i++) {
        random_delay(&state);
        test_exchange(pool, 1 + (int64_t)(next_random(&state) % MAX_THREADS), 0);
        count c = {.begin = 0};
        bsm_parallel_for(pool, 0, LENGTH, 7, count_body, &c);
        check_counts(&c, LENGTH);
    }
    return NULL;
}

static void test_many_callers(bsm_pool *pool) {
    pthread_t callers[CALLERS];
    int all = rounds;
    rounds = all / 10 + 1;
    for (int i = 0; i < CALLERS; i++)
        CHECK(pthread_create(&callers[i], NULL, caller, pool) == 0);
    for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
    rounds = all;
}

int main(int argc, char **argv) {
    rounds = argc > 1 ? atoi(argv[1]) : 200;
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) * 2654435761u + 1 : 1;
    test_exchange(NULL, 4, 0);
    test_exchange(NULL, 4, 1);
    test_parallel_for(NULL);
    test_nested(NULL);
    for (int64_t size = 1; size <= MAX_THREADS; size++) {
        bsm_pool *pool = bsm_pool_create(size);
        CHECK(bsm_pool_size(pool) == size);
        test_exchange(pool, size, 0);
        test_exchange(pool, size, 1);
        test_exchange(pool, size / 2, 0); /* some workers take no part */
        test_exchange(pool, size + 3, 0); /* more than there are */
        test_parallel_for(pool);
        test_nested(pool);
        test_many_callers(pool);
        bsm_pool_destroy(pool);
    }
    puts("ok");
    return 0;
}
