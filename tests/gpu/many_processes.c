/*
 * Many processes at once on one card: "start" measures how long it takes until all of them have had memory (one that
 * finds no room tries again; all stay until the last), "share" how long jobs take whose phases want more together than
 * there is room for.
 *
 *   many_processes start [--count=N]
 *   many_processes share [--jobs=N] [--at-once=N] [--phases=N] [--most=SIZE] [--budget=SIZE] [--may-fail]
 *   many_processes kill [--count=N] [--kills=N] [--most=SIZE] [--may-fail] [--keep=N] [--order] [--deadline=S]
 *
 * A job of `share` runs phases: it allocates one block of a quarter of --most up to --most, fills it, works, looks
 * whether it is intact, frees it, and does something else. It takes each block in one piece, because a job that holds
 * one part and waits for another can wait for a job that does the same. With --budget the card's peak, without the
 * contexts, must not pass it.
 *
 * The processes of `kill` allocate, look at and free blocks at random, each up to --most in all. Every half a second or
 * so one is killed, and another one begins in its place; never the first --keep of them, which lose nothing by it. With
 * --order the command (GR_TEST_COMMAND) puts it to sleep, and it is killed at a random moment of leaving and coming
 * back; the others sleep as well.
 *
 * Prints "# NAME VALUE" lines. Exit status 1 when an allocation was refused (but for --may-fail), data changed, a
 * process failed, the budget was passed, or one act took longer than --deadline seconds.
 */
#include "gputest.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_PROCESSES 2048
#define GIVE_UP_US     390e6 /* the whole */
#define SAMPLE_US      5000
#define WINDOW         (16 * MIB)
#define BLOCKS         8 /* of one process of `kill` */

struct job {
        double us, longest_alloc_us;
        unsigned phases, refused;
};

/* Between the starter, its processes and the one that watches the card. */
static struct {
        _Atomic bool go, end;
        _Atomic unsigned ready, changed;
        _Atomic bool card_known;
        _Atomic size_t used_before, used_now, used_most; /* of the whole card, in bytes */
        _Atomic size_t ours_now, ours_most;              /* of our processes alone; 0: NVML does not list them */
        struct job jobs[MOST_PROCESSES];
} * shared;

static struct {
        unsigned count, at_once, phases, kills, keep, deadline;
        size_t most, budget;
        bool may_fail, order;
} options = {.count = 50, .phases = 5, .kills = 20, .most = 4 * GIB};

/* In a process of its own: the starter must not open the driver before it forks. Makes no context. */
static void watch(void)
{
        struct gt gt = {.simulated = gt_simulated()};
        size_t bytes;

        if (cuInit(0) || cuDeviceGet(&gt.device, 0))
                exit(GT_SKIPPED);
        gt_footprint_open(&gt);
        if (!gt_card_used(&gt, &bytes))
                bytes = 0;
        else
                shared->card_known = true;
        shared->used_before = bytes;
        shared->ready = 1;
        while (!shared->end) {
                if (gt_card_used(&gt, &bytes)) {
                        shared->used_now = bytes;
                        if (bytes > shared->used_most)
                                shared->used_most = bytes;
                }
                if (gt_group_used(&bytes)) {
                        shared->ours_now = bytes;
                        if (bytes > shared->ours_most)
                                shared->ours_most = bytes;
                }
                gt_sleep_us(SAMPLE_US);
        }
        exit(EXIT_SUCCESS);
}

static pid_t begin(void (*run)(unsigned), unsigned number)
{
        pid_t pid = fork();

        if (pid < 0)
                gt_die("no process: %s", strerror(errno));
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                run(number);
                exit(EXIT_SUCCESS);
        }
        return pid;
}

static void watch_as_job(unsigned number)
{
        (void)number;
        watch();
}

/* Ends the program where it takes longer than all of it may. */
static void wait_until_ready(unsigned count, double begin_us)
{
        int status;

        while (shared->ready < count) {
                if (gt_now_us() - begin_us > GIVE_UP_US)
                        gt_die("only %u of %u are there in time", (unsigned)shared->ready, count);
                if (waitpid(-1, &status, WNOHANG) > 0) {
                        if (WIFEXITED(status) && WEXITSTATUS(status) == GT_SKIPPED)
                                exit(GT_SKIPPED);
                        gt_die("a process ended early, status %d; %u of %u are there", status, (unsigned)shared->ready,
                               count);
                }
                gt_sleep_us(500);
        }
}

