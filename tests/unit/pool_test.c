#include <errno.h>
#include <pthread.h>

#include "base/log.h"
#include "base/metadata.h"
#include "base/trace_file.h"
#include "cache/bins_trim.h"
#include "cache/block_life.h"
#include "pool_start.h"
#include "reclaim/trim.h"
#include "short_of_memory.h"

static void test_hit_and_miss(void)
{
        uint64_t a, b, ptr = 42;

        start(GR_REUSE_AUTO);
        a = alloc(5000);
        b = alloc(5000);
        GR_CHECK(a != b);
        GR_CHECK_EQ(sg_calls(SG_MEM_ALLOC), 2);
        free_ok(a);
        GR_CHECK_EQ(cached(), gr_class_block_bytes(5000));
        settle();
        GR_CHECK_EQ(alloc(4500), a); /* same class */
        GR_CHECK_EQ(cached(), 0);
        GR_CHECK(alloc(4500) != a);
        GR_CHECK(alloc(4096) != a); /* another one */
        GR_CHECK_EQ(sg_calls(SG_MEM_ALLOC), 4);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 0);

        GR_CHECK_EQ(gr_pool_alloc(context, GR_BLOCK_MAX_BYTES + 1, &ptr), -E2BIG);
        GR_CHECK_EQ(ptr, 42);
        GR_CHECK_EQ(sg_calls(SG_MEM_ALLOC), 4);
        finish();
}

static void test_wrong_frees(void)
{
        uint64_t a;

        start(GR_REUSE_AUTO);
        a = alloc(8192);
        GR_CHECK_EQ(sg_free(&core, a + 512), -ENOENT); /* inside */
        GR_CHECK_EQ(sg_free(&core, 0x1234000), -ENOENT);
        GR_CHECK_EQ(sg_free(&core, 0), -ENOENT);
        free_ok(a);
        GR_CHECK_EQ(sg_free(&core, a), -EALREADY);
        settle();
        GR_CHECK_EQ(sg_free(&core, a), -EALREADY);
        gr_trim(context, UINT64_MAX);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        GR_CHECK_EQ(sg_free(&core, a), -ENOENT);
        finish();
}

/* The block freed first is the first that is ready, and the first to go out. */
static void test_fifo(void)
{
        uint64_t blocks[4];

        start(GR_REUSE_POLL);
        for (int i = 0; i < 4; i++)
                blocks[i] = alloc(3 * MIB);
        for (int i = 0; i < 4; i++) {
                sg_work(context->handle, 0, blocks[i], 10 * SG_MS);
                free_ok(blocks[i]);
                gr_fence_close(context->fence);
        }
        for (int i = 0; i < 4; i++) {
                sg_advance(10 * SG_MS);
                GR_CHECK_EQ(alloc(3 * MIB), blocks[i]);
        }
        GR_CHECK_EQ(sg_calls(SG_MEM_ALLOC), 4);
        finish();
}

static void test_best_fit(void)
{
        uint64_t b36, b38, b40, b44, b48;

        start(GR_REUSE_AUTO);
        b48 = alloc(48 * MIB);
        b44 = alloc(44 * MIB);
        b40 = alloc(40 * MIB);
        b36 = alloc(36 * MIB);
        free_ok(b48);
        free_ok(b40);
        free_ok(b44);
        free_ok(b36);
        settle();
        GR_CHECK_EQ(alloc(39 * MIB), b40);
        GR_CHECK_EQ(alloc(40 * MIB), b44); /* 44 is still within an eighth of it... */
        GR_CHECK(alloc(40 * MIB) != b48);  /* ...and 48 is not */
        GR_CHECK_EQ(alloc(36 * MIB), b36);
        GR_CHECK_EQ(alloc(48 * MIB), b48);

        /* Blocks keep their exact number of pages. */
        GR_CHECK_EQ(sg_size(alloc(33 * MIB)), 34 * MIB);
        finish();

        /* Within a class, too, whichever was freed first. */
        start(GR_REUSE_AUTO);
        b40 = alloc(40 * MIB);
        b38 = alloc(38 * MIB);
        GR_CHECK_EQ(gr_class_of(40 * MIB), gr_class_of(38 * MIB));
        free_ok(b40);
        free_ok(b38);
        settle();
        GR_CHECK_EQ(alloc(37 * MIB), b38);
        GR_CHECK_EQ(alloc(37 * MIB), b40);
        finish();
}

