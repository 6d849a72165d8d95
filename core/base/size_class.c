#include "base/size_class.h"

#include <assert.h>

static size_t geometric_bytes(unsigned k, unsigned from_log2, unsigned steps_log2)
{
        size_t base = (size_t)1 << (from_log2 + (k >> steps_log2));
        size_t step = (k & ((1u << steps_log2) - 1)) + 1;

        return base + (base >> steps_log2) * step;
}

size_t gr_class_bytes(unsigned class)
{
        assert(class < GR_CLASS_COUNT);
        if (class < GR_CLASS_TINY)
                return (class + 1) * (size_t)512;
        if (class < GR_CLASS_SMALL)
                return geometric_bytes(class - GR_CLASS_TINY, 12, 2);
        if (class < GR_CLASS_EXACT)
                return (class - GR_CLASS_SMALL + 1) * GR_PAGE_BYTES;
        return geometric_bytes(class - GR_CLASS_EXACT, 25, 3);
}

unsigned gr_class_of_block(size_t capacity_bytes)
{
        unsigned class = gr_class_of(capacity_bytes);

        assert(capacity_bytes >= 512); /* a smaller block cannot serve all requests of any class */
        /*
         * A block whose size the driver chose (pitched memory) may be too small for the largest request of its class.
         */
        if (class < GR_CLASS_EXACT && gr_class_bytes(class) > capacity_bytes)
                class --;
        return class;
}

size_t gr_class_block_bytes(size_t request_bytes)
{
        if (request_bytes <= GR_SMALL_MAX_BYTES)
                return gr_class_bytes(gr_class_of(request_bytes));
        return gr_footprint_bytes(request_bytes);
}
