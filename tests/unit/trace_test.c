/* The reader of traces: the order of the entries, and files of which any byte may be wrong. */
#include "trace.h"

#include <errno.h>
#include <unistd.h>

#include "check.h"

#define BATCHES 4
#define ROUNDS  2000

static char path[] = "/tmp/gr-trace-XXXXXX";

static struct {
        struct gr_trace_header header;
        struct gr_trace_entry entries[BATCHES * GR_TRACE_BATCH];
} file;

static void put(size_t at, uint64_t time_ns, uint32_t thread, enum gr_entry what, uint64_t address, uint64_t bytes)
{
        file.entries[at] = (struct gr_trace_entry){time_ns, address, bytes, thread | (uint64_t)what << 32};
}

/* Two threads: the second frees what the first allocated, whose entries come later in the file. */
static void make(void)
{
        memset(&file, 0, sizeof(file));
        file.header = (struct gr_trace_header){.magic = GR_TRACE_MAGIC,
                                               .version = GR_TRACE_VERSION,
                                               .header_bytes = sizeof(struct gr_trace_header),
                                               .entry_bytes = sizeof(struct gr_trace_entry),
                                               .batch_entries = GR_TRACE_BATCH,
                                               .claimed = 2,
                                               .ring = GR_TRACE_BATCHES_MAX,
                                               .devices = {"A card"},
                                               .command = "a program\0with an argument\033"};
        put(0, 30, 8, GR_ENTRY_FREE, 0x1000, 0);
        put(1, 50, 8, GR_ENTRY_MISS, 0x1000, 7);
        put(2, 60, 8, GR_ENTRY_REFUSED, 0, 1000);
        put(3, 61, 8, GR_ENTRY_RUNG, 500, 4096);
        put(4, 62, 8, GR_ENTRY_COUNTER, 0, 3);
        put(5, 63, 8, GR_ENTRY_COUNT, 0, 3);
        put(6, 64, 8, GR_ENTRY_RESERVED, 0, 7000);
        put(7, 65, 8, GR_ENTRY_RESERVED, 0, 6000);
        put(GR_TRACE_BATCH, 10, 5, GR_ENTRY_HIT, 0x1000, 100);
        put(GR_TRACE_BATCH + 1, 40, 5, GR_ENTRY_HIT, 0x2000, 50);
        put(GR_TRACE_BATCH + 3, 45, 5, GR_ENTRY_FREE, 0x2000, 0); /* the one before was never completed */
}

static int read_bytes(size_t bytes, struct gr_trace *ret)
{
        FILE *out = fopen(path, "wb");
        size_t line;

        GR_MUST(!out || fwrite(&file, 1, bytes, out) != bytes || fclose(out));
        return gr_trace_read(path, ret, &line);
}

static void test_order(void)
{
        struct gr_trace trace;

        make();
        GR_CHECK_EQ(read_bytes(sizeof(file), &trace), 0);
        GR_CHECK_EQ(trace.count, 5);
        GR_CHECK_EQ(trace.ops[0].ptr, 0x1000);
        GR_CHECK_EQ(trace.ops[0].time_ns, 0); /* since the first operation */
        GR_CHECK(trace.ops[1].is_free);
        GR_CHECK_EQ(trace.ops[1].bytes, 100);
        GR_CHECK_EQ(trace.ops[1].time_ns, 20);
        GR_CHECK_EQ(trace.thread_ids[trace.ops[0].thread], 5);
        GR_CHECK_EQ(trace.thread_ids[trace.ops[1].thread], 8);
        GR_CHECK_EQ(trace.ops[4].ptr, 0x1000);
        GR_CHECK_EQ(trace.peak_live_bytes, 100);
        GR_CHECK_EQ(trace.skipped, 1);
        GR_CHECK(!trace.begin_is_missing);
        GR_CHECK_EQ(trace.counts[GR_ENTRY_HIT], 2);
        GR_CHECK_EQ(trace.counts[GR_ENTRY_MISS], 1);
        GR_CHECK_EQ(trace.counts[GR_ENTRY_REFUSED], 1);
        GR_CHECK_EQ(trace.counters.counts[0], 3);
        GR_CHECK_EQ(trace.peak_reserved_bytes[0], 7000);
        GR_CHECK_EQ(trace.event_count, 4); /* the refused request, the rung and these two */
        GR_CHECK_EQ(trace.events[3].bytes, 6000);
        GR_CHECK_EQ(trace.events[3].time_ns, 55);
        GR_CHECK_EQ(trace.counters.rungs[0].tries, 1);
        GR_CHECK_EQ(trace.counters.rungs[0].bytes, 4096);
        GR_CHECK_STR(trace.header->command, "a program with an argument ");
        GR_CHECK_STR(trace.header->devices[0], "A card");
        gr_trace_free(&trace);

        file.header.ring = 1;
        GR_CHECK_EQ(read_bytes(sizeof(file), &trace), 0);
        GR_CHECK(trace.begin_is_missing);
        gr_trace_free(&trace);
}

