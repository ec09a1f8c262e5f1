/* Where the time of a profiled model goes. Only code compiled with profiling calls this.
 *
 * Each worker has a table of its own, so nothing is shared and nothing is atomic:
 *   [0]                 time of the last mark, nanoseconds of a monotonic clock
 *   [1 + 2s], [2 + 2s]  slot s: nanoseconds that were charged to it, and how often
 */
#define _POSIX_C_SOURCE 199309L
#include <stdint.h>
#include <time.h>

void bsm_profile_mark(int64_t *table, int64_t slot);

/* Charge the time since the last mark to `slot`. */
void bsm_profile_mark(int64_t *table, int64_t slot) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t at = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    table[1 + 2 * slot] += at - table[0];
    table[2 + 2 * slot] += 1;
    table[0] = at;
}
