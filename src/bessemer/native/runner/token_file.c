/* The tokenizer file: mapped, checked, and looked up. */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64

#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* -- CRC-32, eight bytes at a time ------------------------------------------------------------ */

enum { SLICES = 8, CRC_TABLE = 256 };

static uint32_t checksum(const uint8_t *data, size_t size) {
    uint32_t table[SLICES][CRC_TABLE];
    for (uint32_t i = 0; i < CRC_TABLE; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (c & 1 ? 0xEDB88320u : 0);
        table[0][i] = c;
    }
    for (int s = 1; s < SLICES; s++)
        for (uint32_t i = 0; i < CRC_TABLE; i++)
            table[s][i] = table[s - 1][i] >> 8 ^ table[0][table[s - 1][i] & 0xFF];
    uint32_t crc = 0xFFFFFFFFu;
    for (; size >= SLICES; data += SLICES, size -= SLICES) {
        uint32_t low, high;
        memcpy(&low, data, 4);
        memcpy(&high, data + 4, 4);
        low ^= crc;
        crc = table[7][low & 0xFF] ^ table[6][low >> 8 & 0xFF] ^ table[5][low >> 16 & 0xFF] ^
              table[4][low >> 24] ^ table[3][high & 0xFF] ^ table[2][high >> 8 & 0xFF] ^
              table[1][high >> 16 & 0xFF] ^ table[0][high >> 24];
    }
    for (; size > 0; data++, size--) crc = crc >> 8 ^ table[0][(crc ^ *data) & 0xFF];
    return ~crc;
}

/* -- opening ---------------------------------------------------------------------------------- */

static bsm_status damaged(bsm_error *error, const char *name, const char *what) {
    return bsm_fail(error, BSM_ERROR_TOKENIZER,
                    "%s is damaged (%s): compile the model again with --runner", name, what);
}

/* Sections whose size follows from the vocabulary's. */
static int sizes_fit(const bsm_tokenizer *t) {
    size_t vocab = t->info->vocab_size;
    const span *s = t->sections;
    size_t ends = (vocab + 1) * sizeof(uint32_t);
    size_t hash = s[HASH].size / sizeof(uint32_t);
    int ok = vocab > 0 && s[TOKEN_ENDS].size == ends && s[FLAGS].size == vocab;
    ok &= s[PIECE_ENDS].size == 0 || s[PIECE_ENDS].size == ends;
    ok &= s[FIRST_ENDS].size == 0 || s[FIRST_ENDS].size == ends;
    ok &= hash > 0 && (hash & (hash - 1)) == 0 && s[HASH].size % sizeof(uint32_t) == 0;
    ok &= s[BYTE_IDS].size == 0 || s[BYTE_IDS].size == 256 * sizeof(uint32_t);
    if (t->info->flags & (BYTE_SYMBOLS | BYTE_FALLBACK)) ok &= s[BYTE_IDS].size > 0;
    if (t->info->model == MODEL_BPE)
        ok &= s[MERGE_STARTS].size == ends;
    else
        ok &= t->info->model == MODEL_UNIGRAM && s[SCORES].size == vocab * sizeof(double);
    ok &= count_of(t, NORMALIZER, sizeof(file_normal)) <= MOST_STEPS;
    ok &= count_of(t, STAGES, sizeof(file_stage)) <= MOST_STEPS;
    return ok;
}

