/* The modes of sleep.c in which more happens meanwhile: threads, contexts and processes come, work and end. */
#include "grsim.h"
#include "peer_process.h"
#include "sleep.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Returns when that function of the driver has been called so often. */
static void await_calls(const char *symbol, unsigned long count)
{
        while (grSimCallCount(symbol) < count)
                gt_sleep_us(1000);
}

static void *ask_slowly(void *arg)
{
        unsigned type;

        gt_attach(&gt);
        atomic_store((_Atomic bool *)arg, true);
        GR_MUST(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, blocks[MANY - 1]));
        return NULL;
}

/* Nothing leaves while a thread is in a call, although the GPU has no work (GRSIM_LATENCY). */
void mode_inside(void)
{
        _Atomic bool begun = false;
        pthread_t thread;

        take_blocks();
        pthread_create(&thread, NULL, ask_slowly, &begun);
        while (!atomic_load(&begun))
                gt_sleep_us(1000);
        gt_check(!fall_asleep("sleep --timeout 100ms"), "sleep", "refused beside a call");
        pthread_join(thread, NULL);
        sleep_now("when the call has ended");
}

/* Returns when what the blocks take has left the device, of which so much was taken before. */
static void await_sleep(size_t before)
{
        while (on_device() + 190 * MIB > before)
                gt_sleep_us(10000);
}

/* GPURECLAIM_SLEEP=1s. It sleeps so long after its last call, and after the end of its GPU work; and so again. */
void mode_idle(void)
{
        const double second = 1e6;
        double begin;
        size_t before;
        CUstream stream;

        take_blocks();
        before = on_device();
        stream = gt_stream();
        for (volatile int i = 0; i < 15; i++) {
                begin = gt_now_us();
                GR_MUST(read_a_block());
                gt_sleep_us(0.2 * second);
                GR_CHECK(on_device() == before || gt_now_us() - begin > 0.9 * second); /* the machine may stand still */
        }
        begin = gt_now_us();
        GR_MUST(gt_spin(&gt, stream, 2000000));
        await_sleep(before);
        gt_check(gt_now_us() - begin >= 3 * second, "sleep", "a second after a kernel of two seconds, not earlier");
        for (volatile int i = 0; i < 2; i++) {
                look_at_blocks("after");
                begin = gt_now_us();
                gt_check(on_device() == before, "back", "%.0f MiB of %.0f", gt_mib(on_device()), gt_mib(before));
                await_sleep(before);
                gt_check(gt_now_us() - begin >= 0.99 * second, "sleep", "a second after it woke, not earlier");
        }
        look_at_blocks("after that");
}

static void *ask_to_sleep(void *arg)
{
        (void)arg;
        fall_asleep("sleep --timeout 0");
        return NULL;
}

/* Returns when memory has begun to leave, which takes long (GRSIM_LATENCY). */
static pthread_t begin_to_leave(void)
{
        unsigned long before = grSimCallCount("cuMemcpyDtoHAsync_v2");
        pthread_t thread;

        take_blocks();
        pthread_create(&thread, NULL, ask_to_sleep, NULL);
        await_calls("cuMemcpyDtoHAsync_v2", before + 1);
        return thread;
}

/* The copies that were made until memory no longer left, of 26 or more. */
static void turned_round(pthread_t thread)
{
        unsigned long copies;

        pthread_join(thread, NULL);
        copies = grSimCallCount("cuMemcpyDtoHAsync_v2");
        gt_check(copies < 20, "turned round", "after %lu copies", copies);
}

/* A call that comes while memory leaves need not wait until all has left. */
void mode_turned(void)
{
        pthread_t thread = begin_to_leave();

        look_at_blocks("after");
        turned_round(thread);
}

/* Nor need one that ends the context, and its memory with it. */
void mode_ended(void)
{
        pthread_t thread = begin_to_leave();

        GR_MUST(cuDevicePrimaryCtxReset(gt.device));
        turned_round(thread);
}

/* It ends while memory leaves. */
void mode_leaving(void)
{
        begin_to_leave();
}

static void *end_inside(void *arg)
{
        gt_attach(&gt);
        pthread_cancel(pthread_self());
        GR_MUST(read_a_block());
        pthread_testcancel();
        return arg;
}

/* A thread ends in a call, as each call of the driver writes a line. That keeps nobody awake. */
void mode_cancelled(void)
{
        pthread_t thread;
        void *ended;

        run_anew("GRSIM_TRACE", "/dev/null");
        take_blocks();
        pthread_create(&thread, NULL, end_inside, NULL);
        pthread_join(thread, &ended);
        gt_check(ended == PTHREAD_CANCELED, "thread", "cancelled");
        sleep_now("asked");
        look_at_blocks("after");
}

static _Atomic bool stop_work;
static _Atomic unsigned rounds;