/* An address that is allocated again, without a free in the file: the process was killed, or the batch used again. */
static void test_lost_free(void)
{
        struct gr_trace trace;

        make();
        memset(file.entries, 0, sizeof(file.entries));
        put(0, 10, 5, GR_ENTRY_HIT, 0x1000, 100);
        put(1, 20, 5, GR_ENTRY_HIT, 0x1000, 30);
        put(2, 30, 5, GR_ENTRY_FREE, 0x1000, 0);
        GR_CHECK_EQ(read_bytes(sizeof(file), &trace), 0);
        GR_CHECK_EQ(trace.count, 4);
        GR_CHECK(trace.count == 4 && trace.ops[1].is_free);
        GR_CHECK(trace.count == 4 && trace.ops[1].bytes == 100 && trace.ops[1].time_ns == 10);
        GR_CHECK(trace.count == 4 && trace.ops[3].bytes == 30);
        GR_CHECK_EQ(trace.peak_live_bytes, 100);
        GR_CHECK_EQ(trace.skipped, 0);
        gr_trace_free(&trace);
}

/* Of a file that was used again, what may have been freed in the part that is lost is left out. */
static void test_doubtful(void)
{
        enum { OLDEST = 2 * GR_TRACE_BATCH, SECOND = 3 * GR_TRACE_BATCH, THIRD = 0, NEWEST = GR_TRACE_BATCH };
        struct gr_trace trace;

        make();
        memset(file.entries, 0, sizeof(file.entries));
        file.header.ring = BATCHES;
        file.header.claimed = BATCHES + 2;
        put(OLDEST, 10, 5, GR_ENTRY_HIT, 0x1000, 100);
        put(OLDEST + 1, 12, 5, GR_ENTRY_HIT, 0x2000, 50);
        put(OLDEST + 2, 14, 5, GR_ENTRY_FREE, 0x2000, 0);
        put(SECOND, 20, 5, GR_ENTRY_HIT, 0x3000, 7);
        put(THIRD, 30, 5, GR_ENTRY_HIT, 0x4000, 1);
        put(THIRD + 1, 35, 5, GR_ENTRY_FREE, 0x3000, 0); /* nothing later than this is lost */
        put(NEWEST, 34, 6, GR_ENTRY_HIT, 0x5000, 2);
        put(NEWEST + 1, 40, 6, GR_ENTRY_HIT, 0x6000, 9);
        GR_CHECK_EQ(read_bytes(sizeof(file), &trace), 0);
        GR_CHECK_EQ(trace.doubtful_count, 3);
        GR_CHECK_EQ(trace.doubtful_bytes, 103);
        GR_CHECK_EQ(trace.count, 5);
        GR_CHECK(trace.count == 5 && trace.ops[0].ptr == 0x2000 && trace.ops[3].is_free && trace.ops[4].bytes == 9);
        GR_CHECK_EQ(trace.peak_live_bytes, 50);
        gr_trace_free(&trace);

        file.header.claimed = BATCHES; /* nothing is lost */
        GR_CHECK_EQ(read_bytes(sizeof(file), &trace), 0);
        GR_CHECK_EQ(trace.doubtful_count, 0);
        GR_CHECK_EQ(trace.count, 8);
        GR_CHECK_EQ(trace.peak_live_bytes, 150);
        gr_trace_free(&trace);
}