static bsm_status check_file(bsm_tokenizer *t, const char *name, uint32_t identity,
                             int64_t vocab_size, bsm_error *error) {
    const file_header *header = (const file_header *)t->base;
    if (t->size < sizeof *header || memcmp(header->magic, TOKENIZER_MAGIC, 8) != 0)
        return bsm_fail(error, BSM_ERROR_TOKENIZER, "%s is no tokenizer file", name);
    if (header->version != TOKENIZER_VERSION || header->sections != SECTIONS)
        return bsm_fail(error, BSM_ERROR_TOKENIZER,
                        "%s has format version %u, and this program reads version %d: compile the "
                        "model again with --runner", name, header->version, TOKENIZER_VERSION);
    size_t table = sizeof *header + SECTIONS * sizeof(file_section);
    if (t->size != header->file_bytes || t->size < table)
        return bsm_fail(error, BSM_ERROR_TOKENIZER,
                        "%s has %zu bytes instead of %llu: it is cut off; compile the model again "
                        "with --runner", name, t->size, (unsigned long long)header->file_bytes);
    if (identity != 0 && header->checksum != identity)
        return bsm_fail(error, BSM_ERROR_TOKENIZER,
                        "%s belongs to another model (it is %08x, and this program was made with "
                        "%08x)", name, header->checksum, identity);
    if (checksum(t->base + sizeof *header, t->size - sizeof *header) != header->checksum)
        return damaged(error, name, "its checksum is wrong");
    const file_section *sections = (const file_section *)(header + 1);
    for (int i = 0; i < SECTIONS; i++) {
        uint64_t offset = sections[i].offset, bytes = sections[i].bytes;
        if (bytes > 0 && (offset % 8 != 0 || offset < table || offset > t->size ||
                          bytes > t->size - offset))
            return damaged(error, name, "a section lies outside");
        t->sections[i].data = bytes > 0 ? t->base + offset : t->base;
        t->sections[i].size = (size_t)bytes;
    }
    t->info = (const file_info *)t->sections[INFO].data;
    if (t->sections[INFO].size != sizeof *t->info || !sizes_fit(t))
        return damaged(error, name, "sizes don't fit");
    if (vocab_size > 0 && (int64_t)t->info->vocab_size > vocab_size)
        return bsm_fail(error, BSM_ERROR_TOKENIZER,
                        "%s has %u tokens, and the model %lld: it belongs to another model", name,
                        t->info->vocab_size, (long long)vocab_size);
    return BSM_OK;
}

bsm_status bsm_tokenizer_view(const void *data, size_t size, const char *name, uint32_t identity,
                              int64_t vocab_size, bsm_tokenizer **tokenizer, bsm_error *error) {
    *tokenizer = NULL;
    bsm_tokenizer *t = calloc(1, sizeof *t);
    if (t == NULL) return no_memory(error);
    t->base = data;
    t->size = size;
    bsm_status status = check_file(t, name, identity, vocab_size, error);
    if (status == BSM_OK) *tokenizer = t;
    else free(t);
    return status;
}

bsm_status bsm_tokenizer_open(const char *path, uint32_t identity, int64_t vocab_size,
                              bsm_tokenizer **tokenizer, bsm_error *error) {
    *tokenizer = NULL;
    /* A pipe in its place must not be waited for. */
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat found;
    if (file < 0 || fstat(file, &found) != 0) {
        bsm_status status = bsm_fail(error, BSM_ERROR_FILE, "%s can't be read: %s", path,
                                     strerror(errno));
        if (file >= 0) close(file);
        return status;
    }
    if (!S_ISREG(found.st_mode) || found.st_size < (off_t)sizeof(file_header)) {
        close(file);
        return bsm_fail(error, BSM_ERROR_TOKENIZER, "%s is no tokenizer file", path);
    }
    size_t size = (size_t)found.st_size;
    void *data = mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0);
    int problem = errno;
    close(file);
    if (data == MAP_FAILED)
        return bsm_fail(error, BSM_ERROR_MEMORY, "%s can't be mapped: %s", path,
                        strerror(problem));
    bsm_status status =
        bsm_tokenizer_view(data, size, path, identity, vocab_size, tokenizer, error);
    if (status == BSM_OK) (*tokenizer)->mapped = 1;
    else munmap(data, size);
    return status;
}

void bsm_tokenizer_close(bsm_tokenizer *tokenizer) {
    if (tokenizer == NULL) return;
    if (tokenizer->mapped) munmap((void *)tokenizer->base, tokenizer->size);
    free(tokenizer);
}

