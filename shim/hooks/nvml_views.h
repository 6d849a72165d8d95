/* NVML as the program sees it. */
#ifndef GR_NVML_VIEWS_H
#define GR_NVML_VIEWS_H

/* This library's function in place of the one of NVML with this name; NULL: there is none. */
void *gr_nvml_views_hook(const char *name);

/* The hook of function, where it is one of NVML's and the program is to be told its share; else function. */
void *gr_nvml_views_swap(void *function);

#endif
