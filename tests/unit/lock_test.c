/*
 * Locks, built with the checks of ranks: who waits, and how; what is no lock's order ends the process, and so does a
 * lock that is not the one that a function is to be called with.
 */
#include "base/lock.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
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
        GR_CHECK_EQ(atomic_load(&spin.taken), 1); /* by this one now */
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

/*
 * A thread that waits long for a lock goes to sleep. Yielding alone would let no thread of lower priority run, and the
 * holder may be one.
 */
static void test_sleep(void)
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
}

static _Atomic unsigned yields;

/* In place of the C library's. */
int sched_yield(void)
{
        yields++;
        return 0;
}

/* A short wait keeps the processor, a longer one offers it to others. */
static void test_pause(void)
{
        yields = 0;
        for (unsigned n = 1; n < 100; n++)
                gr_lock_pause(n);
        GR_CHECK_EQ(yields, 0);
        gr_lock_pause(100);
        GR_CHECK_EQ(yields, 1);
        gr_lock_pause(3200);
        GR_CHECK_EQ(yields, 2);
        gr_lock_pause(3300); /* sleeps */
        GR_CHECK_EQ(yields, 2);
}

enum { TAKERS = 3, TURNS = 300000 };

static pthread_barrier_t start;
static unsigned turns; /* guarded by spin, and not atomic */

static void *take_turns(void *arg)
{
        (void)arg;
        pthread_barrier_wait(&start);
        for (unsigned n = 0; n < TURNS; n++) {
                unsigned seen;

                gr_spin_lock(&spin, GR_RANK_ARENA);
                seen = turns;
                gr_lock_pause(1); /* time for another that should wait */
                turns = seen + 1;
                gr_spin_unlock(&spin, GR_RANK_ARENA);
        }
        return NULL;
}

/* Of those that see it released at a time one has it, the others go on waiting. */
static void test_turns(void)
{
        pthread_t threads[TAKERS];

        GR_CHECK_EQ(pthread_barrier_init(&start, NULL, TAKERS), 0);
        for (unsigned i = 0; i < TAKERS; i++)
                GR_CHECK_EQ(pthread_create(&threads[i], NULL, take_turns, NULL), 0);
        for (unsigned i = 0; i < TAKERS; i++)
                pthread_join(threads[i], NULL);
        GR_CHECK_EQ(turns, TAKERS * TURNS);
}

static void *try(void *lock)
{
        bool taken = gr_trylock(lock);

        if (taken)
                gr_unlock(lock);
        return taken ? lock : NULL;
}

static void test_try(void)
{
        struct gr_lock lock = GR_LOCK_INIT(GR_RANK_LEDGER);
        pthread_t thread;
        void *taken;

        for (int free = 0; free < 2; free++) {
                if (!free)
                        gr_lock(&lock);
                GR_CHECK_EQ(pthread_create(&thread, NULL, try, &lock), 0);
                pthread_join(thread, &taken);
                GR_CHECK(taken == (free ? &lock : NULL));
                if (!free)
                        gr_unlock(&lock);
        }
}

/* Begins a process in which an assertion may fail. True: in that process, which has to _exit(0). */
static bool in_child(pid_t *ret_child)
{
        *ret_child = fork();
        if (*ret_child > 0)
                return false;
        signal(SIGABRT, SIG_DFL);
        fclose(stderr);
        return true;
}

