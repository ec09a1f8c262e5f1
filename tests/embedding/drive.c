/* Drives the C API at random, by a fixed seed, and holds it against itself:
 *
 *     drive WEIGHTS TABLE SCRATCH SEED ROUNDS EXACT ROWS
 *
 * Two threads, each with sessions of its own on one model, feed, rewind, cancel, sample, copy, save
 * and load; whatever was done before, logits equal those of a session that gets the same tokens at
 * once (EXACT 1: to the bit; 0: within a tolerance; ROWS 0: only those of a call's last token).
 * Then the weight file is spoilt from byte TABLE on in all sorts of ways and written to SCRATCH:
 * opening it must fail in words. So must loading spoilt session files, those apart whose head was
 * spoilt and hashed again: with them the session only has to stay within its memory.
 */
#define _GNU_SOURCE
#include "api.h"
#include "internal.h"
#include "sampler.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_ID 14 /* the toy's special tokens lie below */
#define TOLERANCE 1e-3
#define MOST_TOKENS 60
#define FUZZ_PER_ROUND 2
#define SESSION_FUZZ_PER_ROUND 3
#define FIXED_BYTES 48 /* of a session file, before its head: magic, bytes of the head, hash */
#define PATH_ROOM 4096

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "line %d: %s is wrong\n", __LINE__, #condition);       \
            exit(3);                                                               \
        }                                                                          \
    } while (0)

typedef struct walk {
    bsm_model *model;
    bsm_session *session, *fresh;
    uint64_t random;
    int rounds, exact, rows;
    int32_t *held;
    int64_t count;
    char path[PATH_ROOM]; /* of its session file */
} walk;

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static int64_t below(walk *w, int64_t bound) {
    return (int64_t)(next(&w->random) % (uint64_t)bound);
}

static void compare(const walk *w, const float *got, const float *want) {
    int64_t vocab = bsm_describe()->vocab_size;
    double off = 0, size = 0;
    CHECK(got != NULL && want != NULL);
    if (w->exact) CHECK(memcmp(got, want, (size_t)vocab * sizeof *got) == 0);
    for (int64_t i = 0; i < vocab; i++) {
        off += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += (double)want[i] * want[i];
    }
    CHECK(sqrt(off) <= TOLERANCE * sqrt(size));
}

/* The logits of a session that got the first `count` held tokens at once. */
static const float *expected(walk *w, int64_t count) {
    CHECK(bsm_rewind(w->fresh, 0, NULL) == BSM_OK);
    CHECK(bsm_prefill(w->fresh, w->held, count, NULL) == BSM_OK);
    return bsm_logits(w->fresh);
}

static void settled(walk *w) {
    CHECK(bsm_position(w->session) == w->count);
    CHECK(w->count == 0 || memcmp(bsm_tokens(w->session), w->held, (size_t)w->count * 4) == 0);
}