static void *free_elsewhere(void *ptr)
{
        free_ok(*(uint64_t *)ptr);
        return NULL;
}

static void test_modes(void)
{
        uint64_t a, b;
        pthread_t thread;

        /* Barrier: at once, behind the work on the GPU, which goes on. */
        start(GR_REUSE_BARRIER);
        a = alloc(4 * MIB);
        sg_work(context->handle, 0, a, 100 * SG_MS);
        free_ok(a);
        b = alloc(4 * MIB);
        GR_CHECK_EQ(b, a);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 1);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 0);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS); /* the host did not wait */
        sg_work(context->handle, 1, b, SG_MS);        /* where the barrier failed, this is a misuse */
        finish();

        /* Poll: never an order on the GPU. */
        start(GR_REUSE_POLL);
        a = alloc(4 * MIB);
        sg_work(context->handle, 0, a, 100 * SG_MS);
        free_ok(a);
        b = alloc(4 * MIB);
        GR_CHECK(b != a);
        sg_work(context->handle, 1, b, SG_MS);
        sg_advance(100 * SG_MS);
        GR_CHECK_EQ(alloc(4 * MIB), a);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 0);
        finish();

        /* Sync: the free waits, as the driver's own does. */
        start(GR_REUSE_SYNC);
        a = alloc(4 * MIB);
        sg_work(context->handle, 0, a, 100 * SG_MS);
        free_ok(a);
        GR_CHECK(sg_driver.now_ns() >= SG_FIRST_NS + 100 * SG_MS);
        GR_CHECK_EQ(alloc(4 * MIB), a);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 0);
        finish();

        /* Auto: with one stream a block of the same class comes back at once, and the host never waits. */
        start(GR_REUSE_AUTO);
        a = alloc(4 * MIB);
        sg_work(context->handle, 0, a, 100 * SG_MS);
        free_ok(a);
        b = alloc(4 * MIB);
        sg_work(context->handle, 0, b, SG_MS);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS);
        finish();

        /* Also a large one, of a class with many sizes, and one that another thread freed into bins of its own. */
        start(GR_REUSE_AUTO);
        a = alloc(100 * MIB);
        sg_work(context->handle, 0, a, 100 * SG_MS);
        free_ok(a);
        GR_CHECK_EQ(alloc(99 * MIB), a);
        b = alloc(4 * MIB);
        sg_work(context->handle, 0, b, 100 * SG_MS);
        GR_CHECK_EQ(pthread_create(&thread, NULL, free_elsewhere, &b), 0);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(alloc(4 * MIB), b);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS);
        finish();

        /* An old driver has no fences: nothing comes out before the host has waited. */
        start_with(&sg_old_driver, GR_REUSE_AUTO, GR_POOL_BINS);
        a = alloc(4 * MIB);
        sg_work(context->handle, 0, a, 100 * SG_MS);
        free_ok(a);
        b = alloc(4 * MIB);
        sg_work(context->handle, 1, b, SG_MS);
        finish();
}

static void test_capture(void)
{
        static const enum gr_reuse modes[] = {GR_REUSE_AUTO, GR_REUSE_BARRIER, GR_REUSE_POLL, GR_REUSE_SYNC};

        for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++) {
                uint64_t a, b;

                start(modes[i]);
                a = alloc(4 * MIB);
                sg_work(context->handle, 0, a, 100 * SG_MS);
                sg_capture(1);
                gr_gate_begin_enter(&core.gate);
                gr_gate_begin_leave(&core.gate, true);
                free_ok(a);
                b = alloc(4 * MIB);
                GR_CHECK_EQ(b == a, modes[i] == GR_REUSE_SYNC); /* that waits at the free */
                sg_work(context->handle, 1, b, SG_MS);
                gr_trim_excess(&core);
                GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD) + sg_calls(SG_CONTEXT_WAIT) + sg_calls(SG_CONTEXT_SYNC), 0);
                sg_capture(-1);
                gr_gate_end(&core.gate);
                free_ok(b);
                finish();
        }
}

/*
 * The framework above runs its own release after a failure: what it frees then must really come free. That is the
 * thread's own affair, and over as soon as it is served, or after a moment.
 */