/* Allocates, fills by a kernel or a memset, copies, checks and frees, at random. */
static void *work(void *arg)
{
        unsigned seed = (unsigned)(uintptr_t)arg;
        uintptr_t wrong = 0;
        CUstream mine;

        gt_attach(&gt);
        mine = gt_stream();
        while (!atomic_load(&stop_work)) {
                size_t bytes = (size_t)(rand_r(&seed) % 64 + 1) * (rand_r(&seed) % 2 ? 32 * KIB : 256 * KIB);
                uint32_t value = (uint32_t)rand_r(&seed), *copy = malloc(bytes);
                CUdeviceptr from, to;

                GR_MUST(cuMemAlloc(&from, bytes));
                GR_MUST(cuMemAlloc(&to, bytes));
                GR_MUST(gt_fill(&gt, mine, from, value, bytes / 4));
                if (rand_r(&seed) % 2)
                        gt_sleep_us(rand_r(&seed) % 3000);
                GR_MUST(cuMemcpyDtoDAsync(to, from, bytes, mine));
                GR_MUST(cuStreamSynchronize(mine));
                /* A deep sleep begins only where no call waits for its end. */
                gt_sleep_us(rand_r(&seed) % (getenv("GR_TEST_DEEP") ? 2000000 : 60000));
                GR_MUST(cuMemcpyDtoH(copy, to, bytes));
                for (size_t i = 0; i < bytes / 4; i++)
                        wrong += copy[i] != value;
                GR_MUST(cuMemFree(from));
                GR_MUST(cuMemFree(to));
                free(copy);
                atomic_fetch_add(&rounds, 1);
        }
        return (void *)wrong;
}

void mode_random(void)
{
        pthread_t threads[4];
        unsigned slept = 0;
        void *wrong;

        take_blocks();
        for (uintptr_t i = 0; i < 4; i++)
                pthread_create(&threads[i], NULL, work, (void *)(i + 1));
        for (volatile int i = 0; i < 25; i++)
                slept += fall_asleep("sleep --timeout 1s");
        atomic_store(&stop_work, true);
        for (int i = 0; i < 4; i++) {
                pthread_join(threads[i], &wrong);
                gt_check(!wrong, "thread", "%zu words are wrong", (size_t)(uintptr_t)wrong);
        }
        gt_check(slept > 0, "slept", "%s", slept > 0 ? "some of 25 times" : "never");
        printf("~ slept %u of 25 times, %u rounds\n", slept, atomic_load(&rounds));
        look_at_blocks("after");
}

/* It ends asleep; so does a child, which cannot use the driver. */
void mode_exit(void)
{
        pid_t child;
        int status;

        take_blocks_and_sleep();
        child = fork();
        if (child == 0) {
                CUdeviceptr ptr;

                _exit(cuMemAlloc(&ptr, MIB) == CUDA_SUCCESS);
        }
        waitpid(child, &status, 0);
        gt_check(status == 0, "child", "status %d", status);
}

