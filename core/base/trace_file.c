#include "base/trace_file.h"

gr_trace_sink *_Atomic gr_trace_to GR_HOT_DATA;
