/* A session in a file, as runtime/session_file.py has it:
 *
 *     magic (8) | bytes of the head (u64) | SHA-256 of the head | head | state memory
 *
 * The head is JSON in the one form in which Python writes it, too: keys in order, no spaces. So it
 * is matched rather than parsed; whatever differs is damage. The state memory is what
 * `bsm_state_visit` visits.
 */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char MAGIC[] = "BSMSES01";
#define MAGIC_BYTES (sizeof MAGIC - 1)
#define FIXED_BYTES (MAGIC_BYTES + 8 + BSM_HASH_BYTES)
#define HASH_DIGITS (2 * BSM_HASH_BYTES)
/* Longer heads are damage. */
#define MOST_HEAD_BYTES ((uint64_t)64 << 20)
/* All of a head but its tokens, and one of these. */
#define HEAD_ROOM 1024
#define TOKEN_ROOM 12
/* Names of temporary files that are tried. */
#define MOST_TRIES 100
/* Symbolic links that are followed one after another; as many as Linux follows. */
#define MOST_LINKS 40

static void hex(const uint8_t digest[BSM_HASH_BYTES], char text[HASH_DIGITS + 1]) {
    for (int i = 0; i < BSM_HASH_BYTES; i++) snprintf(text + 2 * i, 3, "%02x", digest[i]);
}

static void hash_of(const void *data, size_t bytes, uint8_t digest[BSM_HASH_BYTES]) {
    bsm_sha256 running;
    bsm_sha256_begin(&running);
    bsm_sha256_add(&running, data, bytes);
    bsm_sha256_end(&running, digest);
}

static bsm_status failed(bsm_error *error, const char *path, const char *what, int number) {
    return bsm_fail(error, BSM_ERROR_FILE, "%s can't be %s: %s", path, what, strerror(number));
}

static bsm_status damaged(bsm_error *error, const char *path) {
    return bsm_fail(error, BSM_ERROR_SESSION, "%s is damaged: the session can't be restored", path);
}

static bsm_status no_room(bsm_error *error, const char *path) {
    return bsm_fail(error, BSM_ERROR_MEMORY, "no memory for the session of %s", path);
}

/* -- writing ---------------------------------------------------------------------------------- */

