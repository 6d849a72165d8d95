#include "hooks/captures.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/log.h"
#include "driver/operations.h"
#include "driver/real.h"

static struct gr_lock capturing_lock = GR_LOCK_INIT(GR_RANK_CAPTURING);
static struct gr_capture *capturing GR_GUARDED_BY(capturing_lock);
static unsigned capturing_count GR_GUARDED_BY(capturing_lock), capturing_room GR_GUARDED_BY(capturing_lock);
static uint64_t captures_begun GR_GUARDED_BY(capturing_lock);
/*
 * The hold of what is allocated where there was no memory for another hold. It is kept until the process ends. NULL: no
 * capture has begun yet.
 */
static struct gr_graph_hold *unknown_hold GR_GUARDED_BY(capturing_lock);

static _Atomic unsigned objects; /* how many user objects made here the driver still has */
static _Thread_local __attribute__((tls_model("initial-exec"))) char per_thread_stream;
/* The number of the capture that the thread has submitted work to last. */
static _Thread_local __attribute__((tls_model("initial-exec"))) uint64_t last_worked_for;
/* The thread holds the gate while the driver begins a capture. */
static _Thread_local __attribute__((tls_model("initial-exec"))) bool beginning;
static pthread_key_t thread_key; /* set in threads that have begun a capture: thread_ends */
static bool thread_key_made;

const void *gr_capture_identity(CUstream stream, enum gr_null_stream null_stream)
{
        return stream == CU_STREAM_PER_THREAD || (!stream && null_stream == GR_NULL_PER_THREAD) ? &per_thread_stream
                                                                                                : (const void *)stream;
}

bool gr_capture_on(CUstream stream, enum gr_null_stream null_stream)
{
        CUstreamCaptureStatus status;

        if (!stream && null_stream == GR_NULL_PER_THREAD)
                stream = CU_STREAM_PER_THREAD;
        return gr_captures_are_open() && gr_real.cuStreamIsCapturing &&
               (gr_real.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS ||
                status != CU_STREAM_CAPTURE_STATUS_NONE);
}

uint64_t gr_capture_number(const void *stream, CUcontext current)
{
        uint64_t number = 0;

        if (!gr_captures_are_open())
                return 0;
        gr_lock(&capturing_lock);
        for (unsigned i = 0; i < capturing_count && !number; i++)
                if (capturing[i].stream == stream && (!current || capturing[i].current == current))
                        number = capturing[i].number;
        gr_unlock(&capturing_lock);
        return number;
}

/* The background thread collects what is over, as the program may not allocate again. */
static void wake_if_over(void)
{
        GR_KEEP_ERRNO;

        if (gr_graph_holds_are_over(&gr_core) && gr_core.wake)
                gr_core.wake(&gr_core);
}

void gr_captures_begin_enter(void)
{
        gr_gate_begin_enter(&gr_core.gate);
        beginning = true;
}

void gr_captures_begin_leave(bool began)
{
        beginning = false;
        gr_gate_begin_leave(&gr_core.gate, began);
        wake_if_over();
}

/* Takes the capture with this number, or one of the context, off the list. False: there is none. */
static bool remove_one(uint64_t number, CUcontext context, struct gr_capture *ret_removed)
{
        bool found = false;

        gr_lock(&capturing_lock);
        for (unsigned i = 0; i < capturing_count && !found; i++) {
                *ret_removed = capturing[i];
                found = capturing[i].number == number || (context && capturing[i].context == context);
                if (found)
                        capturing[i] = capturing[--capturing_count];
        }
        gr_unlock(&capturing_lock);
        return found;
}

