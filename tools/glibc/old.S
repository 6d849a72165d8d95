/*
 * The functions that got another version after glibc 2.28. The linker needs their names, and from PROCESSOR.map the
 * versions that they have in all releases. The test "glibc" names what is missing here.
 */
        .irp name, \
                __libc_start_main, __pthread_key_create, dladdr, dlclose, dlerror, dlopen, dlsym, dlvsym, \
                pthread_condattr_setclock, pthread_create, pthread_detach, pthread_getspecific, pthread_key_create, \
                pthread_mutex_trylock, pthread_once, pthread_rwlock_destroy, pthread_rwlock_init, \
                pthread_rwlock_rdlock, pthread_rwlock_unlock, pthread_rwlock_wrlock, pthread_setspecific, \
                pthread_sigmask, pthread_timedjoin_np, pthread_tryjoin_np
        .globl  \name
        .type   \name, %function
\name:
        .endr
        .section .note.GNU-stack, "", %progbits
