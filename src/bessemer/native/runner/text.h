/* The tokenizer file in memory, and what the files behind tokenizer.h share.
 *
 * The numbers of the format are those of bessemer/artifact/text/format.py; a change of either is a
 * new TOKENIZER_VERSION. Nothing that a file says is trusted: sizes of sections are checked when it
 * is opened, and every id, offset and state where it is used.
 */
#ifndef BESSEMER_TEXT_H
#define BESSEMER_TEXT_H

#include "tokenizer.h"

#include "../internal.h"

#define TOKENIZER_MAGIC "BSMTOKEN"

enum {
    TOKENIZER_VERSION = 2,
    MOST_STEPS = 16,  /* normalizer operations, and pre-tokenizer stages */
    NO_ID = -1
};

#define NONE 0xFFFFFFFFu /* an id in the file that is none */

/* Sections, in the order of the table. */
enum {
    INFO, TOKEN_ENDS, TOKENS, PIECE_ENDS, PIECES, FIRST_ENDS, FIRSTS, FLAGS, HASH, BYTE_IDS,
    MERGE_STARTS, MERGES, SCORES, ADDED_RAW, ADDED_NORMAL, STRINGS, SPECIALS, NORMALIZER, STAGES,
    AUTOMATA, AUTOMATON_DATA, CLASS_MAPS, CLASS_DATA, DECOMPOSED, COMPOSED, CODES, CHARSMAP, ENDS,
    PREFIX, SUFFIX, CHAT, SECTIONS
};

typedef struct {
    char magic[8];
    uint32_t version, sections;
    uint64_t file_bytes;
    uint32_t checksum; /* CRC-32 of everything from the table of sections on */
    uint32_t reserved;
} file_header;

typedef struct {
    uint64_t offset, bytes;
} file_section;

/* INFO */
enum { MODEL_BPE = 1, MODEL_UNIGRAM = 2 };
enum {
    BYTE_SYMBOLS = 1,   /* the model's symbols are bytes, not characters */
    BYTE_FALLBACK = 2,  /* BYTE_IDS are what unknown characters become */
    FUSE_UNKNOWN = 4,
    WHOLE_FIRST = 8     /* a piece that is a token is taken without merging */
};
typedef struct {
    uint32_t vocab_size, model, flags, unknown;
    int32_t bos;     /* NO_ID: none */
    int32_t add_bos; /* -1: as PREFIX says; 0: never; 1: always */
    uint32_t strip_offset, strip_bytes, strip_count; /* a character that text loses at its start */
    uint32_t longest_token; /* bytes */
    double unknown_score;
} file_info;

enum { TOKEN_KNOWN = 1, TOKEN_SPECIAL = 2 };

typedef struct {
    uint32_t right, rank, merged;
} file_merge;

enum { SINGLE_WORD = 1, STRIP_LEFT = 2, STRIP_RIGHT = 4 };
typedef struct {
    uint32_t id, flags, offset, bytes; /* of STRINGS */
} file_text;

enum {
    NORMAL_PREPEND = 1, NORMAL_REPLACE, NORMAL_REPLACE_PATTERN, NORMAL_STRIP, NORMAL_DECOMPOSE,
    NORMAL_COMPOSE, NORMAL_CHARSMAP
};
/* PREPEND: from. REPLACE: from, to. REPLACE_PATTERN: number is the automaton, to. STRIP: number, 1
 * left, 2 right. DECOMPOSE: number, 0 canonical, 1 compatible. */
typedef struct {
    uint32_t kind, number, from_offset, from_bytes, to_offset, to_bytes;
} file_normal;

enum { STAGE_SPLIT = 1, STAGE_BYTES = 2, STAGE_METASPACE = 3 };
enum { ISOLATED, REMOVED, CONTIGUOUS, MERGED_PREVIOUS, MERGED_NEXT };
enum { INVERTED = 1, OVER_BYTES = 2, PREFIX_SPACE = 4, PREFIX_FIRST = 8, SPLIT_MARKS = 16 };
/* SPLIT: number is the automaton. METASPACE: offset and bytes are the mark. */
typedef struct {
    uint32_t kind, flags, number, behavior, offset, bytes;
} file_stage;

/* transitions [states][classes + 1] of uint16 at offset in AUTOMATON_DATA; the last column is for
 * the end of the text; MATCH_BEFORE: a match ends before this character. State 0 is the end, state
 * 1 the start. byte_map: where the class of each byte is, for text of bytes; NONE: nowhere. */
enum { MATCH_BEFORE = 0x8000 };
typedef struct {
    uint32_t states, classes, offset, class_map, byte_map;
} file_automaton;

/* Two stages: uint16 [0x1100] says which block of 256 bytes a code point is in. */
enum { MAP_BLOCKS = 0x1100 };
typedef struct {
    uint32_t index_offset, blocks_offset, blocks;
} file_class_map;
/* The class maps before those of the automata; NONE blocks where the tokenizer needs none. */
enum { MAP_COMBINING, MAP_GRAPHEME, MAP_WORD };
enum { GRAPHEME_OTHER, GRAPHEME_EXTEND, GRAPHEME_CONTROL };

typedef struct {
    uint32_t code, canonical, canonical_count, compatible, compatible_count; /* of CODES */
} file_decomposed;
typedef struct {
    uint32_t first, second, composed;
} file_composed;

