/*
 * The gate before NVML's functions in a deep sleep. They would not return in it (docs/measurements.md, checkpoints), so
 * each call of the program wakes the process, and keeps it from sleeping deeply until it returns.
 */
#ifndef GR_NVML_GATE_H
#define GR_NVML_GATE_H

#define GR_NVML_UNKNOWN 999 /* NVML_ERROR_UNKNOWN: the process could not be had back */

/*
 * What a program is to get that looks up this function of NVML: where the process may sleep, a function that passes the
 * gate and calls it; else the function itself. There are gates for 512. After these it is the function, and the process
 * does not sleep deeply any more; NULL: it does, and could not be had back. Any thread may call it, also before CUDA is
 * set up. No lock is held.
 */
void *gr_nvml_gate(const char *name, void *function);

#endif
