/* The rung WAIT, and what a report says of who has the memory. */
#include <errno.h>

#include "base/log.h"
#include "pool_gpu.h"

#define ROOM_BYTES (64 * MIB)

static struct gr_driver driver; /* the scripted one with what a test puts on top */
static char said[8192];

static void hear(const char *line, size_t bytes, void *arg)
{
        size_t used = strlen(said);

        (void)arg;
        if (used + bytes < sizeof(said)) {
                memcpy(said + used, line, bytes);
                said[used + bytes] = '\0';
        }
}

static void start(struct gr_config config)
{
        driver = sg_driver;
        driver.sleep_ns = sleep_and_see;
        said[0] = '\0';
        config.pool = GR_POOL_BINS;
        pool_begin(&driver, ROOM_BYTES, &config);
}

static uint64_t block;

static void free_block(void)
{
        GR_CHECK_EQ(sg_free(&core, block), 0);
}

static void neighbour_leaves(void)
{
        sg_hold(0, 0, 0);
}

static uint64_t caching_from_ns;
static int64_t waiting_bytes, most_waiting_bytes;

static uint64_t ask_caching_neighbour(struct gr_core *asker, struct gr_device *device, uint64_t want_bytes)
{
        (void)asker;
        (void)device;
        if (sg_driver.now_ns() < caching_from_ns)
                return 0;
        sg_hold(0, 0, 0);
        return want_bytes;
}

static void note_waiting(struct gr_device *device, int64_t bytes)
{
        (void)device;
        waiting_bytes += bytes;
        if (waiting_bytes > most_waiting_bytes)
                most_waiting_bytes = waiting_bytes;
}

static uint64_t others_bytes;

static bool others_have(struct gr_device *device, uint64_t bytes)
{
        (void)device;
        return others_bytes >= bytes;
}

static unsigned served_count;

static void note_served(void)
{
        served_count++;
}

static void others_leave(void)
{
        others_bytes = 0;
        event.when_ns = sg_driver.now_ns() + 500 * SG_MS; /* their memory is back only later */
        event.what = neighbour_leaves;
}

/* The others have too little: it waits only for what this process may free, and the others do not know it. */
static void test_vain(void)
{
        uint64_t begin_ns, ptr;

        for (int others_only = 0; others_only < 2; others_only++) {
                start((struct gr_config){.wait_ns = 2000 * SG_MS, .wait_for_others_only = others_only});
                core.may_give = others_have;
                core.ask_neighbours = ask_caching_neighbour;
                core.wait_for_neighbours = note_waiting;
                core.served = note_served;
                most_waiting_bytes = 0;
                others_bytes = 20 * MIB - 1;
                caching_from_ns = UINT64_MAX;
                sg_hold(0, ROOM_BYTES, 0);
                begin_ns = sg_driver.now_ns();
                GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), -ENOMEM);
                GR_CHECK((sg_driver.now_ns() - begin_ns < 10 * SG_MS) == others_only);
                GR_CHECK_EQ(most_waiting_bytes, 0);

                /* They end meanwhile. */
                others_bytes = 20 * MIB;
                event.when_ns = sg_driver.now_ns() + 500 * SG_MS;
                event.what = others_leave;
                GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
                GR_CHECK_EQ(most_waiting_bytes, 20 * MIB);
                GR_CHECK_EQ(waiting_bytes, 0);
                GR_CHECK_EQ(served_count, 0);

                /* What is left of them gives. */
                sg_hold(0, ROOM_BYTES - 20 * MIB, 0);
                others_bytes = ROOM_BYTES;
                caching_from_ns = sg_driver.now_ns() + 500 * SG_MS;
                GR_CHECK_EQ(sg_alloc(context, 30 * MIB, &ptr), 0);
                GR_CHECK_EQ(served_count, 1);
                served_count = 0;
                pool_end();
        }
}

