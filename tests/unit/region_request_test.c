/* What members of the region ask of each other: memory, in which order and with how much patience, and orders. */
#include <errno.h>
#include <malloc.h>

#include "region_scripted.h"

static void publish_cached(struct gr_region *region, uint64_t cached, uint64_t active_ns)
{
        uint64_t figures[GR_SHARED_FIGURES] = {[GR_FIGURE_cached] = cached};

        gr_region_publish(region, figures, false);
        region->map->slots[region->slot].active_ns = active_ns;
}

static _Atomic uint32_t *asked[2];
static uint32_t asked_before;

static void both_are_asked(void)
{
        GR_CHECK_EQ(*asked[0] + *asked[1], asked_before + 2);
}

static struct gr_region *liar;
static uint64_t lie_bytes;

static void lie(void)
{
        struct gr_request request;

        GR_CHECK(gr_region_take(liar, &request));
        gr_region_answer(liar, &request, lie_bytes);
}

/* The first one asks; the others joined long ago. */
static void join_three(struct gr_region **ret_one, struct gr_region **ret_two, struct gr_region **ret_three)
{
        *ret_one = join_as(1, "ask");
        *ret_two = join_as(2, "ask");
        *ret_three = join_as(3, "ask");
        now_ns += UINT64_C(5000000000);
}

static void drop_three(struct gr_region *one, struct gr_region *two, struct gr_region *three)
{
        server = NULL;
        drop(three);
        drop(two);
        drop(one);
}

/* In which order the others are asked. */
static void test_ask_order(void)
{
        struct gr_region *one, *two, *three;
        struct gr_request request;

        join_three(&one, &two, &three);

        /* Who answers: the one with more cached, and only that one is woken. */
        publish_cached(two, GIB, 0);
        publish_cached(three, 3 * GIB, 0);
        server = three;
        server_gives = 8 * GIB;
        GR_CHECK_EQ(gr_region_ask(one, 2 * GIB, 100000000, false), 2 * GIB);
        GR_CHECK(!gr_region_take(two, &request));

        /* Of equals the one that has been quiet for longer. */
        for (int i = 0; i < 2; i++) {
                struct gr_region *quiet = i ? two : three, *busy = i ? three : two;

                publish_cached(quiet, GIB, 100);
                publish_cached(busy, GIB, 200);
                server = quiet;
                GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), GIB);
                GR_CHECK(!gr_region_take(busy, &request));
        }
        publish_cached(two, GIB, 0);
        publish_cached(three, 3 * GIB, 0);

        /* Its share makes it the later one; and the busy come after the idle. */
        three->map->slots[three->slot].share = 4;
        server = two;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), GIB);
        GR_CHECK(!gr_region_take(three, &request));
        three->map->slots[three->slot].share = 1;
        for (int i = 0; i < 2; i++) {
                struct gr_region *idle = i ? two : three, *busy = i ? three : two;

                publish_cached(idle, GIB, 0);
                publish_cached(busy, 3 * GIB, now_ns);
                server = idle;
                GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), GIB);
                GR_CHECK(!gr_region_take(busy, &request));
        }
        drop_three(one, two, three);
}

/* Whoever asks again and again leaves out those who say that they have nothing, and costs no time. */
static void test_ask_again(void)
{
        struct gr_region *one, *two, *three;
        struct gr_request request;
        uint64_t begin;

        join_three(&one, &two, &three);
        publish_cached(two, 0, 0);
        publish_cached(three, 0, 0);
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, true), 0);
        GR_CHECK_EQ(now_ns - begin, 0);
        GR_CHECK(!gr_region_take(two, &request) && !gr_region_take(three, &request));
        publish_cached(three, GIB, 0);
        server = three;
        server_gives = GIB;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, true), GIB);
        GR_CHECK(!gr_region_take(two, &request));
        drop_three(one, two, three);
}

/* Nothing is asked for nothing, or in no time; a byte, or a nanosecond, is something. */
static void test_ask_nothing(void)
{
        struct gr_region *one, *two, *three;
        struct gr_request request;
        size_t heap;

        join_three(&one, &two, &three);
        GR_CHECK_EQ(gr_region_ask(one, 0, 100000000, false), 0);
        GR_CHECK_EQ(gr_region_ask(one, GIB, 0, false), 0);
        GR_CHECK(!gr_region_take(two, &request) && !gr_region_take(three, &request));
        publish_cached(three, GIB, 0);
        server = three;
        server_gives = GIB;
        heap = mallinfo2().uordblks;
        GR_CHECK_EQ(gr_region_ask(one, 1, 100000000, true), 1);
        GR_CHECK_EQ(mallinfo2().uordblks, heap);
        GR_CHECK_EQ(gr_region_ask(one, GIB / 2, 1, true), GIB / 2);
        drop_three(one, two, three);
}

