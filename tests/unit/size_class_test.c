#include "base/size_class.h"
#include "check.h"

#define EXACT_MAX_BYTES (16 * GR_PAGE_BYTES)

/* All that size_class.h promises for one request. */
static void check_request(size_t bytes)
{
        unsigned class = gr_class_of(bytes);
        size_t top = gr_class_bytes(class), block = gr_class_block_bytes(bytes);
        int before = gr_check_failures;

        GR_CHECK(class < GR_CLASS_COUNT);
        GR_CHECK(top >= bytes);
        GR_CHECK(class == 0 || gr_class_bytes(class - 1) < bytes);
        if (bytes <= 4096)
                GR_CHECK(top - bytes < 512);
        else if (bytes <= GR_SMALL_MAX_BYTES)
                GR_CHECK(4 * (top - bytes) <= bytes);
        else if (bytes <= EXACT_MAX_BYTES)
                GR_CHECK(top - bytes < GR_PAGE_BYTES);
        else
                GR_CHECK(8 * (top - bytes) <= bytes);
        if (bytes <= GR_SMALL_MAX_BYTES)
                GR_CHECK_EQ(top % 512, 0);

        /* The block serves the request and is found again in the request's class. */
        GR_CHECK(block >= bytes);
        GR_CHECK(block <= top);
        GR_CHECK_EQ(gr_class_of_block(block), class);
        if (bytes > GR_SMALL_MAX_BYTES) /* no page more than the driver takes for the request as it is */
                GR_CHECK_EQ(gr_footprint_bytes(block), gr_footprint_bytes(bytes));
        GR_CHECK_EQ(gr_is_small(block), gr_is_small(bytes));
        if (gr_check_failures != before)
                fprintf(stderr, "  for %zu bytes, class %u\n", bytes, class);
}

/* A block of any size, such as the driver chose it. */
static void check_block(size_t capacity)
{
        unsigned class = gr_class_of_block(capacity);
        int before = gr_check_failures;

        GR_CHECK(class < GR_CLASS_COUNT);
        if (class < GR_CLASS_EXACT)
                GR_CHECK(gr_class_bytes(class) <= capacity);
        else
                GR_CHECK(gr_class_bytes(class - 1) < capacity);
        /* And no class above it would do. */
        if (class + 1 < GR_CLASS_COUNT)
                GR_CHECK(gr_class_bytes(class + 1) > capacity || class + 1 >= GR_CLASS_EXACT);
        if (gr_check_failures != before)
                fprintf(stderr, "  for a block of %zu bytes, class %u\n", capacity, class);
}

static void test_all_sizes(void)
{
        unsigned last = 0;

        for (size_t bytes = 1; bytes <= GR_SMALL_MAX_BYTES && gr_check_failures < 20; bytes++) {
                check_request(bytes);
                GR_CHECK(gr_class_of(bytes) == last || gr_class_of(bytes) == last + 1);
                last = gr_class_of(bytes);
        }
        for (size_t bytes = GR_SMALL_MAX_BYTES; bytes <= 64 * (size_t)(1 << 20) && gr_check_failures < 20;
             bytes += 509) {
                check_request(bytes);
                GR_CHECK(gr_class_of(bytes) >= last);
                last = gr_class_of(bytes);
        }
        for (size_t capacity = 512; capacity <= 64 * (size_t)(1 << 20) && gr_check_failures < 20; capacity += 256)
                check_block(capacity);
}

static void test_edges(void)
{
        for (unsigned class = 0; class < GR_CLASS_COUNT; class ++) {
                size_t top = gr_class_bytes(class);

                GR_CHECK_EQ(gr_class_of(top), class);
                GR_CHECK_EQ(gr_class_of_block(top), class);
                GR_CHECK(class == 0 || gr_class_bytes(class - 1) < top);
                check_request(top);
                check_request(top - 1);
                if (class + 1 < GR_CLASS_COUNT) {
                        GR_CHECK_EQ(gr_class_of(top + 1), class + 1);
                        check_request(top + 1);
                }
        }
        GR_CHECK_EQ(gr_class_bytes(GR_CLASS_TINY - 1), 4096);
        GR_CHECK_EQ(gr_class_bytes(GR_CLASS_SMALL - 1), GR_SMALL_MAX_BYTES);
        GR_CHECK_EQ(gr_class_bytes(GR_CLASS_EXACT - 1), EXACT_MAX_BYTES);
        GR_CHECK_EQ(gr_class_bytes(GR_CLASS_COUNT - 1), GR_BLOCK_MAX_BYTES);
}

static void test_footprint(void)
{
        GR_CHECK_EQ(gr_footprint_bytes(512), 512);
        GR_CHECK_EQ(gr_footprint_bytes(GR_SMALL_MAX_BYTES), GR_SMALL_MAX_BYTES);
        GR_CHECK_EQ(gr_footprint_bytes(GR_SMALL_MAX_BYTES + 1), GR_PAGE_BYTES);
        GR_CHECK_EQ(gr_footprint_bytes(GR_PAGE_BYTES), GR_PAGE_BYTES);
        GR_CHECK_EQ(gr_footprint_bytes(GR_PAGE_BYTES + 1), 2 * GR_PAGE_BYTES);
        GR_CHECK_EQ(GR_PAGE_BYTES, (size_t)1 << GR_PAGE_SHIFT);
        GR_CHECK(gr_is_small(GR_SMALL_MAX_BYTES));
        GR_CHECK(!gr_is_small(GR_SMALL_MAX_BYTES + 1));
}

int main(void)
{
        test_all_sizes();
        test_edges();
        test_footprint();
        return GR_CHECK_RESULT();
}
