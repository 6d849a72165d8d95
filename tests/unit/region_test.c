/* The region: its layout, its slots and the accounts in them, and what its members do to each other. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "region_scripted.h"

static void test_layout(void)
{
#define AT(type, field, offset) GR_CHECK_EQ(offsetof(struct type, field), offset)
        AT(gr_region_map, magic, 0);
        AT(gr_region_map, version, 8);
        AT(gr_region_map, slot_count, 12);
        AT(gr_region_map, slot_bytes, 16);
        AT(gr_region_map, size_bytes, 24);
        AT(gr_region_map, cookie, 32);
        AT(gr_region_ticket, magic, 0);
        AT(gr_region_ticket, version, 8);
        AT(gr_region_ticket, segment, 12);
        AT(gr_region_ticket, ipc_namespace, 16);
        AT(gr_region_ticket, cookie, 24);
        AT(gr_region_ticket, check, 32);
        AT(gr_region_map, owners, 64);
        AT(gr_region_map, accounts, 64 + 4096);
        AT(gr_region_map, slots, 64 + 8192);
        GR_CHECK_EQ(sizeof(struct gr_region_map), 64 + 8192 + 512 * 320);
        AT(gr_slot, request, 0);
        AT(gr_slot, answer, 4);
        AT(gr_slot, orders, 8);
        AT(gr_slot, rung, 12);
        AT(gr_slot, want_bytes, 16);
        AT(gr_slot, given_bytes, 24);
        AT(gr_slot, new_limit, 32);
        AT(gr_slot, new_threshold, 40);
        AT(gr_slot, heartbeat_ns, 48);
        AT(gr_slot, active_ns, 56);
        AT(gr_slot, start_ticks, 64);
        AT(gr_slot, pid_namespace, 72);
        AT(gr_slot, pid, 80);
        AT(gr_slot, share, 84);
        AT(gr_slot, sleep_from_ns, 88);
        AT(gr_slot, name, 96);
        AT(gr_slot, figures, 128);
        AT(gr_slot, deep_refusal, 312);
#undef AT
        GR_CHECK_EQ(sizeof(struct gr_slot), 320);
        GR_CHECK_EQ(GR_FIGURE_device_total, 0);
        GR_CHECK_EQ(GR_FIGURE_device_free, 1);
        GR_CHECK_EQ(GR_FIGURE_hard_limit, 2);
        GR_CHECK_EQ(GR_FIGURE_release_threshold, 3);
        GR_CHECK_EQ(GR_FIGURE_group_limit, 4);
        GR_CHECK_EQ(GR_FIGURE_live, 5);
        GR_CHECK_EQ(GR_FIGURE_cached, 6);
        GR_CHECK_EQ(GR_FIGURE_peak_reserved, 7);
        GR_CHECK_EQ(GR_FIGURE_waiting, 8);
        GR_CHECK_EQ(GR_FIGURE_driver, 9);
        GR_CHECK_EQ(GR_FIGURE_imported, 10);
        GR_CHECK_EQ(GR_FIGURE_executables, 11);
        GR_CHECK_EQ(GR_FIGURE_executable, 12);
        GR_CHECK_EQ(GR_FIGURE_graph, 13);
        GR_CHECK_EQ(GR_FIGURE_asleep, 14);
        GR_CHECK_EQ(GR_FIGURE_last_sleep, 15);
        GR_CHECK_EQ(GR_FIGURE_last_wake, 16);
        GR_CHECK_EQ(GR_FIGURE_asleep_deep, 17);
        GR_CHECK_EQ(GR_SHARED_FIGURES, 18);
}

/* Valid magic, everything behind it anything. */
static void test_garbage_inside(void)
{
        struct gr_region *one = join_as(1, "inside");
        struct gr_member member;
        unsigned state = 1;

        for (size_t i = 64; i < sizeof(struct gr_region_map); i++) {
                state = state * 1664525u + 1013904223u;
                ((unsigned char *)one->map)[i] = (unsigned char)(state >> 24);
        }
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                if (gr_region_read(one, i, &member) == 0) {
                        GR_CHECK(member.share >= 1 && member.share <= 1000);
                        GR_CHECK(strlen(member.name) < sizeof(member.name));
                        for (int j = 0; j < GR_SHARED_FIGURES; j++)
                                GR_CHECK(member.figures[j] == UINT64_MAX || member.figures[j] < UINT64_C(1) << 62);
                }
        gr_region_sum(one, false);
        gr_region_ask(one, MIB, 1000000, false);
        now_ns += UINT64_C(20000000000);
        gr_region_sweep(one);
        GR_CHECK_EQ(used_slots(one), 0);
        GR_CHECK(!gr_region_member(one));
        GR_CHECK_EQ(gr_region_reserve(one, 1, UINT64_MAX), -ENOTCONN);
        GR_CHECK_EQ(gr_region_join(one, "again", 1), 0);
        drop(one);
}

