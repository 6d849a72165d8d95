/*
 * Virtual memory management: reserved addresses, and memory that is created and mapped there. Created memory lies in
 * one sparse file in memory, so that it can be mapped anywhere and more than once; memory that is exported moves to a
 * file of its own.
 */
#include "sim.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC_HANDLE 0x766d6d68u

/* The memory behind a CUmemGenericAllocationHandle. Guarded by sim_lock(). */
struct created {
        uint32_t magic;
        int own_file; /* its descriptor plus 1; 0: the memory is in the common file */
        off_t offset; /* in that file */
        size_t bytes;
        unsigned refs; /* the program's and one per mapping */
        bool charged;  /* it takes memory of the device; imported memory does not */
        CUmemAllocationProp prop;
        struct mapping *mappings;
        struct created *next; /* in the free list */
};

struct mapping {
        struct sim_alloc *range; /* idle until access is given */
        struct created *memory;
        struct mapping *next; /* of the same memory */
};

struct reservation {
        uintptr_t base;
        size_t bytes;
        struct mapping **pages; /* for each page what is mapped there, or NULL */
        struct reservation *next;
};

/* Guarded by sim_lock(). */
static int file = -1;
static off_t next_offset;
static struct created *dead;
static unsigned imports; /* of handles that own a file */
static size_t mapping_count;
/* Changed under both locks, read under either; so are their pages. */
static struct reservation *reservations;

/*
 * How many threads map or unmap at this moment. If two do, and memory is mapped twice, the driver corrupts its own heap
 * (docs/measurements.md, unmap-race); here that ends the program.
 */
static _Atomic int changing;

/* Lock held. */
static void check_alone(const struct created *memory, const char *what)
{
        if (changing > 1 && memory->mappings && memory->mappings->next) {
                fprintf(stderr, "%s: two threads at once, and memory that is mapped twice\n", what);
                abort();
        }
}

/* What is noted of the page of this address; NULL: it is not reserved. */
static struct mapping **page_at(uintptr_t address)
{
        for (struct reservation *r = reservations; r; r = r->next) {
                if (address >= r->base && address - r->base < r->bytes)
                        return &r->pages[(address - r->base) / SIM_PAGE_BYTES];
        }
        return NULL;
}

bool sim_is_reserved_locked(uintptr_t address)
{
        return page_at(address);
}

static struct mapping *find_mapping(uintptr_t address)
{
        struct mapping **page = page_at(address);

        return page ? *page : NULL;
}

struct sim_alloc *sim_find_mapped_locked(uintptr_t address)
{
        struct mapping *m = find_mapping(address);

        return m ? m->range : NULL;
}

/* Notes what is mapped at these pages from now on, or NULL. sim_lock() held. */
static void set_pages(uintptr_t base, size_t bytes, struct mapping *m)
{
        sim_memory_lock();
        for (size_t at = 0; at < bytes; at += SIM_PAGE_BYTES)
                *page_at(base + at) = m;
        sim_memory_unlock();
}

static bool whole_pages(size_t bytes)
{
        return bytes && bytes % SIM_PAGE_BYTES == 0;
}

static bool is_created(CUmemGenericAllocationHandle handle)
{
        struct created *memory = (struct created *)(uintptr_t)handle;

        return memory && memory->magic == MAGIC_HANDLE && memory->refs;
}

static bool on_device(const CUmemAllocationProp *prop)
{
        return prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
}

static CUresult check_prop(const CUmemAllocationProp *prop)
{
        if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
                return CUDA_ERROR_INVALID_VALUE;
        if (prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
                return CUDA_ERROR_NOT_SUPPORTED;
        if (on_device(prop))
                return sim_device_check(prop->location.id);
        return prop->location.type == CU_MEM_LOCATION_TYPE_HOST ||
                               prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
                               prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT
                       ? CUDA_SUCCESS
                       : CUDA_ERROR_INVALID_VALUE;
}

SIM_API cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop,
                                      CUmemAllocationGranularity_flags option)
{
        CUresult rc;

        SIM_ENTER(cuMemGetAllocationGranularity);
        (void)option;
        rc = bytes ? check_prop(prop) : CUDA_ERROR_INVALID_VALUE;
        if (rc == CUDA_SUCCESS)
                *bytes = SIM_PAGE_BYTES;
        return rc;
}