/* Write it all; 0, or an errno. */
static int write_all(int file, const void *data, size_t bytes) {
    const char *at = data;
    while (bytes > 0) {
        ssize_t done = write(file, at, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        at += done;
        bytes -= (size_t)done;
    }
    return 0;
}

typedef struct visiting {
    char *state;
    bsm_sha256 hash;
    int file;
} visiting;

static int add_to_hash(void *arg, int64_t offset, int64_t bytes) {
    visiting *v = arg;
    bsm_sha256_add(&v->hash, v->state + offset, (size_t)bytes);
    return 0;
}

static int write_stretch(void *arg, int64_t offset, int64_t bytes) {
    visiting *v = arg;
    return write_all(v->file, v->state + offset, (size_t)bytes);
}

/* The fixed part and the head, to be freed; NULL when there is no memory. */
static char *make_head(const bsm_session *session, size_t *bytes) {
    const bsm_info *info = &bsm_this_model.info;
    const bsm_holding *held = &session->held;
    uint8_t digest[BSM_HASH_BYTES];
    char hash[HASH_DIGITS + 1];
    visiting v = {.state = session->state};
    bsm_sha256_begin(&v.hash);
    (void)bsm_state_visit(&bsm_this_model, held, add_to_hash, &v);
    bsm_sha256_end(&v.hash, digest);
    hex(digest, hash);
    size_t room = FIXED_BYTES + HEAD_ROOM + (size_t)held->position * TOKEN_ROOM;
    char *made = malloc(room);
    if (made == NULL) return NULL;
    size_t at = FIXED_BYTES;
    at += (size_t)snprintf(
        made + at, room - at,
        "{\"abi\":\"%s\",\"held\":{\"high_water\":%lld,\"position\":%lld,\"regime\":%lld,"
        "\"valid\":%lld},\"state_bytes\":%lld,\"state_sha256\":\"%s\",\"tokens\":[",
        info->abi_hash, (long long)held->high_water, (long long)held->position,
        (long long)held->regime, (long long)held->valid,
        (long long)bsm_state_held_bytes(&bsm_this_model, held), hash);
    for (int64_t i = 0; i < held->position; i++)
        at += (size_t)snprintf(made + at, room - at, i == 0 ? "%d" : ",%d", session->tokens[i]);
    at += (size_t)snprintf(made + at, room - at, "],\"weights\":\"%s\"}", info->weights_hash);
    memcpy(made, MAGIC, MAGIC_BYTES);
    for (int i = 0; i < 8; i++)
        made[MAGIC_BYTES + (size_t)i] = (char)((uint64_t)(at - FIXED_BYTES) >> (8 * i));
    hash_of(made + FIXED_BYTES, at - FIXED_BYTES, digest);
    memcpy(made + MAGIC_BYTES + 8, digest, sizeof digest);
    *bytes = at;
    return made;
}

/* Whether a session may be written there: a new file, or in the place of one. A pipe or a device
 * must not be replaced by a file. */
static bsm_status check_place(const char *path, bsm_error *error) {
    struct stat found;
    if (stat(path, &found) != 0)
        return errno == ENOENT ? BSM_OK : failed(error, path, "written", errno);
    if (S_ISDIR(found.st_mode)) return failed(error, path, "written", EISDIR);
    if (!S_ISREG(found.st_mode))
        return bsm_fail(error, BSM_ERROR_FILE, "%s can't be written: it is no regular file", path);
    return BSM_OK;
}

/* Replace *path, a symbolic link in allocated memory, by where it leads; 0, or an errno. */
static int follow_link(char **path) {
    char target[PATH_MAX];
    ssize_t size = readlink(*path, target, sizeof target);
    if (size < 0) return errno;
    if ((size_t)size == sizeof target) return ENAMETOOLONG;
    const char *slash = size > 0 && target[0] == '/' ? NULL : strrchr(*path, '/');
    size_t folder = slash == NULL ? 0 : (size_t)(slash - *path) + 1;
    char *joined = malloc(folder + (size_t)size + 1);
    if (joined == NULL) return ENOMEM;
    memcpy(joined, *path, folder);
    memcpy(joined + folder, target, (size_t)size);
    joined[folder + (size_t)size] = '\0';
    free(*path);
    *path = joined;
    return 0;
}

/* Follow all links of the last part of *path, also one that leads to nothing yet: what they lead to
 * is written, and they stay. 0, or an errno. */
static int follow_links(char **path) {
    struct stat found;
    int number = 0;
    for (int links = 0; number == 0 && lstat(*path, &found) == 0 && S_ISLNK(found.st_mode); links++)
        number = links == MOST_LINKS ? ELOOP : follow_link(path);
    return number;
}

/* A new file beside `path`, whose name goes to `temporary`; -1 and errno where there is none. */
static int create_beside(const char *path, char *temporary, size_t room) {
    const char *slash = strrchr(path, '/');
    int folder = slash == NULL ? 0 : (int)(slash - path) + 1, file = -1;
    for (unsigned try = 0; file < 0 && try < MOST_TRIES; try++) {
        snprintf(temporary, room, "%.*s.bessemer-session-%lld-%u", folder, path,
                 (long long)getpid(), try);
        file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file < 0 && errno != EEXIST && errno != EINTR) break;
    }
    return file;
}

/* Write head and state to `path`, whole or not at all; 0, or an errno. */
static int write_file(const bsm_session *session, const char *path, const char *head,
                      size_t head_bytes) {
    size_t room = strlen(path) + HEAD_ROOM;
    char *temporary = malloc(room);
    if (temporary == NULL) return ENOMEM;
    int file = create_beside(path, temporary, room);
    if (file < 0) {
        int reason = errno;
        free(temporary);
        return reason;
    }
    visiting v = {.state = session->state, .file = file};
    int number = write_all(file, head, head_bytes);
    if (number == 0)
        number = bsm_state_visit(&bsm_this_model, &session->held, write_stretch, &v);
    if (number == 0 && fsync(file) != 0) number = errno;
    if (close(file) != 0 && number == 0) number = errno;
    if (number == 0 && rename(temporary, path) != 0) number = errno;
    if (number != 0) unlink(temporary);
    free(temporary);
    return number;
}

/* Write the session to the file that `path` leads to. */
static bsm_status write_session(const bsm_session *session, const char *path, bsm_error *error) {
    size_t head_bytes = 0;
    char *target = strdup(path), *head = make_head(session, &head_bytes);
    int number = target == NULL || head == NULL ? ENOMEM : follow_links(&target);
    if (number == 0) number = write_file(session, target, head, head_bytes);
    free(target);
    free(head);
    if (number == ENOMEM) return no_room(error, path);
    return number == 0 ? BSM_OK : failed(error, path, "written", number);
}

