/* The thread pool and the call context that ship inside every compiled model.
 *
 * C11 and C++11; the implementation (pool.c) needs pthreads and nothing else.
 * A pool may serve many callers: it runs one job at a time, and the others queue.
 */
/* Types: the same for all the models of a program. */
#ifndef BESSEMER_TYPES_H
#define BESSEMER_TYPES_H

#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define BSM_API __attribute__((visibility("default")))
#else
#define BSM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bsm_pool bsm_pool;

enum { BSM_OK = 0, BSM_CANCELLED = 1 };

/* One per session, passed to every forward call. Compiled code loads the fields by their offsets:
 * keep the order. Zero-initialise it; `reserved` belongs to the pool. */
typedef struct bsm_context {
    bsm_pool *pool;          /* NULL: run serially on the caller */
    int64_t threads;         /* workers that take part in this call; clamped to 1 .. pool size */
    int64_t sequence_length; /* intended total length (rope scaling that depends on it) */
    float *hidden;           /* optional output [rows, hidden], or NULL */
    int32_t cancel;          /* set by anyone, atomically; 0 = go on */
    int32_t status;          /* result of the last forward: BSM_OK or BSM_CANCELLED */
    uint64_t reserved[8];    /* [0]: workers of the running fork; [1], [2]: published cancel */
} bsm_context;

typedef void (*bsm_task)(void *args, int64_t thread, int64_t threads);

#ifdef __cplusplus
}
#endif
#endif

/* Functions: a model with a prefix has its own, by names that begin with it. */
#ifndef BESSEMER_POOL_H
#define BESSEMER_POOL_H

#ifdef __cplusplus
extern "C" {
#endif

/* A pool of `threads` workers (at least 1), of which the caller of a job is one. When the system
 * refuses threads the pool is smaller: see bsm_pool_size. NULL when there is no memory. */
BSM_API bsm_pool *bsm_pool_create(int64_t threads);
/* Ends and joins the workers. No call may be running or waiting on the pool. NULL is allowed. */
BSM_API void bsm_pool_destroy(bsm_pool *pool);
/* The workers of a pool; 1 for NULL. */
BSM_API int64_t bsm_pool_size(bsm_pool *pool);

/* Every worker runs fn(args, thread, threads) once; the caller is worker 0; returns when all are
 * done. Sets ctx->status to BSM_OK at the start. Inside another job, or without a context (NULL, in
 * the two calls below, too), it runs serially. */
BSM_API void bsm_fork(bsm_context *ctx, bsm_task fn, void *args);

/* All workers of the running fork meet: what each wrote before is seen by all after. */
BSM_API void bsm_barrier(bsm_context *ctx, int64_t thread);

/* A barrier that also returns whether the call is cancelled, the same answer to every worker.
 * A cancel sets ctx->status to BSM_CANCELLED. */
BSM_API int32_t bsm_poll_cancel(bsm_context *ctx, int64_t thread);

/* body(arg, b, e) for pieces of [begin, end) of at most `grain` elements, on any worker, in any
 * order. Inside another job, or without a pool, it runs serially. */
BSM_API void bsm_parallel_for(bsm_pool *pool, int64_t begin, int64_t end, int64_t grain,
                              void (*body)(void *arg, int64_t begin, int64_t end), void *arg);

#ifdef __cplusplus
}
#endif
#endif
