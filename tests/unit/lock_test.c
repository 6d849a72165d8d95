/*
 * A thread that waits long for a lock goes to sleep. Yielding alone would let no thread of lower priority run, and the
 * holder may be one.
 */
#include "base/lock.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { PATIENCE_S = 10 };

static struct gr_spin spin;
static _Atomic long waiter;
static _Atomic bool got;

static void *wait_for_it(void *arg)
{
        (void)arg;
        atomic_store(&waiter, syscall(SYS_gettid));
        gr_spin_lock(&spin, GR_RANK_ARENA);
        atomic_store(&got, true);
        gr_spin_unlock(&spin, GR_RANK_ARENA);
        return NULL;
}

/* The state of a thread: the letter behind the name in its stat. */
static char state_of(long thread)
{
        char path[64], line[256] = "";
        const char *name_end;
        FILE *file;

        snprintf(path, sizeof(path), "/proc/self/task/%ld/stat", thread);
        file = fopen(path, "r");
        if (!file)
                return 0;
        if (!fgets(line, sizeof(line), file))
                line[0] = 0;
        fclose(file);
        name_end = strrchr(line, ')');
        return name_end && name_end[1] ? name_end[2] : 0;
}

int main(void)
{
        time_t until = time(NULL) + PATIENCE_S;
        bool slept = false;
        pthread_t thread;

        gr_spin_lock(&spin, GR_RANK_ARENA);
        GR_CHECK_EQ(pthread_create(&thread, NULL, wait_for_it, NULL), 0);
        while (!atomic_load(&waiter))
                ;
        while (!slept && time(NULL) < until)
                slept = state_of(atomic_load(&waiter)) == 'S';
        GR_CHECK(slept);
        GR_CHECK(!atomic_load(&got));
        gr_spin_unlock(&spin, GR_RANK_ARENA);
        pthread_join(thread, NULL);
        GR_CHECK(atomic_load(&got));
        return GR_CHECK_RESULT();
}
