#include "context/capture_gate.h"

#include <assert.h>

#include "base/lock.h"

void gr_gate_init(struct gr_gate *gate)
{
        pthread_rwlock_init(&gate->lock, NULL);
}

void gr_gate_destroy(struct gr_gate *gate)
{
        pthread_rwlock_destroy(&gate->lock);
}

/* Each call follows a call that added one to counter. */
static void count_down(_Atomic int *counter)
{
        int before = atomic_fetch_sub(counter, 1);

        assert(before > 0);
        (void)before;
}

void gr_gate_begin_enter(struct gr_gate *gate)
{
        for (unsigned n = 1; atomic_load(&gate->awaited) > 0; n++)
                gr_lock_pause(n);
        gr_lock_rank_enter(GR_RANK_GATE, gate);
        /* Counted before the lock is taken, so that no new fence begins: readers may overtake a waiting writer. */
        if (atomic_fetch_add(&gate->captures, 1) == 0)
                atomic_fetch_add(&gate->times, 1);
        pthread_rwlock_wrlock(&gate->lock);
}

void gr_gate_begin_leave(struct gr_gate *gate, bool began)
{
        if (!began)
                count_down(&gate->captures);
        pthread_rwlock_unlock(&gate->lock);
        gr_lock_rank_leave(GR_RANK_GATE, gate);
}

void gr_gate_end(struct gr_gate *gate)
{
        count_down(&gate->captures);
}

void gr_gate_await_begin(struct gr_gate *gate)
{
        atomic_fetch_add(&gate->awaited, 1);
}

void gr_gate_await_end(struct gr_gate *gate)
{
        count_down(&gate->awaited);
}

void gr_gate_note_vain(struct gr_gate *gate)
{
        atomic_store(&gate->vain, atomic_load(&gate->times));
}

bool gr_gate_is_vain(struct gr_gate *gate)
{
        return atomic_load(&gate->captures) > 0 && atomic_load(&gate->vain) == atomic_load(&gate->times);
}

bool gr_gate_enter(struct gr_gate *gate)
{
        if (atomic_load(&gate->captures) > 0)
                return false;
        gr_lock_rank_enter(GR_RANK_GATE, gate);
        pthread_rwlock_rdlock(&gate->lock);
        if (atomic_load(&gate->captures) == 0)
                return true;
        pthread_rwlock_unlock(&gate->lock);
        gr_lock_rank_leave(GR_RANK_GATE, gate);
        return false;
}

void gr_gate_leave(struct gr_gate *gate)
{
        pthread_rwlock_unlock(&gate->lock);
        gr_lock_rank_leave(GR_RANK_GATE, gate);
}
