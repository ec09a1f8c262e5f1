/* One conversation: its cache, its position, its token history. See api.h.
 *
 * What the memory is good for is kept in four numbers (`bsm_holding`): a call
 * notes what it is going to overwrite before it begins, so whatever ends it, the session knows
 * which tokens must be fed again from the history.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

/* What a call feeds and wants; the positions are filled by `take`. */
typedef struct feed {
    int64_t count;       /* of new tokens */
    const int64_t *rows; /* whose logits are wanted, among the new ones; NULL: the last ones */
    int64_t row_count;
    float *logits;       /* NULL: the session's own, for one row at most */
    int64_t at;          /* position of the first token that is fed: history to be fed again */
    int64_t first;       /* position of the first new token */
    int64_t end;
} feed;

static int64_t scratch_bytes(const bsm_model *model) {
    const bsm_info *info = &model->description->info;
    return info->scratch_shared_bytes + bsm_pool_size(model->pool) * info->scratch_thread_bytes;
}

static bsm_view1 view(void *address, int64_t size) {
    return (bsm_view1){address, address, 0, {size}, {1}};
}

/* Whether it is a session of this library. */
static int is_own(const bsm_session *session) {
    return session != NULL && session->model->description == &bsm_this_model;
}

bsm_status bsm_session_enter(bsm_session *session, bsm_error *error) {
    if (session == NULL)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "the session must not be NULL");
    if (!is_own(session))
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "the session is one of another model");
    if (__atomic_exchange_n(&session->busy, 1, __ATOMIC_ACQUIRE))
        return bsm_fail(error, BSM_ERROR_BUSY,
                        "the session is in use by another call; give each thread a session of its "
                        "own");
    return BSM_OK;
}

void bsm_session_leave(bsm_session *session) {
    __atomic_store_n(&session->busy, 0, __ATOMIC_RELEASE);
}

void bsm_session_hold(bsm_session *session, bsm_holding held) {
    session->has_logits = 0;
    session->held.valid = held.valid;
    session->held.high_water = held.high_water;
    session->held.regime = held.regime;
    __atomic_store_n(&session->held.position, held.position, __ATOMIC_RELAXED);
}

bsm_status bsm_session_create(bsm_model *model, bsm_session **session, bsm_error *error) {
    if (session != NULL) *session = NULL;
    if (model == NULL || session == NULL)
        return bsm_fail(error, BSM_ERROR_ARGUMENT,
                        "bsm_session_create: model and session must not be NULL");
    if (model->description != &bsm_this_model)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "the model was opened by another library");
    const bsm_info *info = &bsm_this_model.info;
    bsm_session *made = calloc(1, sizeof *made);
    if (made == NULL) return bsm_fail(error, BSM_ERROR_MEMORY, "no memory for a session");
    bsm_model_reference(model);
    made->model = model;
    made->context.pool = model->pool;
    made->context.threads = bsm_pool_size(model->pool);
    made->state = bsm_allocate(info->state_bytes, 0);
    made->scratch = bsm_allocate(scratch_bytes(model), 0);
    made->tokens = bsm_allocate(info->context_length * (int64_t)sizeof *made->tokens, 0);
    made->inputs = calloc((size_t)(4 * info->chunk), sizeof *made->inputs);
    made->logits = calloc((size_t)info->vocab_size, sizeof *made->logits);
    if (!made->state || !made->scratch || !made->tokens || !made->inputs || !made->logits) {
        bsm_session_destroy(made);
        return bsm_fail(error, BSM_ERROR_MEMORY,
                        "no memory for a session: its cache takes %lld bytes, its activations "
                        "%lld; compile the model with a smaller --context",
                        (long long)info->state_bytes, (long long)scratch_bytes(model));
    }
    memcpy(made->state, bsm_this_model.state_header,
           (size_t)bsm_this_model.state_header_words * sizeof(int64_t));
    *session = made;
    return BSM_OK;
}

