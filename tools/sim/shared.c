/*
 * GRSIM_SHARED=path: processes that name the same file share one GPU of GRSIM_MEMORY. The file holds an account of
 * pages per process; the GPU is full when their sum reaches its size. The account of a dead process is removed by one
 * that needs room, so kill -9 loses nothing; and there is no lock that a dead process could keep.
 */
#include "sim.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "system/platform.h"

#define ACCOUNTS 1024
#define TRIES    50
#define PAUSE_US 100

struct account {
        _Atomic uint64_t owner; /* pid << 32 | start time; 0: free */
        _Atomic uint64_t pages[SIM_MAX_DEVICES];
};

static struct account *accounts, *own;

static bool is_gone(uint64_t owner)
{
        uint64_t start;
        enum gr_process_state state = gr_platform_process_state((uint32_t)(owner >> 32), &start);

        return state == GR_PROCESS_GONE || (state != GR_PROCESS_UNKNOWN && (uint32_t)start != (uint32_t)owner);
}

static void sweep_accounts(void)
{
        for (size_t i = 0; i < ACCOUNTS; i++) {
                uint64_t owner = atomic_load(&accounts[i].owner);

                if (owner && is_gone(owner))
                        atomic_compare_exchange_strong(&accounts[i].owner, &owner, 0);
        }
}

static bool claim_account(uint64_t token)
{
        for (size_t i = 0; i < ACCOUNTS; i++) {
                uint64_t none = 0;

                if (atomic_compare_exchange_strong(&accounts[i].owner, &none, token)) {
                        for (int d = 0; d < SIM_MAX_DEVICES; d++)
                                atomic_store(&accounts[i].pages[d], 0);
                        own = &accounts[i];
                        return true;
                }
        }
        return false;
}

void sim_shared_setup(const char *path)
{
        struct gr_identity self;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

        if (fd < 0 || ftruncate(fd, ACCOUNTS * sizeof *accounts) != 0 || gr_platform_identity(&self) != 0)
                abort();
        accounts = mmap(NULL, ACCOUNTS * sizeof *accounts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (accounts == MAP_FAILED)
                abort();
        sweep_accounts();
        if (!claim_account((uint64_t)self.pid << 32 | (uint32_t)self.start_ticks))
                abort();
}

/* gpu: the number in the file, which CUDA_VISIBLE_DEVICES does not change. */
static uint64_t sum_pages(int gpu)
{
        uint64_t pages = 0;

        for (size_t i = 0; i < ACCOUNTS; i++) {
                if (atomic_load(&accounts[i].owner))
                        pages += atomic_load(&accounts[i].pages[gpu]);
        }
        return pages;
}

bool sim_shared_take(int device, size_t pages, size_t limit)
{
        const int gpu = sim_config()->physical[device];
        if (!own || pages == 0) /* 0 pages: succeeds also while the try of another process exceeds the limit */
                return true;
        for (int i = 0; i < TRIES; i++) {
                atomic_fetch_add(&own->pages[gpu], pages);
                if (sum_pages(gpu) <= limit)
                        return true;
                atomic_fetch_sub(&own->pages[gpu], pages);
                sweep_accounts();
                if (sum_pages(gpu) + pages > limit)
                        return false;
                /* Two processes may have refused each other: try again after a back-off of different length. */
                usleep(PAUSE_US * (1 + (unsigned)getpid() % 7));
        }
        return false;
}

void sim_shared_give(int device, size_t pages)
{
        const int gpu = sim_config()->physical[device];
        if (own)
                atomic_fetch_sub(&own->pages[gpu], pages);
}

size_t sim_shared_free(int device, size_t limit, size_t own_free)
{
        const int gpu = sim_config()->physical[device];
        uint64_t used;

        if (!own)
                return own_free;
        sweep_accounts();
        used = sum_pages(gpu);
        return used < limit ? limit - used : 0;
}

bool sim_shared_process(int device, unsigned i, unsigned *ret_pid, size_t *ret_pages)
{
        uint64_t owner = own && i < ACCOUNTS ? atomic_load(&accounts[i].owner) : 0;

        *ret_pid = (unsigned)(owner >> 32);
        *ret_pages = owner ? atomic_load(&accounts[i].pages[sim_config()->physical[device]]) : 0;
        return own && i < ACCOUNTS;
}

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
        for (size_t i = 0; i < bytes; i++)
                hash = (hash ^ ((const unsigned char *)data)[i]) * UINT64_C(0x100000001b3);
        return hash;
}

uint64_t sim_shared_gpu(const char *path)
{
        uint64_t hash = UINT64_C(0xcbf29ce484222325);
        struct gr_identity self = {.pid = (uint32_t)getpid()};

        if (path)
                return hash_bytes(hash, path, strlen(path));
        gr_platform_identity(&self);
        /* Field by field, as padding bytes have no defined value. */
        hash = hash_bytes(hash, &self.pid, sizeof self.pid);
        hash = hash_bytes(hash, &self.start_ticks, sizeof self.start_ticks);
        return hash_bytes(hash, &self.pid_namespace, sizeof self.pid_namespace);
}
