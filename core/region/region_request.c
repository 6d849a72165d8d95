/* Requests between the processes of a region. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "region/region.h"

#define IDLE_NS    UINT64_C(1000000000) /* a process whose figures did not change for so long counts as idle */
#define MOST_BYTES (UINT64_C(1) << 50)  /* a larger wish is an error of the other process */
#define RUNG_MOST  32u                  /* a larger rung is an error of the other process */

/* This process's slot; NULL: it is no member. */
static struct gr_slot *slot_of_process(struct gr_region *region)
{
        int slot = atomic_load(&region->slot);

        assert(slot < GR_REGION_SLOTS && (slot < 0 || region->map));
        return slot >= 0 ? &region->map->slots[slot] : NULL;
}

static void raise_rung(_Atomic uint32_t *rung, uint32_t value)
{
        uint32_t seen = atomic_load(rung);

        while (seen < value && !atomic_compare_exchange_weak(rung, &seen, value))
                ;
}

/* The numbers of requests wrap around, hence the difference. */
static bool is_answered(uint32_t answer, uint32_t sequence)
{
        return (int32_t)(answer - sequence) >= 0;
}

uint32_t gr_region_seen(struct gr_region *region)
{
        struct gr_slot *slot = slot_of_process(region);

        return slot ? atomic_load(&slot->request) : 0;
}

void gr_region_wait(struct gr_region *region, uint32_t seen, uint64_t timeout_ns)
{
        struct gr_slot *slot = slot_of_process(region);

        if (slot)
                region->ops->wait(&slot->request, seen, timeout_ns);
}

void gr_region_wake_self(struct gr_region *region)
{
        struct gr_slot *slot = slot_of_process(region);

        if (!slot)
                return;
        atomic_fetch_add(&slot->request, 1);
        region->ops->wake(&slot->request);
}

bool gr_region_take(struct gr_region *region, struct gr_request *ret)
{
        struct gr_slot *slot = slot_of_process(region);

        if (!slot || atomic_load(&region->map->owners[slot - region->map->slots]) != region->token)
                return false;
        *ret = (struct gr_request){.sequence = atomic_load(&slot->request)};
        if (ret->sequence == atomic_load(&slot->answer))
                return false;
        /* A process that asks first writes what it wants and then raises the number, so all of it can be read here. */
        ret->orders = atomic_exchange(&slot->orders, 0);
        ret->rung = atomic_exchange(&slot->rung, 0);
        ret->want_bytes = atomic_exchange(&slot->want_bytes, 0);
        ret->new_limit = atomic_load(&slot->new_limit);
        ret->new_threshold = atomic_load(&slot->new_threshold);
        if (ret->want_bytes > MOST_BYTES)
                ret->want_bytes = MOST_BYTES;
        if (ret->rung > RUNG_MOST)
                ret->rung = 0;
        return true;
}

void gr_region_answer(struct gr_region *region, const struct gr_request *request, uint64_t given_bytes)
{
        struct gr_slot *slot = slot_of_process(region);

        if (!slot)
                return;
        atomic_fetch_add(&slot->given_bytes, given_bytes);
        atomic_store(&slot->answer, request->sequence);
        region->ops->wake(&slot->answer);
}

uint32_t gr_region_request(struct gr_region *region, unsigned index, const struct gr_request *request)
{
        struct gr_slot *slot = &region->map->slots[index];
        uint32_t sequence;

        assert(index < GR_REGION_SLOTS);
        if (request->orders & GR_ORDER_LIMIT)
                atomic_store(&slot->new_limit, request->new_limit);
        if (request->orders & GR_ORDER_THRESHOLD)
                atomic_store(&slot->new_threshold, request->new_threshold);
        atomic_fetch_or(&slot->orders, request->orders);
        raise_rung(&slot->rung, request->rung);
        /* A sum, as two processes may ask at the same time, and each needs its own bytes. */
        if (request->want_bytes)
                atomic_fetch_add(&slot->want_bytes, request->want_bytes);
        sequence = atomic_fetch_add(&slot->request, 1) + 1;
        region->ops->wake(&slot->request);
        return sequence;
}

