/* The modes of neighbours.c about limits, of the group and of one process, and about what is charged to the group. */
#include "neighbours_worker.h"

#include "check.h"

#include "system/platform.h"

#include <cuda.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

/* GPURECLAIM_NEIGHBOUR=0 with a group limit: it holds for each alone. */
void mode_apart(void)
{
        struct worker one = start(0), two = start(0);

        if (ask(&one, 'a', LIMIT_MIB - 100).result != 0 || ask(&two, 'a', LIMIT_MIB - 100).result != 0)
                fail("the other process counts", 0);
        ask(&one, 'f', 0);
        if (ask(&one, 'a', LIMIT_MIB + 100).result != CUDA_ERROR_OUT_OF_MEMORY)
                fail("the limit does not hold", 0);
        end(&one, 0);
        end(&two, 0);
}

/* As many as fit in turn, under a common limit: none fails for long, and never is it passed. */
void mode_group(void)
{
        struct worker workers[6];
        unsigned refused = 0, served = 0;
        uint64_t most = 0;

        for (int i = 0; i < 6; i++)
                workers[i] = start(0);
        for (int i = 0; i < 6; i++)
                ask(&workers[i], 'a', 1);
        if (ask(&workers[0], 'g', 0).result != (int)LIMIT_MIB)
                fail("the card's size as told", ask(&workers[0], 'g', 0).result);
        for (int round = 0; round < 60; round++) {
                for (int i = 0; i < 6; i++)
                        tell(&workers[i], 'a', 50 + (unsigned)(round * 7 + i * 13) % 40);
                for (int i = 0; i < 6; i++) {
                        struct reply reply = hear(&workers[i]);
                        uint64_t sum = card_used_bytes();

                        if (sum > LIMIT_MIB * MIB)
                                fail("the limit was passed", (long long)(sum / MIB));
                        most = sum > most ? sum : most;
                        served += reply.result == 0;
                        refused += reply.result != 0;
                        if (reply.ms > CALL_MS)
                                fail("a call took too long", (long long)reply.ms);
                }
                for (int i = 0; i < 6; i++)
                        if ((round + i) % 2)
                                ask(&workers[i], 'f', 0);
        }
        printf("~ under a limit of %u MiB: most %llu MiB, %u served, %u refused\n", LIMIT_MIB,
               (unsigned long long)(most / MIB), served, refused);
        if (served < 180)
                fail("too few were served", served);
        /* A killed one's share comes back. */
        for (int i = 0; i < 6; i++)
                ask(&workers[i], 'f', 0);
        if (ask(&workers[0], 'a', LIMIT_MIB - 30).result != 0 || ask(&workers[1], 'a', 100).result == 0)
                fail("one cannot have what is free", 0);
        end(&workers[0], SIGKILL);
        if (ask(&workers[1], 'a', LIMIT_MIB - 30).result != 0)
                fail("the share of a killed process is lost", 0);
        for (int i = 1; i < 6; i++)
                end(&workers[i], 0);
}

static int first_ready(struct worker *workers, const bool *awaited, int count)
{
        struct pollfd ready[8];

        for (int i = 0; i < count; i++)
                ready[i] = (struct pollfd){.fd = awaited[i] ? workers[i].from : -1, .events = POLLIN};
        if (poll(ready, (nfds_t)count, 20 * CALL_MS) <= 0)
                fail("all wait", count);
        for (int i = 0; i < count; i++)
                if (ready[i].revents)
                        return i;
        return -1;
}

/* Phases of which only one fits at a time: each starts when the one before has let go, and none fails. */
void mode_phases(void)
{
        struct worker workers[6];
        double begin = now_ms();

        for (int i = 0; i < 6; i++)
                workers[i] = start(0);
        for (int round = 0; round < 3; round++) {
                bool awaited[6];

                for (int i = 0; i < 6; i++) {
                        tell(&workers[i], 'a', LIMIT_MIB / 2 + 20);
                        awaited[i] = true;
                }
                for (int left = 6; left > 0; left--) {
                        int i = first_ready(workers, awaited, 6);
                        struct reply reply = hear(&workers[i]);

                        if (reply.result != 0)
                                fail("a phase failed", reply.result);
                        if (card_used_bytes() > LIMIT_MIB * MIB)
                                fail("two phases at once", (long long)(card_used_bytes() / MIB));
                        awaited[i] = false;
                        ask(&workers[i], 'f', 0);
                }
        }
        printf("~ 18 phases, one after the other, in %.0f ms\n", now_ms() - begin);
        for (int i = 0; i < 6; i++)
                end(&workers[i], 0);
}

