/* torch_times.c beside an allocator that is laid out as PyTorch's: what it counts, and what it leaves as it is. */
#include <stdint.h>

#include "check.h"

struct data_ptr {
        void *data;
        void (*deleter)(void *);
        void *context;
        int16_t device;
};

typedef struct data_ptr allocate_function(void *allocator, size_t bytes);

const char *torch_times_begin(void);
void torch_times_read(uint64_t ret_times[5]);

static char block, context_apart;
static void *freed;

static void give_back(void *context)
{
        freed = context;
}

static void give_back_otherwise(void *context)
{
        (void)context;
}

/* Of 1 byte as PyTorch's is, of 2 with a context of its own, of 3 with another deleter. */
static struct data_ptr allocate(void *allocator, size_t bytes)
{
        (void)allocator;
        return (struct data_ptr){.data = bytes ? &block : NULL,
                                 .deleter = bytes == 3 ? give_back_otherwise : give_back,
                                 .context = bytes == 2 ? &context_apart : &block,
                                 .device = 7};
}

static void *table[] = {NULL, NULL, (void *)allocate};
static void *object = table;

/* c10::cuda::CUDACachingAllocator::allocator */
extern void *_ZN3c104cuda20CUDACachingAllocator9allocatorE;
__attribute__((visibility("default"))) void *_ZN3c104cuda20CUDACachingAllocator9allocatorE = &object;

static struct data_ptr ask(size_t bytes)
{
        struct data_ptr ptr = ((allocate_function *)table[2])(&object, bytes);

        GR_CHECK_EQ(ptr.device, 7);
        return ptr;
}

int main(void)
{
        uint64_t times[5], after[5];
        struct data_ptr ptr;

        GR_CHECK(torch_times_begin() == NULL);
        for (int i = 0; i < 3; i++) {
                ptr = ask(1);
                GR_CHECK(ptr.data == &block && ptr.context == &block && ptr.deleter != give_back);
                freed = NULL;
                ptr.deleter(ptr.context);
                GR_CHECK(freed == &block);
        }
        torch_times_read(times);
        GR_CHECK_EQ(times[0], 3);
        GR_CHECK_EQ(times[2], 3);
        GR_CHECK(times[1] > 0 && times[3] > 0);
        GR_CHECK_EQ(times[4], 0);
        ask(0);
        GR_CHECK(ask(2).deleter == give_back);
        GR_CHECK(ask(3).deleter == give_back_otherwise);
        torch_times_read(after);
        GR_CHECK_EQ(after[0], 5);
        GR_CHECK_EQ(after[2], 3);
        GR_CHECK_EQ(after[4], 2);
        return GR_CHECK_RESULT();
}