static void feed(walk *w, int64_t count) {
    const bsm_info *info = bsm_describe();
    int64_t at = w->count;
    bsm_error error;
    if (count > info->context_length - at) {
        CHECK(bsm_prefill(w->session, w->held, count, &error) == BSM_ERROR_CONTEXT);
        CHECK(strlen(error.message) > 20);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        w->held[at + i] = FIRST_ID + (int32_t)below(w, info->vocab_size - FIRST_ID);
    if (count == 1) {
        CHECK(bsm_decode(w->session, w->held[at], NULL) == BSM_OK);
    } else if (!w->rows || below(w, 2)) {
        CHECK(bsm_prefill(w->session, w->held + at, count, NULL) == BSM_OK);
    } else {
        int64_t rows[MOST_TOKENS], wanted = 0;
        for (int64_t i = 0; i < count; i++)
            if (below(w, 3) == 0) rows[wanted++] = i;
        float *logits = malloc((size_t)(wanted * info->vocab_size + 1) * sizeof *logits);
        CHECK(bsm_prefill_rows(w->session, w->held + at, count, rows, wanted, logits, NULL) ==
              BSM_OK);
        for (int64_t i = 0; i < wanted; i++)
            compare(w, logits + i * info->vocab_size, expected(w, at + rows[i] + 1));
        free(logits);
        w->count += count;
        return;
    }
    w->count += count;
    compare(w, bsm_logits(w->session), expected(w, w->count));
}

static void sample(walk *w) {
    bsm_sampling options = BSM_SAMPLING_GREEDY;
    bsm_sampler *sampler = NULL;
    int32_t id = -1, bias_id = FIRST_ID;
    double bias = -INFINITY;
    options.temperature = (double)below(w, 3) * 0.7;
    options.top_k = below(w, 30);
    options.top_p = 1.0 - 0.2 * (double)below(w, 4);
    options.min_p = 0.05 * (double)below(w, 3);
    options.repeat_penalty = 1.0 + 0.3 * (double)below(w, 3);
    options.bias_ids = &bias_id, options.bias = &bias, options.bias_count = below(w, 2);
    options.has_seed = 1, options.seed = next(&w->random);
    CHECK(bsm_sampler_create(&options, bsm_describe()->vocab_size, &sampler, NULL) == BSM_OK);
    bsm_status status = bsm_sample(w->session, below(w, 3) ? sampler : NULL, &id, NULL);
    bsm_sampler_destroy(sampler);
    if (bsm_logits(w->session) == NULL) CHECK(status == BSM_ERROR_ARGUMENT);
    else CHECK(status == BSM_OK && id >= 0 && id < bsm_describe()->vocab_size);
}

/* Calls that must fail and change nothing. */
static void misuse(walk *w) {
    int32_t bad[] = {FIRST_ID, -1, (int32_t)bsm_describe()->vocab_size, INT32_MIN, INT32_MAX};
    int64_t rows[] = {1, 1}, large[] = {INT64_MAX};
    float few[1];
    CHECK(bsm_prefill(w->session, NULL, 1, NULL) == BSM_ERROR_ARGUMENT);
    CHECK(bsm_prefill(w->session, bad, INT64_MIN, NULL) == BSM_ERROR_ARGUMENT);
    CHECK(bsm_prefill(w->session, bad, INT64_MAX, NULL) == BSM_ERROR_CONTEXT);
    if (w->count + 5 <= bsm_describe()->context_length) {
        int32_t good[] = {FIRST_ID, FIRST_ID};
        CHECK(bsm_prefill(w->session, bad, 2 + below(w, 4), NULL) == BSM_ERROR_ARGUMENT);
        CHECK(bsm_decode(w->session, bad[1 + below(w, 4)], NULL) == BSM_ERROR_ARGUMENT);
        CHECK(bsm_prefill_rows(w->session, good, 2, rows, 2, few, NULL) == BSM_ERROR_ARGUMENT);
        CHECK(bsm_prefill_rows(w->session, good, 2, large, 1, few, NULL) == BSM_ERROR_ARGUMENT);
        CHECK(bsm_prefill_rows(w->session, good, 2, NULL, INT64_MAX, few, NULL) ==
              BSM_ERROR_ARGUMENT);
        CHECK(bsm_prefill_rows(w->session, good, 2, NULL, 1, NULL, NULL) == BSM_ERROR_ARGUMENT);
    }
    CHECK(bsm_rewind(w->session, w->count + 1, NULL) == BSM_ERROR_ARGUMENT);
    CHECK(bsm_rewind(w->session, INT64_MIN, NULL) == BSM_ERROR_ARGUMENT);
    CHECK(bsm_sample(w->session, NULL, NULL, NULL) == BSM_ERROR_ARGUMENT);
}

/* Go on with a copy, or with what was saved, over a session that held something else. */
static void keep(walk *w) {
    bsm_session *other = NULL;
    bsm_error error;
    int had_logits = bsm_logits(w->session) != NULL;
    if (below(w, 2)) {
        CHECK(bsm_session_copy(w->session, &other, &error) == BSM_OK);
        CHECK((bsm_logits(other) != NULL) == had_logits);
    } else {
        int32_t ids[] = {FIRST_ID + 1, FIRST_ID};
        CHECK(bsm_session_save(w->session, w->path, &error) == BSM_OK);
        CHECK(bsm_session_create(w->model, &other, &error) == BSM_OK);
        if (below(w, 2)) CHECK(bsm_prefill(other, ids, 2, &error) == BSM_OK);
        CHECK(bsm_session_load(other, w->path, &error) == BSM_OK);
        CHECK(bsm_logits(other) == NULL);
    }
    bsm_session_destroy(w->session);
    w->session = other;
}

static void *drive(void *argument) {
    walk *w = argument;
    bsm_error error;
    CHECK(bsm_session_create(w->model, &w->session, &error) == BSM_OK);
    CHECK(bsm_session_create(w->model, &w->fresh, &error) == BSM_OK);
    for (int round = 0; round < w->rounds; round++) {
        switch (below(w, 9)) {
        case 0: case 1: feed(w, 1); break;
        case 2: case 3: feed(w, 1 + below(w, MOST_TOKENS)); break;
        case 4: case 5:
            w->count -= below(w, (w->count < 60 ? w->count : 60) + 1);
            CHECK(bsm_rewind(w->session, w->count, &error) == BSM_OK);
            break;
        case 6: sample(w); break;
        case 7: keep(w); break;
        default:
            misuse(w);
            if (w->count + 3 > bsm_describe()->context_length) break;
            int32_t ids[] = {FIRST_ID, FIRST_ID + 1, FIRST_ID + 2};
            bsm_cancel(w->session);
            CHECK(bsm_prefill(w->session, ids, 3, &error) == BSM_CANCELLED);
        }
        settled(w);
    }
    CHECK(bsm_session_save(w->session, w->path, &error) == BSM_OK);
    bsm_session_destroy(w->fresh);
    bsm_session_destroy(w->session);
    return NULL;
}

static char *read_file(const char *path, int64_t *size) {
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL && fseek(file, 0, SEEK_END) == 0);
    *size = ftell(file);
    rewind(file);
    char *bytes = malloc((size_t)*size + 64);
    CHECK(bytes != NULL && fread(bytes, 1, (size_t)*size, file) == (size_t)*size);
    fclose(file);
    return bytes;
}

