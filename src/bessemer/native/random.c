/* NumPy's default random generator: PCG64 (O'Neill 2014, "PCG: A family of simple fast
 * space-efficient statistically good algorithms for random number generation", XSL-RR 128/64),
 * seeded through SeedSequence (https://numpy.org/doc/stable/reference/random/bit_generators/). */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include "random.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

typedef unsigned __int128 u128;

enum { POOL_WORDS = 4, STATE_WORDS = 8, SHIFT = 16 };

/* SeedSequence's constants. */
static const uint32_t INIT_A = 0x43b0d7e5u, MULT_A = 0x931e8875u;
static const uint32_t INIT_B = 0x8b51f9ddu, MULT_B = 0x58f38dedu;
static const uint32_t MIX_L = 0xca01f9ddu, MIX_R = 0x4973f715u;

static u128 join(uint64_t high, uint64_t low) { return (u128)high << 64 | low; }

static void step(bsm_random *random) {
    u128 multiplier = join(2549297995355413924ull, 4865540595714422341ull);
    u128 state = join(random->state[1], random->state[0]);
    u128 increment = join(random->increment[1], random->increment[0]);
    state = state * multiplier + increment;
    random->state[0] = (uint64_t)state;
    random->state[1] = (uint64_t)(state >> 64);
}

static uint32_t hash_word(uint32_t value, uint32_t *constant, uint32_t multiplier) {
    value ^= *constant;
    *constant *= multiplier;
    value *= *constant;
    return value ^ value >> SHIFT;
}

static uint32_t mix(uint32_t x, uint32_t y) {
    uint32_t result = MIX_L * x - MIX_R * y;
    return result ^ result >> SHIFT;
}

void bsm_random_seed(bsm_random *random, const uint32_t *words, int64_t count) {
    while (count > 1 && words[count - 1] == 0) count--; /* a whole number has no leading zeros */
    uint32_t pool[POOL_WORDS], constant = INIT_A;
    for (int i = 0; i < POOL_WORDS; i++)
        pool[i] = hash_word(i < count ? words[i] : 0, &constant, MULT_A);
    for (int from = 0; from < POOL_WORDS; from++)
        for (int to = 0; to < POOL_WORDS; to++)
            if (from != to) pool[to] = mix(pool[to], hash_word(pool[from], &constant, MULT_A));
    for (int64_t from = POOL_WORDS; from < count; from++)
        for (int to = 0; to < POOL_WORDS; to++)
            pool[to] = mix(pool[to], hash_word(words[from], &constant, MULT_A));

    uint64_t out[STATE_WORDS / 2] = {0};
    constant = INIT_B;
    for (int i = 0; i < STATE_WORDS; i++) {
        uint64_t word = hash_word(pool[i % POOL_WORDS], &constant, MULT_B);
        out[i / 2] |= word << 32 * (i % 2);
    }
    u128 start = join(out[0], out[1]);
    u128 increment = join(out[2], out[3]) << 1 | 1;
    random->increment[0] = (uint64_t)increment;
    random->increment[1] = (uint64_t)(increment >> 64);
    random->state[0] = random->state[1] = 0;
    step(random);
    u128 state = join(random->state[1], random->state[0]) + start;
    random->state[0] = (uint64_t)state;
    random->state[1] = (uint64_t)(state >> 64);
    step(random);
}

double bsm_random_uniform(bsm_random *random) {
    step(random);
    uint64_t mixed = random->state[1] ^ random->state[0];
    unsigned turn = (unsigned)(random->state[1] >> 58);
    uint64_t value = mixed >> turn | mixed << (-turn & 63);
    return (double)(value >> 11) * (1.0 / 9007199254740992.0); /* 53 bits */
}

int bsm_random_entropy(uint32_t *words, int64_t count) {
    int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    size_t wanted = (size_t)count * sizeof *words, got = 0;
    while (got < wanted) {
        ssize_t n = read(file, (char *)words + got, wanted - got);
        if (n > 0) got += (size_t)n;
        else if (n == 0 || errno != EINTR) break;
    }
    close(file);
    return got == wanted;
}