bsm_status bsm_session_save(bsm_session *session, const char *path, bsm_error *error) {
    if (path == NULL)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "bsm_session_save: path must not be NULL");
    if (*path == '\0')
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "bsm_session_save: path is empty");
    bsm_status status = bsm_session_enter(session, error);
    if (status != BSM_OK) return status;
    status = check_place(path, error);
    if (status == BSM_OK) status = write_session(session, path, error);
    bsm_session_leave(session);
    return status;
}

/* -- reading ---------------------------------------------------------------------------------- */

/* Read exactly `bytes` from where the file stands; 0, or an errno (EIO where the file ends). */
static int read_all(int file, void *to, size_t bytes) {
    char *out = to;
    while (bytes > 0) {
        ssize_t count = read(file, out, bytes);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno;
        if (count == 0) return EIO;
        out += count;
        bytes -= (size_t)count;
    }
    return 0;
}

/* A text that is matched from its start. */
typedef struct scan {
    const char *at, *end;
    int ok;
} scan;

static void match(scan *s, const char *text) {
    size_t size = strlen(text);
    s->ok = s->ok && (size_t)(s->end - s->at) >= size && memcmp(s->at, text, size) == 0;
    if (s->ok) s->at += size;
}

static int64_t match_number(scan *s) {
    int64_t value = 0;
    int digits = 0;
    for (; s->ok && s->at < s->end && *s->at >= '0' && *s->at <= '9'; s->at++, digits++) {
        s->ok = value <= (INT64_MAX - 9) / 10;
        if (s->ok) value = value * 10 + (*s->at - '0');
    }
    s->ok = s->ok && digits > 0;
    return value;
}

static void match_hash(scan *s, char text[HASH_DIGITS + 1]) {
    match(s, "\"");
    s->ok = s->ok && s->end - s->at >= HASH_DIGITS;
    if (!s->ok) return;
    memcpy(text, s->at, HASH_DIGITS);
    text[HASH_DIGITS] = '\0';
    s->at += HASH_DIGITS;
    match(s, "\"");
}

/* What a file says of a session. */
typedef struct stored {
    bsm_holding held;
    int64_t state_bytes;
    int32_t *tokens; /* [held.position] */
    char *state;     /* [state_bytes], in the order of bsm_state_visit */
    char abi[HASH_DIGITS + 1], weights[HASH_DIGITS + 1], state_hash[HASH_DIGITS + 1];
} stored;

/* Whether a session can be in this state. */
static int possible(const bsm_holding *held) {
    int64_t context = bsm_this_model.info.context_length;
    return held->valid <= held->position && held->position <= context &&
           held->valid <= held->high_water && held->high_water <= context;
}

/* Understand a head. The tokens of another model are not looked at. */
static bsm_status read_head(const char *text, size_t bytes, const char *path, stored *s,
                            bsm_error *error) {
    scan at = {text, text + bytes, 1};
    match(&at, "{\"abi\":");
    match_hash(&at, s->abi);
    match(&at, ",\"held\":{\"high_water\":");
    s->held.high_water = match_number(&at);
    match(&at, ",\"position\":");
    s->held.position = match_number(&at);
    match(&at, ",\"regime\":");
    s->held.regime = match_number(&at);
    match(&at, ",\"valid\":");
    s->held.valid = match_number(&at);
    match(&at, "},\"state_bytes\":");
    s->state_bytes = match_number(&at);
    match(&at, ",\"state_sha256\":");
    match_hash(&at, s->state_hash);
    match(&at, ",\"tokens\":[");
    if (!at.ok) return damaged(error, path);
    if (strcmp(s->abi, bsm_this_model.info.abi_hash) != 0)
        return bsm_fail(error, BSM_ERROR_SESSION, "%s is a session of another model than %s", path,
                        bsm_this_model.info.name);
    if (!possible(&s->held)) return damaged(error, path);
    s->tokens = malloc((size_t)(s->held.position + 1) * sizeof *s->tokens);
    if (s->tokens == NULL) return no_room(error, path);
    for (int64_t i = 0; at.ok && i < s->held.position; i++) {
        if (i > 0) match(&at, ",");
        int64_t id = match_number(&at);
        at.ok = at.ok && id < bsm_this_model.info.vocab_size;
        s->tokens[i] = (int32_t)id;
    }
    match(&at, "],\"weights\":");
    match_hash(&at, s->weights);
    match(&at, "}");
    if (!at.ok || at.at != at.end) return damaged(error, path);
    if (strcmp(s->weights, bsm_this_model.info.weights_hash) != 0)
        return bsm_fail(error, BSM_ERROR_SESSION,
                        "%s is a session of %s with other weights", path, bsm_this_model.info.name);
    return BSM_OK;
}

