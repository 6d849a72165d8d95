/*
 * How operations access memory: chunk by chunk under the memory lock, after a check that the chunk is allocated at that
 * moment. So a free that races with work that uses the memory is reported, instead of crashing the simulated device.
 */
#include "sim.h"

#include <string.h>

#define CHUNK_BYTES ((size_t)256 << 10)

/* Whether the operation may access [address, address + bytes) now; if not, *ret_why. Memory lock held. */
static bool is_allowed(const struct sim_access *access, uintptr_t address, size_t bytes, const char **ret_why)
{
        const struct sim_alloc *alloc = sim_find_locked(address);

        if (!alloc) {
                *ret_why = "not allocated";
                return access->host_ok && address && !sim_is_device_address_locked(address);
        }
        if (alloc->idle) {
                *ret_why = alloc->kind == SIM_ALLOC_MAPPED ? "without access" : "freed";
                return false;
        }
        if (bytes > alloc->bytes - (address - alloc->base)) {
                size_t here = alloc->bytes - (address - alloc->base);

                /* Mappings may continue each other; any other allocation must not be passed. */
                if (alloc->kind == SIM_ALLOC_MAPPED)
                        return is_allowed(access, address + here, bytes - here, ret_why);
                *ret_why = "past the end of the allocation";
                return false;
        }
        if (alloc->kind <= SIM_ALLOC_POOL && !(alloc->pool && alloc->pool->host) && !access->host_ok &&
            access->op->ctx && alloc->device != access->op->ctx->device &&
            !(access->op->ctx->peers & 1u << alloc->device)) {
                *ret_why = "another device's, without peer access";
                return false;
        }
        return true;
}

static bool check_access(const struct sim_access *access, uintptr_t address, size_t bytes)
{
        const char *why = NULL;

        if (is_allowed(access, address, bytes, &why))
                return true;
        sim_misuse("%s touches %zu bytes at %#zx: %s", sim_op_name(access->op), bytes, (size_t)address, why);
        return false;
}

static size_t chunk_bytes(size_t left, size_t step)
{
        size_t most = CHUNK_BYTES / step * step;

        return left < most ? left : most;
}

/* Little-endian: the low bytes of the value are the element. What is filled is copied behind itself. */
static void fill(char *dst, size_t bytes, unsigned element, uint32_t value)
{
        memcpy(dst, &value, element);
        for (size_t done = element; done < bytes; done *= 2)
                memcpy(dst + done, dst, done < bytes - done ? done : bytes - done);
}

bool sim_touch_fill(const struct sim_access *access, uintptr_t dst, size_t count, unsigned element, uint32_t value)
{
        size_t left = count * element;
        bool ok = true;

        while (left && ok) {
                size_t bytes = chunk_bytes(left, element);

                sim_memory_lock();
                ok = check_access(access, dst, bytes);
                if (ok)
                        fill((char *)dst, bytes, element, value);
                sim_memory_unlock();
                dst += bytes;
                left -= bytes;
        }
        return ok;
}

bool sim_touch_copy(const struct sim_access *access, uintptr_t dst, uintptr_t src, size_t left)
{
        bool ok = true;

        while (left && ok) {
                size_t bytes = chunk_bytes(left, 1);

                sim_memory_lock();
                ok = check_access(access, src, bytes) && check_access(access, dst, bytes);
                if (ok)
                        memmove((void *)dst, (const void *)src, bytes);
                sim_memory_unlock();
                dst += bytes;
                src += bytes;
                left -= bytes;
        }
        return ok;
}

bool sim_touch_count_diff(const struct sim_access *access, uintptr_t src, uint32_t value, uint64_t count,
                          uint64_t *ret_differing)
{
        uint64_t differing = 0;
        size_t left = count * sizeof value;
        bool ok = true;

        while (left && ok) {
                size_t bytes = chunk_bytes(left, sizeof value);

                sim_memory_lock();
                ok = check_access(access, src, bytes);
                for (size_t i = 0; ok && i < bytes; i += sizeof value)
                        differing += memcmp((const void *)(src + i), &value, sizeof value) != 0;
                sim_memory_unlock();
                src += bytes;
                left -= bytes;
        }
        *ret_differing = differing;
        return ok;
}

bool sim_touch_add(const struct sim_access *access, uintptr_t dst, uint32_t add)
{
        uint32_t sum;
        bool ok;

        sim_memory_lock();
        ok = check_access(access, dst, sizeof sum);
        if (ok) {
                memcpy(&sum, (const void *)dst, sizeof sum);
                sum += add;
                memcpy((void *)dst, &sum, sizeof sum);
        }
        sim_memory_unlock();
        return ok;
}

bool sim_touch_load(const struct sim_access *access, uintptr_t src, unsigned bytes, uint64_t *ret_value)
{
        bool ok;

        *ret_value = 0;
        sim_memory_lock();
        ok = check_access(access, src, bytes);
        if (ok)
                memcpy(ret_value, (const void *)src, bytes);
        sim_memory_unlock();
        return ok;
}

bool sim_touch_store(const struct sim_access *access, uintptr_t dst, unsigned bytes, uint64_t value)
{
        bool ok;

        sim_memory_lock();
        ok = check_access(access, dst, bytes);
        if (ok)
                memcpy((void *)dst, &value, bytes);
        sim_memory_unlock();
        return ok;
}