/* Who has cached memory comes first, busy as it may be; of a busy one the clock may be wrong. */
static void test_ask_busy(void)
{
        struct gr_region *one, *two, *three;
        struct gr_request request;

        join_three(&one, &two, &three);
        three->map->slots[three->slot].share = 4; /* by which it would be the later one */
        for (int i = 0; i < 2; i++) {
                struct gr_region *first = i ? two : three, *last = i ? three : two;

                publish_cached(first, GIB, now_ns);
                publish_cached(last, 0, 0);
                server = first;
                server_gives = GIB;
                GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), GIB);
                GR_CHECK(!gr_region_take(last, &request));
                publish_cached(first, GIB, now_ns - UINT64_C(1000000000)); /* just long enough to be idle */
                publish_cached(last, 9 * GIB, now_ns + UINT64_C(1000000000));
                server_gives = GIB;
                GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), GIB);
                GR_CHECK(!gr_region_take(last, &request));
        }
        drop_three(one, two, three);
}

/* Where one is not enough, they are asked at once, before anybody is waited for. */
static void test_ask_several(void)
{
        struct gr_region *one, *two, *three;
        uint32_t seen;

        join_three(&one, &two, &three);
        publish_cached(two, GIB, 0);
        publish_cached(three, GIB, 0);
        asked[0] = &two->map->slots[two->slot].request;
        asked[1] = &three->map->slots[three->slot].request;
        asked_before = *asked[0] + *asked[1];
        at_wait = both_are_asked;
        server = three;
        server_gives = GIB;
        seen = gr_region_seen(one);
        GR_CHECK_EQ(gr_region_ask(one, 3 * GIB, 100000000, true), GIB);
        GR_CHECK(!at_wait);
        GR_CHECK_EQ(gr_region_seen(one), seen); /* nobody else */
        serve(two);

        /* The one in the first slot is asked, too. */
        publish_cached(one, GIB, 0);
        publish_cached(three, 0, 0);
        server = one;
        server_gives = GIB;
        GR_CHECK_EQ(gr_region_ask(two, GIB, 100000000, true), GIB);
        publish_cached(one, 0, 0);
        drop_three(one, two, three);
}

/* Who says that it gave more than there is has given nothing. */
static void test_ask_liar(void)
{
        struct gr_region *one, *two, *three;

        join_three(&one, &two, &three);
        publish_cached(two, GIB, 0);
        liar = two;
        for (int i = 0; i < 2; i++) {
                lie_bytes = (UINT64_C(1) << 50) + (uint64_t)i;
                at_wait = lie;
                GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, true), i ? 0 : lie_bytes);
                GR_CHECK(!at_wait);
        }
        drop_three(one, two, three);
}

/* While one waits the others know; what began in a lost slot does not end below nothing. */
static void test_awaited(void)
{
        struct gr_region *one, *two, *three;

        join_three(&one, &two, &three);
        GR_CHECK(!gr_region_awaited(one) && !gr_region_awaited(two));
        gr_region_waiting(one, (int64_t)GIB);
        GR_CHECK(!gr_region_awaited(one) && gr_region_awaited(two));
        GR_CHECK_EQ(one->map->slots[one->slot].figures[GR_FIGURE_waiting], GIB);
        gr_region_waiting(one, -(int64_t)GIB);
        gr_region_waiting(one, -(int64_t)GIB);
        GR_CHECK(!gr_region_awaited(two));
        drop_three(one, two, three);
}

