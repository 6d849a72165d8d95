#include "shard.h"

_Thread_local unsigned gr_shard_of_thread __attribute__((tls_model("initial-exec")));

unsigned gr_shard_assign(void)
{
        static _Atomic unsigned threads;

        gr_shard_of_thread = atomic_fetch_add(&threads, 1) % GR_SHARDS + 1;
        return gr_shard_of_thread - 1;
}
