/* What comes after what. */
#include "facts.h"

typedef CUresult CUDAAPI context_event(CUcontext, CUevent);

static void streams(void)
{
        CUstream blocking = stream_of(0), blocking_too = stream_of(0), apart = stream_of(CU_STREAM_NON_BLOCKING),
                 apart_too = stream_of(CU_STREAM_NON_BLOCKING);
        const struct {
                const char *name;
                CUstream first, second;
        } pairs[] = {{"a blocking stream after the legacy one", CU_STREAM_LEGACY, blocking},
                     {"the legacy stream after a blocking one", blocking, CU_STREAM_LEGACY},
                     {"a blocking stream after another", blocking, blocking_too},
                     {"a non-blocking stream after the legacy one", CU_STREAM_LEGACY, apart},
                     {"the legacy stream after a non-blocking one", apart, CU_STREAM_LEGACY},
                     {"a non-blocking stream after another", apart, apart_too},
                     {"the per-thread stream after the legacy one", CU_STREAM_LEGACY, CU_STREAM_PER_THREAD},
                     {"the legacy stream after the per-thread one", CU_STREAM_PER_THREAD, CU_STREAM_LEGACY},
                     {"a blocking stream after the per-thread one", CU_STREAM_PER_THREAD, blocking},
                     {"the per-thread stream after a blocking one", blocking, CU_STREAM_PER_THREAD},
                     {"the per-thread stream after a non-blocking one", apart, CU_STREAM_PER_THREAD}};

        for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
                fact_yes(pairs[i].name, follows(pairs[i].first, pairs[i].second));
        fact_code("cuStreamDestroy of 0", cuStreamDestroy(NULL));
        fact_code("cuStreamDestroy of the legacy stream", cuStreamDestroy(CU_STREAM_LEGACY));
        fact_code("cuStreamDestroy of the per-thread stream", cuStreamDestroy(CU_STREAM_PER_THREAD));
        fact_code("cuStreamCreate with unknown flags", cuStreamCreate(&blocking, 8));
}

static void events(void)
{
        context_event *record = EXPORTED(context_event, "cuCtxRecordEvent"),
                      *wait = EXPORTED(context_event, "cuCtxWaitEvent");
        CUstream busy = stream_of(CU_STREAM_NON_BLOCKING), other = stream_of(CU_STREAM_NON_BLOCKING);
        CUevent fresh, untimed, a, b;
        float ms;

        GR_MUST(cuEventCreate(&fresh, 0));
        GR_MUST(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuEventCreate(&a, 0));
        GR_MUST(cuEventCreate(&b, 0));
        fact_code("cuEventCreate with unknown flags", cuEventCreate(&a, 0x80));
        fact_code("cuEventCreate for processes, with timing", cuEventCreate(&a, CU_EVENT_INTERPROCESS));
        fact_code("cuEventQuery before any record", cuEventQuery(fresh));
        fact_code("cuEventSynchronize before any record", cuEventSynchronize(fresh));
        fact_code("cuStreamWaitEvent before any record", cuStreamWaitEvent(other, fresh, 0));
        GR_MUST(cuEventRecord(a, busy));
        fact_code("time to one that was not recorded", cuEventElapsedTime(&ms, a, fresh));
        GR_MUST(cuEventRecord(untimed, busy));
        fact_code("time to one without timing", cuEventElapsedTime(&ms, a, untimed));
        GR_MUST(cuCtxSynchronize());
        hold(busy);
        GR_MUST(cuEventRecord(b, busy));
        fact_code("cuEventQuery of a pending one", cuEventQuery(b));
        fact_code("time to a pending one", cuEventElapsedTime(&ms, a, b));
        if (record)
                fact_code("cuCtxRecordEvent", record(gt.ctx, untimed));
        fact_code("what the context recorded, with a non-blocking stream at work", cuEventQuery(untimed));
        release();
        GR_MUST(cuCtxSynchronize());
        fact_code("then", cuEventQuery(untimed));
        fact_code("cuCtxRecordEvent of an event of no context", record ? record(NULL, untimed) : CUDA_SUCCESS);
        hold(busy);
        GR_MUST(cuEventRecord(untimed, busy));
        if (wait)
                fact_code("cuCtxWaitEvent", wait(gt.ctx, untimed));
        fact("a stream that had nothing to do with it", "%s",
             (GR_MUST(gt_spin(&gt, other, 1)), cuStreamQuery(other)) == CUDA_ERROR_NOT_READY ? "waits"
                                                                                             : "does not wait");
        release();
        GR_MUST(cuCtxSynchronize());
}

void facts_order(void)
{
        streams();
        events();
}
