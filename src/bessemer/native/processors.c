/* How many processors this process may use: its affinity, and the quota of its control groups. */
#define _GNU_SOURCE
#include "internal.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CGROUP_ROOT "/sys/fs/cgroup"
/* Longer paths of control groups than this are cut by the kernel's own limits. */
#define PATH_ROOM 4096

static int64_t affinity(void) {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count > 0 ? count : 1;
}

#ifdef __linux__

/* The first line of a file, without its end; 0 where there is none. */
static int read_line(const char *path, char *line, size_t room) {
    FILE *file = fopen(path, "re");
    if (file == NULL) return 0;
    int found = fgets(line, (int)room, file) != NULL;
    fclose(file);
    if (found) line[strcspn(line, "\n")] = '\0';
    return found;
}

/* The numbers that a file begins with; 0 where there are fewer ("max" is none). */
static int read_numbers(const char *folder, const char *name, double *values, int count) {
    char path[PATH_ROOM + 64], line[64];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return 0;
    if (!read_line(path, line, sizeof line)) return 0;
    char *at = line, *end;
    for (int i = 0; i < count; i++, at = end) {
        values[i] = strtod(at, &end);
        if (end == at) return 0;
    }
    return 1;
}

/* Processors' worth of time that the group in `folder` allows; a negative number: no limit. */
static double folder_quota(const char *folder, int version) {
    double quota[2];
    int found = version == 1 ? read_numbers(folder, "cpu.cfs_quota_us", quota, 1) &&
                                   read_numbers(folder, "cpu.cfs_period_us", quota + 1, 1)
                             : read_numbers(folder, "cpu.max", quota, 2);
    return found && quota[0] > 0 && quota[1] > 0 ? quota[0] / quota[1] : -1;
}

static void take_smaller(double *least, double quota) {
    if (quota > 0 && (*least < 0 || quota < *least)) *least = quota;
}

/* The group's folder and its parents up to the mount point. In a container the path may be the
 * host's, which is not mounted: its folders don't exist, and the mount point itself counts. */
static void walk_upwards(const char *mount, const char *group, int version, double *least) {
    char folder[PATH_ROOM];
    size_t bottom = strlen(mount);
    if (snprintf(folder, sizeof folder, "%s%s", mount, group) >= (int)sizeof folder) return;
    for (;;) {
        if (strstr(folder, "/..") == NULL) take_smaller(least, folder_quota(folder, version));
        char *slash = strrchr(folder, '/');
        if (slash == NULL || (size_t)(slash - folder) < bottom) return;
        *slash = '\0';
    }
}

static int lists_cpu(const char *controllers) {
    const char *at = controllers;
    while (*at != '\0') {
        size_t length = strcspn(at, ",");
        if (length == 3 && memcmp(at, "cpu", 3) == 0) return 1;
        at += length + (at[length] == ',');
    }
    return 0;
}

/* The tightest quota of the groups of this process (versions 1 and 2); negative: no limit. */
static double quota(void) {
    char line[PATH_ROOM], mount[PATH_ROOM];
    double least = -1;
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (file == NULL) return -1;
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        if (controllers == NULL) continue;
        char *group = strchr(++controllers, ':');
        if (group == NULL) continue;
        *group++ = '\0';
        if (*controllers == '\0') {
            walk_upwards(CGROUP_ROOT, group, 2, &least);
        } else if (lists_cpu(controllers)) {
            const char *const mounts[] = {controllers, "cpu,cpuacct", "cpu"};
            for (size_t i = 0; i < sizeof mounts / sizeof *mounts; i++)
                if (snprintf(mount, sizeof mount, CGROUP_ROOT "/%s", mounts[i]) < (int)sizeof mount)
                    walk_upwards(mount, group, 1, &least);
        }
    }
    fclose(file);
    return least;
}

#else

static double quota(void) { return -1; }

#endif

int64_t bsm_usable_processors(void) {
    int64_t count = affinity();
    double limit = quota();
    if (limit > 0 && limit < (double)count) count = (int64_t)limit;
    return count < 1 ? 1 : count;
}
