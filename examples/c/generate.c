/* Continues a prompt of token ids, greedily:
 *
 *     bessemer compile smollm2 -o model
 *     cc -O2 -Imodel examples/c/generate.c model/libmodel.a -lm -lpthread -o generate
 *     ./generate model 20 504 2744 282 4649 314
 *
 * The arguments: the artifact's folder (or its weights.bin), how many tokens are wanted, the ids of
 * the prompt. The new ids go to stdout, the rest to stderr.
 */
#define _POSIX_C_SOURCE 200809L
#include "model.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static bsm_session *session;

/* Ctrl-C: bsm_cancel may be called from a signal handler. */
static void interrupted(int number) {
    (void)number;
    bsm_cancel(session);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Feed the prompt, then each token that is picked; returns how many were fed. */
static bsm_status answer(const int32_t *prompt, int64_t length, int64_t wanted, bsm_error *error) {
    double start = seconds();
    bsm_status status = bsm_prefill(session, prompt, length, error);
    double first = seconds();
    int64_t fed = 0;
    while (status == BSM_OK && fed < wanted) {
        int32_t id;
        status = bsm_sample(session, NULL, &id, error);
        if (status != BSM_OK) break;
        printf("%d\n", (int)id);
        fflush(stdout);
        fed++;
        if (fed < wanted) status = bsm_decode(session, id, error);
    }
    if (fed > 1)
        fprintf(stderr, "%lld tokens in %.1f ms, then %.1f tokens/s\n", (long long)length,
                1e3 * (first - start), (double)(fed - 1) / (seconds() - first));
    return status;
}

/* Whether `word` is a whole number from 0 that a token id can be. */
static int whole(const char *word, int64_t *number) {
    char *end;
    *number = strtoll(word, &end, 10);
    return end != word && *end == 0 && *number >= 0 && *number <= INT32_MAX;
}

int main(int count, char **words) {
    bsm_error error = {0};
    bsm_options options = {.abi_hash = BSM_ABI_HASH};
    bsm_model *model = NULL;
    if (count < 4) {
        fprintf(stderr, "usage: %s MODEL COUNT ID [ID ...]\n", words[0]);
        return 2;
    }
    int64_t length = count - 3;
    int32_t *prompt = malloc((size_t)length * sizeof *prompt);
    if (prompt == NULL) return 1;
    int64_t wanted = 0, id = 0;
    int wrong = !whole(words[2], &wanted);
    for (int64_t i = 0; i < length; i++) {
        wrong |= !whole(words[3 + i], &id);
        prompt[i] = (int32_t)id;
    }
    if (wrong) {
        fprintf(stderr, "COUNT and IDs are whole numbers from 0\n");
        free(prompt);
        return 2;
    }

    bsm_status status = bsm_open(words[1], &options, &model, &error);
    if (status == BSM_OK) status = bsm_session_create(model, &session, &error);
    if (status == BSM_OK) {
        signal(SIGINT, interrupted);
        status = answer(prompt, length, wanted, &error);
        signal(SIGINT, SIG_DFL);
    }
    if (status != BSM_OK)
        fprintf(stderr, "%s: %s\n", bsm_status_text(status), error.message);
    bsm_session_destroy(session);
    bsm_close(model);
    free(prompt);
    return status == BSM_OK ? 0 : 1;
}