bool gr_region_withdraw(struct gr_region *region, unsigned index, const struct gr_request *request)
{
        struct gr_slot *slot = &region->map->slots[index];
        uint64_t want_bytes = atomic_load(&slot->want_bytes);
        uint32_t orders = request->orders;

        assert(index < GR_REGION_SLOTS);
        if (atomic_load(&slot->new_limit) != request->new_limit)
                orders &= ~GR_ORDER_LIMIT;
        if (atomic_load(&slot->new_threshold) != request->new_threshold)
                orders &= ~GR_ORDER_THRESHOLD;
        while (want_bytes >= request->want_bytes &&
               !atomic_compare_exchange_weak(&slot->want_bytes, &want_bytes, want_bytes - request->want_bytes))
                ;
        return want_bytes >= request->want_bytes && !(orders & ~atomic_fetch_and(&slot->orders, ~orders));
}

bool gr_region_await(struct gr_region *region, unsigned index, uint64_t owner, uint32_t sequence,
                     const struct gr_patience *patience)
{
        struct gr_slot *slot = &region->map->slots[index];

        assert(index < GR_REGION_SLOTS && owner != 0);
        for (;;) {
                uint32_t answer = atomic_load(&slot->answer);
                uint64_t beat = atomic_load(&slot->heartbeat_ns), now = region->ops->now_ns();
                uint64_t sign = patience->begin_ns, until;

                if (is_answered(answer, sequence))
                        return true;
                /*
                 * A heartbeat prolongs the wait, unless the other process waits for memory itself: its answer may need
                 * something that the waiting thread holds, and two such processes would wait for each other.
                 */
                if (beat > sign && beat <= now && atomic_load(&slot->figures[GR_FIGURE_waiting]) == 0)
                        sign = beat;
                until = sign + patience->quiet_ns;
                if (until > patience->deadline_ns)
                        until = patience->deadline_ns;
                if (now >= until || atomic_load(&region->map->owners[index]) != owner)
                        return false;
                region->ops->wait(&slot->answer, answer, until - now);
        }
}

/* A process that may be asked. */
struct candidate {
        struct gr_member member;
        bool idle;
        uint32_t sequence;
        bool asked;
};

static uint64_t cached_for_share(const struct candidate *candidate)
{
        assert(candidate->member.share > 0); /* gr_region_read has checked it */
        return candidate->member.figures[GR_FIGURE_cached] / candidate->member.share;
}

/* Those that can give most easily first: with cached memory, idle, most for their share, idle for longest. */
static int by_ease(const void *left, const void *right)
{
        const struct candidate *a = left, *b = right;
        uint64_t a_cached = cached_for_share(a), b_cached = cached_for_share(b);

        if ((a_cached > 0) != (b_cached > 0))
                return a_cached > 0 ? -1 : 1;
        if (a->idle != b->idle)
                return a->idle ? -1 : 1;
        if (a_cached != b_cached)
                return a_cached > b_cached ? -1 : 1;
        if (a->member.active_ns != b->member.active_ns)
                return a->member.active_ns < b->member.active_ns ? -1 : 1;
        return 0;
}

static int by_offer(const void *left, const void *right)
{
        uint64_t a = ((const struct candidate *)left)->member.sleep_from_ns;
        uint64_t b = ((const struct candidate *)right)->member.sleep_from_ns;

        return (a > b) - (a < b);
}

/* Whether another process may put this one to sleep. */
static bool may_sleep(const struct gr_member *member, uint64_t now)
{
        return member->sleep_from_ns > 0 && now >= member->sleep_from_ns;
}

enum ask { ASK_ALL, ASK_CACHED, ASK_SLEEP };

/* Lists the members that may be asked. */
static size_t find_candidates(struct gr_region *region, enum ask ask, struct candidate *ret)
{
        uint64_t now = region->ops->now_ns();
        size_t count = 0;

        for (unsigned i = 0; i < GR_REGION_SLOTS; i++) {
                struct gr_member *member = &ret[count].member;

                if ((int)i == region->slot || gr_region_read(region, i, member) != 0 ||
                    (ask == ASK_CACHED && member->figures[GR_FIGURE_cached] == 0) ||
                    (ask == ASK_SLEEP && !may_sleep(member, now)))
                        continue;
                if (atomic_load(&region->silent_owner[i]) == member->owner &&
                    !is_answered(atomic_load(&region->map->slots[i].answer), atomic_load(&region->silent_sequence[i])))
                        continue;
                ret[count].idle = now > member->active_ns && now - member->active_ns >= IDLE_NS;
                count++;
        }
        return count;
}