static void test_bypass(bool served)
{
        uint64_t a, b, c, ptr = 42;
        pthread_t thread;

        start(GR_REUSE_AUTO);
        a = alloc(600 * MIB);
        b = alloc(100 * MIB);
        c = alloc(20 * MIB);
        GR_CHECK_EQ(sg_alloc(context, 900 * MIB, &ptr), -ENOMEM);
        GR_CHECK_EQ(ptr, 42);
        GR_CHECK(gr_thread.bypass_until_ns > sg_driver.now_ns());
        if (pthread_create(&thread, NULL, free_elsewhere, &c))
                abort();
        pthread_join(thread, NULL);
        GR_CHECK_EQ(sg_size(c), 20 * MIB);
        free_ok(a);
        GR_CHECK_EQ(sg_size(a), 0);
        if (served)
                a = alloc(800 * MIB);
        else
                sg_advance(gr_thread.bypass_until_ns - sg_driver.now_ns());
        free_ok(b);
        GR_CHECK_EQ(sg_size(b), 100 * MIB); /* in the cache again */
        GR_CHECK_EQ(cached(), 120 * MIB);
        if (served)
                free_ok(a);
        GR_CHECK_EQ(sg_alloc(context, 1100 * MIB, &ptr), -ENOMEM);
        GR_CHECK(gr_thread.bypass_until_ns > 0);
        finish();
        GR_CHECK_EQ(gr_thread.bypass_until_ns, 0); /* the next pool of this thread has refused nothing */
}

/* A cached block that the driver gave to somebody else went in a way that nobody saw: no reason to fail. */
static void test_gone(void)
{
        uint64_t p, q, r;

        start(GR_REUSE_AUTO);
        p = alloc(3 * MIB);
        free_ok(p);
        sg_driver.mem_free(p);
        q = alloc(5 * MIB);
        GR_CHECK_EQ(q, p);
        r = alloc(3 * MIB);
        GR_CHECK(r != q);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_failures), 0);
        free_ok(q);
        free_ok(r);
        finish();
}

static void test_driver_errors(void)
{
        uint64_t ptr = 42, a;

        start(GR_REUSE_AUTO);
        sg_fail(SG_MEM_ALLOC, 1, 1, gr_driver_error(999));
        sg_log_clear();
        GR_CHECK_EQ(sg_alloc(context, 4 * MIB, &ptr), gr_driver_error(999));
        GR_CHECK_STR(sg_log(), "A"); /* no ladder: it is not about memory */
        GR_CHECK_EQ(ptr, 42);
        check_accounts();

        /* A release that fails in the middle: the rest goes by the driver's own free. */
        a = alloc(4 * MIB);
        free_ok(a);
        settle();
        sg_fail(SG_MEM_RELEASE, 1, 1, gr_driver_error(801));
        GR_CHECK_EQ(gr_trim(context, 1), 4 * MIB);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 1);
        GR_CHECK_EQ(sg_used_bytes(0), 0);

        /* And where the driver takes nothing back, its memory stays counted. */
        a = alloc(4 * MIB);
        free_ok(a);
        settle();
        sg_fail(SG_MEM_RELEASE, 1, 1, gr_driver_error(801));
        sg_fail(SG_MEM_FREE, 1, 1, gr_driver_error(801));
        GR_CHECK_EQ(gr_trim(context, 1), 0);
        check_accounts();
        finish();
}

/* What goes back leaves nothing behind: its structures serve the next blocks. */
static void test_structures(void)
{
        void *first = NULL, *then = NULL;
        uint64_t ptr;

        start(GR_REUSE_AUTO);
        for (int i = 0; i < 4; i++) {
                free_ok(alloc(4 * MIB));
                settle();
                GR_CHECK_EQ(gr_trim(context, 1), 4 * MIB);
                then = gr_block_new();
                gr_block_delete(then);
                if (i == 0)
                        first = then;
        }
        GR_CHECK(!GR_METADATA_IN_CHUNKS || then == first); /* otherwise whoever looks for leaks says so */

        /* Nor does what the driver refuses. */
        sg_fail(SG_MEM_ALLOC, 1, 1, -EIO);
        GR_CHECK_EQ(sg_alloc(context, 4 * MIB, &ptr), -EIO);
        then = gr_block_new();
        gr_block_delete(then);
        GR_CHECK(!GR_METADATA_IN_CHUNKS || then == first);
        finish();
}

