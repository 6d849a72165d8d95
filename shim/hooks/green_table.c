/* The green contexts of the program, found by CUgreenCtx and by the CUcontext it was converted to. */
#include "hooks/green_table.h"

#include <assert.h>
#include <stdlib.h>

struct green {
        CUgreenCtx handle;
        CUcontext context; /* the green context as a CUcontext; NULL until the program converted it */
        CUdevice dev;
};

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_GREENS);
static struct green *greens GR_GUARDED_BY(lock);
static unsigned count GR_GUARDED_BY(lock), room GR_GUARDED_BY(lock);

/* Lock held. NULL: not known. */
GR_HELD(lock) static struct green *find_green(CUgreenCtx handle)
{
        gr_assert_locked(&lock);
        assert(count <= room);
        for (unsigned i = 0; i < count; i++)
                if (greens[i].handle == handle)
                        return &greens[i];
        return NULL;
}

bool gr_green_add(CUgreenCtx handle, CUdevice dev)
{
        bool added;

        assert(dev >= 0 && dev < GR_DEVICES_MAX);
        gr_lock(&lock);
        if (count == room) {
                unsigned more_room = room ? 2 * room : 16;
                struct green *more = realloc(greens, more_room * sizeof(*more));

                if (more) {
                        greens = more;
                        room = more_room;
                }
        }
        added = count < room;
        if (added)
                greens[count++] = (struct green){.handle = handle, .dev = dev};
        gr_unlock(&lock);
        return added;
}

void gr_green_name(CUgreenCtx handle, CUcontext context)
{
        struct green *green;

        gr_lock(&lock);
        green = find_green(handle);
        if (green)
                green->context = context;
        gr_unlock(&lock);
}

CUdevice gr_green_device(CUgreenCtx handle)
{
        const struct green *green;
        CUdevice dev;

        gr_lock(&lock);
        green = find_green(handle);
        dev = green ? green->dev : -1;
        gr_unlock(&lock);
        return dev;
}

CUdevice gr_green_device_of(CUcontext context)
{
        CUdevice dev = -1;

        gr_lock(&lock);
        for (unsigned i = 0; i < count && dev < 0; i++)
                if (greens[i].context == context)
                        dev = greens[i].dev;
        gr_unlock(&lock);
        return dev;
}

void gr_green_remove(CUgreenCtx handle)
{
        struct green *green;

        gr_lock(&lock);
        green = find_green(handle);
        if (green)
                *green = greens[--count];
        gr_unlock(&lock);
}