static void test_slots(void)
{
        struct gr_region *one = join_as(1, "slots"), *two = join_as(2, "slots"), *three;
        struct gr_member member;
        char path[256];

        GR_CHECK(one->slot != two->slot);
        GR_CHECK(gr_region_member(one) && gr_region_member(two));
        GR_CHECK_EQ(gr_region_read(one, (unsigned)two->slot, &member), 0);
        GR_CHECK_EQ(member.identity.pid, 2);
        GR_CHECK_EQ(member.identity.start_ticks, 1002);
        GR_CHECK_STR(member.name, "test");
        GR_CHECK(member.same_namespace);

        die(two);
        GR_CHECK_EQ(used_slots(one), 2);
        GR_CHECK_EQ(gr_region_sweep(one), 1);
        GR_CHECK_EQ(used_slots(one), 1);

        /* The same pid, started at another time. */
        two = join_as(2, "slots");
        three = calloc(1, sizeof(*three));
        GR_CHECK_EQ(gr_region_open(three, &ops, &(struct gr_identity){2, 77, 4026531836}, dir, "slots", true), 0);
        GR_CHECK_EQ(gr_region_join(three, "reused", 1), 0);
        GR_CHECK_EQ(gr_region_sweep(one), 1);
        GR_CHECK(gr_region_member(two) && !gr_region_member(three));
        gr_region_close(three);

        /* Of another pid namespace: only its heartbeat tells. */
        GR_CHECK_EQ(gr_region_open(three, &ops, &(struct gr_identity){9, 1, 4026531999}, dir, "slots", true), 0);
        GR_CHECK_EQ(gr_region_join(three, "container", 1), 0);
        now_ns += UINT64_C(9000000000);
        GR_CHECK_EQ(gr_region_sweep(one), 0);
        gr_region_publish(three, NULL, false);
        now_ns += UINT64_C(10000000000);
        GR_CHECK_EQ(gr_region_sweep(one), 0);
        three->map->slots[three->slot].heartbeat_ns = 0; /* it has just claimed the slot */
        GR_CHECK_EQ(gr_region_sweep(one), 0);
        gr_region_publish(three, NULL, false);
        now_ns += UINT64_C(10000000001);
        GR_CHECK_EQ(gr_region_sweep(one), 1);
        gr_region_close(three);
        free(three);

        /* Together they find the dead, each looking after the next one. */
        for (uint32_t pid = 3; pid < 20; pid++)
                die(join_as(pid, "slots"));
        GR_CHECK(used_slots(one) > 10);
        gr_region_look_after_next(one);
        gr_region_look_after_next(two);
        GR_CHECK_EQ(used_slots(one), 2);
        three = join_at(3, "slots", 100);
        die(join_at(4, "slots", 99));
        die(join_at(5, "slots", 101));
        gr_region_look_after_next(one);
        GR_CHECK_EQ(used_slots(one), 4); /* only as far as to the next one that lives */
        gr_region_look_after_next(three);
        GR_CHECK_EQ(used_slots(one), 3);
        drop(three);

        /* The last one closes the door; a file that was removed is noticed. */
        snprintf(path, sizeof(path), "%s/slots", dir);
        drop(two);
        GR_CHECK_EQ(access(path, F_OK), 0);
        unlink(path);
        GR_CHECK(!gr_region_member(one));
        GR_CHECK_EQ(gr_region_join(one, "test", 1), -ESTALE);
        gr_region_close(one);
        GR_CHECK_EQ(open_as(one, 1, "slots"), 0);
        GR_CHECK_EQ(gr_region_join(one, "test", 1), 0);
        drop(one);
        GR_CHECK(access(path, F_OK) != 0);
}

