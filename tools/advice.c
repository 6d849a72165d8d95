/* What a trace says to do: one function for each sentence. Each returns whether it has something to say. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/size.h"
#include "leaks.h"
#include "report.h"

static bool requests_failed(const struct report *report, char *text)
{
        const struct gr_trace *trace = &report->trace;
        uint64_t limit_hits = trace->counters.counts[GR_COUNTER_limit_hits];

        if (trace->counts[GR_ENTRY_REFUSED] == 0)
                return false;
        snprintf(text, ADVICE_BYTES, "%zu request%s failed: %s.", trace->counts[GR_ENTRY_REFUSED],
                 trace->counts[GR_ENTRY_REFUSED] == 1 ? "" : "s",
                 limit_hits > 0
                         ? "raise GPURECLAIM_HARD_LIMIT or the limit of the group, or allocate less at the peak"
                         : "the GPU was full, so allocate less at the peak, or set GPURECLAIM_SPILL or, if other "
                           "threads or processes free memory, GPURECLAIM_WAIT");
        return true;
}

/* A hundredth of the time or more went into rungs that wait. */
static bool memory_was_waited_for(const struct report *report, char *text)
{
        const struct gr_rung_counters *rungs = report->trace.counters.rungs;
        uint64_t ns = rungs[GR_RUNG_SYNC].ns + rungs[GR_RUNG_NEIGHBOUR].ns + rungs[GR_RUNG_WAIT].ns;

        if (!report->timed || ns < report->end_ns / 100 || ns == 0)
                return false;
        /* That of all threads may be longer than the run. */
        snprintf(
                text, ADVICE_BYTES,
                "In a run of %.3f s allocations of all threads waited %.3f s for memory: free blocks earlier, or raise "
                "the limits.",
                (double)report->end_ns / 1e9, (double)ns / 1e9);
        return true;
}

/* The driver was asked for a fifth or more, beyond what a start needs, after memory had been given back. */
static bool driver_was_asked_often(const struct report *report, char *text)
{
        const struct gr_trace *trace = &report->trace;
        size_t misses = trace->counts[GR_ENTRY_MISS], all = misses + trace->counts[GR_ENTRY_HIT];
        uint64_t decayed = trace->counters.counts[GR_COUNTER_decayed_bytes];
        char a[GR_SIZE_TEXT_BYTES];

        if (misses < 100 || misses < all / 5)
                return false;
        if (decayed > 0)
                snprintf(text, ADVICE_BYTES,
                         "The driver was asked for %zu of %zu allocations, after %s had gone unused and was given "
                         "back: a longer GPURECLAIM_DECAY keeps it.",
                         misses, all, gr_size_format(decayed, a, sizeof(a)));
        else
                snprintf(text, ADVICE_BYTES,
                         "The driver was asked for %zu of %zu allocations: if that goes on after the start, a higher "
                         "GPURECLAIM_RELEASE_THRESHOLD or GPURECLAIM_SOFT_LIMIT, or none, keeps more in the cache.",
                         misses, all);
        return true;
}

#define FRAGMENTED_LEAST (UINT64_C(64) << 20) /* bytes worth a word */

/* Of some GPU, as much as a quarter of the peak or more was fragmented. */
static bool memory_was_fragmented(const struct report *report, char *text)
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES];

        for (int i = 0; i < GR_TRACE_DEVICES; i++) {
                const struct point *worst = &report->timelines[i].worst;
                uint64_t peak = report->trace.peak_reserved_bytes[i];

                if (worst->fragmented_bytes < FRAGMENTED_LEAST || worst->fragmented_bytes < peak / 4)
                        continue;
                snprintf(text, ADVICE_BYTES,
                         "On GPU %d %s was fragmented at %.3f s, of at most %s: first allocate what lives longest, or "
                         "use fewer sizes; GPURECLAIM_POOL=bins fragments more than auto.",
                         i, gr_size_format(worst->fragmented_bytes, a, sizeof(a)), (double)worst->at / 1e9,
                         gr_size_format(peak, b, sizeof(b)));
                return true;
        }
        return false;
}

/* How long memory must have been cached before that is worth a word: as long as decay lets it, unless set. */
#define CACHED_NS UINT64_C(10000000000)

/* Of some GPU, a quarter or more of the peak was only cached, on average. */
static bool much_was_cached(const struct report *report, char *text)
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES];

        for (int i = 0; report->at_is_ns && report->last_at >= CACHED_NS && i < GR_TRACE_DEVICES; i++) {
                uint64_t cached = report->timelines[i].mean_cached_bytes, peak = report->trace.peak_reserved_bytes[i];

                if (cached == 0 || cached < peak / 4)
                        continue;
                snprintf(text, ADVICE_BYTES,
                         "On GPU %d %s of at most %s was only cached, on average over %.3f s: a shorter "
                         "GPURECLAIM_DECAY or a GPURECLAIM_RELEASE_THRESHOLD gives it to others sooner.",
                         i, gr_size_format(cached, a, sizeof(a)), gr_size_format(peak, b, sizeof(b)),
                         (double)report->last_at / 1e9);
                return true;
        }
        return false;
}

