#include "notes/origins.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "alloc/oom_report.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/no_cancel.h"
#include "base/trace_file.h"
#include "cache/ledger.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "notes/stack.h"
#include "system/environment.h"
#include "system/mapped_file.h"
#include "system/messages.h"
#include "system/platform.h"

/*
 * Sampling notes one block in SAMPLE_BYTES on average. A thread notes fewer while it spends more than 1 / COST_MOST of
 * its time on stacks, down to one in SAMPLE_MOST, and more again below 1 / COST_LEAST. In a burst it may spend what it
 * did not spend before, CREDIT_MOST_NS at most. A large program may allocate 64 GiB in a second, and its stacks take 10
 * us and more each (docs/measurements.md, stack-cost).
 */
#define SAMPLE_BYTES   ((uint64_t)64 << 20)
#define SAMPLE_MOST    ((uint64_t)16 << 30)
#define COST_MOST      64
#define COST_LEAST     256
#define CREDIT_MOST_NS ((uint64_t)1000000)
#define COLD_STACKS    16 /* the first of each thread: their time does not count, as the unwinder reads its tables */
#define BLOCKS_AT      (sizeof(struct gr_origins_header) + GR_ORIGINS_RECORDS_MAX)
#define MAPPED_BYTES   (BLOCKS_AT + GR_ORIGINS_BLOCKS_MAX * sizeof(struct gr_origins_block))
#define STEP           ((size_t)256 << 10) /* bytes that each part of the file grows by */
#define LISTS_LOG2     18
#define LISTS          ((size_t)1 << LISTS_LOG2)
#define LOCKS          64
#define FREED          64

static struct gr_origins_header *header; /* mapped, with all that follows, until the process ends */
static struct gr_origins_block *blocks;

/*
 * The blocks by address: each list begins in heads and goes on in next, 0 ends it, and block i is blocks[i - 1]. Lock n
 * guards the lists whose number is n modulo LOCKS, and a list of blocks that can be used again.
 */
static _Atomic uint32_t *heads;
static uint32_t *next;
static struct part {
        struct gr_spin lock;
        uint32_t spare;
} __attribute__((aligned(GR_LINE_BYTES))) parts[LOCKS];

/* What was freed last, of all devices; the newest is freed[(freed_count - 1) % FREED]. */
static struct freed {
        _Atomic uint64_t freed_ns; /* 0: not written yet */
        _Atomic uint64_t bytes, sample_bytes;
        _Atomic uint32_t stack;
} freed[FREED];
static _Atomic uint32_t freed_count;

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_ORIGINS_FILE);
static struct gr_mapped_file file GR_GUARDED_BY(lock);
static bool is_full GR_GUARDED_BY(lock);         /* it could not grow, and the log has said so */
static _Atomic size_t records_room, blocks_room; /* bytes that the file has for them, with the header */

/* Which allocations of the thread are noted. */
static _Thread_local struct {
        uint64_t seed;
        uint64_t sample_bytes; /* 0: none yet */
        int64_t left;          /* bytes until the next one */
        uint64_t noted_ns;     /* when the last one was noted */
        uint64_t cost_ns;      /* time of the last stack; one that took longer raises it by an eighth at most */
        int64_t credit_ns;     /* what stacks may take before they are too many; below 0: they are */
        unsigned stacks;       /* how many so far, COLD_STACKS at most */
} own __attribute__((tls_model("initial-exec")));

/* Lets the part of the file that starts at begin grow to `end` bytes, if it may. Returns whether it reaches so far. */
static __attribute__((noinline)) bool grow_room(_Atomic size_t *room, size_t begin, size_t end, size_t most)
{
        GR_NO_CANCEL;
        bool grown;

        gr_lock(&lock);
        while (*room < end && end <= most && !is_full) {
                int fd = gr_mapped_file_open(&file), rc = fd < 0 ? fd : gr_mapped_file_reserve(fd, begin + *room, STEP);

                if (fd >= 0)
                        gr_message_end(fd);
                if (!rc) {
                        *room += STEP;
                        continue;
                }
                gr_log(GR_LOG_WARN, "GPURECLAIM_BACKTRACE: %s cannot grow, later origins are lost: %s", file.path.text,
                       rc == -ESTALE ? "another file has its name" : strerror(-rc));
                is_full = true;
        }
        grown = *room >= end;
        gr_unlock(&lock);
        return grown;
}

