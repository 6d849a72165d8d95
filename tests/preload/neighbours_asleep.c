/*
 * The modes of neighbours.c in which idle processes fall asleep (GPURECLAIM_SLEEP), as others need the card, which has
 * 64 MiB. A process that has just worked is asked only after five seconds, which is longer than a call may take, or
 * when its turn is over (GPURECLAIM_TURN).
 */
#include "neighbours_worker.h"

#include "check.h"

#include "system/platform.h"

#include <cuda.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

static struct gr_region region;

static struct gr_member member_of(const struct worker *worker)
{
        struct gr_member member;

        if (!region.map && !open_region(&region))
                fail("no region", 0);
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                if (gr_region_read(&region, i, &member) == 0 && member.identity.pid == (uint32_t)worker->pid)
                        return member;
        fail("the worker is no member", worker->pid);
}

static uint64_t asleep_mib(const struct worker *worker)
{
        return member_of(worker).figures[GR_FIGURE_asleep] / MIB;
}

/* How often it was asked for something so far. */
static unsigned requests(const struct worker *worker)
{
        return atomic_load(&region.map->slots[member_of(worker).slot].request);
}

/* Another process takes it for idle, wrongly perhaps. Whether it falls asleep. */
static bool order_to_sleep(const struct worker *worker)
{
        const struct gr_request request = {.orders = GR_ORDER_SLEEP_OFFER};
        struct gr_patience patience = {gr_platform_now_ns(), UINT64_C(5000000000), UINT64_MAX};
        struct gr_member member = member_of(worker);

        if (!gr_region_await(&region, member.slot, member.owner, gr_region_request(&region, member.slot, &request),
                             &patience))
                fail("an order is not answered", 0);
        return asleep_mib(worker) > 0;
}

/* Until it is idle and, with enough, has been for so long that others may put it to sleep. */
static void await_idle(const struct worker *worker, bool enough)
{
        double begin = now_ms();

        for (;;) {
                uint64_t from_ns = member_of(worker).sleep_from_ns;

                if (from_ns && (!enough || gr_platform_now_ns() >= from_ns))
                        return;
                if (now_ms() - begin > 10 * CALL_MS)
                        fail("it never is idle", (long long)from_ns);
                pause_ms(10);
        }
}

/* One with so much live, which it has filled with the value. */
static struct worker start_with(unsigned mib, unsigned value)
{
        struct worker worker = start(0);

        if (ask(&worker, 'a', mib).result != 0 || ask(&worker, 'w', value).result != 0)
                fail("one cannot work", value);
        return worker;
}

static void expect(struct worker *worker, char order, unsigned argument, int result, const char *what)
{
        struct reply reply = ask(worker, order, argument);

        if (reply.result != result || reply.ms > CALL_MS)
                fail(what, reply.ms > CALL_MS ? (long long)reply.ms : reply.result);
}

static void served(struct worker *worker, char order, unsigned argument, const char *what)
{
        expect(worker, order, argument, CUDA_SUCCESS, what);
}

static void refused(struct worker *worker, char order, unsigned argument, const char *what)
{
        expect(worker, order, argument, CUDA_ERROR_OUT_OF_MEMORY, what);
}

/* Only one that has been idle for long, and only where that suffices; and not again as soon as it wakes. */
void mode_asleep(void)
{
        struct worker rich = start_with(40, 7), poor = start(0);

        refused(&poor, 'a', 44, "one that has just worked fell asleep");
        if (order_to_sleep(&rich))
                fail("one that has just worked obeys", 0);
        await_idle(&rich, true);
        refused(&poor, 'a', 80, "more than the card has");
        if (asleep_mib(&rich) != 0)
                fail("one fell asleep in vain", (long long)asleep_mib(&rich));
        served(&poor, 'a', 44, "the idle one did not fall asleep");
        if (asleep_mib(&rich) != 40 || gr_region_sum(&region, false) > 44 * MIB)
                fail("asleep, in MiB", (long long)asleep_mib(&rich));
        served(&poor, 'f', 0, "free");
        served(&rich, 'c', 7, "its content after that");
        refused(&poor, 'a', 44, "one that woke fell asleep at once");
        end(&rich, 0);
        end(&poor, 0);
}

