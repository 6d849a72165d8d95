#include "segments_gpu.h"

#include <errno.h>
#include <limits.h>

#include "reclaim/trim.h"

struct gr_core core;
static struct gr_parts parts;
struct gr_context *context;
bool gpu_mapping;
unsigned gpu_wakes, gpu_told;
sem_t gpu_inside, gpu_go_on;

/* As another thread may while the driver is at it. */
static void update_peak(void)
{
        gr_budget_update_peak(gpu_device());
}

bool gpu_in_order;

void gpu_begin(enum gr_pool_kind pool, enum gr_reuse reuse)
{
        struct gr_config config = {.pool = pool, .reuse = reuse, .in_order = gpu_in_order};

        sg_reset(GPU_PAGES * GR_PAGE_BYTES);
        sg_by_hand(0);
        gr_core_init(&core, &parts, gpu_mapping ? &sg_mapping_driver : &sg_driver, &config);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        atomic_store(&context->segments->extra_from_ns, UINT64_MAX);
        sg_before[SG_MEM_RELEASE] = update_peak;
}

void gpu_begin_auto(void)
{
        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        atomic_store(&gpu_device()->peak_live_bytes, 4096 * MIB);
}

struct gr_fastbins *gpu_own_fastbins(void)
{
        return &gr_arena_own(context)->fastbins;
}

void gpu_end(void)
{
        gr_core_destroy(&core);
        GR_CHECK_EQ(sg_misuses(), 0);
}

void gpu_settle(void)
{
        gpu_sync();
        gr_fence_sync(context->fence);
        gr_trim(context, UINT64_MAX / 2);
        if (core.config.pool == GR_POOL_SPLIT) {
                GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
                GR_CHECK_EQ(sg_used_bytes(0), 0);
        }
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        GR_CHECK_EQ(sg_handles(), 0);
        GR_CHECK_EQ(context->segments->surplus_bytes, 0);
        GR_CHECK_EQ(context->segments->free_count, 0);
}

struct gr_device *gpu_device(void)
{
        return context->device;
}

struct sg_progress gpu_progress(void)
{
        return sg_progress(context->handle);
}

uint64_t gpu_take(size_t bytes)
{
        uint64_t ptr;

        if (sg_alloc(context, bytes, &ptr))
                return 0;
        GR_CHECK_EQ(ptr % gr_range_unit(gr_is_small(bytes)), 0);
        /* On a stream that has none, so that nothing else orders it; but one stream is all there is at first. */
        sg_work(context->handle, !gr_fence_is_in_order(context->fence), ptr, 0);
        return ptr;
}

void gpu_give(uint64_t ptr, size_t bytes)
{
        (void)bytes;
        sg_work(context->handle, 0, ptr, 1);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
}

void gpu_capture(bool begins)
{
        if (begins) {
                gr_core_will_capture(&core);
                gr_gate_begin_enter(&core.gate);
                sg_capture(1);
                gr_gate_begin_leave(&core.gate, true);
        } else {
                sg_capture(-1);
                gr_gate_end(&core.gate);
        }
}

void gpu_sync(void)
{
        sg_gpu_reach(UINT64_MAX);
}

void gpu_forget(void)
{
        sg_context_destroy(context->handle);
}

void gpu_refuse(enum sg_op op, bool refused)
{
        sg_fail(op, 1, refused ? UINT_MAX : 0, op == SG_MEM_UNMAP || op == SG_MEM_INFO ? -EIO : -ENOMEM);
}

void gpu_wake(struct gr_core *woken)
{
        (void)woken;
        gpu_wakes++;
}

void gpu_count_line(const char *line, size_t line_bytes, void *arg)
{
        (void)line, (void)line_bytes, (void)arg;
        gpu_told++;
}

void gpu_stop(void)
{
        memset(sg_before, 0, sizeof(sg_before));
        sem_post(&gpu_inside);
        sem_wait(&gpu_go_on);
}

uint64_t gpu_random(uint64_t *seed)
{
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        return *seed;
}