void bsm_session_destroy(bsm_session *session) {
    if (!is_own(session)) return;
    const bsm_info *info = &session->model->description->info;
    bsm_release(session->state, info->state_bytes);
    bsm_release(session->scratch, scratch_bytes(session->model));
    bsm_release(session->tokens, info->context_length * (int64_t)sizeof *session->tokens);
    free(session->inputs);
    free(session->logits);
    bsm_close(session->model);
    free(session);
}

int64_t bsm_position(const bsm_session *session) {
    return is_own(session) ? __atomic_load_n(&session->held.position, __ATOMIC_RELAXED) : 0;
}

const int32_t *bsm_tokens(const bsm_session *session) {
    return is_own(session) ? session->tokens : NULL;
}

const float *bsm_logits(const bsm_session *session) {
    return is_own(session) && session->has_logits ? session->logits : NULL;
}

void bsm_cancel(bsm_session *session) {
    if (is_own(session)) __atomic_store_n(&session->context.cancel, 1, __ATOMIC_RELAXED);
}

/* -- what the memory is good for --------------------------------------------------------------- */

/* A number that is equal for two sequence lengths exactly if their rotary factors are. */
static int64_t regime(const bsm_description *model, int64_t length) {
    int64_t threshold = model->rope_threshold;
    if (model->rope_kind == BSM_ROPE_FIXED) return 0;
    if (length < threshold) length = threshold;
    if (model->rope_kind == BSM_ROPE_LONGROPE && length > threshold) return threshold + 1;
    return length;
}

/* How many of the held tokens need not be fed again: all that are valid, or 0. */
static int64_t usable(const bsm_description *model, const bsm_holding *held,
                      int64_t wanted_regime) {
    int64_t keep = held->valid < held->position ? held->valid : held->position;
    if (keep == 0 || held->regime != wanted_regime) return 0;
    if (keep == held->high_water) return keep; /* nothing was written beyond it */
    if (model->mutates) return 0;
    for (int64_t i = 0; i < model->ring_count; i++) {
        const bsm_ring *ring = &model->rings[i];
        int64_t needed = keep / ring->rate * ring->rate + ring->rate - ring->reach;
        if (needed < 0) needed = 0;
        if (needed < keep && held->high_water - ring->rows > needed) return 0;
    }
    return keep;
}

/* Note that the positions [at, end) are going to be overwritten. */
static void begin(bsm_session *session, int64_t at, int64_t end, int64_t wanted_regime) {
    const bsm_description *model = session->model->description;
    bsm_holding *held = &session->held;
    for (int64_t i = 0; at == 0 && i < model->named_state_count; i++) {
        const bsm_region *named = &model->named_states[i];
        if (!named->given) memset(session->state + named->offset, 0, (size_t)named->bytes);
    }
    int64_t valid = at < held->position ? at : held->position;
    held->valid = model->mutates ? 0 : valid;
    if (at == 0 || end > held->high_water) held->high_water = end;
    held->regime = wanted_regime;
    session->has_logits = 0;
    session->context.sequence_length = end;
}

/* -- feeding ----------------------------------------------------------------------------------- */

static int is_nan(const float *values, int64_t count) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) found |= values[i] != values[i];
    return found;
}

/* Answer a cancel; whether there was one. */
static int take_cancel(bsm_session *session) {
    return __atomic_exchange_n(&session->context.cancel, 0, __ATOMIC_RELAXED) != 0;
}

static bsm_status cancelled(bsm_error *error) {
    return bsm_fail(error, BSM_CANCELLED, "the call was cancelled");
}

/* One native call: the tokens of positions [at, end). Output rows are in `inputs` already; their
 * logits go to `logits` [row_count][vocab_size]. */
