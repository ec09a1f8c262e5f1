/* The token loop, as bessemer.runtime.generate: a prompt goes into a session, text comes out. */
#define _POSIX_C_SOURCE 200809L

#include "runner.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The session that an interrupt cancels. */
static bsm_session *volatile interrupted_session;
static volatile sig_atomic_t interrupted;

static void interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
    if (interrupted_session != NULL) bsm_cancel(interrupted_session);
}

typedef struct {
    const run_options *options;
    const bsm_tokenizer *tokenizer;
    bsm_session *session;
    bsm_sampler *sampler;
    int64_t prompt_tokens, capacity;
    bsm_stream stream;
    bsm_stops stops;
    int32_t *stop_ids; /* special tokens whose text is a stop string */
    size_t stop_id_count;
    bsm_ids tokens;
    bsm_buffer piece, shown, text; /* text: all of it, for --json */
    double prefill_seconds, decode_seconds, first_seconds, load_seconds;
    const char *reason;
    int code; /* of an output that can't be written */
} run;

/* -- preparing -------------------------------------------------------------------------------- */

static bsm_status make_sampler(run *r, bsm_error *error) {
    const bsm_tokenizer *t = r->tokenizer;
    bsm_sampling sampling = r->options->sampling;
    int64_t size = bsm_tokenizer_size(t), missing = 0;
    for (int64_t id = 0; id < size; id++) missing += !bsm_tokenizer_knows(t, (int32_t)id);
    int32_t *banned = malloc((size_t)(missing + 1) * sizeof *banned);
    if (banned == NULL) return bsm_fail(error, BSM_ERROR_MEMORY, "no memory for the sampler");
    for (int64_t id = 0; id < size; id++)
        if (!bsm_tokenizer_knows(t, (int32_t)id)) banned[sampling.banned_count++] = (int32_t)id;
    sampling.banned = banned;
    bsm_status status = bsm_sampler_create(&sampling, size, &r->sampler, error);
    free(banned);
    return status;
}

static bsm_status make_stops(run *r, bsm_error *error) {
    const run_options *o = r->options;
    r->stop_ids = malloc((o->stop_count + 1) * sizeof *r->stop_ids);
    int made = r->stop_ids != NULL;
    for (size_t i = 0; made && i < o->stop_count; i++) {
        size_t size = strlen(o->stops[i]);
        if (bsm_utf8_valid(o->stops[i], size) < size)
            return bsm_fail(error, BSM_ERROR_ARGUMENT, "a stop string is not UTF-8 text");
        int32_t id = bsm_tokenizer_special_id(r->tokenizer, o->stops[i], size);
        if (id >= 0) r->stop_ids[r->stop_id_count++] = id;
        made = bsm_stops_add(&r->stops, o->stops[i], size);
    }
    return made ? BSM_OK : bsm_fail(error, BSM_ERROR_MEMORY, "no memory for the stop strings");
}

/* -- the loop --------------------------------------------------------------------------------- */

/* Show what the stop strings let through. */
static void emit(run *r) {
    if (r->piece.failed || r->shown.failed || r->text.failed)
        r->code = complain(EXIT_ERROR, "no memory for the answer");
    else if (r->options->json)
        bsm_buffer_add(&r->text, r->shown.data, r->shown.size);
    else
        r->code = write_output(r->shown.data, r->shown.size);
    r->shown.size = 0;
}

static int is_end(const run *r, int32_t id) {
    for (size_t i = 0; i < r->stop_id_count; i++)
        if (r->stop_ids[i] == id) return 1;
    return bsm_tokenizer_is_end(r->tokenizer, id);
}

/* Show the text that a token completes; the reason when it is the last one. */
static const char *show(run *r, int32_t id) {
    if (is_end(r, id)) return "stop";
    r->piece.size = 0;
    bsm_stream_push(&r->stream, id, &r->piece);
    int stopped = bsm_stops_push(&r->stops, r->piece.data, r->piece.size, &r->shown);
    emit(r);
    if (stopped) return "stop";
    int enough = r->tokens.count >= r->options->max_tokens;
    return enough || bsm_position(r->session) >= r->capacity ? "length" : NULL;
}

/* Show what was held back. */
static void finish(run *r) {
    r->piece.size = 0;
    bsm_stream_finish(&r->stream, &r->piece);
    int stopped = bsm_stops_push(&r->stops, r->piece.data, r->piece.size, &r->shown);
    if (stopped && strcmp(r->reason, "length") == 0) r->reason = "stop";
    if (!stopped) bsm_stops_flush(&r->stops, &r->shown);
    if (r->code == 0) emit(r);
}

static bsm_status generate(run *r, const bsm_ids *prompt, bsm_error *error) {
    double began = seconds_now(), step = began;
    bsm_status status = bsm_prefill(r->session, prompt->data, prompt->count, error);
    /* Of a prompt that went in by half no speed is known. */
    if (status == BSM_OK) r->prefill_seconds = seconds_now() - began;
    if (status == BSM_OK && r->options->max_tokens == 0) r->reason = "length";
    while (status == BSM_OK && r->reason == NULL) {
        int32_t id;
        status = interrupted ? BSM_CANCELLED : bsm_sample(r->session, r->sampler, &id, error);
        if (status != BSM_OK) break;
        bsm_ids_add(&r->tokens, id);
        if (r->tokens.failed) return bsm_fail(error, BSM_ERROR_MEMORY, "no memory");
        r->reason = show(r, id);
        double now = seconds_now();
        if (r->tokens.count == 1) r->first_seconds = now - began;
        else r->decode_seconds += now - step;
        if (r->code != 0) return BSM_OK;
        step = now;
        if (r->reason == NULL) status = bsm_decode(r->session, id, error);
    }
    if (status == BSM_CANCELLED) {
        r->reason = "cancelled";
        status = BSM_OK;
    }
    if (status == BSM_OK) finish(r);
    return status;
}