/* Nobody answers: the deadline, once; after that no time at all, until the answer. */
static void test_ask_silent(void)
{
        struct gr_region *one, *two, *three;
        uint64_t begin;

        join_three(&one, &two, &three);
        publish_cached(two, GIB, 0);
        publish_cached(three, 0, 0);
        server = NULL;
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), 0);
        GR_CHECK(now_ns - begin > 50000000 && now_ns - begin <= 100000000);
        begin = now_ns;
        gr_region_ask(one, GIB, 100000000, false);
        gr_region_ask(one, GIB, 100000000, false);
        GR_CHECK(now_ns - begin <= 100000000);
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), 0);
        GR_CHECK_EQ(now_ns - begin, 0);
        publish_cached(three, GIB, 0);
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), 0);
        GR_CHECK_EQ(now_ns - begin, 0);
        server_gives = 2 * GIB;
        serve(two);
        serve(three);
        server = three;
        server_gives = GIB;
        publish_cached(three, GIB, 0);
        GR_CHECK(gr_region_ask(one, GIB, 100000000, false) > 0);

        /* Stopped ones are not asked. */
        now_ns++;
        publish_cached(two, 0, 0);
        publish_cached(three, 9 * GIB, 0);
        peers[2] = peers[3] = GR_PROCESS_STOPPED;
        two->map->slots[two->slot].request = two->map->slots[two->slot].answer = UINT32_C(0x80000005);
        asked_before = gr_region_seen(two) + gr_region_seen(three);
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), 0);
        GR_CHECK_EQ(now_ns - begin, 0);
        GR_CHECK_EQ(gr_region_seen(two) + gr_region_seen(three), asked_before);
        peers[2] = peers[3] = GR_PROCESS_ALIVE;
        GR_CHECK_EQ(one->map->slots[one->slot].figures[GR_FIGURE_waiting], 0);

        /* One that died keeps nobody. */
        die(two);
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), 0);
        GR_CHECK_EQ(used_slots(one), 2);
        server = NULL;
        drop(three);
        drop(one);
}

/* Whoever is at work on it is waited for, within bounds. */
static void test_patience(void)
{
        const uint64_t ms = 1000000, quiet = 100 * ms;
        struct gr_region *one, *two, *three;
        uint64_t begin;

        join_three(&one, &two, &three);

        /* Both are asked at once; the one that works gives, and what the silent one costs is within that time. */
        begin = now_ns;
        publish_cached(two, 0, 0);
        publish_cached(three, 0, 0);
        server = two;
        server_gives = GIB;
        works_until_ns = now_ns + 400 * ms;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), GIB);
        GR_CHECK(now_ns - begin >= 400 * ms && now_ns - begin < 500 * ms);
        serve(three);

        /* Without end: until the bound, and no time more before it has answered. */
        begin = now_ns;
        server_gives = GIB;
        works_until_ns = UINT64_MAX;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), 0);
        GR_CHECK_EQ(now_ns - begin, GR_REGION_ASK_NS);
        serve(three);
        die(three);
        begin = now_ns;
        gr_region_publish(two, NULL, false);
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), 0);
        GR_CHECK_EQ(now_ns - begin, 0);
        works_until_ns = 0;
        serve(two);
        server = NULL;
        drop(two);
        drop(one);
}

/* Of several that are asked one after the other none takes the time of those after it. */
static void test_patience_in_turn(void)
{
        const uint64_t ms = 1000000, quiet = 100 * ms;
        struct gr_region *one, *two, *three, *four;
        struct gr_request request;
        uint64_t begin;

        join_three(&one, &two, &three);

        /* One that works without end leaves half of the time to those after it; so do those that are silent. */
        publish_cached(two, 2 * GIB, 0);
        publish_cached(three, GIB, 0);
        server = two;
        prompt[0] = three;
        server_gives = GIB;
        works_until_ns = UINT64_MAX;
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, true), GIB);
        GR_CHECK_EQ(now_ns - begin, GR_REGION_ASK_NS / 2);
        works_until_ns = 0;
        serve(two);
        prompt[0] = server = NULL;
        publish_cached(two, 3 * GIB, 0);
        publish_cached(three, 2 * GIB, 0);
        four = join_as(4, "ask");
        publish_cached(four, GIB, 0);
        GR_CHECK_EQ(gr_region_ask(one, GIB, 2, true), 0);
        GR_CHECK(gr_region_take(two, &request) && gr_region_take(three, &request) && !gr_region_take(four, &request));
        for (int i = 0; i < 2; i++) {
                prompt[i] = i ? three : two;
                gr_region_answer(prompt[i], &(struct gr_request){.sequence = gr_region_seen(prompt[i])}, 0);
        }

        /* Those that answer at once, and give nothing, leave all of it to the last one. */
        server_gives = 0;
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, true), 0);
        GR_CHECK_EQ(now_ns - begin, quiet);
        prompt[0] = prompt[1] = NULL;
        drop(four);
        drop(three);
        drop(two);
        drop(one);
}

