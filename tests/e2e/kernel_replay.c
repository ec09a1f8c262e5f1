/* Calls kernels with the memory that they once had elsewhere, and says where they leave other bytes
 * than they left there.
 *
 *     replay calls.bin
 *
 * calls.bin is made by kernel_replay.py: int64 words, at offsets that are said bytes. `kernels` is
 * made by it too.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { ALIGNMENT = 64, CANARY = 4096, ARGUMENTS = 24, MEMREF = 24, BLOCKS = 16 };

typedef void kernel(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

typedef struct block {
    char *memory;
    int64_t bytes, after;
} block;

static const char *input;
static const int64_t *word;

static void fail(const char *what) {
    fprintf(stderr, "replay: %s\n", what);
    exit(1);
}

static void read_input(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) fail(path);
    size_t bytes = (size_t)ftell(file);
    rewind(file);
    char *memory = malloc(bytes);
    if (!memory || fread(memory, 1, bytes, file) != bytes) fail(path);
    input = memory;
    word = (const int64_t *)memory;
}

static void *room(int64_t bytes) {
    void *memory = aligned_alloc(ALIGNMENT, (size_t)(bytes / ALIGNMENT + 2) * ALIGNMENT);
    if (!memory) fail("no memory");
    return memory;
}

/* A piece of memory: bytes, how far behind a boundary, offsets of its contents before and after. */
static block read_block(void) {
    int64_t bytes = *word++, shift = *word++, before = *word++, after = *word++;
    block made = {(char *)room(bytes + shift) + shift, bytes, after};
    memcpy(made.memory, input + before, (size_t)bytes);
    return made;
}

/* MLIR's memref descriptor: block, offset there, rank, sizes, strides. */
static int64_t read_memref(const block *blocks, int64_t *to) {
    int64_t number = *word++, at = (int64_t)(blocks[number].memory + *word++), rank = *word++;
    to[0] = to[1] = at;
    to[2] = 0;
    memcpy(to + 3, word, (size_t)(2 * rank) * sizeof *word);
    word += 2 * rank;
    return (int64_t)to;
}

static void compare(int64_t call, const block *one, int number) {
    const char *want = input + one->after;
    for (int64_t at = 0; at < one->bytes; at++) {
        if (one->memory[at] == want[at]) continue;
        float got, wanted;
        at -= at % 4;
        memcpy(&got, one->memory + at, 4), memcpy(&wanted, want + at, 4);
        printf("call %lld, memory %d, byte %lld: %.9g instead of %.9g\n", (long long)call, number,
               (long long)at, got, wanted);
        return;
    }
}

/* By two threads' ranges, one after the other, each with scratch memory of its own. */
static void run(int64_t call) {
    static int64_t memrefs[ARGUMENTS][MEMREF];
    static block blocks[BLOCKS];
    int64_t a[ARGUMENTS] = {0};
    kernel *function = (kernel *)kernels[*word++];
    int64_t units = *word++, middle = *word++, scratch = *word++, operands, count = 0;
    a[2] = *word++;
    for (int64_t i = 0, n = *word++; i < n; i++) blocks[count++] = read_block();
    operands = *word++;
    for (int64_t i = 0; i < operands; i++) a[4 + i] = read_memref(blocks, memrefs[1 + i]);
    for (int64_t i = 0, n = *word++; i < n; i++) a[4 + operands + i] = *word++;
    char *memory = room(scratch + CANARY);
    int64_t described[] = {(int64_t)memory, (int64_t)memory, 0, scratch, 1};
    a[3] = (int64_t)described;
    for (int half = 0; half < 2; half++) {
        a[0] = half ? middle : 0, a[1] = half ? units : middle;
        memset(memory, 0xff, (size_t)(scratch + CANARY));
        function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                 a[13], a[14], a[15], a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23]);
        for (int i = 0; i < CANARY; i++)
            if (memory[scratch + i] != (char)0xff) {
                printf("call %lld wrote behind its scratch\n", (long long)call);
                break;
            }
    }
    free(memory);
    for (int i = 0; i < count; i++) compare(call, &blocks[i], i);
}

int main(int argc, char **argv) {
    if (argc != 2) fail("usage: replay calls.bin");
    read_input(argv[1]);
    int64_t calls = *word++;
    for (int64_t i = 0; i < calls; i++) run(i);
    printf("%lld calls\n", (long long)calls);
    return fflush(stdout) != 0;
}