/* The one that has been idle for longer, and not the other, if that is enough. */
void mode_asleep_order(void)
{
        struct worker one = start_with(24, 1), two = start_with(24, 2), poor = start(0);

        await_idle(&one, false);
        do {                                  /* on a busy machine the first one may be seen to be idle later */
                served(&two, 'c', 2, "work"); /* from now on it is the other's turn */
                await_idle(&two, true);
        } while (member_of(&two).sleep_from_ns <= member_of(&one).sleep_from_ns);
        served(&poor, 'a', 32, "the idle ones");
        if (asleep_mib(&one) != 24 || asleep_mib(&two) != 0)
                fail("asleep is the second", (long long)asleep_mib(&two));
        served(&poor, 'a', 24, "the other one");
        if (asleep_mib(&two) != 24)
                fail("the second is not asleep", (long long)asleep_mib(&two));
        end(&poor, 0);
        served(&two, 'c', 2, "the second's content");
        served(&one, 'c', 1, "the first's content");
        end(&one, 0);
        end(&two, 0);
}

/* GPURECLAIM_GROUP_LIMIT=32MiB. What is asleep does not count, and comes back only within the limit. */
void mode_asleep_group(void)
{
        struct worker one = start_with(24, 1), two = start(0);
        unsigned before;

        refused(&two, 'a', 18, "two have more than their limit together");
        await_idle(&one, true);
        served(&two, 'a', 18, "the idle one did not fall asleep");
        served(&two, 'w', 2, "work");
        for (int i = 0; i < 2; i++) {
                struct worker *sleeper = i ? &two : &one, *other = i ? &one : &two;

                before = requests(other);
                refused(sleeper, 'c', (unsigned)i + 1, "it woke beside one that has just worked");
                if (requests(other) - before > 2) /* it has nothing cached, which it publishes */
                        fail("how often it was asked by one that waits", requests(other) - before);
                if (asleep_mib(sleeper) == 0 || asleep_mib(other) != 0 || card_used_bytes() > 32 * MIB)
                        fail("which one is asleep", i);
                await_idle(other, true);
                served(sleeper, 'c', (unsigned)i + 1, "it does not wake in place of the idle one");
                if (asleep_mib(other) == 0 || card_used_bytes() > 32 * MIB)
                        fail("both are awake", i);
        }
        end(&one, 0);
        end(&two, 0);
}

/* GPURECLAIM_SLEEP_HOST=0. It says no, and is not asked again before it has worked. */
void mode_asleep_no(void)
{
        struct worker rich = start_with(40, 7), poor = start(0);
        unsigned before;

        for (int i = 0; i < 2; i++) {
                await_idle(&rich, true);
                before = requests(&rich);
                refused(&poor, 'a', 44, "memory that could not leave was given away");
                if (requests(&rich) != before + 2) /* for what it has cached, and to sleep */
                        fail("how often it was asked", requests(&rich) - before);
                pause_ms(1000);
                before = requests(&rich);
                refused(&poor, 'a', 44, "memory that could not leave was given away");
                if (requests(&rich) != before + 1 || member_of(&rich).sleep_from_ns != 0)
                        fail("it was asked again, times", requests(&rich) - before);
                served(&rich, 'c', 7, "its content");
        }
        end(&rich, 0);
        end(&poor, 0);
}

/* Others ask it for what it caches first: that a function that it registered then calls the driver is no work of it. */
void mode_asleep_purge(void)
{
        struct worker rich = start_with(40, 7), poor = start(0);

        served(&rich, 'i', 0, "register");
        await_idle(&rich, true);
        served(&poor, 'a', 44, "the idle one did not fall asleep");
        served(&poor, 'f', 0, "free");
        served(&rich, 'c', 7, "its content after that");
        end(&rich, 0);
        end(&poor, 0);
}

