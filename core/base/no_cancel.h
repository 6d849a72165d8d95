/*
 * Keeps a thread that was told to end by pthread_cancel from ending in the midst: its locks would stay locked, and what
 * it had taken would be lost. Calls of the driver and of the C library may be points where it ends.
 */
#ifndef GR_NO_CANCEL_H
#define GR_NO_CANCEL_H

#include <pthread.h>

static inline int gr_cancel_disable(void)
{
        int state = PTHREAD_CANCEL_ENABLE;

        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
        return state;
}

static inline void gr_cancel_restore(const int *state)
{
        pthread_setcancelstate(*state, NULL);
}

/* From here to where the enclosing block is left. Keeps errno. */
#define GR_NO_CANCEL __attribute__((cleanup(gr_cancel_restore), unused)) const int gr_cancel_state = gr_cancel_disable()

#endif
