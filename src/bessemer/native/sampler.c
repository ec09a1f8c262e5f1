/* The sampler: the steps and the float64 arithmetic of bessemer.runtime.sampling. */
#include "sampler.h"

#include "internal.h"
#include "random.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Fused multiply-adds would round otherwise than NumPy does. (GCC fuses nothing in ISO mode.) */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

enum {
    TOP_P_HEAD = 256,    /* as in sampling.py: top-p sorts a head of the vocabulary, and grows it */
    TOP_P_GROWTH = 8,    /* by this factor until its mass reaches p */
    PAIRWISE_BLOCK = 128, /* numpy.sum adds blocks of so many, in eight sums, and halves above */
    ENTROPY_WORDS = 4    /* 128 bits, as SeedSequence takes by itself */
};
static const double MASS_SLACK = 1e-12;

typedef struct {
    double value;
    int64_t position;
} ranked;

struct bsm_sampler {
    bsm_sampling options;
    int64_t limit;
    bsm_random random;
    int64_t room;      /* elements of the arrays below */
    double *scores;    /* by id, then by place in ids */
    double *probs;     /* by place in ids */
    double *work;      /* of select */
    int32_t *ids;      /* what may still be drawn, ascending */
    int64_t *places;   /* chosen places of ids */
    ranked *order;     /* of top-p */
    uint8_t *seen;     /* of the penalty; all zero between calls */
};

/* -- creation --------------------------------------------------------------------------------- */

static bsm_status check_options(const bsm_sampling *o, int64_t limit, bsm_error *error) {
    const double tiny = (double)FLT_MIN; /* can't push a float32 logit out of float64's range */
    if (!(o->temperature >= 0 && o->temperature <= DBL_MAX))
        return bsm_fail(error, BSM_ERROR_ARGUMENT,
                        "temperature is %g; it must be a finite number of at least 0",
                        o->temperature);
    if (!(o->top_p >= 0 && o->top_p <= 1))
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "top_p is %g; it must be between 0 and 1",
                        o->top_p);
    if (!(o->min_p >= 0 && o->min_p <= 1))
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "min_p is %g; it must be between 0 and 1",
                        o->min_p);
    if (!(o->repeat_penalty >= tiny && o->repeat_penalty <= 1 / tiny))
        return bsm_fail(error, BSM_ERROR_ARGUMENT,
                        "repeat_penalty is %g; it must be from %.2g to %.2g",
                        o->repeat_penalty, tiny, 1 / tiny);
    if (o->top_k < -1)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "top_k is %lld; it must be from 1, or 0 or -1",
                        (long long)o->top_k);
    if (o->repeat_last_n < -1)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "repeat_last_n is %lld; it must be at least -1",
                        (long long)o->repeat_last_n);
    if (limit < 1 || limit > INT32_MAX)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "vocab_limit is %lld; it must be from 1 to %d",
                        (long long)limit, INT32_MAX);
    if (o->bias_count < 0 || (o->bias_count > 0 && (o->bias_ids == NULL || o->bias == NULL)) ||
        o->banned_count < 0 || (o->banned_count > 0 && o->banned == NULL) || o->seed_count < 0 ||
        (o->seed_count > 0 && o->seed_words == NULL))
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "a list of the sampling options is missing");
    for (int64_t i = 0; i < o->bias_count; i++) {
        if (o->bias_ids[i] < 0 || o->bias_ids[i] >= limit)
            return bsm_fail(error, BSM_ERROR_ARGUMENT,
                            "the bias names token %d, but the vocabulary ends at %lld",
                            o->bias_ids[i], (long long)limit - 1);
        if (!(o->bias[i] <= DBL_MAX))
            return bsm_fail(error, BSM_ERROR_ARGUMENT,
                            "the bias of token %d must be a finite number, or -infinity",
                            o->bias_ids[i]);
    }
    return BSM_OK;
}

static void *copy_of(const void *data, int64_t count, size_t size) {
    void *copy = malloc((size_t)count * size + 1);
    if (copy != NULL && count > 0) memcpy(copy, data, (size_t)count * size);
    return copy;
}

