/*
 * Several processes on one card, under the library: `neighbours MODE`. The program that the test starts has no CUDA
 * in it; it starts workers on a simulated card that they share, tells them what to do, kills and stops them, and looks
 * into the region. Deadlines are generous because test machines are busy; what must not be is a wait without end.
 */
#include "neighbours_worker.h"

#include "check.h"

#include "system/platform.h"

#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/*
 * How long neighbours are waited for without a sign of life. Not the default of 100 ms: a busy host, or one whose
 * virtual processors stand still now and then, lets a neighbour's thread wait for longer than that.
 */
#define QUIET_MS 400
#define HOOK_MS  900 /* what a slow hook takes */

/* One lets its cache lie about, the other needs the card: GIVEN says whether it gets it. */
static void help(bool given)
{
        struct worker rich = start(0), poor = start(0);
        struct reply reply;

        if (ask(&rich, 'a', 600).result != 0 || ask(&rich, 'f', 0).result != 0)
                fail("the first cannot work", 0);
        reply = ask(&poor, 'a', 700);
        if ((reply.result == 0) != given)
                fail("the second's allocation", reply.result);
        printf("~ 700 MiB while another one has 600 MiB of 1024 cached: %s in %.1f ms\n",
               reply.result == 0 ? "served" : "refused", reply.ms);
        if (has_segment(&rich) != given || has_segment(&poor) != given)
                fail("shared memory", given);
        if (given) {
                /* And the other way: what is live is nobody's to give, what is freed then is. */
                reply = ask(&rich, 'a', 600);
                if (reply.result != CUDA_ERROR_OUT_OF_MEMORY || reply.ms > CALL_MS)
                        fail("memory that is in use was given away", reply.result);
                ask(&poor, 'f', 0);
                if (ask(&rich, 'a', 600).result != 0)
                        fail("the first one's next step", 0);
        }
        end(&rich, 0);
        end(&poor, 0);
        if (given && !file_gone())
                fail("the last one left the file behind", 0);
        if (!given && access(region_path(), F_OK) == 0)
                fail("switched off, it has a folder", 0);
}

static void mode_help(void)
{
        help(true);
}

static void mode_no_help(void)
{
        help(false);
}

/* What a pool of the driver keeps for one is there for the other, and for the first one's pool again after that. */
static void mode_pool(void)
{
        struct worker rich = start(0), poor = start(0);

        if (ask(&rich, 'q', 900).result != 0)
                fail("the first cannot work", 0);
        if (ask(&poor, 'a', 900).result != 0)
                fail("the driver's pool keeps it", 0);
        ask(&poor, 'f', 0);
        if (ask(&rich, 'q', 900).result != 0)
                fail("the first one's next step", 0);
        end(&rich, 0);
        end(&poor, 0);
}

/* GRSIM_CONTEXT. A process that begins needs memory for its context before it is a neighbour of anybody. */
static void mode_context(void)
{
        struct worker rich = start(0), late;

        if (ask(&rich, 'a', 900).result != 0 || ask(&rich, 'f', 0).result != 0)
                fail("the first cannot work", 0);
        late = start(0);
        if (ask(&late, 'a', 1).result != 0)
                fail("no context beside what the first one caches", 0);
        end(&rich, 0);
        end(&late, 0);
}

/* A framework's idle cache is live memory to the library; its hooks give it to another process. */
static void mode_purge(void)
{
        struct worker rich = start(0), poor = start(0);
        struct reply reply;

        if (ask(&rich, 'a', 600).result != 0)
                fail("the first cannot work", 0);
        reply = ask(&poor, 'a', 700);
        if (reply.result != CUDA_ERROR_OUT_OF_MEMORY)
                fail("memory that is in use was given away", reply.result);
        if (ask(&rich, 'h', 0).result != 0)
                fail("no hook can be registered", 0);
        reply = ask(&poor, 'a', 700);
        if (reply.result != 0)
                fail("the hook's memory was not given", reply.result);
        printf("~ 700 MiB while another one's hook has 600 MiB of 1024: served in %.1f ms\n", reply.ms);
        if (given_mib() != 600)
                fail("what the first one gave counts as another figure", (long long)given_mib());
        if (ask(&rich, 'a', 200).result != 0)
                fail("the first one's next step", 0);
        end(&rich, 0);
        end(&poor, 0);
}

