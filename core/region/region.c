#include "region/region.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "region/region_file.h"

#define PID_BITS       22 /* the kernel's PID_MAX_LIMIT */
#define NAMESPACE_BITS 16
#define START_BITS     26
#define PID_MASK       ((UINT64_C(1) << PID_BITS) - 1)
#define NAMESPACE_MASK ((UINT64_C(1) << NAMESPACE_BITS) - 1)
#define START_MASK     ((UINT64_C(1) << START_BITS) - 1)

#define FOREIGN_DEAD_NS                                                                                                \
        UINT64_C(10000000000) /* without a heartbeat for so long, a process of another pid namespace counts as gone */
#define ACCOUNT_BITS  48
#define ACCOUNT_MASK  ((UINT64_C(1) << ACCOUNT_BITS) - 1)
#define FIGURE_MOST   (UINT64_C(1) << 62)
#define RESERVE_TRIES 20
#define FRESH_NS      UINT64_C(1000000000) /* a process with a younger heartbeat is very likely alive */
#define SWEEP_NS      UINT64_C(500000000)
#define RESERVE_NS    UINT64_C(50000)

_Static_assert(PID_BITS + NAMESPACE_BITS + START_BITS == 64, "a token is one word, of which no bit is lost");
_Static_assert(GR_REGION_NAME_BYTES % 8 == 0, "a name is read and written in words");
_Static_assert(GR_REGION_SLOTS <= 1u << 9 && (GR_REGION_SLOTS & (GR_REGION_SLOTS - 1)) == 0, "the hash has nine bits");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "shared words need no lock");

static uint64_t token_of(const struct gr_identity *identity)
{
        return (identity->pid & PID_MASK) | (identity->pid_namespace & NAMESPACE_MASK) << PID_BITS |
               (identity->start_ticks & START_MASK) << (PID_BITS + NAMESPACE_BITS);
}

static uint32_t token_pid(uint64_t token)
{
        return (uint32_t)(token & PID_MASK);
}

static bool own_namespace(const struct gr_region *region, uint64_t token)
{
        return ((token ^ region->token) >> PID_BITS & NAMESPACE_MASK) == 0;
}

static void set_up_view(struct gr_region *region, const struct gr_region_ops *ops, const struct gr_identity *self,
                        uid_t user)
{
        memset(region, 0, sizeof(*region));
        region->ops = ops;
        region->self = *self;
        region->token = token_of(self);
        region->slot = -1;
        region->user = user;
}

static int attach(struct gr_region *region, const char *dir, const char *file, bool create)
{
        if (strlen(dir) >= sizeof(region->dir) || strlen(file) >= sizeof(region->file) || strchr(file, '/'))
                return -ENAMETOOLONG;
        strcpy(region->dir, dir);
        strcpy(region->file, file);
        return gr_region_file_attach(region, create);
}

int gr_region_open_of(struct gr_region *region, const struct gr_region_ops *ops, const struct gr_identity *self,
                      uid_t user, const char *dir, const char *file, bool as_copy)
{
        set_up_view(region, ops, self, user);
        region->is_copy = as_copy;
        return attach(region, dir, file, false);
}

int gr_region_open(struct gr_region *region, const struct gr_region_ops *ops, const struct gr_identity *self,
                   const char *dir, const char *file, bool create)
{
        set_up_view(region, ops, self, geteuid());
        return attach(region, dir, file, create);
}

void gr_region_close(struct gr_region *region)
{
        if (region->map)
                gr_region_file_detach(region);
        region->slot = -1;
}

static bool owner_gone(struct gr_region *region, unsigned slot, uint64_t owner)
{
        uint64_t start, beat, now;

        if (own_namespace(region, owner)) {
                switch (region->ops->process_state(token_pid(owner), &start)) {
                case GR_PROCESS_GONE:
                        return true;
                case GR_PROCESS_ALIVE:
                case GR_PROCESS_STOPPED:
                        return (start & START_MASK) != owner >> (PID_BITS + NAMESPACE_BITS);
                case GR_PROCESS_UNKNOWN:
                        break;
                }
        }
        beat = atomic_load(&region->map->slots[slot].heartbeat_ns);
        now = region->ops->now_ns();
        /* The slot may hold anything: a heartbeat far in the future counts as old. */
        return beat != 0 && (now > beat ? now - beat : beat - now) > FOREIGN_DEAD_NS;
}