/* What is left of the time for one gr_region_ask. */
struct time_left {
        uint64_t quiet_ns; /* for neighbours that give no sign of life */
        uint64_t deadline_ns;
};

/* False for a stopped process, which cannot answer. */
static bool may_answer(struct gr_region *region, const struct gr_member *member)
{
        uint64_t start;

        return !member->same_namespace ||
               region->ops->process_state(member->identity.pid, &start) != GR_PROCESS_STOPPED;
}

/*
 * Asks the first candidates, as many as should suffice, or orders the first one to sleep, and waits for their answers.
 * Adds the bytes that they say they gave to *given. Returns for how many of the candidates that was done; at least 1.
 */
static size_t ask_round(struct gr_region *region, enum ask ask, struct candidate *candidates, size_t count,
                        uint64_t want_bytes, struct time_left *left, uint64_t *given)
{
        struct gr_patience patience = {.begin_ns = region->ops->now_ns()};
        uint64_t hoped = 0;
        bool silent = false;
        size_t seen = 0;

        assert(count > 0 && want_bytes > 0);
        for (; seen < count && (seen == 0 || (hoped < want_bytes && ask != ASK_SLEEP)); seen++) {
                struct candidate *one = &candidates[seen];
                uint64_t cached = one->member.figures[GR_FIGURE_cached];

                one->asked = may_answer(region, &one->member);
                if (!one->asked)
                        continue;
                assert(hoped < want_bytes);
                /*
                 * Candidates that publish no cached memory come last, and are asked together, each for all that is
                 * missing.
                 */
                one->sequence = gr_region_request(
                        region, one->member.slot,
                        ask == ASK_SLEEP ? &(struct gr_request){.orders = GR_ORDER_SLEEP_OFFER}
                                         : &(struct gr_request){.want_bytes = want_bytes - (cached ? hoped : 0)});
                hoped += cached == UINT64_MAX ? 0 : cached;
        }
        /* Half of the time left is kept for candidates that have not been asked yet. */
        patience.quiet_ns = seen < count ? (left->quiet_ns + 1) / 2 : left->quiet_ns;
        patience.deadline_ns = left->deadline_ns;
        /* But not of what one that falls asleep may take: its memory would come too late. */
        if (seen < count && left->deadline_ns > patience.begin_ns && ask != ASK_SLEEP)
                patience.deadline_ns -= (left->deadline_ns - patience.begin_ns) / 2;
        for (size_t i = 0; i < seen; i++) {
                struct candidate *one = &candidates[i];
                struct gr_slot *slot = &region->map->slots[one->member.slot];

                if (!one->asked)
                        continue;
                if (gr_region_await(region, one->member.slot, one->member.owner, one->sequence, &patience)) {
                        uint64_t bytes = atomic_load(&slot->given_bytes) - one->member.given_bytes;

                        *given += bytes <= MOST_BYTES ? bytes : 0;
                } else {
                        silent |= atomic_load(&region->map->owners[one->member.slot]) == one->member.owner;
                        atomic_store(&region->silent_sequence[one->member.slot], one->sequence);
                        atomic_store(&region->silent_owner[one->member.slot], one->member.owner);
                }
        }
        assert(patience.quiet_ns <= left->quiet_ns);
        if (silent)
                left->quiet_ns -= patience.quiet_ns;
        assert(seen > 0 && seen <= count); /* else gr_region_ask would not end */
        return seen;
}

/* Changes what the process's slot says. */
static void publish_waiting(struct gr_region *region, int64_t bytes)
{
        struct gr_slot *slot = slot_of_process(region);
        uint64_t before, after;

        if (!slot || atomic_load(&region->map->owners[slot - region->map->slots]) != region->token)
                return;
        before = atomic_load(&slot->figures[GR_FIGURE_waiting]);
        do {
                /* A wait may begin without a region and end in one: the figure must not fall below 0. */
                after = bytes < 0 && before < (uint64_t)-bytes ? 0 : before + (uint64_t)bytes;
        } while (!atomic_compare_exchange_weak(&slot->figures[GR_FIGURE_waiting], &before, after));
}

void gr_region_waiting(struct gr_region *region, int64_t bytes)
{
        region->waiting_bytes += bytes;
        if (!region->hides_waiting)
                publish_waiting(region, bytes);
}

