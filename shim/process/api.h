/* The public functions (gpureclaim.h). */
#ifndef GR_API_H
#define GR_API_H

/* Called once, when the core is set up: registers with it the reclaimables that the program registered before. */
void gr_api_init(void);

#endif
