/*
 * What the real runtime exports and the stand-in has not. A program that only mentions one of these still starts; one
 * that calls it is told that it is not supported. The runtime's headers stay out of here: none of these has its true
 * parameters, and none looks at them.
 */
#define NOT_SUPPORTED 801

#define RT_MISSING(name)                                                                                               \
        __attribute__((visibility("default"))) int name(void);                                                         \
        int name(void)                                                                                                 \
        {                                                                                                              \
                return NOT_SUPPORTED;                                                                                  \
        }
#include "runtime_missing.def"
