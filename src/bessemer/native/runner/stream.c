/* Ids to text that grows: complete characters only, none of them twice. */
#include "text.h"

#include <string.h>

static const char REPLACEMENT[] = "\xEF\xBF\xBD"; /* U+FFFD */

/* The bytes that a token adds to the text. */
static span piece(const bsm_tokenizer *t, uint32_t id, int first) {
    if (first && t->sections[FIRST_ENDS].size > 0) return text_entry(t, FIRST_ENDS, FIRSTS, id);
    if (t->sections[PIECE_ENDS].size > 0) return text_entry(t, PIECE_ENDS, PIECES, id);
    return text_entry(t, TOKEN_ENDS, TOKENS, id);
}

/* Drop what the decoder takes from the start of a text: at most strip_count of one character. */
static void add_stripped(bsm_stream *stream, const uint8_t *text, size_t size, bsm_buffer *out) {
    const file_info *info = stream->tokenizer->info;
    span strip = text_part(stream->tokenizer, info->strip_offset, info->strip_bytes);
    size_t at = 0;
    if (size == 0) return;
    while (strip.size > 0 && stream->stripped < info->strip_count && strip.size <= size - at &&
           memcmp(text + at, strip.data, strip.size) == 0) {
        at += strip.size;
        stream->stripped++;
    }
    if (at < size) stream->stripped = info->strip_count; /* the start is over */
    bsm_buffer_add(out, text + at, size - at);
}

/* Add bytes to the pending ones and take off what is complete: one U+FFFD for each maximal part
 * that can't be UTF-8 (The Unicode Standard, section 3.9). */
static void decode_bytes(bsm_stream *stream, const uint8_t *data, size_t size, bsm_buffer *text) {
    for (size_t i = 0; i < size;) {
        stream->pending[stream->pending_size] = data[i];
        size_t wanted, held = stream->pending_size + 1;
        size_t good = well_formed(stream->pending, held, &wanted);
        if (good == held) { /* the byte fits */
            i++;
            stream->pending_size++;
            if (held < wanted) continue;
            bsm_buffer_add(text, stream->pending, held);
        } else {
            bsm_buffer_add_text(text, REPLACEMENT);
            i += good == 0; /* else the byte may begin the next character */
        }
        stream->pending_size = 0;
    }
}

void bsm_stream_push(bsm_stream *stream, int32_t id, bsm_buffer *text) {
    const bsm_tokenizer *t = stream->tokenizer;
    if (!bsm_tokenizer_knows(t, id) || bsm_tokenizer_is_special(t, id)) return;
    span bytes = piece(t, (uint32_t)id, !stream->begun);
    stream->begun = 1;
    bsm_buffer whole = {0};
    decode_bytes(stream, bytes.data, bytes.size, &whole);
    add_stripped(stream, whole.data, whole.size, text);
    text->failed |= whole.failed;
    bsm_buffer_free(&whole);
}

void bsm_stream_finish(bsm_stream *stream, bsm_buffer *text) {
    if (stream->pending_size > 0)
        add_stripped(stream, (const uint8_t *)REPLACEMENT, strlen(REPLACEMENT), text);
    const bsm_tokenizer *t = stream->tokenizer;
    *stream = (bsm_stream){.tokenizer = t};
}