static void test_full(void)
{
        struct gr_region *one = join_as(1, "full"), *two = calloc(1, sizeof(*two));
        uint64_t accounted = UINT64_C(1) << 40 | 7;

        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                if ((int)i != one->slot) {
                        one->map->owners[i] = accounted;
                        one->map->slots[i].heartbeat_ns = now_ns;
                }
        GR_CHECK_EQ(open_as(two, 2, "full"), 0);
        GR_CHECK_EQ(gr_region_join(two, "late", 1), -EUSERS);
        GR_CHECK_EQ(two->slot, -1);
        /* Whichever slot is the only free one is found; one of a process that is gone is free. */
        peers[9] = GR_PROCESS_GONE;
        for (int i = 1; i < GR_REGION_SLOTS; i++) {
                uint64_t word = one->map->owners[i];

                one->map->owners[i] = i % 2 ? 0 : (one->token & ~UINT64_C(0x3fffff)) | 9;
                GR_CHECK_EQ(gr_region_join(two, "late", 1), 0);
                GR_CHECK_EQ(two->slot, i);
                gr_region_leave(two);
                GR_CHECK_EQ(used_slots(one), GR_REGION_SLOTS - 1);
                one->map->owners[i] = word;
        }
        now_ns += UINT64_C(11000000000);
        GR_CHECK_EQ(gr_region_join(two, "late", 1), 0);
        drop(two);
        drop(one);
}

static void test_accounts(void)
{
        struct gr_region *one = join_as(1, "accounts"), *two = join_as(2, "accounts");

        GR_CHECK_EQ(gr_region_reserve(one, 3 * GIB, 4 * GIB), 0);
        GR_CHECK_EQ(gr_region_reserve(two, 2 * GIB, 4 * GIB), -EDQUOT);
        GR_CHECK_EQ(gr_region_sum(one, false), 3 * GIB);
        GR_CHECK_EQ(gr_region_reserve(two, GIB, 4 * GIB), 0);
        GR_CHECK_EQ(gr_region_sum(one, true), GIB);
        gr_region_adjust(one, -(int64_t)GIB);
        GR_CHECK_EQ(gr_region_sum(two, false), 3 * GIB);

        /* A dead one's share is there again, and only once: also for those who looked at the same time. */
        die(one);
        GR_CHECK_EQ(gr_region_reserve(two, 3 * GIB, 4 * GIB), 0);
        GR_CHECK_EQ(gr_region_sum(two, false), 4 * GIB);
        GR_CHECK_EQ(gr_region_reserve(two, 1, 4 * GIB), -EDQUOT);
        die(join_at(3, "accounts", 100));
        one = join_as(1, "accounts"); /* looks at nobody, as there was a free slot */
        GR_CHECK_EQ(used_slots(one), 3);
        GR_CHECK_EQ(gr_region_sum(one, false), 4 * GIB);
        drop(two);
        GR_CHECK_EQ(gr_region_sum(one, false), 0);
        drop(one);
}

/* Another process takes the slot of one that it thinks gone, and that is about to charge its account once more. */
static struct gr_region *loser, *taker;

static void wait_and_lose(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
        int slot = loser->slot;

        (void)word;
        (void)seen;
        (void)timeout_ns;
        for (int i = 0; i < GR_REGION_SLOTS; i++)
                loser->map->owners[i] = i == slot ? 0 : 1; /* the only free one */
        taker = join_as(3, "lost");
        GR_CHECK_EQ(taker->slot, slot);
}

