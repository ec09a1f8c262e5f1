/* The C API of a compiled model: open it, make sessions, feed tokens, read logits, sample.
 *
 *     bsm_error error;
 *     bsm_model *model;
 *     bsm_session *session;
 *     if (bsm_open("model/weights.bin", NULL, &model, &error) != BSM_OK) ... error.message ...
 *     if (bsm_session_create(model, &session, &error) != BSM_OK) ...
 *     bsm_prefill(session, prompt, prompt_length, &error);
 *     while (... bsm_sample(session, sampler, &token, &error) == BSM_OK ...)
 *         bsm_decode(session, token, &error);
 *     bsm_session_destroy(session);
 *     bsm_close(model);
 *
 * C11 and C++11. Nothing here ends the program, prints, or keeps state of its own outside of the
 * handles. A model may be used by any number of threads at once. A session serves one call at a
 * time; a second one at the same time is refused (BSM_ERROR_BUSY). Sessions of one model share its
 * threads: their calls take turns, step by step.
 *
 * A handle that is NULL, or a model or session of another library, is refused by every function:
 * with BSM_ERROR_ARGUMENT by those that return a status. The others do nothing, or give 0 or NULL.
 *
 * Every function that can fail returns a status and takes `error`, which may be NULL, for the words
 * (it is written only on failure). A call that fails leaves the session as it was before.
 */
/* Types: the same for all the models of a program. */
#ifndef BESSEMER_API_TYPES_H
#define BESSEMER_API_TYPES_H

#include "bessemer.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* BSM_OK, BSM_CANCELLED, or an error. The numbers don't change. */
typedef int32_t bsm_status;

enum {
    BSM_ERROR_ARGUMENT = 2, /* a null pointer, an id that the model doesn't have, ... */
    BSM_ERROR_CONTEXT = 3,  /* the tokens don't fit the context */
    BSM_ERROR_MEMORY = 4,   /* the system gives no memory or no threads */
    BSM_ERROR_FILE = 5,     /* a file is missing, or can't be read or written */
    BSM_ERROR_WEIGHTS = 6,  /* the weight file is damaged, cut off, or of another model */
    BSM_ERROR_CPU = 7,      /* this processor lacks what the code was compiled for */
    BSM_ERROR_BUSY = 8,     /* the session is in use by another call */
    BSM_ERROR_NUMERIC = 9,  /* the model computed NaN, or no token is left to sample */
    BSM_ERROR_HEADER = 10,  /* the program was compiled with the header of another model */
    BSM_ERROR_TOKENIZER = 11, /* the tokenizer file is damaged, or of another model */
    BSM_ERROR_SESSION = 12  /* the session file is damaged, or of another model */
};

#define BSM_MESSAGE_BYTES 500

/* What went wrong. message: one line of UTF-8 without a line end: what is wrong, where, and what
 * to do. Never longer than its room; always ended by a zero byte. */
typedef struct bsm_error {
    bsm_status status;
    char message[BSM_MESSAGE_BYTES];
} bsm_error;

/* How the weights come into memory. Mapped, they are shared between processes and nothing is read
 * at the start. In huge pages they take memory of their own and some time to read, and decoding is
 * faster. */
enum {
    BSM_WEIGHTS_AUTO = 0, /* huge pages where the system offers them and memory is plenty */
    BSM_WEIGHTS_MAP = 1,
    BSM_WEIGHTS_HUGE = 2
};

/* Options of bsm_open; all zero (or NULL instead of it) means the defaults. */
typedef struct bsm_options {
    /* Workers of a call, the caller included, 1 to 1024. 0: the environment's BESSEMER_THREADS,
     * else as many as this process may use processors (affinity and cgroup quota). */
    int64_t threads;
    /* BSM_WEIGHTS_*. AUTO: the environment's BESSEMER_WEIGHTS (auto, map, huge) decides, if set. */
    int32_t weights_mode;
    int32_t reserved; /* 0 */
    /* BSM_ABI_HASH, the macro of the model's own header: opening fails with BSM_ERROR_HEADER if the
     * library was made with another header. NULL: not checked. */
    const char *abi_hash;
} bsm_options;