/* No sign of life, or one that is none, costs the wait once. */
static void test_patience_in_vain(void)
{
        const uint64_t ms = 1000000, quiet = 100 * ms;
        struct gr_region *one = join_as(1, "ask"), *two = join_as(2, "ask");
        uint64_t begin;

        /* It dies, as far as can be seen, in the middle of the work. */
        server = two;
        begin = now_ns;
        works_until_ns = now_ns + 50 * ms;
        server_gives = 0;
        two->map->slots[two->slot].figures[GR_FIGURE_waiting] = 0;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), 0);
        GR_CHECK(now_ns - begin < 2 * quiet);
        serve(two);

        /* One that waits for memory itself gets no more than the wait, whatever it says. */
        begin = now_ns;
        works_until_ns = UINT64_MAX;
        gr_region_waiting(two, MIB);
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), 0);
        GR_CHECK_EQ(now_ns - begin, quiet);
        gr_region_waiting(two, -(int64_t)MIB);
        works_until_ns = 0;
        serve(two);

        /* A heartbeat from the future is none. */
        server = NULL;
        begin = now_ns;
        two->map->slots[two->slot].heartbeat_ns = now_ns + UINT64_C(5000000000);
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), 0);
        GR_CHECK_EQ(now_ns - begin, quiet);
        drop(two);
        drop(one);
}

/* Asks for so much; whether those with these pids are put to sleep for it, in this order, and nobody else. */
static bool sleep_for(struct gr_region *asker, uint64_t want_bytes, uint32_t first, uint32_t second)
{
        uint64_t given;

        sleepers[0] = sleepers[1] = sleeper_count = 0;
        given = gr_region_ask(asker, want_bytes, 100000000, true);
        return sleepers[0] == first && sleepers[1] == second &&
               sleeper_count == (first > 0 ? 1u : 0u) + (second > 0 ? 1u : 0u) &&
               given == sleeper_count * sleeper_gives;
}

/* Who is put to sleep, in which order, and for how much. */
static void test_ask_sleep(void)
{
        struct gr_region *one, *two, *three;

        join_three(&one, &two, &three);
        gr_region_reserve(two, GIB, UINT64_MAX);
        gr_region_reserve(three, GIB, UINT64_MAX);
        prompt[0] = two;
        prompt[1] = three;
        sleeper_gives = GIB;
        GR_CHECK(sleep_for(one, MIB, 0, 0)); /* nobody has offered it */
        gr_region_offer_sleep(one, 1);
        gr_region_offer_sleep(two, now_ns);
        gr_region_offer_sleep(three, now_ns - 1);
        GR_CHECK(sleep_for(one, MIB, 3, 0));
        GR_CHECK(sleep_for(one, 2 * GIB, 3, 2));
        GR_CHECK(sleep_for(one, 2 * GIB + 1, 0, 0)); /* in vain */
        sleeper_gives = MIB;
        GR_CHECK(sleep_for(one, GIB, 3, 2)); /* the first has less than it seemed */
        sleeper_gives = 0;
        GR_CHECK(sleep_for(one, GIB, 3, 2));     /* the first says no */
        GR_CHECK(sleep_for(one, 2 * GIB, 3, 0)); /* the second alone has too little */
        peers[3] = GR_PROCESS_STOPPED;
        GR_CHECK(sleep_for(one, 2 * GIB, 0, 0));
        peers[3] = GR_PROCESS_ALIVE;
        sleeper_gives = GIB;
        gr_region_offer_sleep(two, now_ns + 1);
        GR_CHECK(sleep_for(one, GIB + 1, 0, 0)); /* one of them may not sleep yet */
        GR_CHECK(sleep_for(one, GIB, 3, 0));
        gr_region_offer_sleep(three, 0);
        GR_CHECK(sleep_for(one, MIB, 0, 0));

        /* What others have cached comes first. */
        gr_region_offer_sleep(three, 1);
        publish_cached(two, GIB, 0);
        server_gives = GIB;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, true), GIB);
        GR_CHECK(sleeper_count == 0);
        server_gives = MIB;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, true), GIB + MIB);
        GR_CHECK(sleeper_count == 1 && sleepers[0] == 3);
        publish_cached(two, 0, 0);

        /* The next owner of a slot has offered nothing. */
        gr_region_leave(three);
        GR_CHECK_EQ(gr_region_join(three, "test", 1), 0);
        gr_region_reserve(three, GIB, UINT64_MAX);
        GR_CHECK(sleep_for(one, MIB, 0, 0));
        prompt[0] = prompt[1] = NULL;
        drop_three(one, two, three);
}