/* One process has 40 MiB on each of two devices, taken by these orders, and two others are there, one on each. */
static struct worker start_on_both(const char *orders, struct worker poor[2])
{
        struct worker rich = start(0);

        for (unsigned device = 0; device < 2; device++) {
                served(&rich, 'o', device, "a device");
                served(&rich, orders[device], 40, "memory of it");
                poor[device] = start(0);
                served(&poor[device], 'o', device, "a device of another one");
                served(&poor[device], 'a', 1, "a little of it");
        }
        await_idle(&rich, true);
        return rich;
}

/* Both devices are needed at the same time, and it takes long until memory has left (GRSIM_LATENCY). */
void mode_asleep_devices(void)
{
        struct worker poor[2], rich = start_on_both("aa", poor);

        for (int i = 0; i < 2; i++)
                tell(&poor[i], 'a', 44);
        for (int i = 0; i < 2; i++)
                if (hear(&poor[i]).result != 0)
                        fail("the memory of one device did not leave", i);
        for (int i = 0; i < 2; i++)
                end(&poor[i], 0);
        end(&rich, 0);
}

/* That nothing can leave one device is no work on the other. */
void mode_asleep_other_device(void)
{
        struct worker poor[2], rich = start_on_both("ab", poor);

        refused(&poor[1], 'a', 44, "memory that could not leave was given away");
        served(&poor[0], 'a', 44, "the memory of the other device did not leave");
        for (int i = 0; i < 2; i++)
                end(&poor[i], 0);
        end(&rich, 0);
}

/* One of the two is killed while memory leaves, which takes long (GRSIM_LATENCY). */
void mode_asleep_killed(void)
{
        for (int i = 0; i < 2; i++) {
                struct worker rich = start(0), poor = start(0);

                for (int j = 0; j < 5; j++) /* each leaves by itself */
                        served(&rich, 'a', 8, "the first one");
                served(&rich, 'w', 7, "work");
                await_idle(&rich, true);
                served(&poor, 'a', 8, "a little");
                tell(&poor, 'a', 44);
                while (card_used_bytes() > 40 * MIB)
                        pause_ms(1);
                if (i) {
                        end(&poor, SIGKILL);
                        served(&rich, 'c', 7, "its content, as the other one was killed");
                } else {
                        end(&rich, SIGKILL);
                        if (hear(&poor).result != 0)
                                fail("the memory of a killed sleeper", 0);
                }
                end(i ? &rich : &poor, 0);
                gr_region_close(&region);
        }
        if (!file_gone())
                fail("something is left", 0);
}

/* Those that work keep their memory for a turn, give it up although they go on working, and have it again after one. */
void mode_asleep_turn(void)
{
        struct worker rich = start_with(40, 7), poor;

        refused(&rich, 'a', 44, "more than there is"); /* at once, as it is alone */
        refused(&rich, 'm', 44, "more than there is of memory that the program maps");
        poor = start_with(4, 5);
        refused(&rich, 'a', 26, "more than the other one has");
        tell(&rich, 'r', 3000);
        served(&poor, 'a', 44, "the turn of one that works did not end");
        served(&poor, 'w', 5, "work");
        for (int i = 0; i < 3; i++) {
                tell(&poor, 'r', 2000);
                if (hear(&rich).result != 0)
                        fail("the first could not go on", i);
                tell(&rich, 'r', 2000);
                if (hear(&poor).result != 0)
                        fail("the second could not go on", i);
        }
        if (hear(&rich).result != 0)
                fail("the first could not end", 0);
        if (member_of(&rich).given_bytes < 2 * 40 * MIB || member_of(&poor).given_bytes < 44 * MIB)
                fail("how much the first gave in MiB", (long long)(member_of(&rich).given_bytes / MIB));
        served(&rich, 'c', 7, "its content after that");
        served(&poor, 'c', 5, "the other's content");
        end(&rich, 0);
        end(&poor, 0);
}