void gr_capture_over(uint64_t number, CUcontext context)
{
        struct gr_capture removed;
        GR_KEEP_ERRNO;

        while ((number || context) && remove_one(number, context, &removed)) {
                gr_trace_add(GR_ENTRY_CAPTURE_END, GR_ENTRY_NO_DEVICE, 0, removed.number, 0);
                if (removed.hold) {
                        gr_pool_end_capture(removed.hold, !removed.forked);
                        gr_graph_hold_release(removed.hold);
                }
                if (removed.joint)
                        gr_graph_hold_release(removed.joint);
                gr_gate_end(&gr_core.gate);
        }
        wake_if_over();
}

const void *gr_capture_own_stream(void)
{
        return &per_thread_stream;
}

void gr_captures_context_gone(CUcontext context)
{
        if (gr_captures_are_open())
                gr_capture_over(0, context);
}

/*
 * Captures on the thread's own stream end with it. Those that it began on other streams stay open, and belong to no
 * thread from now on, because a later thread may have the same address for its own stream.
 */
static void thread_ends(void *stream)
{
        uint64_t number;

        if (!gr_shim_ready()) /* a child after fork, where the lock may be held for ever */
                return;
        while ((number = gr_capture_number(stream, NULL)))
                gr_capture_over(number, NULL);
        gr_lock(&capturing_lock);
        for (unsigned i = 0; i < capturing_count; i++)
                if (capturing[i].thread == stream)
                        capturing[i].thread = NULL;
        gr_unlock(&capturing_lock);
}

static void make_thread_key(void)
{
        thread_key_made = pthread_key_create(&thread_key, thread_ends) == 0;
}

bool gr_captures_have_room(void)
{
        GR_KEEP_ERRNO;
        bool room;

        gr_assert_gate_entered(&gr_core.gate); /* else another thread may take the room */
        gr_lock(&capturing_lock);
        assert(capturing_count <= capturing_room);
        if (capturing_count == capturing_room) {
                unsigned more_room = capturing_room ? 2 * capturing_room : 16;
                struct gr_capture *more = realloc(capturing, more_room * sizeof(*more));

                if (more) {
                        capturing = more;
                        capturing_room = more_room;
                }
        }
        if (!unknown_hold)
                unknown_hold = gr_graph_hold_new(&gr_core, NULL);
        room = capturing_count < capturing_room && unknown_hold;
        gr_unlock(&capturing_lock);
        return room;
}

void gr_capture_began(const struct gr_capture *capture)
{
        static pthread_once_t once = PTHREAD_ONCE_INIT;

        pthread_once(&once, make_thread_key);
        if (thread_key_made)
                pthread_setspecific(thread_key, &per_thread_stream);
        gr_assert_gate_entered(&gr_core.gate);
        gr_lock(&capturing_lock);
        assert(capturing_count < capturing_room); /* gr_captures_have_room has made it */
        capturing[capturing_count] = *capture;
        capturing[capturing_count].thread = &per_thread_stream;
        capturing[capturing_count++].number = ++captures_begun;
        gr_trace_add(GR_ENTRY_CAPTURE_BEGIN, GR_ENTRY_NO_DEVICE, 0, captures_begun, 0);
        gr_unlock(&capturing_lock);
}

/* Called by the driver: in the thread that lets go of the last reference, or later in one of its own. */
static void CUDA_CB graph_destroyed(void *hold)
{
        atomic_fetch_sub(&objects, 1);
        gr_graph_hold_release(hold);
        if (!beginning) /* a graph that is captured again: gr_captures_begin_leave follows */
                wake_if_over();
}