/* Where memory is short the smallest request takes a block of up to 1 KiB. */
static void test_smallest(void)
{
        struct gr_source_request request;
        struct gr_block *block;
        uint64_t a;
        bool much;

        start(GR_REUSE_AUTO);
        request = gr_source_request(context, 100, NULL, NULL);
        a = alloc(1024);
        free_ok(a);
        settle();
        GR_CHECK(!gr_source_take(&request));
        block = gr_source_take_larger(&request);
        GR_CHECK(block && block->ptr == a);
        if (block)
                gr_arena_put(context, block, true, &much);
        finish();
}

/* Of large blocks the smallest one that serves is taken, whichever was freed first, and of the next class, too. */
static void test_smallest_large(void)
{
        uint64_t a, b;

        start(GR_REUSE_AUTO);
        a = alloc(34 * MIB);
        b = alloc(36 * MIB);
        free_ok(a);
        free_ok(b);
        settle();
        GR_CHECK_EQ(alloc(33 * MIB), a);
        GR_CHECK_EQ(alloc(33 * MIB), b);
        free_ok(a);
        free_ok(b);
        settle();
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX), 70 * MIB);

        a = alloc(38 * MIB);
        free_ok(a);
        settle();
        GR_CHECK(gr_class_of(35 * MIB) == GR_CLASS_EXACT && gr_class_of(38 * MIB) > GR_CLASS_EXACT);
        GR_CHECK_EQ(alloc(35 * MIB), a);
        free_ok(a);
        finish();
}

struct pitched {
        uint64_t bytes;
        int rc;
        unsigned calls;
};

static int allocate_pitched(void *arg, uint64_t *ret_ptr, size_t *ret_bytes)
{
        struct pitched *pitched = arg;
        int rc;

        pitched->calls++;
        rc = pitched->rc ? pitched->rc : sg_driver.mem_alloc(context->handle, pitched->bytes, ret_ptr);
        if (!rc)
                *ret_bytes = pitched->bytes;
        return rc;
}

static void test_alloc_by(void)
{
        struct pitched pitched = {.bytes = 5 * MIB};
        uint64_t a, ptr = 42;

        start(GR_REUSE_AUTO);
        GR_CHECK_EQ(gr_pool_alloc_by(context, 4 * MIB, allocate_pitched, &pitched, &a), 0);
        GR_CHECK_EQ(pitched.calls, 1);
        check_accounts();
        sg_own(a, 5 * MIB);
        free_ok(a);
        settle();
        GR_CHECK_EQ(alloc(4 * MIB), a); /* it is a block as others are, */
        GR_CHECK(alloc(6 * MIB) != a);
        pitched.rc = gr_driver_error(1);
        GR_CHECK_EQ(gr_pool_alloc_by(context, 4 * MIB, allocate_pitched, &pitched, &ptr), gr_driver_error(1));
        GR_CHECK_EQ(gr_pool_alloc_by(context, GR_BLOCK_MAX_BYTES + 1, allocate_pitched, &pitched, &ptr), -E2BIG);
        GR_CHECK_EQ(ptr, 42);
        check_accounts();

        /* More than the hard limit has: as if the card were full. */
        gr_budget_set_limit(device, GR_LIMIT_HARD, atomic_load(&device->reserved_bytes) + 4 * MIB);
        pitched = (struct pitched){.bytes = 32 * MIB};
        GR_CHECK_EQ(gr_pool_alloc_by(context, 4 * MIB, allocate_pitched, &pitched, &ptr), -EDQUOT);
        GR_CHECK(atomic_load(&device->reserved_bytes) <= atomic_load(&device->hard_bytes));
        finish();
}

/*
 * What others wait for the bin's lock is short: a look ends where nothing behind it can be idle, and passes only a few
 * by that do not serve. A walk that goes on ends in memory that cannot be read.
 */
static void test_short_looks(void)
{
        enum { MANY = 200 };
        unsigned class = gr_class_of(4096);
        struct gr_block *end, *after;
        uint64_t ptrs[MANY];

        start(GR_REUSE_POLL);
        for (int i = 0; i < MANY; i++)
                ptrs[i] = alloc(4096);
        sg_work(context->handle, 0, ptrs[0], 1000 * SG_MS);
        for (int i = 0; i < MANY; i++)
                free_ok(ptrs[i]);
        end = gr_arena_own(context)->bins[class].blocks->next;
        after = end->next;
        end->next = gr_check_wall();
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX), 0);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX), 0);
        end->next = after;

        settle();
        for (int i = 0; i < MANY / 2; i++)
                end = end->next;
        after = end->next;
        end->next = gr_check_wall();
        GR_CHECK_EQ(gr_bins_trim_class(context, class, 4095), 0); /* each is too large */
        end->next = after;
        GR_CHECK(gr_trim(context, UINT64_MAX) > 0);
        GR_CHECK_EQ(cached(), 0);
        finish();
}

