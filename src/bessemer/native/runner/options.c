/* The command line of the standalone program. */
#include "runner.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_MAX_TOKENS = 512, SEED_DIGITS = 1000 };

static const char HELP[] =
    "usage: run [-p TEXT | -f FILE] [options]\n"
    "\n"
    "Answer one prompt with the model beside this program. The prompt comes from -p, from a\n"
    "file, or from standard input. The answer goes to standard output, the rest to standard\n"
    "error. Exit codes: 0 success, 1 an error, 2 a wrong call, 130 interrupted.\n"
    "\n"
    "  -p, --prompt TEXT      the prompt\n"
    "  -f, --file FILE        read the prompt from a file; - is standard input\n"
    "  --system TEXT          what the model is told before the prompt\n"
    "  --raw                  continue the text as it is, without the chat template\n"
    "  --max-tokens N         the most tokens of the answer (512)\n"
    "  --temperature X        0 takes the most likely token (0)\n"
    "  --top-k N              sample among the k likeliest; 0: all (0)\n"
    "  --top-p X              sample among the likeliest of this mass (1)\n"
    "  --min-p X              leave out what is less likely than this share of the likeliest (0)\n"
    "  --repeat-penalty X     above 1: repeat less (1)\n"
    "  --seed N               makes sampling repeatable\n"
    "  --stop TEXT            end the answer before this text; may be repeated\n"
    "  --threads N            threads; the cores that this process may use by default\n"
    "  --json                 print one JSON object\n"
    "  --tokenize             print the ids of the prompt's tokens, and end; with --json, too\n"
    "  --model DIR            the folder of weights.bin and tokenizer.bin, if it is another one\n"
    "  --version              print the version of Bessemer that made this program\n"
    "  -h, --help             this text\n";

void print_help(bsm_buffer *out) { bsm_buffer_add_text(out, HELP); }

static int read_number(const char *name, const char *text, double *value) {
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    if (*text == '\0' || *end != '\0' || *text == ' ')
        return complain(EXIT_USAGE, "%s %s: it must be a number", name, text);
    return 0;
}

/* A whole number from `least` to `most`. */
static int read_whole(const char *name, const char *text, int64_t least, int64_t most,
                      int64_t *value) {
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10); /* the nearest one where it doesn't fit */
    if (*text == '\0' || *end != '\0' || *text == ' ' || number < least)
        return complain(EXIT_USAGE, "%s %s: it must be a whole number of at least %lld", name, text,
                        (long long)least);
    if (number > most || errno == ERANGE)
        return complain(EXIT_USAGE, "%s %s: it must be at most %lld", name, text, (long long)most);
    *value = number;
    return 0;
}

/* A seed is a whole number of any size: decimal digits become words of 32 bits. */
static int read_seed(const char *text, run_options *options) {
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || text[digits] != '\0' || digits > SEED_DIGITS)
        return complain(EXIT_USAGE, "--seed %.40s: it must be a whole number of at least 0, of at "
                        "most %d digits", text, SEED_DIGITS);
    size_t room = digits / 9 + 1, count = 1; /* a word holds 9 digits */
    uint32_t *words = calloc(room, sizeof *words);
    if (words == NULL) return complain(EXIT_ERROR, "no memory");
    for (size_t i = 0; i < digits; i++) {
        uint64_t carry = (uint64_t)(text[i] - '0');
        for (size_t w = 0; w < count; w++) {
            carry += (uint64_t)words[w] * 10;
            words[w] = (uint32_t)carry;
            carry >>= 32;
        }
        if (carry > 0) words[count++] = (uint32_t)carry;
    }
    free(options->seed_words);
    options->seed_words = words;
    options->sampling.seed_words = words;
    options->sampling.seed_count = (int64_t)count;
    return 0;
}

static int add_stop(const char *text, run_options *options) {
    if (*text == '\0')
        return complain(EXIT_USAGE, "a stop string is empty; it would end every text at once");
    const char **grown =
        realloc((void *)options->stops, (options->stop_count + 1) * sizeof *grown);
    if (grown == NULL) return complain(EXIT_ERROR, "no memory");
    options->stops = grown;
    options->stops[options->stop_count++] = text;
    return 0;
}

