/* What the standalone program reads and writes. */
#define _DEFAULT_SOURCE
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64

#include "runner.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#endif

enum { READ_BYTES = 65536, MOST_PATH = 4096 };

int complain(int code, const char *format, ...) {
    va_list values;
    va_start(values, format);
    fputs("run: error: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    return code;
}

int report_error(const bsm_error *error) {
    return complain(error->status == BSM_ERROR_ARGUMENT ? EXIT_USAGE : EXIT_ERROR, "%s",
                    error->message);
}

double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* -- reading ---------------------------------------------------------------------------------- */

static int read_all(int file, const char *name, bsm_buffer *text) {
    char part[READ_BYTES];
    for (;;) {
        ssize_t got = read(file, part, sizeof part);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return complain(EXIT_USAGE, "%s can't be read: %s", name, strerror(errno));
        if (got == 0) break;
        bsm_buffer_add(text, part, (size_t)got);
        if (text->failed) return complain(EXIT_ERROR, "no memory for the prompt");
    }
    /* A mark of the byte order, and one line end, don't belong to the text. */
    if (text->size >= 3 && memcmp(text->data, "\xEF\xBB\xBF", 3) == 0) {
        memmove(text->data, text->data + 3, text->size - 3);
        text->size -= 3;
    }
    if (text->size > 0 && text->data[text->size - 1] == '\n') text->size--;
    if (text->size > 0 && text->data[text->size - 1] == '\r') text->size--;
    return 0;
}

static int read_file(const char *path, bsm_buffer *text) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return complain(EXIT_USAGE, "%s can't be read: %s", path, strerror(errno));
    int code = read_all(file, path, text);
    close(file);
    return code;
}

int read_prompt(const run_options *options, bsm_buffer *text) {
    const char *name = options->file;
    int code = 0;
    if (options->prompt != NULL) {
        name = "the prompt";
        bsm_buffer_add_text(text, options->prompt);
        if (text->failed) code = complain(EXIT_ERROR, "no memory for the prompt");
    } else if (options->file != NULL && strcmp(options->file, "-") != 0) {
        code = read_file(options->file, text);
    } else if (options->file == NULL && isatty(STDIN_FILENO)) {
        code = complain(EXIT_USAGE,
                        "there is no prompt: give -p TEXT, -f FILE, or text on standard input");
    } else {
        name = "standard input";
        code = read_all(STDIN_FILENO, name, text);
    }
    if (code != 0) return code;
    size_t valid = text->size == 0 ? 0 : bsm_utf8_valid((const char *)text->data, text->size);
    if (valid < text->size)
        return complain(EXIT_USAGE, "%s is not UTF-8 text (byte %zu)", name, valid);
    return 0;
}

/* -- writing ---------------------------------------------------------------------------------- */

int check_streams(void) {
    /* A file that is opened must not become one of them. */
    for (int file = STDIN_FILENO; file <= STDERR_FILENO; file++) {
        if (fcntl(file, F_GETFD) >= 0) continue;
        if (file == STDOUT_FILENO) return complain(EXIT_ERROR, "standard output is closed");
        if (open("/dev/null", file == STDIN_FILENO ? O_RDONLY : O_WRONLY) != file)
            return EXIT_ERROR;
    }
    return 0;
}

int write_output(const void *data, size_t size) {
    const char *at = data;
    while (size > 0) {
        ssize_t done = write(STDOUT_FILENO, at, size);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && errno == EPIPE) return EXIT_BROKEN_PIPE;
        if (done < 0)
            return complain(EXIT_ERROR, "the answer can't be written: %s", strerror(errno));
        at += done;
        size -= (size_t)done;
    }
    return 0;
}

/* -- places ----------------------------------------------------------------------------------- */

/* Where this program lies. */
static int program_path(const char *program, char *path, size_t room) {
#ifdef __APPLE__
    uint32_t size = (uint32_t)room;
    if (_NSGetExecutablePath(path, &size) == 0) return 1;
#else
    ssize_t size = readlink("/proc/self/exe", path, room - 1);
    if (size > 0 && (size_t)size < room - 1) {
        path[size] = '\0';
        return 1;
    }
#endif
    if (strlen(program) >= room) return 0;
    strcpy(path, program);
    return 1;
}

int model_path(const char *folder, const char *program, const char *name, bsm_buffer *path) {
    char own[MOST_PATH];
    if (folder == NULL) {
        if (!program_path(program, own, sizeof own))
            return complain(EXIT_ERROR, "this program doesn't find its folder: give --model DIR");
        char *slash = strrchr(own, '/');
        if (slash != NULL) slash[slash == own] = '\0';
        else strcpy(own, ".");
        folder = own;
    }
    path->size = 0;
    bsm_buffer_add_text(path, folder);
    bsm_buffer_add_text(path, "/");
    bsm_buffer_add(path, name, strlen(name) + 1);
    return path->failed ? complain(EXIT_ERROR, "no memory") : 0;
}
