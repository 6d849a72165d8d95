/* Ranges of segments: their order, the free lists, and which range fits a request, compared with plain searches. */
#include "segment/fit.h"
#include "segment/range.h"

#include <stdlib.h>

#include "base/size_class.h"
#include "check.h"
#include "core.h"
#include "short_of_memory.h"

#define PAGE  ((uint64_t)GR_PAGE_BYTES)
#define BASE  (UINT64_C(1) << 40)
#define PAGES 16
#define UNIT  GR_SEGMENTS_UNIT_BYTES

static struct gr_fence fence;
static struct gr_segments segments_state, *segments = &segments_state;
static struct gr_device device = {.hard_bytes = GR_UNLIMITED};
static struct gr_context context = {.device = &device, .fence = &fence, .segments = &segments_state};
static struct gr_range *begins[PAGES];
static struct gr_page *const mapped = (struct gr_page *)begins; /* never looked into here */
static struct gr_segment segment;
static uint64_t seed = 1;

static uint64_t random_below(uint64_t end)
{
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (seed >> 33) % end;
}

/* An expandable segment of one busy range; or a segment of the driver's. */
static void start(bool is_expandable, size_t pages)
{
        struct gr_range *range = gr_block_new();

        memset(&fence, 0, sizeof(fence));
        memset(segments, 0, sizeof(*segments));
        gr_lock_init(&segments->lock, GR_RANK_SEGMENTS);
        gr_lock(&segments->lock);
        memset(begins, 0, sizeof(begins));
        segment = (struct gr_segment){.ptr = BASE, .bytes = pages * PAGE, .first = range};
        if (is_expandable) {
                segment.pages = mapped;
                segment.begins = begins;
                begins[0] = range;
        }
        range->block.ptr = BASE;
        range->block.capacity_bytes = segment.bytes;
        range->block.context = &context;
        range->segment = &segment;
        range->state = GR_RANGE_BUSY;
}

static void finish(void)
{
        struct gr_range *range, *after;

        for (range = segment.first; range; range = after) {
                after = range->after;
                gr_block_delete(range);
        }
        gr_range_forget_kept(segments);
        gr_unlock(&segments->lock);
        gr_lock_destroy(&segments->lock);
        GR_CHECK_EQ(segments->kept_count, 0);
}

/* The ranges cover the segment, know each other, and each address leads to its own. */
static void check_all(void)
{
        uint64_t at = BASE, free_count = 0;

        for (struct gr_range *range = segment.first, *before = NULL; range; before = range, range = range->after) {
                GR_CHECK_EQ(range->block.ptr, at);
                GR_CHECK(range->before == before);
                GR_CHECK(range->block.capacity_bytes > 0);
                if (random_below(4) == 0)
                        GR_CHECK(gr_range_at(&segment, at + random_below(range->block.capacity_bytes)) == range);
                GR_CHECK(gr_range_at(&segment, at) == range);
                at = gr_range_end(range);
                free_count += range->state == GR_RANGE_FREE;
        }
        GR_CHECK_EQ(at, BASE + segment.bytes);
        GR_CHECK_EQ(segments->free_count, free_count);
}

/* Sizes from a unit to pages, now and then to the border of a page. */
static size_t some_bytes(const struct gr_range *range)
{
        uint64_t most = range->block.capacity_bytes, bytes = UNIT * (1 + random_below(most / UNIT - 1));

        if (random_below(3) == 0)
                bytes = PAGE * (1 + (range->block.ptr - BASE + bytes) / PAGE) - (range->block.ptr - BASE);
        else if (random_below(3) == 0)
                bytes = UNIT * (1 + random_below(16));
        return bytes < most ? bytes : UNIT;
}

static void test_cut_and_swallow(bool is_expandable)
{
        struct gr_range *range, *rest;

        start(is_expandable, PAGES / 2);
        for (int i = 0; i < 1200; i++) {
                range = gr_range_at(&segment, BASE + random_below(segment.bytes));
                if (random_below(100) < (i / 200 % 2 ? 30 : 60)) {
                        rest = range->block.capacity_bytes > UNIT ? gr_range_cut(range, some_bytes(range))
                                                                  : range->after;
                        GR_CHECK(rest == range->after);
                } else if (range->after) {
                        uint64_t mine = random_below(10), its = random_below(10);

                        range->block.freed_epoch = mine;
                        range->after->block.freed_epoch = its;
                        gr_range_swallow(range, range->after);
                        GR_CHECK_EQ(range->block.freed_epoch, gr_max(mine, its));
                }
                check_all();
        }
        finish();
}

static bool is_free(const struct gr_range *range, bool whole)
{
        return range->state == GR_RANGE_FREE &&
               (!segment.pages && range->block.capacity_bytes == segment.bytes) == whole;
}

