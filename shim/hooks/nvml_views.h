/* NVML as the program sees it. */
#ifndef GR_NVML_VIEWS_H
#define GR_NVML_VIEWS_H

/* The hook for NVML's function of this name; NULL: there is none. */
void *gr_nvml_views_hook(const char *name);

/* The hook for this function of NVML, if there is one and the program is to be told its share; else function. */
void *gr_nvml_views_swap(void *function);

#endif