/* Of those that wait for memory the first slot's comes before the others. */
static void test_waits_first(void)
{
        struct gr_region *one, *two, *three, *first, *second;

        join_three(&one, &two, &three);
        first = two->slot < three->slot ? two : three;
        second = first == two ? three : two;
        GR_CHECK(!gr_region_waits_first(one));
        gr_region_waiting(second, 1);
        GR_CHECK(!gr_region_waits_first(one) && !gr_region_waits_first(first) && gr_region_waits_first(second));
        gr_region_waiting(first, 1);
        GR_CHECK(gr_region_waits_first(first) && !gr_region_waits_first(second));
        gr_region_leave(first);
        GR_CHECK(!gr_region_waits_first(first) && gr_region_waits_first(second));
        GR_CHECK_EQ(gr_region_join(first, "test", 1), 0);
        drop_three(one, two, three);
}

/* Those that wait when it is noted come first until each has stopped, or its slot has another owner. */
static void test_let_first(void)
{
        struct gr_region *one, *two, *three, *other[2], *again;

        join_three(&one, &two, &three);
        GR_CHECK(!gr_region_is_let_first(one));
        gr_region_waiting(one, 1);
        gr_region_waiting(two, 1);
        gr_region_let_first(one);
        gr_region_waiting(three, 1);
        GR_CHECK_EQ(gr_region_is_let_first(one), 1);
        GR_CHECK(!gr_region_waits_first(one)); /* nor does it wait for them */
        gr_region_return(one);
        GR_CHECK_EQ(one->map->slots[one->slot].figures[GR_FIGURE_waiting], 1);
        gr_region_let_first(two);
        GR_CHECK_EQ(gr_region_is_let_first(two), 2);
        gr_region_return(two);
        gr_region_waiting(two, -1);
        GR_CHECK(!gr_region_is_let_first(one));
        gr_region_waiting(two, 1);
        GR_CHECK(!gr_region_is_let_first(one)); /* it has begun anew */
        gr_region_let_first(one);
        gr_region_waiting(two, -1);
        GR_CHECK(gr_region_is_let_first(one));
        gr_region_leave(three);
        GR_CHECK(!gr_region_is_let_first(one));
        GR_CHECK_EQ(gr_region_join(three, "test", 1), 0);
        gr_region_waiting(three, 1);
        gr_region_let_first(one);
        one->map->owners[three->slot]++;
        GR_CHECK(!gr_region_is_let_first(one));
        one->map->owners[three->slot]--;
        GR_CHECK(!gr_region_is_let_first(one));
        gr_region_return(one);
        GR_CHECK_EQ(one->map->slots[one->slot].figures[GR_FIGURE_waiting], 1);
        gr_region_let_first(one);
        gr_region_waiting(one, -1); /* a wait that ends meanwhile */
        gr_region_return(one);
        GR_CHECK_EQ(one->map->slots[one->slot].figures[GR_FIGURE_waiting], 0);

        /* Also in another region, where they have other slots; nobody else does. */
        GR_CHECK_EQ(gr_region_is_let_first(one), 1);
        for (int i = 0; i < 2; i++) {
                other[i] = join_at(i ? 3 : 4, "others", i ? two->slot : three->slot);
                gr_region_waiting(other[i], 1);
        }
        again = join_as(1, "others");
        gr_region_carry(again, one);
        GR_CHECK_EQ(gr_region_is_let_first(again), 1);
        gr_region_waiting(other[0], -1);
        GR_CHECK_EQ(gr_region_is_let_first(again), 1);
        gr_region_waiting(other[1], -1);
        GR_CHECK_EQ(gr_region_is_let_first(again), 0);
        drop_three(other[0], other[1], again);
        drop_three(one, two, three);
}

