/* What this processor can do, by the names of Linux's /proc/cpuinfo.
 *
 * A feature counts if the processor has it and the system saves its registers. A name that is not
 * in the table is missing: code that needs more than is known here must not be run.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <string.h>

#if defined(__x86_64__)

#include <cpuid.h>

/* Words that cpuid returns, in the order of `read_words`. */
enum { L1_ECX, L7_EBX, L7_ECX, L7_EDX, L7_1_EAX, L7_1_EDX, EXT_ECX, WORDS };
/* Registers that the system must save: none beyond the baseline's, those of AVX, of AVX-512. */
enum { SSE, YMM, ZMM };
/* Bits of the control register XCR0. */
#define XCR0_YMM 0x6u
#define XCR0_ZMM 0xe6u
#define OSXSAVE (1u << 27)

typedef struct feature {
    const char *name;
    int word, bit, registers;
} feature;

static const feature FEATURES[] = {
    {"pni", L1_ECX, 0, SSE},
    {"ssse3", L1_ECX, 9, SSE},
    {"fma", L1_ECX, 12, YMM},
    {"sse4_1", L1_ECX, 19, SSE},
    {"sse4_2", L1_ECX, 20, SSE},
    {"movbe", L1_ECX, 22, SSE},
    {"popcnt", L1_ECX, 23, SSE},
    {"avx", L1_ECX, 28, YMM},
    {"f16c", L1_ECX, 29, YMM},
    {"bmi1", L7_EBX, 3, SSE},
    {"avx2", L7_EBX, 5, YMM},
    {"bmi2", L7_EBX, 8, SSE},
    {"avx512f", L7_EBX, 16, ZMM},
    {"avx512dq", L7_EBX, 17, ZMM},
    {"avx512ifma", L7_EBX, 21, ZMM},
    {"avx512cd", L7_EBX, 28, ZMM},
    {"avx512bw", L7_EBX, 30, ZMM},
    {"avx512vl", L7_EBX, 31, ZMM},
    {"avx512vbmi", L7_ECX, 1, ZMM},
    {"avx512_vbmi2", L7_ECX, 6, ZMM},
    {"gfni", L7_ECX, 8, SSE},
    {"avx512_vnni", L7_ECX, 11, ZMM},
    {"avx512_bitalg", L7_ECX, 12, ZMM},
    {"avx512_vpopcntdq", L7_ECX, 14, ZMM},
    {"avx512_fp16", L7_EDX, 23, ZMM},
    {"avx_vnni", L7_1_EAX, 4, YMM},
    {"avx512_bf16", L7_1_EAX, 5, ZMM},
    {"avx_ifma", L7_1_EAX, 23, YMM},
    {"avx_vnni_int8", L7_1_EDX, 4, YMM},
    {"avx_ne_convert", L7_1_EDX, 5, YMM},
    {"abm", EXT_ECX, 5, SSE},
    {"sse4a", EXT_ECX, 6, SSE},
    {"xop", EXT_ECX, 11, YMM},
    {"fma4", EXT_ECX, 16, YMM},
    {"tbm", EXT_ECX, 21, SSE},
};

static void read_words(uint32_t words[WORDS]) {
    uint32_t a, b, c, d;
    memset(words, 0, WORDS * sizeof *words);
    if (__get_cpuid(1, &a, &b, &c, &d)) words[L1_ECX] = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        uint32_t subleaves = a;
        words[L7_EBX] = b, words[L7_ECX] = c, words[L7_EDX] = d;
        if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d))
            words[L7_1_EAX] = a, words[L7_1_EDX] = d;
    }
    if (__get_cpuid(0x80000001u, &a, &b, &c, &d)) words[EXT_ECX] = c;
}

/* Which registers the system saves. */
static int saved_registers(uint32_t leaf1_ecx) {
    if (!(leaf1_ecx & OSXSAVE)) return SSE;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & XCR0_ZMM) == XCR0_ZMM) return ZMM;
#ifdef __APPLE__
    /* macOS saves the registers of AVX-512 from their first use on. */
    if ((low & XCR0_YMM) == XCR0_YMM) return ZMM;
