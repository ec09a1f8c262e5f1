/* Unicode normal forms (Unicode Standard Annex 15), and SentencePiece's character map. */
#include "text.h"

#include <stdlib.h>
#include <string.h>

/* Hangul syllables are composed by arithmetic (The Unicode Standard, section 3.12). */
enum {
    SYLLABLES = 0xAC00, LEADS = 0x1100, VOWELS = 0x1161, TAILS = 0x11A7,
    LEAD_COUNT = 19, VOWEL_COUNT = 21, TAIL_COUNT = 28,
    SYLLABLE_COUNT = LEAD_COUNT * VOWEL_COUNT * TAIL_COUNT,
    COMBINING_CLASSES = 256
};

/* -- decomposition ---------------------------------------------------------------------------- */

static const file_decomposed *find_decomposed(const bsm_tokenizer *t, uint32_t code) {
    const file_decomposed *all = (const file_decomposed *)t->sections[DECOMPOSED].data;
    size_t low = 0, high = count_of(t, DECOMPOSED, sizeof *all);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (all[middle].code < code) low = middle + 1;
        else if (all[middle].code > code) high = middle;
        else return all + middle;
    }
    return NULL;
}

/* Code points that grow, and a stretch at the end that is not in its order yet. */
typedef struct {
    const bsm_tokenizer *tokenizer;
    bsm_buffer codes;  /* uint32 */
    bsm_buffer sorted; /* room for sorting */
    size_t marks;      /* where the combining marks at the end begin, in bytes */
} reordering;

/* Bring the marks at the end into the order of their classes; equal ones stay as they are. */
static void sort_marks(reordering *r) {
    uint32_t *codes = (uint32_t *)(void *)(r->codes.data + r->marks);
    size_t count = (r->codes.size - r->marks) / sizeof *codes;
    if (count < 2 || r->codes.failed) return;
    size_t starts[COMBINING_CLASSES] = {0};
    r->sorted.size = 0;
    bsm_buffer_add(&r->sorted, codes, count * sizeof *codes);
    if (r->sorted.failed) return;
    const uint32_t *from = (const uint32_t *)(const void *)r->sorted.data;
    for (size_t i = 0; i < count; i++) {
        uint32_t class = class_of(r->tokenizer, MAP_COMBINING, from[i]);
        if (class + 1 < COMBINING_CLASSES) starts[class + 1]++;
    }
    for (int c = 1; c < COMBINING_CLASSES; c++) starts[c] += starts[c - 1];
    for (size_t i = 0; i < count; i++)
        codes[starts[class_of(r->tokenizer, MAP_COMBINING, from[i])]++] = from[i];
}

static void add_code(reordering *r, uint32_t code) {
    if (class_of(r->tokenizer, MAP_COMBINING, code) == 0) {
        sort_marks(r);
        bsm_buffer_add(&r->codes, &code, sizeof code);
        r->marks = r->codes.size;
    } else {
        bsm_buffer_add(&r->codes, &code, sizeof code);
    }
}

static void add_decomposed(reordering *r, uint32_t code, int compatible) {
    const bsm_tokenizer *t = r->tokenizer;
    uint32_t syllable = code - SYLLABLES;
    if (syllable < SYLLABLE_COUNT) {
        add_code(r, LEADS + syllable / (VOWEL_COUNT * TAIL_COUNT));
        add_code(r, VOWELS + syllable / TAIL_COUNT % VOWEL_COUNT);
        if (syllable % TAIL_COUNT != 0) add_code(r, TAILS + syllable % TAIL_COUNT);
        return;
    }
    const file_decomposed *d = find_decomposed(t, code);
    uint32_t offset = 0, count = 0;
    if (d != NULL) {
        offset = compatible ? d->compatible : d->canonical;
        count = compatible ? d->compatible_count : d->canonical_count;
    }
    size_t all = count_of(t, CODES, sizeof(uint32_t));
    if (count == 0 || offset > all || count > all - offset) {
        add_code(r, code);
        return;
    }
    const uint32_t *codes = (const uint32_t *)t->sections[CODES].data + offset;
    for (uint32_t i = 0; i < count; i++) add_code(r, codes[i]);
}

static int is_ascii(const bsm_buffer *text) {
    for (size_t i = 0; i < text->size; i++)
        if (text->data[i] >= 0x80) return 0;
    return 1;
}