/* For struct gr_stack_file. */
static struct gr_origins_record *append_record(size_t bytes)
{
        size_t begin = atomic_load_explicit(&header->records_bytes, memory_order_relaxed);
        struct gr_origins_record *record = (void *)((char *)header + begin);

        bytes = (bytes + 7) & ~(size_t)7;
        if (begin + bytes > records_room && !grow_room(&records_room, 0, begin + bytes, BLOCKS_AT))
                return NULL;
        record->bytes = (uint32_t)bytes;
        return record;
}

static uint32_t commit_record(struct gr_origins_record *record)
{
        size_t begin = (size_t)((char *)record - (char *)header);

        atomic_store_explicit(&header->records_bytes, begin + record->bytes, memory_order_release);
        return (uint32_t)(begin / 8);
}

static uint64_t random_word(void)
{
        static _Atomic uint64_t threads;
        uint64_t word;

        if (!own.seed)
                own.seed = (atomic_fetch_add_explicit(&threads, 1, memory_order_relaxed) + 1) << 32;
        word = own.seed += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
        word = (word ^ word >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        word = (word ^ word >> 27) * UINT64_C(0x94d049bb133111eb);
        return word ^ word >> 31;
}

/*
 * Bytes until the next sample: of an exponential distribution, so that each byte has the same chance whatever came
 * before. Drawn by von Neumann's method, which only compares random numbers: it looks how long a row of them falls.
 */
static int64_t draw_gap(void)
{
        for (uint64_t whole = 0;; whole++) {
                uint64_t first = random_word() >> 32, last = first, now;
                unsigned length = 1;

                while ((now = random_word() >> 32) < last) {
                        last = now;
                        length++;
                }
                if (length % 2 == 1)
                        return (int64_t)(own.sample_bytes * whole + ((own.sample_bytes >> 12) * first >> 20));
        }
}

static bool is_sampled(size_t bytes)
{
        if (gr_options.backtrace == GR_BACKTRACE_FULL)
                return true;
        if (!own.sample_bytes) {
                own.sample_bytes = SAMPLE_BYTES;
                own.left = draw_gap();
        }
        if (bytes >= own.sample_bytes)
                return true;
        own.left -= (int64_t)bytes;
        if (own.left >= 0)
                return false;
        own.left = draw_gap();
        return true;
}

/*
 * The stack of a block that is noted. When sampling, it also adapts the thread's sample_bytes to the time that stacks
 * take. The next sample may be drawn anew at any time, because the chance of each byte does not depend on what came
 * before. A single slow stack, for which the unwinder reads tables, is no reason for fewer samples.
 */
static uint32_t stack_here(const struct gr_stack_file *stack_file)
{
        uint64_t since_ns, cost_ns, sample_bytes = own.sample_bytes;
        uint32_t stack;

        if (!sample_bytes)
                return gr_stack_here(stack_file);
        cost_ns = gr_platform_thread_ns();
        stack = gr_stack_here(stack_file);
        cost_ns = gr_platform_thread_ns() - cost_ns;
        if (own.cost_ns)
                cost_ns = gr_min(cost_ns, own.cost_ns + own.cost_ns / 8 + 1);
        own.cost_ns = cost_ns;
        since_ns = own.noted_ns;
        own.noted_ns = gr_driver.now_ns();
        since_ns = own.noted_ns - since_ns;
        if (own.stacks < COLD_STACKS) {
                own.stacks++;
                own.credit_ns = (int64_t)CREDIT_MOST_NS;
                return stack;
        }
        own.credit_ns += (int64_t)gr_min(since_ns / COST_MOST, 2 * CREDIT_MOST_NS);
        if (own.credit_ns > (int64_t)CREDIT_MOST_NS)
                own.credit_ns = (int64_t)CREDIT_MOST_NS;
        own.credit_ns -= (int64_t)gr_min(cost_ns, 2 * CREDIT_MOST_NS);
        if (own.credit_ns < -(int64_t)CREDIT_MOST_NS)
                own.credit_ns = -(int64_t)CREDIT_MOST_NS;
        if (own.credit_ns < 0 && cost_ns > since_ns / COST_MOST && sample_bytes < SAMPLE_MOST)
                own.sample_bytes *= 2;
        else if (own.credit_ns >= 0 && cost_ns < since_ns / COST_LEAST && sample_bytes > SAMPLE_BYTES)
                own.sample_bytes /= 2;
        if (own.sample_bytes != sample_bytes)
                own.left = draw_gap();
        return stack;
}

static size_t list_of(uint64_t address)
{
        return (address * UINT64_C(0x9e3779b97f4a7c15)) >> (64 - LISTS_LOG2);
}

/* A block that was never used; 0: there is no more room. */
static uint32_t new_block(void)
{
        uint64_t count = atomic_load_explicit(&header->blocks, memory_order_relaxed);

        do {
                size_t end = (count + 1) * sizeof(*blocks);

                if (end > blocks_room &&
                    !grow_room(&blocks_room, BLOCKS_AT, end, GR_ORIGINS_BLOCKS_MAX * sizeof(*blocks)))
                        return 0;
        } while (!atomic_compare_exchange_weak(&header->blocks, &count, count + 1));
        return (uint32_t)count + 1;
}

/* Lock held. The block of this address in its list; 0: none. */
static uint32_t find_in_list(size_t list, uint64_t address)
{
        uint32_t at = atomic_load_explicit(&heads[list], memory_order_relaxed);

        gr_assert_spin_locked(&parts[list % LOCKS].lock, GR_RANK_ORIGINS_FILE);
        while (at && atomic_load_explicit(&blocks[at - 1].address, memory_order_relaxed) != address)
                at = next[at - 1];
        return at;
}

void gr_origins_add(uint64_t address, size_t bytes)
{
        static const struct gr_stack_file stack_file = {append_record, commit_record};
        static _Thread_local uint32_t thread __attribute__((tls_model("initial-exec")));
        size_t list = list_of(address);
        struct part *part = &parts[list % LOCKS];
        struct gr_origins_block *block;
        uint64_t sample_bytes;
        uint32_t stack, at;

        if (!is_sampled(bytes))
                return;
        if (!thread)
                thread = (uint32_t)syscall(SYS_gettid);
        sample_bytes = own.sample_bytes;
        stack = stack_here(&stack_file);
        gr_trace_add(GR_ENTRY_STACK, GR_ENTRY_NO_DEVICE, sample_bytes ? (unsigned)__builtin_ctzll(sample_bytes) : 0,
                     address, stack);
        gr_spin_lock(&part->lock, GR_RANK_ORIGINS_FILE);
        at = find_in_list(list, address); /* found where an older block went with its context, and was not freed */
        if (!at) {
                at = part->spare;
                if (at) {
                        part->spare = next[at - 1];
                } else {
                        gr_spin_unlock(&part->lock, GR_RANK_ORIGINS_FILE);
                        at = new_block();
                        if (!at) {
                                atomic_fetch_add_explicit(&header->lost_blocks, 1, memory_order_relaxed);
                                return;
                        }
                        gr_spin_lock(&part->lock, GR_RANK_ORIGINS_FILE);
                }
                next[at - 1] = heads[list];
                heads[list] = at;
        }
        block = &blocks[at - 1];
        atomic_store_explicit(&block->address, 0, memory_order_relaxed);
        atomic_thread_fence(memory_order_release);
        block->bytes = bytes;
        block->time_ns = gr_driver.now_ns() - header->began_monotonic_ns;
        block->thread = thread;
        block->stack = stack;
        block->sample_bytes = sample_bytes;
        atomic_store_explicit(&block->address, address, memory_order_release);
        gr_spin_unlock(&part->lock, GR_RANK_ORIGINS_FILE);
}

struct gr_origins_found gr_origins_find(uint64_t address)
{
        size_t list = list_of(address);
        struct part *part = &parts[list % LOCKS];
        struct gr_origins_found found = {0};

        if (!atomic_load_explicit(&heads[list], memory_order_acquire)) /* most lists, where only a sample is noted */
                return found;
        gr_spin_lock(&part->lock, GR_RANK_ORIGINS_FILE);
        found.block = find_in_list(list, address);
        if (found.block)
                found.time_ns = blocks[found.block - 1].time_ns;
        gr_spin_unlock(&part->lock, GR_RANK_ORIGINS_FILE);
        return found;
}

/* Lock held. Moves the block from its list to those that can be used again. */
static void take_out(size_t list, uint32_t block)
{
        struct part *part = &parts[list % LOCKS];
        uint32_t at = heads[list];

        gr_assert_spin_locked(&part->lock, GR_RANK_ORIGINS_FILE);
        if (at == block) {
                heads[list] = next[at - 1];
        } else {
                while (next[at - 1] != block)
                        at = next[at - 1];
                next[at - 1] = next[block - 1];
        }
        next[block - 1] = part->spare;
        part->spare = block;
}

/* As gr_origins_remove. *ret: what was removed. False: nothing. */
static bool remove_block(uint64_t address, struct gr_origins_found found, struct gr_origins_block *ret)
{
        bool is_same;
        size_t list = list_of(address);
        struct part *part = &parts[list % LOCKS];
        struct gr_origins_block *block = &blocks[found.block - 1];

        gr_spin_lock(&part->lock, GR_RANK_ORIGINS_FILE);
        /* Not where a later block at this address has taken its place. */
        is_same = atomic_load_explicit(&block->address, memory_order_relaxed) == address &&
                  block->time_ns == found.time_ns;
        if (is_same) {
                ret->bytes = block->bytes;
                ret->stack = block->stack;
                ret->sample_bytes = block->sample_bytes;
                atomic_store_explicit(&block->address, 0, memory_order_relaxed);
                take_out(list, found.block);
        }
        gr_spin_unlock(&part->lock, GR_RANK_ORIGINS_FILE);
        return is_same;
}

void gr_origins_remove(uint64_t address, struct gr_origins_found found)
{
        struct gr_origins_block block;
        struct freed *last;

        if (!remove_block(address, found, &block))
                return;
        last = &freed[atomic_fetch_add_explicit(&freed_count, 1, memory_order_relaxed) % FREED];
        atomic_store_explicit(&last->freed_ns, 0, memory_order_relaxed);
        atomic_thread_fence(memory_order_release);
        atomic_store_explicit(&last->bytes, block.bytes, memory_order_relaxed);
        atomic_store_explicit(&last->sample_bytes, block.sample_bytes, memory_order_relaxed);
        atomic_store_explicit(&last->stack, block.stack, memory_order_relaxed);
        atomic_store_explicit(&last->freed_ns, gr_driver.now_ns(), memory_order_release);
}

uint32_t gr_origins_stack(uint64_t address)
{
        struct gr_origins_found found = header ? gr_origins_find(address) : (struct gr_origins_found){0};

        return found.block ? blocks[found.block - 1].stack : 0;
}

void gr_origins_context_gone(void)
{
        uint64_t count = atomic_load(&header->blocks);

        for (uint64_t i = 0; i < count; i++) {
                uint64_t address = atomic_load_explicit(&blocks[i].address, memory_order_acquire);
                struct gr_origins_found found = {0};
                struct gr_origins_block removed;
                struct gr_block_info info;

                if (address)
                        found = gr_origins_find(address); /* before the ledger is asked: not a later block there */
                if (found.block && (gr_ledger_find(gr_core.ledger, address, &info) != 0 || !info.live))
                        remove_block(address, found, &removed);
        }
}

static void *map_pages(size_t bytes)
{
        void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        return mapped == MAP_FAILED ? NULL : mapped;
}

/* The record with this number, if it is of this kind and has at least `least` bytes; else NULL. */
static const struct gr_origins_record *record_at(uint64_t number, enum gr_origins_kind kind, size_t least)
{
        size_t end = atomic_load_explicit(&header->records_bytes, memory_order_acquire), at = number * 8;
        const struct gr_origins_record *found = (const void *)((const char *)header + at);

        if (at < sizeof(*header) || at + least > end)
                return NULL;
        return found->kind == (uint32_t)kind && found->bytes >= least && found->bytes <= end - at ? found : NULL;
}

/* Frames of a stack, the innermost first; where it has frames of Python, only from the innermost of these on. */
struct frames {
        const uint64_t *list;
        size_t count;
};

static struct frames frames_of(uint32_t number)
{
        const struct gr_origins_stack *stack = (const void *)record_at(number, GR_ORIGINS_STACK, sizeof(*stack));
        size_t count = stack ? (stack->head.bytes - sizeof(*stack)) / sizeof(stack->frames[0]) : 0, at = 0;

        while (at < count && (!(stack->frames[at] & GR_ORIGINS_IS_PYTHON) || !(uint32_t)stack->frames[at]))
                at++;
        return at < count ? (struct frames){stack->frames + at, count - at}
                          : (struct frames){count > 0 ? stack->frames : NULL, count};
}

/* Appends the place of a frame: the line of Python, or the address in a program or library. */
static void add_place(char *ret, size_t bytes, uint64_t frame)
{
        size_t used = strlen(ret);
        const struct gr_origins_module *module;
        const struct gr_origins_python *python;
        const char *path, *slash;

        if (frame & GR_ORIGINS_IS_PYTHON) {
                python = (const void *)record_at((uint32_t)frame, GR_ORIGINS_PYTHON, sizeof(*python));
                path = python ? python->name_and_file + strlen(python->name_and_file) + 1 : "";
                slash = strrchr(path, '/');
                snprintf(ret + used, bytes - used, "%.40s (%.30s:%u)", python ? python->name_and_file : "a function",
                         slash ? slash + 1 : path, python ? python->line : 0);
                return;
        }
        module = (const void *)record_at(frame >> GR_ORIGINS_MODULE_SHIFT, GR_ORIGINS_MODULE, sizeof(*module));
        path = module ? module->path : "";
        slash = strrchr(path, '/');
        snprintf(ret + used, bytes - used, "%.60s%s0x%llx", slash ? slash + 1 : path, module ? "+" : "",
                 (unsigned long long)(frame & GR_ORIGINS_ADDRESS_MASK) - 1); /* the call */
}

void gr_origins_text(uint32_t stack, char *buf, size_t buf_bytes)
{
        struct frames frames = stack ? frames_of(stack) : (struct frames){0};
        size_t used = 0;

        buf[0] = '\0';
        for (size_t i = 0; i < frames.count; i++) {
                char place[128] = "";
                int length;

                add_place(place, sizeof(place), frames.list[i]);
                length = snprintf(buf + used, buf_bytes - used, "%s%s", i ? " < " : "", place);
                if ((size_t)length >= buf_bytes - used) {
                        buf[used] = '\0'; /* whole places only */
                        return;
                }
                used += (size_t)length;
        }
}

/*
 * Tells for each stack the place that allocates. Where another stack begins with the same frames, also the innermost
 * frame in which the two differ: a runtime linked into the program, or a function that allocates for others, says
 * little.
 */
static void tell_places(const uint32_t *stacks, unsigned count, struct gr_oom_origin *ret)
{
        for (unsigned i = 0; i < count; i++) {
                struct frames mine = frames_of(stacks[i]);
                size_t part = 0;

                for (unsigned other = 0; other < count; other++) {
                        struct frames of = frames_of(stacks[other]);
                        size_t at = 0;

                        while (at < mine.count && at < of.count && mine.list[at] == of.list[at])
                                at++;
                        if (other != i && at > part)
                                part = at;
                }
                ret[i].where[0] = '\0';
                if (mine.count == 0)
                        strcpy(ret[i].where, "stacks for which there was no more room");
                else
                        add_place(ret[i].where, sizeof(ret[i].where), mine.list[0]);
                if (part > 0 && part < mine.count) {
                        strcat(ret[i].where, " called from ");
                        add_place(ret[i].where, sizeof(ret[i].where), mine.list[part]);
                }
        }
}

struct sum {
        double bytes, blocks;
};

/* Puts a stack whose sum has grown among the largest, if it is one of them. Returns how many there are. */
static unsigned rank_stack(const struct sum *sums, uint32_t stack, uint32_t *largest, unsigned count)
{
        unsigned at = 0;

        while (at < count && largest[at] != stack)
                at++;
        if (at == GR_OOM_ORIGINS && sums[largest[--at]].bytes >= sums[stack].bytes)
                return count;
        if (at == count)
                count++;
        for (; at > 0 && sums[largest[at - 1]].bytes < sums[stack].bytes; at--)
                largest[at] = largest[at - 1];
        largest[at] = stack;
        return count;
}

/* Reads the block at this place. False: there is none, or it is not live memory of the device. */
static bool read_live(uint64_t i, int device, struct gr_origins_block *ret)
{
        uint64_t address = atomic_load_explicit(&blocks[i].address, memory_order_acquire);
        struct part *part = &parts[list_of(address) % LOCKS];
        struct gr_block_info info;
        bool is_same;

        if (!address || gr_ledger_find(gr_core.ledger, address, &info) != 0 || !info.live || info.spilled ||
            info.context->ordinal != device)
                return false;
        gr_spin_lock(&part->lock, GR_RANK_ORIGINS_FILE);
        is_same = atomic_load_explicit(&blocks[i].address, memory_order_relaxed) == address;
        ret->bytes = blocks[i].bytes;
        ret->stack = blocks[i].stack;
        ret->sample_bytes = blocks[i].sample_bytes;
        gr_spin_unlock(&part->lock, GR_RANK_ORIGINS_FILE);
        return is_same;
}

/* For gr_oom_origins. The C library's malloc is not called, and the only locks are for a few loads and stores. */
static unsigned find_largest(int device, struct gr_oom_origin ret[GR_OOM_ORIGINS], bool *ret_estimated)
{
        uint64_t block_count = atomic_load_explicit(&header->blocks, memory_order_relaxed);
        size_t stacks = atomic_load_explicit(&header->records_bytes, memory_order_relaxed) / 8;
        struct sum *sums = map_pages(stacks * sizeof(*sums)); /* by number of record; most stay unused */
        uint32_t largest[GR_OOM_ORIGINS] = {0};
        struct gr_origins_block block;
        unsigned count = 0;

        for (uint64_t i = 0; sums && i < block_count; i++) {
                double weight;

                if (!read_live(i, device, &block) || block.stack >= stacks)
                        continue;
                weight = gr_origins_weight(block.bytes, block.sample_bytes);
                sums[block.stack].bytes += weight * (double)block.bytes;
                sums[block.stack].blocks += weight;
                count = rank_stack(sums, block.stack, largest, count);
        }
        for (unsigned i = 0; i < count; i++) {
                ret[i].bytes = sums[largest[i]].bytes;
                ret[i].blocks = sums[largest[i]].blocks;
                ret[i].freed_s = 0;
        }
        tell_places(largest, count, ret);
        if (sums)
                munmap(sums, stacks * sizeof(*sums));
        *ret_estimated = header->sample_bytes > 0;
        return count;
}

/* For gr_oom_freed. A slot that is being written is left out. */
static unsigned find_freed(int device, struct gr_oom_origin ret[GR_OOM_ORIGINS], bool *ret_estimated)
{
        uint32_t end = atomic_load(&freed_count), stacks[GR_OOM_ORIGINS] = {0};
        uint64_t now_ns = gr_driver.now_ns();
        unsigned count = 0, at;

        (void)device;
        for (uint32_t i = 1; i <= FREED; i++) {
                struct freed *one = &freed[(end - i) % FREED];
                uint64_t freed_ns = atomic_load_explicit(&one->freed_ns, memory_order_acquire), bytes, sample_bytes;
                uint32_t stack = atomic_load_explicit(&one->stack, memory_order_relaxed);

                bytes = atomic_load_explicit(&one->bytes, memory_order_relaxed);
                sample_bytes = atomic_load_explicit(&one->sample_bytes, memory_order_relaxed);
                atomic_thread_fence(memory_order_acquire);
                if (!freed_ns || freed_ns != atomic_load_explicit(&one->freed_ns, memory_order_relaxed))
                        continue;
                for (at = 0; at < count && stacks[at] != stack; at++)
                        ;
                if (at == GR_OOM_ORIGINS)
                        continue;
                if (at == count) {
                        stacks[count++] = stack;
                        ret[at] = (struct gr_oom_origin){.freed_s = (double)(now_ns - gr_min(freed_ns, now_ns)) / 1e9 +
                                                                    1e-9};
                }
                ret[at].bytes += gr_origins_weight(bytes, sample_bytes) * (double)bytes;
                ret[at].blocks += gr_origins_weight(bytes, sample_bytes);
        }
        tell_places(stacks, count, ret);
        *ret_estimated = header->sample_bytes > 0;
        return count;
}

GR_HELD(lock) static int create_file(void)
{
        const char *const folders[] = GR_ORIGINS_FOLDERS, *const *folder = folders;
        const char *pattern = gr_options.backtrace_file.text;
        struct gr_path standard;
        struct timespec now;
        void *mapped;
        bool chosen = *pattern;
        int fd, rc;

        if (!chosen) {
                while (folder + 1 < folders + sizeof(folders) / sizeof(folders[0]) &&
                       (!*folder || access(*folder, W_OK) != 0))
                        folder++;
                snprintf(standard.text, sizeof(standard.text), GR_ORIGINS_NAME, *folder);
                pattern = standard.text;
        }
        /* Only for the user's own eyes, unless the user chose the place, which may be for others as well. */
        fd = gr_mapped_file_create(&file, pattern, chosen, chosen ? 0666 : 0600);
        if (fd < 0)
                return fd;
        rc = gr_mapped_file_reserve(fd, 0, STEP);
        mapped = rc ? MAP_FAILED : mmap(NULL, MAPPED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (!rc && mapped == MAP_FAILED)
                rc = -errno;
        gr_message_end(fd);
        if (rc) {
                unlink(file.path.text);
                return rc;
        }
        header = mapped;
        blocks = (void *)((char *)mapped + BLOCKS_AT);
        clock_gettime(CLOCK_REALTIME, &now);
        *header = (struct gr_origins_header){.version = GR_ORIGINS_VERSION,
                                             .header_bytes = sizeof(*header),
                                             .blocks_at = BLOCKS_AT,
                                             .pid = (uint64_t)getpid(),
                                             .began_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec,
                                             .began_monotonic_ns = gr_driver.now_ns(),
                                             .records_bytes = sizeof(*header)};
        if (gr_options.backtrace == GR_BACKTRACE_SAMPLE)
                header->sample_bytes = SAMPLE_BYTES;
        gr_mapped_file_command(header->command, sizeof(header->command));
        memcpy(header->magic, GR_ORIGINS_MAGIC, sizeof(header->magic));
        records_room = STEP;
        return 0;
}

bool gr_origins_init(void)
{
        int rc;

        if (gr_options.backtrace == GR_BACKTRACE_OFF)
                return false;
        heads = map_pages(LISTS * sizeof(*heads));
        next = map_pages(GR_ORIGINS_BLOCKS_MAX * sizeof(*next));
        rc = heads && next ? gr_stack_init() : -ENOMEM;
        gr_lock(&lock);
        if (!rc)
                rc = create_file();
        if (rc)
                gr_log(GR_LOG_WARN, "GPURECLAIM_BACKTRACE: cannot write %s: %s", file.path.text,
                       rc == -EEXIST ? "it is no regular file" : strerror(-rc));
        gr_unlock(&lock);
        if (!rc) {
                atomic_store(&gr_oom_freed, find_freed);
                atomic_store(&gr_oom_origins, find_largest);
        }
        return !rc;
}

void gr_origins_end(void)
{
        gr_lock(&lock);
        if (header && !gr_options.backtrace_file.text[0])
                unlink(file.path.text);
        gr_unlock(&lock);
}
