/*
 * Device memory: an address range per device, allocated in pages of 2 MiB; allocations up to 1 MiB share pages. A table
 * of pages leads from any address to its allocation. Unused pages are inaccessible.
 */
#include "sim.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define UNITS (SIM_PAGE_BYTES / SIM_UNIT_BYTES)

/* A page shared by small allocations of one owner. */
struct slab {
        struct sim_alloc *unit[UNITS];
        CUmemoryPool owner;
        size_t used; /* units */
        size_t page;
        struct slab *next;
};

struct page {
        struct sim_alloc *alloc; /* a large allocation's page, or NULL */
        struct slab *slab;       /* or a shared page */
};

struct heap {
        uintptr_t base;
        size_t n_pages;    /* of addresses */
        size_t limit;      /* of memory */
        size_t used;       /* pages */
        size_t first_free; /* no free page below */
        struct page *pages;
        struct slab *slabs;
};

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
/* Guarded by memory_lock. */
static struct heap heaps[SIM_MAX_DEVICES];
static int n_heaps;
static struct sim_alloc *ranges;
static unsigned long long next_buffer_id = 1;

void sim_memory_lock(void)
{
        pthread_mutex_lock(&memory_lock);
}

void sim_memory_unlock(void)
{
        pthread_mutex_unlock(&memory_lock);
}

