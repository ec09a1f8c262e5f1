/* The normalizer: what happens to a text before it is split. */
#include "text.h"

#include <string.h>

/* No rule of a sound file makes a text longer than this many times, and a little. */
enum { MOST_GROWTH = 64, MOST_EXTRA = 65536 };

static void replace(bsm_buffer *out, const bsm_buffer *in, span from, span to) {
    size_t kept = 0, at = 0;
    while (from.size > 0 && at + from.size <= in->size) {
        const uint8_t *hit = memchr(in->data + at, from.data[0], in->size - from.size - at + 1);
        if (hit == NULL) break;
        at = (size_t)(hit - in->data);
        if (memcmp(hit, from.data, from.size) != 0) {
            at++;
            continue;
        }
        bsm_buffer_add(out, in->data + kept, at - kept);
        bsm_buffer_add(out, to.data, to.size);
        kept = at += from.size;
    }
    bsm_buffer_add(out, in->data + kept, in->size - kept);
}

static void replace_pattern(const bsm_tokenizer *t, uint32_t automaton, bsm_buffer *out,
                            const bsm_buffer *in, span to) {
    size_t kept = 0, at = 0;
    const uint8_t *end = in->data + in->size;
    while (at < in->size) {
        const uint8_t *stop = automaton_match(t, automaton, 0, in->data + at, end);
        size_t match_end = (size_t)(stop - in->data);
        if (match_end <= at) {
            uint32_t code;
            at += read_char(in->data + at, end, &code);
            continue;
        }
        bsm_buffer_add(out, in->data + kept, at - kept);
        bsm_buffer_add(out, to.data, to.size);
        kept = at = match_end;
    }
    bsm_buffer_add(out, in->data + kept, in->size - kept);
}

static bsm_status apply(const bsm_tokenizer *t, const file_normal *n, const bsm_buffer *in,
                        bsm_buffer *out, bsm_error *error) {
    span from = text_part(t, n->from_offset, n->from_bytes);
    span to = text_part(t, n->to_offset, n->to_bytes);
    size_t left = 0, right = 0;
    switch (n->kind) {
    case NORMAL_PREPEND:
        bsm_buffer_add(out, from.data, from.size);
        bsm_buffer_add(out, in->data, in->size);
        return BSM_OK;
    case NORMAL_REPLACE: replace(out, in, from, to); return BSM_OK;
    case NORMAL_REPLACE_PATTERN: replace_pattern(t, n->number, out, in, to); return BSM_OK;
    case NORMAL_STRIP:
        if (n->number & 1) left = leading_chars(in->data, in->size, is_space);
        if (n->number & 2) right = trailing_chars(in->data + left, in->size - left, is_space);
        bsm_buffer_add(out, in->data + left, in->size - left - right);
        return BSM_OK;
    case NORMAL_DECOMPOSE: return decompose(t, n->number == 1, in, out);
    case NORMAL_COMPOSE: return compose(t, in, out);
    case NORMAL_CHARSMAP: map_characters(t, in, out); return BSM_OK;
    default:
        return bsm_fail(error, BSM_ERROR_TOKENIZER,
                        "the tokenizer file has a normalizer of the unknown kind %u", n->kind);
    }
}

bsm_status normalize_text(const bsm_tokenizer *t, bsm_buffer *text, bsm_error *error) {
    const file_normal *steps = (const file_normal *)t->sections[NORMALIZER].data;
    size_t most = text->size > (SIZE_MAX - MOST_EXTRA) / MOST_GROWTH
                      ? SIZE_MAX
                      : text->size * MOST_GROWTH + MOST_EXTRA;
    for (size_t i = 0; i < count_of(t, NORMALIZER, sizeof *steps) && text->size > 0; i++) {
        bsm_buffer out = {0};
        bsm_status status = apply(t, steps + i, text, &out, error);
        if (status == BSM_OK && out.failed) status = BSM_ERROR_MEMORY;
        if (status == BSM_OK && out.size > most)
            status = bsm_fail(error, BSM_ERROR_TOKENIZER,
                              "the tokenizer file makes texts far too long: it is damaged");
        else if (status == BSM_ERROR_MEMORY)
            no_memory(error);
        bsm_buffer_free(text);
        *text = out;
        if (status != BSM_OK) return status;
    }
    return BSM_OK;
}
