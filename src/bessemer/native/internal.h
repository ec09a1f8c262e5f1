/* What the files behind api.h share. Not part of any interface.
 *
 * Every global that is defined here or in the sources is renamed with a model's prefix, so that two
 * models may be in one program; types are the compiler's alone and need no prefix.
 */
#ifndef BESSEMER_INTERNAL_H
#define BESSEMER_INTERNAL_H

#include "api.h"

#include <stdarg.h>
#include <stdint.h>

/* MLIR's memref descriptors; offset is 0 and strides are dense, rows first. */
typedef struct bsm_view1 {
    void *allocated, *aligned;
    int64_t offset, size[1], stride[1];
} bsm_view1;

typedef struct bsm_view2 {
    void *allocated, *aligned;
    int64_t offset, size[2], stride[2];
} bsm_view2;

/* An entry point of the compiled code: see model.h. */
typedef void bsm_entry(bsm_context *ctx, bsm_view1 *weights, bsm_view1 *ids, bsm_view1 *positions,
                       bsm_view1 *slots, bsm_view1 *output_rows, bsm_view1 *state,
                       bsm_view1 *scratch, bsm_view2 *logits);

/* The code for one level of processor features. */
typedef struct bsm_variant {
    const char *const *features; /* ended by NULL; the names of Linux's /proc/cpuinfo */
    bsm_entry *prefill;
    bsm_entry *decode;
} bsm_variant;

/* A part of the state that keeps the last `rows` positions. With n tokens held, what comes next
 * needs those from n / rate * rate + rate - reach on: of a sliding window rate is 1 and reach its
 * width; of rows that are pooled, rate is how many one stands for, and reach what it is made of. */
typedef struct bsm_ring {
    int64_t rate;
    int64_t reach;
    int64_t rows;
} bsm_ring;

/* Rows of the state memory that tokens fill: `copies` times (heads), `stride` bytes apart. When
 * the positions below h have been written, the first min(rows, h / rate) rows of each have, and
 * what stands for them are whole blocks of block_rows rows. */
typedef struct bsm_part {
    int64_t offset;
    int64_t copies, stride;
    int64_t rate, rows;
    int64_t block_rows, block_bytes;
} bsm_part;

/* A buffer of the model, in the state memory; zeros at the start. given: steps only read it. */
typedef struct bsm_region {
    int64_t offset;
    int64_t bytes;
    int64_t given;
} bsm_region;

/* Rotary factors that depend on the length of the whole sequence. LONGROPE: one set up to
 * `threshold` tokens and another one beyond. DYNAMIC: one set up to it, then one for every
 * length. */
enum { BSM_ROPE_FIXED = 0, BSM_ROPE_LONGROPE = 1, BSM_ROPE_DYNAMIC = 2 };

/* The constants of a model: a table that the compiler generates for each library
 * (codegen/description.py). */
typedef struct bsm_description {
    bsm_info info;
    int64_t weights_bytes; /* of weights.bin that hold tensors, from its start */
    const int64_t *state_header;
    int64_t state_header_words;
    const bsm_ring *rings;
    int64_t ring_count;
    const bsm_part *parts; /* in the order of a session file */
    int64_t part_count;
    const bsm_region *named_states;
    int64_t named_state_count;
    int64_t directions_offset; /* of what steers, in the state memory, floats: directions */
    int64_t scales_offset;     /* and scales [2]; 0: compiled without steering */
    int32_t mutates;           /* whether steps change named states */
    int64_t rope_threshold;
    int32_t rope_kind;
    const bsm_variant *variants; /* the best first */
    int64_t variant_count;
} bsm_description;

extern const bsm_description bsm_this_model;

/* Weights in memory. address is NULL where there are none. */
typedef struct bsm_weights {
    void *address;
    int64_t bytes;
} bsm_weights;

struct bsm_model {
    const bsm_description *description;
    const bsm_variant *variant;
    bsm_pool *pool;
    bsm_weights weights;
    int64_t references; /* the program's handle and the sessions; atomic */
};

/* -- errors.c */

/* Fill *error (unless it is NULL) and return the status. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
bsm_status bsm_fail(bsm_error *error, bsm_status status, const char *format, ...);

/* -- memory.c */

/* Zero bytes at a page boundary that become real when touched; NULL when there is no memory.
 * huge: ask for huge pages. */
void *bsm_allocate(int64_t bytes, int32_t huge);
void bsm_release(void *address, int64_t bytes);
/* Whether the system gives huge pages to who asks for them. */
int32_t bsm_huge_pages_offered(void);
/* Bytes that can be had without swapping; 0 where the system doesn't tell. */
int64_t bsm_available_memory(void);

/* -- sha256.c */

#define BSM_HASH_BYTES 32

typedef struct bsm_sha256 {
    uint32_t state[8];
    uint64_t bytes;
    uint8_t block[64];
} bsm_sha256;

void bsm_sha256_begin(bsm_sha256 *hash);
void bsm_sha256_add(bsm_sha256 *hash, const void *data, size_t bytes);
void bsm_sha256_end(bsm_sha256 *hash, uint8_t digest[BSM_HASH_BYTES]);

/* -- cpu.c */

/* The first of `features` (ended by NULL) that this processor, or its system, lacks; or NULL. */
const char *bsm_missing_feature(const char *const *features);

/* -- processors.c */

/* How many processors this process may use: affinity and cgroup quota; at least 1. */
int64_t bsm_usable_processors(void);

/* -- weights.c */

/* Check the weight file at `path` (or in the folder `path`) and bring it into memory. */
bsm_status bsm_weights_load(const bsm_description *description, const char *path, int32_t mode,
                            bsm_pool *pool, bsm_weights *weights, bsm_error *error);
void bsm_weights_release(bsm_weights *weights);

/* -- engine.c */

/* More workers than any machine has cores; each takes a stack and a part of the scratch memory. */
#define BSM_MOST_THREADS 1024

void bsm_model_reference(bsm_model *model);

/* -- session.c */

/* What the state memory is good for (as in runtime/state.py).
 * position: tokens of the history.  valid: how many of them, from the start, the state memory
 * stands for.  high_water: one past the highest position that may have been written since the state
 * was begun anew; rings have lost what lies more than their length below it.  regime: of the rotary
 * factors that the state was computed with. */
typedef struct bsm_holding {
    int64_t position, valid, high_water, regime;
} bsm_holding;

struct bsm_session {
    bsm_model *model;
    bsm_context context;
    bsm_holding held;
    int32_t busy;       /* atomic */
    int32_t has_logits; /* whether `logits` belong to the last token */
    char *state;
    char *scratch;
    int32_t *tokens; /* [context_length], the history */
    int64_t *inputs; /* [4][chunk]: ids, positions, slots, output rows */
    float *logits;   /* [vocab_size], after the last token */
};

/* Hold the session for one call: BSM_OK, or why not. */
bsm_status bsm_session_enter(bsm_session *session, bsm_error *error);
void bsm_session_leave(bsm_session *session);
/* What is held, changed as a whole; the logits are no longer those of the last token. */
void bsm_session_hold(bsm_session *session, bsm_holding held);

/* -- state.c */

/* A stretch of the state memory. Returns 0 to go on. */
typedef int bsm_visit(void *arg, int64_t offset, int64_t bytes);

/* Visit the stretches that stand for what is held, always in the same order; returns what the last
 * visit did. */
int bsm_state_visit(const bsm_description *model, const bsm_holding *held, bsm_visit *visit,
                    void *arg);
/* How long they are together. */
int64_t bsm_state_held_bytes(const bsm_description *model, const bsm_holding *held);

#endif