static void test_lost_slot(void)
{
        struct gr_region_ops losing = ops;
        struct gr_region *dead, *again;

        losing.wait = wait_and_lose;
        loser = join_as(1, "lost");
        GR_CHECK_EQ(gr_region_reserve(loser, GIB, 4 * GIB), 0);
        dead = join_as(2, "lost");
        GR_CHECK_EQ(gr_region_reserve(dead, 3 * GIB, 4 * GIB), 0);
        die(dead);
        loser->ops = &losing;
        GR_CHECK_EQ(gr_region_reserve(loser, 2 * GIB, 4 * GIB), -ENOTCONN);
        loser->ops = &ops;
        for (int i = 0; i < GR_REGION_SLOTS; i++)
                if (i != taker->slot)
                        taker->map->owners[i] = 0;
        GR_CHECK_EQ(gr_region_sum(taker, false), 0);

        /*
         * What is charged or given back meanwhile goes to the next membership, with what was charged before; likewise
         * what it waits for.
         */
        gr_region_adjust(loser, 512 * (int64_t)MIB);
        gr_region_adjust(loser, -256 * (int64_t)MIB);
        GR_CHECK_EQ(gr_region_sum(taker, false), 0);
        gr_region_waiting(loser, 3);
        gr_region_waiting(loser, -1);
        GR_CHECK_EQ(taker->map->slots[taker->slot].figures[GR_FIGURE_waiting], 0);
        again = join_as(1, "lost");
        gr_region_carry(again, loser);
        GR_CHECK_EQ(gr_region_sum(taker, true), GIB + 256 * MIB);
        GR_CHECK_EQ(again->map->slots[again->slot].figures[GR_FIGURE_waiting], 2);
        gr_region_close(loser);
        free(loser);

        /* A view that is late, of the same process. */
        loser = again;
        gr_region_let_first(loser); /* from then on nobody sees that it waits */
        again->map->owners[again->slot] = 0;
        again = join_as(1, "lost");
        GR_CHECK_EQ(again->slot, loser->slot);
        gr_region_adjust(loser, GIB);
        GR_CHECK_EQ(gr_region_sum(taker, true), 0);
        gr_region_carry(again, loser);
        GR_CHECK_EQ(again->map->slots[again->slot].figures[GR_FIGURE_waiting], 0);
        GR_CHECK_EQ(gr_region_sum(taker, true), 2 * GIB + 256 * MIB);
        gr_region_adjust(again, -(int64_t)(2 * GIB + 256 * MIB));
        GR_CHECK_EQ(gr_region_sum(taker, false), 0);
        gr_region_adjust(again, -(int64_t)MIB); /* a release counts before its charge */
        GR_CHECK_EQ(gr_region_sum(taker, false), 0);
        gr_region_adjust(again, (int64_t)MIB);
        GR_CHECK_EQ(gr_region_sum(taker, false), 0);
        gr_region_close(loser);
        free(loser);
        drop(again);
        drop(taker);
}

static _Atomic uint64_t *claimed_heartbeat;
static uint64_t seen_heartbeat;

static uint64_t now_at_claim(void)
{
        seen_heartbeat = *claimed_heartbeat;
        return now_ns;
}

