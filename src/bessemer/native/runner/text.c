/* Growing memory, UTF-8, white space. */
#include "text.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_ROOM = 64 };

bsm_status no_memory(bsm_error *error) {
    return bsm_fail(error, BSM_ERROR_MEMORY, "no memory for the text");
}

void bsm_buffer_add(bsm_buffer *buffer, const void *data, size_t size) {
    if (buffer->failed || size == 0) return;
    if (size > buffer->room - buffer->size) {
        size_t room = buffer->room < FIRST_ROOM ? FIRST_ROOM : buffer->room;
        while (size > room - buffer->size && room <= SIZE_MAX / 2) room *= 2;
        uint8_t *grown = size > room - buffer->size ? NULL : realloc(buffer->data, room);
        if (grown == NULL) {
            buffer->failed = 1;
            return;
        }
        buffer->data = grown;
        buffer->room = room;
    }
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
}

void bsm_buffer_add_text(bsm_buffer *buffer, const char *text) {
    bsm_buffer_add(buffer, text, strlen(text));
}

void bsm_buffer_free(bsm_buffer *buffer) {
    free(buffer->data);
    *buffer = (bsm_buffer){0};
}

void bsm_ids_add(bsm_ids *ids, int32_t id) {
    if (ids->failed) return;
    if (ids->count == ids->room) {
        int64_t room = ids->room < FIRST_ROOM ? FIRST_ROOM : ids->room * 2;
        int32_t *grown = realloc(ids->data, (size_t)room * sizeof *grown);
        if (grown == NULL) {
            ids->failed = 1;
            return;
        }
        ids->data = grown;
        ids->room = room;
    }
    ids->data[ids->count++] = id;
}

void bsm_ids_free(bsm_ids *ids) {
    free(ids->data);
    *ids = (bsm_ids){0};
}

void add_char(bsm_buffer *buffer, uint32_t code) {
    uint8_t c[4];
    size_t size = 1;
    if (code < 0x80) {
        c[0] = (uint8_t)code;
    } else if (code < 0x800) {
        c[0] = (uint8_t)(0xC0 | code >> 6);
        c[1] = (uint8_t)(0x80 | (code & 0x3F));
        size = 2;
    } else if (code < 0x10000) {
        c[0] = (uint8_t)(0xE0 | code >> 12);
        c[1] = (uint8_t)(0x80 | (code >> 6 & 0x3F));
        c[2] = (uint8_t)(0x80 | (code & 0x3F));
        size = 3;
    } else {
        c[0] = (uint8_t)(0xF0 | (code >> 18 & 7));
        c[1] = (uint8_t)(0x80 | (code >> 12 & 0x3F));
        c[2] = (uint8_t)(0x80 | (code >> 6 & 0x3F));
        c[3] = (uint8_t)(0x80 | (code & 0x3F));
        size = 4;
    }
    bsm_buffer_add(buffer, c, size);
}

/* Bytes of the character that begins with `c`, and what its second byte may be (The Unicode
 * Standard, table 3-7); 0 when no character begins so. */
static size_t lead(uint8_t c, uint8_t *low, uint8_t *high) {
    *low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    *high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    return c < 0x80 ? 1 : c < 0xC2 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : c < 0xF5 ? 4 : 0;
}

size_t well_formed(const uint8_t *text, size_t size, size_t *wanted) {
    uint8_t low, high;
    *wanted = lead(text[0], &low, &high);
    if (*wanted == 0) return 0;
    size_t have = 1;
    while (have < *wanted && have < size && text[have] >= low && text[have] <= high) {
        have++;
        low = 0x80;
        high = 0xBF;
    }
    return have;
}

size_t bsm_utf8_valid(const char *text, size_t size) {
    const uint8_t *bytes = (const uint8_t *)text;
    size_t at = 0, wanted;
    while (at < size) {
        size_t have = well_formed(bytes + at, size - at, &wanted);
        if (have == 0 || have < wanted) return at;
        at += have;
    }
    return size;
}

int is_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

size_t leading_chars(const uint8_t *text, size_t size, int (*is)(uint32_t code)) {
    size_t at = 0;
    while (at < size) {
        uint32_t code;
        size_t length = read_char(text + at, text + size, &code);
        if (!is(code)) break;
        at += length;
    }
    return at;
}

size_t trailing_chars(const uint8_t *text, size_t size, int (*is)(uint32_t code)) {
    size_t end = size;
    while (end > 0) {
        size_t at = end - 1;
        while (at > 0 && (text[at] & 0xC0) == 0x80) at--;
        uint32_t code;
        read_char(text + at, text + end, &code);
        if (!is(code)) break;
        end = at;
    }
    return size - end;
}
