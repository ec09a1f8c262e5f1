/* Stop strings in a text that arrives in pieces (Knuth, Morris and Pratt 1977). The stop string
 * that is complete first ends the text; where several are at once, the longest. */
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>

int bsm_stops_add(bsm_stops *stops, const char *text, size_t size) {
    bsm_stop *grown = realloc(stops->stops, (stops->count + 1) * sizeof *grown);
    if (grown == NULL) return 0;
    stops->stops = grown;
    size_t *failures = calloc(size, sizeof *failures);
    if (failures == NULL) return 0;
    for (size_t i = 1, length = 0; i < size; i++) {
        while (length > 0 && text[i] != text[length]) length = failures[length - 1];
        if (text[i] == text[length]) length++;
        failures[i] = length;
    }
    grown[stops->count++] = (bsm_stop){text, size, failures, 0};
    return 1;
}

/* Feed one byte; the length of the longest stop that it completes, or 0. */
static size_t advance(bsm_stops *stops, uint8_t byte) {
    size_t longest = 0;
    for (size_t i = 0; i < stops->count; i++) {
        bsm_stop *s = stops->stops + i;
        while (s->matched > 0 && (uint8_t)s->text[s->matched] != byte)
            s->matched = s->failures[s->matched - 1];
        if ((uint8_t)s->text[s->matched] == byte) s->matched++;
        if (s->matched < s->size) continue;
        if (s->size > longest) longest = s->size;
    }
    return longest;
}

int bsm_stops_push(bsm_stops *stops, const void *text, size_t size, bsm_buffer *shown) {
    if (stops->stopped) return 1;
    if (stops->count == 0) {
        bsm_buffer_add(shown, text, size);
        return 0;
    }
    size_t start = stops->held.size, keep = 0;
    bsm_buffer_add(&stops->held, text, size);
    if (stops->held.failed) {
        shown->failed = 1;
        return 0;
    }
    for (size_t i = start; i < stops->held.size; i++) {
        size_t found = advance(stops, stops->held.data[i]);
        if (found == 0) continue;
        stops->stopped = 1;
        bsm_buffer_add(shown, stops->held.data, i + 1 - found);
        stops->held.size = 0;
        return 1;
    }
    for (size_t i = 0; i < stops->count; i++)
        if (stops->stops[i].matched > keep) keep = stops->stops[i].matched;
    size_t cut = stops->held.size - keep;
    bsm_buffer_add(shown, stops->held.data, cut);
    if (keep > 0) memmove(stops->held.data, stops->held.data + cut, keep);
    stops->held.size = keep;
    return 0;
}

void bsm_stops_flush(bsm_stops *stops, bsm_buffer *shown) {
    bsm_buffer_add(shown, stops->held.data, stops->held.size);
    stops->held.size = 0;
    for (size_t i = 0; i < stops->count; i++) stops->stops[i].matched = 0;
}

void bsm_stops_free(bsm_stops *stops) {
    for (size_t i = 0; i < stops->count; i++) free(stops->stops[i].failures);
    free(stops->stops);
    bsm_buffer_free(&stops->held);
    *stops = (bsm_stops){0};
}