/* An option without a value; whether `name` is one. */
static int read_flag(const char *name, run_options *options) {
    int *flag = !strcmp(name, "--raw")                               ? &options->raw
                : !strcmp(name, "--json")                            ? &options->json
                : !strcmp(name, "--tokenize")                        ? &options->tokenize
                : !strcmp(name, "--version")                         ? &options->version
                : !strcmp(name, "--help") || !strcmp(name, "-h")     ? &options->help
                                                                     : NULL;
    if (flag != NULL) *flag = 1;
    return flag != NULL;
}

/* Where the text of an option goes, or NULL. */
static const char **text_option(const char *name, run_options *options) {
    if (!strcmp(name, "-p") || !strcmp(name, "--prompt")) return &options->prompt;
    if (!strcmp(name, "-f") || !strcmp(name, "--file")) return &options->file;
    if (!strcmp(name, "--system")) return &options->system;
    if (!strcmp(name, "--model")) return &options->folder;
    return NULL;
}

static double *number_option(const char *name, bsm_sampling *sampling) {
    if (!strcmp(name, "--temperature")) return &sampling->temperature;
    if (!strcmp(name, "--top-p")) return &sampling->top_p;
    if (!strcmp(name, "--min-p")) return &sampling->min_p;
    if (!strcmp(name, "--repeat-penalty")) return &sampling->repeat_penalty;
    return NULL;
}

static int is_value_option(const char *name, run_options *options) {
    static const char *const others[] = {"--max-tokens", "--top-k", "--threads", "--seed",
                                         "--stop"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(name, others[i])) return 1;
    return text_option(name, options) || number_option(name, &options->sampling);
}

static int read_value(const char *name, const char *value, run_options *options) {
    const char **text = text_option(name, options);
    double *number = number_option(name, &options->sampling);
    if (text != NULL) {
        *text = value;
        int is_name = text == &options->file || text == &options->folder;
        return is_name && *value == '\0' ? complain(EXIT_USAGE, "the name after %s is empty", name)
                                         : 0;
    }
    if (number != NULL) return read_number(name, value, number);
    if (!strcmp(name, "--max-tokens"))
        return read_whole(name, value, 0, INT64_MAX, &options->max_tokens);
    if (!strcmp(name, "--top-k"))
        return read_whole(name, value, -1, INT64_MAX, &options->sampling.top_k);
    if (!strcmp(name, "--threads"))
        return read_whole(name, value, 1, BSM_MOST_THREADS, &options->threads);
    if (!strcmp(name, "--seed")) return read_seed(value, options);
    return add_stop(value, options);
}

/* A word of the form --name=value; 1 when it was one, and *code is what came of it. */
static int read_joined(char *word, run_options *options, int *code) {
    char *equals = strncmp(word, "--", 2) == 0 ? strchr(word, '=') : NULL;
    if (equals == NULL) return 0;
    *equals = '\0';
    int known = is_value_option(word, options);
    if (known) *code = read_value(word, equals + 1, options);
    *equals = '=';
    return known;
}

/* A word that is no option. */
static int refuse(char *word, run_options *options) {
    if (*word != '-')
        return complain(EXIT_USAGE, "'%s' stands alone: the prompt comes after -p (see --help)",
                        word);
    char *equals = strchr(word, '=');
    if (equals != NULL) {
        *equals = '\0';
        if (read_flag(word, options)) return complain(EXIT_USAGE, "%s takes no value", word);
        *equals = '=';
    }
    return complain(EXIT_USAGE, "unknown option %s (see --help)", word);
}

int read_options(int count, char **words, run_options *options) {
    static const bsm_sampling greedy = BSM_SAMPLING_GREEDY;
    *options = (run_options){.max_tokens = DEFAULT_MAX_TOKENS, .sampling = greedy};
    for (int i = 1; i < count; i++) {
        int code = 0;
        if (read_flag(words[i], options)) continue;
        if (read_joined(words[i], options, &code)) {
            if (code != 0) return code;
            continue;
        }
        if (!is_value_option(words[i], options)) return refuse(words[i], options);
        if (i + 1 == count) return complain(EXIT_USAGE, "%s needs a value (see --help)", words[i]);
        code = read_value(words[i], words[i + 1], options);
        if (code != 0) return code;
        i++;
    }
    if (options->prompt != NULL && options->file != NULL)
        return complain(EXIT_USAGE, "give either -p TEXT or -f FILE");
    if (options->raw && options->system != NULL)
        return complain(EXIT_USAGE, "--system needs the chat template; leave out --raw");
    return 0;
}

void free_options(run_options *options) {
    free(options->seed_words);
    free((void *)options->stops);
}