static bsm_status step(bsm_session *session, bsm_entry *entry, int64_t at, int64_t end,
                       int64_t row_count, float *logits, bsm_error *error) {
    const bsm_description *model = session->model->description;
    int64_t count = end - at, chunk = model->info.chunk, vocab = model->info.vocab_size;
    int64_t *ids = session->inputs, *positions = ids + chunk, *slots = positions + chunk;
    if (__atomic_load_n(&session->context.cancel, __ATOMIC_RELAXED) && take_cancel(session))
        return cancelled(error);
    for (int64_t i = 0; i < count; i++) {
        ids[i] = session->tokens[at + i];
        positions[i] = at + i;
    }
    bsm_view1 weights = view(session->model->weights.address, model->weights_bytes);
    bsm_view1 id_view = view(ids, count), position_view = view(positions, count);
    bsm_view1 slot_view = view(slots, count), row_view = view(slots + chunk, row_count);
    bsm_view1 state = view(session->state, model->info.state_bytes);
    bsm_view1 scratch = view(session->scratch, scratch_bytes(session->model));
    bsm_view2 out = {logits, logits, 0, {row_count, vocab}, {vocab, 1}};
    entry(&session->context, &weights, &id_view, &position_view, &slot_view, &row_view, &state,
          &scratch, &out);
    if (session->context.status != BSM_OK) {
        (void)take_cancel(session);
        return cancelled(error);
    }
    if (is_nan(logits, row_count * vocab))
        return bsm_fail(error, BSM_ERROR_NUMERIC,
                        "the model computed NaN at position %lld: its weights or its precision are "
                        "at fault; try --weights f32 --kv f32, and check the checkpoint",
                        (long long)end - 1);
    return BSM_OK;
}

/* Position whose logits are wanted as the i-th. */
static int64_t wanted(const feed *f, int64_t i) {
    return f->rows != NULL ? f->first + f->rows[i] : f->end - f->row_count + i;
}

/* Feed all of it in chunks; a single token whose logits are wanted is a decode step. */
static bsm_status run(bsm_session *session, const feed *f, bsm_error *error) {
    const bsm_variant *code = session->model->variant;
    const bsm_info *info = &session->model->description->info;
    int64_t *output_rows = session->inputs + 3 * info->chunk;
    int64_t done = 0;
    for (int64_t at = f->at, stop; at < f->end; at = stop) {
        stop = at + info->chunk < f->end ? at + info->chunk : f->end;
        int64_t count = 0;
        while (done + count < f->row_count && wanted(f, done + count) < stop) {
            output_rows[count] = wanted(f, done + count) - at;
            count++;
        }
        bsm_entry *entry = stop - at == 1 && count == 1 ? code->decode : code->prefill;
        float *logits = f->logits == NULL ? session->logits : f->logits + done * info->vocab_size;
        bsm_status status = step(session, entry, at, stop, count, logits, error);
        if (status != BSM_OK) return status;
        done += count;
    }
    return BSM_OK;
}

static bsm_status check_ids(const bsm_session *session, const int32_t *ids, int64_t count,
                            bsm_error *error) {
    const bsm_info *info = &session->model->description->info;
    int64_t position = session->held.position;
    if (ids == NULL) return bsm_fail(error, BSM_ERROR_ARGUMENT, "the token ids must not be NULL");
    if (count < 1)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "there must be at least one token id");
    if (count > info->context_length - position)
        return bsm_fail(error, BSM_ERROR_CONTEXT,
                        "%lld more tokens after %lld don't fit: the context holds %lld; shorten "
                        "the text, rewind, or compile with a larger --context",
                        (long long)count, (long long)position, (long long)info->context_length);
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= info->vocab_size)
            return bsm_fail(error, BSM_ERROR_ARGUMENT,
                            "token id %d is none of this model: they go from 0 to %lld",
                            (int)ids[i], (long long)info->vocab_size - 1);
    return BSM_OK;
}