/* Who claims a slot takes over nothing of its last owner. */
static void test_claim(void)
{
        struct gr_region_ops looking = ops;
        struct gr_region *one = join_as(1, "claim"), *two = calloc(1, sizeof(*two));
        char name[64] = "a name of more than thirty-one characters";
        struct {
                struct gr_member member;
                uint64_t behind;
        } room = {.behind = 4711};
        struct gr_request request;
        struct gr_member member;
        struct gr_slot *slot;

        GR_CHECK_EQ(open_as(two, 2, "claim"), 0);
        for (int i = 1; i < GR_REGION_SLOTS; i++) {
                memset(&two->map->slots[i], 5, sizeof(*slot));
                two->map->slots[i].rung = 3;
                two->map->accounts[i] = UINT64_C(0x0505050505050505);
                two->map->owners[i] = i < GR_REGION_SLOTS - 1;
        }
        slot = &two->map->slots[GR_REGION_SLOTS - 1];
        looking.now_ns = now_at_claim;
        claimed_heartbeat = &slot->heartbeat_ns;
        two->ops = &looking;
        seen_heartbeat = 1;
        now_ns += 3;
        GR_CHECK_EQ(gr_region_join(two, name, 1000), 0);
        two->ops = &ops;
        GR_CHECK_EQ(two->slot, GR_REGION_SLOTS - 1);
        GR_CHECK_EQ(seen_heartbeat, 0); /* it had none until all was written */
        for (int i = 1; i < GR_REGION_SLOTS - 1; i++)
                two->map->owners[i] = 0;
        GR_CHECK(!gr_region_take(two, &request));
        GR_CHECK_EQ(gr_region_read(one, GR_REGION_SLOTS - 1, &member), 0);
        GR_CHECK_EQ(gr_region_read(one, GR_REGION_SLOTS, &member), -ENOENT);
        GR_CHECK(gr_region_read(one, GR_REGION_SLOTS - 1, &room.member) == 0 && room.behind == 4711);
        GR_CHECK_EQ(member.slot, GR_REGION_SLOTS - 1);
        GR_CHECK_EQ(member.owner, two->token);
        GR_CHECK_EQ(slot->pid, 2);
        GR_CHECK_EQ(member.identity.start_ticks, 1002);
        GR_CHECK_EQ(member.identity.pid_namespace, two->self.pid_namespace);
        GR_CHECK_EQ(member.share, 1000);
        GR_CHECK_EQ(member.reserved_bytes, 0);
        GR_CHECK_EQ(member.heartbeat_ns, now_ns);
        GR_CHECK_EQ(member.active_ns, now_ns);
        GR_CHECK_EQ(slot->name[GR_REGION_NAME_BYTES / 8 - 1] >> 56, 0);
        name[GR_REGION_NAME_BYTES - 1] = '\0';
        GR_CHECK_STR(member.name, name);
        for (int i = 0; i < GR_SHARED_FIGURES; i++)
                GR_CHECK_EQ(member.figures[i], i == GR_FIGURE_driver ? UINT64_MAX : 0);
        gr_region_request(one, GR_REGION_SLOTS - 1, &(struct gr_request){0});
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK(request.orders == 0 && request.rung == 0 && request.want_bytes == 0);
        gr_region_answer(two, &request, 0);

        /* What is in a slot is read with care: a share that may divide, names that may be shown. */
        slot->share = 0;
        GR_CHECK(gr_region_read(one, GR_REGION_SLOTS - 1, &member) == 0 && member.share == 1);
        slot->share = 1001;
        GR_CHECK(gr_region_read(one, GR_REGION_SLOTS - 1, &member) == 0 && member.share == 1);
        slot->figures[0] = UINT64_C(1) << 62;
        slot->figures[1] = (UINT64_C(1) << 62) - 1;
        memcpy(name, "a b\x1f\x7e\x7f\xc3", 8);
        memcpy((void *)slot->name, name, 8);
        GR_CHECK_EQ(gr_region_read(one, GR_REGION_SLOTS - 1, &member), 0);
        GR_CHECK_EQ(member.figures[0], 0);
        GR_CHECK_EQ(member.figures[1], (UINT64_C(1) << 62) - 1);
        GR_CHECK_STR(member.name, "a b?~??");
        drop(two);
        two = calloc(1, sizeof(*two));
        GR_CHECK_EQ(open_as(two, 2, "claim"), 0);
        GR_CHECK_EQ(gr_region_join(two, "", 1), 0);
        GR_CHECK_EQ(gr_region_read(one, (unsigned)two->slot, &member), 0);
        GR_CHECK_STR(member.name, "");
        drop(two);
        drop(one);
}