void gr_region_carry(struct gr_region *region, struct gr_region *old)
{
        assert(region != old);
        gr_region_adjust(region, (int64_t)atomic_load(&old->reserved_bytes));
        region->hides_waiting = old->hides_waiting;
        /* By owner: the others may have other slots here. */
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                for (unsigned j = 0; j < GR_REGION_SLOTS && old->ahead[i]; j++)
                        if (atomic_load(&region->map->owners[j]) == old->ahead[i])
                                region->ahead[j] = old->ahead[i];
        if (old->waiting_bytes > 0) /* a wait that began without a region may have ended in the old one */
                gr_region_waiting(region, old->waiting_bytes);
}

static bool waits(struct gr_region *region, unsigned slot)
{
        return atomic_load(&region->map->owners[slot]) != 0 &&
               atomic_load(&region->map->slots[slot].figures[GR_FIGURE_waiting]) != 0;
}

bool gr_region_waits_first(struct gr_region *region)
{
        unsigned i = 0;

        while (i < GR_REGION_SLOTS && !waits(region, i))
                i++;
        return (int)i == atomic_load(&region->slot);
}

void gr_region_let_first(struct gr_region *region)
{
        publish_waiting(region, -INT64_MAX);
        region->hides_waiting = true;
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                region->ahead[i] = (int)i != atomic_load(&region->slot) && waits(region, i)
                                           ? atomic_load(&region->map->owners[i])
                                           : 0;
}

unsigned gr_region_is_let_first(struct gr_region *region)
{
        unsigned count = 0;

        for (unsigned i = 0; i < GR_REGION_SLOTS; i++) {
                if (region->ahead[i] && (!waits(region, i) || atomic_load(&region->map->owners[i]) != region->ahead[i]))
                        region->ahead[i] = 0;
                count += region->ahead[i] != 0;
        }
        return count;
}

void gr_region_return(struct gr_region *region)
{
        if (region->hides_waiting && region->waiting_bytes > 0)
                publish_waiting(region, region->waiting_bytes);
        region->hides_waiting = false;
}

bool gr_region_awaited(struct gr_region *region)
{
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                if ((int)i != atomic_load(&region->slot) && waits(region, i))
                        return true;
        return false;
}

/* Asks one after the other until enough has come back, or the time is over. Adds to *given, as ask_round. */
static void ask_in_turn(struct gr_region *region, enum ask ask, struct candidate *candidates, uint64_t want_bytes,
                        struct time_left *left, uint64_t *given)
{
        size_t count = find_candidates(region, ask, candidates), asked = 0, seen = 0;
        uint64_t bytes = 0; /* of those that have not been asked yet */

        for (size_t i = 0; i < count; i++)
                bytes += candidates[i].member.reserved_bytes;
        qsort(candidates, count, sizeof(*candidates), ask == ASK_SLEEP ? by_offer : by_ease);
        while (asked < count && *given < want_bytes && left->quiet_ns > 0 &&
               region->ops->now_ns() < left->deadline_ns && (ask != ASK_SLEEP || bytes >= want_bytes - *given)) {
                asked += ask_round(region, ask, candidates + asked, count - asked, want_bytes - *given, left, given);
                for (; seen < asked; seen++)
                        bytes -= candidates[seen].member.reserved_bytes;
        }
}

uint64_t gr_region_ask(struct gr_region *region, uint64_t want_bytes, uint64_t quiet_ns, bool cached_only)
{
        struct time_left left = {.quiet_ns = quiet_ns};
        struct gr_slot *own = slot_of_process(region);
        struct candidate *candidates;
        uint64_t given = 0;

        if (!own || want_bytes == 0 || quiet_ns == 0)
                return 0;
        candidates = calloc(GR_REGION_SLOTS, sizeof(*candidates));
        if (!candidates)
                return 0;
        gr_region_sweep_again(region);
        publish_waiting(region, (int64_t)want_bytes);
        left.deadline_ns = region->ops->now_ns() + (quiet_ns > GR_REGION_ASK_NS ? quiet_ns : GR_REGION_ASK_NS);
        ask_in_turn(region, cached_only ? ASK_CACHED : ASK_ALL, candidates, want_bytes, &left, &given);
        if (given < want_bytes)
                ask_in_turn(region, ASK_SLEEP, candidates, want_bytes, &left, &given);
        publish_waiting(region, -(int64_t)want_bytes);
        free(candidates);
        return given;
}