/* -- looking up ------------------------------------------------------------------------------- */

span text_part(const bsm_tokenizer *t, uint32_t offset, uint32_t bytes) {
    span strings = t->sections[STRINGS];
    if (offset > strings.size || bytes > strings.size - offset) return (span){t->base, 0};
    return (span){strings.data + offset, bytes};
}

span text_entry(const bsm_tokenizer *t, int ends, int bytes, uint32_t index) {
    const uint32_t *table = (const uint32_t *)t->sections[ends].data;
    span all = t->sections[bytes];
    uint32_t from = table[index], to = table[index + 1];
    if (from > to || to > all.size) return (span){t->base, 0};
    return (span){all.data + from, to - from};
}

int32_t find_token(const bsm_tokenizer *t, uint64_t hash, const uint8_t *data, size_t size) {
    const uint32_t *table = (const uint32_t *)t->sections[HASH].data;
    size_t slots = count_of(t, HASH, sizeof *table);
    size_t at = (size_t)(hash ^ hash >> 32) & (slots - 1);
    for (size_t tries = 0; tries < slots; tries++, at = (at + 1) & (slots - 1)) {
        uint32_t id = table[at];
        if (id >= t->info->vocab_size) return NO_ID;
        span token = text_entry(t, TOKEN_ENDS, TOKENS, id);
        if (token.size == size && memcmp(token.data, data, size) == 0) return (int32_t)id;
    }
    return NO_ID;
}

uint32_t class_of(const bsm_tokenizer *t, uint32_t map, uint32_t code) {
    if (map >= count_of(t, CLASS_MAPS, sizeof(file_class_map))) return 0;
    const file_class_map *m = (const file_class_map *)t->sections[CLASS_MAPS].data + map;
    span data = t->sections[CLASS_DATA];
    size_t index_bytes = MAP_BLOCKS * sizeof(uint16_t), block_bytes = (size_t)m->blocks * 256;
    if (m->blocks == 0 || m->index_offset % 2 != 0 || m->index_offset > data.size ||
        index_bytes > data.size - m->index_offset || m->blocks_offset > data.size ||
        block_bytes > data.size - m->blocks_offset || code > 0x10FFFF)
        return 0;
    const uint16_t *index = (const uint16_t *)(data.data + m->index_offset);
    uint32_t block = index[code >> 8];
    return block < m->blocks ? data.data[m->blocks_offset + block * 256 + (code & 0xFF)] : 0;
}

int64_t bsm_tokenizer_size(const bsm_tokenizer *t) { return t->info->vocab_size; }

static int flags_of(const bsm_tokenizer *t, int32_t id) {
    return id >= 0 && (uint32_t)id < t->info->vocab_size ? t->sections[FLAGS].data[id] : 0;
}

int bsm_tokenizer_knows(const bsm_tokenizer *t, int32_t id) {
    return flags_of(t, id) & TOKEN_KNOWN;
}

int bsm_tokenizer_is_special(const bsm_tokenizer *t, int32_t id) {
    return (flags_of(t, id) & TOKEN_SPECIAL) != 0;
}

int bsm_tokenizer_is_end(const bsm_tokenizer *t, int32_t id) {
    const int32_t *ends = (const int32_t *)t->sections[ENDS].data;
    for (size_t i = 0; i < count_of(t, ENDS, sizeof *ends); i++)
        if (ends[i] == id) return 1;
    return 0;
}

int32_t bsm_tokenizer_special_id(const bsm_tokenizer *t, const char *text, size_t size) {
    const file_text *names = (const file_text *)t->sections[SPECIALS].data;
    for (size_t i = 0; i < count_of(t, SPECIALS, sizeof *names); i++) {
        span name = text_part(t, names[i].offset, names[i].bytes);
        if (name.size == size && memcmp(name.data, text, size) == 0)
            return names[i].id < t->info->vocab_size ? (int32_t)names[i].id : NO_ID;
    }
    return NO_ID;
}
