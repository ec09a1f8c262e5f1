/* The parts of the standalone program: options, input, output, the answer. */
#ifndef BESSEMER_RUNNER_H
#define BESSEMER_RUNNER_H

#include "tokenizer.h"

#include "../internal.h"
#include "../sampler.h"

/* Exit codes, as those of `bessemer run`. */
enum {
    EXIT_OK = 0,
    EXIT_ERROR = 1,
    EXIT_USAGE = 2,
    EXIT_INTERRUPTED = 130, /* 128 + SIGINT */
    EXIT_BROKEN_PIPE = 141  /* 128 + SIGPIPE */
};

/* What tells the model's tokenizer.bin from others; generated with the program. */
extern const uint32_t bsm_runner_tokenizer;
/* The Bessemer that made the program; generated with it, too. */
extern const char bsm_runner_version[];

typedef struct run_options {
    const char *prompt, *file, *system, *folder;
    int raw, json, tokenize, help, version;
    int64_t max_tokens, threads;
    bsm_sampling sampling;
    uint32_t *seed_words;
    const char **stops;
    size_t stop_count;
} run_options;

/* Words on standard error; returns the code. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
int complain(int code, const char *format, ...);
/* The exit code of an error of the library, with its words on standard error. */
int report_error(const bsm_error *error);

/* Read the command line; 0, or the code to end with. */
int read_options(int count, char **words, run_options *options);
void free_options(run_options *options);
void print_help(bsm_buffer *out);

/* The prompt's text, from -p, -f or standard input; 0, or the code to end with. */
int read_prompt(const run_options *options, bsm_buffer *text);

/* Write everything; 0, or the code to end with (EXIT_BROKEN_PIPE: silently). */
int write_output(const void *data, size_t size);
/* Standard input, output and error are open, or the program must not open files; as above. */
int check_streams(void);

/* The path of a file in the folder of the model: `folder`, or the one that the program is in. */
int model_path(const char *folder, const char *program, const char *name, bsm_buffer *path);

/* Answer the prompt, whose ids these are; the code to end with. */
int answer(const run_options *options, const bsm_tokenizer *tokenizer, bsm_model *model,
           const bsm_ids *prompt, double load_seconds);

double seconds_now(void);

#endif