/* What is free lies in its list, the smallest first as far as a class is short; the best is the first that will do. */
static void check_lists(const struct gr_free_lists *lists, bool whole)
{
        size_t bytes = UNIT * (1 + random_below(random_below(2) ? 64 : segment.bytes / UNIT));
        uint64_t last_epoch = random_below(4), most_bytes = segment.bytes - 1 + random_below(2);
        struct gr_range *best = NULL;
        unsigned smaller = 0, listed = 0;

        for (struct gr_range *range = segment.first; range; range = range->after) {
                if (!is_free(range, whole) || range->block.capacity_bytes < bytes)
                        continue;
                smaller++;
                if (range->block.freed_epoch <= last_epoch && (segment.pages || segment.bytes <= most_bytes) &&
                    (!best || range->block.capacity_bytes < best->block.capacity_bytes))
                        best = range;
        }
        GR_CHECK(gr_range_best(lists, bytes, last_epoch, most_bytes) == best);
        for (struct gr_range *range = gr_range_first(lists, bytes); range; range = gr_range_next(lists, range)) {
                GR_CHECK(is_free(range, whole));
                GR_CHECK(range->block.capacity_bytes > bytes / 17 * 16); /* of its class at least */
                listed += range->block.capacity_bytes >= bytes;
        }
        GR_CHECK_EQ(listed, smaller);
}

/* Free ranges become one with their free neighbours, with the latest epoch of all, and are parted again. */
static void test_free_and_isolate(bool is_expandable)
{
        const struct gr_free_lists *lists = segments->free;
        struct gr_range *range;

        start(is_expandable, PAGES / 2);
        for (int i = 0; i < 1500; i++) {
                range = gr_range_at(&segment, BASE + random_below(segment.bytes));
                if (range->state == GR_RANGE_FREE) {
                        uint64_t at = range->block.ptr + UNIT * random_below(range->block.capacity_bytes / UNIT);
                        uint64_t left = (gr_range_end(range) - at) / UNIT, bytes = UNIT * (1 + random_below(left));

                        range = gr_range_isolate(segments, range, at, bytes);
                        GR_CHECK_EQ(range->block.ptr, at);
                        GR_CHECK_EQ(range->block.capacity_bytes, bytes);
                        GR_CHECK_EQ(range->state, GR_RANGE_BUSY);
                        GR_CHECK(range->segment == &segment && range->block.context == &context);
                } else {
                        range->block.freed_epoch = random_below(4);
                        gr_range_free(segments, range);
                }
                range = gr_range_at(&segment, BASE);
                for (; range->after; range = range->after)
                        GR_CHECK(range->state != GR_RANGE_FREE || range->after->state != GR_RANGE_FREE);
                check_all();
                check_lists(&lists[GR_EXPANDABLE_LARGE], false);
                if (!is_expandable)
                        check_lists(&lists[GR_FREE_WHOLE], true);
                GR_CHECK(!gr_range_first(&lists[GR_EXPANDABLE_SMALL], UNIT));
        }
        finish();
}

/* Free from `first` to `end`, both in tenths of a page. */
static struct gr_range *free_between(unsigned first, unsigned end, uint64_t epoch)
{
        uint64_t from = BASE + first * PAGE / 10 / UNIT * UNIT, to = BASE + end * PAGE / 10 / UNIT * UNIT;
        struct gr_range *range = gr_range_at(&segment, from);

        if (range->block.ptr < from)
                range = gr_range_cut(range, from - range->block.ptr);
        if (gr_range_end(range) > to)
                gr_range_cut(range, to - range->block.ptr);
        range->block.freed_epoch = epoch;
        gr_range_free(segments, range);
        return range;
}

static void check_fit(size_t bytes, uint64_t last_epoch, const struct gr_range *range, uint64_t at)
{
        uint64_t found_at;

        GR_CHECK(gr_fit_find(&segments->free[GR_EXPANDABLE_LARGE], bytes, last_epoch, 0, &found_at) == range);
        GR_CHECK_EQ(found_at, at);
}

static void test_fit(void)
{
        struct gr_range *whole, *parts, *late;

        start(true, PAGES);
        atomic_store(&fence.usable_epoch, 1);
        check_fit(UNIT, 9, NULL, 0);
        /* It opens one page wherever it lies in these: where it begins, not where it ends. */
        whole = free_between(0, 30, 1);
        check_fit(PAGE, 9, whole, BASE);
        /* None at all at an end that is shared with others, though more is left of pages then. */
        parts = free_between(45, 85, 1);
        check_fit(PAGE / 2, 9, parts, parts->block.ptr);
        check_fit(PAGE / 4, 9, parts, parts->block.ptr);
        /* Two pages and a half: one less from within a page. Three and a half: no less, and so from a page's begin. */
        check_fit(2 * PAGE + PAGE / 2, 9, parts, parts->block.ptr);
        check_fit(3 * PAGE + PAGE / 2, 9, parts, BASE + 5 * PAGE);
        check_fit(4 * PAGE, 9, parts, parts->block.ptr); /* from there it would not end within the range */
        /* Of equals the one that needs no barrier, unless it is more than twice as large; none that was freed later. */
        late = free_between(95, 114, 2);
        check_fit(PAGE / 2, 9, late, late->block.ptr);
        check_fit(PAGE / 2, 1, parts, parts->block.ptr);
        free_between(114, 115, 2);
        check_fit(PAGE / 2, 9, parts, parts->block.ptr);
        check_fit(4 * PAGE + UNIT, 9, NULL, 0);
        finish();

        start(true, PAGES);
        atomic_store(&fence.usable_epoch, 1);
        whole = free_between(0, 17, 1);
        check_fit(PAGE / 2, 9, whole, gr_range_end(whole) - PAGE / 2); /* only there it opens no page */
        finish();
}

