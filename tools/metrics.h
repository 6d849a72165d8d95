/* The page of gpureclaim metrics, for serve as well (metrics.c). */
#ifndef GR_TOOL_METRICS_H
#define GR_TOOL_METRICS_H

#include <stdbool.h>
#include <stddef.h>

/*
 * Makes the page, in OpenMetrics text or Prometheus' older format. Returns NULL, or what went wrong; *ret_page is for
 * free.
 */
const char *make_metrics(bool open_metrics, char **ret_page, size_t *ret_length);

#endif
