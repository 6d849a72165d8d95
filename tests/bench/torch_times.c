/*
 * How much of its time PyTorch spends to allocate and free device memory, whatever serves it: its own cache, or, with
 * PYTORCH_NO_CUDA_MEMORY_CACHING=1, cudaMalloc and cudaFree. Two processes of one kind differ by more than two
 * allocators do, for reasons that have nothing to do with either; this tells what is theirs.
 *
 * A library for a Python program to load once PyTorch has begun to use CUDA. It puts itself in the place of the
 * allocator's `allocate` in the allocator's table of virtual functions (the C++ ABI of x86-64 and aarch64: after two
 * destructors, c10/core/Allocator.h), and of the function that frees in each pointer that it returns (a c10::DataPtr:
 * the data, a unique_ptr to the context with its deleter, the device; where the data is its own context). What does not
 * look like that is left as it is, and counted as odd. Written after PyTorch 2.11.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ALLOCATOR     "_ZN3c104cuda20CUDACachingAllocator9allocatorE" /* c10::cuda::CUDACachingAllocator::allocator */
#define ALLOCATE_SLOT 2
#define EXPORT        __attribute__((visibility("default")))

typedef void free_function(void *context);

struct data_ptr {
        void *data;
        free_function *deleter;
        void *context;
        int16_t device;
};

typedef struct data_ptr allocate_function(void *allocator, size_t bytes);

static allocate_function *real_allocate;
static free_function *_Atomic real_deleter;
static _Atomic uint64_t allocations, allocation_ns, frees, free_ns, odd;

/* NULL: done. Else why not. */
EXPORT const char *torch_times_begin(void);

/* Since the beginning: allocations, ns in them, frees, ns in them, and pointers that were left as they are. */
EXPORT void torch_times_read(uint64_t ret_times[5]);

static uint64_t now_ns(void)
{
        struct timespec time;

        clock_gettime(CLOCK_MONOTONIC, &time);
        return (uint64_t)time.tv_sec * UINT64_C(1000000000) + (uint64_t)time.tv_nsec;
}

static void timed_free(void *context)
{
        uint64_t begin_ns = now_ns();

        atomic_load_explicit(&real_deleter, memory_order_relaxed)(context);
        atomic_fetch_add_explicit(&free_ns, now_ns() - begin_ns, memory_order_relaxed);
        atomic_fetch_add_explicit(&frees, 1, memory_order_relaxed);
}

static struct data_ptr timed_allocate(void *allocator, size_t bytes)
{
        uint64_t begin_ns = now_ns();
        struct data_ptr ptr = real_allocate(allocator, bytes);
        free_function *deleter = NULL;

        if (bytes == 0)
                return ptr;
        atomic_fetch_add_explicit(&allocation_ns, now_ns() - begin_ns, memory_order_relaxed);
        atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
        if (ptr.data && ptr.context == ptr.data && ptr.deleter &&
            (atomic_compare_exchange_strong(&real_deleter, &deleter, ptr.deleter) || deleter == ptr.deleter))
                ptr.deleter = timed_free;
        else
                atomic_fetch_add_explicit(&odd, 1, memory_order_relaxed);
        return ptr;
}

const char *torch_times_begin(void)
{
        void *library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        void ***allocator = dlsym(library ? library : RTLD_DEFAULT, ALLOCATOR);
        size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
        void **slot, *page;

        if (!allocator || !*allocator)
                return "PyTorch has no CUDA allocator of the expected name";
        slot = *(void ***)*allocator + ALLOCATE_SLOT;
        page = (void *)((uintptr_t)slot & ~(page_bytes - 1));
        real_allocate = (allocate_function *)*slot;
        if (mprotect(page, page_bytes, PROT_READ | PROT_WRITE))
                return "the allocator's functions cannot be changed";
        *slot = (void *)timed_allocate;
        return NULL;
}

void torch_times_read(uint64_t ret_times[5])
{
        ret_times[0] = atomic_load(&allocations);
        ret_times[1] = atomic_load(&allocation_ns);
        ret_times[2] = atomic_load(&frees);
        ret_times[3] = atomic_load(&free_ns);
        ret_times[4] = atomic_load(&odd);
}