/* What a library says about itself. Strings and arrays live as long as the program. */
typedef struct bsm_info {
    const char *name;           /* of the model, for messages */
    const char *target;         /* the triple that it was compiled for */
    const char *abi_hash;       /* 64 hex digits; the manifest's abi.hash */
    const char *weights_hash;   /* 64 hex digits; of weights.bin's tensor table, with each tensor's
                                   hash; the manifest's files["weights.bin"].sha256 */
    int64_t vocab_size;         /* floats of a row of logits */
    int64_t hidden_size;        /* 0: no hidden state is given */
    int64_t context_length;     /* tokens that a session holds at most */
    int64_t chunk;              /* token rows of one step at most */
    int64_t weights_file_bytes; /* size of weights.bin */
    int64_t state_bytes;        /* memory of a session's cache; real when it is filled */
    int64_t scratch_shared_bytes; /* memory of a session for activations: this, and for each */
    int64_t scratch_thread_bytes; /* worker that */
    int64_t steering_layers;      /* rows of bsm_steer's directions; 0: compiled without steering */
    int64_t steering_width;       /* floats of such a row */
} bsm_info;

typedef struct bsm_model bsm_model;     /* code, weights and threads; read-only once open */
typedef struct bsm_session bsm_session; /* one conversation: cache, position, token history */
typedef struct bsm_sampler bsm_sampler; /* how the next token is chosen: see sampler.h */

#ifdef __cplusplus
}
#endif
#endif

/* Functions: a model with a prefix has its own, by names that begin with it. */
#ifndef BESSEMER_API_H
#define BESSEMER_API_H

