/* What other contexts reach: whose work a fence covers, and who waits at a barrier, as contexts come and go. */
#include "fence_gpu.h"

/* Two contexts reach each other's blocks: the work of both counts, and both wait. */
static void test_reach(void)
{
        struct gr_context *other, *far;
        uint64_t epoch;
        uint64_t ptr;

        start();
        far = gr_core_context_add(&core, sg_context_new(1), 1);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 1); /* of another device */
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 2);
        GR_CHECK_EQ(gr_fence_accessors(other->fence), 2);
        GR_CHECK_EQ(gr_fence_accessors(far->fence), 1);
        gr_fence_add_accessor(context->fence, far);
        gr_fence_add_accessor(context->fence, far); /* twice is once */
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 3);

        sg_work(far->handle, 2, 0, 9 * SG_MS);
        epoch = freed_after(1);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        sg_advance(5 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(!gr_fence_usable(fence, epoch)); /* the far one's work is not done */
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK(gr_fence_usable(fence, epoch) && !gr_fence_idle(fence, epoch));

        /* The scripted GPU would tell if any of the three started before the end of the far one's work. */
        GR_CHECK_EQ(sg_driver.mem_alloc(context->handle, 4096, &ptr), 0);
        sg_own(ptr, 4096);
        sg_work(far->handle, 3, ptr, 40 * SG_MS);
        sg_disown(ptr);
        epoch = gr_fence_note_freed(fence, 4096);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK(gr_fence_usable(fence, epoch));
        sg_own(ptr, 4096);
        sg_work(context->handle, 0, ptr, SG_MS);
        sg_work(other->handle, 0, ptr, SG_MS);
        sg_work(far->handle, 0, ptr, SG_MS);
        GR_CHECK_EQ(sg_misuses(), 0);

        /* The far one goes: its work is done, its events are not asked any more. */
        epoch = freed_after(1);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        sg_context_destroy(far->handle);
        gr_fence_forget(context->fence, far);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 2);
        sg_advance(100 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, epoch));
        finish();
}

/* A context that joins after a barrier was laid: its work, too, must find the former owner's done. */
static void test_reach_joined_late(void)
{
        for (int first = 0; first < 2; first++) { /* handed out again before or after */
                bool handed_out = first;
                struct gr_context *late;
                uint64_t ptr, epoch;

                start();
                GR_CHECK_EQ(sg_driver.mem_alloc(context->handle, 4096, &ptr), 0);
                sg_own(ptr, 4096);
                sg_work(context->handle, 0, ptr, 50 * SG_MS);
                sg_disown(ptr);
                epoch = gr_fence_note_freed(fence, 4096);
                GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
                if (handed_out)
                        sg_own(ptr, 4096);
                late = gr_core_context_add(&core, sg_context_new(0), 0);
                if (!handed_out && gr_fence_usable(fence, epoch)) {
                        sg_own(ptr, 4096);
                        handed_out = true;
                }
                if (handed_out)
                        sg_work(late->handle, 0, ptr, SG_MS);
                finish();
        }
}

/* One that comes once all that a barrier readied has passed waits for nothing, whatever was freed since. */
static void test_reach_joined_idle(void)
{
        unsigned waits;

        start();
        freed_after(1);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        sg_advance(SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        freed_after(50);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        waits = sg_calls(SG_CONTEXT_WAIT);
        gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), waits);
        finish();
}

/* One of several leaves: the work of all others still holds the blocks back. */
static void test_reach_left(void)
{
        for (int leaves = 0; leaves < 3; leaves++) {
                struct gr_context *others[3];

                start();
                for (int i = 0; i < 3; i++)
                        others[i] = gr_core_context_add(&core, sg_context_new(0), 0);
                gr_core_context_ending(others[leaves]);
                sg_context_destroy(others[leaves]->handle);
                gr_core_context_gone(others[leaves]);
                for (int i = 0; i < 3; i++) {
                        uint64_t epoch;

                        if (i == leaves)
                                continue;
                        sg_work(others[i]->handle, 0, 0, 50 * SG_MS);
                        epoch = gr_fence_note_freed(fence, MIB);
                        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
                        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                        GR_CHECK(!gr_fence_usable(fence, epoch));
                        sg_advance(60 * SG_MS);
                        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                        GR_CHECK(gr_fence_usable(fence, epoch));
                }
                finish();
        }
}

/* Epochs of a context that has gone leave nothing for those that come after them in the ring. */
static void test_reach_left_ring(void)
{
        struct gr_context *other;

        start();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        for (int i = 0; i < 2 * GR_EPOCHS_PENDING; i++) {
                freed_after(1);
                GR_CHECK_EQ(gr_fence_close(context->fence), 0);
                if (i % 2) {
                        sg_advance(2 * SG_MS);
                        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                }
        }
        gr_core_context_ending(other);
        sg_context_destroy(other->handle);
        gr_core_context_gone(other);
        for (int i = 0; i < 2 * GR_EPOCHS_PENDING; i++) {
                freed_after(1);
                GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
                sg_advance(2 * SG_MS);
                GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        }
        finish();
}

/* With several epochs behind one barrier, and some beyond it: who joins late waits for all that the barrier covered. */
static void test_reach_joined_epochs(void)
{
        for (int beyond = 0; beyond < 3; beyond++) {
                uint64_t ptrs[3], epochs[3];
                struct gr_context *late;
                unsigned waits;

                start();
                for (int i = 0; i < 3; i++) {
                        GR_CHECK_EQ(sg_driver.mem_alloc(context->handle, 4096, &ptrs[i]), 0);
                        sg_own(ptrs[i], 4096);
                        sg_work(context->handle, 0, ptrs[i], 20 * SG_MS);
                        sg_disown(ptrs[i]);
                        epochs[i] = gr_fence_note_freed(fence, 4096);
                        GR_CHECK_EQ(i < 2 ? gr_fence_close(context->fence) : gr_fence_barrier(context->fence), 0);
                }
                for (int i = 0; i < beyond; i++) {
                        freed_after(50);
                        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
                }
                waits = sg_calls(SG_CONTEXT_WAIT);
                late = gr_core_context_add(&core, sg_context_new(0), 0);
                GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), waits + 1); /* for the newest that the barrier covers */
                for (int i = 0; i < 3; i++) {
                        GR_CHECK(gr_fence_usable(fence, epochs[i]));
                        sg_own(ptrs[i], 4096);
                        sg_work(late->handle, 0, ptrs[i], SG_MS);
                }
                finish();
        }
}

static void test_reach_overflow(void)
{
        start();
        for (int i = 1; i < GR_ACCESSORS_MAX; i++)
                gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), GR_ACCESSORS_MAX);
        GR_CHECK(!fence->accessor_overflow);
        gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(fence->accessor_overflow);
        GR_CHECK(gr_fence_accessors(context->fence) > GR_ACCESSORS_MAX);

        /* Who comes after it in its place is reached by few again. */
        sg_context_destroy(context->handle);
        gr_fence_reset(context->fence);
        GR_CHECK(!fence->accessor_overflow);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 1);
        finish();
}

int main(void)
{
        test_reach();
        test_reach_joined_late();
        test_reach_joined_idle();
        test_reach_left();
        test_reach_left_ring();
        test_reach_joined_epochs();
        test_reach_overflow();
        return GR_CHECK_RESULT();
}
