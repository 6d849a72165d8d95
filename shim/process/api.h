/* The public functions (gpureclaim.h). */
#ifndef GR_API_H
#define GR_API_H

/* Called once, when the core is set up: registers with it the reclaimables that the program registered before. */
void gr_api_init(void);

/*
 * In a child after fork of a process that used CUDA: no reclaimable is called there, and one is unregistered without a
 * wait, for locks and for runs of threads that the child does not have.
 */
void gr_api_forget(void);

#endif