/* Gives a device its addresses. False: the system has none, or no memory to note what lies there. */
static bool heap_begin(struct heap *heap, const struct sim_config *config)
{
        /*
         * More addresses than memory, so that fragmentation of addresses refuses no request. If that many cannot be had
         * (under valgrind), fewer are reserved, but as many as there is memory.
         */
        size_t bytes = 4 * config->memory_bytes;
        void *at;

        if (bytes < (size_t)64 << 30)
                bytes = (size_t)64 << 30;
        while ((at = mmap(NULL, bytes + SIM_PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                          0)) == MAP_FAILED &&
               bytes / 2 >= config->memory_bytes)
                bytes /= 2;
        if (at == MAP_FAILED)
                return false;
        heap->pages = calloc(bytes / SIM_PAGE_BYTES, sizeof *heap->pages);
        if (!heap->pages) {
                munmap(at, bytes + SIM_PAGE_BYTES);
                return false;
        }
        heap->base = ((uintptr_t)at + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
        heap->n_pages = bytes / SIM_PAGE_BYTES;
        heap->limit = config->memory_bytes / SIM_PAGE_BYTES;
        return true;
}

bool sim_heap_setup(const struct sim_config *config)
{
        /* Those that an earlier try has begun stay. */
        while (n_heaps < config->devices && heap_begin(&heaps[n_heaps], config))
                n_heaps++;
        return n_heaps == config->devices;
}

static uintptr_t page_address(const struct heap *heap, size_t page)
{
        return heap->base + page * SIM_PAGE_BYTES;
}

/* First fit. Returns n_pages when there is no room. */
static size_t take_pages(struct heap *heap, size_t count, CUmemoryPool owner)
{
        size_t run = 0;

        if (count > heap->limit || heap->used > heap->limit - count)
                return heap->n_pages;
        for (size_t i = heap->first_free; i < heap->n_pages; i++) {
                run = heap->pages[i].alloc || heap->pages[i].slab ? 0 : run + 1;
                if (run == count) {
                        size_t first = i + 1 - count;

                        if (!sim_shared_take((int)(heap - heaps), count, heap->limit))
                                return heap->n_pages;
                        if (mprotect((void *)page_address(heap, first), count * SIM_PAGE_BYTES,
                                     PROT_READ | PROT_WRITE) != 0) {
                                sim_shared_give((int)(heap - heaps), count);
                                return heap->n_pages;
                        }
                        if (first == heap->first_free)
                                heap->first_free = i + 1;
                        heap->used += count;
                        if (owner) {
                                owner->reserved += count * SIM_PAGE_BYTES;
                                if (owner->reserved > owner->reserved_high)
                                        owner->reserved_high = owner->reserved;
                        }
                        return first;
                }
        }
        return heap->n_pages;
}

static void give_pages(struct heap *heap, size_t first, size_t count, CUmemoryPool owner)
{
        /* A new mapping gives the memory back to the host, and makes a stray access fault. */
        mmap((void *)page_address(heap, first), count * SIM_PAGE_BYTES, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        memset(&heap->pages[first], 0, count * sizeof *heap->pages);
        heap->used -= count;
        sim_shared_give((int)(heap - heaps), count);
        if (owner)
                owner->reserved -= count * SIM_PAGE_BYTES;
        if (first < heap->first_free)
                heap->first_free = first;
}

static bool place_small(struct heap *heap, struct sim_alloc *alloc)
{
        size_t need = alloc->footprint / SIM_UNIT_BYTES, page;
        struct slab *slab;

        for (slab = heap->slabs; slab; slab = slab->next) {
                size_t run = 0;

                if (slab->owner != alloc->pool || UNITS - slab->used < need)
                        continue;
                for (size_t i = 0; i < UNITS; i++) {
                        run = slab->unit[i] ? 0 : run + 1;
                        if (run == need) {
                                page = slab->page;
                                alloc->base = page_address(heap, page) + (i + 1 - need) * SIM_UNIT_BYTES;
                                goto found;
                        }
                }
        }
        slab = calloc(1, sizeof *slab);
        if (!slab)
                return false;
        page = take_pages(heap, 1, alloc->pool);
        if (page == heap->n_pages) {
                free(slab);
                return false;
        }
        slab->owner = alloc->pool;
        slab->page = page;
        slab->next = heap->slabs;
        heap->slabs = slab;
        heap->pages[page].slab = slab;
        alloc->base = page_address(heap, page);
found:
        for (size_t i = 0; i < need; i++)
                slab->unit[(alloc->base - page_address(heap, page)) / SIM_UNIT_BYTES + i] = alloc;
        slab->used += need;
        return true;
}

static bool place_large(struct heap *heap, struct sim_alloc *alloc)
{
        size_t count = alloc->footprint / SIM_PAGE_BYTES, first = take_pages(heap, count, alloc->pool);

        if (first == heap->n_pages)
                return false;
        for (size_t i = 0; i < count; i++)
                heap->pages[first + i].alloc = alloc;
        alloc->base = page_address(heap, first);
        return true;
}

struct sim_alloc *sim_heap_alloc(int device, size_t bytes, CUmemoryPool owner)
{
        bool small = bytes <= SIM_SMALL_BYTES, placed;
        size_t step = small ? SIM_UNIT_BYTES : SIM_PAGE_BYTES;
        struct sim_alloc *alloc;

        if (bytes == 0 || bytes > SIZE_MAX - step)
                return NULL;
        alloc = calloc(1, sizeof *alloc);
        if (!alloc)
                return NULL;
        alloc->bytes = bytes;
        alloc->footprint = (bytes + step - 1) / step * step;
        alloc->kind = owner ? SIM_ALLOC_POOL : SIM_ALLOC_DEVICE;
        alloc->device = device;
        alloc->pool = owner;
        sim_memory_lock();
        placed = small ? place_small(&heaps[device], alloc) : place_large(&heaps[device], alloc);
        alloc->buffer_id = next_buffer_id++;
        sim_memory_unlock();
        if (!placed) {
                free(alloc);
                return NULL;
        }
        return alloc;
}

static void free_small(struct heap *heap, struct slab *slab, struct sim_alloc *alloc)
{
        size_t first = (alloc->base - page_address(heap, slab->page)) / SIM_UNIT_BYTES;
        size_t count = alloc->footprint / SIM_UNIT_BYTES;

        memset(&slab->unit[first], 0, count * sizeof *slab->unit);
        slab->used -= count;
        if (slab->used == 0) {
                struct slab **at = &heap->slabs;

                while (*at != slab)
                        at = &(*at)->next;
                *at = slab->next;
                give_pages(heap, slab->page, 1, slab->owner);
                free(slab);
        }
}

static void free_locked(struct sim_alloc *alloc)
{
        struct heap *heap = &heaps[alloc->device];
        size_t page = (alloc->base - heap->base) / SIM_PAGE_BYTES;

        if (heap->pages[page].slab)
                free_small(heap, heap->pages[page].slab, alloc);
        else
                give_pages(heap, page, alloc->footprint / SIM_PAGE_BYTES, alloc->pool);
        if (alloc->file)
                close(alloc->file - 1);
        free(alloc);
}

void sim_heap_free(struct sim_alloc *alloc)
{
        sim_memory_lock();
        free_locked(alloc);
        sim_memory_unlock();
}

void sim_heap_free_context(CUcontext ctx)
{
        sim_memory_lock();
        for (int d = 0; d < n_heaps; d++) {
                struct heap *heap = &heaps[d];

                for (size_t i = 0; i < heap->n_pages && heap->used; i++) {
                        struct sim_alloc *alloc = heap->pages[i].alloc;

                        if (alloc && alloc->ctx == ctx && alloc->kind == SIM_ALLOC_DEVICE)
                                free_locked(alloc);
                        for (size_t u = 0; u < UNITS && heap->pages[i].slab; u++) {
                                alloc = heap->pages[i].slab->unit[u];
                                if (alloc && alloc->ctx == ctx && alloc->kind == SIM_ALLOC_DEVICE)
                                        free_locked(alloc);
                        }
                }
        }
        sim_memory_unlock();
}

/* The device whose addresses these are, or NULL. */
static struct heap *heap_of(uintptr_t address)
{
        for (int d = 0; d < n_heaps; d++) {
                if (address >= heaps[d].base && address - heaps[d].base < heaps[d].n_pages * SIM_PAGE_BYTES)
                        return &heaps[d];
        }
        return NULL;
}

bool sim_is_device_address_locked(uintptr_t address)
{
        return heap_of(address) || sim_is_reserved_locked(address);
}

bool sim_is_device_address(uintptr_t address)
{
        bool is;

        sim_memory_lock();
        is = sim_is_device_address_locked(address);
        sim_memory_unlock();
        return is;
}

struct sim_alloc *sim_find_locked(uintptr_t address)
{
        struct heap *heap = heap_of(address);

        if (heap) {
                const struct page *page = &heap->pages[(address - heap->base) / SIM_PAGE_BYTES];
                struct sim_alloc *alloc = page->alloc;

                if (page->slab)
                        alloc = page->slab->unit[(address - heap->base) % SIM_PAGE_BYTES / SIM_UNIT_BYTES];
                return alloc && address - alloc->base < alloc->bytes ? alloc : NULL;
        }
        if (sim_is_reserved_locked(address))
                return sim_find_mapped_locked(address);
        for (struct sim_alloc *range = ranges; range; range = range->next) {
                if (address >= range->base && address - range->base < range->bytes)
                        return range;
        }
        return NULL;
}

struct sim_alloc *sim_find(uintptr_t address)
{
        struct sim_alloc *alloc;

        sim_memory_lock();
        alloc = sim_find_locked(address);
        sim_memory_unlock();
        return alloc;
}

size_t sim_heap_free_bytes(int device)
{
        size_t bytes;

        sim_memory_lock();
        bytes = heaps[device].limit - heaps[device].used;
        bytes = sim_shared_free(device, heaps[device].limit, bytes) * SIM_PAGE_BYTES;
        sim_memory_unlock();
        return bytes;
}

bool sim_heap_charge(int device, size_t bytes)
{
        struct heap *heap = &heaps[device];
        size_t count = (bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES;
        bool fits;

        sim_memory_lock();
        fits = count <= heap->limit && heap->used <= heap->limit - count && sim_shared_take(device, count, heap->limit);
        if (fits)
                heap->used += count;
        sim_memory_unlock();
        return fits;
}

void sim_heap_uncharge(int device, size_t bytes)
{
        sim_memory_lock();
        heaps[device].used -= (bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES;
        sim_shared_give(device, (bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES);
        sim_memory_unlock();
}

static size_t given[SIM_MAX_DEVICES]; /* pages; guarded by memory_lock */

void sim_heap_give_all(void)
{
        sim_memory_lock();
        for (int d = 0; d < n_heaps; d++) {
                given[d] = heaps[d].used;
                heaps[d].used = 0;
                sim_shared_give(d, given[d]);
        }
        sim_memory_unlock();
}

bool sim_heap_take_all(void)
{
        int d;

        sim_memory_lock();
        for (d = 0; d < n_heaps; d++) {
                if (heaps[d].used + given[d] > heaps[d].limit || !sim_shared_take(d, given[d], heaps[d].limit))
                        break;
                heaps[d].used += given[d];
        }
        for (int back = d; d < n_heaps && back-- > 0;) {
                heaps[back].used -= given[back];
                sim_shared_give(back, given[back]);
        }
        sim_memory_unlock();
        return d == n_heaps;
}

bool sim_heap_has(enum sim_alloc_kind kind)
{
        struct sim_alloc *range;

        sim_memory_lock();
        for (range = ranges; range && range->kind != kind;)
                range = range->next;
        sim_memory_unlock();
        return range != NULL;
}

void sim_heap_set_idle(struct sim_alloc *alloc, bool idle)
{
        sim_memory_lock();
        alloc->idle = idle;
        if (!idle)
                alloc->buffer_id = next_buffer_id++;
        sim_memory_unlock();
}

static _Atomic uintptr_t freed_last;

void *sim_map(size_t bytes, int prot, int flags, int file, off_t offset)
{
        void *wish = (void *)atomic_exchange(&freed_last, 0), *at = mmap(wish, bytes, prot, flags, file, offset);
        uintptr_t start, base;

        if (at == MAP_FAILED || (uintptr_t)at % SIM_PAGE_BYTES == 0 || bytes > SIZE_MAX - SIM_PAGE_BYTES)
                return at;
        munmap(at, bytes);
        at = mmap(NULL, bytes + SIM_PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED)
                return at;
        start = (uintptr_t)at;
        base = (start + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
        at = mmap((void *)base, bytes, prot, flags | MAP_FIXED, file, offset);
        if (at == MAP_FAILED) {
                munmap((void *)start, bytes + SIM_PAGE_BYTES);
                return at;
        }
        bytes = (bytes + 4095) / 4096 * 4096;
        if (base > start)
                munmap((void *)start, base - start);
        if (start + SIM_PAGE_BYTES > base)
                munmap((void *)(base + bytes), start + SIM_PAGE_BYTES - base);
        return at;
}

void sim_unmap(void *at, size_t bytes)
{
        munmap(at, bytes);
        freed_last = (uintptr_t)at;
}

struct sim_alloc *sim_range_add(enum sim_alloc_kind kind, uintptr_t base, size_t bytes, CUcontext ctx, int device,
                                unsigned flags)
{
        struct sim_alloc *range = calloc(1, sizeof *range);

        if (!range)
                return NULL;
        range->base = base;
        range->bytes = range->footprint = bytes;
        range->kind = kind;
        range->ctx = ctx;
        range->device = device;
        range->flags = flags;
        sim_memory_lock();
        range->buffer_id = next_buffer_id++;
        if (kind != SIM_ALLOC_MAPPED) {
                range->next = ranges;
                ranges = range;
        }
        sim_memory_unlock();
        return range;
}

void sim_range_remove(struct sim_alloc *range)
{
        struct sim_alloc **at = &ranges;

        sim_memory_lock();
        while (range->kind != SIM_ALLOC_MAPPED && *at != range)
                at = &(*at)->next;
        if (*at == range)
                *at = range->next;
        sim_memory_unlock();
        free(range);
}
