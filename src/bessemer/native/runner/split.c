/* The pre-tokenizer: a text is split into pieces, stage by stage.
 *
 * A regular expression is a table of states, made when the tokenizer file was written: each state
 * stands for all the ways in which the expression may have matched so far, in their order of
 * preference, so that one look at each character finds the same match as a backtracking matcher. */
#include "text.h"

#include <string.h>

const uint8_t *automaton_match(const bsm_tokenizer *t, uint32_t automaton, int over_bytes,
                               const uint8_t *text, const uint8_t *end) {
    if (automaton >= count_of(t, AUTOMATA, sizeof(file_automaton))) return text;
    const file_automaton *a = (const file_automaton *)t->sections[AUTOMATA].data + automaton;
    span data = t->sections[AUTOMATON_DATA];
    uint64_t columns = (uint64_t)a->classes + 1;
    if (a->offset % 2 != 0 || a->offset > data.size || a->states > MATCH_BEFORE ||
        columns * a->states * sizeof(uint16_t) > data.size - a->offset)
        return text;
    const uint8_t *byte_classes = NULL;
    if (over_bytes && a->byte_map <= data.size && data.size - a->byte_map >= 256)
        byte_classes = data.data + a->byte_map;
    const uint16_t *table = (const uint16_t *)(data.data + a->offset);
    const uint8_t *found = text, *at = text;
    for (uint32_t state = 1; state != 0 && state < a->states;) {
        uint32_t code = 0, class = a->classes;
        size_t length = 1;
        if (at < end) {
            if (byte_classes != NULL) {
                class = byte_classes[*at];
            } else {
                length = read_char(at, end, &code);
                class = class_of(t, a->class_map, code);
            }
            if (class >= a->classes) class = 0;
        }
        uint32_t step = table[state * columns + class];
        if (step & MATCH_BEFORE) found = at;
        if (at >= end) break;
        state = step & (MATCH_BEFORE - 1);
        at += length;
    }
    return found;
}

/* -- one stage -------------------------------------------------------------------------------- */

typedef struct {
    encoding *e;
    const file_stage *stage;
    uint32_t next; /* the stage after this one */
    const uint8_t *text;
    int first; /* the text of this stage begins the whole text */
    int held;  /* a piece waits for its neighbour: */
    size_t begin, end;
    int was_match;
} splitter;

static bsm_status emit(splitter *s, size_t begin, size_t end) {
    if (begin == end) return BSM_OK;
    return split_text(s->e, s->next, s->text + begin, end - begin, s->first && begin == 0);
}

static bsm_status release(splitter *s) {
    if (!s->held) return BSM_OK;
    s->held = 0;
    return emit(s, s->begin, s->end);
}

/* The next stretch of the text: a match of the pattern, or what lies between two. */
static bsm_status stretch(splitter *s, size_t begin, size_t end, int match) {
    match ^= (s->stage->flags & INVERTED) != 0;
    int joins = 0;
    switch (s->stage->behavior) {
    case ISOLATED: return emit(s, begin, end);
    case REMOVED: return match ? BSM_OK : emit(s, begin, end);
    case CONTIGUOUS: joins = match == s->was_match; break;
    case MERGED_PREVIOUS: joins = match && !s->was_match; break;
    default: joins = !match && s->was_match; break; /* MERGED_NEXT */
    }
    s->was_match = match;
    if (joins && s->held) {
        s->end = end;
        return BSM_OK;
    }
    bsm_status status = release(s);
    s->held = 1;
    s->begin = begin;
    s->end = end;
    return status;
}

