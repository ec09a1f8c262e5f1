/* The weight file: the checks that it is the one of this library, and its way into memory.
 *
 * The file is the tensors, zeros up to a page, a table that names them with their hashes (JSON),
 * and a footer: magic, table bytes, SHA-256 of the table (artifact/weight_file.py). The library
 * knows that hash, so nothing of the table has to be understood here.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static const char FILE_NAME[] = "weights.bin";
static const char MAGIC[] = "BSMWTS01";
#define MAGIC_BYTES (sizeof MAGIC - 1)
#define FOOTER_BYTES (MAGIC_BYTES + 8 + BSM_HASH_BYTES)
#define PAGE_BYTES 4096
/* A piece for one thread: many huge pages, and small enough to spread over the threads. */
#define READ_BYTES ((int64_t)16 << 20)
#define HASH_BUFFER_BYTES 16384
#define REMEDY "use the weights.bin that was written with this library, or compile the model again"

/* Read exactly `bytes`; 0, or an errno (EIO where the file ends). */
static int read_at(int file, void *to, int64_t bytes, int64_t at) {
    char *out = to;
    while (bytes > 0) {
        ssize_t count = pread(file, out, (size_t)bytes, (off_t)at);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno;
        if (count == 0) return EIO;
        out += count;
        at += count;
        bytes -= count;
    }
    return 0;
}

static bsm_status unreadable(bsm_error *error, const char *path, int number) {
    const char *why = strerror(number);
    return bsm_fail(error, BSM_ERROR_FILE, "%s can't be read: %s", path, why);
}

/* The table's place by the footer; its hash as hex digits. BSM_ERROR_WEIGHTS without one. */
static bsm_status read_footer(int file, const char *path, int64_t size, int64_t *table,
                              char hash[2 * BSM_HASH_BYTES + 1], bsm_error *error) {
    uint8_t footer[FOOTER_BYTES];
    int number = size < (int64_t)sizeof footer
                     ? EIO
                     : read_at(file, footer, sizeof footer, size - (int64_t)sizeof footer);
    if (number != 0 && number != EIO) return unreadable(error, path, number);
    if (number == EIO || memcmp(footer, MAGIC, MAGIC_BYTES) != 0)
        return bsm_fail(error, BSM_ERROR_WEIGHTS,
                        "%s is no weight file of this Bessemer, or its end is cut off: " REMEDY,
                        path);
    uint64_t bytes = 0;
    for (int i = 7; i >= 0; i--) bytes = bytes << 8 | footer[MAGIC_BYTES + (size_t)i];
    uint64_t room = (uint64_t)size - sizeof footer;
    if (bytes > room || (room - bytes) % PAGE_BYTES != 0)
        return bsm_fail(error, BSM_ERROR_WEIGHTS, "%s is damaged at its end: " REMEDY, path);
    *table = (int64_t)(room - bytes);
    for (int i = 0; i < BSM_HASH_BYTES; i++)
        snprintf(hash + 2 * i, 3, "%02x", footer[MAGIC_BYTES + 8 + (size_t)i]);
    return BSM_OK;
}

/* Whether the bytes from `table` to the footer have the hash that the footer says. */
static bsm_status check_table(int file, const char *path, int64_t table, int64_t end,
                              const char *expected, bsm_error *error) {
    uint8_t buffer[HASH_BUFFER_BYTES], digest[BSM_HASH_BYTES];
    char hash[2 * BSM_HASH_BYTES + 1];
    bsm_sha256 running;
    bsm_sha256_begin(&running);
    while (table < end) {
        int64_t count = end - table < (int64_t)sizeof buffer ? end - table : (int64_t)sizeof buffer;
        int number = read_at(file, buffer, count, table);
        if (number != 0) return unreadable(error, path, number);
        bsm_sha256_add(&running, buffer, (size_t)count);
        table += count;
    }
    bsm_sha256_end(&running, digest);
    for (int i = 0; i < BSM_HASH_BYTES; i++) snprintf(hash + 2 * i, 3, "%02x", digest[i]);
    if (strcmp(hash, expected) != 0)
        return bsm_fail(error, BSM_ERROR_WEIGHTS, "%s: the table of tensors is damaged: " REMEDY,
                        path);
    return BSM_OK;
}

static bsm_status check(const bsm_description *description, int file, const char *path,
                        bsm_error *error) {
    const bsm_info *info = &description->info;
    char hash[2 * BSM_HASH_BYTES + 1];
    struct stat found;
    int64_t table = 0;
    if (fstat(file, &found) != 0) return unreadable(error, path, errno);
    if (!S_ISREG(found.st_mode))
        return bsm_fail(error, BSM_ERROR_FILE, "%s is no file", path);
    int64_t size = (int64_t)found.st_size;
    bsm_status status = read_footer(file, path, size, &table, hash, error);
    if (status == BSM_OK && strcmp(hash, info->weights_hash) != 0)
        return bsm_fail(error, BSM_ERROR_WEIGHTS,
                        "%s belongs to another model (its tensor table is %.12s, and %s has "
                        "%.12s): " REMEDY,
                        path, hash, info->name, info->weights_hash);
    if ((status == BSM_OK || status == BSM_ERROR_WEIGHTS) && size != info->weights_file_bytes)
        return bsm_fail(error, BSM_ERROR_WEIGHTS,
                        "%s has %lld bytes instead of %lld: it is cut off or belongs to another "
                        "model; " REMEDY,
                        path, (long long)size, (long long)info->weights_file_bytes);
    if (status != BSM_OK) return status;
    if (table < description->weights_bytes)
        return bsm_fail(error, BSM_ERROR_WEIGHTS, "%s is damaged at its end: " REMEDY, path);
    return check_table(file, path, table, size - (int64_t)FOOTER_BYTES, hash, error);
}