static void fuzz(walk *w, const char *weights, int64_t table, const char *scratch) {
    int64_t size;
    char *bytes = read_file(weights, &size);
    for (int i = 0; i < w->rounds * FUZZ_PER_ROUND; i++) {
        char *spoilt = malloc((size_t)size + 64);
        int64_t length = size;
        memcpy(spoilt, bytes, (size_t)size);
        switch (below(w, 4)) {
        case 0: length = below(w, size); break;
        case 1: length = size + 1 + below(w, 64); memset(spoilt + size, 'x', 64); break;
        case 2: /* the footer, where the lengths are */
            for (int64_t n = 1 + below(w, 4); n > 0; n--)
                spoilt[size - 1 - below(w, 48)] ^= (char)(1 + below(w, 255));
            break;
        default: spoilt[table + below(w, size - table)] ^= (char)(1 << below(w, 8));
        }
        int same = length == size && memcmp(spoilt, bytes, (size_t)size) == 0;
        FILE *file = fopen(scratch, "wb");
        CHECK(file != NULL && fwrite(spoilt, 1, (size_t)length, file) == (size_t)length);
        CHECK(fclose(file) == 0);
        free(spoilt);
        bsm_options options = {.threads = 1, .weights_mode = 1 + (int32_t)below(w, 2)};
        bsm_error error = {.status = BSM_OK};
        bsm_model *model = NULL;
        bsm_status status = bsm_open(scratch, &options, &model, &error);
        if (same) CHECK(status == BSM_OK && model != NULL);
        else CHECK(status == BSM_ERROR_WEIGHTS && model == NULL && error.status == status);
        bsm_close(model);
    }
    free(bytes);
}

static void write_file(const char *path, const char *bytes, int64_t size) {
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL && fwrite(bytes, 1, (size_t)size, file) == (size_t)size);
    CHECK(fclose(file) == 0);
}