bool gr_region_is_gone(struct gr_region *region, unsigned slot)
{
        uint64_t owner = slot < GR_REGION_SLOTS ? atomic_load(&region->map->owners[slot]) : 0;

        return owner != 0 && owner_gone(region, slot, owner);
}

static bool sweep_slot(struct gr_region *region, unsigned slot)
{
        uint64_t owner = atomic_load(&region->map->owners[slot]);

        assert(slot < GR_REGION_SLOTS);
        return owner != 0 && owner != region->token && owner_gone(region, slot, owner) &&
               atomic_compare_exchange_strong(&region->map->owners[slot], &owner, 0);
}

unsigned gr_region_sweep(struct gr_region *region)
{
        unsigned freed = 0;

        atomic_store(&region->swept_ns, region->ops->now_ns());
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                freed += sweep_slot(region, i);
        return freed;
}

unsigned gr_region_sweep_again(struct gr_region *region)
{
        uint64_t now = region->ops->now_ns(), beat;
        int slot = atomic_load(&region->slot);
        unsigned freed = 0;

        if (slot < 0 || atomic_load(&region->map->slots[slot].figures[GR_FIGURE_waiting]) == 0 ||
            now - atomic_load(&region->swept_ns) >= SWEEP_NS)
                return gr_region_sweep(region);
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++) {
                beat = atomic_load(&region->map->slots[i].heartbeat_ns);
                if (beat > now || now - beat >= FRESH_NS)
                        freed += sweep_slot(region, i);
        }
        return freed;
}

/* This process's slot; -1: it has none, or another process took it for gone and freed the slot. */
static int own_slot(struct gr_region *region)
{
        int slot = atomic_load(&region->slot);

        assert(slot < GR_REGION_SLOTS && (slot < 0 || region->map));
        return slot >= 0 && atomic_load(&region->map->owners[slot]) == region->token ? slot : -1;
}

void gr_region_look_after_next(struct gr_region *region)
{
        int own = own_slot(region);

        for (unsigned i = 1; own >= 0 && i < GR_REGION_SLOTS; i++) {
                unsigned slot = ((unsigned)own + i) % GR_REGION_SLOTS;

                if (atomic_load(&region->map->owners[slot]) != 0 && !sweep_slot(region, slot))
                        return;
        }
}

static int claim_slot(struct gr_region *region)
{
        /* Processes that start together begin their search at different slots, so that they seldom race for one. */
        unsigned begin = (unsigned)((region->token * UINT64_C(0x9e3779b97f4a7c15)) >> 55) % GR_REGION_SLOTS;

        assert(region->token != 0); /* the word of a free slot */
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++) {
                unsigned slot = (begin + i) % GR_REGION_SLOTS;
                uint64_t free_word = 0;

                if (atomic_load(&region->map->owners[slot]) == 0 &&
                    atomic_compare_exchange_strong(&region->map->owners[slot], &free_word, region->token))
                        return (int)slot;
        }
        return -EUSERS;
}

static void fill_slot(struct gr_region *region, const char *name, uint32_t share)
{
        struct gr_slot *slot = &region->map->slots[region->slot];
        uint64_t words[GR_REGION_NAME_BYTES / 8] = {0};

        region->claim = (atomic_load(&region->map->accounts[region->slot]) | ACCOUNT_MASK) + 1;
        assert((region->claim & ACCOUNT_MASK) == 0); /* a claim begins with nothing charged */
        atomic_store(&region->map->accounts[region->slot], region->claim);
        atomic_store(&slot->heartbeat_ns, 0);
        atomic_store(&slot->orders, 0);
        atomic_store(&slot->rung, 0);
        atomic_store(&slot->want_bytes, 0);
        atomic_store(&slot->answer, atomic_load(&slot->request));
        atomic_store(&slot->pid, region->self.pid);
        atomic_store(&slot->start_ticks, region->self.start_ticks);
        atomic_store(&slot->pid_namespace, region->self.pid_namespace);
        atomic_store(&slot->share, share);
        atomic_store(&slot->sleep_from_ns, 0);
        atomic_store(&slot->deep_refusal, 0);
        memcpy(words, name, strnlen(name, sizeof(words) - 1));
        for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
                atomic_store(&slot->name[i], words[i]);
        for (int i = 0; i < GR_SHARED_FIGURES; i++)
                atomic_store(&slot->figures[i], i == GR_FIGURE_driver ? UINT64_MAX : 0);
        atomic_store(&slot->active_ns, region->ops->now_ns());
        atomic_store(&slot->heartbeat_ns, region->ops->now_ns());
}

