/* The next token of a session. See api.h. */
#include "internal.h"
#include "sampler.h"

#include <math.h>

/* The lowest id of the largest logit; -1 unless that is a finite number. A session's logits are
 * never NaN. */
static int32_t largest(const float *logits, int64_t vocab_size) {
    int64_t best = 0;
    for (int64_t i = 1; i < vocab_size; i++)
        if (logits[i] > logits[best]) best = i;
    return isfinite(logits[best]) ? (int32_t)best : -1;
}

static bsm_status pick(bsm_session *session, bsm_sampler *sampler, int32_t *id, bsm_error *error) {
    const float *logits = bsm_logits(session);
    int64_t vocab_size = bsm_this_model.info.vocab_size;
    if (logits == NULL)
        return bsm_fail(error, BSM_ERROR_ARGUMENT,
                        "there are no logits to sample from: feed a token first");
    if (sampler != NULL)
        return bsm_sampler_pick(sampler, logits, vocab_size, bsm_tokens(session),
                                bsm_position(session), id, error);
    int32_t best = largest(logits, vocab_size);
    if (best < 0)
        return bsm_fail(error, BSM_ERROR_NUMERIC,
                        "the largest logit is infinite, so that no token can be chosen: `bessemer "
                        "verify` shows where the model's numbers broke down");
    *id = best;
    return BSM_OK;
}

bsm_status bsm_sample(bsm_session *session, bsm_sampler *sampler, int32_t *id, bsm_error *error) {
    if (id == NULL) return bsm_fail(error, BSM_ERROR_ARGUMENT, "bsm_sample: id must not be NULL");
    bsm_status status = bsm_session_enter(session, error);
    if (status != BSM_OK) return status;
    status = pick(session, sampler, id, error);
    bsm_session_leave(session);
    return status;
}
