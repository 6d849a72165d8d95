/* Scenes of two processes on one card: one has what the other asks for, or opens. The other one has no fault. */
#include "scenes.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- two processes on one card; the other one has no fault ---- */

static int to_other, from_other;
static pid_t other_process;

static void other_begin(void (*run)(int in, int out))
{
        int to[2], from[2];

        if (pipe(to) || pipe(from))
                abort();
        other_process = fork();
        if (other_process == 0) {
                static struct sweep_report unseen, *seen_by;

                prctl(PR_SET_PDEATHSIG, SIGKILL);
                close(to[1]);
                close(from[0]);
                unsetenv("GRSIM_FAULT");
                unsetenv("GPURECLAIM_TRACE");
                unsetenv("GPURECLAIM_STATS_FILE");
                sweep_plan.nth = 0;
                seen_by = sweep_report;
                sweep_report = &unseen;
                open_device();
                run(to[0], from[1]);
                seen_by->unhelped |= unseen.unhelped;
                for (unsigned i = 0; i < unseen.error_count && i < SWEEP_ERRORS; i++)
                        if (unseen.errors[i].code != CUDA_ERROR_OUT_OF_MEMORY)
                                sweep_wrong("%s of the other process", unseen.errors[i].call);
                exit(unseen.wrong[0] != 0);
        }
        close(to[0]);
        close(from[1]);
        to_other = to[1];
        from_other = from[0];
}

static char other_says(void)
{
        char word = 0;

        if (read(from_other, &word, 1) != 1)
                sweep_wrong("the other process has gone");
        return word;
}

static void other_end(void)
{
        int status = -1;

        close(to_other);
        if (waitpid(other_process, &status, 0) != other_process || status != 0)
                sweep_wrong("the other process ended with %#x", (unsigned)status);
}

static void say(int out, char word)
{
        if (write(out, &word, 1) != 1)
                abort();
}

static void give_40(void)
{
        CUdeviceptr blocks[5];

        for (int i = 0; i < 5; i++)
                blocks[i] = take(8 * MIB);
        for (int i = 0; i < 5; i++)
                give(blocks[i]);
}

/* More than is free beside what the other process keeps: who cannot ask for it gets what there is. */
static void take_40(void)
{
        CUdeviceptr blocks[PROBES_MOST];
        unsigned count = take_all(blocks);

        sweep_report->unhelped = count < 5;
        while (count > 0) {
                use(blocks[--count], PROBE_BYTES, 6);
                give(blocks[count]);
        }
}

/* Leaves memory in its cache and waits. */
static void giver(int in, int out)
{
        char word;

        give_40();
        say(out, 'g');
        if (read(in, &word, 1) < 0)
                abort();
        TRY(cuDevicePrimaryCtxRelease(device));
}

void asking(void)
{
        other_begin(giver);
        other_says();
        open_device();
        take_40();
        other_end();
}

/* Waits until there is memory to ask for. */
static void asker(int in, int out)
{
        char word;

        if (read(in, &word, 1) == 1) {
                take_40();
                say(out, 't');
        }
        TRY(cuDevicePrimaryCtxRelease(device));
}

void giving(void)
{
        other_begin(asker);
        open_device();
        give_40();
        say(to_other, 'a');
        other_says();
        other_end();
}

/* ---- memory that another process opens, and the other way round ---- */

static void partner(int in, int out)
{
        CUipcMemHandle handle;
        CUdeviceptr p;
        char word;

        if (read(in, &handle, sizeof(handle)) == (ssize_t)sizeof(handle)) {
                TRY(cuIpcOpenMemHandle(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
                check(p, LARGE, 17);
                TRY(cuMemsetD32(p + LARGE - SMALL, 18, SMALL / 4));
                TRY(cuCtxSynchronize());
                TRY(cuIpcCloseMemHandle(p));
                say(out, 'c');
        }
        p = take(LARGE);
        use(p, LARGE, 19);
        TRY(cuIpcGetMemHandle(&handle, p));
        if (write(out, &handle, sizeof(handle)) != (ssize_t)sizeof(handle) || read(in, &word, 1) != 1)
                abort();
        give(p);
}

void shared(void)
{
        CUipcMemHandle handle;
        CUdeviceptr p;

        other_begin(partner);
        open_device();
        p = take(LARGE);
        use(p, LARGE, 17);
        TRY(cuIpcGetMemHandle(&handle, p));
        if (write(to_other, &handle, sizeof(handle)) != (ssize_t)sizeof(handle))
                abort();
        other_says();
        check(p, LARGE, 18);
        give(p);
        give(take(LARGE));
        if (read(from_other, &handle, sizeof(handle)) != (ssize_t)sizeof(handle))
                abort();
        TRY(cuIpcOpenMemHandle(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        check(p, LARGE, 19);
        TRY(cuIpcCloseMemHandle(p));
        say(to_other, 'd');
        other_end();
}
