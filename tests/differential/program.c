/*
 * Runs a program written in lines, and prints what every line got: once natively and once preloaded, to be compared.
 *
 *   program [--race] [--own-frees] [--wide] [--limited] FILE
 *
 * A line is "THREAD VERB ARGUMENT...". An argument is a number, or an object: a letter for its kind and the number of
 * its slot (c context, s stream, e event, m memory, p pool, g graph, x executable graph). c0 is the primary context of
 * the first device, s0 the legacy stream and s1 the thread's own. A line whose objects are not there says "skip", so
 * that any part of a program is a program.
 *
 * "lend" starts the same program once more, as "program --partner SOCKET", which opens the memory, compares and writes.
 *
 * Lines run one after the other, each in its thread. With --race a thread waits only for earlier lines that have an
 * object in common with its own, and for those that must be alone.
 *
 * Every allocation has a home stream, in which all its work goes. What was last written is known, and is compared
 * there before the memory is freed, on "check", and at the end. --own-frees says that nobody takes care of frees beside
 * a capture: where a library would, the plain driver is asked in relaxed mode. --wide says that more memory is mapped
 * than requests lack, so that "most" is to ask for less. --limited says that managed memory counts as memory of the
 * device.
 */
#include "program.h"
#include "gputest.h"
#include "peer_process.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 4 };

bool race, own_frees, wide, limited;
char *program_path;
static struct op *ops;
static int n_ops, last_alone = -1, devices;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what is done, and the threads */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static const struct verb verbs[] = {
        {"plug-in", "", run_plug_in, true},
        {"context", "Ci", run_context, true},
        {"use", "C", run_use, false},
        {"destroy", "ci", run_destroy, true},
        {"attach", "c", run_attach, true},
        {"detach", "c", run_detach, true},
        {"retain", "", run_retain, true},
        {"release", "", run_release, true},
        {"reset", "", run_reset, true},
        {"sync", "", run_sync, true},
        {"alloc", "Misi", run_alloc, false},
        {"pitch", "Miis", run_pitch, false},
        {"managed", "Mis", run_managed, false},
        {"host", "Misii", run_host, false},
        {"async", "MisiP", run_async, false},
        {"map", "Misi", run_map, false},
        {"free", "mii", run_free, false},
        {"free-async", "msii", run_free_async, false},
        {"fill", "mi", run_fill, false},
        {"copy", "mm", run_copy, false},
        {"check", "m", run_check, false},
        {"range", "mi", run_range, false},
        {"share", "m", run_share, false},
        {"lend", "m", run_lend, true},
        {"info", "", run_info, true},
        {"most", "i", run_most, true},
        {"stream", "Si", run_stream, false},
        {"stream-destroy", "s", run_stream_destroy, true},
        {"stream-sync", "s", run_stream_sync, false},
        {"stream-query", "s", run_stream_query, false},
        {"spin", "si", run_spin, false},
        {"capturing", "s", run_capturing, false},
        {"event", "E", run_event, false},
        {"event-destroy", "e", run_event_destroy, false},
        {"record", "es", run_record, false},
        {"wait", "se", run_wait, false},
        {"event-sync", "e", run_event_sync, false},
        {"event-query", "e", run_event_query, false},
        {"begin", "si", run_begin, true},
        {"end", "sG", run_end, true},
        {"mode", "i", run_mode, true},
        {"instantiate", "Xgi", run_instantiate, true},
        {"launch", "x", run_launch, true},
        {"graph-destroy", "g", run_graph_destroy, true},
        {"exec-destroy", "x", run_exec_destroy, true},
        {"graph-trim", "", run_graph_trim, true},
        {"pool", "Pi", run_pool, true},
        {"pool-destroy", "p", run_pool_destroy, true},
        {"pool-trim", "pi", run_pool_trim, false},
        {"pool-keep", "pi", run_pool_keep, false},
        {"pool-used", "p", run_pool_used, true}, /* a free counts, and its line does not name the pool */
        {"pool-current", "P", run_pool_current, true},
        {"exit", "", NULL, true},
};

/* ---- running ---- */

/* Whether an object that the line needs is there. A slot that is to be filled must be empty. */
static bool there(char letter, long slot)
{
        switch (letter) {
        case 'c':
                return contexts[slot].live;
        case 's':
                return slot <= OWN || streams[slot].live;
        case 'e':
                return events[slot].live;
        case 'm':
                return memories[slot].live;
        case 'p':
                return pools[slot].live;
        case 'g':
                return graphs[slot].live;
        case 'x':
                return execs[slot].live;
        case 'M':
                return !memories[slot].live;
        case 'S':
                return slot > OWN && !streams[slot].live;
        case 'E':
                return !events[slot].live;
        default:
                return true;
        }
}

