/* The public functions (gpureclaim.h). */
#ifndef GR_API_H
#define GR_API_H

/* The core is set up, and reclaimables that were registered before are registered with it. */
void gr_api_init(void);

#endif
