#include "scripted_gpu.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/*
 * Only watches. To order threads for ThreadSanitizer, and to look at each access, would take nine tenths of a test's
 * time there (measured with gcc 12).
 */
#if defined(__clang__) && __has_attribute(disable_sanitizer_instrumentation)
#define WATCH __attribute__((noinline, disable_sanitizer_instrumentation)) /* inlined it would be */
#else
#define WATCH __attribute__((no_sanitize("thread")))
#endif

struct block *find_block(uint64_t ptr)
{
        struct block *block;

        HASH_FIND(hh, sg.blocks, &ptr, sizeof(ptr), block);
        return block;
}

static void block_drop(struct block *block)
{
        HASH_DELETE(hh, sg.blocks, block);
        free(block);
}

static struct address *address_of(uint64_t ptr)
{
        return &sg.addresses[(ptr - SG_VBASE) / PAGE];
}

/* The page of memory at an address; PAGES where there is none. */
WATCH static unsigned page_at(uint64_t ptr)
{
        unsigned page = ptr >= SG_VBASE ? address_of(ptr)->page - 1 : (unsigned)((ptr - BASE) / PAGE);

        if (page < PAGES && sg.pages[page])
                return page;
        misuse("no memory at 0x%" PRIx64, ptr);
        return PAGES;
}

/* When the last work on a part of the page ends, from offset up to end; LIVE where the program has some of it. */
WATCH static uint64_t page_last(unsigned page, uint64_t offset, uint64_t end)
{
        const struct page_use *use = &sg.uses[page];
        uint64_t last = use->last_ns;

        for (uint64_t i = offset / SLOT; use->slots && i < (end + SLOT - 1) / SLOT; i++)
                last = later(last, use->slots[i]);
        return last;
}

WATCH static uint64_t last_use(uint64_t ptr, size_t bytes)
{
        uint64_t last = 0;

        for (uint64_t at = ptr, next; at < ptr + bytes; at = next) {
                unsigned page = page_at(at);

                next = at - at % PAGE + PAGE < ptr + bytes ? at - at % PAGE + PAGE : ptr + bytes;
                if (page < PAGES)
                        last = later(last, page_last(page, at % PAGE, at % PAGE + next - at));
        }
        return last;
}

/* The program has the block from now on (LIVE), or has it no longer, and work on it ends then. */
WATCH static void mark_use(uint64_t ptr, size_t bytes, uint64_t last_ns)
{
        for (uint64_t at = ptr, next; at < ptr + bytes; at = next) {
                unsigned page = page_at(at);
                struct page_use *use = &sg.uses[page % PAGES];

                next = at - at % PAGE + PAGE < ptr + bytes ? at - at % PAGE + PAGE : ptr + bytes;
                if (page < PAGES && next - at == PAGE) {
                        use->last_ns = last_ns;
                        if (use->slots)
                                memset(use->slots, 0, SLOTS * sizeof(*use->slots));
                } else if (page < PAGES) {
                        if (!use->slots)
                                use->slots = calloc(SLOTS, sizeof(*use->slots));
                        for (uint64_t i = at % PAGE / SLOT; i <= (next - 1) % PAGE / SLOT; i++)
                                use->slots[i] = last_ns;
                }
                if (at >= SG_VBASE) {
                        address_of(at)->used += last_ns == LIVE ? 1 : UINT_MAX;
                        if (last_ns != LIVE)
                                address_of(at)->last_ns = later(address_of(at)->last_ns, last_ns);
                }
        }
}

/* The driver takes the memory, which is or was at ptr. */
static void check_idle(uint64_t last_ns, const char *what, uint64_t ptr)
{
        if (last_ns == LIVE)
                misuse("%s of 0x%" PRIx64 ", which the program has", what, ptr);
        else if (last_ns > gpu_ns())
                misuse("%s of 0x%" PRIx64 ", which work still uses", what, ptr);
}

static void forget_use(unsigned page)
{
        free(sg.uses[page].slots);
        sg.uses[page] = (struct page_use){0};
}

static struct allocation *find(uint64_t ptr)
{
        struct allocation *allocation;

        HASH_FIND(hh, sg.allocations, &ptr, sizeof(ptr), allocation);
        return allocation;
}

/* The first of count free pages in a row; PAGES where there are none. Addresses are reused as soon as they can be. */
static unsigned pages_find(unsigned count)
{
        unsigned run = 0;

        for (unsigned i = 0; i < PAGES; i++) {
                run = sg.pages[i] ? 0 : run + 1;
                if (run == count)
                        return i + 1 - count;
        }
        return PAGES;
}

static uint64_t free_bytes(int device)
{
        uint64_t taken = sg.used_bytes[device] + sg.others_bytes[device] + sg.cache_bytes[device];

        return sg.capacity_bytes > taken ? sg.capacity_bytes - taken : 0;
}