/* A request as others put it, until it is answered. */
static void put(struct worker *worker, struct gr_region *region, const struct gr_request *request)
{
        struct gr_patience patience = {gr_platform_now_ns(), UINT64_C(5000000000), UINT64_MAX};
        struct gr_member member;

        for (unsigned i = 0; i < GR_REGION_SLOTS; i++) {
                if (gr_region_read(region, i, &member) != 0 || member.identity.pid != (uint32_t)worker->pid)
                        continue;
                if (!gr_region_await(region, i, member.owner, gr_region_request(region, i, request), &patience))
                        fail("a request is not answered", i);
                /* The last word of an order stands in the slot for good, an order or not. */
                atomic_store(&region->map->slots[i].new_limit, 64 * MIB);
                return;
        }
        fail("the worker is no member", worker->pid);
}

/* The worker's limit afterwards, in MiB. */
static int limit_after(struct worker *worker, struct gr_region *region, const struct gr_request *request)
{
        put(worker, region, request);
        return ask(worker, 'g', 0).result;
}

/* Only an order changes a limit, and none ends what the program may have. What pools took before it counts. */
void mode_orders(void)
{
        static struct gr_region region;
        struct worker worker = start(0);

        if (ask(&worker, 'a', 100).result != 0 || ask(&worker, 'q', 200).result != 0 || !open_region(&region))
                fail("no region", 0);
        put(&worker, &region, &(struct gr_request){.orders = GR_ORDER_LIMIT, .new_limit = 400 * MIB});
        if (ask(&worker, 'a', 200).result != 0 || card_used_bytes() > 400 * MIB)
                fail("the limit was passed", (long long)(card_used_bytes() / MIB));
        if (limit_after(&worker, &region, &(struct gr_request){.orders = GR_ORDER_LIMIT, .new_limit = 500 * MIB}) !=
            500)
                fail("an order does not change the limit", 0);
        if (ask(&worker, 't', 0).result != 500 || ask(&worker, 'g', 0).result != 500)
                fail("the device is not as large as its new limit", 0);
        if (limit_after(&worker, &region, &(struct gr_request){.orders = GR_ORDER_REFRESH}) != 500)
                fail("what is no order changes the limit", 0);
        if (limit_after(&worker, &region, &(struct gr_request){.want_bytes = MIB}) != 500)
                fail("being asked for memory changes the limit", 0);
        if (limit_after(&worker, &region, &(struct gr_request){.orders = GR_ORDER_LIMIT}) != 500)
                fail("a limit of nothing is taken", 0);
        gr_region_close(&region);
        end(&worker, 0);
}

/* Until the worker says so of itself. */
static void await_figure(struct gr_region *region, struct worker *worker, enum gr_figure figure, uint64_t value)
{
        double begin = now_ms();
        struct gr_member member;

        for (;;) {
                for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                        if (gr_region_read(region, i, &member) == 0 && member.identity.pid == (uint32_t)worker->pid &&
                            member.figures[figure] == value)
                                return;
                if (now_ms() - begin > 2 * CALL_MS)
                        fail("what it says of itself, figure", figure);
                pause_ms(10);
        }
}