bsm_status decompose(const bsm_tokenizer *t, int compatible, const bsm_buffer *in,
                     bsm_buffer *out) {
    if (is_ascii(in)) {
        bsm_buffer_add(out, in->data, in->size);
        return BSM_OK;
    }
    reordering r = {.tokenizer = t};
    const uint8_t *end = in->data + in->size;
    for (const uint8_t *at = in->data; at < end;) {
        uint32_t code;
        at += read_char(at, end, &code);
        add_decomposed(&r, code, compatible);
    }
    sort_marks(&r);
    int failed = r.codes.failed || r.sorted.failed;
    const uint32_t *codes = (const uint32_t *)(const void *)r.codes.data;
    for (size_t i = 0; !failed && i < r.codes.size / sizeof *codes; i++) add_char(out, codes[i]);
    bsm_buffer_free(&r.codes);
    bsm_buffer_free(&r.sorted);
    return failed ? BSM_ERROR_MEMORY : BSM_OK;
}

/* -- composition ------------------------------------------------------------------------------ */

/* The code point that two make together, or 0. */
static uint32_t compose_pair(const bsm_tokenizer *t, uint32_t first, uint32_t second) {
    if (first - LEADS < LEAD_COUNT && second - VOWELS < VOWEL_COUNT)
        return SYLLABLES + ((first - LEADS) * VOWEL_COUNT + (second - VOWELS)) * TAIL_COUNT;
    if (first - SYLLABLES < SYLLABLE_COUNT && (first - SYLLABLES) % TAIL_COUNT == 0 &&
        second > TAILS && second - TAILS < TAIL_COUNT)
        return first + (second - TAILS);
    const file_composed *all = (const file_composed *)t->sections[COMPOSED].data;
    size_t low = 0, high = count_of(t, COMPOSED, sizeof *all);
    uint64_t wanted = (uint64_t)first << 32 | second;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        uint64_t found = (uint64_t)all[middle].first << 32 | all[middle].second;
        if (found < wanted) low = middle + 1;
        else if (found > wanted) high = middle;
        else return all[middle].composed;
    }
    return 0;
}

bsm_status compose(const bsm_tokenizer *t, const bsm_buffer *in, bsm_buffer *out) {
    if (is_ascii(in)) {
        bsm_buffer_add(out, in->data, in->size);
        return BSM_OK;
    }
    bsm_buffer done = {0};
    size_t starter = SIZE_MAX; /* where the last one of class 0 is */
    uint32_t last_class = 0;   /* of what was kept after it */
    const uint8_t *end = in->data + in->size;
    for (const uint8_t *at = in->data; at < end && !done.failed;) {
        uint32_t code, class;
        at += read_char(at, end, &code);
        class = class_of(t, MAP_COMBINING, code);
        if (starter != SIZE_MAX) {
            uint32_t *base = (uint32_t *)(void *)(done.data + starter);
            int adjacent = starter + sizeof code == done.size;
            /* A mark is blocked by one of the same or a higher class before it. */
            uint32_t both = adjacent || last_class < class ? compose_pair(t, *base, code) : 0;
            if (both != 0) {
                *base = both;
                continue;
            }
        }
        if (class == 0) starter = done.size;
        last_class = class;
        bsm_buffer_add(&done, &code, sizeof code);
    }
    int failed = done.failed;
    const uint32_t *codes = (const uint32_t *)(const void *)done.data;
    for (size_t i = 0; !failed && i < done.size / sizeof *codes; i++) add_char(out, codes[i]);
    bsm_buffer_free(&done);
    return failed ? BSM_ERROR_MEMORY : BSM_OK;
}

/* -- the character map ------------------------------------------------------------------------ */

/* The first (shortest) key of the double array that `text` begins with; its value, or -1.
 * The array is Darts-clone's (https://github.com/s-yata/darts-clone). */