static void perform(struct op *op)
{
        /* A context that ended may still be current, and used so; one that never was has no handle. */
        bool can = op->verb->run != run_use || contexts[op->arg[0]].handle;

        can &= op->verb->run != run_context || !contexts[op->arg[0]].live;
        can &= op->verb->run != run_destroy || op->arg[0] > 0;
        can &= op->verb->run != run_instantiate || !execs[op->arg[0]].live || !strict_captures;
        can &= op->verb->run != run_release || contexts[0].live;
        can &= op->verb->run != run_pool || !pools[op->arg[0]].live;
        can &= op->verb->run != run_pool_current || op->arg[0] == 0 || pools[op->arg[0]].live;
        can &= op->verb->run != run_begin ||
               (op->arg[0] > OWN && !streams[op->arg[0]].capture && n_captures < CAPTURES);
        can &= op->verb->run != run_end || (op->arg[0] > OWN && streams[op->arg[0]].capture);
        for (int i = 0; op->verb->arguments[i]; i++)
                can = can && there(op->verb->arguments[i], op->arg[i]);
        if (can)
                op->verb->run(op);
        else
                say(op, "skip");
}

static void await(const struct op *op)
{
        pthread_mutex_lock(&lock);
        for (int i = 0; i < op->n_after; i++)
                while (!ops[op->after[i]].done)
                        pthread_cond_wait(&changed, &lock);
        for (int i = 0; op->verb->alone && i < op->line; i++)
                while (!ops[i].done)
                        pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
}

static void finish(struct op *op)
{
        pthread_mutex_lock(&lock);
        op->done = true;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
}

static struct worker {
        pthread_t thread, before;
        int number, next;
        bool succeeds;
} workers[THREADS];

static _Atomic int n_threads;
static pthread_barrier_t begun; /* or a context may have ended before a thread has made it current */

static void await_all(void)
{
        pthread_mutex_lock(&lock);
        for (int i = 0; i < n_ops; i++)
                while (!ops[i].done)
                        pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
}

static void *work(void *argument)
{
        struct worker *w = argument;

        me = ++n_threads;
        if (w->succeeds)
                pthread_join(w->before, NULL);
        if (contexts[0].live)
                GR_MUST(cuCtxSetCurrent(contexts[0].handle));
        if (w->succeeds) {
                w->succeeds = false;
                say(&ops[w->next], "done");
                finish(&ops[w->next++]);
        } else {
                pthread_barrier_wait(&begun);
        }
        for (; w->next < n_ops; w->next++) {
                struct op *op = &ops[w->next];

                if (op->thread != w->number)
                        continue;
                await(op);
                if (!op->verb->run) {
                        w->before = pthread_self();
                        w->succeeds = true;
                        pthread_mutex_lock(&lock);
                        if (pthread_create(&w->thread, NULL, work, w) != 0)
                                gt_die("program: no thread");
                        pthread_mutex_unlock(&lock);
                        return NULL;
                }
                perform(op);
                finish(op);
        }
        await_all(); /* with a thread goes its stream, and that may be captured */
        return NULL;
}

/* What each line has to wait for when it need not wait for all. */
static void depend(struct op *op)
{
        static int last[128][SLOTS], set;

        if (!set++)
                memset(last, -1, sizeof last);
        if (last_alone >= 0)
                op->after[op->n_after++] = last_alone;
        for (int i = 0; op->verb->arguments[i]; i++) {
                int letter = op->verb->arguments[i] | 0x20, slot = (int)op->arg[i];

                if (letter == 'i')
                        continue;
                if (last[letter][slot] >= 0 && last[letter][slot] != op->line)
                        op->after[op->n_after++] = last[letter][slot];
                last[letter][slot] = op->line;
        }
        if (op->verb->alone)
                last_alone = op->line;
}

static bool parse(char *line, struct op *op)
{
        char *word = strtok(line, " \n");

        if (!word || word[0] == '#')
                return false;
        op->thread = atoi(word);
        word = strtok(NULL, " \n");
        for (size_t i = 0; word && i < sizeof verbs / sizeof verbs[0]; i++)
                if (!strcmp(verbs[i].name, word))
                        op->verb = &verbs[i];
        if (!op->verb || op->thread < 0 || op->thread >= THREADS)
                gt_die("program: line %d: no verb", op->line);
        for (int i = 0; op->verb->arguments[i]; i++) {
                int letter = op->verb->arguments[i] | 0x20;

                word = strtok(NULL, " \n");
                if (!word || (letter != 'i' && word[0] != letter))
                        gt_die("program: line %d: %s expects %s", op->line, op->verb->name, op->verb->arguments);
                op->arg[i] = atol(word + (letter != 'i'));
                if (letter != 'i' && (op->arg[i] < 0 || op->arg[i] >= SLOTS))
                        gt_die("program: line %d: no such slot", op->line);
        }
        return true;
}