int gr_region_join(struct gr_region *region, const char *name, uint32_t share)
{
        bool same;
        int fd, slot;

        assert(region->map);
        assert(share >= 1 && share <= 1000);
        /*
         * The lock keeps out a process that leaves and is about to remove the file. If that one is stopped while it
         * holds the lock, this one joins without it: gr_region_member notices later that the file has gone.
         */
        fd = gr_region_file_open(region, &same);
        if (fd < 0)
                return -ESTALE;
        if (same) {
                gr_region_file_lock(fd, LOCK_SH);
                same = gr_region_file_same(region);
        }
        if (!same) {
                gr_region_file_close(fd);
                return -ESTALE;
        }
        assert(own_slot(region) < 0); /* else the process would have two slots */
        slot = claim_slot(region);
        if (slot < 0 && gr_region_sweep(region) > 0)
                slot = claim_slot(region);
        if (slot >= 0) {
                region->slot = slot;
                fill_slot(region, name, share);
        }
        gr_region_file_close(fd);
        return slot < 0 ? slot : 0;
}

void gr_region_leave(struct gr_region *region)
{
        uint64_t mine = region->token;
        bool same, empty = true;
        int fd, dir_fd, slot = atomic_exchange(&region->slot, -1);

        assert(slot < GR_REGION_SLOTS);
        if (slot < 0)
                return;
        fd = gr_region_file_open(region, &same);
        if (fd >= 0 && !same) {
                close(fd);
                fd = -1;
        }
        if (fd >= 0 && !gr_region_file_lock(fd, LOCK_EX)) {
                close(fd);
                fd = -1; /* another process holds the lock, to join: the file must stay */
        }
        atomic_compare_exchange_strong(&region->map->owners[slot], &mine, 0);
        if (fd < 0)
                return;
        for (unsigned i = 0; i < GR_REGION_SLOTS && empty; i++)
                empty = atomic_load(&region->map->owners[i]) == 0 || sweep_slot(region, i);
        dir_fd = empty ? gr_region_file_dir(region) : -1;
        if (dir_fd >= 0) {
                unlinkat(dir_fd, region->file, 0);
                close(dir_fd);
        }
        gr_region_file_close(fd);
}

bool gr_region_member(struct gr_region *region)
{
        return own_slot(region) >= 0 && gr_region_file_same(region);
}

void gr_region_publish(struct gr_region *region, const uint64_t figures[GR_SHARED_FIGURES], bool changed)
{
        struct gr_slot *slot;
        uint64_t now = region->ops->now_ns();
        int own = own_slot(region);

        if (own < 0)
                return;
        slot = &region->map->slots[own];
        for (int i = 0; figures && i < GR_SHARED_FIGURES; i++)
                if (i != GR_FIGURE_waiting) /* gr_region_waiting writes that one */
                        atomic_store(&slot->figures[i], figures[i]);
        if (changed)
                atomic_store(&slot->active_ns, now);
        atomic_store(&slot->heartbeat_ns, now);
}

void gr_region_offer_sleep(struct gr_region *region, uint64_t from_ns)
{
        int own = own_slot(region);

        if (own >= 0)
                atomic_store(&region->map->slots[own].sleep_from_ns, from_ns);
}

void gr_region_refuse_deep(struct gr_region *region, uint64_t reason)
{
        int own = own_slot(region);

        if (own >= 0)
                atomic_store(&region->map->slots[own].deep_refusal, reason);
}

static uint64_t checked_figure(uint64_t figure)
{
        return figure == UINT64_MAX || figure < FIGURE_MOST ? figure : 0;
}

/* Never negative: a release in another process may be seen before its charge. */
static uint64_t account_bytes(struct gr_region *region, unsigned slot)
{
        uint64_t bytes = atomic_load(&region->map->accounts[slot]) & ACCOUNT_MASK;

        return bytes >> (ACCOUNT_BITS - 1) ? 0 : bytes;
}