static void test_publish(void)
{
        struct gr_region *one = join_as(1, "publish"), *two = join_as(2, "publish");
        uint64_t figures[GR_SHARED_FIGURES], joined = now_ns;
        struct gr_member member;

        for (uint64_t i = 0; i < GR_SHARED_FIGURES; i++)
                figures[i] = 100 + i;
        gr_region_waiting(one, 7);
        for (int changed = 0; changed < 2; changed++) {
                now_ns += 5;
                gr_region_publish(one, figures, changed);
                GR_CHECK_EQ(gr_region_read(two, 0, &member), 0);
                GR_CHECK_EQ(member.heartbeat_ns, now_ns);
                GR_CHECK_EQ(member.active_ns, changed ? now_ns : joined);
        }
        for (uint64_t i = 0; i < GR_SHARED_FIGURES; i++)
                GR_CHECK_EQ(member.figures[i], i == GR_FIGURE_waiting ? 7 : 100 + i);
        /* What a process that is gone was waiting for, nobody waits for any more. */
        GR_CHECK(gr_region_awaited(two));
        die(one);
        gr_region_sweep(two);
        GR_CHECK(!gr_region_awaited(two));
        drop(two);
}

/* A process that is no member, or no longer, changes nothing of the region. */
static void test_no_slot(void)
{
        static struct gr_region_map before;
        struct gr_region *one = join_at(1, "none", 200), *lost = join_as(2, "none"), *dead = join_at(3, "none", 0);
        uint64_t figures[GR_SHARED_FIGURES] = {1, 2, 3};
        struct gr_request request = {.sequence = 4711};
        struct gr_region never;

        GR_CHECK_EQ(open_as(&never, 4, "none"), 0);
        gr_region_waiting(one, MIB); /* so that whoever looks has somebody to see */
        peers[3] = GR_PROCESS_GONE;
        one->map->owners[lost->slot] = identity(9).pid; /* another one's by now */
        gr_region_request(one, (unsigned)lost->slot, &(struct gr_request){.want_bytes = GIB});
        memcpy(&before, (void *)one->map, sizeof(before));
        for (int i = 0; i < 2; i++) {
                struct gr_region *none = i ? lost : &never;

                gr_region_publish(none, figures, true);
                gr_region_look_after_next(none);
                gr_region_adjust(none, (int64_t)GIB);
                GR_CHECK_EQ(gr_region_reserve(none, GIB, UINT64_MAX), -ENOTCONN);
                GR_CHECK(!gr_region_take(none, &request));
                GR_CHECK(!gr_region_member(none));
        }
        gr_region_waiting(&never, (int64_t)GIB);
        gr_region_wake_self(&never);
        gr_region_answer(&never, &request, GIB);
        GR_CHECK_EQ(gr_region_seen(&never), 0);
        gr_region_wait(&never, 0, 5);
        GR_CHECK_EQ(gr_region_ask(&never, GIB, 100, false), 0);
        gr_region_leave(&never);
        GR_CHECK_EQ(memcmp(&before, (void *)one->map, sizeof(before)), 0);
        gr_region_close(&never);
        one->map->owners[lost->slot] = 0;
        gr_region_close(lost);
        free(lost);
        die(dead);
        drop(one);
}

/* Two threads of one process charge and release its account at once: no byte is lost. */
#define CHARGES 3000000

static pthread_barrier_t together;

static void *charge(void *arg)
{
        pthread_barrier_wait(&together);
        for (int i = 0; i < CHARGES; i++)
                gr_region_adjust(arg, 4096);
        return NULL;
}

static void test_two_threads(void)
{
        struct gr_region *one = join_as(1, "threads");
        pthread_t thread;

        pthread_barrier_init(&together, NULL, 2);
        pthread_create(&thread, NULL, charge, one);
        charge(one);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(gr_region_sum(one, false), (uint64_t)2 * CHARGES * 4096);
        pthread_barrier_destroy(&together);
        drop(one);
}

