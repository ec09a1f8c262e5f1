/* Memory that compiled code works on: page-aligned, zero at first. */
#define _DEFAULT_SOURCE
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif

void *bsm_allocate(int64_t bytes, int32_t huge) {
    if (bytes < 1) bytes = 1;
    if ((uint64_t)bytes > SIZE_MAX) return NULL;
    void *address =
        mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
    /* A kernel without huge pages refuses, and small pages do. */
    if (huge) (void)madvise(address, (size_t)bytes, MADV_HUGEPAGE);
#else
    (void)huge;
#endif
    return address;
}

void bsm_release(void *address, int64_t bytes) {
    if (address != NULL) munmap(address, (size_t)(bytes < 1 ? 1 : bytes));
}

int32_t bsm_huge_pages_offered(void) {
    char text[128] = "";
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    if (file == NULL) return 0;
    size_t count = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[count] = '\0';
    return strstr(text, "[madvise]") != NULL || strstr(text, "[always]") != NULL;
}

int64_t bsm_available_memory(void) {
    static const char key[] = "MemAvailable:";
    char line[256];
    int64_t bytes = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    if (file == NULL) return 0;
    while (bytes == 0 && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, key, sizeof key - 1) == 0)
            bytes = (int64_t)strtoll(line + sizeof key - 1, NULL, 10) * 1024;
    fclose(file);
    return bytes;
}
