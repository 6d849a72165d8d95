/*
 * Memory that is mapped for core/ (gr_driver.mem_map), and the pieces of another process's that were imported: where it
 * is mapped, which devices may use it, and how it leaves the device and comes back.
 */
#ifndef GR_MAPPED_MEMORY_H
#define GR_MAPPED_MEMORY_H

#include "driver/operations.h"

/*
 * Held across every call of this library or the program that maps, unmaps or releases mapped memory. Two threads that
 * at the same time remove two mappings of one handle, or a mapping and the handle, corrupt the driver's own heap
 * (docs/measurements.md, unmap-race). The program and the library use different handles, but it is not known whether
 * that is enough. Also guards the tables of vmm.c.
 */
extern struct gr_lock gr_mappings GR_HIDDEN;

/* Memory that was mapped for core/ in one piece: the whole memory of one handle of the driver. */
struct gr_piece {
        uint64_t ptr;
        size_t bytes;
        uint64_t number; /* no other piece ever has it */
};

/* Memory that was created for core/: one handle of the driver. gr_mappings guards it, but for what is constant. */
struct gr_memory {
        CUmemGenericAllocationHandle handle; /* 0: the driver has no such memory now, or core/ has given it up */
        size_t bytes;                        /* constant */
        int device;                          /* constant */
        bool released;                       /* core/ has given it up; mappings may be left */
        bool stays;                          /* somebody outside the library uses it, so it must not leave */
        bool moving;                         /* a thread moves it to the host or back; it is not unmapped meanwhile */
        unsigned mapped;                     /* at how many addresses, also while it is asleep */
        uint64_t ptr;                        /* where it was mapped last; 0: not there any more */
        void *host;   /* its content, while that is not on the device; NULL: it is. Then nothing is mapped at ptr */
        bool in_file; /* host is a file's memory */
};

/*
 * The process has a context of the device: from now on the device can use all mapped memory that it can reach, as it
 * can use that of cuMemAlloc. What the driver refuses is tried again when the next context of the device begins.
 */
void gr_mapped_use_device(int device);

/*
 * Notes memory that has just been mapped at ptr, and gives access to it: to device, and to every other device that can
 * reach it and of which the process has a context, now or later. gr_mapped_disown ends this, after the memory was
 * unmapped. memory: what core/ has; NULL: it was imported. gr_mappings is held at both calls. On failure nothing is
 * noted, and the caller unmaps the memory.
 */
CUresult gr_mapped_adopt(uint64_t ptr, size_t bytes, int device, struct gr_memory *memory);
void gr_mapped_disown(uint64_t ptr);

/*
 * The piece that ptr lies in and, where ret_fd is not NULL, a descriptor of its memory, which the caller closes.
 * gr_mappings is held. CUDA_ERROR_NOT_FOUND: nothing is mapped there; or the driver's error.
 */
CUresult gr_mapped_export(uint64_t ptr, struct gr_piece *ret_piece, int *ret_fd);

/*
 * Somebody outside the library uses what is mapped in [ptr, ptr + bytes): it stays on the device for good. No lock is
 * held.
 */
void gr_mapped_stay(uint64_t ptr, size_t bytes);

/* The addresses of the memory of device that is asleep, or that is not. The caller frees *ret_ptrs. No lock is held. */
size_t gr_mapped_list(int device, bool asleep, uint64_t **ret_ptrs);

/*
 * How memory of core/ leaves the device and comes back (driver/sleep.h). Nothing may use it meanwhile, and only one
 * thread may call these for one memory, between begin_move and end_move. No lock is held.
 */

/* NULL: there is none at ptr in that state, another thread moves it, or it has to stay. */
struct gr_memory *gr_mapped_begin_move(uint64_t ptr, bool asleep);
void gr_mapped_end_move(struct gr_memory *memory);

/*
 * The content is in host, a mapping of memory->bytes, of a file or not, which memory now owns: gives the memory back to
 * the driver, and keeps its addresses. On failure nothing has changed.
 */
CUresult gr_mapped_leave(struct gr_memory *memory, void *host, bool in_file);

/* Bytes of all that is asleep in host memory, and not in a file. */
uint64_t gr_mapped_host_bytes(void);

/* Takes memory of the driver again, and maps it where it was. The caller then copies the content, and calls arrived. */
CUresult gr_mapped_create_again(struct gr_memory *memory);
CUresult gr_mapped_map_again(struct gr_memory *memory);
void gr_mapped_arrived(struct gr_memory *memory);

/* In place of arrived: gives back what was created again, and unmaps it where it was mapped; host keeps the content. */
void gr_mapped_give_up(struct gr_memory *memory, bool mapped);

/* Adds to gr_driver what maps memory, where the driver has all that it takes. After gr_operations_init. */
void gr_mapped_init(void);

#endif
