/* The devices' budgets. */
#ifndef GR_HOOKS_DEVICE_H
#define GR_HOOKS_DEVICE_H

#include "shim.h"

/* note_use is called whenever a device is about to be used. Once, at the start. */
void gr_device_init(void (*note_use)(void));

/* The device's budget, with its limits set; NULL for an ordinal that cannot be. */
struct gr_device *gr_device_get(CUdevice device);

/* The same, before anything is charged there: marks the process as in use and joins the region. */
struct gr_device *gr_device_use(CUdevice device);

#endif
