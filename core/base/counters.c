#include "base/counters.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/size.h"

#define LINE_BYTES 256 /* no line is longer */

static const struct counter_row {
        const char *name, *words;
        enum { COUNT, BYTES } unit;
} counter_rows[GR_COUNTER_COUNT] = {
#define GR_COUNTER(name, unit, words) {#name, words, unit},
#include "base/counters.def"
#undef GR_COUNTER
};

const char *const gr_rung_words[GR_RUNG_COUNT] = {
#define WORD(id, word) word,
        GR_RUNGS(WORD)
#undef WORD
};

void gr_counters_text(const struct gr_counters *counters, gr_sink *sink, void *arg)
{
        char line[LINE_BYTES], size[GR_SIZE_TEXT_BYTES];

        for (enum gr_counter i = 0; i < GR_COUNTER_COUNT; i++) {
                uint64_t count = atomic_load(&counters->counts[i]);
                int length = snprintf(line, sizeof(line), "  %s: ", counter_rows[i].words);

                if (count == 0)
                        continue;
                if (counter_rows[i].unit == BYTES)
                        gr_size_format(count, size, sizeof(size));
                else
                        snprintf(size, sizeof(size), "%" PRIu64, count);
                length += snprintf(line + length, sizeof(line) - (size_t)length, "%s\n", size);
                sink(line, (size_t)length, arg);
        }
        for (int i = 0; i < GR_RUNG_COUNT; i++) {
                const struct gr_rung_counters *rung = &counters->rungs[i];
                uint64_t tries = atomic_load(&rung->tries);

                if (tries > 0)
                        sink(line,
                             (size_t)snprintf(line, sizeof(line), "  ladder, %s: %" PRIu64 " times, %s in %.3f ms\n",
                                              gr_rung_words[i], tries,
                                              gr_size_format(atomic_load(&rung->bytes), size, sizeof(size)),
                                              (double)atomic_load(&rung->ns) / 1e6),
                             arg);
        }
}

void gr_counters_json(const struct gr_counters *counters, struct gr_json *json)
{
        for (enum gr_counter i = 0; i < GR_COUNTER_COUNT; i++)
                gr_json_count(json, counter_rows[i].name, atomic_load(&counters->counts[i]));
        gr_json_object(json, "ladder");
        for (int i = 0; i < GR_RUNG_COUNT; i++) {
                const struct gr_rung_counters *rung = &counters->rungs[i];

                gr_json_object(json, gr_rung_words[i]);
                gr_json_count(json, "tries", atomic_load(&rung->tries));
                gr_json_count(json, "bytes", atomic_load(&rung->bytes));
                gr_json_count(json, "ns", atomic_load(&rung->ns));
                gr_json_close(json);
        }
        gr_json_close(json);
}
