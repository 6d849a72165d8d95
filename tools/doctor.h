/* What the driver says, for doctor.c and run.c (probe.c). */
#ifndef GR_TOOL_DOCTOR_H
#define GR_TOOL_DOCTOR_H

#include <stdbool.h>

/* One line of the doctor: what it is about, "ok", "note" or "fail", and the finding. */
void doctor_say(const char *topic, const char *state, const char *format, ...) __attribute__((format(printf, 3, 4)));

/*
 * The doctor's looks at the driver and at the preloaded library, for a process of their own because either may crash
 * it. They print what they find; EXIT_SUCCESS where it is good enough.
 */
int probe_driver(void);
int probe_library(const char *library, bool name_symbols);

/*
 * How many GPUs a program would see, by the driver in this folder or, if NULL, the system's; 0: not known. Asked in a
 * process of its own, as the driver keeps threads and files.
 */
int count_gpus(const char *folder);

#endif