typedef struct filling {
    int file;
    char *to;
    int64_t bytes;
    _Atomic int failure; /* an errno */
} filling;

static void fill(void *arg, int64_t begin, int64_t end) {
    filling *f = arg;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t at = piece * READ_BYTES;
        int64_t count = f->bytes - at < READ_BYTES ? f->bytes - at : READ_BYTES;
        int number = read_at(f->file, f->to + at, count, at);
        if (number != 0) atomic_store(&f->failure, number);
    }
}

/* The end of a message that there is no memory to read weights into. asked: BSM_WEIGHTS_*. */
static const char *how_to_map(int32_t asked) {
    struct rlimit space;
    /* Of a limited address space a mapped file takes as much. */
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) return "";
    return asked == BSM_WEIGHTS_AUTO
               ? "; mapped from their file they need less: set BESSEMER_WEIGHTS=map"
               : "; mapped from their file they need less: open with BSM_WEIGHTS_MAP";
}

/* Read the tensors into huge pages by all threads: making the pages takes as long as copying. */
static bsm_status read_all(int file, const char *path, int32_t asked, bsm_pool *pool,
                           bsm_weights *weights, bsm_error *error) {
    filling f = {.file = file, .bytes = weights->bytes};
    f.to = bsm_allocate(weights->bytes, 1);
    if (f.to == NULL)
        return bsm_fail(error, BSM_ERROR_MEMORY, "no memory for %lld bytes of weights%s",
                        (long long)weights->bytes, how_to_map(asked));
    bsm_parallel_for(pool, 0, (weights->bytes + READ_BYTES - 1) / READ_BYTES, 1, fill, &f);
    int number = atomic_load(&f.failure);
    if (number != 0) {
        bsm_release(f.to, weights->bytes);
        return unreadable(error, path, number);
    }
    (void)mprotect(f.to, (size_t)weights->bytes, PROT_READ);
    weights->address = f.to;
    return BSM_OK;
}

static bsm_status map_file(int file, const char *path, bsm_weights *weights, bsm_error *error) {
    void *address = (uint64_t)weights->bytes > SIZE_MAX
                        ? MAP_FAILED
                        : mmap(NULL, (size_t)weights->bytes, PROT_READ, MAP_SHARED, file, 0);
    if (address == MAP_FAILED)
        return bsm_fail(error, BSM_ERROR_MEMORY, "%s can't be mapped: %s", path, strerror(errno));
    (void)posix_madvise(address, (size_t)weights->bytes, POSIX_MADV_WILLNEED);
    weights->address = address;
    return BSM_OK;
}

/* Open `path`, or the weight file in the folder `path`; *name is to be freed. */
static bsm_status open_file(const char *path, int *file, char **name, bsm_error *error) {
    size_t room = strlen(path) + sizeof FILE_NAME + 1;
    struct stat found;
    *name = malloc(room);
    if (*name == NULL) return bsm_fail(error, BSM_ERROR_MEMORY, "no memory for a file name");
    int is_folder = stat(path, &found) == 0 && S_ISDIR(found.st_mode);
    snprintf(*name, room, is_folder ? "%s/%s" : "%s", path, FILE_NAME);
    /* A pipe in its place must not be waited for. */
    do *file = open(*name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    while (*file < 0 && errno == EINTR);
    return *file < 0 ? unreadable(error, *name, errno) : BSM_OK;
}

/* BSM_WEIGHTS_AUTO settled: by the environment, or by what the system offers. */
static bsm_status settle(int32_t mode, int64_t bytes, int32_t *settled, bsm_error *error) {
    if (mode < BSM_WEIGHTS_AUTO || mode > BSM_WEIGHTS_HUGE)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "weights_mode is %d; it must be one of "
                        "BSM_WEIGHTS_*", (int)mode);
    const char *wanted = mode == BSM_WEIGHTS_AUTO ? getenv("BESSEMER_WEIGHTS") : NULL;
    if (wanted != NULL && strcmp(wanted, "map") == 0) mode = BSM_WEIGHTS_MAP;
    else if (wanted != NULL && strcmp(wanted, "huge") == 0) mode = BSM_WEIGHTS_HUGE;
    else if (wanted != NULL && *wanted != '\0' && strcmp(wanted, "auto") != 0)
        return bsm_fail(error, BSM_ERROR_ARGUMENT,
                        "BESSEMER_WEIGHTS is '%.40s': it must be auto, map or huge", wanted);
    if (mode == BSM_WEIGHTS_AUTO)
        mode = bsm_huge_pages_offered() && bytes < bsm_available_memory() / 2 ? BSM_WEIGHTS_HUGE
                                                                            : BSM_WEIGHTS_MAP;
    *settled = mode;
    return BSM_OK;
}

bsm_status bsm_weights_load(const bsm_description *description, const char *path, int32_t mode,
                            bsm_pool *pool, bsm_weights *weights, bsm_error *error) {
    char *name = NULL;
    int file = -1;
    int32_t asked = mode;
    *weights = (bsm_weights){NULL, description->weights_bytes};
    bsm_status status = settle(asked, weights->bytes, &mode, error);
    if (status == BSM_OK) status = open_file(path, &file, &name, error);
    if (status == BSM_OK) status = check(description, file, name, error);
    if (status == BSM_OK && weights->bytes > 0)
        status = mode == BSM_WEIGHTS_MAP ? map_file(file, name, weights, error)
                                         : read_all(file, name, asked, pool, weights, error);
    if (file >= 0) close(file);
    free(name);
    return status;
}

void bsm_weights_release(bsm_weights *weights) {
    bsm_release(weights->address, weights->bytes);
    weights->address = NULL;
}
