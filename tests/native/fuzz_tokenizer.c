/* Tokenizer files with wrong bytes: whatever a file says, opening it is refused, or using it gives
 * ids below its vocabulary's size or an error. Run under AddressSanitizer and UBSan.
 *
 * usage: fuzz_tokenizer FILE ROUNDS SEED
 */
#include "runner/token_file.c" /* for its checksum */

#include <stdio.h>

static uint64_t state;

static uint64_t next_random(void) { /* xorshift64* */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 2685821657736338717ull;
}

static uint64_t below(uint64_t n) { return next_random() % n; }

static uint8_t *read_whole(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) exit(3);
    *size = (size_t)ftell(file);
    rewind(file);
    uint8_t *data = malloc(*size);
    if (data == NULL || fread(data, 1, *size, file) != *size) exit(3);
    fclose(file);
    return data;
}

/* Change a few bytes or words, mostly where the structure is. */
static void mutate(uint8_t *data, size_t size) {
    static const uint32_t odd[] = {0, 1, 2, 7, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000,
                                   0x7FFFFFFF, 0x80000000u, 0xFFFFFFFEu, 0xFFFFFFFFu};
    size_t head = sizeof(file_header) + SECTIONS * sizeof(file_section);
    for (uint64_t changes = 1 + below(6); changes > 0; changes--) {
        size_t from = sizeof(file_header), room = head - from;
        if (below(8) > 0) { /* a section, each as likely as another */
            file_section section;
            memcpy(&section, data + sizeof(file_header) + below(SECTIONS) * sizeof section,
                   sizeof section);
            if (section.bytes == 0 || section.offset > size ||
                section.bytes > size - section.offset)
                continue;
            from = (size_t)section.offset;
            room = (size_t)section.bytes;
        }
        size_t at = from + (size_t)below(room);
        if (below(2)) {
            data[at] = (uint8_t)next_random();
        } else {
            at &= ~(size_t)3;
            uint32_t word = odd[below(sizeof odd / sizeof *odd)];
            if (at + sizeof word <= size) memcpy(data + at, &word, sizeof word);
        }
    }
}

static const char *const TEXTS[] = {
    "Hello, world! 123 you're\r\n\tend  ",
    "\xE4\xBD\xA0\xE5\xA5\xBD e\xCC\x81\xCC\xA3 \xF0\x9F\x98\x80",
    "<s> </s><|im_start|>user <unk>", "        \xEA\xB0\x80\xE1\x86\xA8 \xEF\xAC\x81 \xE2\x96\x81x",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};

static void use(const bsm_tokenizer *t, size_t *encoded) {
    bsm_error error;
    for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; i++) {
        bsm_ids ids = {0};
        bsm_buffer text = {0};
        bsm_stream stream = {.tokenizer = t};
        if (bsm_tokenizer_encode(t, TEXTS[i], strlen(TEXTS[i]), i % 2 == 0, &ids, &error) == BSM_OK)
            ++*encoded;
        for (int64_t k = 0; k < ids.count && ids.count < 10000; k++)
            bsm_stream_push(&stream, ids.data[k], &text);
        bsm_stream_finish(&stream, &text);
        bsm_ids_free(&ids);
        bsm_buffer_free(&text);
    }
    bsm_buffer prompt = {0};
    bsm_tokenizer_chat(t, NULL, 0, "hi", 2, &prompt, &error);
    bsm_tokenizer_chat(t, "be", 2, " hi ", 4, &prompt, &error);
    bsm_tokenizer_chat(t, "", 0, "hi", 2, &prompt, &error);
    bsm_tokenizer_chat(t, " ", 1, "hi", 2, &prompt, &error);
    bsm_buffer_free(&prompt);
    for (int32_t id = -2; id < 400; id++) {
        bsm_buffer text = {0};
        bsm_stream stream = {.tokenizer = t};
        bsm_stream_push(&stream, id, &text);
        bsm_tokenizer_is_end(t, id);
        bsm_buffer_free(&text);
    }
    bsm_tokenizer_special_id(t, "</s>", 4);
}

int main(int count, char **words) {
    if (count != 4) return 2;
    size_t size, opened = 0, encoded = 0;
    uint8_t *original = read_whole(words[1], &size);
    state = strtoull(words[3], NULL, 10);
    for (long round = strtol(words[2], NULL, 10); round > 0; round--) {
        size_t used = below(12) == 0 ? (size_t)below(size) : size; /* sometimes cut off */
        uint8_t *copy = malloc(used + 1); /* of its own, so that reading beyond it is seen */
        if (copy == NULL) return 3;
        memcpy(copy, original, used);
        if (used == size) mutate(copy, size);
        file_header *header = (file_header *)(void *)copy;
        if (used >= sizeof *header && below(10) > 0) {
            header->file_bytes = used;
            header->checksum = checksum(copy + sizeof *header, used - sizeof *header);
        }
        bsm_tokenizer *tokenizer;
        bsm_error error;
        if (bsm_tokenizer_view(copy, used, "file", 0, 0, &tokenizer, &error) == BSM_OK) {
            opened++;
            use(tokenizer, &encoded);
            bsm_tokenizer_close(tokenizer);
        }
        free(copy);
    }
    free(original);
    printf("%zu opened, %zu texts encoded\n", opened, encoded);
    return 0;
}
