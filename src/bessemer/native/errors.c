/* Words for statuses. */
#include "internal.h"

#include <stdio.h>

bsm_status bsm_fail(bsm_error *error, bsm_status status, const char *format, ...) {
    if (error == NULL) return status;
    error->status = status;
    va_list values;
    va_start(values, format);
    int written = vsnprintf(error->message, sizeof error->message, format, values);
    va_end(values);
    if (written < 0) error->message[0] = '\0';
    if (written >= (int)sizeof error->message) {
        /* Cut before a character, not within it: its later bytes are 10xxxxxx. */
        size_t end = sizeof error->message - 1;
        while (end > 0 && ((unsigned char)error->message[end - 1] & 0xC0) == 0x80) end--;
        if (end > 0 && (unsigned char)error->message[end - 1] >= 0xC0) end--;
        error->message[end] = '\0';
    }
    return status;
}

const char *bsm_status_text(bsm_status status) {
    switch (status) {
    case BSM_OK: return "ok";
    case BSM_CANCELLED: return "cancelled";
    case BSM_ERROR_ARGUMENT: return "wrong argument";
    case BSM_ERROR_CONTEXT: return "the tokens don't fit the context";
    case BSM_ERROR_MEMORY: return "out of memory";
    case BSM_ERROR_FILE: return "a file can't be read or written";
    case BSM_ERROR_WEIGHTS: return "wrong or damaged weight file";
    case BSM_ERROR_CPU: return "this processor can't run the code";
    case BSM_ERROR_BUSY: return "the session is in use";
    case BSM_ERROR_NUMERIC: return "the model's numbers broke down";
    case BSM_ERROR_HEADER: return "the header belongs to another model";
    case BSM_ERROR_TOKENIZER: return "wrong or damaged tokenizer file";
    case BSM_ERROR_SESSION: return "wrong or damaged session file";
    default: return "unknown status";
    }
}