static unsigned reap(unsigned count)
{
        unsigned failed = 0;

        for (unsigned i = 0; i < count; i++) {
                int status;

                if (waitpid(-1, &status, 0) < 0)
                        break;
                failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
        }
        return failed;
}

static int by_time(const void *left, const void *right)
{
        double a = *(const double *)left, b = *(const double *)right;

        return a < b ? -1 : a > b;
}

/* A context and memory in it. The context does not stay: a card has room for far fewer than processes. */
static CUresult have_memory(void)
{
        CUcontext context;
        CUdeviceptr ptr;
        CUresult result = cuDevicePrimaryCtxRetain(&context, 0);

        if (result)
                return result;
        GR_MUST(cuCtxSetCurrent(context));
        result = cuMemAlloc(&ptr, MIB);
        if (!result)
                GR_MUST(cuMemFree(ptr));
        GR_MUST(cuCtxSetCurrent(NULL));
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        return result;
}

/* Through the driver alone: kernels would only hide what is measured. */
static void start_one(unsigned number)
{
        struct job *job = &shared->jobs[number];
        double begin_us;
        CUresult result;

        while (!shared->go)
                gt_sleep_us(200);
        begin_us = gt_now_us();
        GR_MUST(cuInit(0));
        while ((result = have_memory()) == CUDA_ERROR_OUT_OF_MEMORY) { /* until another's context has gone */
                job->refused++;
                gt_sleep_us(10000);
        }
        GR_MUST(result);
        job->us = gt_now_us() - begin_us;
        atomic_fetch_add(&shared->ready, 1);
        while (!shared->end)
                gt_sleep_us(2000);
}