static uint64_t pages_take(int device, unsigned count)
{
        unsigned first;

        if (count * PAGE > free_bytes(device))
                return 0;
        first = pages_find(count);
        if (first == PAGES)
                return 0;
        memset(&sg.pages[first], 2, count);
        sg.pages[first] = 1;
        sg.used_bytes[device] += count * PAGE;
        return BASE + first * PAGE;
}

static void pages_give(int device, uint64_t ptr, unsigned count)
{
        for (unsigned page = (unsigned)((ptr - BASE) / PAGE), i = 0; i < count; i++) {
                sg.pages[page + i] = 0;
                forget_use(page + i);
        }
        sg.used_bytes[device] -= count * PAGE;
}

static uint64_t slab_fit(unsigned page, unsigned count)
{
        struct slab *slab = sg.slabs[page];
        unsigned run = 0;

        for (unsigned i = 0; i < SLOTS; i++) {
                run = slab->slots[i] ? 0 : run + 1;
                if (run == count) {
                        memset(&slab->slots[i + 1 - count], 1, count);
                        slab->used += count;
                        return BASE + page * PAGE + (uint64_t)(i + 1 - count) * SLOT;
                }
        }
        return 0;
}

static uint64_t small_take(int device, size_t bytes)
{
        unsigned count = (unsigned)((bytes + SLOT - 1) / SLOT), page;
        uint64_t ptr = 0;

        for (page = 0; page < PAGES && !ptr; page++)
                if (sg.slabs[page] && sg.slabs[page]->device == device)
                        ptr = slab_fit(page, count);
        if (ptr)
                return ptr;
        ptr = pages_take(device, 1);
        if (!ptr)
                return 0;
        page = (unsigned)((ptr - BASE) / PAGE);
        sg.slabs[page] = calloc(1, sizeof(struct slab));
        sg.slabs[page]->device = device;
        return slab_fit(page, count);
}

static void memory_give(struct allocation *allocation)
{
        unsigned page = (unsigned)((allocation->ptr - BASE) / PAGE);
        int device = allocation->context->device;
        struct slab *slab = sg.slabs[page];
        struct block *block = find_block(allocation->ptr);
        unsigned count;

        if (block)
                block_drop(block);
        HASH_DELETE(hh, sg.allocations, allocation);
        if (slab) {
                count = (unsigned)((allocation->bytes + SLOT - 1) / SLOT);
                mark_use(allocation->ptr, allocation->bytes, 0);
                memset(&slab->slots[(allocation->ptr - BASE) % PAGE / SLOT], 0, count);
                slab->used -= count;
                if (slab->used == 0) {
                        free(slab);
                        sg.slabs[page] = NULL;
                        pages_give(device, allocation->ptr & ~(PAGE - 1), 1);
                }
        } else {
                pages_give(device, allocation->ptr, (unsigned)((allocation->bytes + PAGE - 1) / PAGE));
        }
        free(allocation);
}

int mem_alloc(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        struct context *context = handle;
        struct allocation *allocation;
        int rc = enter(SG_MEM_ALLOC);
        uint64_t ptr;

        if (rc)
                return leave(rc);
        check_context(context, "an allocation");
        if (bytes == 0)
                return leave(INVALID);
        if (bytes > (uint64_t)PAGES * PAGE)
                return leave(-ENOMEM);
        ptr = bytes <= SMALL_MAX ? small_take(context->device, bytes)
                                 : pages_take(context->device, (unsigned)((bytes + PAGE - 1) / PAGE));
        if (!ptr)
                return leave(-ENOMEM);
        allocation = calloc(1, sizeof(*allocation));
        if (!allocation)
                return leave(-ENOMEM);
        allocation->ptr = ptr;
        allocation->bytes = bytes;
        allocation->context = context;
        HASH_ADD(hh, sg.allocations, ptr, sizeof(allocation->ptr), allocation);
        *ret_ptr = ptr;
        return leave(0);
}

int mem_free(uint64_t ptr)
{
        struct allocation *allocation;
        int rc = enter(SG_MEM_FREE);

        if (rc)
                return leave(rc);
        allocation = find(ptr);
        if (!allocation) {
                misuse("free of 0x%" PRIx64 ", which is no allocation", ptr);
                return leave(INVALID);
        }
        gpu_reach(work_end(allocation->context)); /* blocks, as the driver's own does */
        if (last_use(ptr, allocation->bytes) == LIVE)
                misuse("free of 0x%" PRIx64 ", which the program has", ptr);
        memory_give(allocation);
        return leave(0);
}