static bsm_status seed(bsm_sampler *sampler, bsm_error *error) {
    const bsm_sampling *o = &sampler->options;
    uint32_t words[ENTROPY_WORDS] = {(uint32_t)o->seed, (uint32_t)(o->seed >> 32)};
    if (o->seed_count > 0) {
        bsm_random_seed(&sampler->random, o->seed_words, o->seed_count);
    } else if (o->has_seed) {
        bsm_random_seed(&sampler->random, words, 2);
    } else if (o->temperature > 0) { /* greedy draws nothing */
        if (!bsm_random_entropy(words, ENTROPY_WORDS))
            return bsm_fail(error, BSM_ERROR_FILE,
                            "the system gives no random numbers (/dev/urandom): give a seed");
        bsm_random_seed(&sampler->random, words, ENTROPY_WORDS);
    }
    return BSM_OK;
}

bsm_status bsm_sampler_create(const bsm_sampling *options, int64_t vocab_limit,
                              bsm_sampler **sampler, bsm_error *error) {
    static const bsm_sampling greedy = BSM_SAMPLING_GREEDY;
    if (sampler == NULL)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "bsm_sampler_create needs a place to put it");
    *sampler = NULL;
    if (options == NULL) options = &greedy;
    bsm_status status = check_options(options, vocab_limit, error);
    if (status != BSM_OK) return status;
    bsm_sampler *made = calloc(1, sizeof *made);
    if (made == NULL) return bsm_fail(error, BSM_ERROR_MEMORY, "no memory for a sampler");
    made->options = *options;
    made->limit = vocab_limit;
    made->options.bias_ids = copy_of(options->bias_ids, options->bias_count, sizeof(int32_t));
    made->options.bias = copy_of(options->bias, options->bias_count, sizeof(double));
    made->options.banned = copy_of(options->banned, options->banned_count, sizeof(int32_t));
    if (made->options.bias_ids == NULL || made->options.bias == NULL ||
        made->options.banned == NULL)
        status = bsm_fail(error, BSM_ERROR_MEMORY, "no memory for a sampler");
    else
        status = seed(made, error);
    made->options.seed_words = NULL; /* the caller's; not needed any more */
    if (status != BSM_OK) {
        bsm_sampler_destroy(made);
        return status;
    }
    *sampler = made;
    return BSM_OK;
}

void bsm_sampler_destroy(bsm_sampler *sampler) {
    if (sampler == NULL) return;
    free((void *)sampler->options.bias_ids);
    free((void *)sampler->options.bias);
    free((void *)sampler->options.banned);
    free(sampler->scores);
    free(sampler->probs);
    free(sampler->work);
    free(sampler->ids);
    free(sampler->places);
    free(sampler->order);
    free(sampler->seen);
    free(sampler);
}

double bsm_sampler_uniform(bsm_sampler *sampler) {
    return sampler == NULL ? (double)NAN : bsm_random_uniform(&sampler->random);
}

/* Room for rows of n numbers. */
static int reserve(bsm_sampler *s, int64_t n) {
    if (n <= s->room) return 1;
    size_t count = (size_t)n;
    double *scores = realloc(s->scores, count * sizeof *scores);
    if (scores != NULL) s->scores = scores;
    double *probs = realloc(s->probs, count * sizeof *probs);
    if (probs != NULL) s->probs = probs;
    double *work = realloc(s->work, count * sizeof *work);
    if (work != NULL) s->work = work;
    int32_t *ids = realloc(s->ids, count * sizeof *ids);
    if (ids != NULL) s->ids = ids;
    int64_t *places = realloc(s->places, count * sizeof *places);
    if (places != NULL) s->places = places;
    ranked *order = realloc(s->order, count * sizeof *order);
    if (order != NULL) s->order = order;
    uint8_t *seen = realloc(s->seen, count);
    if (seen != NULL) memset(s->seen = seen, 0, count);
    if (!scores || !probs || !work || !ids || !places || !order || !seen) return 0;
    s->room = n;
    return 1;
}

/* -- numbers ---------------------------------------------------------------------------------- */

/* The sum in numpy's order: eight sums side by side in a block, blocks added pairwise. */
static double pairwise_sum(const double *a, int64_t n) {
    if (n < 8) {
        double sum = 0;
        for (int64_t i = 0; i < n; i++) sum += a[i];
        return sum;
    }
    if (n > PAIRWISE_BLOCK) {
        int64_t half = n / 2 - n / 2 % 8;
        return pairwise_sum(a, half) + pairwise_sum(a + half, n - half);
    }
    double r[8];
    for (int k = 0; k < 8; k++) r[k] = a[k];
    int64_t i = 8;
    for (; i < n - n % 8; i += 8)
        for (int k = 0; k < 8; k++) r[k] += a[i + k];
    double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    for (; i < n; i++) sum += a[i];
    return sum;
}