/* Whether the process has come to its end. */
static bool went_on(pid_t child)
{
        int status;

        GR_CHECK_EQ(waitpid(child, &status, 0), child);
        return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* Whether a process that takes these (a negative one: leaves it), and then asserts that it holds `last`, goes on. */
static bool goes_on(const int *ranks, int last)
{
        pid_t child;

        if (in_child(&child)) {
                for (; *ranks; ranks++)
                        if (*ranks > 0)
                                gr_lock_rank_enter((enum gr_rank) * ranks, NULL);
                        else
                                gr_lock_rank_leave((enum gr_rank) - *ranks, NULL);
                gr_lock_rank_assert_held((enum gr_rank)last);
                _exit(0);
        }
        return went_on(child);
}

#define GOES_ON(last, ...) goes_on((const int[]){__VA_ARGS__, 0}, last)

/* A lower rank is not taken behind a higher one, nor one twice, but for the primary context's. */
static void test_ranks(void)
{
        enum { LOW = GR_RANK_API, PRIMARY = GR_RANK_PRIMARY, HIGH = GR_RANK_LEDGER };

        GR_CHECK(GOES_ON(LOW, LOW, HIGH));
        GR_CHECK(GOES_ON(HIGH, LOW, HIGH));
        GR_CHECK(!GOES_ON(HIGH, LOW));
        GR_CHECK(!GOES_ON(LOW, HIGH, LOW));
        GR_CHECK(!GOES_ON(LOW, LOW, LOW));
        GR_CHECK(GOES_ON(LOW, HIGH, -HIGH, LOW)); /* in turn */
        GR_CHECK(!GOES_ON(HIGH, HIGH, -HIGH));

        GR_CHECK(GOES_ON(PRIMARY, PRIMARY));
        GR_CHECK(GOES_ON(PRIMARY, PRIMARY, HIGH, PRIMARY));
        GR_CHECK(GOES_ON(PRIMARY, PRIMARY, PRIMARY, -PRIMARY)); /* held once more */
        GR_CHECK(!GOES_ON(PRIMARY, PRIMARY, PRIMARY, -PRIMARY, -PRIMARY));
        GR_CHECK(!GOES_ON(PRIMARY, HIGH, PRIMARY));
        GR_CHECK(!GOES_ON(PRIMARY, PRIMARY, -PRIMARY, HIGH, PRIMARY));
}

/* Whether a process that locks `lock` and asserts that it holds `wanted` goes on. */
static bool serves_as(struct gr_lock *lock, struct gr_lock *wanted)
{
        pid_t child;

        if (in_child(&child)) {
                gr_lock(lock);
                gr_assert_locked(wanted);
                gr_unlock(lock);
                _exit(0);
        }
        return went_on(child);
}

static bool spin_serves_as(struct gr_spin *lock, struct gr_spin *wanted)
{
        pid_t child;

        if (in_child(&child)) {
                gr_spin_lock(lock, GR_RANK_ARENA);
                gr_assert_spin_locked(wanted, GR_RANK_ARENA);
                gr_spin_unlock(lock, GR_RANK_ARENA);
                _exit(0);
        }
        return went_on(child);
}

/* Whether a process that takes one lock by gr_trylock, a lower one before it, and releases another one goes on. */
static bool is_released_as(struct gr_lock *low, struct gr_lock *lock, struct gr_lock *released)
{
        pid_t child;

        if (in_child(&child)) {
                gr_lock(low);
                if (!gr_trylock(lock))
                        _exit(1);
                gr_assert_locked(low);
                gr_assert_locked(lock);
                gr_unlock(released);
                gr_assert_locked(low);
                _exit(0);
        }
        return went_on(child);
}

/* Another lock of the same rank does not do, also where one lock is recursive. */
static void test_which(void)
{
        struct gr_lock low = GR_LOCK_INIT(GR_RANK_API), segments = GR_LOCK_INIT(GR_RANK_SEGMENTS);
        struct gr_lock other = GR_LOCK_INIT(GR_RANK_SEGMENTS);
        struct gr_spin arena = {0}, other_arena = {0};
        int primary, other_primary; /* stand for locks */
        pid_t child;

        GR_CHECK(serves_as(&segments, &segments));
        GR_CHECK(!serves_as(&segments, &other));
        GR_CHECK(!serves_as(&low, &segments));
        GR_CHECK(spin_serves_as(&arena, &arena));
        GR_CHECK(!spin_serves_as(&arena, &other_arena));
        GR_CHECK(is_released_as(&low, &segments, &segments));
        GR_CHECK(!is_released_as(&low, &segments, &other));

        for (int same = 0; same < 2; same++) {
                if (in_child(&child)) {
                        gr_lock_rank_enter(GR_RANK_PRIMARY, &primary);
                        gr_lock_rank_enter(GR_RANK_PRIMARY, same ? &primary : &other_primary);
                        _exit(0);
                }
                GR_CHECK_EQ(went_on(child), same);
        }
}

int main(void)
{
        test_sleep();
        test_pause();
        test_turns();
        test_try();
        test_ranks();
        test_which();
        return GR_CHECK_RESULT();
}