SIM_API cuMemAddressReserve(CUdeviceptr *ret_base, size_t bytes, size_t alignment, CUdeviceptr wish,
                            unsigned long long flags)
{
        struct reservation *r;
        uintptr_t start, base;
        size_t room;
        void *at;

        SIM_ENTER(cuMemAddressReserve);
        (void)wish; /* only a hint */
        if (!ret_base || !whole_pages(bytes) || flags || (alignment & (alignment - 1)))
                return CUDA_ERROR_INVALID_VALUE;
        if (alignment < SIM_PAGE_BYTES)
                alignment = SIM_PAGE_BYTES;
        if (bytes > SIZE_MAX - alignment)
                return CUDA_ERROR_OUT_OF_MEMORY;
        r = calloc(1, sizeof *r);
        if (r)
                r->pages = calloc(bytes / SIM_PAGE_BYTES, sizeof *r->pages);
        room = alignment > SIM_PAGE_BYTES ? bytes + alignment : bytes;
        at = sim_map(room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (!r || !r->pages || at == MAP_FAILED) {
                if (at != MAP_FAILED)
                        munmap(at, room);
                if (r)
                        free(r->pages);
                free(r);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        start = (uintptr_t)at;
        base = (start + alignment - 1) & ~(uintptr_t)(alignment - 1);
        if (base > start)
                munmap(at, base - start);
        if (start + room > base + bytes)
                munmap((void *)(base + bytes), start + room - base - bytes);
        r->base = base;
        r->bytes = bytes;
        sim_lock();
        sim_memory_lock();
        r->next = reservations;
        reservations = r;
        sim_memory_unlock();
        sim_unlock();
        *ret_base = base;
        return CUDA_SUCCESS;
}

static bool has_mapping(const struct reservation *r)
{
        for (size_t i = 0; i < r->bytes / SIM_PAGE_BYTES && mapping_count > 0; i++) {
                if (r->pages[i])
                        return true;
        }
        return false;
}

SIM_API cuMemAddressFree(CUdeviceptr base, size_t bytes)
{
        struct reservation **at = &reservations, *r;
        CUresult rc = CUDA_ERROR_INVALID_VALUE;

        SIM_ENTER(cuMemAddressFree);
        sim_lock();
        while (*at && ((*at)->base != base || (*at)->bytes != bytes))
                at = &(*at)->next;
        r = *at;
        if (r && !has_mapping(r)) {
                sim_memory_lock();
                *at = r->next;
                sim_memory_unlock();
                sim_unmap((void *)(uintptr_t)base, bytes);
                free(r->pages);
                free(r);
                rc = CUDA_SUCCESS;
        }
        sim_unlock();
        return rc;
}

/* A new handle with one reference, the caller's; NULL when out of host memory. Lock held. */
static struct created *new_handle(const CUmemAllocationProp *prop, size_t bytes)
{
        struct created *memory = dead;

        if (memory)
                dead = memory->next;
        else
                memory = calloc(1, sizeof *memory);
        if (memory)
                *memory = (struct created){.magic = MAGIC_HANDLE, .bytes = bytes, .refs = 1, .prop = *prop};
        return memory;
}

static void forget_handle(struct created *memory)
{
        memory->magic = 0;
        memory->next = dead;
        dead = memory;
}

bool sim_vmm_has_imports(void)
{
        bool has;

        sim_lock();
        has = imports > 0;
        sim_unlock();
        return has;
}

void sim_vmm_begin(void)
{
        file = sim_memory_file("simulated device");
}

/* Gives the memory its place in the common file. Lock held. */
static bool back_memory(struct created *memory)
{
        memory->offset = next_offset;
        if (file < 0 || ftruncate(file, next_offset + (off_t)memory->bytes) != 0)
                return false;
        next_offset += (off_t)memory->bytes;
        return true;
}

SIM_API cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                    unsigned long long flags)
{
        struct created *memory;
        CUresult rc;

        SIM_ENTER(cuMemCreate);
        if (!handle || !whole_pages(bytes) || flags)
                return CUDA_ERROR_INVALID_VALUE;
        rc = check_prop(prop);
        if (rc != CUDA_SUCCESS)
                return rc;
        sim_lock();
        memory = new_handle(prop, bytes);
        if (!memory || !back_memory(memory) || (on_device(prop) && !sim_heap_charge(prop->location.id, bytes))) {
                if (memory)
                        forget_handle(memory);
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        } else {
                memory->charged = on_device(prop);
                *handle = (CUmemGenericAllocationHandle)(uintptr_t)memory;
        }
        sim_unlock();
        return rc;
}

/* Gives mapped memory its pages, where the program may access them. Lock held. */
static bool show_mapping(const struct mapping *m)
{
        return mmap((void *)m->range->base, m->range->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                    m->memory->own_file ? m->memory->own_file - 1 : file, m->memory->offset) != MAP_FAILED;
}

/*
 * Moves memory into a file of its own, which others can map; its properties stand behind it. No operation accesses the
 * memory meanwhile, as each would need the memory lock. Lock held.
 */
static bool move_to_own_file(struct created *memory)
{
        int own = sim_memory_file("simulated device");
        void *from = mmap(NULL, memory->bytes, PROT_READ, MAP_SHARED, file, memory->offset);
        bool moved;

        sim_memory_lock();
        moved = own >= 0 && from != MAP_FAILED && pwrite(own, from, memory->bytes, 0) == (ssize_t)memory->bytes &&
                pwrite(own, &memory->prop, sizeof memory->prop, (off_t)memory->bytes) == (ssize_t)sizeof memory->prop;
        if (moved) {
                fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset, (off_t)memory->bytes);
                memory->own_file = own + 1;
                memory->offset = 0;
                for (struct mapping *m = memory->mappings; m; m = m->next)
                        if (!m->range->idle && !show_mapping(m))
                                abort();
        } else if (own >= 0) {
                close(own);
        }
        sim_memory_unlock();
        if (from != MAP_FAILED)
                munmap(from, memory->bytes);
        return moved;
}

