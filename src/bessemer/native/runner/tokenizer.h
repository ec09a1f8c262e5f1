/* Text to token ids and back, from the tokenizer file of an artifact (tokenizer.bin).
 *
 * The file is written by bessemer.artifact.text, which is also where its format is described
 * (format.py) and where every rule comes from: what the Python tokenizer does, these functions do.
 * A tokenizer is read-only once open and may be used by any number of threads.
 */
#ifndef BESSEMER_TOKENIZER_H
#define BESSEMER_TOKENIZER_H

#include "../api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bsm_tokenizer bsm_tokenizer;

/* Bytes that grow. failed: there was no memory; what is appended afterwards is dropped. */
typedef struct bsm_buffer {
    uint8_t *data;
    size_t size, room;
    int failed;
} bsm_buffer;

void bsm_buffer_add(bsm_buffer *buffer, const void *data, size_t size);
void bsm_buffer_add_text(bsm_buffer *buffer, const char *text);
void bsm_buffer_free(bsm_buffer *buffer);

/* Token ids that grow; as bsm_buffer. */
typedef struct bsm_ids {
    int32_t *data;
    int64_t count, room;
    int failed;
} bsm_ids;

void bsm_ids_add(bsm_ids *ids, int32_t id);
void bsm_ids_free(bsm_ids *ids);

/* Map the file and check that it is whole. identity: the checksum in the header that is expected,
 * or 0 for any. vocab_size: of the model; a tokenizer with more tokens is another model's.
 * Fails with BSM_ERROR_FILE, _TOKENIZER, _MEMORY. */
bsm_status bsm_tokenizer_open(const char *path, uint32_t identity, int64_t vocab_size,
                              bsm_tokenizer **tokenizer, bsm_error *error);
/* The same over bytes in memory (8-byte aligned), which must outlive it. name: for messages. */
bsm_status bsm_tokenizer_view(const void *data, size_t size, const char *name, uint32_t identity,
                              int64_t vocab_size, bsm_tokenizer **tokenizer, bsm_error *error);
void bsm_tokenizer_close(bsm_tokenizer *tokenizer);

/* The highest id plus one, added tokens included. */
int64_t bsm_tokenizer_size(const bsm_tokenizer *tokenizer);
/* Whether an id below that is a token at all; whether it is a mark (BOS, EOS, ...), not text. */
int bsm_tokenizer_knows(const bsm_tokenizer *tokenizer, int32_t id);
int bsm_tokenizer_is_special(const bsm_tokenizer *tokenizer, int32_t id);
/* Whether the id ends an answer. */
int bsm_tokenizer_is_end(const bsm_tokenizer *tokenizer, int32_t id);
/* The id of the special token with this text, or -1. */
int32_t bsm_tokenizer_special_id(const bsm_tokenizer *tokenizer, const char *text, size_t size);

/* Append the ids of a text (valid UTF-8). add_special: begin with BOS (and what else the tokenizer
 * puts around a text); a text that brings its own BOS gets no second one.
 * Fails with BSM_ERROR_ARGUMENT for text that is not UTF-8, _TOKENIZER, _MEMORY. */
bsm_status bsm_tokenizer_encode(const bsm_tokenizer *tokenizer, const char *text, size_t size,
                                int add_special, bsm_ids *ids, bsm_error *error);

/* The first byte of `text` that is not UTF-8, or `size`. */
size_t bsm_utf8_valid(const char *text, size_t size);

/* -- the chat prompt -------------------------------------------------------------------------- */

/* Whether a text (valid UTF-8) is white space alone. */
int bsm_text_is_blank(const char *text, size_t size);
/* Append the prompt for one question, as the model's chat template writes it, up to the answer.
 * system: NULL for none; an empty one is not the same to all templates. Fails with
 * BSM_ERROR_ARGUMENT where there is no such form, _MEMORY. */
bsm_status bsm_tokenizer_chat(const bsm_tokenizer *tokenizer, const char *system,
                              size_t system_size, const char *user, size_t user_size,
                              bsm_buffer *prompt, bsm_error *error);

/* -- text that grows -------------------------------------------------------------------------- */

/* Ids in, complete characters out. Zero-initialise it but for the tokenizer. */
typedef struct bsm_stream {
    const bsm_tokenizer *tokenizer;
    uint8_t pending[4]; /* of a character that is not complete */
    uint32_t pending_size;
    int32_t begun;
    uint32_t stripped; /* how many characters at the start were dropped; above the limit: no more */
} bsm_stream;

/* Append the text that `id` completes; nothing for special and unknown ids. */
void bsm_stream_push(bsm_stream *stream, int32_t id, bsm_buffer *text);
/* What is left: U+FFFD when the text ends inside a character. */
void bsm_stream_finish(bsm_stream *stream, bsm_buffer *text);

/* -- stop strings ----------------------------------------------------------------------------- */

typedef struct bsm_stop {
    const char *text;
    size_t size;
    size_t *failures; /* Knuth-Morris-Pratt */
    size_t matched;
} bsm_stop;

/* Holds back what may be the start of a stop string. Zero-initialise it. */
typedef struct bsm_stops {
    bsm_stop *stops;
    size_t count;
    bsm_buffer held;
    int stopped;
} bsm_stops;

/* Look for `text` (not empty; it must outlive the matcher) too. 0: no memory. */
int bsm_stops_add(bsm_stops *stops, const char *text, size_t size);
/* Append to `shown` what of `text` may be shown; returns whether a stop string has been found. */
int bsm_stops_push(bsm_stops *stops, const void *text, size_t size, bsm_buffer *shown);
/* Append what was held back, at the end of a text without a stop string. */
void bsm_stops_flush(bsm_stops *stops, bsm_buffer *shown);
void bsm_stops_free(bsm_stops *stops);

#ifdef __cplusplus
}
#endif
#endif
