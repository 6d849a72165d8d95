/* A stand-in for libcupti.so.13, of which it has one function: what it answers shows that its arguments came whole. */
#include <stdint.h>

uint64_t cuptiEnableCallback(uint64_t enable, uint64_t subscriber, uint64_t domain, uint64_t id);

__attribute__((visibility("default"))) uint64_t cuptiEnableCallback(uint64_t enable, uint64_t subscriber,
                                                                    uint64_t domain, uint64_t id)
{
        return enable + 2 * subscriber + 3 * domain + 4 * id;
}