/*
 * Writes the place in the program that allocates: the innermost line of Python, or else the innermost function; and
 * where it is called from, as it may be one that allocates for all of the program.
 */
static void name_place(const struct origin *origin, char *text, size_t bytes)
{
        const struct frame *frame, *caller;
        const struct place *places;
        size_t at = 0, count, length;

        while (at + 1 < origin->frame_count && !is_python(&origin->frames[at]))
                at++;
        at = is_python(&origin->frames[at]) ? at : 0;
        frame = caller = &origin->frames[at];
        places = places_of(frame, &count);
        format_frame(frame, &places[0], text, bytes);
        if (places[0].function && strcmp(places[0].function, "main") == 0)
                return;
        places++; /* inlined there */
        if (count == 1) {
                caller = at + 1 < origin->frame_count ? frame + 1 : NULL;
                if (!caller || is_python(caller) != is_python(frame) || caller->module != frame->module)
                        return;
                places = places_of(caller, &count);
        }
        if (!places[0].function)
                return;
        length = strlen(text);
        snprintf(text + length, bytes - length, ", called from ");
        length = strlen(text);
        format_frame(caller, &places[0], text + length, bytes - length);
}

/* What one origin has is half of the peak or more. */
static bool one_origin_makes_the_peak(const struct report *report, char *text)
{
        const struct origins *origins = report->peak_snapshot ? &report->peak_snapshot->origins : NULL;
        const struct origin *first = origins && origins->count > 0 ? &origins->list[0] : NULL;
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], where[384];
        uint64_t without;
        double share = first ? first->all_bytes / (double)report->peak.bytes : 0;

        if (share < 0.5 || first->frame_count == 0)
                return false;
        without = peak_without(report, first);
        if (without == 0 && share < 1)
                return false;
        name_place(first, where, sizeof(where));
        snprintf(text, ADVICE_BYTES,
                 "%s%.0f %% of the peak of %s was allocated by %s. Without that the peak would be %s%s.",
                 origins->most_sample_bytes ? "About " : "", 100 * (share < 1 ? share : 1),
                 gr_size_format(report->peak.bytes, a, sizeof(a)), where, origins->most_sample_bytes ? "about " : "",
                 gr_size_format(without, b, sizeof(b)));
        return true;
}

/* Blocks of one size are half of the peak or more. */
static bool one_size_makes_the_peak(const struct report *report, char *text)
{
        const struct group *group = report->peak.groups;
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES];

        if (report->peak.group_count == 0 || group->bytes * group->count < report->peak.bytes / 2)
                return false;
        snprintf(text, ADVICE_BYTES,
                 "%.0f %% of the peak of %s was %" PRIu64 " block%s of %s: to need less, begin with %s.",
                 100 * (double)(group->bytes * group->count) / (double)report->peak.bytes,
                 gr_size_format(report->peak.bytes, a, sizeof(a)), group->count, group->count == 1 ? "" : "s",
                 gr_size_format(group->bytes, b, sizeof(b)), group->count == 1 ? "it" : "those");
        return true;
}

static bool peak_has_a_cause(const struct report *report, char *text)
{
        return one_origin_makes_the_peak(report, text) || one_size_makes_the_peak(report, text);
}

/* A tenth of the peak or more was live at the end. */
static bool much_was_never_freed(const struct report *report, char *text)
{
        const struct origin *first = report->has_origins && report->origins.count > 0 ? report->origins.list : NULL;
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], where[384];

        if (report->end.bytes == 0 || report->end.bytes < report->peak.bytes / 10)
                return false;
        gr_size_format(report->end.bytes, a, sizeof(a));
        if (first && first->frame_count > 0) {
                name_place(first, where, sizeof(where));
                gr_size_format((uint64_t)first->all_bytes, b, sizeof(b));
                snprintf(text, ADVICE_BYTES, "%s was never freed, %s%s of it allocated by %s.", a,
                         report->origins.header.sample_bytes ? "about " : "", strcmp(a, b) == 0 ? "all" : b, where);
        } else {
                snprintf(text, ADVICE_BYTES,
                         "%s was never freed: gpureclaim record --backtrace full tells which lines allocated it.", a);
        }
        return true;
}

size_t advise(const struct report *report, char texts[ADVICE_MOST][ADVICE_BYTES])
{
        static bool (*const sentences[])(const struct report *, char *) = {
                requests_failed, memory_was_waited_for, driver_was_asked_often, memory_was_fragmented,
                much_was_cached, peak_has_a_cause,      much_was_never_freed,
        };
        size_t count = 0;

        for (size_t i = 0; i < sizeof(sentences) / sizeof(sentences[0]) && count < ADVICE_MOST; i++)
                count += sentences[i](report, texts[count]);
        return count;
}