/* Behind the last owner lies the first account, which is no owner, whatever it holds. */
static void test_behind_owners(void)
{
        struct gr_region *one = join_as(1, "behind"), *two = join_as(2, "behind");
        struct gr_region *nine = join_as(9, "behind");
        uint64_t token = nine->token;
        char path[256];

        drop(nine);
        snprintf(path, sizeof(path), "%s/behind", dir);
        one->map->accounts[0] = token;
        peers[9] = GR_PROCESS_GONE;
        gr_region_request(two, 0, &(struct gr_request){0});
        GR_CHECK_EQ(gr_region_sweep(one), 0);
        GR_CHECK_EQ(gr_region_sum(one, true), 0);
        GR_CHECK_EQ(one->map->accounts[0], token);
        /* The first slot is looked at, too. */
        one->map->owners[0] = token;
        gr_region_waiting(two, MIB);
        gr_region_sweep(two);
        one->map->owners[0] = token;
        one->map->slots[0].heartbeat_ns = 0;
        GR_CHECK_EQ(gr_region_sweep_again(two), 1);
        GR_CHECK_EQ(one->map->accounts[0], token);
        peers[9] = GR_PROCESS_ALIVE;
        gr_region_close(one);
        free(one);
        drop(two);
        GR_CHECK(access(path, F_OK) != 0);
        peers[9] = GR_PROCESS_GONE;
}

static unsigned refusals;

/* Each time that this process waits, another one has died that still had all of the limit. */
static void die_once_more(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
        struct gr_region *full = join_at(3, "tries", 200);

        (void)word, (void)seen, (void)timeout_ns;
        refusals++;
        gr_region_adjust(full, (int64_t)GIB);
        die(full);
}

/* The tries have an end. */
static void test_tries(void)
{
        struct gr_region_ops dying = ops;
        struct gr_region *one = join_as(1, "tries");

        dying.wait = die_once_more;
        one->ops = &dying;
        die_once_more(NULL, 0, 0);
        GR_CHECK_EQ(gr_region_reserve(one, MIB, GIB), -EDQUOT);
        GR_CHECK(refusals > 2);
        one->ops = &ops;
        GR_CHECK_EQ(gr_region_sweep(one), 1);
        GR_CHECK_EQ(gr_region_sum(one, false), 0);
        drop(one);
}

#define RACERS 4
#define ROUNDS 2000

static struct gr_region *racers[RACERS];
static _Atomic uint64_t held, most, served;

static void quick_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
        (void)word;
        (void)seen;
        usleep((useconds_t)(timeout_ns / 1000));
}

static void *race(void *arg)
{
        struct gr_region *region = arg;

        for (int i = 0; i < ROUNDS; i++) {
                uint64_t now, seen;

                if (gr_region_reserve(region, GIB, 2 * GIB) != 0)
                        continue;
                now = atomic_fetch_add(&held, GIB) + GIB;
                seen = atomic_load(&most);
                while (seen < now && !atomic_compare_exchange_weak(&most, &seen, now))
                        ;
                atomic_fetch_add(&served, 1);
                atomic_fetch_sub(&held, GIB);
                gr_region_adjust(region, -(int64_t)GIB);
        }
        return NULL;
}

static void test_race(void)
{
        static struct gr_region_ops quick_ops;
        pthread_t threads[RACERS];

        quick_ops = ops;
        quick_ops.wait = quick_wait;
        for (uint32_t i = 0; i < RACERS; i++) {
                racers[i] = join_as(i + 1, "race");
                racers[i]->ops = &quick_ops;
        }
        for (int i = 0; i < RACERS; i++)
                pthread_create(&threads[i], NULL, race, racers[i]);
        for (int i = 0; i < RACERS; i++)
                pthread_join(threads[i], NULL);
        GR_CHECK(most <= 2 * GIB);
        GR_CHECK(served > ROUNDS);
        GR_CHECK_EQ(gr_region_sum(racers[0], false), 0);
        for (int i = 0; i < RACERS; i++)
                drop(racers[i]);
}

int main(void)
{
        region_begin();
        test_layout();
        test_claim();
        test_publish();
        test_no_slot();
        test_two_threads();
        test_tries();
        test_behind_owners();
        test_garbage_inside();
        test_slots();
        test_full();
        test_accounts();
        test_lost_slot();
        test_race();
        return region_end();
}