/* A hook that needs longer than neighbours are waited for without a sign of life; then one stopped in its middle. */
static void mode_slow(void)
{
        struct worker rich = start(0), poor = start(0);
        struct reply reply;
        double served_ms;

        ask(&rich, 'a', 600);
        if (ask(&rich, 'h', HOOK_MS).result != 0)
                fail("no hook can be registered", 0);
        reply = ask(&poor, 'a', 700);
        if (reply.result != 0 || reply.ms > CALL_MS)
                fail("a slow hook's memory was not given", reply.result);
        served_ms = reply.ms;
        ask(&poor, 'f', 0);
        if (ask(&rich, 'a', 600).result != 0)
                fail("the first one's next step", 0);
        tell(&poor, 'a', 700);
        pause_ms(100);
        stop(&rich);
        reply = hear(&poor);
        if (reply.result != CUDA_ERROR_OUT_OF_MEMORY || reply.ms > CALL_MS)
                fail("stopped in the middle of its hook", (long long)reply.ms);
        printf("~ a hook of %d ms, then one stopped after 100 ms: served in %.1f ms, refused in %.1f ms\n", HOOK_MS,
               served_ms, reply.ms);
        kill(rich.pid, SIGCONT);
        for (int i = 0; i < 20 && reply.result != 0; i++) {
                pause_ms(100);
                reply = ask(&poor, 'a', 700);
        }
        if (reply.result != 0)
                fail("it gives nothing after it goes on", reply.result);
        end(&rich, SIGKILL);
        end(&poor, 0);
}

static void mode_stop(void)
{
        struct worker rich = start(0), poor = start(0);
        struct reply reply;
        double longest = 0;

        ask(&rich, 'a', 600);
        ask(&rich, 'f', 0);
        ask(&poor, 'a', 8);
        stop(&rich);
        pause_ms(100);
        for (int i = 0; i < 5; i++) {
                reply = ask(&poor, 'a', 700);
                if (reply.result != CUDA_ERROR_OUT_OF_MEMORY || reply.ms > CALL_MS)
                        fail("a stopped neighbour", (long long)reply.ms);
                longest = reply.ms > longest ? reply.ms : longest;
        }
        printf("~ beside a stopped neighbour, 5 times: refused in at most %.1f ms\n", longest);
        kill(rich.pid, SIGCONT);
        if (ask(&poor, 'a', 700).result != 0)
                fail("it gives nothing after it goes on", 0);
        end(&rich, SIGKILL);
        end(&poor, 0);
}

/* Somebody empties the region's file under running processes: they live, and meet again. */
static void mode_truncate(void)
{
        struct worker rich = start(0), poor = start(0);
        static struct gr_region region;
        double begin;
        bool met;

        ask(&rich, 'a', 600);
        ask(&poor, 'a', 8);
        for (int i = 0; i < 3; i++) {
                empty_file();
                if (ask(&rich, 'f', 0).result != 0 || ask(&rich, 'a', 600).result != 0 ||
                    ask(&poor, 'f', 0).result != 0)
                        fail("an emptied file stops a process", i);
                ask(&poor, 'a', 8);
                begin = now_ms();
                do {
                        pause_ms(10);
                        met = open_region(&region);
                        /* Both of them, and with all that they have: what is freed lies in their caches. */
                        if (met && (members(&region, true) != 2 || gr_region_sum(&region, false) != 608 * MIB)) {
                                gr_region_close(&region);
                                met = false;
                        }
                        if (now_ms() - begin > CALL_MS)
                                fail("they do not meet again", i);
                } while (!met);
                printf("~ together again after %.0f ms\n", now_ms() - begin);
                gr_region_close(&region);
        }
        ask(&rich, 'f', 0);
        if (ask(&poor, 'a', 700).result != 0)
                fail("what one has cached is not given after that", 0);
        end(&rich, 0);
        end(&poor, 0);
        if (!file_gone())
                fail("the last one left the file behind", 0);
}

static void mode_fork(void)
{
        static struct gr_region region;
        struct worker worker = start(0);

        ask(&worker, 'a', 10);
        if (!open_region(&region))
                fail("no region", 0);
        for (int i = 0; i < 10; i++)
                if (ask(&worker, 'k', 0).result != 0)
                        fail("the child of a worker", 0);
        if (members(&region, true) != 1 || gr_region_sum(&region, false) != 10 * MIB)
                fail("a child took its parent's place", members(&region, false));
        if (ask(&worker, 'a', 10).result != 0 || gr_region_sum(&region, false) != 20 * MIB)
                fail("the parent after its children", 0);
        end(&worker, 0);
}