/* Frees so many bytes, behind a unit that stays busy, at *at. */
static struct gr_range *free_next(uint64_t *at, size_t bytes, uint64_t epoch)
{
        struct gr_range *range = gr_range_cut(gr_range_at(&segment, *at), UNIT);

        gr_range_cut(range, bytes);
        *at += UNIT + bytes;
        range->block.freed_epoch = epoch;
        gr_range_free(segments, range);
        return range;
}

/* A long list is not in order throughout: behind a range that is large enough may stand one that is not. */
static void test_fit_out_of_order(void)
{
        uint64_t at = BASE;
        struct gr_range *large;

        start(true, PAGES);
        atomic_store(&fence.usable_epoch, 1);
        for (unsigned i = 1; i <= 17; i++)
                free_next(&at, PAGE / 2 + i * UNIT, 1);
        large = free_next(&at, PAGE / 2 + 20 * UNIT, 2);
        GR_CHECK(gr_range_next(&segments->free[GR_EXPANDABLE_LARGE], large)); /* the 17th */
        check_fit(PAGE / 2 + 19 * UNIT, 9, large, large->block.ptr);
        finish();
}

/* A place in a segment of the driver's, unlike one in an expandable one, serves where the segment is not too large. */
static void test_most(void)
{
        const struct gr_free_lists *lists = &segments->free[GR_EXPANDABLE_LARGE];
        struct gr_range *range;
        uint64_t at;

        start(false, PAGES);
        range = free_between(0, 10, 1);
        free_between(20, 40, 1);
        GR_CHECK(gr_fit_find(lists, PAGE, 9, PAGES * PAGE, &at) == range);
        GR_CHECK(!gr_fit_find(lists, PAGE, 9, PAGES * PAGE - 1, &at));
        finish();
}

/* The last class is the last: what lies behind the lists is none of theirs. */
static void test_end_of_lists(void)
{
        static struct {
                struct gr_free_lists lists;
                uint64_t behind[64];
        } room;
        struct gr_range last = {.block.context = &context, .free_class = GR_FREE_CLASSES - 1};

        for (size_t i = 0; i < 64; i++)
                room.behind[i] = UINT64_C(1) << 12;
        start(true, PAGES);
        GR_CHECK(!gr_range_first(&room.lists, UNIT));
        GR_CHECK(!gr_range_next(&room.lists, &last));
        finish();
}

/* What debug builds assert at each change of a state: memory that may not be handed out is not, on no short way. */
static void test_states(void)
{
        static const enum gr_range_state barred[] = {GR_RANGE_WAITING, GR_RANGE_STUCK, GR_RANGE_HOLE, GR_RANGE_STALE};

        for (unsigned i = 0; i < sizeof(barred) / sizeof(barred[0]); i++) {
                GR_CHECK(!gr_range_may_become(barred[i], GR_RANGE_USED));
                GR_CHECK_EQ(gr_range_may_become(barred[i], GR_RANGE_FREE), barred[i] == GR_RANGE_WAITING);
        }
        GR_CHECK(gr_range_may_become(GR_RANGE_FREE, GR_RANGE_USED));
}

/* Without memory for a cut the range stays free as a whole. */
static void test_no_memory(void)
{
        struct gr_range *range;

        start(true, PAGES);
        range = segment.first;
        gr_range_free(segments, range);
        gr_range_leave(segments, range);
        GR_CHECK(gr_range_cut(range, PAGE)); /* and one structure is kept: there is memory for one cut only */
        gr_range_enter(segments, range);
        gr_range_become(range->after, GR_RANGE_BUSY);
        gr_range_free(segments, range->after);
        GR_CHECK_EQ(segments->kept_count, 1);
        for (int i = 0; i < 2; i++) { /* for the second cut, or the first one */
                memory_runs_out(sizeof(*range));
                GR_CHECK(!gr_range_isolate(segments, range, BASE + 2 * PAGE, PAGE));
                GR_CHECK_EQ(segments->free_count, 1);
                GR_CHECK_EQ(segment.first->block.capacity_bytes, PAGES * PAGE);
                check_all();
                gr_range_forget_kept(segments);
        }
        memory_is_back();
        finish();
}

int main(void)
{
        test_states();
        test_cut_and_swallow(true);
        test_cut_and_swallow(false);
        test_free_and_isolate(true);
        test_free_and_isolate(false);
        test_fit();
        test_fit_out_of_order();
        test_most();
        test_end_of_lists();
        test_no_memory();
        return GR_CHECK_RESULT();
}
