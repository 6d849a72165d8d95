/* The scenes of the fault sweep, and what they do all over. */
#ifndef GR_TEST_SCENES_H
#define GR_TEST_SCENES_H

#include "sweep.h"

#define PROBE_BYTES (8 * MIB)
#define PROBES_MOST 64
#define SMALL       ((size_t)4096)
#define LARGE       (3 * MIB)

extern CUdevice device;
extern CUcontext primary;

void attach(void);
void open_device(void);
void load_kernels(void);

void spin(CUstream stream, uint64_t us);
/* The end of a large block. */
void fill(CUstream stream, CUdeviceptr p, uint32_t value);

CUdeviceptr take(size_t bytes);
void give(CUdeviceptr p);
/* As much as can be had: to be out of memory twice in a row is the end, whatever else is an error. */
unsigned take_all(CUdeviceptr *blocks);

/* Whether the last word of memory is what was written. */
void check(CUdeviceptr p, size_t bytes, uint32_t value);
void use(CUdeviceptr p, size_t bytes, uint32_t value);

/* scenes_memory.c */
void plain(void);
void pools(void);
void mapped(void);
void pinned(void);
void managed(void);
void decay(void);
void fullness(void);
void changing(void);
void threads(void);

/* scenes_work.c */
void streams(void);
void capture(void);
void graph_memory(void);
void contexts(void);
void peers(void);
void graphs(void);
void hosts(void);
void green(void);

/* scenes_processes.c */
void asking(void);
void shared(void);
void giving(void);

#endif
