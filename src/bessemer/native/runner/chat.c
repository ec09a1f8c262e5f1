/* The prompt for one question: pieces of the model's chat template, made when it was compiled. */
#include "text.h"

#include <time.h>

enum { DATE_BYTES = 256 };

/* str.strip() of Python: white space, and the separators of information U+001C to U+001F. */
static int is_stripped(uint32_t code) { return is_space(code) || (code >= 0x1C && code <= 0x1F); }

int bsm_text_is_blank(const char *text, size_t size) {
    return leading_chars((const uint8_t *)text, size, is_stripped) == size;
}

static void add_trimmed(bsm_buffer *out, const uint8_t *text, size_t size) {
    size_t begin = leading_chars(text, size, is_stripped);
    size_t end = size - trailing_chars(text + begin, size - begin, is_stripped);
    bsm_buffer_add(out, text + begin, end - begin);
}

/* The present time in a format of strftime. */
static void add_date(bsm_buffer *out, span format) {
    char pattern[DATE_BYTES], text[DATE_BYTES];
    if (format.size >= sizeof pattern) return;
    for (size_t i = 0; i < format.size; i++) pattern[i] = (char)format.data[i];
    pattern[format.size] = '\0';
    time_t now = time(NULL);
    const struct tm *local = localtime(&now);
    if (local != NULL) bsm_buffer_add(out, text, strftime(text, sizeof text, pattern, local));
}

static uint32_t kind_of(const char *system, size_t size) {
    if (system == NULL) return TOLD_NOTHING;
    if (size == 0) return TOLD_EMPTY;
    return bsm_text_is_blank(system, size) ? TOLD_BLANK : TOLD_SOME;
}

static int has_form(const bsm_tokenizer *t, uint32_t told) {
    const file_chat *parts = (const file_chat *)t->sections[CHAT].data;
    for (size_t i = 0; i < count_of(t, CHAT, sizeof *parts); i++)
        if (parts[i].told == told) return 1;
    return 0;
}

/* Why there is no form for a system text. */
static const char *no_form(const bsm_tokenizer *t, uint32_t told) {
    if (told == TOLD_NOTHING) return "needs a system text (--system)";
    if (told != TOLD_SOME && has_form(t, TOLD_SOME))
        return "takes no empty system text here; leave out --system, or pass --raw";
    return "takes no system text here; leave out --system, or pass --raw";
}

bsm_status bsm_tokenizer_chat(const bsm_tokenizer *t, const char *system, size_t system_size,
                              const char *user, size_t user_size, bsm_buffer *prompt,
                              bsm_error *error) {
    const file_chat *parts = (const file_chat *)t->sections[CHAT].data;
    uint32_t told = kind_of(system, system_size);
    if (!has_form(t, TOLD_NOTHING) && !has_form(t, TOLD_SOME))
        return bsm_fail(error, BSM_ERROR_ARGUMENT,
                        "the model has no chat template that this program can apply; pass --raw to "
                        "send the text as it is");
    if (!has_form(t, told))
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "the model's chat template %s",
                        no_form(t, told));
    for (size_t i = 0; i < count_of(t, CHAT, sizeof *parts); i++) {
        const file_chat *part = parts + i;
        if (part->told != told) continue;
        span text = text_part(t, part->offset, part->bytes);
        if (part->kind == CHAT_USER) text = (span){(const uint8_t *)user, user_size};
        if (part->kind == CHAT_SYSTEM && system != NULL)
            text = (span){(const uint8_t *)system, system_size};
        if (part->kind == CHAT_DATE) add_date(prompt, text);
        else if (part->flags & CHAT_TRIM) add_trimmed(prompt, text.data, text.size);
        else bsm_buffer_add(prompt, text.data, text.size);
    }
    return prompt->failed ? no_memory(error) : BSM_OK;
}
