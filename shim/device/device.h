/* The devices' budgets. */
#ifndef GR_SHIM_DEVICE_H
#define GR_SHIM_DEVICE_H

#include "shim.h"

/* Sets note_use, which is then called whenever a device is about to be used. Called once, at set-up. */
void gr_device_init(void (*note_use)(void));

/* The device's budget, with its limits set; NULL: there is no such device, or the driver does not tell its size. */
struct gr_device *gr_device_get(CUdevice device);

/* As gr_device_get, and calls note_use and joins the region. Called before anything is charged to the device. */
struct gr_device *gr_device_use(CUdevice device);

#endif
