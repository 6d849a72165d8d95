/* Blocks that come and go in the current context. */
#ifndef GR_TEST_USE_BLOCKS_H
#define GR_TEST_USE_BLOCKS_H

#include "check.h"

#include <cuda.h>
#include <stdint.h>

#define BLOCK (3 * MIB)

static inline uint32_t last_word(CUdeviceptr block)
{
        uint32_t word = 0;

        GR_MUST(cuMemcpyDtoH(&word, block + BLOCK - 4, 4));
        return word;
}

/* Allocates, writes, reads and frees, several times, and asks nothing else; how many words were wrong. */
static inline unsigned use_blocks(void)
{
        CUdeviceptr blocks[4];
        unsigned wrong = 0;

        for (uint32_t round = 0; round < 10; round++) {
                for (uint32_t i = 0; i < 4; i++) {
                        GR_MUST(cuMemAlloc(&blocks[i], BLOCK));
                        GR_MUST(cuMemsetD32(blocks[i], round * 4 + i, BLOCK / 4));
                }
                for (uint32_t i = 0; i < 4; i++) {
                        wrong += last_word(blocks[i]) != round * 4 + i;
                        GR_MUST(cuMemFree(blocks[i]));
                }
        }
        return wrong;
}

#endif