/* One that falls asleep is waited for as long as any other, and one that does not answer costs the next no time. */
static void test_patience_with_sleepers(void)
{
        const uint64_t ms = 1000000, quiet = 100 * ms;
        struct gr_region *one, *two, *three;
        uint64_t begin;

        join_three(&one, &two, &three);
        gr_region_reserve(two, GIB, UINT64_MAX);
        gr_region_reserve(three, GIB, UINT64_MAX);
        gr_region_offer_sleep(two, 1);
        gr_region_offer_sleep(three, 2);
        sleeper_gives = GIB;
        begin = now_ns;
        server = two;
        works_until_ns = now_ns + GR_REGION_ASK_NS - ms;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, true), GIB);
        GR_CHECK_EQ(now_ns - begin, GR_REGION_ASK_NS - ms);
        begin = now_ns;
        works_until_ns = UINT64_MAX;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, true), 0);
        GR_CHECK_EQ(now_ns - begin, GR_REGION_ASK_NS);
        GR_CHECK_EQ(gr_region_seen(three), three->map->slots[three->slot].answer); /* it was not asked */
        begin = now_ns;
        works_until_ns = 0;
        server = NULL;
        serve(two);
        prompt[0] = three;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, true), GIB);
        GR_CHECK_EQ(now_ns - begin, quiet / 2);
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, true), GIB); /* the silent one is not asked again */
        GR_CHECK_EQ(now_ns - begin, 0);
        prompt[0] = NULL;
        drop_three(one, two, three);
}

/* Whoever waits for memory looks again and again: at other processes only now and then, and at the silent ones. */
static void test_sweep_again(void)
{
        struct gr_region *one = join_as(1, "again"), *two = join_as(2, "again"), *three = join_as(3, "again");

        gr_region_waiting(one, MIB);
        gr_region_sweep(one);
        looks = 0;
        for (int i = 0; i < 5; i++)
                GR_CHECK_EQ(gr_region_ask(one, GIB, 1, true), 0);
        GR_CHECK_EQ(gr_region_reserve(one, 2, 1), -EDQUOT);
        GR_CHECK_EQ(looks, 0);
        die(two);
        GR_CHECK_EQ(gr_region_sweep_again(one), 0);
        now_ns += UINT64_C(500000000);
        GR_CHECK_EQ(gr_region_sweep_again(one), 1);
        die(three);
        now_ns += UINT64_C(499000000);
        GR_CHECK_EQ(gr_region_sweep_again(one), 0);
        /* Silent for a second, and the last look at all less than half a second ago. */
        one->swept_ns = now_ns += UINT64_C(1000000);
        GR_CHECK_EQ(gr_region_sweep_again(one), 1);
        gr_region_waiting(one, -(int64_t)MIB);
        die(join_as(2, "again"));
        GR_CHECK_EQ(gr_region_sweep_again(one), 1);
        drop(one);
}