static void scale_to_one(double *values, int64_t n) {
    double sum = pairwise_sum(values, n);
    for (int64_t i = 0; i < n; i++) values[i] /= sum;
}

/* The k-th largest (k from 1) of the n numbers, which it reorders: quickselect in three parts. */
static double kth_largest(double *a, int64_t n, int64_t k) {
    for (;;) {
        double x = a[0], y = a[n / 2], z = a[n - 1];
        double low = x < y ? x : y, high = x < y ? y : x;
        double pivot = z < low ? low : z > high ? high : z;
        int64_t above = 0, end = 0, rest = n; /* [0, above) > pivot, [above, end) equal */
        while (end < rest) {
            double v = a[end];
            if (v > pivot) {
                a[end++] = a[above];
                a[above++] = v;
            } else if (v < pivot) {
                a[end] = a[--rest];
                a[rest] = v;
            } else {
                end++;
            }
        }
        if (k <= above) {
            n = above;
        } else if (k <= end) {
            return pivot;
        } else {
            a += end;
            n -= end;
            k -= end;
        }
    }
}

/* The places, ascending, of the k largest of values [n]; the lower place wins a tie. */
static int64_t largest(bsm_sampler *s, const double *values, int64_t n, int64_t k) {
    if (k >= n) {
        for (int64_t i = 0; i < n; i++) s->places[i] = i;
        return n;
    }
    memcpy(s->work, values, (size_t)n * sizeof *values);
    double threshold = kth_largest(s->work, n, k);
    int64_t above = 0, count = 0;
    for (int64_t i = 0; i < n; i++) above += values[i] > threshold;
    int64_t level = k - above; /* how many that equal the threshold still fit */
    for (int64_t i = 0; i < n; i++)
        if (values[i] > threshold || (values[i] == threshold && level-- > 0))
            s->places[count++] = i;
    return count;
}

static int by_value(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->value != y->value) return x->value < y->value ? 1 : -1;
    return x->position < y->position ? -1 : 1;
}

static int by_place(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* The places, ascending, of the shortest run of best scores whose mass reaches p. Different scores
 * may round to one probability: the scores tell which is more likely. */
static int64_t nucleus(bsm_sampler *s, int64_t n, double p) {
    int64_t size = n < TOP_P_HEAD ? n : TOP_P_HEAD;
    for (;; size = size > n / TOP_P_GROWTH ? n : size * TOP_P_GROWTH) {
        int64_t count = largest(s, s->scores, n, size);
        for (int64_t i = 0; i < count; i++)
            s->order[i] = (ranked){s->scores[s->places[i]], s->places[i]};
        qsort(s->order, (size_t)count, sizeof *s->order, by_value);
        double mass = 0;
        int64_t keep = 0;
        while (keep < count) {
            mass += s->probs[s->order[keep++].position];
            if (mass + MASS_SLACK >= p) break;
        }
        /* Rounding may leave the whole sum just below p; then everything stays. */
        if (mass + MASS_SLACK < p && size < n) continue;
        for (int64_t i = 0; i < keep; i++) s->places[i] = s->order[i].position;
        qsort(s->places, (size_t)keep, sizeof *s->places, by_place);
        return keep;
    }
}

/* -- the steps -------------------------------------------------------------------------------- */

/* NaN and infinity anywhere in the row are an error. */
static bsm_status check_row(const float *logits, int64_t size, bsm_error *error) {
    for (int64_t i = 0; i < size; i++)
        if (!(logits[i] <= FLT_MAX))
            return bsm_fail(error, BSM_ERROR_NUMERIC,
                            "the logits hold %s (token %lld): the model's numbers broke down; "
                            "`bessemer verify` shows where",
                            isnan(logits[i]) ? "NaN" : "infinity", (long long)i);
    return BSM_OK;
}

static void penalise(bsm_sampler *s, int64_t n, const int32_t *history, int64_t count) {
    int64_t last = s->options.repeat_last_n;
    int64_t from = last < 0 || last > count ? 0 : count - last;
    double penalty = s->options.repeat_penalty;
    for (int64_t i = from; i < count; i++) {
        int32_t id = history[i];
        if (id < 0 || id >= n || s->seen[id]) continue;
        s->seen[id] = 1;
        double value = s->scores[id];
        s->scores[id] = value > 0 ? value / penalty : value * penalty;
    }
    for (int64_t i = from; i < count; i++)
        if (history[i] >= 0 && history[i] < n) s->seen[history[i]] = 0;
}

static int64_t argmax(const double *scores, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (scores[i] > scores[best]) best = i;
    return best;
}

/* The chosen places stay, and their probabilities sum to 1 again. */
static int64_t keep_places(bsm_sampler *s, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        s->ids[i] = s->ids[s->places[i]];
        s->probs[i] = s->probs[s->places[i]];
    }
    scale_to_one(s->probs, count);
    return count;
}