/* Adds to this process's account. False: the slot has been claimed by another process meanwhile. */
static bool account_add(struct gr_region *region, unsigned slot, uint64_t bytes)
{
        _Atomic uint64_t *account = &region->map->accounts[slot];
        uint64_t before = atomic_load(account);

        assert(slot < GR_REGION_SLOTS && (region->claim & ACCOUNT_MASK) == 0);
        do {
                if ((before & ~ACCOUNT_MASK) != region->claim)
                        return false;
        } while (!atomic_compare_exchange_weak(account, &before, region->claim | ((before + bytes) & ACCOUNT_MASK)));
        return true;
}

int gr_region_read(struct gr_region *region, unsigned index, struct gr_member *ret)
{
        struct gr_slot *slot;
        uint64_t owner, words[GR_REGION_NAME_BYTES / 8];
        uint32_t share;

        if (index >= GR_REGION_SLOTS || !(owner = atomic_load(&region->map->owners[index])))
                return -ENOENT;
        slot = &region->map->slots[index];
        ret->slot = index;
        ret->owner = owner;
        /* The pid comes from the owner word: the slot's own fields may still be those of the owner before. */
        ret->identity.pid = token_pid(owner);
        ret->identity.start_ticks = atomic_load(&slot->start_ticks);
        ret->identity.pid_namespace = atomic_load(&slot->pid_namespace);
        ret->same_namespace = own_namespace(region, owner);
        share = atomic_load(&slot->share);
        ret->share = share >= 1 && share <= 1000 ? share : 1;
        ret->reserved_bytes = account_bytes(region, index);
        ret->heartbeat_ns = atomic_load(&slot->heartbeat_ns);
        ret->active_ns = atomic_load(&slot->active_ns);
        ret->sleep_from_ns = atomic_load(&slot->sleep_from_ns);
        ret->given_bytes = atomic_load(&slot->given_bytes);
        ret->deep_refusal = atomic_load(&slot->deep_refusal);
        for (size_t i = 0; i < GR_REGION_NAME_BYTES / 8; i++)
                words[i] = atomic_load(&slot->name[i]);
        memcpy(ret->name, words, sizeof(words));
        ret->name[sizeof(ret->name) - 1] = '\0';
        for (char *c = ret->name; *c; c++)
                if ((unsigned char)*c < ' ' || (unsigned char)*c >= 0x7f)
                        *c = '?';
        for (int i = 0; i < GR_SHARED_FIGURES; i++)
                ret->figures[i] = checked_figure(atomic_load(&slot->figures[i]));
        return 0;
}

uint64_t gr_region_sum(struct gr_region *region, bool without_self)
{
        uint64_t sum = 0;

        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                if (atomic_load(&region->map->owners[i]) != 0 && !(without_self && (int)i == region->slot))
                        sum += account_bytes(region, i);
        return sum;
}

int gr_region_reserve(struct gr_region *region, uint64_t bytes, uint64_t limit_bytes)
{
        _Atomic uint32_t *word;
        int own = own_slot(region);

        if (own < 0)
                return -ENOTCONN;
        word = &region->map->slots[own].answer;
        for (int i = 0; i < RESERVE_TRIES; i++) {
                if (!account_add(region, (unsigned)own, bytes))
                        return -ENOTCONN;
                /* Charge first, look at the sum afterwards: of two that race, the later one sees both charges. */
                if (limit_bytes == UINT64_MAX || gr_region_sum(region, false) <= limit_bytes) {
                        atomic_fetch_add(&region->reserved_bytes, bytes);
                        return 0;
                }
                account_add(region, (unsigned)own, -bytes);
                if (gr_region_sum(region, false) + bytes > limit_bytes && gr_region_sweep_again(region) == 0)
                        return -EDQUOT; /* full without this charge, too */
                /* Back-off, of a different length in each process, so that two do not race again in step. */
                region->ops->wait(word, atomic_load(word), RESERVE_NS * (1 + (region->token + (unsigned)i) % 4));
        }
        return -EDQUOT;
}

void gr_region_adjust(struct gr_region *region, int64_t bytes)
{
        int own = own_slot(region);

        atomic_fetch_add(&region->reserved_bytes, (uint64_t)bytes);
        if (own >= 0)
                account_add(region, (unsigned)own, (uint64_t)bytes);
}