#endif
    return (low & XCR0_YMM) == XCR0_YMM ? YMM : SSE;
}

static int has(const char *name) {
    uint32_t words[WORDS];
    read_words(words);
    for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++) {
        const feature *f = &FEATURES[i];
        if (strcmp(f->name, name) == 0)
            return (words[f->word] >> f->bit & 1u) &&
                   f->registers <= saved_registers(words[L1_ECX]);
    }
    return 0;
}

#elif defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

typedef struct feature {
    const char *name;
    unsigned long which;
    int bit;
} feature;

#ifndef AT_HWCAP2
#define AT_HWCAP2 26
#endif

static const feature FEATURES[] = {
    {"fp", AT_HWCAP, 0},        {"asimd", AT_HWCAP, 1},    {"atomics", AT_HWCAP, 8},
    {"asimdhp", AT_HWCAP, 10},  {"asimdrdm", AT_HWCAP, 12}, {"jscvt", AT_HWCAP, 13},
    {"fcma", AT_HWCAP, 14},     {"lrcpc", AT_HWCAP, 15},   {"asimddp", AT_HWCAP, 20},
    {"sve", AT_HWCAP, 22},      {"asimdfhm", AT_HWCAP, 23}, {"sve2", AT_HWCAP2, 1},
    {"i8mm", AT_HWCAP2, 13},    {"bf16", AT_HWCAP2, 14},
};

static int has(const char *name) {
    for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++)
        if (strcmp(FEATURES[i].name, name) == 0)
            return (int)(getauxval(FEATURES[i].which) >> FEATURES[i].bit & 1u);
    return 0;
}

#elif defined(__aarch64__) && defined(__APPLE__)

#include <stdio.h>
#include <sys/sysctl.h>

/* Apple names the extensions of the architecture. */
static const char *const FEATURES[][2] = {
    {"atomics", "LSE"}, {"asimdrdm", "RDM"}, {"asimddp", "DotProd"}, {"asimdhp", "FP16"},
    {"asimdfhm", "FHM"}, {"lrcpc", "LRCPC"}, {"jscvt", "JSCVT"},     {"fcma", "FCMA"},
    {"bf16", "BF16"},   {"i8mm", "I8MM"},
};

static int has(const char *name) {
    if (strcmp(name, "fp") == 0 || strcmp(name, "asimd") == 0) return 1;
    for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++) {
        if (strcmp(FEATURES[i][0], name) != 0) continue;
        char key[64];
        int value = 0;
        size_t size = sizeof value;
        snprintf(key, sizeof key, "hw.optional.arm.FEAT_%s", FEATURES[i][1]);
        return sysctlbyname(key, &value, &size, NULL, 0) == 0 && value;
    }
    return 0;
}

#elif defined(__riscv) && defined(__linux__)

#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

/* riscv_hwprobe (Linux 6.4): the key whose value has a bit for each extension. */
#define HWPROBE_SYSCALL 258
#define HWPROBE_EXTENSIONS 4

static const struct {
    const char *name;
    int bit;
} FEATURES[] = {{"zba", 3},   {"zbb", 4},      {"zbs", 5},
                {"zfh", 27},  {"zfhmin", 28},  {"zvfh", 30}, {"zvfhmin", 31}};

static int has(const char *name) {
    /* Single letters are in the auxiliary vector, the others are asked for. */
    if (name[0] >= 'a' && name[0] <= 'z' && name[1] == '\0')
        return (int)(getauxval(AT_HWCAP) >> (name[0] - 'a') & 1u);
    struct {
        int64_t key;
        uint64_t value;
    } pair = {HWPROBE_EXTENSIONS, 0};
    if (syscall(HWPROBE_SYSCALL, &pair, (size_t)1, (size_t)0, NULL, 0u) != 0 || pair.key < 0)
        return 0;
    for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++)
        if (strcmp(FEATURES[i].name, name) == 0) return (int)(pair.value >> FEATURES[i].bit & 1u);
    return 0;
}

#else

static int has(const char *name) {
    (void)name;
    return 0;
}

#endif

const char *bsm_missing_feature(const char *const *features) {
    for (; *features != NULL; features++)
        if (!has(*features)) return *features;
    return NULL;
}