int mem_release(void *handle, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        int rc = enter(SG_MEM_RELEASE);

        *ret_done = 0;
        if (rc)
                return leave(rc);
        check_context(handle, "a release");
        for (size_t i = 0; i < count; i++) {
                struct allocation *allocation = find(ptrs[i]);

                if (!allocation) {
                        misuse("release of 0x%" PRIx64 ", which is no allocation", ptrs[i]);
                        return leave(INVALID);
                }
                if (allocation->context != handle)
                        misuse("release of 0x%" PRIx64 " in a foreign context", ptrs[i]);
                check_idle(last_use(ptrs[i], allocation->bytes), "release", ptrs[i]);
                memory_give(allocation);
                ++*ret_done;
        }
        return leave(0);
}

int mem_reserve(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        size_t area = 0;
        int rc = enter(SG_MEM_RESERVE);

        if (rc)
                return leave(rc);
        check_context(handle, "a reservation");
        /* Given up ones come again only when all others are used: threads may open an expandable segment at once */
        if (sg.areas < AREAS) {
                area = sg.areas++;
        } else {
                while (area < AREAS && sg.area_used[area])
                        area++;
        }
        if (bytes > AREA_PAGES * PAGE || area == AREAS) {
                misuse("more addresses than there are: %zu", bytes);
                return leave(-ENOMEM);
        }
        sg.area_used[area] = true;
        *ret_ptr = SG_VBASE + area * AREA_PAGES * PAGE;
        sg.reserved++;
        return leave(0);
}

void mem_unreserve(uint64_t ptr, size_t bytes)
{
        pthread_mutex_lock(&sg.lock);
        sg.reserved--;
        sg.area_used[(ptr - SG_VBASE) / (AREA_PAGES * PAGE)] = false;
        for (uint64_t at = ptr; at < ptr + bytes; at += PAGE)
                if (address_of(at)->page)
                        misuse("addresses given up with memory behind them: 0x%" PRIx64, at);
        pthread_mutex_unlock(&sg.lock);
}

int mem_map(void *handle, int device, uint64_t ptr, size_t bytes, uint64_t *memory)
{
        bool fresh = *memory == 0;
        int rc = enter(SG_MEM_MAP);

        if (!rc && !fresh)
                rc = count(SG_MEM_REMAP);
        if (!rc && fresh && !(*memory = pages_take(device, (unsigned)(bytes / PAGE))))
                rc = -ENOMEM;
        if (rc)
                return leave(rc);
        check_context(handle, "a mapping");
        if (bytes == 0 || (bytes | ptr) % PAGE)
                misuse("no whole pages are mapped at 0x%" PRIx64, ptr);
        sg.handles += fresh;
        for (unsigned i = 0, page = (unsigned)((*memory - BASE) / PAGE); i < bytes / PAGE; i++, page++) {
                if (sg.pages[page] != (i == 0 ? 1 : 2))
                        misuse("not the memory of a handle, or not all of it: 0x%" PRIx64, ptr);
                sg.cards[page] = (uint8_t)device;
                sg.refs[page] += fresh ? 2 : 1;
                if (address_of(ptr + i * PAGE)->page)
                        misuse("0x%" PRIx64 " mapped twice", ptr + i * PAGE);
                *address_of(ptr + i * PAGE) = (struct address){.page = page + 1};
        }
        return leave(0);
}

/* One reason less to keep the page of memory: a mapping or its handle. With the last it is free. */
static void page_drop(unsigned page)
{
        if (sg.refs[page] == 0)
                misuse("memory that nobody holds is given up: page %u", page);
        else if (--sg.refs[page] == 0)
                pages_give(sg.cards[page], BASE + page * PAGE, 1);
}

int mem_unmap(void *handle, uint64_t ptr, size_t bytes, uint64_t memory)
{
        int rc = enter(SG_MEM_UNMAP);

        (void)handle; /* NULL once the context is gone */
        if (rc)
                return leave(rc);
        for (uint64_t at = ptr; at < ptr + bytes; at += PAGE) {
                struct address address = *address_of(at);
                unsigned page = address.page - 1;

                if (!address.page || (memory && page != (memory + (at - ptr) - BASE) / PAGE)) {
                        misuse("other memory is unmapped than was mapped at 0x%" PRIx64, at);
                        continue;
                }
                check_idle(address.used ? LIVE : address.last_ns, "unmapping", at);
                if (memory)
                        check_idle(page_last(page, 0, PAGE), "unmapping", at);
                *address_of(at) = (struct address){0};
                page_drop(page);
                if (memory)
                        page_drop(page);
        }
        sg.handles -= memory != 0;
        return leave(0);
}

int mem_info(void *handle, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
        struct context *context = handle;
        int rc = enter(SG_MEM_INFO);

        if (rc)
                return leave(rc);
        check_context(context, "a question");
        *ret_free_bytes = free_bytes(context->device);
        *ret_total_bytes = sg.capacity_bytes;
        return leave(0);
}

