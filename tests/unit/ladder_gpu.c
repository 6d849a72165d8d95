#include "ladder_gpu.h"

#include <errno.h>

#include "base/log.h"

struct gr_device *device;

void start_with(const struct gr_driver *driver, enum gr_reuse reuse)
{
        pool_begin(driver, CARD, &(struct gr_config){.reuse = reuse, .pool = GR_POOL_BINS});
        device = context->device;
        gr_log_set_level(GR_LOG_SILENT);
}

void start(void)
{
        start_with(&sg_driver, GR_REUSE_AUTO);
}

void finish(void)
{
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), sg_used_bytes(0));
        pool_end();
}

void check_tried_until(enum gr_rung last)
{
        for (enum gr_rung rung = GR_RUNG_READY; rung < GR_RUNG_COUNT; rung++) {
                bool tried = atomic_load(&core.counters.rungs[rung].tries) > 0;
                bool wanted = rung <= last && (rung < GR_RUNG_NEIGHBOUR || rung == GR_RUNG_FAIL);

                if (tried != wanted)
                        fprintf(stderr, "  rung %s\n", gr_rung_words[rung]);
                GR_CHECK_EQ(tried, wanted);
        }
}

void cache(unsigned count, size_t bytes, uint64_t ns)
{
        uint64_t ptrs[32];

        for (unsigned i = 0; i < count; i++)
                ptrs[i] = alloc(bytes);
        for (unsigned i = 0; i < count; i++) {
                if (ns)
                        sg_work(context->handle, 0, ptrs[i], ns);
                free_ok(ptrs[i]);
                gr_fence_close(context->fence);
        }
}

int let_go(void *arg, int of_device, uint64_t want_bytes)
{
        struct holder *holder = arg;

        holder->calls++;
        holder->trims = sg_calls(SG_TRIM_POOLS);
        holder->releases = sg_calls(SG_MEM_RELEASE);
        holder->seen_ns = sg_driver.now_ns();
        holder->wanted_bytes = want_bytes;
        holder->device = of_device;
        if (!holder->rc && holder->holds_bytes) {
                sg_hold(0, 0, 0);
                holder->holds_bytes = 0;
        }
        return holder->rc;
}

static int refuse(void *arg, uint64_t bytes)
{
        (void)arg, (void)bytes;
        return -EDQUOT;
}

static void adjust(void *arg, int64_t bytes)
{
        (void)arg, (void)bytes;
}

static uint64_t none(void *arg)
{
        (void)arg;
        return 0;
}

static uint64_t five(void *arg)
{
        (void)arg;
        return 5 * MIB;
}

static uint64_t twenty(void *arg)
{
        (void)arg;
        return 20 * MIB;
}

const struct gr_group full_group = {
        .limit_bytes = MIB, .reserve = refuse, .adjust = adjust, .room = none, .excess = none};
const struct gr_group passed_group = {
        .limit_bytes = MIB, .reserve = refuse, .adjust = adjust, .room = none, .excess = five};
static void name_one(void *arg, char *ret_text, size_t text_bytes)
{
        (void)arg;
        snprintf(ret_text, text_bytes, "train 4711 has 10.000 MiB");
}

const struct gr_group roomy_group = {.limit_bytes = 60 * MIB,
                                     .reserve = refuse,
                                     .adjust = adjust,
                                     .room = twenty,
                                     .excess = none,
                                     .others = name_one};
