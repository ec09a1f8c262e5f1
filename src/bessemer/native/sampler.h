/* The next token from a row of logits: as bessemer.runtime.sampling, step by step and number by
 * number, so that the same logits, options and seed give the same ids in Python and in C.
 *
 *     bsm_sampling options = BSM_SAMPLING_GREEDY;
 *     options.temperature = 0.8;
 *     options.top_p = 0.95;
 *     options.has_seed = 1;
 *     options.seed = 42;
 *     bsm_sampler_create(&options, bsm_describe()->vocab_size, &sampler, &error);
 *
 * The steps: ids from vocab_limit on are cut off; the repetition penalty; the bias; the
 * temperature (0 takes the largest logit and ends here); top-k; top-p; min-p; one uniform number.
 * Ties are settled for the lower id. At least one id, the most likely one, always stays.
 */
/* Types: the same for all the models of a program. */
#ifndef BESSEMER_SAMPLER_TYPES_H
#define BESSEMER_SAMPLER_TYPES_H

#include "api.h"

/* Start from BSM_SAMPLING_GREEDY: all zero is not the default. */
typedef struct bsm_sampling {
    double temperature;      /* 0: greedy; else the divisor of the logits, finite */
    double top_p;            /* 0 to 1; 1 switches it off, 0 keeps the most likely id alone */
    double min_p;            /* 0 to 1; 0 switches it off */
    double repeat_penalty;   /* above 0; 1 switches it off; it works with greedy, too */
    int64_t top_k;           /* how many ids stay; 0 or -1 switches it off */
    int64_t repeat_last_n;   /* ids that the penalty looks back; -1: all of them, 0: off */
    const int32_t *bias_ids; /* [bias_count], none twice: ids whose logits are changed */
    const double *bias;      /* [bias_count]: what is added; -INFINITY bans the id */
    const int32_t *banned;   /* [banned_count]: ids that never come, in any order */
    int64_t bias_count;
    int64_t banned_count;
    uint64_t seed;              /* makes the draws repeatable, when has_seed is not 0 */
    const uint32_t *seed_words; /* [seed_count]: a seed of 2^64 or more, its lowest word first; */
    int64_t seed_count;         /* counts instead of `seed` when seed_count is above 0 */
    int32_t has_seed;           /* 0, and seed_count 0: the system's entropy */
    int32_t reserved;           /* 0 */
} bsm_sampling;

#define BSM_SAMPLING_GREEDY \
    {0.0, 1.0, 0.0, 1.0, 0, -1, NULL, NULL, NULL, 0, 0, 0, NULL, 0, 0, 0}

#endif

/* Functions: a model with a prefix has its own, by names that begin with it. */
#ifndef BESSEMER_SAMPLER_H
#define BESSEMER_SAMPLER_H

#ifdef __cplusplus
extern "C" {
#endif

/* A sampler with a random generator of its own (PCG64, seeded as numpy.random.PCG64): use one per
 * answer, and not from two threads at once. It belongs to no model: any may be sampled with it.
 * options: copied; NULL means BSM_SAMPLING_GREEDY.
 * vocab_limit: ids from here on never come (the tokenizer's size, or the row's; 1 to 2^31 - 1).
 * Sets *sampler, to NULL on failure: BSM_ERROR_ARGUMENT for a value outside its range, _MEMORY. */
BSM_API bsm_status bsm_sampler_create(const bsm_sampling *options, int64_t vocab_limit,
                                      bsm_sampler **sampler, bsm_error *error);

/* NULL is allowed. */
BSM_API void bsm_sampler_destroy(bsm_sampler *sampler);

/* The next id. logits: [vocab_size], left as they are. history: [count] the ids so far, prompt
 * included, for the penalty; ids outside the row are passed over.
 * Fails with BSM_ERROR_NUMERIC when the logits hold NaN or infinity or no id is left, _ARGUMENT,
 * _MEMORY. */
BSM_API bsm_status bsm_sampler_pick(bsm_sampler *sampler, const float *logits, int64_t vocab_size,
                                    const int32_t *history, int64_t count, int32_t *id,
                                    bsm_error *error);

/* The next number of the sampler's generator, uniform in [0, 1), as numpy's Generator.random(); NaN
 * without a sampler. */
BSM_API double bsm_sampler_uniform(bsm_sampler *sampler);

#ifdef __cplusplus
}
#endif
#endif
