/* What of the state memory stands for the tokens that are held: copies of a session, steering.
 * As runtime/state.py and runtime/session.py.
 */
#include "internal.h"

#include <math.h>
#include <string.h>

/* -- stretches -------------------------------------------------------------------------------- */

/* Bytes at the start of each copy of a part that the positions below `high_water` have filled. */
static int64_t filled_bytes(const bsm_part *part, int64_t high_water) {
    int64_t rows = high_water / part->rate;
    if (rows > part->rows) rows = part->rows;
    return (rows + part->block_rows - 1) / part->block_rows * part->block_bytes;
}

int bsm_state_visit(const bsm_description *model, const bsm_holding *held, bsm_visit *visit,
                    void *arg) {
    int64_t high_water = held->valid > 0 ? held->high_water : 0;
    int done = 0;
    for (int64_t i = 0; !done && i < model->part_count; i++) {
        const bsm_part *part = &model->parts[i];
        int64_t bytes = filled_bytes(part, high_water);
        for (int64_t copy = 0; !done && bytes > 0 && copy < part->copies; copy++)
            done = visit(arg, part->offset + copy * part->stride, bytes);
    }
    for (int64_t i = 0; !done && i < model->named_state_count; i++)
        done = visit(arg, model->named_states[i].offset, model->named_states[i].bytes);
    return done;
}

static int count(void *arg, int64_t offset, int64_t bytes) {
    (void)offset;
    *(int64_t *)arg += bytes;
    return 0;
}

int64_t bsm_state_held_bytes(const bsm_description *model, const bsm_holding *held) {
    int64_t bytes = 0;
    (void)bsm_state_visit(model, held, count, &bytes);
    return bytes;
}

/* -- copies ----------------------------------------------------------------------------------- */

typedef struct copying {
    const char *from;
    char *to;
} copying;

static int copy_stretch(void *arg, int64_t offset, int64_t bytes) {
    copying *c = arg;
    memcpy(c->to + offset, c->from + offset, (size_t)bytes);
    return 0;
}

bsm_status bsm_session_copy(bsm_session *session, bsm_session **copy, bsm_error *error) {
    if (copy != NULL) *copy = NULL;
    if (copy == NULL)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "bsm_session_copy: copy must not be NULL");
    bsm_status status = bsm_session_enter(session, error);
    if (status != BSM_OK) return status;
    bsm_session *made = NULL;
    status = bsm_session_create(session->model, &made, error);
    if (status == BSM_OK) {
        copying c = {session->state, made->state};
        (void)bsm_state_visit(&bsm_this_model, &session->held, copy_stretch, &c);
        memcpy(made->tokens, session->tokens,
               (size_t)session->held.position * sizeof *made->tokens);
        memcpy(made->logits, session->logits,
               (size_t)bsm_this_model.info.vocab_size * sizeof *made->logits);
        bsm_session_hold(made, session->held);
        made->has_logits = session->has_logits;
        *copy = made;
    }
    bsm_session_leave(session);
    return status;
}

/* -- steering --------------------------------------------------------------------------------- */

/* The directions and scales of bsm_steer; directions NULL: zeros, and no scale. */
typedef struct steering {
    const float *directions;
    int64_t count;
    float scales[2];
} steering;

static int all_finite(const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(values[i])) return 0;
    return 1;
}

/* How far an output may be moved, in its own size; steering.py says why. */
#define MOST_SCALE 1e4
#define ROUNDING 1e-4

/* Whether no scale, and none times the square of a direction's length, is beyond it. */
static int within_reach(const steering *s, int64_t width) {
    double one = fabs(s->scales[0]), other = fabs(s->scales[1]);
    double scale = one > other ? one : other;
    if (scale > MOST_SCALE) return 0;
    for (int64_t row = 0; s->directions != NULL && row < s->count; row += width) {
        double square = 0;
        for (int64_t i = row; i < row + width; i++)
            square += (double)s->directions[i] * s->directions[i];
        if (scale * square > MOST_SCALE * (1 + ROUNDING)) return 0;
    }
    return 1;
}

/* Put `s` in place; whether that changed anything. */
static int place(char *state, const steering *s) {
    float *directions = (float *)(state + bsm_this_model.directions_offset);
    float *scales = (float *)(state + bsm_this_model.scales_offset);
    int changed = 0;
    for (int64_t i = 0; i < s->count; i++) {
        float value = s->directions == NULL ? 0.0f : s->directions[i];
        changed |= directions[i] != value;
        directions[i] = value;
    }
    for (int i = 0; i < 2; i++) {
        changed |= scales[i] != s->scales[i];
        scales[i] = s->scales[i];
    }
    return changed;
}

bsm_status bsm_steer(bsm_session *session, const float *directions, double attention, double ffn,
                     bsm_error *error) {
    const bsm_info *info = &bsm_this_model.info;
    bsm_status status = bsm_session_enter(session, error);
    if (status != BSM_OK) return status;
    steering s = {directions, info->steering_layers * info->steering_width, {0.0f, 0.0f}};
    if (directions != NULL) {
        s.scales[0] = (float)attention;
        s.scales[1] = (float)ffn;
    }
    if (s.count == 0) {
        status = bsm_fail(error, BSM_ERROR_ARGUMENT,
                          "%s was compiled without steering; compile it with --steering",
                          info->name);
    } else if (!all_finite(s.scales, 2) ||
               (directions != NULL && !all_finite(directions, s.count))) {
        status = bsm_fail(error, BSM_ERROR_ARGUMENT,
                          "steering directions and scales must be finite numbers");
    } else if (!within_reach(&s, info->steering_width)) {
        status = bsm_fail(error, BSM_ERROR_ARGUMENT,
                          "steering by scales of %g and %g moves outputs by more than %g times "
                          "their size (a scale, or a scale times a direction's length squared); "
                          "1 takes a direction of length 1 out",
                          (double)s.scales[0], (double)s.scales[1], MOST_SCALE);
    } else if (place(session->state, &s)) {
        bsm_holding held = session->held;
        held.valid = 0;
        bsm_session_hold(session, held);
    }
    bsm_session_leave(session);
    return status;
}
