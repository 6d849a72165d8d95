#include "safety_access.h"

#include <pthread.h>
#include <stdlib.h>

bool access_missing(CUresult result)
{
        return result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_NOT_SUPPORTED;
}

uint32_t access_word(const struct access *access, uint32_t tag)
{
        switch (access->bytes_per) {
        case 1:
                return tag * 0x01010101u;
        case 2:
                return tag * 0x00010001u;
        default:
                return tag;
        }
}

static void fill_now(CUdeviceptr p, uint32_t tag, size_t bytes)
{
        GR_MUST(cuMemsetD32(p, tag, bytes / 4));
        GR_MUST(cuCtxSynchronize());
}

static void open_other_context(struct scene *s)
{
        __typeof__(&cuCtxCreate) create = GT_OPTIONAL(cuCtxCreate);

        if (!create || create(&s->other_ctx, NULL, 0, s->gt.device) != CUDA_SUCCESS) {
                s->other_ctx = NULL;
                return;
        }
        s->other_stream = gt_stream();
        GR_MUST(cuCtxSetCurrent(s->gt.ctx));
}

/* The first other device that can reach ours, if there is one. */
static void open_peer(struct scene *s)
{
        CUmodule module;
        int devices = 0, can = 0;

        GR_MUST(cuDeviceGetCount(&devices));
        for (int i = 1; i < devices && !can; i++) {
                GR_MUST(cuDeviceGet(&s->peer, i));
                GR_MUST(cuDeviceCanAccessPeer(&can, s->peer, s->gt.device));
        }
        if (!can)
                return;
        GR_MUST(cuDevicePrimaryCtxRetain(&s->peer_ctx, s->peer));
        GR_MUST(cuCtxSetCurrent(s->peer_ctx));
        GR_MUST(cuCtxEnablePeerAccess(s->gt.ctx, 0));
        gt_load_kernels(&module);
        GR_MUST(cuModuleGetFunction(&s->peer_fill, module, "gr_fill"));
        s->peer_stream = gt_stream();
        for (uint32_t tag = EARLIER; tag < TAGS; tag++) {
                GR_MUST(cuMemAlloc(&s->peer_source[tag], s->span));
                fill_now(s->peer_source[tag], tag, s->span);
        }
        GR_MUST(cuCtxSetCurrent(s->gt.ctx));
}

void scene_open(struct scene *ret, size_t span)
{
        struct scene s = {.span = span};

        gt_open(&s.gt);
        s.slow = gt_stream();
        s.non_blocking = gt_stream();
        s.second = gt_stream();
        GR_MUST(cuStreamCreate(&s.blocking, CU_STREAM_DEFAULT));
        gt_green_open(s.gt.device, &s.green);
        for (uint32_t tag = 0; tag < TAGS; tag++) {
                GR_MUST(cuMemAlloc(&s.source[tag], span));
                fill_now(s.source[tag], tag, span);
                GR_MUST(cuMemAllocHost(&s.pinned[tag], span));
                s.pageable[tag] = malloc(span);
                if (!s.pageable[tag])
                        gt_die("no host memory");
                for (size_t i = 0; i < span / 4; i++)
                        ((uint32_t *)s.pinned[tag])[i] = ((uint32_t *)s.pageable[tag])[i] = tag;
        }
        open_other_context(&s);
        open_peer(&s);
        *ret = s;
}

CUresult scene_stream(const struct scene *scene, enum place place, CUstream *ret)
{
        int least, greatest;

        switch (place) {
        case NO_STREAM:
        case LEGACY:
                *ret = NULL;
                return CUDA_SUCCESS;
        case PER_THREAD:
                *ret = CU_STREAM_PER_THREAD;
                return CUDA_SUCCESS;
        case NON_BLOCKING:
        case JOINED:
                *ret = scene->non_blocking;
                return CUDA_SUCCESS;
        case BLOCKING:
                *ret = scene->blocking;
                return CUDA_SUCCESS;
        case SAME:
                *ret = scene->slow;
                return CUDA_SUCCESS;
        case GREEN:
                *ret = scene->green.stream;
                return scene->green.stream ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
        case FRESH:
                return cuStreamCreate(ret, CU_STREAM_NON_BLOCKING);
        case URGENT:
                GR_MUST(cuCtxGetStreamPriorityRange(&least, &greatest));
                return cuStreamCreateWithPriority(ret, CU_STREAM_NON_BLOCKING, greatest);
        }
        return CUDA_ERROR_NOT_SUPPORTED;
}

void scene_stream_done(enum place place, CUstream stream)
{
        if (place == FRESH || place == URGENT)
                GR_MUST(cuStreamDestroy(stream));
}

struct job {
        const struct scene *scene;
        const struct access *access;
        CUstream stream;
        CUdeviceptr p;
        size_t bytes;
        uint64_t spin_us;
        uint32_t tag;
        CUresult result;
};

static void carry_out(struct job *job)
{
        if (job->spin_us)
                GR_MUST(gt_spin(&job->scene->gt, job->stream, job->spin_us));
        job->result = job->access->write(job->scene, job->stream, job->p, job->bytes, job->tag);
}

static void *thread_main(void *argument)
{
        struct job *job = argument;

        gt_attach(&job->scene->gt);
        carry_out(job);
        return NULL;
}

CUresult access_run(const struct scene *scene, const struct access *access, CUstream stream, CUdeviceptr p,
                    size_t bytes, uint32_t tag, uint64_t spin_us)
{
        struct job job = {scene, access, stream, p, bytes, spin_us, tag, CUDA_SUCCESS};
        pthread_t thread;

        if (!access->other_thread)
                carry_out(&job);
        else if (pthread_create(&thread, NULL, thread_main, &job) || pthread_join(thread, NULL))
                gt_die("no thread");
        return job.result;
}