static int64_t keep_at_least(bsm_sampler *s, int64_t n, double least) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++)
        if (s->probs[i] >= least && s->probs[i] > 0) s->places[count++] = i;
    return keep_places(s, count);
}

/* Fill ids and probs from scores [n], which move to their places; returns how many. best: where the
 * largest score is. */
static int64_t distribution(bsm_sampler *s, int64_t n, int64_t best) {
    const bsm_sampling *o = &s->options;
    double peak = s->scores[best];
    int64_t count = largest(s, s->scores, n, o->top_k > 0 ? o->top_k : n);
    for (int64_t i = 0; i < count; i++) {
        s->ids[i] = (int32_t)s->places[i];
        s->scores[i] = s->scores[s->places[i]]; /* places ascend: none is overwritten unread */
        /* The maximum goes first, so that a tiny temperature gives -inf and never inf - inf. */
        s->probs[i] = exp((s->scores[i] - peak) / o->temperature);
    }
    scale_to_one(s->probs, count);
    if (o->top_p < 1) count = keep_places(s, nucleus(s, count, o->top_p));
    if (o->min_p > 0) {
        double top = 0;
        for (int64_t i = 0; i < count; i++) top = s->probs[i] > top ? s->probs[i] : top;
        count = keep_at_least(s, count, o->min_p * top);
    }
    return keep_at_least(s, count, 0);
}

/* Invert the cumulative distribution, ids ascending, at one uniform number of [0, 1). */
static int32_t draw(bsm_sampler *s, int64_t n) {
    double total = 0;
    for (int64_t i = 0; i < n; i++) total += s->probs[i];
    double at = bsm_random_uniform(&s->random) * total, mass = 0;
    for (int64_t i = 0; i < n; i++) {
        mass += s->probs[i];
        if (mass > at) return s->ids[i];
    }
    return s->ids[n - 1]; /* the product may round up to the whole mass */
}

bsm_status bsm_sampler_pick(bsm_sampler *sampler, const float *logits, int64_t vocab_size,
                            const int32_t *history, int64_t count, int32_t *id,
                            bsm_error *error) {
    if (sampler == NULL || logits == NULL || id == NULL || vocab_size < 1 || count < 0 ||
        (history == NULL && count > 0))
        return bsm_fail(error, BSM_ERROR_ARGUMENT,
                        "bsm_sampler_pick needs a sampler, a row of logits and a place for the id");
    bsm_status status = check_row(logits, vocab_size, error);
    if (status != BSM_OK) return status;
    int64_t n = vocab_size < sampler->limit ? vocab_size : sampler->limit;
    if (!reserve(sampler, n))
        return bsm_fail(error, BSM_ERROR_MEMORY, "no memory for a sampler of %lld ids",
                        (long long)n);
    const bsm_sampling *o = &sampler->options;
    for (int64_t i = 0; i < n; i++) sampler->scores[i] = logits[i];
    if (o->repeat_penalty != 1.0 && o->repeat_last_n != 0) penalise(sampler, n, history, count);
    for (int64_t i = 0; i < o->bias_count; i++)
        if (o->bias_ids[i] < n) sampler->scores[o->bias_ids[i]] += o->bias[i];
    for (int64_t i = 0; i < o->banned_count; i++)
        if (o->banned[i] >= 0 && o->banned[i] < n) sampler->scores[o->banned[i]] = -INFINITY;
    int64_t best = argmax(sampler->scores, n);
    if (sampler->scores[best] == -INFINITY)
        return bsm_fail(error, BSM_ERROR_NUMERIC,
                        "no token is left to sample: every logit is -inf");
    if (o->temperature == 0)
        *id = (int32_t)best;
    else
        *id = draw(sampler, distribution(sampler, n, best));
    return BSM_OK;
}
