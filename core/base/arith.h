/* Arithmetic with sizes in bytes. */
#ifndef GR_ARITH_H
#define GR_ARITH_H

#include <assert.h>
#include <stdint.h>

static inline uint64_t gr_min(uint64_t a, uint64_t b)
{
        return a < b ? a : b;
}

static inline uint64_t gr_max(uint64_t a, uint64_t b)
{
        return a > b ? a : b;
}

/* unit is a power of two; the result fits in 64 bits. */
static inline uint64_t gr_round_up(uint64_t bytes, uint64_t unit)
{
        assert(unit > 0 && (unit & (unit - 1)) == 0);
        assert(bytes <= UINT64_MAX - (unit - 1));
        return (bytes + unit - 1) & ~(unit - 1);
}

#endif