/* Read and check the state memory, whose size the head says. */
static bsm_status read_state(int file, const char *path, stored *s, bsm_error *error) {
    uint8_t digest[BSM_HASH_BYTES];
    char hash[HASH_DIGITS + 1];
    if (s->state_bytes != bsm_state_held_bytes(&bsm_this_model, &s->held))
        return damaged(error, path);
    s->state = bsm_allocate(s->state_bytes, 0);
    if (s->state == NULL) return no_room(error, path);
    int number = read_all(file, s->state, (size_t)s->state_bytes);
    if (number != 0 && number != EIO) return failed(error, path, "read", number);
    hash_of(s->state, (size_t)s->state_bytes, digest);
    hex(digest, hash);
    return number == EIO || strcmp(hash, s->state_hash) != 0 ? damaged(error, path) : BSM_OK;
}

/* Everything but the first FIXED_BYTES, which say how long the head is. */
static bsm_status read_rest(int file, const char *path, int64_t size, const uint8_t *fixed,
                            stored *s, bsm_error *error) {
    uint8_t digest[BSM_HASH_BYTES];
    uint64_t head_bytes = 0;
    for (int i = 7; i >= 0; i--) head_bytes = head_bytes << 8 | fixed[MAGIC_BYTES + (size_t)i];
    if (head_bytes > MOST_HEAD_BYTES || head_bytes > (uint64_t)size - FIXED_BYTES)
        return damaged(error, path);
    char *head = malloc((size_t)head_bytes + 1);
    if (head == NULL) return no_room(error, path);
    bsm_status status = BSM_OK;
    int number = read_all(file, head, (size_t)head_bytes);
    if (number != 0) status = failed(error, path, "read", number);
    hash_of(head, number == 0 ? (size_t)head_bytes : 0, digest);
    if (status == BSM_OK && memcmp(digest, fixed + MAGIC_BYTES + 8, sizeof digest) != 0)
        status = damaged(error, path);
    if (status == BSM_OK) status = read_head(head, (size_t)head_bytes, path, s, error);
    free(head);
    if (status == BSM_OK && size != (int64_t)(FIXED_BYTES + head_bytes) + s->state_bytes)
        status = damaged(error, path);
    return status == BSM_OK ? read_state(file, path, s, error) : status;
}

static bsm_status read_session(const char *path, stored *s, bsm_error *error) {
    uint8_t fixed[FIXED_BYTES];
    struct stat found;
    int file;
    /* A pipe in its place must not be waited for. */
    do file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    while (file < 0 && errno == EINTR);
    if (file < 0) return failed(error, path, "read", errno);
    bsm_status status = BSM_OK;
    if (fstat(file, &found) != 0) status = failed(error, path, "read", errno);
    else if (!S_ISREG(found.st_mode))
        status = bsm_fail(error, BSM_ERROR_FILE, "%s is no file", path);
    else if (found.st_size < (off_t)sizeof fixed || read_all(file, fixed, sizeof fixed) != 0 ||
             memcmp(fixed, MAGIC, MAGIC_BYTES) != 0)
        status = bsm_fail(error, BSM_ERROR_SESSION, "%s is no saved session of this Bessemer",
                          path);
    else
        status = read_rest(file, path, (int64_t)found.st_size, fixed, s, error);
    close(file);
    return status;
}

typedef struct filling {
    char *state;
    const char *from;
} filling;

static int fill_stretch(void *arg, int64_t offset, int64_t bytes) {
    filling *f = arg;
    memcpy(f->state + offset, f->from, (size_t)bytes);
    f->from += bytes;
    return 0;
}

bsm_status bsm_session_load(bsm_session *session, const char *path, bsm_error *error) {
    if (path == NULL)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "bsm_session_load: path must not be NULL");
    if (*path == '\0')
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "bsm_session_load: path is empty");
    bsm_status status = bsm_session_enter(session, error);
    if (status != BSM_OK) return status;
    stored s = {.state_bytes = 0};
    status = read_session(path, &s, error);
    if (status == BSM_OK) {
        filling f = {session->state, s.state};
        (void)bsm_state_visit(&bsm_this_model, &s.held, fill_stretch, &f);
        memcpy(session->tokens, s.tokens, (size_t)s.held.position * sizeof *s.tokens);
        bsm_session_hold(session, s.held);
    }
    free(s.tokens);
    bsm_release(s.state, s.state_bytes);
    bsm_session_leave(session);
    return status;
}
