/* The unigram model on one piece (Kudo 2018, https://arxiv.org/abs/1804.10959): the way through
 * the piece whose tokens have the largest sum of log-probabilities, by dynamic programming. */
#include "text.h"

#include <stdlib.h>
#include <string.h>

static int reserve(encoding *e, size_t count) {
    if (count <= e->lattice_room) return 1;
    lattice_node *grown = realloc(e->lattice, count * sizeof *grown);
    if (grown == NULL) return 0;
    e->lattice = grown;
    e->lattice_room = count;
    return 1;
}

static void offer(lattice_node *node, double score, int64_t from, int32_t id) {
    if (node->from < 0 || score > node->score) *node = (lattice_node){score, from, id};
}

/* All tokens that begin at `at`; whether one of them is its first character alone. */
static int extend(encoding *e, const uint8_t *text, size_t size, size_t at, size_t first) {
    const bsm_tokenizer *t = e->tokenizer;
    const double *scores = (const double *)t->sections[SCORES].data;
    double here = e->lattice[at].score;
    uint64_t hash = HASH_START;
    int single = 0;
    for (size_t end = at; end < size && end - at < t->info->longest_token;) {
        uint32_t code;
        size_t length = read_char(text + end, text + size, &code);
        hash = hash_bytes(hash, text + end, length);
        end += length;
        int32_t id = find_token(t, hash, text + at, end - at);
        if (id == NO_ID) continue;
        offer(&e->lattice[end], scores[id] + here, (int64_t)at, id);
        single |= end - at == first;
    }
    return single;
}

/* Append what the stretch that ends a way becomes: a token, its bytes, or the unknown token. */
static bsm_status append(encoding *e, const uint8_t *text, size_t size) {
    const bsm_tokenizer *t = e->tokenizer;
    const uint32_t *bytes = (const uint32_t *)t->sections[BYTE_IDS].data;
    int32_t id = find_token(t, hash_bytes(HASH_START, text, size), text, size);
    if (id != NO_ID) {
        bsm_ids_add(e->ids, id);
        return BSM_OK;
    }
    int all = (t->info->flags & BYTE_FALLBACK) != 0;
    for (size_t i = 0; all && i < size; i++) all = bytes[text[i]] < t->info->vocab_size;
    if (all) {
        for (size_t i = 0; i < size; i++) bsm_ids_add(e->ids, (int32_t)bytes[text[i]]);
        return BSM_OK;
    }
    bsm_ids_add(e->ids, (int32_t)t->info->unknown);
    return BSM_OK;
}

bsm_status encode_unigram(encoding *e, const uint8_t *text, size_t size) {
    const file_info *info = e->tokenizer->info;
    if (!reserve(e, size + 1)) return no_memory(e->error);
    for (size_t i = 0; i <= size; i++) e->lattice[i] = (lattice_node){0, -1, NO_ID};
    for (size_t at = 0; at < size;) {
        uint32_t code;
        size_t length = read_char(text + at, text + size, &code);
        if (!extend(e, text, size, at, length)) {
            if (info->unknown >= info->vocab_size)
                return bsm_fail(e->error, BSM_ERROR_TOKENIZER,
                                "the tokenizer has neither a token for U+%04X nor one for unknown "
                                "characters", code);
            offer(&e->lattice[at + length], info->unknown_score + e->lattice[at].score,
                  (int64_t)at, (int32_t)info->unknown);
        }
        at += length;
    }
    /* Turn the ways around: node.from of a start says where its token ends. */
    int64_t end = (int64_t)size, after = -1;
    while (end >= 0) {
        int64_t from = e->lattice[end].from;
        e->lattice[end].from = after;
        after = end;
        end = from;
    }
    for (int64_t at = 0, next; at < (int64_t)size; at = next) {
        next = e->lattice[at].from;
        /* Unknown characters side by side are one. The id of a way is kept where it ends. */
        while ((info->flags & FUSE_UNKNOWN) && next < (int64_t)size &&
               e->lattice[next].id == (int32_t)info->unknown &&
               e->lattice[e->lattice[next].from].id == (int32_t)info->unknown)
            next = e->lattice[next].from;
        bsm_status status = append(e, text + at, (size_t)(next - at));
        if (status != BSM_OK) return status;
    }
    return BSM_OK;
}