static void heard_late(struct worker *worker)
{
        struct pollfd ready = {.fd = worker->from, .events = POLLIN};
        struct reply reply;

        if (poll(&ready, 1, 0) == 1 && read(worker->from, &reply, sizeof(reply)) == sizeof(reply))
                fail("a call took too long, in ms", (long long)reply.ms);
}

/* Processes that allocate, ask, are asked, start and end are killed at any moment. */
static void mode_kill(void)
{
        static struct gr_region region;
        const char *kills_text = getenv("GR_TEST_KILLS"), *pause_text = getenv("GR_TEST_PAUSE_US");
        long kills = kills_text ? atol(kills_text) : 300, killed = 0, ended = 0;
        int pause_us = pause_text ? atoi(pause_text) : 15000; /* longest between kills; a real GPU's start takes long */
        unsigned seed = 20261121;
        struct worker workers[6], last;
        uint64_t sum, wanted;
        double begin;

        longest_ms = mmap(NULL, sizeof(*longest_ms), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (longest_ms == MAP_FAILED)
                fail("no memory", errno);
        for (int i = 0; i < 6; i++)
                workers[i] = start(1 + (unsigned)rand_r(&seed) % 1000000);
        while (killed < kills) {
                int i = rand_r(&seed) % 6, status;

                usleep((useconds_t)(rand_r(&seed) % pause_us));
                heard_late(&workers[i]);
                if (waitpid(workers[i].pid, &status, WNOHANG) == workers[i].pid) {
                        if (!WIFEXITED(status) || WEXITSTATUS(status))
                                fail("a worker failed", status);
                        ended++;
                        close(workers[i].to);
                        close(workers[i].from);
                } else {
                        end(&workers[i], SIGKILL);
                        killed++;
                }
                workers[i] = start(1 + (unsigned)rand_r(&seed) % 1000000);
        }
        last = start(0);
        while (ask(&last, 'a', 5).result != 0)
                pause_ms(10); /* the card may be full of what the others use */
        for (int i = 0; i < 6; i++)
                end(&workers[i], SIGKILL);
        begin = now_ms();
        if (!open_region(&region))
                fail("no region", 0);
        do {
                sum = gr_region_sum(&region, false);
                wanted = 6 * MIB; /* 5 MiB in pages */
                if (now_ms() - begin > 5000)
                        fail("slots of killed processes are left", members(&region, false));
                pause_ms(10);
        } while (members(&region, false) != 1 || sum != wanted);
        printf("~ %ld killed, %ld ended by themselves, longest call %u ms; figures right again after %.0f ms\n", killed,
               ended, *longest_ms, now_ms() - begin);
        if (ask(&last, 'a', CARD_MIB - 100).result != 0)
                fail("memory of killed processes is lost", 0);
        end(&last, 0);
        if (!file_gone())
                fail("the last one left the file behind", 0);
}

/* What `gpureclaim ARGUMENTS` prints, on both outputs; its exit status must be wanted. */
static const char *command(int wanted, const char *format, unsigned pid)
{
        static char out[8192];
        char line[512], arguments[128];
        size_t length;
        FILE *pipe;
        int status;

        snprintf(arguments, sizeof(arguments), format, pid);
        snprintf(line, sizeof(line), "LD_PRELOAD= '%s' %s 2>&1", getenv("GR_TEST_COMMAND"), arguments);
        pipe = popen(line, "r");
        if (!pipe)
                fail("no shell", errno);
        length = fread(out, 1, sizeof(out) - 1, pipe);
        out[length] = '\0';
        status = pclose(pipe);
        printf("~ $ gpureclaim %s\n", arguments);
        for (char *at = strtok(strdup(out), "\n"); at; at = strtok(NULL, "\n"))
                printf("~ %s\n", at);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != wanted) {
                fprintf(stderr, "neighbours: gpureclaim %s: not status %d; it said: %s\n", arguments, wanted, out);
                fail("the command's status", status);
        }
        return out;
}

static void says(const char *out, const char *text)
{
        if (!strstr(out, text)) {
                fprintf(stderr, "neighbours: not said: %s\n", text);
                exit(1);
        }
}

