#include "base/shard.h"

_Thread_local struct gr_thread gr_thread __attribute__((tls_model("initial-exec")));
_Atomic unsigned gr_shard_threads;

unsigned gr_shard_assign(void)
{
        gr_thread.shard = atomic_fetch_add(&gr_shard_threads, 1) % GR_SHARDS + 1;
        return gr_thread.shard - 1;
}
