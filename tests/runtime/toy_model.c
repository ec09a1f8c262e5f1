/* A "model" with the real calling convention, whose every answer depends on all that a session must
 * get right: the tokens of all positions, a window of them, rings that wrap, the rotary regime, a
 * mutated buffer, positions, output rows, the places in the state, and the weights.
 *
 * Layer 0 sees everything, layer 1 a window. A cell of the cache holds the position (as key) and
 * the token with the regime (as value); a cell that is not the expected one makes all logits
 * BROKEN.
 */
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bessemer.h"

#ifndef VOCAB
#define VOCAB 50
#endif
#ifndef WINDOW
#define WINDOW 4
#endif
#ifndef THRESHOLD
#define THRESHOLD 1000000
#endif

#define BROKEN -1e9f
#define TOKEN_NAN 13  /* logits NaN */
#define TOKEN_SLOW 7  /* waits for a cancel, 20 s at most */
#define TOKEN_SWEEP 8 /* every step on it is cancelled once by itself, as a stray signal would */

typedef struct { void *allocated; char *aligned; int64_t offset, size[1], stride[1]; } memref1;
typedef struct { void *allocated; float *aligned; int64_t offset, size[2], stride[2]; } memref2;

typedef struct {
    bsm_context *ctx;
    const float *bias;
    const int64_t *ids, *positions, *rows;
    char *state;
    memref2 *logits;
    int64_t count, row_count, broken;
} call;

static const int64_t *words(char *state) { return (const int64_t *)state; }
static char *slot(char *state) { return state + words(state)[7]; }
static float *cells(char *state, int layer, int part) {
    return (float *)(slot(state) + words(state)[8 + 4 * layer + part]);
}
static int64_t ring(char *state, int layer) { return words(state)[8 + 4 * layer + 2]; }

static int64_t regime(const bsm_context *ctx) {
    return ctx->sequence_length > THRESHOLD ? ctx->sequence_length - THRESHOLD : 0;
}

static int64_t weighted(call *c, int layer, int64_t from, int64_t to, int64_t modulus) {
    int64_t sum = 0, rows = ring(c->state, layer);
    for (int64_t q = from; q <= to; ++q) {
        float key = cells(c->state, layer, 0)[q % rows];
        float value = cells(c->state, layer, 1)[q % rows];
        if ((int64_t)key != q || (int64_t)value / 1000 != regime(c->ctx)) c->broken = 1;
        sum = (sum + ((int64_t)value % 1000) * (q + 3)) % modulus;
    }
    return sum;
}

static void compute(void *argument, int64_t thread, int64_t threads) {
    call *c = argument;
    for (int64_t r = thread; r < c->row_count; r += threads) {
        int64_t p = c->positions[c->rows[r]];
        int64_t all = weighted(c, 0, 0, p, 997);
        int64_t near = weighted(c, 1, p >= WINDOW ? p - WINDOW + 1 : 0, p, 991);
        int64_t kept = words(c->state)[4] ? c->count : 0;
        if (kept) memcpy(&kept, slot(c->state) + words(c->state)[16], sizeof kept);
        float *out = c->logits->aligned + r * c->logits->stride[0];
        for (int64_t v = 0; v < VOCAB; ++v) {
            int64_t mixed = (all * 31 + near * 17 + kept * 13 + (v + 1) * (all + near + 7)) % 101;
            out[v] = c->broken ? BROKEN : (float)mixed / 8.0f + c->bias[v];
            if (c->ids[c->rows[r]] == TOKEN_NAN) out[v] = 0.0f / 0.0f;
        }
    }
}

static int cancelled(call *c, int64_t begin, int64_t wanted) {
    /* What a cancelled step leaves behind it is anything. */
    for (int layer = 0; layer < 2; ++layer)
        for (int64_t t = begin; t < wanted; ++t)
            cells(c->state, layer, 0)[c->positions[t] % ring(c->state, layer)] = -5;
    c->ctx->status = BSM_CANCELLED;
    return 1;
}

static int feed(call *c) {
    static _Thread_local int stray;
    for (int64_t t = 0; t < c->count; ++t) {
        int64_t p = c->positions[t], id = c->ids[t];
        for (int layer = 0; layer < 2; ++layer) {
            cells(c->state, layer, 0)[p % ring(c->state, layer)] = (float)p;
            cells(c->state, layer, 1)[p % ring(c->state, layer)] =
                (float)(id + 1000 * regime(c->ctx));
        }
        if (words(c->state)[4]) {
            int64_t kept;
            memcpy(&kept, slot(c->state) + words(c->state)[16], sizeof kept);
            kept = (kept * 7 + id + 1) % 1009;
            memcpy(slot(c->state) + words(c->state)[16], &kept, sizeof kept);
        }
        if (id == TOKEN_SLOW)
            for (int i = 0; i < 20000; ++i) {
                if (__atomic_load_n(&c->ctx->cancel, __ATOMIC_RELAXED))
                    return cancelled(c, 0, c->count);
                usleep(1000);
            }
        if (id == TOKEN_SWEEP && (stray = !stray)) return cancelled(c, 0, c->count);
    }
    return 0;
}

static void forward(bsm_context *ctx, memref1 *weights, memref1 *ids, memref1 *positions,
                    memref1 *slots, memref1 *rows, memref1 *state, memref1 *scratch,
                    memref2 *logits, int decoding) {
    call c = {ctx, (const float *)weights->aligned, (const int64_t *)ids->aligned,
              (const int64_t *)positions->aligned, (const int64_t *)rows->aligned, state->aligned,
              logits, ids->size[0], rows->size[0], 0};
    int64_t chunk = words(c.state)[6];
    memset(scratch->aligned, 0xAB, scratch->size[0]);
    c.broken |= (uintptr_t)state->aligned % 4096 || (uintptr_t)weights->aligned % 64;
    c.broken |= (uintptr_t)scratch->aligned % 64 || words(c.state)[0] != 0x314D5342;
    c.broken |= positions->size[0] != c.count || slots->size[0] != c.count;
    c.broken |= c.count < 1 || c.count > chunk || logits->size[0] != c.row_count;
    c.broken |= logits->size[1] != VOCAB || logits->stride[0] != VOCAB || logits->stride[1] != 1;
    c.broken |= decoding && (c.count != 1 || c.row_count != 1);
    c.broken |= c.positions[c.count - 1] >= ctx->sequence_length || ctx->pool == NULL;
    ctx->status = BSM_OK;
    if (!feed(&c)) bsm_fork(ctx, compute, &c);
}

#define ENTRY(name, decoding)                                                                      \
    BSM_API void name(bsm_context *ctx, memref1 *weights, memref1 *ids, memref1 *positions,        \
                      memref1 *slots, memref1 *rows, memref1 *state, memref1 *scratch,             \
                      memref2 *logits) {                                                           \
        forward(ctx, weights, ids, positions, slots, rows, state, scratch, logits, decoding);      \
    }

ENTRY(_mlir_ciface_forward_prefill, 0)
ENTRY(_mlir_ciface_forward_decode, 1)