void memory_forget(void)
{
        struct allocation *allocation, *tmp;

        while (sg.blocks)
                block_drop(sg.blocks);
        HASH_ITER (hh, sg.allocations, allocation, tmp) {
                memory_give(allocation);
        }
        for (unsigned page = 0; page < PAGES; page++)
                free(sg.uses[page].slots);
}

void memory_context_gone(struct context *context)
{
        struct allocation *allocation, *tmp;

        if (sg.by_hand) { /* its ranges are no allocations, and no work uses them any more */
                while (sg.blocks)
                        block_drop(sg.blocks);
                for (unsigned page = 0; page < PAGES; page++)
                        forget_use(page);
                for (unsigned i = 0; i < AREAS * AREA_PAGES; i++)
                        sg.addresses[i].used = 0;
        }
        HASH_ITER (hh, sg.allocations, allocation, tmp) {
                if (allocation->context == context)
                        memory_give(allocation);
        }
}

void sg_hold(int device, uint64_t others_bytes, uint64_t driver_cache_bytes)
{
        pthread_mutex_lock(&sg.lock);
        sg.others_bytes[device] = others_bytes;
        sg.cache_bytes[device] = driver_cache_bytes;
        pthread_mutex_unlock(&sg.lock);
}

uint64_t sg_used_bytes(int device)
{
        uint64_t bytes;

        pthread_mutex_lock(&sg.lock);
        bytes = sg.used_bytes[device];
        pthread_mutex_unlock(&sg.lock);
        return bytes;
}

size_t sg_size(uint64_t ptr)
{
        struct allocation *allocation;
        size_t bytes;

        pthread_mutex_lock(&sg.lock);
        allocation = find(ptr);
        bytes = allocation ? allocation->bytes : 0;
        pthread_mutex_unlock(&sg.lock);
        return bytes;
}

unsigned sg_reserved(void)
{
        return sg.reserved;
}

unsigned sg_handles(void)
{
        return sg.handles;
}

/* With the lock held. */
static void own(uint64_t ptr, size_t bytes)
{
        struct allocation *allocation = find(ptr);
        struct block *block = find_block(ptr);
        uint64_t last_ns;

        if (!allocation && !sg.by_hand) {
                misuse("0x%" PRIx64 " was handed out and is no allocation", ptr);
                return;
        }
        if (allocation && allocation->bytes < bytes)
                misuse("0x%" PRIx64 " has %zu bytes, not %zu", ptr, allocation->bytes, bytes);
        last_ns = last_use(ptr, bytes);
        if (last_ns == LIVE)
                misuse("0x%" PRIx64 " was handed out twice", ptr);
        if (block)
                block_drop(block);
        block = calloc(1, sizeof(*block));
        *block = (struct block){.ptr = ptr, .bytes = bytes, .former_ns = last_ns == LIVE ? 0 : last_ns};
        HASH_ADD(hh, sg.blocks, ptr, sizeof(block->ptr), block);
        mark_use(ptr, bytes, LIVE);
}

void sg_own(uint64_t ptr, size_t bytes)
{
        pthread_mutex_lock(&sg.lock);
        own(ptr, bytes);
        pthread_mutex_unlock(&sg.lock);
}

/* As sg_disown, and what there was to know of the block. */
static bool disown(uint64_t ptr, struct block *ret_block)
{
        struct block *block;

        pthread_mutex_lock(&sg.lock);
        block = find_block(ptr);
        if (block) {
                *ret_block = *block;
                mark_use(ptr, block->bytes, later(block->former_ns, block->own_ns));
                block_drop(block);
        }
        pthread_mutex_unlock(&sg.lock);
        return block != NULL;
}

bool sg_disown(uint64_t ptr)
{
        struct block block;

        return disown(ptr, &block);
}

int sg_alloc(struct gr_context *context, size_t bytes, uint64_t *ret_ptr)
{
        uint64_t ptr;
        int rc = gr_pool_alloc(context, bytes, &ptr);

        if (rc)
                return rc;
        sg_own(ptr, bytes);
        *ret_ptr = ptr;
        return 0;
}

int sg_free_in_order(struct gr_core *core, uint64_t ptr, gr_pool_give_back *give_back)
{
        struct block block;
        bool had = disown(ptr, &block);
        int rc = give_back ? gr_pool_free_in_order(core, ptr, give_back, NULL) : gr_pool_free(core, ptr);

        pthread_mutex_lock(&sg.lock);
        if (!had && !rc)
                misuse("0x%" PRIx64 ", which the program had not, was freed", ptr);
        if (had && rc) {
                if (!find(ptr) && !sg.by_hand)
                        misuse("the free of 0x%" PRIx64 " failed, but the block is gone", ptr);
                else
                        own(ptr, block.bytes);
        }
        pthread_mutex_unlock(&sg.lock);
        return rc;
}

int sg_free(struct gr_core *core, uint64_t ptr)
{
        return sg_free_in_order(core, ptr, NULL);
}