static void mode_command(void)
{
        struct worker one, two;
        unsigned pid;

        says(command(0, "status", 0), "No process of yours");
        one = start(0);
        two = start(0);
        pid = (unsigned)one.pid;
        ask(&one, 'a', 100);
        ask(&one, 'a', 200);
        ask(&one, 'f', 0);
        ask(&one, 'a', 100);
        ask(&two, 'a', 50);
        pause_ms(600);
        says(command(0, "status", 0), "memory: 350.000 MiB of 1.000 GiB used, 0 B not counted here");
        says(command(0, "status", 0), "    memory: 100.000 MiB live, 200.000 MiB cached, 300.000 MiB reserved\n");
        says(command(0, "status", 0), "    peak: 300.000 MiB reserved\n");
        if (strstr(command(0, "status", 0), "free for 0.0 s"))
                fail("being asked counts as activity", 0);
        says(command(0, "status --json", 0), "\"live_bytes\": 104857600, \"cached_bytes\": 209715200");
        says(command(0, "limit %u 250MiB", pid), "hard limit now 250.000 MiB; 100.000 MiB live, 0 B cached");
        if (ask(&one, 'g', 0).result != 250)
                fail("the program does not see the changed limit", 0);
        if (ask(&one, 'a', 200).result == 0 || ask(&one, 'a', 100).result != 0)
                fail("the changed limit does not hold", 0);
        says(command(0, "limit %u 64MiB", pid), "its next allocation fails");
        if (ask(&one, 'a', 1).result == 0)
                fail("a limit below what is in use does not hold", 0);
        says(command(0, "limit %u 2GiB", pid), "The GPU has 1.000 GiB: that limits nothing.");
        says(command(0, "limit %u none", pid), "hard limit now none");
        ask(&one, 'f', 0);
        pause_ms(300); /* after a failure frees go to the driver for a moment */
        ask(&one, 'a', 300);
        ask(&one, 'f', 0);
        says(command(0, "threshold %u 10%%", pid), "release threshold now 102.400 MiB; 0 B live, 0 B cached");
        says(command(0, "threshold %u none", pid), "now none");
        ask(&one, 'a', 300);
        ask(&one, 'f', 0);
        says(command(0, "reclaim %u", pid), "300.000 MiB came back");
        says(command(0, "reclaim --all --rung drop", 0), "0 B came back");
        ask(&one, 'a', 300);
        ask(&one, 'f', 0);
        says(command(0, "wait --free 900MiB -- echo started", 0), "started");
        says(command(124, "wait --free 1000MiB --timeout 300ms -- echo started", 0), "the time is up");
        says(command(1, "limit 1 4GiB", 0), "does not run under gpureclaim");
        says(command(2, "limit %u 4XiB", pid), "not understood");
        says(command(2, "limit %u 8", pid), "limit: 8: out of range (from 2MiB)");
        says(command(2, "limit", 0), "needs a process id");
        says(command(2, "reclaim", 0), "needs a process id or --all");
        says(command(2, "wait -- true", 0), "needs --free");
        stop(&one);
        /* What is asked of one that is stopped is withdrawn: it goes on as if nothing had been. */
        says(command(1, "reclaim %u", pid), "does not answer (stopped or hung): nothing is changed");
        says(command(1, "limit %u 4MiB", pid), "does not answer (stopped or hung): nothing is changed");
        says(command(1, "sleep --timeout 0s %u", pid), "does not answer (stopped or hung): nothing is changed");
        kill(one.pid, SIGCONT);
        says(command(0, "threshold %u none", pid), "now none; 0 B live, 300.000 MiB cached");
        ask(&one, 'a', 300);
        ask(&one, 'f', 0);
        end(&one, SIGKILL);
        says(command(1, "reclaim %u", pid), "does not run under gpureclaim");
        end(&two, 0);
}

/* One that could not make its thread for a moment serves the others later. */
static void mode_late_thread(void)
{
        struct worker one = start(0), two = start(0);
        struct reply reply;
        double begin;

        if (ask(&one, 'p', 0).result != 0 || ask(&one, 'a', 600).result != 0 || ask(&one, 'f', 0).result != 0)
                fail("without threads it cannot work", 0);
        ask(&two, 'a', 8);
        ask(&one, 'p', 1);
        begin = now_ms();
        do {
                pause_ms(50);
                /* What takes memory from the driver, as programs do all the time. */
                ask(&one, 'a', 1);
                reply = ask(&two, 'a', 700);
        } while (reply.result != 0 && now_ms() - begin < 2 * CALL_MS);
        if (reply.result != 0)
                fail("one serves nobody", reply.result);
        end(&one, 0);
        end(&two, 0);
}