/* Change a digit, or another byte, of a head and hash it again. */
static void spoil_head(walk *w, char *bytes, int64_t head) {
    for (int64_t n = 1 + below(w, 3); n > 0; n--) {
        int64_t at = FIXED_BYTES + below(w, head);
        char digit = (char)('0' + below(w, 10));
        bytes[at] = below(w, 4) ? digit : (char)(bytes[at] ^ (1 << below(w, 8)));
    }
    bsm_sha256 hash;
    bsm_sha256_begin(&hash);
    bsm_sha256_add(&hash, bytes + FIXED_BYTES, (size_t)head);
    bsm_sha256_end(&hash, (uint8_t *)bytes + FIXED_BYTES - BSM_HASH_BYTES);
}

static void fuzz_sessions(walk *w) {
    int64_t size, head = 0;
    int32_t ids[] = {FIRST_ID, FIRST_ID + 1};
    char *bytes = read_file(w->path, &size);
    bsm_session *session;
    CHECK(bsm_session_create(w->model, &session, NULL) == BSM_OK);
    CHECK(bsm_session_load(session, w->path, NULL) == BSM_OK);
    for (int i = 7; i >= 0; i--) head = head << 8 | (uint8_t)bytes[8 + i];
    for (int i = 0; i < w->rounds * SESSION_FUZZ_PER_ROUND; i++) {
        char *spoilt = malloc((size_t)size + 64);
        int64_t length = size, at = below(w, size);
        int rehashed = 0;
        memcpy(spoilt, bytes, (size_t)size);
        memset(spoilt + size, 'x', 64);
        switch (below(w, 5)) {
        case 0: length = at; break;
        case 1: length = size + 1 + below(w, 64); break;
        case 2: spoilt[at] ^= (char)(1 << below(w, 8)); break;
        case 3: spoilt[below(w, FIXED_BYTES)] ^= (char)(1 + below(w, 255)); break;
        default:
            spoil_head(w, spoilt, head);
            rehashed = 1;
        }
        write_file(w->path, spoilt, length);
        free(spoilt);
        int64_t before = bsm_position(session);
        bsm_error error = {.status = BSM_OK};
        bsm_status status = bsm_session_load(session, w->path, &error);
        if (status == BSM_OK) {
            CHECK(rehashed);
            status = bsm_prefill(session, ids, 2, NULL);
            CHECK(status == BSM_OK || status == BSM_ERROR_CONTEXT || status == BSM_ERROR_NUMERIC);
        } else {
            CHECK(status == BSM_ERROR_SESSION && error.status == status);
            CHECK(strlen(error.message) > 20 && bsm_position(session) == before);
        }
    }
    bsm_session_destroy(session);
    free(bytes);
}

int main(int count, char **words) {
    CHECK(count == 8);
    bsm_model *model = NULL;
    bsm_error error = {.status = BSM_OK};
    bsm_options options = {.threads = 2};
    uint64_t seed = strtoull(words[4], NULL, 10);
    if (bsm_open(words[1], &options, &model, &error) != BSM_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 4;
    }
    walk walks[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        size_t room = (size_t)bsm_describe()->context_length + MOST_TOKENS;
        walks[i] = (walk){.model = model, .random = seed * 2 + (uint64_t)i + 0x9E3779B97F4A7C15u,
                          .rounds = atoi(words[5]), .exact = atoi(words[6]), .rows = atoi(words[7]),
                          .held = calloc(room, sizeof(int32_t))};
        snprintf(walks[i].path, sizeof walks[i].path, "%s.session%d", words[3], i);
        CHECK(pthread_create(&threads[i], NULL, drive, &walks[i]) == 0);
    }
    for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < 2; i++) fuzz_sessions(&walks[i]);
    bsm_close(model);
    fuzz(&walks[0], words[1], strtoll(words[2], NULL, 10), words[3]);
    for (int i = 0; i < 2; i++) free(walks[i].held);
    puts("ok");
    return 0;
}
