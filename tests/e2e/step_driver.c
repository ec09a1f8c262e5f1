/* A program around the raw entry points of model.h, for machines without Python.
 *
 *     driver weights.bin header.bin THREADS PREFILL id...
 *
 * header.bin: the int64 words that the state begins with. The first PREFILL ids are one prefill,
 * each other one a decode. Writes the logits of every row, float32, to standard output.
 */
#include "model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096 };

static void fail(const char *what) {
    fprintf(stderr, "driver: %s\n", what);
    exit(1);
}

static char *room(size_t bytes) {
    size_t whole = (bytes / PAGE + 1) * PAGE;
    char *memory = aligned_alloc(PAGE, whole);
    if (!memory) fail("no memory");
    memset(memory, 0, whole);
    return memory;
}

static char *contents(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *memory = room(*bytes);
    if (fread(memory, 1, *bytes, file) != *bytes) fail(path);
    fclose(file);
    return memory;
}

static bsm_memref1 line(void *memory, int64_t size) {
    bsm_memref1 found = {memory, memory, 0, {size}, {1}};
    return found;
}

int main(int argc, char **argv) {
    if (argc < 6) fail("usage: driver weights.bin header.bin THREADS PREFILL id...");
    size_t weights_bytes, header_bytes;
    char *weights = contents(argv[1], &weights_bytes);
    char *header = contents(argv[2], &header_bytes);
    int64_t threads = atoll(argv[3]), prefill = atoll(argv[4]), count = argc - 5;

    char *state = room(BSM_STATE_BYTES);
    memcpy(state, header, header_bytes);
    size_t scratch_bytes = BSM_SCRATCH_SHARED_BYTES + threads * BSM_SCRATCH_THREAD_BYTES;
    char *scratch = room(scratch_bytes);
    int64_t *ids = (int64_t *)room(count * 8), *positions = (int64_t *)room(count * 8);
    int64_t *slots = (int64_t *)room(count * 8), *rows = (int64_t *)room(count * 8);
    float *logits = (float *)room(count * BSM_VOCAB * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        ids[i] = atoll(argv[5 + i]);
        positions[i] = i;
        rows[i] = i < prefill ? i : 0;
    }

    bsm_context context = {0};
    context.pool = bsm_pool_create(threads);
    context.threads = threads;
    context.sequence_length = count;
    for (int64_t at = 0; at < count;) {
        int64_t size = at < prefill ? prefill : 1;
        bsm_memref1 w = line(weights, (int64_t)weights_bytes), i = line(ids + at, size);
        bsm_memref1 p = line(positions + at, size), s = line(slots + at, size);
        bsm_memref1 r = line(rows + at, size), st = line(state, BSM_STATE_BYTES);
        bsm_memref1 sc = line(scratch, (int64_t)scratch_bytes);
        float *to = logits + at * BSM_VOCAB;
        bsm_memref2 l = {to, to, 0, {size, BSM_VOCAB}, {BSM_VOCAB, 1}};
        if (at < prefill)
            _mlir_ciface_forward_prefill(&context, &w, &i, &p, &s, &r, &st, &sc, &l);
        else
            _mlir_ciface_forward_decode(&context, &w, &i, &p, &s, &r, &st, &sc, &l);
        if (context.status != BSM_OK) fail("a step did not end well");
        at += size;
    }
    bsm_pool_destroy(context.pool);
    fwrite(logits, sizeof(float), (size_t)(count * BSM_VOCAB), stdout);
    return fflush(stdout) != 0;
}
