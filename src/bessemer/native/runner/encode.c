/* Text to ids: added tokens are found first, what lies between is normalised, split and encoded. */
#include "text.h"

#include <stdlib.h>
#include <string.h>

/* -- added tokens ----------------------------------------------------------------------------- */

/* The added tokens of one kind, sorted by their bytes. */
typedef struct {
    const bsm_tokenizer *tokenizer;
    const file_text *all;
    size_t count;
    size_t first[257]; /* where those that begin with each byte begin */
} added_tokens;

static void index_added(added_tokens *a, const bsm_tokenizer *t, int section) {
    a->tokenizer = t;
    a->all = (const file_text *)t->sections[section].data;
    a->count = count_of(t, section, sizeof *a->all);
    size_t at = 0;
    for (unsigned byte = 0; byte < 256; byte++) {
        a->first[byte] = at;
        for (; at < a->count; at++) {
            span text = text_part(t, a->all[at].offset, a->all[at].bytes);
            if (text.size > 0 && text.data[0] > byte) break;
        }
    }
    a->first[256] = a->count;
}

/* Byte number `depth` of an entry; -1 where it ends before. */
static int byte_at(const added_tokens *a, size_t entry, size_t depth) {
    span text = text_part(a->tokenizer, a->all[entry].offset, a->all[entry].bytes);
    return depth < text.size ? text.data[depth] : -1;
}