/* One that could not open the region for a moment joins later, with all that it has. */
void mode_late_files(void)
{
        static struct gr_region region;
        struct worker one = start(0), two = start(0);

        if (ask(&one, 'n', 0).result != 0 || ask(&one, 'a', 200).result != 0 || ask(&one, 'a', 100).result != 0)
                fail("without files it cannot work", 0);
        if (ask(&one, 'a', 300).result != CUDA_ERROR_OUT_OF_MEMORY)
                fail("alone it has more than all may have", 0);
        if (ask(&one, 'g', 0).result != 512)
                fail("the card's size as told", ask(&one, 'g', 0).result);
        if (ask(&two, 'a', 150).result != 0)
                fail("the second cannot work", 0);
        await_members(&region, 1);
        gr_region_close(&region);
        ask(&one, 'n', 1);
        await_members(&region, 2);
        await_figure(&region, &one, GR_FIGURE_live, 300 * MIB);
        await_figure(&region, &one, GR_FIGURE_group_limit, 512 * MIB);
        await_figure(&region, &one, GR_FIGURE_device_total, CARD_MIB * MIB);
        await_figure(&region, &two, GR_FIGURE_live, 150 * MIB);
        if (gr_region_sum(&region, false) != 450 * MIB)
                fail("what is charged when it joins, in MiB", (long long)(gr_region_sum(&region, false) / MIB));
        if (ask(&two, 'a', 100).result != CUDA_ERROR_OUT_OF_MEMORY || ask(&two, 'a', 62).result != 0)
                fail("the limit of all, once they are", 0);
        ask(&one, 'f', 0);
        if (ask(&two, 'a', 250).result != 0)
                fail("what one has cached is not given after that", 0);
        if (gr_region_sum(&region, false) > 512 * MIB || card_used_bytes() > 512 * MIB)
                fail("the limit was passed", 0);
        ask(&two, 'f', 0);
        end(&two, 0);
        end(&one, 0);
        if (gr_region_sum(&region, false) != 0 || !file_gone())
                fail("something is left", 0);
}

/* Holds a charge of so many MiB of mapped memory in its middle. */
static void hold_charge(struct worker *worker, unsigned mib)
{
        ask(worker, 'd', 0);
        tell(worker, 'm', mib);
        hear(worker);
}

static void charge_goes_on(struct worker *worker, unsigned sum_mib)
{
        static struct gr_region region;

        await_members(&region, 1);
        tell(worker, 'd', 0);
        if (hear(worker).result != 0 || gr_region_sum(&region, false) != sum_mib * MIB)
                fail("what is charged in the middle of a charge, in MiB",
                     (long long)(gr_region_sum(&region, false) / MIB));
        gr_region_close(&region);
}

/* What is being charged while its process joins, or joins again, counts once. */
void mode_charges(void)
{
        struct worker worker = start(0);
        struct rlimit files;

        if (getrlimit(RLIMIT_NOFILE, &files) || ask(&worker, 'n', 0).result != 0 || ask(&worker, 'm', 100).result != 0)
                fail("without files it cannot work", errno);
        hold_charge(&worker, 200);
        if (prlimit(worker.pid, RLIMIT_NOFILE, &files, NULL))
                fail("no files for it", errno);
        charge_goes_on(&worker, 300);
        hold_charge(&worker, 50);
        empty_file();
        charge_goes_on(&worker, 350);
        end(&worker, 0);
}

/* Two processes, of which one takes memory after the other in this way: the limit is one for both. */
static void take_in_turn(char how)
{
        struct worker one = start(0), two = start(0);

        if (ask(&one, how, 300).result != 0)
                fail("the first cannot work", 0);
        if (ask(&two, how, 300).result != CUDA_ERROR_OUT_OF_MEMORY)
                fail("two have more than their limit together", 0);
        if (ask(&two, how, 200).result != 0)
                fail("what the limit leaves is refused", 0);
        end(&one, 0);
        end(&two, 0);
}

/* What needs no context counts for the group as well, from the first byte. */
void mode_created(void)
{
        take_in_turn('m');
}

/* Where no folder is named processes find each other all the same. */
void mode_default_dir(void)
{
        take_in_turn('a');
}

/* Processes that begin at once, where there is no region yet or the last one's members were killed. */
void mode_at_once(void)
{
        struct worker workers[4];
        unsigned served = 0;

        for (int round = 0; round < 100; round++) {
                for (int i = 0; i < 4; i++)
                        workers[i] = start(0);
                for (int i = 0; i < 4; i++)
                        tell(&workers[i], round % 4 < 2 ? 'a' : 'm', LIMIT_MIB / 2 + 20);
                for (int i = 0; i < 4; i++)
                        served += hear(&workers[i]).result == 0;
                if (card_used_bytes() > LIMIT_MIB * MIB)
                        fail("the limit was passed", (long long)(card_used_bytes() / MIB));
                for (int i = 0; i < 4; i++)
                        end(&workers[i], round % 2 ? SIGKILL : 0);
        }
        printf("~ of 100 times that 4 processes began at once, %u served\n", served);
        if (served > 100 || served < 50)
                fail("too few or too many were served", served);
}
