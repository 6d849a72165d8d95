/*
 * The functions of the real runtime that the stand-in lacks. A program that refers to one of these still starts; a call
 * returns "not supported". The runtime's headers are not included, as the stubs are declared without parameters.
 */
#define NOT_SUPPORTED 801

#define RT_MISSING(name)                                                                                               \
        __attribute__((visibility("default"))) int name(void);                                                         \
        int name(void)                                                                                                 \
        {                                                                                                              \
                return NOT_SUPPORTED;                                                                                  \
        }
#include "runtime_missing.def"