static bsm_status check_rows(const feed *f, bsm_error *error) {
    if (f->row_count < 0 || f->row_count > f->count)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "%lld rows of %lld tokens are wanted",
                        (long long)f->row_count, (long long)f->count);
    if (f->row_count > 0 && f->logits == NULL)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "logits must not be NULL when rows are wanted");
    for (int64_t i = 0; f->rows != NULL && i < f->row_count; i++) {
        int64_t least = i == 0 ? 0 : f->rows[i - 1] + 1;
        if (f->rows[i] < least || f->rows[i] >= f->count)
            return bsm_fail(error, BSM_ERROR_ARGUMENT,
                            "wanted row number %lld is %lld: rows must ascend from 0 to %lld",
                            (long long)i, (long long)f->rows[i], (long long)f->count - 1);
    }
    return BSM_OK;
}

/* Feed checked ids, and before them what of the history must be fed again.
 * logits NULL: the last row, into the session's own memory. */
static bsm_status take(bsm_session *session, const int32_t *ids, feed f, bsm_error *error) {
    const bsm_description *model = session->model->description;
    bsm_holding *held = &session->held;
    f.first = held->position;
    f.end = f.first + f.count;
    int64_t wanted_regime = regime(model, f.end);
    f.at = usable(model, held, wanted_regime);
    memcpy(session->tokens + f.first, ids, (size_t)f.count * sizeof *ids);
    begin(session, f.at, f.end, wanted_regime);
    bsm_status status = run(session, &f, error);
    if (status != BSM_OK) return status;
    held->valid = f.end;
    __atomic_store_n(&held->position, f.end, __ATOMIC_RELAXED);
    session->has_logits = f.row_count > 0 && wanted(&f, f.row_count - 1) == f.end - 1;
    if (session->has_logits && f.logits != NULL) {
        int64_t vocab = model->info.vocab_size;
        memcpy(session->logits, f.logits + (f.row_count - 1) * vocab,
               (size_t)vocab * sizeof *f.logits);
    }
    return BSM_OK;
}

bsm_status bsm_prefill(bsm_session *session, const int32_t *ids, int64_t count, bsm_error *error) {
    bsm_status status = bsm_session_enter(session, error);
    if (status != BSM_OK) return status;
    feed f = {.count = count, .row_count = 1};
    status = check_ids(session, ids, count, error);
    if (status == BSM_OK) status = take(session, ids, f, error);
    bsm_session_leave(session);
    return status;
}

bsm_status bsm_prefill_rows(bsm_session *session, const int32_t *ids, int64_t count,
                            const int64_t *rows, int64_t row_count, float *logits,
                            bsm_error *error) {
    bsm_status status = bsm_session_enter(session, error);
    if (status != BSM_OK) return status;
    feed f = {.count = count, .rows = rows, .row_count = row_count, .logits = logits};
    status = check_ids(session, ids, count, error);
    if (status == BSM_OK) status = check_rows(&f, error);
    if (status == BSM_OK) status = take(session, ids, f, error);
    bsm_session_leave(session);
    return status;
}

bsm_status bsm_decode(bsm_session *session, int32_t id, bsm_error *error) {
    bsm_status status = bsm_session_enter(session, error);
    if (status != BSM_OK) return status;
    feed f = {.count = 1, .row_count = 1};
    status = check_ids(session, &id, 1, error);
    if (status == BSM_OK) status = take(session, &id, f, error);
    bsm_session_leave(session);
    return status;
}

bsm_status bsm_rewind(bsm_session *session, int64_t n, bsm_error *error) {
    bsm_status status = bsm_session_enter(session, error);
    if (status != BSM_OK) return status;
    bsm_holding *held = &session->held;
    if (n < 0 || n > held->position) {
        status = bsm_fail(error, BSM_ERROR_ARGUMENT,
                          "rewind to %lld: the session holds %lld tokens", (long long)n,
                          (long long)held->position);
    } else {
        (void)take_cancel(session);
        if (n < held->position) {
            session->has_logits = 0;
            if (held->valid > n) held->valid = n;
            __atomic_store_n(&held->position, n, __ATOMIC_RELAXED);
        }
    }
    bsm_session_leave(session);
    return status;
}
