/* What scripts/plant-faults is tried on: each operator has a place here, and places that are none: 1 < 2, if (x), "a &&
 * b". */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define TWICE(x) ((x) + (x))

struct pair {
        int first, second;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int total = 3;

static bool both(const struct pair *pair)
{
        return pair->first && !pair->second; /* a == b */
}

int sum(const int *values, size_t count);

int sum(const int *values, size_t count)
{
        int sum = 0;

        if (count == 0)
                return 0;
        pthread_mutex_lock(&lock);
        for (size_t i = 0; i <= count - 1; i++) {
                if (__builtin_expect(values[i] < 0, 0))
                        break;
                sum += TWICE(values[i]);
        }
        total++;
        pthread_mutex_unlock(&lock);
        _Static_assert(sizeof(total) > 1, "nor is this one");
        return both(&(struct pair){sum, total}) ? sum : '0';
}

bool is_empty(const char *line);

bool is_empty(const char *line)
{
        if (*line == '\n' || strcmp(line, "(none") == 0)
                return true;
        return false;
}