static bsm_status split_by_pattern(encoding *e, const file_stage *stage, uint32_t next,
                                   const uint8_t *text, size_t size, int first) {
    splitter s = {.e = e, .stage = stage, .next = next, .text = text, .first = first};
    int over_bytes = (stage->flags & OVER_BYTES) != 0;
    const uint8_t *end = text + size;
    size_t at = 0, gap = 0;
    bsm_status status = BSM_OK;
    while (at < size && status == BSM_OK) {
        const uint8_t *stop =
            automaton_match(e->tokenizer, stage->number, over_bytes, text + at, end);
        size_t match_end = (size_t)(stop - text);
        if (match_end > at) {
            if (gap < at) status = stretch(&s, gap, at, 0);
            if (status == BSM_OK) status = stretch(&s, at, match_end, 1);
            at = gap = match_end;
        } else {
            uint32_t code;
            at += over_bytes ? 1 : read_char(text + at, end, &code);
        }
    }
    if (status == BSM_OK && gap < size) status = stretch(&s, gap, size, 0);
    return status == BSM_OK ? release(&s) : status;
}

/* SentencePiece's spaces: each becomes the mark, and pieces begin with it. */
static bsm_status split_by_marks(encoding *e, const file_stage *stage, uint32_t next,
                                 const uint8_t *text, size_t size, int first) {
    span mark = text_part(e->tokenizer, stage->offset, stage->bytes);
    bsm_buffer marked = {0};
    int begins = (size > 0 && text[0] == ' ') ||
                 (size >= mark.size && memcmp(text, mark.data, mark.size) == 0);
    int wanted = (stage->flags & PREFIX_SPACE) || ((stage->flags & PREFIX_FIRST) && first);
    if (wanted && !begins) bsm_buffer_add(&marked, mark.data, mark.size);
    for (size_t i = 0, from = 0; i <= size; i++)
        if (i == size || text[i] == ' ') {
            bsm_buffer_add(&marked, text + from, i - from);
            if (i < size) bsm_buffer_add(&marked, mark.data, mark.size);
            from = i + 1;
        }
    bsm_status status = marked.failed ? no_memory(e->error) : BSM_OK;
    size_t from = 0, at = 0;
    if ((stage->flags & SPLIT_MARKS) && mark.size > 0)
        while (status == BSM_OK && at + mark.size <= marked.size) {
            if (memcmp(marked.data + at, mark.data, mark.size) != 0) {
                at++;
                continue;
            }
            if (at > from)
                status = split_text(e, next, marked.data + from, at - from, first && from == 0);
            from = at;
            at += mark.size;
        }
    if (status == BSM_OK && from < marked.size)
        status = split_text(e, next, marked.data + from, marked.size - from, first && from == 0);
    bsm_buffer_free(&marked);
    return status;
}

/* From here on the text is bytes. A space may be put before it. */
static bsm_status begin_bytes(encoding *e, const file_stage *stage, uint32_t next,
                              const uint8_t *text, size_t size, int first) {
    if (!(stage->flags & PREFIX_SPACE) || text[0] == ' ')
        return split_text(e, next, text, size, first);
    bsm_buffer spaced = {0};
    bsm_buffer_add(&spaced, " ", 1);
    bsm_buffer_add(&spaced, text, size);
    bsm_status status = spaced.failed ? no_memory(e->error)
                                      : split_text(e, next, spaced.data, spaced.size, first);
    bsm_buffer_free(&spaced);
    return status;
}

bsm_status split_text(encoding *e, uint32_t stage, const uint8_t *text, size_t size, int first) {
    if (size == 0) return BSM_OK;
    if (stage >= count_of(e->tokenizer, STAGES, sizeof(file_stage)))
        return e->tokenizer->info->model == MODEL_BPE ? encode_bpe(e, text, size)
                                                      : encode_unigram(e, text, size);
    const file_stage *s = (const file_stage *)e->tokenizer->sections[STAGES].data + stage;
    switch (s->kind) {
    case STAGE_SPLIT: return split_by_pattern(e, s, stage + 1, text, size, first);
    case STAGE_BYTES: return begin_bytes(e, s, stage + 1, text, size, first);
    case STAGE_METASPACE: return split_by_marks(e, s, stage + 1, text, size, first);
    default:
        return bsm_fail(e->error, BSM_ERROR_TOKENIZER,
                        "the tokenizer file has a stage of the unknown kind %u", s->kind);
    }
}
