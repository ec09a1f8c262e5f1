/* Byte-pair encoding of one piece (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909): the
 * pair of neighbours with the lowest rank is merged, the leftmost first, until none is left. A heap
 * of the pairs keeps that at n log n for a piece of n characters. */
#include "text.h"

#include <stdlib.h>
#include <string.h>

/* -- the heap --------------------------------------------------------------------------------- */

static int before(candidate a, candidate b) {
    return a.rank != b.rank ? a.rank < b.rank : a.position < b.position;
}

static int push(encoding *e, candidate c) {
    if (e->heap_size == e->heap_room) {
        size_t room = e->heap_room == 0 ? 64 : e->heap_room * 2;
        candidate *grown = realloc(e->heap, room * sizeof *grown);
        if (grown == NULL) return 0;
        e->heap = grown;
        e->heap_room = room;
    }
    size_t at = e->heap_size++;
    while (at > 0 && before(c, e->heap[(at - 1) / 2])) {
        e->heap[at] = e->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    e->heap[at] = c;
    return 1;
}

static candidate pop(encoding *e) {
    candidate top = e->heap[0], last = e->heap[--e->heap_size];
    size_t at = 0, size = e->heap_size;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= size) break;
        if (child + 1 < size && before(e->heap[child + 1], e->heap[child])) child++;
        if (!before(e->heap[child], last)) break;
        e->heap[at] = e->heap[child];
        at = child;
    }
    if (size > 0) e->heap[at] = last;
    return top;
}

/* -- merges ----------------------------------------------------------------------------------- */

/* What two neighbours merge into, or NULL: the merges of a left token are sorted by the right. */
static const file_merge *find_merge(const bsm_tokenizer *t, uint32_t left, uint32_t right) {
    const uint32_t *starts = (const uint32_t *)t->sections[MERGE_STARTS].data;
    const file_merge *merges = (const file_merge *)t->sections[MERGES].data;
    uint32_t low = starts[left], high = starts[left + 1];
    if (high > count_of(t, MERGES, sizeof *merges)) return NULL;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (merges[middle].right < right) low = middle + 1;
        else if (merges[middle].right > right) high = middle;
        else return merges[middle].merged < t->info->vocab_size ? merges + middle : NULL;
    }
    return NULL;
}

static int push_pair(encoding *e, int32_t left) {
    int32_t right = e->symbols[left].next;
    if (right < 0) return 1;
    const file_merge *m = find_merge(e->tokenizer, e->symbols[left].id, e->symbols[right].id);
    return m == NULL || push(e, (candidate){m->rank, (uint32_t)left, m->merged});
}

static int merge_all(encoding *e, int32_t count) {
    symbol *s = e->symbols;
    e->heap_size = 0;
    for (int32_t i = 0; i + 1 < count; i++)
        if (!push_pair(e, i)) return 0;
    while (e->heap_size > 0) {
        candidate c = pop(e);
        int32_t left = (int32_t)c.position, right = s[left].next;
        if (s[left].size == 0 || right < 0) continue;
        /* One of the two may have become part of another token since. */
        const file_merge *m = find_merge(e->tokenizer, s[left].id, s[right].id);
        if (m == NULL || m->merged != c.merged) continue;
        s[left].id = c.merged;
        s[left].size += s[right].size;
        s[left].next = s[right].next;
        s[right].size = 0;
        if (s[left].next >= 0) s[s[left].next].previous = left;
        if (s[left].previous >= 0 && !push_pair(e, s[left].previous)) return 0;
        if (!push_pair(e, left)) return 0;
    }
    return 1;
}

/* -- symbols ---------------------------------------------------------------------------------- */

static int reserve(encoding *e, size_t count) {
    if (count <= e->symbol_room) return 1;
    size_t room = count < 64 ? 64 : count;
    symbol *grown = realloc(e->symbols, room * sizeof *grown);
    if (grown == NULL) return 0;
    e->symbols = grown;
    e->symbol_room = room;
    return 1;
}

typedef struct {
    encoding *e;
    int32_t count;
    uint32_t unknown; /* bytes of an unknown symbol that is not added yet; 0: none */
} speller;

static void add_symbol(speller *s, uint32_t id, uint32_t size) {
    s->e->symbols[s->count] = (symbol){id, s->count - 1, s->count + 1, size};
    s->count++;
}

static void add_unknown(speller *s) {
    if (s->unknown > 0) add_symbol(s, s->e->tokenizer->info->unknown, s->unknown);
    s->unknown = 0;
}

/* The bytes of a character that the vocabulary lacks; whether all of them are tokens. */
static int add_bytes(speller *s, const uint8_t *text, size_t size) {
    const bsm_tokenizer *t = s->e->tokenizer;
    const uint32_t *ids = (const uint32_t *)t->sections[BYTE_IDS].data;
    if (!(t->info->flags & BYTE_FALLBACK)) return 0;
    for (size_t i = 0; i < size; i++)
        if (ids[text[i]] >= t->info->vocab_size) return 0;
    for (size_t i = 0; i < size; i++) add_symbol(s, ids[text[i]], 1);
    return 1;
}

/* One character, or byte, of the piece. */
static void spell(speller *s, const uint8_t *text, size_t size) {
    const bsm_tokenizer *t = s->e->tokenizer;
    const file_info *info = t->info;
    int64_t id;
    if (info->flags & BYTE_SYMBOLS)
        id = ((const uint32_t *)t->sections[BYTE_IDS].data)[*text];
    else
        id = find_token(t, hash_bytes(HASH_START, text, size), text, size);
    if (id >= 0 && id < (int64_t)info->vocab_size) {
        add_unknown(s);
        add_symbol(s, (uint32_t)id, (uint32_t)size);
        return;
    }
    if (add_bytes(s, text, size)) return;
    if (info->unknown >= info->vocab_size) return; /* no unknown token: it is dropped */
    if (!(info->flags & FUSE_UNKNOWN)) add_unknown(s);
    s->unknown += (uint32_t)size;
}

bsm_status encode_bpe(encoding *e, const uint8_t *text, size_t size) {
    const bsm_tokenizer *t = e->tokenizer;
    if (t->info->flags & WHOLE_FIRST) {
        int32_t whole = size <= t->info->longest_token
                            ? find_token(t, hash_bytes(HASH_START, text, size), text, size)
                            : NO_ID;
        if (whole != NO_ID) {
            bsm_ids_add(e->ids, whole);
            return BSM_OK;
        }
    }
    if (size > INT32_MAX / 2)
        return bsm_fail(e->error, BSM_ERROR_ARGUMENT, "a text of %zu bytes is too long", size);
    if (!reserve(e, size + 1)) return no_memory(e->error);
    speller s = {.e = e};
    for (size_t at = 0; at < size;) {
        uint32_t code;
        size_t length =
            t->info->flags & BYTE_SYMBOLS ? 1 : read_char(text + at, text + size, &code);
        spell(&s, text + at, length);
        at += length;
    }
    add_unknown(&s);
    if (s.count == 0) return BSM_OK;
    e->symbols[s.count - 1].next = -1;
    if (!merge_all(e, s.count)) return no_memory(e->error);
    for (int32_t i = 0; i >= 0; i = e->symbols[i].next)
        bsm_ids_add(e->ids, (int32_t)e->symbols[i].id);
    return BSM_OK;
}
