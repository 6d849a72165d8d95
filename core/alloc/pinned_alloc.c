#include "alloc/pinned_alloc.h"

#include <errno.h>

#include "alloc/charge.h"
#include "base/counters.h"
#include "base/size_class.h"
#include "cache/block_life.h"
#include "cache/ledger.h"
#include "context/context.h"
#include "host/pinned.h"

struct fresh {
        gr_pinned_allocate *allocate;
        void *arg;
        size_t bytes;
        uint64_t ptr;
};

static int allocate_fresh(void *arg)
{
        struct fresh *fresh = arg;

        return fresh->allocate(fresh->arg, fresh->bytes, &fresh->ptr);
}

static int take_fresh(struct gr_context *context, size_t bytes, unsigned kind, gr_pinned_allocate *allocate, void *arg,
                      struct gr_block **ret_block)
{
        struct gr_core *core = context->core;
        size_t capacity = gr_pinned_capacity(bytes);
        struct fresh fresh = {.allocate = allocate, .arg = arg, .bytes = capacity};
        struct gr_block *block = gr_block_new(), *stale;
        int rc;

        if (!block)
                return -ENOMEM;
        rc = gr_charge_accounted(core, core->host, NULL, GR_MEMORY_HOST, gr_pinned_footprint(capacity), allocate_fresh,
                                 &fresh);
        if (rc) {
                gr_block_delete(block);
                return rc;
        }
        block->kind = kind;
        gr_block_begin(block, context, fresh.ptr, capacity, bytes, gr_class_of(capacity), GR_BLOCK_HOST);
        rc = gr_block_add(core, block, &stale);
        if (stale) {
                gr_block_uncharge(stale);
                gr_block_delete(stale);
        }
        if (rc) {
                core->driver->host_free(context->handle, fresh.ptr);
                gr_block_uncharge(block);
                gr_block_delete(block);
                return rc;
        }
        gr_count(core, GR_COUNTER_pinned_allocs, 1);
        *ret_block = block;
        return 0;
}

int gr_pinned_alloc(struct gr_context *context, size_t bytes, unsigned kind, gr_pinned_allocate *allocate, void *arg,
                    uint64_t *ret_ptr)
{
        struct gr_core *core = context->core;

        if (bytes > GR_BLOCK_MAX_BYTES)
                return -E2BIG;
        for (;;) {
                struct gr_block *block = gr_pinned_take(context, bytes, kind);
                uint64_t ptr;

                if (block) {
                        gr_count(core, GR_COUNTER_pinned_hits, 1);
                } else {
                        int rc = take_fresh(context, bytes, kind, allocate, arg, &block);

                        if (rc)
                                return rc;
                }
                ptr = block->ptr;
                gr_block_set_generation(block, gr_block_next_generation(block));
                if (gr_ledger_hand_out(block, bytes)) {
                        *ret_ptr = ptr;
                        return 0;
                }
                gr_block_uncharge_and_delete(block); /* its memory went with its context */
        }
}
