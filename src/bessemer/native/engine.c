/* Opening a model: the processor, the weights, the threads. See api.h. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

const bsm_info *bsm_describe(void) { return &bsm_this_model.info; }

/* The first variant whose features this processor has. */
static bsm_status choose_variant(const bsm_variant **variant, bsm_error *error) {
    const char *missing = NULL;
    for (int64_t i = 0; i < bsm_this_model.variant_count; i++) {
        *variant = &bsm_this_model.variants[i];
        missing = bsm_missing_feature((*variant)->features);
        if (missing == NULL) return BSM_OK;
    }
    return bsm_fail(error, BSM_ERROR_CPU,
                    "%s was compiled for a processor (%s) with %s, which this one lacks: compile "
                    "the model here, or with --cpu baseline",
                    bsm_this_model.info.name, bsm_this_model.info.target, missing);
}

static bsm_status choose_threads(int64_t wanted, int64_t *threads, bsm_error *error) {
    const char *text = wanted == 0 ? getenv("BESSEMER_THREADS") : NULL;
    const char *origin = "threads";
    if (text != NULL && *text != '\0') {
        char *end;
        wanted = strtoll(text, &end, 10);
        origin = "BESSEMER_THREADS";
        if (*end != '\0' || *text < '0' || *text > '9' || wanted == 0) wanted = -1;
    } else if (wanted == 0) {
        wanted = bsm_usable_processors();
        if (wanted > BSM_MOST_THREADS) wanted = BSM_MOST_THREADS;
    }
    if (wanted < 1 || wanted > BSM_MOST_THREADS)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "%s must be a whole number from 1 to %d", origin,
                        BSM_MOST_THREADS);
    *threads = wanted;
    return BSM_OK;
}

/* The checks that need no file. */
static bsm_status prepare(const bsm_options *options, const bsm_variant **variant, int64_t *threads,
                          bsm_error *error) {
    if (options->abi_hash != NULL && strcmp(options->abi_hash, bsm_this_model.info.abi_hash) != 0)
        return bsm_fail(error, BSM_ERROR_HEADER,
                        "the program was compiled with the model.h of another model (ABI %.12s, "
                        "and %s has %.12s): use the header beside the library",
                        options->abi_hash, bsm_this_model.info.name, bsm_this_model.info.abi_hash);
    bsm_status status = choose_variant(variant, error);
    return status == BSM_OK ? choose_threads(options->threads, threads, error) : status;
}

bsm_status bsm_open(const char *path, const bsm_options *options, bsm_model **model,
                    bsm_error *error) {
    static const bsm_options defaults;
    const bsm_variant *variant = NULL;
    int64_t threads = 1;
    if (options == NULL) options = &defaults;
    if (model != NULL) *model = NULL;
    if (path == NULL || model == NULL)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "bsm_open: path and model must not be NULL");
    if (*path == '\0') return bsm_fail(error, BSM_ERROR_ARGUMENT, "bsm_open: path is empty");
    bsm_status status = prepare(options, &variant, &threads, error);
    if (status != BSM_OK) return status;
    bsm_model *made = calloc(1, sizeof *made);
    if (made == NULL) return bsm_fail(error, BSM_ERROR_MEMORY, "no memory for a model");
    made->description = &bsm_this_model;
    made->variant = variant;
    made->references = 1;
    made->pool = bsm_pool_create(threads);
    if (made->pool == NULL)
        status = bsm_fail(error, BSM_ERROR_MEMORY, "no memory for a pool of %lld threads",
                          (long long)threads);
    else
        status = bsm_weights_load(&bsm_this_model, path, options->weights_mode, made->pool,
                                  &made->weights, error);
    if (status != BSM_OK) {
        bsm_close(made);
        return status;
    }
    *model = made;
    return BSM_OK;
}

void bsm_model_reference(bsm_model *model) {
    __atomic_add_fetch(&model->references, 1, __ATOMIC_RELAXED);
}

/* Whether a model was opened by this library. */
static int is_own(const bsm_model *model) {
    return model != NULL && model->description == &bsm_this_model;
}

void bsm_close(bsm_model *model) {
    if (!is_own(model) || __atomic_sub_fetch(&model->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    bsm_pool_destroy(model->pool);
    bsm_weights_release(&model->weights);
    free(model);
}

int64_t bsm_threads(const bsm_model *model) {
    return is_own(model) ? bsm_pool_size(model->pool) : 0;
}