/* GPURECLAIM_POOL=split. What cannot go back, as it lies beside memory in use, is not waited for. */
static void mode_stranded(void)
{
        struct worker rich = start(0), poor = start(0);
        int pauses;

        /* Two to a page. */
        if (ask(&rich, 'a', 1).result != 0 || ask(&rich, 'a', 1).result != 0 || ask(&rich, 'l', 0).result != 0)
                fail("the first cannot work", 0);
        if (ask(&poor, 'a', CARD_MIB).result != CUDA_ERROR_OUT_OF_MEMORY)
                fail("memory that is in use was given away", 0);
        pauses = ask(&rich, 's', 0).result;
        if (pauses > 20)
                fail("what cannot go back is waited for, times", pauses);
        end(&rich, 0);
        end(&poor, 0);
}

/* Another one is about to make the region, and is held up in the middle of it. */
static void mode_held_up(void)
{
        static struct gr_region region;
        struct worker one = start(0), two = start(0), three = start(0);
        char path[GR_REGION_PATH_BYTES + GR_REGION_FILE_BYTES + 1];
        int fd;

        ask(&one, 'a', 1);
        if (!open_region(&region))
                fail("no region", 0);
        snprintf(path, sizeof(path), "%s/%s", region.dir, region.file);
        gr_region_close(&region);
        end(&one, 0);
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || flock(fd, LOCK_EX))
                fail("no lock", errno);
        tell(&three, 'a', 300);
        pause_ms(50);
        close(fd);
        if (hear(&three).result != 0)
                fail("held up it cannot work", 0);
        await_members(&region, 1);
        if (ask(&two, 'a', 300).result != CUDA_ERROR_OUT_OF_MEMORY)
                fail("two have more than their limit together", 0);
        end(&two, 0);
        end(&three, 0);
}

/* Processes in two containers that share the folder only, and one in none: they have one limit, and help each other. */
static void mode_containers(void)
{
        struct worker out = start(0), in = start_in(0, true), other;
        struct gr_region region;
        int status;

        close(in.to);
        waitpid(in.pid, &status, 0);
        if (WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED) {
                printf("skipped: nobody may make namespaces here\n");
                exit(SKIPPED);
        }
        if (ask(&out, 'a', 300).result != 0)
                fail("the first cannot work", 0);
        in = start_in(0, true);
        other = start_in(0, true);
        if (ask(&in, 'a', 100).result != 0 || ask(&other, 'a', 100).result != 0)
                fail("one in a container cannot work", 0);
        await_members(&region, 3);
        if (gr_region_sum(&region, false) != 500 * MIB)
                fail("what all have, in MiB", (long long)(gr_region_sum(&region, false) / MIB));
        if (ask(&in, 'a', 50).result != CUDA_ERROR_OUT_OF_MEMORY || ask(&out, 'a', 50).result == 0)
                fail("the limit of all does not hold", 0);
        ask(&out, 'f', 0);
        if (ask(&in, 'a', 300).result != 0)
                fail("what one outside has cached is not given", 0);
        ask(&in, 'f', 0);
        if (ask(&other, 'a', 350).result != 0)
                fail("what one in a container has cached is not given to the other", 0);
        ask(&other, 'f', 0);
        if (ask(&out, 'a', 450).result != 0)
                fail("nor to one outside", 0);
        gr_region_close(&region);
        end(&in, 0);
        end(&other, 0);
        end(&out, 0);
        if (!file_gone())
                fail("the last one left the file behind", 0);
}

/* A thread is told to end while its call waits for room: the others must not take the process for one that waits. */
static void mode_wait_ends(void)
{
        struct gr_region region;
        struct gr_member member;
        struct worker one;
        unsigned index = 0;

        setenv("GRSIM_TRACE", "/dev/null", 1); /* each call of the driver writes a line, where a thread may end */
        one = start(0);
        if (ask(&one, 'a', 1).result != 0 || ask(&one, 'e', 1).result != 0)
                fail("it cannot work", 0);
        await_members(&region, 1);
        while (gr_region_read(&region, index, &member) != 0)
                if (++index == GR_REGION_SLOTS)
                        fail("it is no member", 0);
        if (member.figures[GR_FIGURE_waiting] != 0)
                fail("it still waits, for MiB", (long long)(member.figures[GR_FIGURE_waiting] / MIB));
        gr_region_close(&region);
        end(&one, 0);
}