/* -- what came of it -------------------------------------------------------------------------- */

static double rate(int64_t count, double seconds) {
    return count > 0 && seconds > 0 ? (double)count / seconds : 0;
}

static void print_statistics(const run *r) {
    fprintf(stderr, "run: %lld prompt tokens", (long long)r->prompt_tokens);
    if (r->prefill_seconds > 0)
        fprintf(stderr, " at %.1f/s", rate(r->prompt_tokens, r->prefill_seconds));
    fprintf(stderr, ", %lld tokens", (long long)r->tokens.count);
    if (r->decode_seconds > 0)
        fprintf(stderr, " at %.1f/s", rate(r->tokens.count - 1, r->decode_seconds));
    if (r->tokens.count > 0) fprintf(stderr, ", first after %.2f s", r->first_seconds);
    fprintf(stderr, " (%s)\n", r->reason);
}

static void add_json_text(bsm_buffer *out, const bsm_buffer *text) {
    bsm_buffer_add_text(out, "\"");
    for (size_t i = 0; i < text->size; i++) {
        char escaped[8];
        uint8_t c = text->data[i];
        if (c == '"' || c == '\\') snprintf(escaped, sizeof escaped, "\\%c", c);
        else if (c < 0x20) snprintf(escaped, sizeof escaped, "\\u%04x", c);
        else snprintf(escaped, sizeof escaped, "%c", c);
        bsm_buffer_add_text(out, escaped);
    }
    bsm_buffer_add_text(out, "\"");
}

static int print_json(const run *r) {
    bsm_buffer out = {0};
    char numbers[512];
    bsm_buffer_add_text(&out, "{\"text\": ");
    add_json_text(&out, &r->text);
    bsm_buffer_add_text(&out, ", \"token_ids\": [");
    for (int64_t i = 0; i < r->tokens.count; i++) {
        snprintf(numbers, sizeof numbers, i == 0 ? "%d" : ", %d", r->tokens.data[i]);
        bsm_buffer_add_text(&out, numbers);
    }
    snprintf(numbers, sizeof numbers,
             "], \"tokens\": %lld, \"prompt_tokens\": %lld, \"finish_reason\": \"%s\", "
             "\"prefill_tokens_per_second\": %.2f, \"decode_tokens_per_second\": %.2f, "
             "\"time_to_first_token_s\": ",
             (long long)r->tokens.count, (long long)r->prompt_tokens, r->reason,
             rate(r->prompt_tokens, r->prefill_seconds),
             rate(r->tokens.count - 1, r->decode_seconds));
    bsm_buffer_add_text(&out, numbers);
    if (r->tokens.count > 0) snprintf(numbers, sizeof numbers, "%.4f", r->first_seconds);
    else snprintf(numbers, sizeof numbers, "null");
    bsm_buffer_add_text(&out, numbers);
    snprintf(numbers, sizeof numbers, ", \"load_s\": %.4f}\n", r->load_seconds);
    bsm_buffer_add_text(&out, numbers);
    int code = out.failed ? complain(EXIT_ERROR, "no memory for the answer")
                          : write_output(out.data, out.size);
    bsm_buffer_free(&out);
    return code;
}

static int conclude(run *r) {
    if (r->code != 0) return r->code;
    if (r->options->json) {
        r->code = print_json(r);
    } else {
        r->code = write_output("\n", 1);
        if (r->code == 0) print_statistics(r);
    }
    if (r->code != 0) return r->code;
    return strcmp(r->reason, "cancelled") == 0 ? EXIT_INTERRUPTED : EXIT_OK;
}

static void listen_for_interrupts(bsm_session *session) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = interrupt;
    /* The second one ends the program, whatever it waits for. */
    action.sa_flags = (int)(SA_RESTART | SA_RESETHAND);
    sigemptyset(&action.sa_mask);
    interrupted_session = session;
    sigaction(SIGINT, &action, NULL);
}

int answer(const run_options *options, const bsm_tokenizer *tokenizer, bsm_model *model,
           const bsm_ids *prompt, double load_seconds) {
    run r = {.options = options, .tokenizer = tokenizer, .prompt_tokens = prompt->count,
             .capacity = bsm_describe()->context_length, .load_seconds = load_seconds,
             .stream = {.tokenizer = tokenizer}};
    bsm_error error;
    bsm_status status = make_stops(&r, &error);
    if (status == BSM_OK) status = make_sampler(&r, &error);
    if (status == BSM_OK) status = bsm_session_create(model, &r.session, &error);
    if (status == BSM_OK) {
        listen_for_interrupts(r.session);
        status = generate(&r, prompt, &error);
        interrupted_session = NULL;
    }
    int code = status == BSM_OK ? conclude(&r) : report_error(&error);
    bsm_session_destroy(r.session);
    bsm_sampler_destroy(r.sampler);
    bsm_stops_free(&r.stops);
    free(r.stop_ids);
    bsm_ids_free(&r.tokens);
    bsm_buffer_free(&r.piece);
    bsm_buffer_free(&r.shown);
    bsm_buffer_free(&r.text);
    return code;
}