static int64_t first_key(const uint32_t *units, size_t count, const uint8_t *text, size_t size) {
    size_t at = 0;
    if (count == 0) return -1;
    uint32_t unit = units[0];
    for (size_t i = 0;; i++) {
        at ^= (size_t)(unit >> 10) << ((unit & 1u << 9) >> 6);
        if (i == size) return -1;
        at ^= text[i];
        if (text[i] == 0 || at >= count) return -1;
        unit = units[at];
        if ((unit & (1u << 31 | 0xFF)) != text[i]) return -1;
        if (unit >> 8 & 1) {
            size_t leaf = at ^ (size_t)(unit >> 10) << ((unit & 1u << 9) >> 6);
            return leaf < count ? (int64_t)(units[leaf] & 0x7FFFFFFF) : -1;
        }
    }
}

/* What a stretch of text becomes, by its first key; size SIZE_MAX: nothing. */
static span mapped(const bsm_tokenizer *t, const uint8_t *text, size_t size) {
    span map = t->sections[CHARSMAP], none = {NULL, SIZE_MAX};
    uint32_t trie_bytes;
    if (map.size < sizeof trie_bytes) return none;
    memcpy(&trie_bytes, map.data, sizeof trie_bytes);
    if (trie_bytes > map.size - sizeof trie_bytes) return none;
    int64_t at = first_key((const uint32_t *)(const void *)(map.data + sizeof trie_bytes),
                           trie_bytes / sizeof(uint32_t), text, size);
    const uint8_t *texts = map.data + sizeof trie_bytes + trie_bytes;
    size_t all = map.size - sizeof trie_bytes - trie_bytes;
    if (at < 0 || (size_t)at > all) return none;
    size_t end = (size_t)at;
    while (end < all && texts[end] != 0) end++;
    return (span){texts + at, end - (size_t)at};
}

static int hangul(uint32_t code, uint32_t *kind) {
    uint32_t syllable = code - SYLLABLES;
    if (code - 0x1100 < 0x60 || code - 0xA960 < 0x1D) *kind = 1;      /* leading consonant */
    else if (code - 0x1160 < 0x48 || code - 0xD7B0 < 0x17) *kind = 2; /* vowel */
    else if (code - 0x11A8 < 0x58 || code - 0xD7CB < 0x31) *kind = 3; /* trailing consonant */
    else if (syllable < SYLLABLE_COUNT) *kind = syllable % TAIL_COUNT == 0 ? 2 : 3;
    else return 0;
    return 1;
}

/* Whether two neighbours are one character to the reader (Unicode Standard Annex 29). Left out are
 * flags and joined pictures, which take 6 bytes or more, where it makes no difference to the map,
 * and what sticks to the character after it, which is no key of any. */
static int joined(const bsm_tokenizer *t, uint32_t left, uint32_t right) {
    uint32_t a = class_of(t, MAP_GRAPHEME, left), b = class_of(t, MAP_GRAPHEME, right), x, y;
    if (left == '\r' && right == '\n') return 1;
    if (a == GRAPHEME_CONTROL || b == GRAPHEME_CONTROL) return 0;
    if (b == GRAPHEME_EXTEND) return 1;
    if (!hangul(left, &x) || !hangul(right, &y)) return 0;
    int whole = right - SYLLABLES < SYLLABLE_COUNT; /* only a leading consonant goes before it */
    if (x == 1) return y != 3 || whole;
    return !whole && y != 1 && (y == 3 || x == 2);
}

/* Stretches of fewer bytes are looked up as a whole, as the `tokenizers` library does. */
enum { WHOLE_BYTES = 6 };

void map_characters(const bsm_tokenizer *t, const bsm_buffer *in, bsm_buffer *out) {
    const uint8_t *end = in->data + in->size;
    for (const uint8_t *at = in->data, *stop; at < end; at = stop) {
        uint32_t code, next;
        stop = at + read_char(at, end, &code);
        while (stop < end) {
            size_t length = read_char(stop, end, &next);
            if (!joined(t, code, next)) break;
            code = next;
            stop += length;
        }
        if (stop - at < WHOLE_BYTES) {
            span whole = mapped(t, at, (size_t)(stop - at));
            if (whole.size != SIZE_MAX) {
                bsm_buffer_add(out, whole.data, whole.size);
                continue;
            }
        }
        for (const uint8_t *c = at; c < stop;) {
            size_t length = read_char(c, stop, &code);
            span one = mapped(t, c, length);
            if (one.size != SIZE_MAX) bsm_buffer_add(out, one.data, one.size);
            else bsm_buffer_add(out, c, length);
            c += length;
        }
    }
}