/* A stack is that of the thread's next allocation, if that is at its address. */
static void test_stacks(void)
{
        struct gr_trace trace;

        make();
        memset(file.entries, 0, sizeof(file.entries));
        put(0, 10, 5, GR_ENTRY_STACK, 0x1000, 77);
        file.entries[0].head |= UINT64_C(26) << 48;
        put(1, 11, 6, GR_ENTRY_HIT, 0x1000, 30); /* another thread's */
        put(2, 12, 6, GR_ENTRY_FREE, 0x1000, 0);
        put(3, 13, 5, GR_ENTRY_MISS, 0x1000, 100);
        put(4, 14, 5, GR_ENTRY_FREE, 0x1000, 0);
        put(5, 15, 5, GR_ENTRY_HIT, 0x1000, 100); /* has been used */
        put(6, 16, 5, GR_ENTRY_STACK, 0x2000, 0);
        file.entries[6].head |= UINT64_C(64) << 48;
        put(7, 17, 5, GR_ENTRY_HIT, 0x2000, 5);
        GR_CHECK_EQ(read_bytes(sizeof(file), &trace), 0);
        GR_CHECK_EQ(trace.count, 6);
        GR_CHECK_EQ(trace.event_count + trace.skipped, 0);
        GR_CHECK_EQ(trace.ops[0].stack, GR_TRACE_NO_STACK);
        GR_CHECK_EQ(trace.ops[2].stack, 77);
        GR_CHECK_EQ(trace.ops[2].sample_log2, 26);
        GR_CHECK_EQ(trace.ops[3].stack, GR_TRACE_NO_STACK);
        GR_CHECK_EQ(trace.ops[4].stack, GR_TRACE_NO_STACK);
        GR_CHECK_EQ(trace.ops[5].stack, 0); /* noted, but not known */
        GR_CHECK_EQ(trace.ops[5].sample_log2, 0);
        gr_trace_free(&trace);
}

static void test_refused(void)
{
        struct gr_trace trace;

        make();
        file.header.version++;
        GR_CHECK_EQ(read_bytes(sizeof(file), &trace), -EPROTONOSUPPORT);
        make();
        file.header.entry_bytes = 24;
        GR_CHECK_EQ(read_bytes(sizeof(file), &trace), -EPROTONOSUPPORT);
        make();
        file.header.magic[0] = 'X';
        GR_CHECK_EQ(read_bytes(sizeof(file), &trace), -EINVAL);
        GR_CHECK_EQ(read_bytes(0, &trace), -EINVAL);
}

/* Read as far as it goes. */
static void test_cut_off(void)
{
        struct gr_trace trace;

        make();
        for (size_t bytes = 0; bytes < sizeof(file); bytes += 13) {
                int rc = read_bytes(bytes, &trace);

                GR_CHECK(bytes < sizeof(file.header) ? rc == -EINVAL : rc == 0);
                if (!rc)
                        gr_trace_free(&trace);
        }
}

/* Nothing happens but an error, or a trace of nonsense. */
static void test_any_bytes(void)
{
        unsigned seed = 1;

        for (int round = 0; round < ROUNDS; round++) {
                unsigned char *bytes = (unsigned char *)&file;
                struct gr_trace trace;

                make();
                if (round % 2) /* many entries, whose fields are all nonsense */
                        for (size_t i = 0; i < sizeof(file.entries); i++)
                                bytes[sizeof(file.header) + i] = (unsigned char)(rand_r(&seed) % (round % 4 + 2));
                for (int i = 0; i < 20; i++)
                        bytes[(size_t)rand_r(&seed) % sizeof(file)] = (unsigned char)rand_r(&seed);
                if (read_bytes(sizeof(file) - (size_t)rand_r(&seed) % 100, &trace) == 0) {
                        for (size_t i = 0; i < trace.count; i++)
                                GR_CHECK(trace.ops[i].slot < trace.slot_count &&
                                         trace.ops[i].thread < trace.thread_count);
                        gr_trace_free(&trace);
                }
        }
}

int main(void)
{
        int made = mkstemp(path);

        GR_MUST(made < 0 || close(made));
        test_order();
        test_lost_free();
        test_doubtful();
        test_stacks();
        test_refused();
        test_cut_off();
        test_any_bytes();
        unlink(path);
        return GR_CHECK_RESULT();
}