#ifdef __cplusplus
extern "C" {
#endif

/* -- the model -------------------------------------------------------------------------------- */

/* What this library is, without opening anything. Never NULL. */
BSM_API const bsm_info *bsm_describe(void);

/* Check this processor and the weight file, bring the weights into memory, and start the threads.
 *
 * path: the weight file, or the folder with weights.bin in it. Always checked, in milliseconds: the
 * processor's features; that the file has the size and the tensor table (names, dtypes, shapes,
 * places, recorded hashes) that the library was compiled with. The file must not be changed or cut
 * while the model is open. options: NULL for the defaults.
 * Sets *model, to NULL on failure: BSM_ERROR_ARGUMENT, _HEADER, _CPU, _FILE, _WEIGHTS, _MEMORY. */
BSM_API bsm_status bsm_open(const char *path, const bsm_options *options, bsm_model **model,
                            bsm_error *error);

/* Give the model back. Its memory and threads go with its last session. Nothing happens for NULL,
 * or for another library's model. */
BSM_API void bsm_close(bsm_model *model);

/* Workers of a call: fewer than asked for where the system refuses threads. 0 for NULL, or another
 * library's model. */
BSM_API int64_t bsm_threads(const bsm_model *model);

/* A few words for a status, such as "out of memory"; never NULL. */
BSM_API const char *bsm_status_text(bsm_status status);

/* -- sessions --------------------------------------------------------------------------------- */

/* An empty session. Its memory becomes real as tokens come.
 * Sets *session, to NULL on failure: BSM_ERROR_ARGUMENT, _MEMORY. */
BSM_API bsm_status bsm_session_create(bsm_model *model, bsm_session **session, bsm_error *error);

/* Give the session back; no call may be running on it. Nothing happens for NULL, or for a session
 * of another library. */
BSM_API void bsm_session_destroy(bsm_session *session);

/* How many tokens are held, and which: bsm_position(session) ids, oldest first, in place until the
 * next call that changes the session. */
BSM_API int64_t bsm_position(const bsm_session *session);
BSM_API const int32_t *bsm_tokens(const bsm_session *session);

/* -- feeding ---------------------------------------------------------------------------------- */

/* Feed `count` (at least 1) tokens at the current position, in chunks; any number that fits the
 * context. Afterwards bsm_logits gives the logits after the last one.
 * Fails with BSM_ERROR_ARGUMENT, _CONTEXT, _BUSY, _NUMERIC; BSM_CANCELLED after bsm_cancel. */
BSM_API bsm_status bsm_prefill(bsm_session *session, const int32_t *ids, int64_t count,
                               bsm_error *error);

/* The same, with the logits of chosen rows: rows [row_count] are indices into ids, ascending, none
 * twice; NULL means the last row_count ones. logits: [row_count][vocab_size], the caller's; may be
 * NULL where row_count is 0. Afterwards bsm_logits is there if the last id's row was among them. */
BSM_API bsm_status bsm_prefill_rows(bsm_session *session, const int32_t *ids, int64_t count,
                                    const int64_t *rows, int64_t row_count, float *logits,
                                    bsm_error *error);

/* Feed one token; afterwards bsm_logits gives the logits after it. Fails as bsm_prefill. */
BSM_API bsm_status bsm_decode(bsm_session *session, int32_t id, bsm_error *error);

/* The logits after the last token, [vocab_size], the session's own memory, in place until the next
 * call that changes the session. NULL where there are none: at the start, after a bsm_rewind that
 * forgets tokens, after bsm_prefill_rows without the last row, after a call that was cancelled or
 * computed NaN. */
BSM_API const float *bsm_logits(const bsm_session *session);

/* The next token by `sampler` (NULL: the lowest id of the largest logit) from bsm_logits and the
 * session's history; feeds nothing. Fails with BSM_ERROR_ARGUMENT when there are no logits,
 * BSM_ERROR_NUMERIC when they hold NaN or infinity or no token is left, BSM_ERROR_BUSY. */
BSM_API bsm_status bsm_sample(bsm_session *session, bsm_sampler *sampler, int32_t *id,
                              bsm_error *error);

/* Keep the first n tokens and forget the rest. What the memory has lost of the kept ones (sliding
 * windows) is computed again from the history with the next call. Also withdraws a bsm_cancel that
 * no call has answered yet. Fails with BSM_ERROR_ARGUMENT unless 0 <= n <= position, _BUSY. */
BSM_API bsm_status bsm_rewind(bsm_session *session, int64_t n, bsm_error *error);

/* -- copies, files, steering ------------------------------------------------------------------ */

/* A copy that goes its own way from here: what is held, the logits and the steering. It costs
 * memory for what is held, so a prompt that many conversations begin with is computed once.
 * Sets *copy, to NULL on failure: BSM_ERROR_ARGUMENT, _MEMORY, _BUSY. */
BSM_API bsm_status bsm_session_copy(bsm_session *session, bsm_session **copy, bsm_error *error);

/* Write the tokens and what was computed of them to a file, whole or not at all: it is written
 * beside `path` and renamed. A symbolic link stays, and the file that it leads to is written. What
 * exists and is no regular file (a folder, a pipe, a device) is refused. Python's Session.load
 * reads it. Fails with BSM_ERROR_ARGUMENT, _FILE, _MEMORY, _BUSY. */
BSM_API bsm_status bsm_session_save(bsm_session *session, const char *path, bsm_error *error);

/* Replace what is held by a session that bsm_session_save, or Python's Session.save, wrote. The
 * whole file is checked first, and must come from this very model (layouts and weights). There are
 * no logits then: they come with the next token, or by bsm_rewind by one and the last token again.
 * Fails with BSM_ERROR_FILE, _SESSION for a damaged file or one of another model, _ARGUMENT,
 * _MEMORY, _BUSY; the session is then as it was. */
BSM_API bsm_status bsm_session_load(bsm_session *session, const char *path, bsm_error *error);

/* Move the outputs of sublayers along directions from now on: y becomes y - scale * (y . d) * d,
 * with the direction d of its layer. What is held is computed again with the next call.
 * directions: [steering_layers][steering_width], finite, copied; NULL: no longer. attention, ffn:
 * the scales of the two kinds of sublayer; a d of length 1 and scale 1 take the direction out. A
 * scale, and a scale times the square of a direction's length, is at most 10000: beyond it numbers
 * overflow, and all logits are equal.
 * Fails with BSM_ERROR_ARGUMENT, also for a model that was compiled without steering, _BUSY. */
BSM_API bsm_status bsm_steer(bsm_session *session, const float *directions, double attention,
                             double ffn, bsm_error *error);

/* -- ending a call ---------------------------------------------------------------------------- */

/* Make the running prefill or decode return BSM_CANCELLED at its next layer; if none is running, or
 * the running one is past its last layer, the next one. The session is then as before that call.
 * For any thread, and for a signal handler: all that it changes is one atomic store. */
BSM_API void bsm_cancel(bsm_session *session);

#ifdef __cplusplus
}
#endif
#endif