enum { CHAT_TEXT, CHAT_USER, CHAT_SYSTEM, CHAT_DATE };
enum { CHAT_TRIM = 1 };
/* What a form is for, by the system text: none, some text, an empty one, white space alone. */
enum { TOLD_NOTHING, TOLD_SOME, TOLD_EMPTY, TOLD_BLANK };
typedef struct {
    uint32_t told, kind, flags, offset, bytes;
} file_chat;

typedef struct {
    const uint8_t *data;
    size_t size;
} span;

struct bsm_tokenizer {
    const uint8_t *base;
    size_t size;
    int mapped;
    const file_info *info;
    span sections[SECTIONS];
};

/* Elements of a section. */
static inline size_t count_of(const bsm_tokenizer *t, int section, size_t element) {
    return t->sections[section].size / element;
}

/* A part of STRINGS; empty when it isn't inside. */
span text_part(const bsm_tokenizer *t, uint32_t offset, uint32_t bytes);
/* Entry `index` of a table of ends and its bytes; empty when it isn't inside. */
span text_entry(const bsm_tokenizer *t, int ends, int bytes, uint32_t index);

/* The length of the character at `text` and its code point; the text is valid UTF-8. */
static inline size_t read_char(const uint8_t *text, const uint8_t *end, uint32_t *code) {
    uint32_t c = text[0];
    size_t left = (size_t)(end - text);
    if (c < 0x80 || left < 2) {
        *code = c;
        return 1;
    }
    if (c < 0xE0) {
        *code = (c & 0x1F) << 6 | (text[1] & 0x3F);
        return 2;
    }
    if (c < 0xF0 || left < 4) {
        *code = (c & 0x0F) << 12 | (text[1] & 0x3Fu) << 6 | (left > 2 ? text[2] & 0x3F : 0);
        return left < 3 ? left : 3;
    }
    *code = (c & 0x07) << 18 | (text[1] & 0x3Fu) << 12 | (text[2] & 0x3Fu) << 6 | (text[3] & 0x3F);
    return 4;
}
/* How many of the bytes at `text` (at least 1) belong to a character as far as it is well formed,
 * and how many it needs; 0 when no character begins so. */
size_t well_formed(const uint8_t *text, size_t size, size_t *wanted);
void add_char(bsm_buffer *buffer, uint32_t code);
/* White_Space of Unicode. */
int is_space(uint32_t code);
/* Bytes of the characters of a kind at the start, and at the end. */
size_t leading_chars(const uint8_t *text, size_t size, int (*is)(uint32_t code));
size_t trailing_chars(const uint8_t *text, size_t size, int (*is)(uint32_t code));

/* The class of a code point in a class map; 0 where the map isn't there. */
uint32_t class_of(const bsm_tokenizer *t, uint32_t map, uint32_t code);

/* The end of the longest preferred match of an automaton at `text`, or `text` for none. */
const uint8_t *automaton_match(const bsm_tokenizer *t, uint32_t automaton, int over_bytes,
                               const uint8_t *text, const uint8_t *end);

/* The id of a token by its bytes, or NO_ID. hash: hash_bytes of them. */
#define HASH_START 0xCBF29CE484222325ull
static inline uint64_t hash_bytes(uint64_t hash, const uint8_t *data, size_t size) {
    for (size_t i = 0; i < size; i++) hash = (hash ^ data[i]) * 0x100000001B3ull; /* FNV-1a */
    return hash;
}
int32_t find_token(const bsm_tokenizer *t, uint64_t hash, const uint8_t *data, size_t size);

/* One call of bsm_tokenizer_encode: memory that its pieces share. */
typedef struct {
    uint32_t id;
    int32_t previous, next; /* symbols; -1: none */
    uint32_t size;          /* 0: merged into the one before */
} symbol;
typedef struct {
    uint32_t rank, position, merged;
} candidate;
typedef struct {
    double score;
    int64_t from; /* -1: no way ends here */
    int32_t id;
} lattice_node;
typedef struct {
    const bsm_tokenizer *tokenizer;
    bsm_ids *ids;
    bsm_error *error;
    symbol *symbols;
    candidate *heap;
    lattice_node *lattice;
    size_t symbol_room, heap_room, heap_size, lattice_room;
} encoding;

/* Append the ids of one piece. */
bsm_status encode_bpe(encoding *e, const uint8_t *text, size_t size);
bsm_status encode_unigram(encoding *e, const uint8_t *text, size_t size);
/* Run the stages of the pre-tokenizer from `stage` on. first: the piece begins the text. */
bsm_status split_text(encoding *e, uint32_t stage, const uint8_t *text, size_t size, int first);
/* Replace `text` by its normal form. */
bsm_status normalize_text(const bsm_tokenizer *t, bsm_buffer *text, bsm_error *error);
/* Canonical or compatible decomposition, and composition, of valid UTF-8. */
bsm_status decompose(const bsm_tokenizer *t, int compatible, const bsm_buffer *in, bsm_buffer *out);
bsm_status compose(const bsm_tokenizer *t, const bsm_buffer *in, bsm_buffer *out);
/* SentencePiece's character map. */
void map_characters(const bsm_tokenizer *t, const bsm_buffer *in, bsm_buffer *out);

bsm_status no_memory(bsm_error *error);

#endif