SIM_API cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                     CUmemAllocationHandleType type, unsigned long long flags)
{
        struct created *memory = (struct created *)(uintptr_t)handle;
        CUresult rc = CUDA_ERROR_INVALID_VALUE;

        SIM_ENTER(cuMemExportToShareableHandle);
        sim_lock();
        if (shareable && !flags && is_created(handle) && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
            memory->prop.requestedHandleTypes) {
                int copy = memory->own_file || move_to_own_file(memory)
                                   ? fcntl(memory->own_file - 1, F_DUPFD_CLOEXEC, 0)
                                   : -1;

                rc = copy < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
                if (rc == CUDA_SUCCESS)
                        *(int *)shareable = copy;
        }
        sim_unlock();
        return rc;
}

/* Each import makes a new handle, even in the process that exported the memory. */
SIM_API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                       CUmemAllocationHandleType type)
{
        struct created *memory = NULL;
        CUmemAllocationProp prop;
        struct stat status;
        int own;

        SIM_ENTER(cuMemImportFromShareableHandle);
        if (!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
            fstat((int)(intptr_t)shareable, &status) != 0 || status.st_size <= (off_t)sizeof prop ||
            pread((int)(intptr_t)shareable, &prop, sizeof prop, status.st_size - (off_t)sizeof prop) !=
                    (ssize_t)sizeof prop ||
            check_prop(&prop) != CUDA_SUCCESS || !whole_pages((size_t)status.st_size - sizeof prop))
                return CUDA_ERROR_INVALID_VALUE;
        own = fcntl((int)(intptr_t)shareable, F_DUPFD_CLOEXEC, 0);
        sim_lock();
        memory = own < 0 ? NULL : new_handle(&prop, (size_t)status.st_size - sizeof prop);
        if (memory) {
                memory->own_file = own + 1;
                imports++;
                *handle = (CUmemGenericAllocationHandle)(uintptr_t)memory;
        } else if (own >= 0) {
                close(own);
        }
        sim_unlock();
        return memory ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void drop_memory(struct created *memory)
{
        if (--memory->refs)
                return;
        if (memory->own_file) {
                close(memory->own_file - 1);
                imports--;
        } else {
                fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset, (off_t)memory->bytes);
        }
        if (memory->charged)
                sim_heap_uncharge(memory->prop.location.id, memory->bytes);
        forget_handle(memory);
}

SIM_API cuMemRelease(CUmemGenericAllocationHandle handle)
{
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuMemRelease);
        sim_lock();
        if (is_created(handle))
                drop_memory((struct created *)(uintptr_t)handle);
        else
                rc = CUDA_ERROR_INVALID_VALUE;
        sim_unlock();
        return rc;
}

/* Whether all of these pages are reserved, and nothing is mapped there. Lock held. */
static bool can_map(uintptr_t base, size_t bytes)
{
        for (size_t at = 0; at < bytes; at += SIM_PAGE_BYTES) {
                struct mapping **page = page_at(base + at);

                if (!page || *page)
                        return false;
        }
        return true;
}

SIM_API cuMemMap(CUdeviceptr base, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                 unsigned long long flags)
{
        struct created *memory = (struct created *)(uintptr_t)handle;
        struct mapping *m = NULL;
        CUresult rc = CUDA_ERROR_INVALID_VALUE;

        SIM_ENTER(cuMemMap);
        changing++;
        sim_lock();
        if (is_created(handle) && whole_pages(bytes) && !(base % SIM_PAGE_BYTES) && (offset || bytes != memory->bytes))
                rc = CUDA_ERROR_NOT_SUPPORTED; /* only a part of the handle's memory (measured, driver 580) */
        if (!is_created(handle) || !whole_pages(bytes) || offset || flags || bytes != memory->bytes ||
            base % SIM_PAGE_BYTES || !can_map(base, bytes))
                goto out;
        rc = CUDA_ERROR_OUT_OF_MEMORY;
        m = calloc(1, sizeof *m);
        if (!m)
                goto out;
        m->range = sim_range_add(SIM_ALLOC_MAPPED, base, bytes, NULL,
                                 on_device(&memory->prop) ? memory->prop.location.id : 0,
                                 memory->prop.allocFlags.gpuDirectRDMACapable);
        if (!m->range) {
                free(m);
                goto out;
        }
        sim_heap_set_idle(m->range, true);
        m->memory = memory;
        memory->refs++;
        m->next = memory->mappings;
        memory->mappings = m;
        mapping_count++;
        set_pages(base, bytes, m);
        check_alone(memory, "cuMemMap");
        rc = CUDA_SUCCESS;
out:
        sim_unlock();
        changing--;
        return rc;
}