/* Nothing to share with: the worker works alone and says nothing. */
static void mode_alone(void)
{
        struct worker worker = start(0);

        for (int i = 0; i < 5; i++)
                if (ask(&worker, 'a', 100).result != 0)
                        fail("alone it cannot work", i);
        if (ask(&worker, 'f', 0).result != 0)
                fail("alone it cannot free", 0);
        end(&worker, 0);
}

int main(int argc, char **argv)
{
        static const struct {
                const char *name;
                void (*run)(void);
        } modes[] = {
                {"help", mode_help},
                {"no-help", mode_no_help},
                {"apart", mode_apart},
                {"pool", mode_pool},
                {"purge", mode_purge},
                {"context", mode_context},
                {"slow", mode_slow},
                {"stop", mode_stop},
                {"truncate", mode_truncate},
                {"fork", mode_fork},
                {"group", mode_group},
                {"phases", mode_phases},
                {"kill", mode_kill},
                {"command", mode_command},
                {"orders", mode_orders},
                {"late-files", mode_late_files},
                {"charges", mode_charges},
                {"late-thread", mode_late_thread},
                {"stranded", mode_stranded},
                {"created", mode_created},
                {"at-once", mode_at_once},
                {"held-up", mode_held_up},
                {"default-dir", mode_default_dir},
                {"containers", mode_containers},
                {"wait-ends", mode_wait_ends},
                {"alone", mode_alone},
                {"asleep", mode_asleep},
                {"asleep-order", mode_asleep_order},
                {"asleep-group", mode_asleep_group},
                {"asleep-no", mode_asleep_no},
                {"asleep-purge", mode_asleep_purge},
                {"asleep-devices", mode_asleep_devices},
                {"asleep-other-device", mode_asleep_other_device},
                {"asleep-killed", mode_asleep_killed},
                {"asleep-turn", mode_asleep_turn},
                {"asleep-turn-parts", mode_asleep_turn_parts},
                {"asleep-turn-lasts", mode_asleep_turn_lasts},
                {"asleep-turn-queue", mode_asleep_turn_queue},
                {"asleep-turn-devices", mode_asleep_turn_devices},
                {"asleep-turn-begins", mode_asleep_turn_begins},
        };
        char region[80], card[80], clean_up[96], size[16], quiet[16];
        pid_t child;
        int status;

        if (argc < 2)
                return 2;
        if (argc < 3) {
                strcpy(folder, "/tmp/gr-neighbours-XXXXXX");
                if (!mkdtemp(folder))
                        fail("no folder", errno);
                snprintf(region, sizeof(region), "%s/region", folder);
                snprintf(card, sizeof(card), "%s/card", folder);
                snprintf(size, sizeof(size), "%dMiB", CARD_MIB);
                snprintf(quiet, sizeof(quiet), "%dms", QUIET_MS);
                /* "alone" was given one that cannot be used, "default-dir" none. */
                if (strcmp(argv[1], "default-dir") == 0)
                        unsetenv("GPURECLAIM_REGION_DIR");
                else
                        setenv("GPURECLAIM_REGION_DIR", region, strcmp(argv[1], "alone") != 0);
                setenv("GPURECLAIM_NEIGHBOUR_WAIT", quiet, 0);
                setenv("GRSIM_SHARED", card, 1);
                setenv("GRSIM_MEMORY", size, 0);
                child = fork();
                if (child == 0) {
                        execl("/proc/self/exe", argv[0], argv[1], folder, (char *)NULL);
                        _exit(127);
                }
                waitpid(child, &status, 0);
                snprintf(clean_up, sizeof(clean_up), "rm -rf %s", folder);
                if (system(clean_up) != 0)
                        fail("cannot clean up", errno);
                return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        }
        snprintf(folder, sizeof(folder), "%s", argv[2]);
        signal(SIGPIPE, SIG_IGN);
        for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++)
                if (strcmp(argv[1], modes[i].name) == 0) {
                        modes[i].run();
                        return 0;
                }
        return 2;
}
