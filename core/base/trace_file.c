#include "base/trace_file.h"

#include "base/counters.h"

_Static_assert(GR_COUNTER_COUNT == 20 && GR_RUNG_COUNT == 11, "a change of them is another GR_TRACE_VERSION");

gr_trace_sink *_Atomic gr_trace_to GR_HOT_DATA;