static void test_orders(void)
{
        struct gr_region *one = join_as(1, "orders"), *two = join_as(2, "orders");
        struct gr_request request, wanted;
        struct gr_patience patience;
        uint64_t begin;
        uint32_t sequence, seen;

        /* What has been seen is waited behind, and no longer than until something comes or one wakes itself. */
        seen = gr_region_seen(two);
        begin = now_ns;
        gr_region_wait(two, seen, 5000000);
        GR_CHECK_EQ(now_ns - begin, 5000000);
        gr_region_wake_self(two);
        GR_CHECK(woken == &two->map->slots[two->slot].request);
        GR_CHECK_EQ(gr_region_seen(two), seen + 1);
        gr_region_wait(two, seen, 5000000);
        GR_CHECK_EQ(now_ns - begin, 5000000);
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK(!request.orders && !request.want_bytes && !request.rung);
        gr_region_answer(two, &request, 0);
        GR_CHECK(woken == &two->map->slots[two->slot].answer);

        GR_CHECK(!gr_region_take(two, &request));
        sequence = gr_region_request(one, (unsigned)two->slot,
                                     &(struct gr_request){.orders = GR_ORDER_LIMIT, .new_limit = 5 * GIB});
        gr_region_request(one, (unsigned)two->slot, &(struct gr_request){.want_bytes = GIB});
        gr_region_request(one, (unsigned)two->slot, &(struct gr_request){.want_bytes = GIB, .rung = 3});
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK_EQ(request.orders, GR_ORDER_LIMIT);
        GR_CHECK_EQ(request.new_limit, 5 * GIB);
        GR_CHECK_EQ(request.want_bytes, 2 * GIB);
        GR_CHECK_EQ(request.rung, 3);
        GR_CHECK_EQ(request.new_threshold, 0);
        patience = (struct gr_patience){now_ns, 10, now_ns + 10};
        GR_CHECK(!gr_region_await(one, (unsigned)two->slot, two->token, sequence, &patience));
        gr_region_answer(two, &request, 7);
        GR_CHECK(gr_region_await(one, (unsigned)two->slot, two->token, sequence, &patience));
        GR_CHECK(!gr_region_take(two, &request));
        /* A huge wish is no overflow. */
        gr_region_request(one, (unsigned)two->slot, &(struct gr_request){.want_bytes = UINT64_MAX, .rung = UINT32_MAX});
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK(request.want_bytes <= UINT64_C(1) << 50);
        GR_CHECK_EQ(request.rung, 0);
        gr_region_answer(two, &request, 0);

        /* Each order with its own value, and none of it comes again. */
        gr_region_request(one, (unsigned)two->slot,
                          &(struct gr_request){
                                  .orders = GR_ORDER_THRESHOLD, .new_limit = 1, .new_threshold = 3 * GIB, .rung = 32});
        GR_CHECK(woken == &one->map->slots[two->slot].request);
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK_EQ(request.orders, GR_ORDER_THRESHOLD);
        GR_CHECK_EQ(request.new_threshold, 3 * GIB);
        GR_CHECK_EQ(request.new_limit, 5 * GIB);
        GR_CHECK_EQ(request.rung, 32);
        gr_region_answer(two, &request, 0);
        gr_region_request(one, (unsigned)two->slot,
                          &(struct gr_request){.orders = GR_ORDER_LIMIT, .new_limit = 6 * GIB, .new_threshold = 1});
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK_EQ(request.new_threshold, 3 * GIB);
        GR_CHECK_EQ(request.new_limit, 6 * GIB);
        gr_region_answer(two, &request, 0);
        gr_region_request(one, (unsigned)two->slot, &(struct gr_request){.rung = 33});
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK(request.orders == 0 && request.rung == 0 && request.want_bytes == 0);
        gr_region_answer(two, &request, 0);

        /* What is withdrawn does not come, and what others have asked for does. */
        wanted = (struct gr_request){
                .orders = GR_ORDER_LIMIT | GR_ORDER_REFRESH, .new_limit = 2 * GIB, .want_bytes = GIB};
        gr_region_request(one, (unsigned)two->slot, &wanted);
        gr_region_request(one, (unsigned)two->slot,
                          &(struct gr_request){.orders = GR_ORDER_SLEEP, .want_bytes = 2 * GIB});
        GR_CHECK(gr_region_withdraw(one, (unsigned)two->slot, &wanted));
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK_EQ(request.orders, GR_ORDER_SLEEP);
        GR_CHECK_EQ(request.want_bytes, 2 * GIB);
        gr_region_answer(two, &request, 0);
        gr_region_request(one, (unsigned)two->slot, &wanted);
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK(!gr_region_withdraw(one, (unsigned)two->slot, &wanted));
        gr_region_answer(two, &request, 0);
        /* Later orders of the kind have taken its place, and stay. */
        wanted.orders = GR_ORDER_THRESHOLD | GR_ORDER_LIMIT | GR_ORDER_REFRESH;
        gr_region_request(one, (unsigned)two->slot, &wanted);
        gr_region_request(one, (unsigned)two->slot,
                          &(struct gr_request){.orders = GR_ORDER_THRESHOLD | GR_ORDER_LIMIT,
                                               .new_limit = 3 * GIB,
                                               .new_threshold = GIB});
        GR_CHECK(gr_region_withdraw(one, (unsigned)two->slot, &wanted));
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK_EQ(request.orders, GR_ORDER_THRESHOLD | GR_ORDER_LIMIT);
        GR_CHECK_EQ(request.new_limit, 3 * GIB);
        GR_CHECK_EQ(request.new_threshold, GIB);
        gr_region_answer(two, &request, 0);
        gr_region_wake_self(two);
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK_EQ(request.rung, 0);
        drop(two);
        drop(one);
}

int main(void)
{
        region_begin();
        test_ask_order();
        test_ask_again();
        test_ask_nothing();
        test_ask_busy();
        test_ask_several();
        test_ask_liar();
        test_awaited();
        test_ask_silent();
        test_patience();
        test_patience_in_turn();
        test_patience_in_vain();
        test_ask_sleep();
        test_waits_first();
        test_let_first();
        test_patience_with_sleepers();
        test_sweep_again();
        test_orders();
        return region_end();
}
