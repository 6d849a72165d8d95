/*
 * User objects: counted references to something of the program's, whose destructor the driver calls when the last one
 * goes. Graphs own references, too: copies of a graph copy them, and a launch keeps them until it has run.
 */
#include "sim.h"

#include <limits.h>
#include <stdlib.h>

#define MAGIC_OBJECT 0x75736f62u

struct CUuserObject_st {
        uint32_t magic;
        size_t refs, own; /* own: those that are the program's and not a graph's */
        CUhostFn destroy;
        void *arg;
        CUuserObject next; /* in one of the lists below */
};

/* Guarded by sim_lock(). */
static CUuserObject dead_objects; /* used again, so that a stale handle is recognised */
static CUuserObject doomed;       /* without references; their destructors run when the lock is released */

static bool is_object(CUuserObject object)
{
        return object && object->magic == MAGIC_OBJECT;
}

static bool is_count(unsigned count)
{
        return count > 0 && count <= INT_MAX;
}

static void drop_references(CUuserObject object, size_t count)
{
        object->refs -= count;
        if (object->refs)
                return;
        object->magic = 0;
        object->next = doomed;
        doomed = object;
}

CUuserObject sim_objects_doomed(void)
{
        CUuserObject all = doomed;

        doomed = NULL;
        return all;
}

void sim_objects_end(CUuserObject all)
{
        const bool in_callback = sim_in_callback;

        while (all) {
                CUuserObject object = all;

                all = object->next;
                sim_in_callback = true;
                object->destroy(object->arg);
                sim_in_callback = in_callback;
                sim_lock();
                object->next = dead_objects;
                dead_objects = object;
                sim_unlock();
        }
}

static struct sim_hold *find_hold(struct sim_holds *holds, CUuserObject object)
{
        for (size_t i = 0; i < holds->count; i++)
                if (holds->hold[i].object == object)
                        return &holds->hold[i];
        return NULL;
}

/* Notes that holds owns count references more; the caller counts them in the object. */
static bool add_references(struct sim_holds *holds, CUuserObject object, size_t count)
{
        struct sim_hold *hold = find_hold(holds, object);

        if (!hold) {
                hold = realloc(holds->hold, (holds->count + 1) * sizeof *hold);
                if (!hold)
                        return false;
                holds->hold = hold;
                hold += holds->count++;
                *hold = (struct sim_hold){.object = object};
        }
        hold->count += count;
        return true;
}

bool sim_holds_add(struct sim_holds *holds, const struct sim_holds *from)
{
        for (size_t i = 0; i < from->count; i++) {
                if (!add_references(holds, from->hold[i].object, from->hold[i].count))
                        return false;
                from->hold[i].object->refs += from->hold[i].count;
        }
        return true;
}

void sim_holds_drop(struct sim_holds *holds)
{
        for (size_t i = 0; i < holds->count; i++)
                drop_references(holds->hold[i].object, holds->hold[i].count);
        free(holds->hold);
        *holds = (struct sim_holds){0};
}

SIM_API cuUserObjectCreate(CUuserObject *ret_object, void *ptr, CUhostFn destroy, unsigned refs, unsigned flags)
{
        CUuserObject object;

        SIM_ENTER(cuUserObjectCreate);
        if (!ret_object || !destroy || !refs || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        object = dead_objects;
        if (object)
                dead_objects = object->next;
        else
                object = malloc(sizeof *object);
        if (object) {
                *object = (struct CUuserObject_st){
                        .magic = MAGIC_OBJECT, .refs = refs, .own = refs, .destroy = destroy, .arg = ptr};
                *ret_object = object;
        }
        sim_unlock();
        return object ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

SIM_API cuUserObjectRetain(CUuserObject object, unsigned count)
{
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuUserObjectRetain);
        sim_lock();
        if (is_object(object) && is_count(count)) {
                object->refs += count;
                object->own += count;
        } else {
                rc = CUDA_ERROR_INVALID_VALUE;
        }
        sim_unlock();
        return rc;
}

/* Takes count of the program's own references away. Lock held. */
static bool disown_references(CUuserObject object, unsigned count)
{
        if (object->own < count) {
                sim_misuse("more references of a user object are given away than the program has");
                return false;
        }
        object->own -= count;
        return true;
}

SIM_API cuUserObjectRelease(CUuserObject object, unsigned count)
{
        CUresult rc = CUDA_ERROR_INVALID_VALUE;

        SIM_ENTER(cuUserObjectRelease);
        sim_lock();
        if (is_object(object) && is_count(count) && disown_references(object, count)) {
                drop_references(object, count);
                rc = CUDA_SUCCESS;
        }
        sim_unlock();
        return rc;
}

/* Captures do not mind: the graph may be one that a stream adds to. */
SIM_API cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags)
{
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuGraphRetainUserObject);
        if (!is_count(count) || (flags & ~(unsigned)CU_GRAPH_USER_OBJECT_MOVE))
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        if (!sim_is_graph(graph) || !is_object(object))
                rc = CUDA_ERROR_INVALID_VALUE;
        else if (flags && !disown_references(object, count))
                rc = CUDA_ERROR_INVALID_VALUE;
        else if (!add_references(&graph->holds, object, count))
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        if (rc == CUDA_SUCCESS && !flags)
                object->refs += count;
        else if (rc == CUDA_ERROR_OUT_OF_MEMORY && flags)
                object->own += count;
        sim_unlock();
        return rc;
}

SIM_API cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned count)
{
        struct sim_hold *hold = NULL;

        SIM_ENTER(cuGraphReleaseUserObject);
        sim_lock();
        if (sim_is_graph(graph) && is_object(object) && is_count(count)) {
                hold = find_hold(&graph->holds, object);
                if (hold && hold->count < count)
                        hold = NULL;
                if (!hold)
                        sim_misuse("more references of a user object are released than the graph has");
        }
        if (hold) {
                hold->count -= count;
                if (!hold->count)
                        *hold = graph->holds.hold[--graph->holds.count];
                drop_references(object, count);
        }
        sim_unlock();
        return hold ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