static void read_program(const char *path)
{
        FILE *file = fopen(path, "r");
        char line[256];

        if (!file)
                gt_die("program: no %s", path);
        while (fgets(line, sizeof line, file)) {
                ops = realloc(ops, (size_t)(n_ops + 1) * sizeof *ops);
                if (!ops)
                        gt_die("program: out of memory");
                ops[n_ops] = (struct op){.line = n_ops};
                if (!parse(line, &ops[n_ops]))
                        continue;
                if (race)
                        depend(&ops[n_ops]);
                else if (n_ops > 0)
                        ops[n_ops].after[ops[n_ops].n_after++] = n_ops - 1;
                n_ops++;
        }
        fclose(file);
}

/* What is left: right or not, and then given back. */
static void close_program(void)
{
        static const struct verb end = {"left", "", NULL, true};
        struct op op = {.line = n_ops, .verb = &end};
        size_t available = 0, total = 0;
        unsigned different = 0;

        for (int i = 0; i < SLOTS; i++)
                if (streams[i].live && streams[i].capture) {
                        GR_MUST(cuStreamDestroy(streams[i].handle));
                        lose_capture(captures[streams[i].capture].stream == i ? streams[i].capture : 0);
                        streams[i].live = false;
                }
        for (int i = 0; i < SLOTS; i++) {
                struct memory *m = &memories[i];
                const char *what;

                if (!m->live)
                        continue;
                if (m->home == OWN)
                        m->known = false; /* that thread is gone */
                what = checked(m);
                if (!enter(m->context))
                        continue;
                say(&op, "m%d %s, freed %d", i, what, (int)give_back(m, 0));
                leave();
                m->live = false;
        }
        for (int c = 0; c < SLOTS; c++)
                if (contexts[c].live)
                        different += different_in(c);
        say(&op, "%u different", different);
        for (int c = 1; c < SLOTS; c++)
                if (contexts[c].live)
                        say(&op, "c%d %d", c, (int)cuCtxDestroy(contexts[c].handle)), lose_context(c);
        if (!contexts[0].live)
                run_retain(&op);
        GR_MUST(cuCtxSetCurrent(contexts[0].handle));
        say(&op, "synchronised %d", (int)cuCtxSynchronize());
        for (int i = 0; i < SLOTS; i++)
                if (pools[i].live)
                        GR_MUST(cuMemPoolDestroy(pools[i].handle));
        for (int device = 0; device < devices; device++) {
                GR_MUST(cuDevicePrimaryCtxRetain(&contexts[0].handle, device));
                GR_MUST(cuCtxSetCurrent(contexts[0].handle));
                contexts[0].device = device;
                GR_MUST(cuMemGetInfo(&available, &total));
                say(&op, "free %zu of %zu", available >> 10, total >> 10);
                op.arg[0] = 98;
                run_most(&op);
        }
}

int main(int argc, char **argv)
{
        const char *path = NULL;

        if (argc == 3 && !strcmp(argv[1], "--partner"))
                return be_partner(atoi(argv[2]));
        program_path = argv[0];
        for (int i = 1; i < argc; i++) {
                if (!strcmp(argv[i], "--race"))
                        race = true;
                else if (!strcmp(argv[i], "--own-frees"))
                        own_frees = true;
                else if (!strcmp(argv[i], "--wide"))
                        wide = true;
                else if (!strcmp(argv[i], "--limited"))
                        limited = true;
                else
                        path = argv[i];
        }
        if (!path)
                gt_die("usage: program [--race] [--own-frees] [--wide] [--limited] FILE");
        alarm(60);
        GR_MUST(cuInit(0));
        GR_MUST(cuDeviceTotalMem(&total_bytes, 0));
        gt_open(&gt);
        GR_MUST(cuDeviceGetCount(&devices));
        open_doors();
        read_program(path);
        contexts[0].retained = 1;
        new_context(0, gt.ctx, 0);
        pthread_barrier_init(&begun, NULL, THREADS);
        for (int t = 0; t < THREADS; t++) {
                workers[t].number = t;
                pthread_mutex_lock(&lock);
                if (pthread_create(&workers[t].thread, NULL, work, &workers[t]) != 0)
                        gt_die("program: no thread");
                pthread_mutex_unlock(&lock);
        }
        await_all();
        for (int t = 0; t < THREADS; t++)
                pthread_join(workers[t].thread, NULL);
        close_program();
        return EXIT_SUCCESS;
}