/* Each has a part and waits for more than is left: one of them has to give. */
void mode_asleep_turn_parts(void)
{
        struct worker one = start_with(24, 1), two = start_with(24, 2);
        struct worker *both[2] = {&one, &two};

        for (int i = 0; i < 2; i++)
                tell(both[i], 'a', 24);
        for (int i = 0; i < 2; i++)
                if (hear(both[i]).result != 0)
                        fail("they waited for each other", i);
        for (int i = 0; i < 2; i++) {
                served(both[i], 'l', 0, "free");
                served(both[i], 'c', (unsigned)i + 1, "its content");
                end(both[i], 0);
        }
}

/* Also the first turn lasts, but not longer than the process; and nobody waits for what its own limit refuses. */
void mode_asleep_turn_lasts(void)
{
        struct worker rich = start_with(40, 7), poor = start_with(4, 5);

        refused(&rich, 'a', 16, "more than its own limit");
        tell(&poor, 'a', 44);
        for (int i = 0; i < 10; i++) {
                pause_ms(100);
                if (asleep_mib(&rich) != 0)
                        fail("its turn did not last", i);
        }
        end(&rich, 0);
        if (hear(&poor).result != 0)
                fail("it had no memory when the other one had ended", 0);
        end(&poor, 0);
}

/* One that was put to sleep lets another one have its turn first that waited before. */
void mode_asleep_turn_queue(void)
{
        struct worker rich = start_with(40, 7), poor = start(0);

        member_of(&rich); /* opens the region */
        if (gr_region_join(&region, "waits", 1) != 0)
                fail("it cannot join", 0);
        gr_region_waiting(&region, MIB);
        tell(&rich, 'r', 3000);
        served(&poor, 'a', 44, "the turn of one that works did not end");
        end(&poor, 0);
        pause_ms(3000);
        if (asleep_mib(&rich) < 40)
                fail("it passes one that waits", (long long)asleep_mib(&rich));
        gr_region_waiting(&region, -(int64_t)MIB);
        if (hear(&rich).result != 0)
                fail("it could not go on", 0);
        served(&rich, 'c', 7, "its content after that");
        gr_region_leave(&region);
        end(&rich, 0);
}

/*
 * One that begins finds no room even for its context (GRSIM_CONTEXT), until the turn of one that works is over. Nor
 * does one for a second context.
 */
void mode_asleep_turn_begins(void)
{
        struct worker poor = start_with(4, 3), rich = start_with(38, 7), begins = start(0);

        tell(&rich, 'r', 3000);
        served(&poor, 'e', 0, "a second context does not wait");
        if (hear(&rich).result != 0)
                fail("it could not go on after a second context", 0);
        end(&poor, 0);
        served(&rich, 'a', 12, "it cannot have what the other had");
        served(&rich, 'w', 7, "nor fill it");
        tell(&rich, 'r', 3000);
        served(&begins, 'a', 4, "a context does not wait");
        end(&begins, 0);
        if (hear(&rich).result != 0)
                fail("it could not go on", 0);
        served(&rich, 'c', 7, "its content after that");
        end(&rich, 0);
}

/* Others need both devices of a process that works: when its turn is over, both are left, not one in each turn. */
void mode_asleep_turn_devices(void)
{
        struct worker poor[2], rich = start_on_both("aa", poor);

        tell(&rich, 'r', 1000);
        for (int i = 0; i < 2; i++)
                tell(&poor[i], 'a', 44);
        for (int i = 0; i < 2; i++)
                if (hear(&poor[i]).result != 0)
                        fail("the memory of one device did not leave", i);
        for (int i = 0; i < 2; i++)
                end(&poor[i], 0);
        if (hear(&rich).result != 0)
                fail("it could not go on", 0);
        end(&rich, 0);
}