static void test_wait(void)
{
        uint64_t begin_ns, waited_ns, ptr;

        /* A thread of our own frees: noticed at once. */
        start((struct gr_config){.wait_ns = 30000 * SG_MS});
        GR_CHECK_EQ(sg_alloc(context, ROOM_BYTES - 4 * MIB, &block), 0);
        begin_ns = sg_driver.now_ns();
        event.when_ns = begin_ns + 5000 * SG_MS;
        event.what = free_block;
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        waited_ns = sg_driver.now_ns() - begin_ns;
        GR_CHECK(waited_ns >= 5000 * SG_MS && waited_ns < 5002 * SG_MS);
        GR_CHECK_EQ(core.counters.rungs[GR_RUNG_WAIT].tries, 1);
        GR_CHECK_EQ(core.counters.rungs[GR_RUNG_WAIT].bytes, 20 * MIB);
        GR_CHECK_EQ(core.counters.rungs[GR_RUNG_FAIL].tries, 0);
        pool_end();

        /* The same during a capture, in which no fence covers what is freed. */
        start((struct gr_config){.wait_ns = 30000 * SG_MS});
        GR_CHECK_EQ(sg_alloc(context, ROOM_BYTES - 4 * MIB, &block), 0);
        sg_work(context->handle, 0, block, 1000 * SG_MS);
        gr_gate_begin_enter(&core.gate);
        sg_capture(1);
        gr_gate_begin_leave(&core.gate, true);
        begin_ns = sg_driver.now_ns();
        event.when_ns = begin_ns + 5000 * SG_MS;
        event.what = free_block;
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        waited_ns = sg_driver.now_ns() - begin_ns;
        GR_CHECK(waited_ns >= 5000 * SG_MS && waited_ns < 5002 * SG_MS);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        pool_end();

        /* Another process gives memory back: the driver is asked, but seldom. */
        start((struct gr_config){.wait_ns = 30000 * SG_MS});
        sg_hold(0, ROOM_BYTES - 4 * MIB, 0);
        begin_ns = sg_driver.now_ns();
        event.when_ns = begin_ns + 20000 * SG_MS;
        event.what = neighbour_leaves;
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        waited_ns = sg_driver.now_ns() - begin_ns;
        GR_CHECK(waited_ns >= 20000 * SG_MS && waited_ns < 20100 * SG_MS);
        GR_CHECK(sg_calls(SG_MEM_ALLOC) < 2000);
        pool_end();

        /* Another process frees into its cache: it is asked again, or what it has would be waited for in vain. */
        start((struct gr_config){.wait_ns = 30000 * SG_MS});
        core.ask_neighbours = ask_caching_neighbour;
        core.wait_for_neighbours = note_waiting;
        sg_hold(0, ROOM_BYTES - 4 * MIB, 0);
        caching_from_ns = sg_driver.now_ns() + 3000 * SG_MS;
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        waited_ns = sg_driver.now_ns() - caching_from_ns;
        GR_CHECK(waited_ns < 100 * SG_MS);
        GR_CHECK_EQ(most_waiting_bytes, 20 * MIB);
        GR_CHECK_EQ(waiting_bytes, 0);
        pool_end();

        /* Nobody: an error, in bounded time, and said so. */
        start((struct gr_config){.wait_ns = 2000 * SG_MS});
        gr_log_set_level(GR_LOG_INFO);
        sg_hold(0, ROOM_BYTES, 0);
        begin_ns = sg_driver.now_ns();
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), -ENOMEM);
        waited_ns = sg_driver.now_ns() - begin_ns;
        GR_CHECK(waited_ns >= 2000 * SG_MS && waited_ns < 2600 * SG_MS);
        GR_CHECK(strstr(said, "waiting up to 2.000 s for 20.000 MiB"));
        GR_CHECK(strstr(said, "gave up waiting"));
        GR_CHECK_EQ(core.counters.rungs[GR_RUNG_WAIT].bytes, 0);
        pool_end();

        /* Longer than any clock goes is without end. */
        start((struct gr_config){.wait_ns = UINT64_MAX});
        GR_CHECK_EQ(sg_alloc(context, ROOM_BYTES - 4 * MIB, &block), 0);
        event.when_ns = sg_driver.now_ns() + 5000 * SG_MS;
        event.what = free_block;
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        pool_end();

        /* Without the option no time is lost. */
        start((struct gr_config){0});
        sg_hold(0, ROOM_BYTES, 0);
        begin_ns = sg_driver.now_ns();
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), -ENOMEM);
        GR_CHECK(sg_driver.now_ns() - begin_ns < 10 * SG_MS);
        gr_log_set_level(GR_LOG_SILENT);
        pool_end();
}

static void test_report(void)
{
        uint64_t ptr, begin_ns;

        start((struct gr_config){.wait_ns = 2000 * SG_MS});
        gr_log_set_level(GR_LOG_INFO);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_alloc(context, 10 * MIB, &ptr), 0);
        for (int i = 0; i < 10; i++)
                GR_CHECK_EQ(sg_alloc(context, 2 * MIB, &ptr), 0);
        atomic_store(&context->device->total_bytes, 40 * MIB - 1); /* more than that is not waited for */
        begin_ns = sg_driver.now_ns();
        GR_CHECK_EQ(sg_alloc(context, 40 * MIB, &ptr), -ENOMEM);
        GR_CHECK(sg_driver.now_ns() - begin_ns < 10 * SG_MS);
        GR_CHECK(strstr(said,
                        "largest: 30.000 MiB in 3 blocks of about 10.000 MiB, 20.000 MiB in 10 blocks of about 2.000 "
                        "MiB\n"));
        gr_log_set_level(GR_LOG_SILENT);
        pool_end();
}

int main(void)
{
        gr_log_set_sink(hear, NULL);
        gr_log_set_level(GR_LOG_SILENT);
        test_wait();
        test_vain();
        test_report();
        return GR_CHECK_RESULT();
}
