/* The standalone program of a compiled model: `run -p "What is the capital of France?"`. */
#define _POSIX_C_SOURCE 200809L

#include "runner.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

/* The ids of the prompt: the text itself, or the chat template around it. */
static bsm_status prompt_ids(const run_options *options, const bsm_tokenizer *tokenizer,
                             const bsm_buffer *text, bsm_ids *ids, bsm_error *error) {
    const char *user = text->size > 0 ? (const char *)text->data : "";
    if (options->raw) return bsm_tokenizer_encode(tokenizer, user, text->size, 1, ids, error);
    const char *system = options->system;
    size_t system_size = system == NULL ? 0 : strlen(system);
    if (system != NULL && bsm_utf8_valid(system, system_size) < system_size)
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "the system text is not UTF-8 text");
    if (bsm_text_is_blank(user, text->size))
        return bsm_fail(error, BSM_ERROR_ARGUMENT, "the prompt is empty");
    bsm_buffer chat = {0};
    bsm_status status = bsm_tokenizer_chat(tokenizer, system, system_size, user, text->size, &chat,
                                           error);
    if (status == BSM_OK)
        status = bsm_tokenizer_encode(tokenizer, (const char *)chat.data, chat.size, 0, ids, error);
    bsm_buffer_free(&chat);
    return status;
}

/* Numbers with a blank between them, or one JSON object. */
static int print_ids(const bsm_ids *ids, int json) {
    bsm_buffer out = {0};
    char number[64];
    snprintf(number, sizeof number, "{\"count\": %lld, \"token_ids\": [", (long long)ids->count);
    if (json) bsm_buffer_add_text(&out, number);
    for (int64_t i = 0; i < ids->count; i++) {
        if (i > 0) bsm_buffer_add_text(&out, json ? ", " : " ");
        snprintf(number, sizeof number, "%d", ids->data[i]);
        bsm_buffer_add_text(&out, number);
    }
    bsm_buffer_add_text(&out, json ? "]}\n" : "\n");
    int code = out.failed ? complain(EXIT_ERROR, "no memory") : write_output(out.data, out.size);
    bsm_buffer_free(&out);
    return code;
}

/* Open the model and answer. */
static int run_model(const run_options *options, const bsm_tokenizer *tokenizer,
                     const bsm_ids *prompt, const char *weights, double began) {
    int64_t context = bsm_describe()->context_length;
    if (prompt->count == 0)
        return complain(EXIT_USAGE, "the prompt has no tokens; give it some text");
    if (prompt->count > context)
        return complain(EXIT_ERROR,
                        "the prompt has %lld tokens, and the context holds %lld; shorten the "
                        "prompt, or compile the model with a larger --context if it allows one",
                        (long long)prompt->count, (long long)context);
    bsm_error error;
    bsm_model *model;
    bsm_options how = {.threads = options->threads};
    if (bsm_open(weights, &how, &model, &error) != BSM_OK) return report_error(&error);
    int code = answer(options, tokenizer, model, prompt, seconds_now() - began);
    bsm_close(model);
    return code;
}

static int run_prompt(const run_options *options, const char *program) {
    double began = seconds_now();
    bsm_buffer text = {0}, path = {0};
    bsm_ids ids = {0};
    bsm_error error;
    bsm_tokenizer *tokenizer = NULL;
    int code = read_prompt(options, &text);
    if (code == 0) code = model_path(options->folder, program, "tokenizer.bin", &path);
    if (code == 0 && bsm_tokenizer_open((const char *)path.data, bsm_runner_tokenizer,
                                        bsm_describe()->vocab_size, &tokenizer, &error) != BSM_OK)
        code = report_error(&error);
    if (code == 0 && prompt_ids(options, tokenizer, &text, &ids, &error) != BSM_OK)
        code = report_error(&error);
    if (code == 0) code = model_path(options->folder, program, "weights.bin", &path);
    if (code == 0)
        code = options->tokenize ? print_ids(&ids, options->json)
                                 : run_model(options, tokenizer, &ids, (const char *)path.data,
                                             began);
    bsm_tokenizer_close(tokenizer);
    bsm_ids_free(&ids);
    bsm_buffer_free(&text);
    bsm_buffer_free(&path);
    return code;
}

int main(int count, char **words) {
    int code = check_streams();
    if (code != 0) return code;
    signal(SIGPIPE, SIG_IGN); /* a closed output is an error of write() */
    run_options options;
    code = read_options(count, words, &options);
    if (code == 0 && (options.help || options.version)) {
        bsm_buffer text = {0};
        if (options.help) {
            print_help(&text);
        } else {
            bsm_buffer_add_text(&text, bsm_runner_version);
            bsm_buffer_add_text(&text, "\n");
        }
        code = write_output(text.data, text.size);
        bsm_buffer_free(&text);
    } else if (code == 0) {
        code = run_prompt(&options, count > 0 ? words[0] : "");
    }
    free_options(&options);
    return code;
}