static int start_all(void)
{
        double begin_us, all_us, times[MOST_PROCESSES];
        unsigned failed, refused = 0;

        shared->ready = 0;
        for (unsigned i = 0; i < options.count; i++)
                begin(start_one, i);
        gt_sleep_us(100000);
        begin_us = gt_now_us();
        shared->go = true;
        wait_until_ready(options.count, begin_us);
        all_us = gt_now_us() - begin_us;
        shared->end = true;
        failed = reap(options.count);
        for (unsigned i = 0; i < options.count; i++) {
                times[i] = shared->jobs[i].us;
                refused += shared->jobs[i].refused;
        }
        qsort(times, options.count, sizeof(times[0]), by_time);
        printf("# processes %u\n# all_s %.3f\n# median_ms %.1f\n# longest_ms %.1f\n# refused %u\n", options.count,
               all_us / 1e6, times[options.count / 2] / 1e3, times[options.count - 1] / 1e3, refused);
        if (failed)
                printf("%u processes failed at their end\n", failed);
        return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* At its begin, middle and end: all of it would make the card the measure of everything. */
static void check_block(const struct gt *gt, CUdeviceptr ptr, size_t bytes, uint32_t value, CUdeviceptr count)
{
        size_t window = bytes < 3 * WINDOW ? bytes / 3 : WINDOW;
        uint32_t different = 0;

        GR_MUST(cuMemsetD32(count, 0, 1));
        for (unsigned i = 0; i < 3; i++)
                GR_MUST(gt_count_diff(gt, NULL, ptr + (bytes - window) / 2 / 4 * 4 * i, value, window / 4, count));
        GR_MUST(cuMemcpyDtoH(&different, count, sizeof(different)));
        atomic_fetch_add(&shared->changed, different);
}

static void phase(const struct gt *gt, struct job *job, uint64_t *seed, CUdeviceptr count)
{
        size_t quarter = options.most / 4, bytes = quarter * (1 + gt_random(seed) % 4);
        uint32_t value = (uint32_t)gt_random(seed);
        double begin_us = gt_now_us(), us;
        CUdeviceptr ptr;
        CUresult result = cuMemAlloc(&ptr, bytes);

        us = gt_now_us() - begin_us;
        if (us > job->longest_alloc_us)
                job->longest_alloc_us = us;
        if (result == CUDA_ERROR_OUT_OF_MEMORY) {
                job->refused++;
        } else {
                GR_MUST(result);
                GR_MUST(cuMemsetD32(ptr, value, bytes / 4));
                gt_sleep_us(50000 + (double)(gt_random(seed) % 100000)); /* what the program does beside the card */
                check_block(gt, ptr, bytes, value, count);
                GR_MUST(cuMemFree(ptr));
                job->phases++;
        }
        gt_sleep_us(50000 + (double)(gt_random(seed) % 200000));
}

static void share_one(unsigned number)
{
        struct job *job = &shared->jobs[number];
        uint64_t seed = 88172645463325252ull + number * 7919;
        double begin_us = gt_now_us();
        CUdeviceptr count;
        struct gt gt;

        gt_open(&gt);
        GR_MUST(cuMemAlloc(&count, 4));
        for (unsigned i = 0; i < options.phases; i++)
                phase(&gt, job, &seed, count);
        job->us = gt_now_us() - begin_us;
}

/* What one process takes without memory of its own: it stands there until told to end. */
static void stand_about(unsigned number)
{
        CUdeviceptr ptr, count;
        struct gt gt;

        (void)number;
        gt_open(&gt);
        GR_MUST(cuMemAlloc(&ptr, MIB));
        GR_MUST(cuMemAlloc(&count, 4));
        GR_MUST(cuMemsetD32(ptr, 1, MIB / 4));
        check_block(&gt, ptr, MIB, 1, count);
        atomic_fetch_add(&shared->ready, 1);
        while (!shared->go)
                gt_sleep_us(2000);
}

static size_t one_context(pid_t *ret_watcher)
{
        double begin_us = gt_now_us();
        size_t bytes;

        *ret_watcher = begin(watch_as_job, 0);
        wait_until_ready(1, begin_us);
        begin(stand_about, 0);
        wait_until_ready(2, begin_us);
        gt_sleep_us(20 * SAMPLE_US);
        bytes = shared->used_now > shared->used_before ? shared->used_now - shared->used_before : 0;
        if (shared->ours_now > 0)
                bytes = shared->ours_now;
        shared->go = true;
        if (reap(1))
                gt_die("the first process failed");
        gt_sleep_us(20 * SAMPLE_US);
        shared->used_most = shared->ours_most = 0;
        return bytes;
}

static int share_all(void)
{
        unsigned running = 0, begun = 0, failed = 0, phases = 0, refused = 0;
        double begin_us, all_us, longest_us = 0;
        pid_t watcher;
        size_t context_bytes = one_context(&watcher), contexts_bytes, card_peak, peak;
        int status;
        bool passed;

        begin_us = gt_now_us();
        while (begun < options.count || running > 0) {
                pid_t pid;

                if (begun < options.count && running < options.at_once) {
                        begin(share_one, begun++);
                        running++;
                        continue;
                }
                pid = waitpid(-1, &status, WNOHANG);
                if (pid == watcher)
                        gt_die("nobody watches the card, status %d", status);
                if (pid > 0) {
                        running--;
                        failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
                } else {
                        gt_sleep_us(1000);
                }
                if (gt_now_us() - begin_us > GIVE_UP_US)
                        gt_die("%u of %u jobs have not ended in time", running + options.count - begun, options.count);
        }
        all_us = gt_now_us() - begin_us;
        shared->end = true;
        reap(1);
        for (unsigned i = 0; i < options.count; i++) {
                phases += shared->jobs[i].phases;
                refused += shared->jobs[i].refused;
                if (shared->jobs[i].longest_alloc_us > longest_us)
                        longest_us = shared->jobs[i].longest_alloc_us;
        }
        card_peak = shared->used_most > shared->used_before ? shared->used_most - shared->used_before : 0;
        peak = card_peak;
        if (shared->ours_most > 0) /* others may be at work on the card */
                peak = shared->ours_most;
        contexts_bytes = options.at_once * context_bytes;
        printf("# jobs %u\n# at_once %u\n# seconds %.2f\n# phases %u\n# refused %u\n# failed %u\n# changed %u\n",
               options.count, options.at_once, all_us / 1e6, phases, refused, failed, (unsigned)shared->changed);
        printf("# longest_alloc_ms %.0f\n", longest_us / 1e3);
        if (shared->card_known)
                printf("# peak_mib %zu\n# card_peak_mib %zu\n# context_mib %zu\n# contexts_mib %zu\n", peak / MIB,
                       card_peak / MIB, context_bytes / MIB, contexts_bytes / MIB);
        /*
         * What the driver keeps for itself in each once memory has gone back to it through a stream: 46 MiB on an H200.
         */
        passed = shared->card_known && options.budget &&
                 peak > options.budget + contexts_bytes + options.at_once * 64 * MIB;
        if (passed)
                printf("the peak of %zu MiB passes the budget of %zu MiB and %zu MiB of contexts\n", peak / MIB,
                       options.budget / MIB, contexts_bytes / MIB);
        return passed || failed || shared->changed || (refused && !options.may_fail) ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* Of one process; ptr 0: none. */
struct block {
        CUdeviceptr ptr;
        size_t bytes;
        uint32_t value;
};

static void act(const struct gt *gt, struct job *job, struct block *block, uint64_t *seed, CUdeviceptr count)
{
        CUresult result;

        if (block->ptr && gt_random(seed) % 3 > 0) {
                check_block(gt, block->ptr, block->bytes, block->value, count);
        } else if (block->ptr) {
                GR_MUST(cuMemFree(block->ptr));
                block->ptr = 0;
        } else {
                block->bytes = options.most / BLOCKS / 4 * (1 + gt_random(seed) % 4);
                block->value = (uint32_t)gt_random(seed);
                result = cuMemAlloc(&block->ptr, block->bytes);
                if (result == CUDA_ERROR_OUT_OF_MEMORY) {
                        block->ptr = 0;
                        job->refused++;
                        return;
                }
                GR_MUST(result);
                GR_MUST(cuMemsetD32(block->ptr, block->value, block->bytes / 4));
        }
}

static void act_until_end(unsigned number)
{
        struct job *job = &shared->jobs[number];
        uint64_t seed = 88172645463325252ull + number * 7919;
        struct block blocks[BLOCKS] = {{0}};
        CUdeviceptr count;
        struct gt gt;

        gt_open(&gt);
        GR_MUST(cuMemAlloc(&count, 4));
        for (bool last = false; !last;) {
                double begin_us = gt_now_us();

                last = shared->end;
                act(&gt, job, &blocks[gt_random(&seed) % BLOCKS], &seed, count);
                if (gt_now_us() - begin_us > job->longest_alloc_us)
                        job->longest_alloc_us = gt_now_us() - begin_us;
                job->phases++;
                if (gt_random(&seed) % 4 == 0)
                        gt_sleep_us((double)(gt_random(&seed) % 300000));
        }
        for (unsigned i = 0; i < BLOCKS; i++)
                if (blocks[i].ptr)
                        check_block(&gt, blocks[i].ptr, blocks[i].bytes, blocks[i].value, count);
}

static void order_sleep(unsigned pid)
{
        const char *command = getenv("GR_TEST_COMMAND");
        char number[16];

        snprintf(number, sizeof(number), "%u", pid);
        unsetenv("LD_PRELOAD");
        freopen("/dev/null", "w", stdout);
        freopen("/dev/null", "w", stderr);
        if (command)
                execl(command, command, "sleep", "--timeout", "1s", number, NULL);
        _exit(GT_SKIPPED);
}

/* Whether the command put it to sleep. */
static bool slept(pid_t command)
{
        int status;

        if (waitpid(command, &status, 0) != command || !WIFEXITED(status))
                return false;
        if (WEXITSTATUS(status) == GT_SKIPPED)
                gt_die("GR_TEST_COMMAND is not the command");
        return WEXITSTATUS(status) == 0;
}

/* Kills one; with --order one that is at work already and was told to sleep, as one that stays was. */
static unsigned kill_one(const unsigned *numbers, const pid_t *pids, uint64_t *seed, bool *ret_asleep)
{
        pid_t commands[2] = {0};
        double begin_us = gt_now_us();
        unsigned victim;

        do {
                if (gt_now_us() - begin_us > GIVE_UP_US)
                        gt_die("none of them gets to work");
                gt_sleep_us(1000);
                victim = options.keep + (unsigned)(gt_random(seed) % (options.count - options.keep));
        } while (options.order && shared->jobs[numbers[victim]].phases == 0);
        if (options.order)
                commands[0] = begin(order_sleep, (unsigned)pids[victim]);
        if (options.order && options.keep)
                commands[1] = begin(order_sleep, (unsigned)pids[gt_random(seed) % options.keep]);
        gt_sleep_us(options.order ? (double)(gt_random(seed) % 250000) : 300000 + (double)(gt_random(seed) % 400000));
        kill(pids[victim], SIGKILL);
        *ret_asleep = options.order && slept(commands[0]);
        if (commands[1])
                slept(commands[1]);
        return victim;
}

static int kill_some(void)
{
        unsigned numbers[MOST_PROCESSES], phases = 0, refused = 0, failed = 0, asleep = 0, begun = options.count;
        uint64_t seed = (uint64_t)gt_now_us();
        pid_t pids[MOST_PROCESSES];
        double longest_us = 0;
        bool late;

        if (options.count + options.kills > MOST_PROCESSES || options.keep >= options.count)
                gt_die("at most %d processes in all, and not all of them kept", MOST_PROCESSES);
        for (unsigned i = 0; i < options.count; i++) {
                numbers[i] = i;
                pids[i] = begin(act_until_end, i);
        }
        for (unsigned i = 0; i < options.kills; i++) {
                bool was_asleep;
                unsigned victim = kill_one(numbers, pids, &seed, &was_asleep);
                int status = 0;

                waitpid(pids[victim], &status, 0);
                failed += !WIFSIGNALED(status);
                asleep += was_asleep;
                numbers[victim] = begun++;
                pids[victim] = begin(act_until_end, numbers[victim]);
        }
        shared->end = true;
        failed += reap(options.count);
        for (unsigned i = 0; i < begun; i++) {
                phases += shared->jobs[i].phases;
                refused += shared->jobs[i].refused;
                if (shared->jobs[i].longest_alloc_us > longest_us)
                        longest_us = shared->jobs[i].longest_alloc_us;
        }
        printf("# processes %u\n# kills %u\n# acts %u\n# refused %u\n# failed %u\n# changed %u\n# longest_ms %.0f\n",
               begun, options.kills, phases, refused, failed, (unsigned)shared->changed, longest_us / 1e3);
        if (options.order)
                printf("# killed_asleep %u\n", asleep);
        late = options.deadline && longest_us > options.deadline * 1e6;
        return failed || late || shared->changed || (refused && !options.may_fail) ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
        int mode = GT_OPTIONS(argc, argv,
                              "start [--count=N] | share [--jobs=N] [--at-once=N] [--phases=N] [--most=SIZE] "
                              "[--budget=SIZE] [--may-fail] | kill [--count=N] [--kills=N] [--most=SIZE] [--may-fail] "
                              "[--keep=N] [--order] [--deadline=S]",
                              GT_OPTION("count", options.count), GT_OPTION("jobs", options.count),
                              GT_OPTION("at-once", options.at_once), GT_OPTION("phases", options.phases),
                              GT_OPTION("kills", options.kills), GT_OPTION("most", options.most),
                              GT_OPTION("budget", options.budget), GT_OPTION("may-fail", options.may_fail),
                              GT_OPTION("keep", options.keep), GT_OPTION("order", options.order),
                              GT_OPTION("deadline", options.deadline));

        if (options.count == 0 || options.count > MOST_PROCESSES)
                gt_die("1 to %d processes", MOST_PROCESSES);
        if (options.at_once == 0)
                options.at_once = options.count;
        shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (shared == MAP_FAILED)
                gt_die("no memory");
        if (mode < argc && strcmp(argv[mode], "start") == 0)
                return start_all();
        if (mode < argc && strcmp(argv[mode], "share") == 0)
                return share_all();
        if (mode < argc && strcmp(argv[mode], "kill") == 0)
                return kill_some();
        gt_die("many_processes start, share or kill?");
}