/* Gives graph a user object that is a user of hold. Returns the driver's error. */
static CUresult attach_object(struct gr_graph_hold *hold, CUgraph graph)
{
        CUresult result = CUDA_ERROR_NOT_FOUND;
        CUuserObject object;

        if (!gr_real.cuUserObjectCreate || !gr_real.cuGraphRetainUserObject)
                return result;
        for (int tries = 0; tries < 2 && result != CUDA_SUCCESS; tries++) /* it may have failed only this once */
                result = gr_real.cuUserObjectCreate(&object, hold, graph_destroyed, 1,
                                                    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
        if (result != CUDA_SUCCESS)
                return result;
        atomic_fetch_add(&objects, 1);
        return gr_real.cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
}

/*
 * The caller is a user of hold, and from now on graph is it in its place. If the driver refuses that, the hold has this
 * user until the process ends: nothing else tells when the graph is gone, and later an object would be too late for the
 * executables that the program has made of the graph by then.
 */
static void keep_by_graph(struct gr_graph_hold *hold, CUgraph graph)
{
        static _Atomic bool told;
        CUresult result = attach_object(hold, graph);

        if (result != CUDA_SUCCESS && !atomic_exchange(&told, true))
                gr_log(GR_LOG_WARN,
                       "the driver does not tell when a graph is gone (CUDA error %d): its memory stays in use",
                       (int)result);
}

/*
 * The objects are attached to the finished graph. Attached earlier, to the one under construction, they would make the
 * driver crash where a thread ends in a capture of its per-thread stream (docs/measurements.md, user-objects).
 */
void gr_capture_became(uint64_t number, CUgraph graph)
{
        struct gr_graph_hold *holds[2] = {NULL, NULL};
        GR_KEEP_ERRNO;

        gr_lock(&capturing_lock);
        for (unsigned i = 0; i < capturing_count; i++)
                if (capturing[i].number == number) {
                        holds[0] = capturing[i].hold;
                        holds[1] = capturing[i].joint;
                }
        for (int i = 0; i < 2; i++)
                if (holds[i])
                        gr_graph_hold_retain(holds[i]);
        gr_unlock(&capturing_lock);
        for (int i = 0; i < 2; i++)
                if (holds[i])
                        keep_by_graph(holds[i], graph);
}

bool gr_captures_have_objects(void)
{
        return atomic_load(&objects) > 0;
}

/* Whether the driver would refuse an allocation of the calling thread, whose mode is given, because of the capture. */
static bool refuses(const struct gr_capture *capture, CUstreamCaptureMode mode)
{
        if (mode == CU_STREAM_CAPTURE_MODE_RELAXED)
                return false;
        if (capture->thread == &per_thread_stream)
                return capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        return capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

/* Lock held. Counts the captures that refuse, and finds the first of them. */
static GR_HELD(capturing_lock) unsigned count_refusing(CUstreamCaptureMode mode, struct gr_capture **ret_first)
{
        unsigned count = 0;

        gr_assert_locked(&capturing_lock);
        for (unsigned i = 0; i < capturing_count; i++)
                if (refuses(&capturing[i], mode) && count++ == 0)
                        *ret_first = &capturing[i];
        return count;
}

bool gr_captures_refuse(void)
{
        CUstreamCaptureMode mode;
        struct gr_capture *first;
        bool refuse;

        if (!gr_captures_are_open())
                return false;
        mode = gr_operations_capture_mode();
        gr_lock(&capturing_lock);
        refuse = count_refusing(mode, &first) > 0;
        gr_unlock(&capturing_lock);
        return refuse;
}

/* Lock held. The hold of what the capture is given, from its first allocation on. NULL: no memory for it. */
static GR_HELD(capturing_lock) struct gr_graph_hold *ensure_hold(struct gr_capture *capture, struct gr_context *context)
{
        gr_assert_locked(&capturing_lock);
        if (!capture->hold)
                capture->hold =
                        gr_graph_hold_new(&gr_core, gr_core.config.graph_arena == GR_GRAPH_SHARED ? context : NULL);
        return capture->hold;
}

/*
 * Lock held. The hold of what is allocated while several captures refuse it: any of their graphs may use it. There is
 * one such hold at a time: it takes in what is allocated until the last of its captures has ended. NULL: no memory.
 */
static GR_HELD(capturing_lock) struct gr_graph_hold *ensure_joint_hold(CUstreamCaptureMode mode)
{
        struct gr_graph_hold *hold = NULL, *made = NULL;

        gr_assert_locked(&capturing_lock);
        for (unsigned i = 0; i < capturing_count && !hold; i++)
                hold = capturing[i].joint;
        if (!hold)
                hold = made = gr_graph_hold_new(&gr_core, NULL);
        for (unsigned i = 0; i < capturing_count && hold; i++)
                if (refuses(&capturing[i], mode) && !capturing[i].joint) {
                        gr_graph_hold_retain(hold);
                        capturing[i].joint = hold;
                }
        if (made)
                gr_graph_hold_release(made);
        return hold;
}

bool gr_captures_alloc_in_hold(struct gr_context *context, size_t bytes, uint64_t *ret_ptr)
{
        CUstreamCaptureMode mode = gr_operations_capture_mode();
        struct gr_graph_hold *hold = NULL;
        struct gr_capture *first = NULL;
        bool shared = gr_core.config.graph_arena == GR_GRAPH_SHARED, single_stream = false, served;

        gr_lock(&capturing_lock);
        if (count_refusing(mode, &first) == 1) {
                hold = ensure_hold(first, context);
                if (shared ? first->unordered : first->forked)
                        hold = NULL;
                single_stream = !first->forked;
                /* A thread that has no part in the capture keeps data of its own, which launches must not overwrite. */
                if (first->thread != &per_thread_stream && first->number != last_worked_for)
                        hold = NULL;
        }
        if (hold)
                gr_graph_hold_retain(hold);
        gr_unlock(&capturing_lock);
        served = hold && gr_pool_alloc_in_hold(hold, context, single_stream, bytes, ret_ptr);
        if (hold)
                gr_graph_hold_release(hold);
        return served;
}

bool gr_capture_forks(const void *stream, enum gr_fork fork)
{
        bool served = false;
        GR_KEEP_ERRNO;

        gr_lock(&capturing_lock);
        for (unsigned i = 0; i < capturing_count; i++)
                if (!stream || capturing[i].stream == stream) {
                        served |= !capturing[i].forked && capturing[i].hold;
                        capturing[i].forked = true;
                        capturing[i].unordered |= fork == GR_FORK_BY_HAND;
                }
        gr_unlock(&capturing_lock);
        return served;
}

void gr_captures_note_work(CUstream stream, enum gr_null_stream null_stream)
{
        const void *identity = gr_capture_identity(stream, null_stream);
        CUcontext current = NULL;
        bool captured = false;
        GR_KEEP_ERRNO;

        if (identity == &per_thread_stream)
                gr_real.cuCtxGetCurrent(&current);
        gr_lock(&capturing_lock);
        for (unsigned i = 0; i < capturing_count && !captured; i++) {
                captured = capturing[i].stream == identity && capturing[i].current == current;
                if (captured)
                        last_worked_for = capturing[i].number;
        }
        for (unsigned i = 0; i < capturing_count && !captured; i++)
                if (capturing[i].thread == &per_thread_stream || capturing[i].mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
                        capturing[i].forked = true;
        gr_unlock(&capturing_lock);
}

void gr_captures_hold(struct gr_context *context, uint64_t ptr)
{
        CUstreamCaptureMode mode = gr_operations_capture_mode();
        struct gr_graph_hold *hold = NULL;
        struct gr_capture *first = NULL;
        unsigned count;

        gr_lock(&capturing_lock);
        count = count_refusing(mode, &first);
        /* With several captures it is not known which of their graphs uses the block. */
        if (count > 0)
                hold = count == 1 ? ensure_hold(first, context) : ensure_joint_hold(mode);
        if (!hold)
                hold = unknown_hold;
        if (count > 0)
                gr_graph_hold_retain(hold);
        gr_unlock(&capturing_lock);
        if (count == 0)
                return;
        gr_graph_hold_add(hold, ptr);
        gr_graph_hold_release(hold);
}