/* The first entry in [low, high) whose byte at `depth` is at least `byte`. */
static size_t lower(const added_tokens *a, size_t low, size_t high, size_t depth, int byte) {
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (byte_at(a, middle, depth) < byte) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The longest added token at the start of a text, or NULL. */
static const file_text *longest_added(const added_tokens *a, const uint8_t *text, size_t size) {
    const file_text *best = NULL;
    size_t low = a->first[text[0]], high = a->first[text[0] + 1];
    for (size_t depth = 1; low < high; depth++) {
        if (byte_at(a, low, depth) < 0) best = a->all + low;
        if (depth == size) break;
        low = lower(a, low, high, depth, text[depth]);
        high = lower(a, low, high, depth, text[depth] + 1);
    }
    return best;
}

/* Whether a token that stands for a whole word may be at [begin, end). */
static int stands_alone(const bsm_tokenizer *t, const uint8_t *text, size_t begin, size_t end,
                        size_t size) {
    uint32_t code;
    if (end < size) {
        read_char(text + end, text + size, &code);
        if (class_of(t, MAP_WORD, code)) return 0;
    }
    if (begin == 0) return 1;
    size_t at = begin - 1;
    while (at > 0 && (text[at] & 0xC0) == 0x80) at--;
    read_char(text + at, text + begin, &code);
    return !class_of(t, MAP_WORD, code);
}

typedef bsm_status between(encoding *e, const uint8_t *text, size_t size, int first);

/* Find added tokens in a text; what lies between goes to `rest`. */
static bsm_status find_added(encoding *e, const added_tokens *a, const uint8_t *text, size_t size,
                             int first, between *rest) {
    size_t done = 0, at = 0;
    bsm_status status = BSM_OK;
    while (at < size && status == BSM_OK) {
        if (a->first[text[at]] == a->first[text[at] + 1]) {
            at++;
            continue;
        }
        const file_text *found = longest_added(a, text + at, size - at);
        if (found == NULL) {
            at++;
            continue;
        }
        size_t begin = at, end = at + found->bytes;
        at = end;
        if ((found->flags & SINGLE_WORD) && !stands_alone(e->tokenizer, text, begin, end, size))
            continue;
        if (found->flags & STRIP_LEFT) {
            begin -= trailing_chars(text, begin, is_space);
            if (begin < done) begin = done; /* the token before may have them already */
        }
        if (found->flags & STRIP_RIGHT) end += leading_chars(text + end, size - end, is_space);
        if (done < begin) status = rest(e, text + done, begin - done, first && done == 0);
        bsm_ids_add(e->ids, (int32_t)found->id);
        done = end;
    }
    if (status == BSM_OK && done < size)
        status = rest(e, text + done, size - done, first && done == 0);
    return status;
}

static bsm_status split_all(encoding *e, const uint8_t *text, size_t size, int first) {
    return split_text(e, 0, text, size, first);
}

static bsm_status encode_between(encoding *e, const uint8_t *text, size_t size, int first) {
    bsm_buffer normal = {0};
    const bsm_tokenizer *t = e->tokenizer;
    if (count_of(t, NORMALIZER, sizeof(file_normal)) > 0) {
        bsm_buffer_add(&normal, text, size);
        bsm_status status =
            normal.failed ? no_memory(e->error) : normalize_text(t, &normal, e->error);
        if (status != BSM_OK) {
            bsm_buffer_free(&normal);
            return status;
        }
        text = normal.data;
        size = normal.size;
    }
    bsm_status status;
    if (size == 0) {
        status = BSM_OK;
    } else if (count_of(t, ADDED_NORMAL, sizeof(file_text)) == 0) {
        status = split_all(e, text, size, first);
    } else {
        added_tokens added;
        index_added(&added, t, ADDED_NORMAL);
        status = find_added(e, &added, text, size, first, split_all);
    }
    bsm_buffer_free(&normal);
    return status;
}

/* -- the whole text --------------------------------------------------------------------------- */

static void add_all(bsm_ids *ids, const bsm_tokenizer *t, int section) {
    const int32_t *all = (const int32_t *)t->sections[section].data;
    for (size_t i = 0; i < count_of(t, section, sizeof *all); i++) bsm_ids_add(ids, all[i]);
}

static int64_t leading(const bsm_ids *ids, int64_t from, int32_t id) {
    int64_t at = from;
    while (at < ids->count && ids->data[at] == id) at++;
    return at - from;
}

/* Put around the text's own ids (from `from` on) what belongs there: as Tokenizer.encode. */
static void surround(const bsm_tokenizer *t, const bsm_ids *own, bsm_ids *ids) {
    bsm_ids all = {0};
    add_all(&all, t, PREFIX);
    for (int64_t i = 0; i < own->count; i++) bsm_ids_add(&all, own->data[i]);
    add_all(&all, t, SUFFIX);
    int32_t bos = t->info->bos, add = t->info->add_bos;
    int64_t from = 0, begins = leading(&all, 0, bos);
    if (bos != NO_ID && begins > 0 && (add == 0 || begins > 1)) {
        int64_t brought = leading(own, 0, bos);
        int64_t wanted = add == 0 ? brought : brought > 1 ? brought : 1;
        for (int64_t i = 0; i < wanted; i++) bsm_ids_add(ids, bos);
        from = begins;
    } else if (bos != NO_ID && begins == 0 && add == 1) {
        bsm_ids_add(ids, bos);
    }
    for (int64_t i = from; i < all.count; i++) bsm_ids_add(ids, all.data[i]);
    ids->failed |= all.failed;
    bsm_ids_free(&all);
}

bsm_status bsm_tokenizer_encode(const bsm_tokenizer *tokenizer, const char *text, size_t size,
                                int add_special, bsm_ids *ids, bsm_error *error) {
    size_t valid = bsm_utf8_valid(text, size);
    if (valid < size)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "the text is not UTF-8 (byte %zu)", valid);
    bsm_ids own = {0};
    encoding e = {.tokenizer = tokenizer, .ids = &own, .error = error};
    added_tokens added;
    index_added(&added, tokenizer, ADDED_RAW);
    bsm_status status =
        find_added(&e, &added, (const uint8_t *)text, size, 1, encode_between);
    if (status == BSM_OK && add_special) {
        surround(tokenizer, &own, ids);
    } else if (status == BSM_OK) {
        for (int64_t i = 0; i < own.count; i++) bsm_ids_add(ids, own.data[i]);
    }
    if (status == BSM_OK && (own.failed || ids->failed)) status = no_memory(error);
    for (int64_t i = 0; status == BSM_OK && i < ids->count; i++)
        if (ids->data[i] < 0 || (uint32_t)ids->data[i] >= tokenizer->info->vocab_size)
            status = bsm_fail(error, BSM_ERROR_TOKENIZER,
                              "the tokenizer file gives the id %d, beyond its %u tokens",
                              ids->data[i], tokenizer->info->vocab_size);
    bsm_ids_free(&own);
    free(e.symbols);
    free(e.heap);
    free(e.lattice);
    return status;
}
