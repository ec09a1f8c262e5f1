/* NumPy's PCG64 generator with its seeding; internal. */
#ifndef BESSEMER_RANDOM_H
#define BESSEMER_RANDOM_H

#include <stdint.h>

typedef struct bsm_random {
    uint64_t state[2], increment[2]; /* 128-bit numbers, low half first */
} bsm_random;

/* As numpy.random.PCG64(seed); words: [count, at least 1] the seed, lowest 32 bits first. */
void bsm_random_seed(bsm_random *random, const uint32_t *words, int64_t count);

/* As numpy.random.Generator.random(): uniform in [0, 1). */
double bsm_random_uniform(bsm_random *random);

/* Fill words [count] from the system's entropy; 0 when there is none. */
int bsm_random_entropy(uint32_t *words, int64_t count);

#endif
