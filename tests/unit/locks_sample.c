/* What the test "locks held" must not let pass. */
#include "base/lock.h"

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_TRACE);
static int guarded GR_GUARDED_BY(lock);

int main(void)
{
        guarded = 1;
        gr_lock(&lock);
        gr_unlock(&lock);
        return 0;
}