/*
 * The driver has freed blocks behind our back, and gives their addresses to the program in a way of its own: they are
 * none of ours any more, neither to free nor to hand out.
 */
static void test_given(size_t bytes, bool live)
{
        uint64_t ptr, other;

        start(GR_REUSE_AUTO);
        ptr = alloc(bytes);
        other = alloc(bytes);
        if (live) {
                sg_disown(ptr);
        } else {
                free_ok(ptr);
                settle();
        }
        GR_CHECK_EQ(sg_driver.mem_free(ptr), 0);
        gr_pool_given(&core, ptr);
        gr_pool_given(&core, ptr);
        GR_CHECK_EQ(sg_free(&core, ptr), -ENOENT);
        if (live)
                check_accounts();
        gr_trim(context, UINT64_MAX); /* finds what was in a bin */
        check_accounts();
        free_ok(other);
        settle();
        GR_CHECK_EQ(alloc(bytes), other);
        GR_CHECK(alloc(bytes) != other);
        finish();
}

/* A used range of a segment is the segment's, whatever the driver says. */
static void test_given_range(void)
{
        uint64_t ptr;

        start_with(&sg_driver, GR_REUSE_AUTO, GR_POOL_SPLIT);
        ptr = alloc(3 * MIB);
        gr_pool_given(&core, ptr);
        free_ok(ptr);
        finish();
}

/* A block of the driver's that the ledger has no room for goes back, and is not charged. */
static void test_no_entry(void)
{
        enum { MANY = 200 };
        struct gr_block *blocks[MANY];
        unsigned count = 0;
        uint64_t ptr;
        int rc;

        start(GR_REUSE_AUTO);
        free_ok(alloc(2 * MIB));
        for (int i = 0; i < MANY; i++)
                blocks[i] = gr_block_new();
        for (int i = 0; i < MANY; i++)
                gr_block_delete(blocks[i]); /* for those below */
        memory_runs_out(256);
        while ((rc = sg_alloc(context, 2 * MIB, &ptr)) == 0 && count < MANY)
                count++;
        memory_is_back();
        GR_CHECK_EQ(rc, -ENOMEM);
        if (GR_METADATA_IN_CHUNKS) /* else there are no structures left over, and the driver is not asked */
                GR_CHECK(sg_calls(SG_MEM_ALLOC) > 1 + count); /* the driver gave one more */
        finish();
}

static uint64_t traced_bytes; /* in quarantine, as the trace was told last */

static void note_traced(enum gr_entry what, int ordinal, unsigned detail, uint64_t address, uint64_t bytes)
{
        (void)detail, (void)address;
        if (what == GR_ENTRY_QUARANTINE && ordinal == context->ordinal)
                traced_bytes = bytes;
}

/* A request that takes fresh memory tells how much of the cache it could not have, as that waits for the GPU. */
static void test_traced_quarantine(void)
{
        start(GR_REUSE_AUTO);
        free_ok(alloc(3 * MIB));
        atomic_store(&gr_trace_to, note_traced);
        alloc(5000); /* where a barrier is cheap, a small request may do without it */
        GR_CHECK_EQ(traced_bytes, 4 * MIB);
        alloc(8 * MIB);
        GR_CHECK_EQ(traced_bytes, 0);
        finish();

        start(GR_REUSE_POLL);
        free_ok(alloc(3 * MIB));
        alloc(8 * MIB);
        GR_CHECK_EQ(traced_bytes, 4 * MIB);
        atomic_store(&gr_trace_to, NULL);
        finish();
}

int main(void)
{
        gr_log_set_level(GR_LOG_SILENT);
        test_hit_and_miss();
        test_wrong_frees();
        test_fifo();
        test_best_fit();
        test_modes();
        test_capture();
        test_bypass(true);
        test_bypass(false);
        test_gone();
        test_driver_errors();
        test_structures();
        test_short_looks();
        test_alloc_by();
        test_smallest();
        test_smallest_large();
        for (int live = 0; live < 2; live++) {
                test_given(4 * MIB, live);
                test_given(4096, live);
        }
        test_given_range();
        test_no_entry();
        test_traced_quarantine();
        return GR_CHECK_RESULT();
}
