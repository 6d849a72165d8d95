/*
 * Two processes on one card that do not both fit, under GPURECLAIM_WAIT: the second waits for the first and finishes;
 * where both wait for each other, both get a clean CUDA_ERROR_OUT_OF_MEMORY in bounded time.
 *
 *   GPURECLAIM_WAIT=20s process_waits turns [--hold-ms=2000] [--stay]   --stay: the first goes on, with a full cache
 *   GPURECLAIM_WAIT=2s  process_waits both [--most-ms=10000]
 *
 * Natively the second fails at once; --native says that this is expected. Lines "# name value": waited_ms, held_ms.
 * The process that the test starts has no CUDA in it.
 */
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static struct gt gt;
static double hold_ms = 2000, most_ms = 10000;
static bool both, native, stay;
static int to_parent[2], go[2][2]; /* pipes */

static double alloc_ms; /* of the last fill */

static CUdeviceptr fill(size_t bytes, uint32_t value, CUresult *ret_result)
{
        CUdeviceptr p = 0;
        double begin = gt_now_us();

        *ret_result = cuMemAlloc(&p, bytes);
        alloc_ms = (gt_now_us() - begin) / 1e3;
        if (*ret_result == CUDA_SUCCESS) {
                GR_MUST(gt_fill(&gt, NULL, p, value, bytes / 4));
                GR_MUST(cuCtxSynchronize());
        } else if (*ret_result != CUDA_ERROR_OUT_OF_MEMORY) {
                gt_die("cuMemAlloc returned %s", gt_result_name(*ret_result));
        }
        return p;
}

static void tell(const void *what, size_t bytes)
{
        if (write(to_parent[1], what, bytes) != (ssize_t)bytes)
                exit(1);
}

static void hear(int fd, void *what, size_t bytes)
{
        if (read(fd, what, bytes) != (ssize_t)bytes)
                exit(1);
}

/* Each process opens the device, tells what is free, takes its part when told, and then wants as much as it is told. */
static void work(int self)
{
        size_t available, total, order[2];
        CUdeviceptr first = 0, second;
        CUresult result;

        gt_open(&gt);
        GR_MUST(cuMemGetInfo(&available, &total));
        tell(&available, sizeof(available));
        hear(go[self][0], order, sizeof(order));
        if (order[0]) {
                first = fill(order[0], 1, &result);
                if (result != CUDA_SUCCESS)
                        gt_die("process %d: there was no room to begin with", self);
        }
        tell(&self, sizeof(self));
        hear(go[self][0], &order[0], sizeof(order[0])); /* both are there */
        if (!both && self == 0) {
                gt_sleep_us(hold_ms * 1e3);
                GR_MUST(cuMemFree(first));
                if (stay)
                        hear(go[self][0], &order[0], sizeof(order[0]));
                gt_close(&gt);
                return;
        }
        second = fill(order[1], 2, &result);
        printf("process %d: %s\n# waited_ms_%d %.1f\n", self, gt_result_name(result), self, alloc_ms);
        if (both) { /* neither may find what the other left behind */
                tell(&self, sizeof(self));
                hear(go[self][0], &order[0], sizeof(order[0]));
        }
        if (both || native) {
                if (result != CUDA_ERROR_OUT_OF_MEMORY || alloc_ms > most_ms)
                        gt_die("process %d: not a clean failure in time", self);
        } else if (result != CUDA_SUCCESS) {
                gt_die("process %d: waited in vain", self);
        } else {
                GR_MUST(cuMemFree(second));
        }
        if (first)
                GR_MUST(cuMemFree(first));
        gt_close(&gt);
}

int main(int argc, char **argv)
{
        size_t available[2], order[2];
        pid_t pids[2];
        int status, failed = 0, who, mode;

        mode = GT_OPTIONS(argc, argv, "turns|both [--hold-ms=MS] [--stay] [--most-ms=MS] [--native]",
                          GT_OPTION("hold-ms", hold_ms), GT_OPTION("most-ms", most_ms), GT_OPTION("stay", stay),
                          GT_OPTION("native", native));
        if (mode == argc || (strcmp(argv[mode], "turns") && strcmp(argv[mode], "both")))
                gt_die("process_waits turns or process_waits both?");
        both = !strcmp(argv[mode], "both");
        if (pipe(to_parent))
                gt_die("no pipe");
        for (int i = 0; i < 2; i++) {
                if (pipe(go[i]))
                        gt_die("no pipe");
                pids[i] = fork();
                if (pids[i] < 0)
                        gt_die("no process");
                if (pids[i] == 0) {
                        close(to_parent[0]);
                        work(i);
                        exit(EXIT_SUCCESS);
                }
        }
        close(to_parent[1]);
        for (int i = 0; i < 2; i++)
                if (read(to_parent[0], &available[i], sizeof(available[i])) != sizeof(available[i])) {
                        waitpid(pids[i], &status, 0);
                        return WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
                }
        /* Both have their contexts now, so the smaller figure is what there is: the first holds 60 % and the second
         * wants as much; or both hold 40 % and want another 30 %. */
        order[0] = available[0] < available[1] ? available[0] : available[1];
        order[1] = order[0] / 100 * (both ? 30 : 60) / GT_PAGE * GT_PAGE;
        order[0] = order[0] / 100 * (both ? 40 : 60) / GT_PAGE * GT_PAGE;
        for (int i = 0; i < 2; i++) {
                size_t own[2] = {both || i == 0 ? order[0] : 0, order[1]};

                if (write(go[i][1], own, sizeof(own)) != sizeof(own) ||
                    read(to_parent[0], &who, sizeof(who)) != sizeof(who))
                        gt_die("process %d is gone", i);
        }
        for (int i = 0; i < 2; i++)
                if (write(go[i][1], &order[0], sizeof(order[0])) != sizeof(order[0]))
                        gt_die("process %d is gone", i);
        for (int i = 0; both && i < 2; i++)
                if (read(to_parent[0], &who, sizeof(who)) != sizeof(who))
                        gt_die("a process is gone");
        for (int i = 0; both && i < 2; i++)
                if (write(go[i][1], &order[0], sizeof(order[0])) != sizeof(order[0]))
                        gt_die("process %d is gone", i);
        for (int i = 1; i >= 0; i--) { /* the first may stay until the second is done */
                waitpid(pids[i], &status, 0);
                if (i == 1 && stay && write(go[0][1], &order[0], sizeof(order[0])) != sizeof(order[0]))
                        gt_die("process 0 is gone");
                failed += !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
        printf("# held_ms %.0f\n", both ? 0 : hold_ms);
        return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