/* The memory that the process has on the host. */
static size_t on_host(void)
{
        unsigned long pages = 0;
        FILE *file = fopen("/proc/self/statm", "r");

        if (!file || fscanf(file, "%*u %lu", &pages) != 1)
                gt_die("no /proc/self/statm");
        fclose(file);
        return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* The context goes with its memory, wherever that is. */
void mode_reset(void)
{
        size_t asleep;

        take_blocks_and_sleep();
        asleep = on_host();
        GR_MUST(cuDevicePrimaryCtxReset(gt.device));
        gt_check(on_host() + 190 * MIB < asleep, "host", "%.0f MiB less", gt_mib(asleep - on_host()));
        GR_MUST(cuDevicePrimaryCtxRetain(&gt.ctx, gt.device));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        take_blocks();
        sleep_now("asked in the next context");
        look_at_blocks("after");
        free_blocks();
}

/* The second device's context, which is current then. */
static CUcontext use_second(void)
{
        CUcontext second;

        GR_MUST(cuDevicePrimaryCtxRetain(&second, 1));
        GR_MUST(cuCtxSetCurrent(second));
        return second;
}

static void *reset_second(void *arg)
{
        (void)arg;
        GR_MUST(cuDevicePrimaryCtxReset(1));
        return NULL;
}

static void *reset_in_vain(void *arg)
{
        CUresult result = cuDevicePrimaryCtxReset(gt.device);

        gt_check(result == CUDA_ERROR_NOT_PERMITTED, "the reset", "%s", gt_result_name(result));
        return arg;
}

/* The driver refuses to end the context, and takes long to say so (GRSIM_LATENCY). A call waits for the answer. */
void mode_stays(void)
{
        pthread_t ender;

        take_blocks_and_sleep();
        pthread_create(&ender, NULL, reset_in_vain, NULL);
        await_calls("cuDevicePrimaryCtxReset_v2", 1);
        look_at_blocks("meanwhile");
        pthread_join(ender, NULL);
        look_at_blocks("after");
}

/* Likewise, with another context: nothing leaves beside work that was submitted meanwhile. */
void mode_stays_busy(void)
{
        CUcontext second;
        CUstream stream;
        pthread_t ender;

        GR_MUST(cuCtxCreate(&second, NULL, 0, gt.device));
        gt_attach(&gt);
        take_blocks();
        stream = gt_stream();
        pthread_create(&ender, NULL, reset_in_vain, NULL);
        await_calls("cuDevicePrimaryCtxReset_v2", 1);
        GR_MUST(gt_spin(&gt, stream, 4000000));
        GR_MUST(gt_fill(&gt, stream, blocks[MANY - 1], 7, 16));
        gt_check(!fall_asleep("sleep --timeout 0"), "sleep", "refused");
        pthread_join(ender, NULL);
        GR_MUST(cuStreamSynchronize(stream));
}

/*
 * GRSIM_DEVICES=2. While one device's context ends, which takes long (GRSIM_LATENCY), the other device's memory comes
 * back, and does not leave beside a call. (GPURECLAIM_WAIT=0: the calls do not wait for that end.)
 */
void mode_ending(void)
{
        pthread_t ender, asker;
        _Atomic bool begun = false;
        CUdeviceptr there;

        take_blocks();
        use_second();
        GR_MUST(cuMemAlloc(&there, 8 * MIB));
        gt_attach(&gt);
        sleep_now("asked");
        pthread_create(&ender, NULL, reset_second, NULL);
        await_calls("cuDevicePrimaryCtxReset_v2", 1);
        GR_MUST(read_a_block());
        pthread_create(&asker, NULL, ask_slowly, &begun);
        while (!atomic_load(&begun) || grSimCallCount("cuPointerGetAttribute") == 0)
                gt_sleep_us(1000);
        pthread_join(ender, NULL);
        gt_check(!fall_asleep("sleep --timeout 100ms"), "sleep", "refused beside a call");
        pthread_join(asker, NULL);
        look_at_blocks("after");
        sleep_now("when the call has ended");
        look_at_blocks("after that");
}

/* Looks at the blocks, which wakes the process. */
static void *look_in(void *context)
{
        GR_MUST(cuCtxSetCurrent(context));
        look_at_blocks("after");
        return NULL;
}

/* Begins to wake, which takes long (GRSIM_LATENCY); returns after so many pieces have come. */
static pthread_t begin_to_wake(CUcontext context, unsigned long pieces)
{
        unsigned long before = grSimCallCount("cuMemcpyHtoDAsync_v2");
        pthread_t thread;

        pthread_create(&thread, NULL, look_in, context);
        await_calls("cuMemcpyHtoDAsync_v2", before + pieces);
        return thread;
}

/* GRSIM_DEVICES=2. The context that the first sleep was in goes while the other device's memory comes back. */
void mode_first(void)
{
        unsigned long pieces;
        CUdeviceptr there;
        uint32_t word;
        pthread_t thread;
        CUcontext second;

        GR_MUST(cuMemAlloc(&there, 8 * MIB));
        sleep_now("asked");
        pieces = grSimCallCount("cuMemcpyHtoDAsync_v2");
        GR_MUST(cuMemcpyDtoH(&word, there, 4));
        pieces = grSimCallCount("cuMemcpyHtoDAsync_v2") - pieces;
        second = use_second();
        take_blocks();
        sleep_now("asked with two devices");
        thread = begin_to_wake(second, pieces + 4);
        GR_MUST(cuDevicePrimaryCtxReset(gt.device));
        pieces = grSimCallCount("cuMemcpyHtoDAsync_v2");
        pthread_join(thread, NULL);
        pieces = grSimCallCount("cuMemcpyHtoDAsync_v2") - pieces;
        gt_check(pieces == 0, "copies", "%lu after the end of the context that has the pinned memory", pieces);
        sleep_now("asked without the first context");
        look_at_blocks("after that");
}

/* GRSIM_DEVICES=2. The second device is used for the first time while memory comes back: it can reach all of it. */
void mode_joins(void)
{
        CUdeviceptr there;
        pthread_t thread;

        take_blocks_and_sleep();
        thread = begin_to_wake(gt.ctx, 2);
        use_second();
        pthread_join(thread, NULL);
        GR_MUST(cuMemAlloc(&there, sizes[MANY - 1]));
        for (int i = 0; i < MANY; i++) {
                CUresult result = cuMemcpyDtoD(there, blocks[i], sizes[i]);

                gt_check(result == CUDA_SUCCESS, "a copy by the second device", "%s", gt_result_name(result));
        }
}

/* GRSIM_DEVICES=2. The first call, on either, wakes both; then one of the contexts goes while it sleeps. */
void mode_devices(void)
{
        CUdeviceptr there;
        uint32_t word;

        take_blocks();
        use_second();
        GR_MUST(cuMemAlloc(&there, 8 * MIB));
        GR_MUST(cuMemsetD32(there, 5, 2 * MIB));
        for (volatile int i = 0; i < 2; i++) {
                sleep_now("asked");
                GR_MUST(cuMemcpyDtoH(&word, there, 4));
                gt_check(word == 5, "the second device", "%u", word);
                look_at_blocks("after");
        }
        sleep_now("asked");
        GR_MUST(cuDevicePrimaryCtxReset(1));
        gt_attach(&gt);
        look_at_blocks("after the end of the other context");
        sleep_now("asked with one device that has nothing");
}

/* Another process, without the library, takes most of the device, tells how much, and ends when told. */
void mode_take(void)
{
        int socket = atoi(arguments[2]), none;
        CUdeviceptr ptrs[1024];
        size_t count = 0;

        while (count < 1024 && cuMemAlloc(&ptrs[count], 2 * MIB) == CUDA_SUCCESS)
                count++;
        for (int i = 0; i < 50 && count > 0; i++) /* what is left is not enough */
                GR_MUST(cuMemFree(ptrs[--count]));
        peer_send(socket, &count, sizeof(count), -1);
        peer_receive(socket, &count, sizeof(count), &none); /* nothing comes: the other end closes */
}

static pid_t taker;
static int to_taker;

static void *end_taker(void *arg)
{
        close(to_taker);
        gt_check(waitpid(taker, NULL, 0) == taker, "the other process", "has ended");
        return arg;
}

static void *read_in_vain(void *arg)
{
        gt_attach(&gt);
        GR_CHECK(read_a_block() == CUDA_ERROR_OUT_OF_MEMORY);
        return arg;
}

/* How often so many threads, which come at the same time and find no room, try to have the memory again. */
static unsigned long tries_of(unsigned count)
{
        unsigned long before = grSimCallCount("cuMemCreate");
        pthread_t threads[8];

        for (unsigned i = 0; i < count; i++)
                pthread_create(&threads[i], NULL, read_in_vain, NULL);
        for (unsigned i = 0; i < count; i++)
                pthread_join(threads[i], NULL);
        return grSimCallCount("cuMemCreate") - before;
}

static void *end_taker_late(void *arg)
{
        gt_sleep_us(300000);
        return end_taker(arg);
}

/*
 * While it sleeps another process has its room. With GPURECLAIM_WAIT the call that wakes it waits for that one. The
 * program runs anew on a device that both can share.
 */
void mode_full(void)
{
        char card[] = "/tmp/gr-sleep-XXXXXX", mode[] = "take";
        size_t count = 0, before;
        pthread_t thread;
        CUresult result;
        int none;

        if (!getenv("GRSIM_SHARED")) {
                GR_CHECK(mkstemp(card) >= 0);
                run_anew("GRSIM_SHARED", card);
        }
        take_blocks_and_sleep();
        taker = peer_start(arguments[0], mode, true, &to_taker);
        peer_receive(to_taker, &count, sizeof(count), &none);
        gt_check(count > 190, "the other process", "%zu MiB", 2 * count);
        before = on_device();
        if (strcmp(getenv("GPURECLAIM_WAIT"), "0") == 0) {
                begin_to_listen();
                result = read_a_block();
                gt_check(result == CUDA_ERROR_OUT_OF_MEMORY, "a copy", "%s", gt_result_name(result));
                result = gt_fill(&gt, NULL, blocks[0], 7, 16);
                gt_check(result == CUDA_ERROR_OUT_OF_MEMORY, "a launch", "%s", gt_result_name(result));
                GR_CHECK_EQ(heard("could not be had again"), 1);
                sleep_now("goes on");
                gt_check(on_device() == before, "the device", "no part is kept: %.0f MiB, then %.0f", gt_mib(before),
                         gt_mib(on_device()));
                end_taker(NULL);
        } else if (strcmp(getenv("GPURECLAIM_WAIT"), "1s") == 0) { /* all of them wait for that long together */
                unsigned long one = tries_of(1), eight = tries_of(8);

                gt_check(eight < 4 * one, "eight threads", "try %lu times, one does %lu times", eight, one);
                end_taker(NULL);
        } else {
                pthread_create(&thread, NULL, end_taker_late, NULL);
                result = read_a_block();
                gt_check(result == CUDA_SUCCESS, "a copy", "%s", gt_result_name(result));
                pthread_join(thread, NULL);
        }
        look_at_blocks("after");
        unlink(getenv("GRSIM_SHARED"));
}