/* Whether mappings cover exactly [base, base + bytes). Lock held. */
static bool is_covered(uintptr_t base, size_t bytes)
{
        while (bytes > 0) {
                struct mapping *m = find_mapping(base);

                if (!m || m->range->base != base || m->range->bytes > bytes)
                        return false;
                base += m->range->bytes;
                bytes -= m->range->bytes;
        }
        return true;
}

/* Lock held. */
static void unmap_mapping(struct mapping *m)
{
        struct mapping **at = &m->memory->mappings;
        void *start = (void *)m->range->base;
        size_t bytes = m->range->bytes;

        check_alone(m->memory, "cuMemUnmap");
        while (*at != m)
                at = &(*at)->next;
        *at = m->next;
        mapping_count--;
        /* Out of the table first: then no operation accesses the range any more. */
        set_pages(m->range->base, bytes, NULL);
        sim_range_remove(m->range);
        mmap(start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        drop_memory(m->memory);
        free(m);
}

/* Does not wait for work, like the driver's. */
SIM_API cuMemUnmap(CUdeviceptr base, size_t bytes)
{
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuMemUnmap);
        changing++;
        sim_lock();
        if (bytes && is_covered(base, bytes)) {
                for (uintptr_t at = base; at < base + bytes;) {
                        struct mapping *m = find_mapping(at);

                        at += m->range->bytes;
                        unmap_mapping(m);
                }
        } else if (mapping_count == 0 || base + bytes >= base) {
                /* Past the end of all addresses it succeeds as soon as anything is mapped (measured, driver 580). */
                rc = CUDA_ERROR_INVALID_VALUE;
        }
        sim_unlock();
        changing--;
        return rc;
}

SIM_API cuMemSetAccess(CUdeviceptr base, size_t bytes, const CUmemAccessDesc *descs, size_t count)
{
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuMemSetAccess);
        if (!descs || !count)
                return CUDA_ERROR_INVALID_VALUE;
        for (size_t i = 0; i < count; i++)
                if (descs[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                    sim_device_check(descs[i].location.id) != CUDA_SUCCESS)
                        return CUDA_ERROR_INVALID_DEVICE;
        sim_lock();
        if (!bytes || !is_covered(base, bytes)) {
                sim_unlock();
                return CUDA_ERROR_INVALID_VALUE;
        }
        for (uintptr_t at = base; at < base + bytes && rc == CUDA_SUCCESS;) {
                struct mapping *m = find_mapping(at);
                bool access;

                at += m->range->bytes;
                for (size_t i = 0; i < count; i++)
                        if (descs[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
                                m->range->access |= 1u << descs[i].location.id;
                        else
                                m->range->access &= ~(1u << descs[i].location.id);
                access = m->range->access != 0;
                if (access && m->range->idle && !show_mapping(m))
                        rc = CUDA_ERROR_OUT_OF_MEMORY;
                else
                        sim_heap_set_idle(m->range, !access);
        }
        sim_unlock();
        return rc;
}

SIM_API cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
        struct mapping *m;
        struct sim_alloc *alloc;

        SIM_ENTER(cuMemGetAccess);
        if (!flags || !location)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        m = find_mapping(ptr);
        *flags = m && !m->range->idle ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
        sim_unlock();
        alloc = sim_find(ptr); /* of memory from cuMemAlloc it says "none" */
        return m || (alloc && alloc->kind == SIM_ALLOC_DEVICE && !alloc->idle) ? CUDA_SUCCESS
                                                                               : CUDA_ERROR_INVALID_VALUE;
}

SIM_API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
        CUresult rc = CUDA_ERROR_INVALID_VALUE;

        SIM_ENTER(cuMemGetAllocationPropertiesFromHandle);
        sim_lock();
        if (prop && is_created(handle)) {
                *prop = ((struct created *)(uintptr_t)handle)->prop;
                rc = CUDA_SUCCESS;
        }
        sim_unlock();
        return rc;
}

SIM_API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
        struct mapping *m;

        SIM_ENTER(cuMemRetainAllocationHandle);
        if (!handle)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        m = find_mapping((uintptr_t)address);
        if (m) {
                m->memory->refs++;
                *handle = (CUmemGenericAllocationHandle)(uintptr_t)m->memory;
        }
        sim_unlock();
        return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
