/* The verbs of memory: it is allocated, written, compared, lent to another process, and freed. */
#include "peer_process.h"
#include "program.h"

#include <stdio.h>
#include <stdlib.h>

static const size_t ends_bytes = 64 * KIB;   /* of a larger block only both ends are written and compared */
static const size_t context_bytes = GT_PAGE; /* of the simulated device */

/* ---- what is in it, and how full the device is ---- */

/* The context of a memory's home stream is to be current. */
static CUresult put(struct memory *m, uint32_t value, long us)
{
        size_t words = m->bytes / 4, part = m->bytes > 2 * ends_bytes ? ends_bytes / 4 : words;
        CUstream stream = handle_of(m->home);
        CUresult result = CUDA_SUCCESS;

        if (us < 0)
                result = cuMemsetD32Async(m->at, value, part, stream);
        else if (us == 0)
                result = gt_fill(&gt, stream, m->at, value, part);
        else
                result = gt_late_fill(&gt, stream, m->at, value, part, (uint64_t)us);
        if (result == CUDA_SUCCESS && part < words)
                result = cuMemsetD32Async(m->at + (words - part) * 4, value, part, stream);
        return result;
}

/* Whether work on a memory can be given to its home stream by this thread now. */
static bool at_home(const struct memory *m)
{
        return m->bytes >= 4 &&
               (m->home <= OWN || (streams[m->home].live && streams[m->home].context == m->context &&
                                   streams[m->home].made == m->home_made)) &&
               m->context >= 0 && contexts[m->context].live && (m->home != OWN || m->thread == me);
}

/* In stream order, without waiting. */
static void look(struct memory *m)
{
        size_t words = m->bytes / 4, part = m->bytes > 2 * ends_bytes ? ends_bytes / 4 : words;

        if (!m->known || !at_home(m) || capture_of(m->home) || !contexts[m->context].different || !enter(m->context))
                return;
        gt_count_diff(&gt, handle_of(m->home), m->at, m->value, part, contexts[m->context].different);
        if (part < words)
                gt_count_diff(&gt, handle_of(m->home), m->at + (words - part) * 4, m->value, part,
                              contexts[m->context].different);
        leave();
}

static struct memory *new_memory(struct op *op, enum kind kind, size_t bytes, int home)
{
        struct memory *m = &memories[op->arg[0]];

        *m = (struct memory){.kind = kind,
                             .bytes = bytes,
                             .home = home,
                             .context = current(),
                             .thread = me,
                             .made = ++n_made,
                             .home_made = streams[home].made};
        return m;
}

/* Of the device, in pages, small ones apart; *ret_asked in bytes. */
static size_t live_bytes(int device, size_t *ret_small, size_t *ret_asked)
{
        size_t live = 0, small = 0, asked = 0;

        for (int i = 0; i < SLOTS; i++) {
                struct memory *m = &memories[i];

                if (!m->live || m->kind == HOST || m->kind == MANAGED || m->kind == OF_GRAPH ||
                    device_of(m->context) != device)
                        continue;
                if (m->bytes > MIB)
                        live += gt_pages(m->bytes);
                else
                        small += m->bytes;
                asked += m->bytes;
        }
        *ret_small = small;
        *ret_asked = asked;
        return live;
}

/* Of managed memory what counts as the device's. */
static size_t managed_bytes(int device)
{
        size_t bytes = 0;

        for (int i = 0; limited && i < SLOTS; i++)
                if (memories[i].live && memories[i].kind == MANAGED && device_of(memories[i].context) == device)
                        bytes += memories[i].bytes > MIB ? gt_pages(memories[i].bytes) : memories[i].bytes;
        return bytes;
}

/* Where the device is nearly full somebody may be refused: how full it is, as the program knows it. */
static const char *room(const struct memory *m)
{
        static _Thread_local char text[160];
        size_t small, asked, live, others = 0;
        int device = device_of(m->context);

        if (race || m->kind == HOST || (m->kind == MANAGED && !limited) || m->kind == OF_GRAPH)
                return "";
        live = live_bytes(device, &small, &asked);
        for (int c = 0; c < SLOTS; c++)
                others += contexts[c].live && contexts[c].device == device ? context_bytes : 0;
        others += managed_bytes(device) + left_bytes;
        if (open_captures) /* pools hold what was freed in stream order until the host waits, which it may not now */
                others += late_bytes;
        snprintf(text, sizeof text, ", asked %zu live %zu small %zu others %zu of %zu", m->bytes >> 10, live >> 10,
                 small >> 10, others >> 10, total_bytes >> 10);
        return text;
}

static void made(struct op *op, struct memory *m, CUresult result)
{
        const char *full = room(m);

        m->live = result == CUDA_SUCCESS;
        say(op, "%d%s%s", (int)result, m->live && m->at % 512 ? ", not on 512 bytes" : "", full);
}
/* ---- verbs: memory ---- */

void run_alloc(struct op *op)
{
        struct memory *m = new_memory(op, DEVICE, (size_t)op->arg[1], (int)op->arg[2]);
        CUstreamCaptureMode mode = relax(true);
        CUresult result = doors[door_of(op->arg[3])].cuMemAlloc_v2(&m->at, m->bytes);

        tighten(mode);
        made(op, m, result);
}

void run_pitch(struct op *op)
{
        struct memory *m = new_memory(op, DEVICE, 0, (int)op->arg[3]);
        CUstreamCaptureMode mode = relax(true);
        size_t pitch = 0;
        CUresult result = cuMemAllocPitch(&m->at, &pitch, (size_t)op->arg[1], (size_t)op->arg[2], 4);

        tighten(mode);
        m->bytes = pitch * (size_t)op->arg[2];
        made(op, m, result);
}

void run_managed(struct op *op)
{
        struct memory *m = new_memory(op, MANAGED, (size_t)op->arg[1], (int)op->arg[2]);

        made(op, m, cuMemAllocManaged(&m->at, m->bytes, CU_MEM_ATTACH_GLOBAL));
}

void run_host(struct op *op)
{
        struct memory *m = new_memory(op, HOST, (size_t)op->arg[1], (int)op->arg[2]);
        CUstreamCaptureMode mode = relax(true);
        void *at = NULL;
        CUresult result = op->arg[3] ? cuMemHostAlloc(&at, m->bytes, CU_MEMHOSTALLOC_PORTABLE)
                                     : doors[door_of(op->arg[4])].cuMemAllocHost_v2(&at, m->bytes);

        tighten(mode);
        m->at = (CUdeviceptr)(uintptr_t)at;
        made(op, m, result);
}

void run_async(struct op *op)
{
        struct memory *m = new_memory(op, POOLED, (size_t)op->arg[1], (int)op->arg[2]);
        int s = (int)op->arg[2], p = (int)op->arg[4];
        CUresult result;

        if (s > OWN)
                m->context = streams[s].context;
        m->capture = capture_of(s);
        if (m->capture)
                m->kind = OF_GRAPH;
        if (p && device_of(m->context) == 0)
                result = pools[p].live ? cuMemAllocFromPoolAsync(&m->at, m->bytes, pools[p].handle, handle_of(s))
                                       : CUDA_ERROR_UNKNOWN;
        else
                result = doors[door_of(op->arg[3])].cuMemAllocAsync(&m->at, m->bytes, handle_by(s, op->arg[3]));
        made(op, m, result);
}

void run_map(struct op *op)
{
        struct memory *m = new_memory(op, MAPPED, (size_t)op->arg[1] * GT_PAGE, (int)op->arg[2]);
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
        CUmemAccessDesc access = {.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUresult created, mapped = CUDA_SUCCESS, set = CUDA_SUCCESS;

        prop.location.id = device_of(m->context);
        access.location = prop.location;
        created = cuMemCreate(&m->handle, m->bytes, &prop, 0);
        if (created == CUDA_SUCCESS) {
                GR_MUST(cuMemAddressReserve(&m->at, m->bytes, 0, 0, 0));
                mapped = cuMemMap(m->at, m->bytes, 0, m->handle, 0);
                set = cuMemSetAccess(m->at, m->bytes, &access, 1);
                if (op->arg[3]) {
                        GR_MUST(cuMemRelease(m->handle));
                        m->handle = 0;
                }
        }
        say(op, "%d %d %d%s", (int)created, (int)mapped, (int)set, room(m));
        m->live = created == CUDA_SUCCESS && mapped == CUDA_SUCCESS && set == CUDA_SUCCESS;
}

/* What a stream is to come after before it frees memory whose home is another. False: the driver forbids it now. */
static bool order(const struct memory *m, int s)
{
        bool ordered = false;
        CUevent event;

        if (m->home == s || !at_home(m) || capture_of(m->home) || capture_of(s) || !enter(m->context))
                return true;
        if (cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) {
                ordered = cuEventRecord(event, handle_of(m->home)) == CUDA_SUCCESS &&
                          cuStreamWaitEvent(handle_of(s), event, 0) == CUDA_SUCCESS;
                cuEventDestroy(event);
        }
        leave();
        return ordered;
}

static CUresult unmap(struct memory *m)
{
        CUresult result = cuMemUnmap(m->at, m->bytes);

        if (result != CUDA_SUCCESS)
                return result;
        if (m->handle)
                GR_MUST(cuMemRelease(m->handle));
        GR_MUST(cuMemAddressFree(m->at, m->bytes));
        return CUDA_SUCCESS;
}

CUresult give_back(struct memory *m, long door)
{
        CUstreamCaptureMode mode;
        CUresult result;

        door = door_of(door);
        switch (m->kind) {
        case HOST:
                mode = relax(own_frees);
                result = doors[door].cuMemFreeHost((void *)(uintptr_t)m->at);
                tighten(mode);
                return result;
        case MAPPED:
        case POOLED:
                /* Neither waits for work. */
                if (open_captures || !enter(m->context))
                        return CUDA_ERROR_UNKNOWN;
                result = at_home(m) ? cuStreamSynchronize(handle_of(m->home)) : cuCtxSynchronize();
                leave();
                if (result != CUDA_SUCCESS)
                        return result;
                return m->kind == MAPPED ? unmap(m) : doors[door].cuMemFree_v2(m->at);
        case DEVICE:
                mode = relax(own_frees);
                result = doors[door].cuMemFree_v2(m->at);
                tighten(mode);
                return result;
        default:
                return doors[door].cuMemFree_v2(m->at);
        }
}

void run_free(struct op *op)
{
        struct memory *m = &memories[op->arg[0]];
        CUresult result, inside = CUDA_SUCCESS, twice = CUDA_SUCCESS;

        if (m->kind == OF_GRAPH || (m->shared && strict_captures)) {
                say(op, "skip");
                return;
        }
        look(m);
        if (op->arg[2] == 2 && m->kind == DEVICE && m->bytes > 512 && !strict_captures)
                inside = doors[door_of(op->arg[1])].cuMemFree_v2(m->at + 512);
        result = give_back(m, op->arg[1]);
        m->live = result != CUDA_SUCCESS;
        /* Nobody else may get the address in between. */
        if (op->arg[2] == 1 && result == CUDA_SUCCESS && m->kind != MAPPED && !race && !strict_captures)
                twice = give_back(m, op->arg[1]);
        say(op, "%d %d %d", (int)result, (int)inside, (int)twice);
}

void run_free_async(struct op *op)
{
        struct memory *m = &memories[op->arg[0]];
        int s = (int)op->arg[1];
        CUresult result, twice = CUDA_SUCCESS;
        CUstreamCaptureMode mode;

        if ((m->shared && strict_captures) || (m->kind != POOLED && m->kind != DEVICE && m->kind != OF_GRAPH) ||
            (capture_of(s) != 0) != (m->kind == OF_GRAPH) || (m->kind == OF_GRAPH && capture_of(s) != m->capture) ||
            (m->kind != OF_GRAPH && (m->home != s || s == OWN) && (!at_home(m) || capture_of(m->home))) ||
            m->context != (s > OWN ? streams[s].context : current())) {
                say(op, "skip");
                return;
        }
        look(m);
        if (!order(m, s)) {
                say(op, "skip");
                return;
        }
        mode = relax(own_frees && m->kind == DEVICE);
        result = doors[door_of(op->arg[2])].cuMemFreeAsync(m->at, handle_by(s, op->arg[2]));
        tighten(mode);
        if (op->arg[3] == 1 && result == CUDA_SUCCESS && m->kind != OF_GRAPH && !race && !strict_captures)
                twice = doors[door_of(op->arg[2])].cuMemFreeAsync(m->at, handle_by(s, op->arg[2]));
        m->live = result != CUDA_SUCCESS;
        if (!m->live && m->kind != OF_GRAPH) /* a pool may be destroyed already */
                late_bytes += gt_pages(m->bytes);
        say(op, "%d %d", (int)result, (int)twice);
}

void run_fill(struct op *op)
{
        struct memory *m = &memories[op->arg[0]];
        uint32_t value = (uint32_t)op->line * 2654435761u | 1;
        int capture = capture_of(m->home);
        CUresult result;

        if (!at_home(m) || (m->kind == OF_GRAPH && capture != m->capture) ||
            (capture && captures[capture].fills.count == SLOTS) || !enter(m->context)) {
                say(op, "skip");
                return;
        }
        result = put(m, value, op->arg[1]);
        leave();
        if (!capture) {
                m->known = result == CUDA_SUCCESS;
                m->value = value;
        } else if (m->kind != OF_GRAPH) {
                struct fills *fills = &captures[capture].fills;

                fills->memory[fills->count] = (int)op->arg[0];
                fills->made[fills->count] = m->made;
                fills->last[fills->count] = captures[capture].stream == m->home && result == CUDA_SUCCESS;
                fills->value[fills->count++] = value;
        }
        say_code(op, result);
}

/* From the second to the first, in the first one's home. */
void run_copy(struct op *op)
{
        struct memory *to = &memories[op->arg[0]], *from = &memories[op->arg[1]];
        CUresult result;

        if (to == from || !at_home(to) || !at_home(from) || capture_of(to->home) || capture_of(from->home) ||
            to->bytes > from->bytes || to->bytes > 2 * ends_bytes ||
            (from->bytes > 2 * ends_bytes && to->bytes > ends_bytes) || to->context != from->context ||
            to->kind == OF_GRAPH || from->kind == OF_GRAPH) {
                say(op, "skip");
                return;
        }
        if (!order(from, to->home) || !enter(to->context)) {
                say(op, "skip");
                return;
        }
        result = cuMemcpyDtoDAsync(to->at, from->at, to->bytes / 4 * 4, handle_of(to->home));
        leave();
        /* What comes next in the other's home may change it. */
        order(to, from->home);
        to->known = result == CUDA_SUCCESS && from->known;
        to->value = from->value;
        say_code(op, result);
}

const char *checked(struct memory *m)
{
        size_t words = m->bytes / 4;
        uint32_t seen[2] = {0};
        CUresult result;

        if (!m->known || !at_home(m) || capture_of(m->home) || m->kind == OF_GRAPH)
                return "unknown";
        look(m);
        if (!enter(m->context))
                return "unknown";
        result = cuStreamSynchronize(handle_of(m->home));
        if (result == CUDA_SUCCESS) {
                GR_MUST(cuMemcpyDtoHAsync(&seen[0], m->at, 4, handle_of(m->home)));
                GR_MUST(cuMemcpyDtoHAsync(&seen[1], m->at + (words - 1) * 4, 4, handle_of(m->home)));
                GR_MUST(cuStreamSynchronize(handle_of(m->home)));
        }
        leave();
        return result != CUDA_SUCCESS ? "refused" : seen[0] == m->value && seen[1] == m->value ? "right" : "WRONG";
}

void run_check(struct op *op)
{
        say(op, "%s", checked(&memories[op->arg[0]]));
}

void run_range(struct op *op)
{
        struct memory *m = &memories[op->arg[0]];
        CUdeviceptr base = 0, inside = m->at + (m->bytes ? (size_t)op->arg[1] % m->bytes : 0);
        unsigned type = 7, managed = 7;
        CUresult range, attribute;
        CUcontext context = NULL;
        size_t bytes = 0;

        range = cuMemGetAddressRange(&base, &bytes, inside);
        attribute = cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, inside);
        cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside);
        cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, inside);
        say(op, "%d base %d size %zu, %d context %d, type %u managed %u", (int)range, base == m->at, bytes,
            (int)attribute, m->context >= 0 && context == contexts[m->context].handle, type, managed);
}

void run_share(struct op *op)
{
        struct memory *m = &memories[op->arg[0]];
        CUipcMemHandle handle;

        CUresult result = cuIpcGetMemHandle(&handle, m->at);

        m->shared = true;
        say_code(op, result);
}

/* What all pools of the device hold; others than the default ones are the first device's. */
static size_t reserved_bytes(int device)
{
        CUstreamCaptureMode mode = relax(true);
        cuuint64_t bytes = 0, sum = 0;
        CUmemoryPool pool;

        GR_MUST(cuDeviceGetDefaultMemPool(&pool, device));
        for (int i = 0; i < (device ? 1 : SLOTS); i++) {
                if (i > 0 && !pools[i].live)
                        continue;
                GR_MUST(cuMemPoolGetAttribute(i ? pools[i].handle : pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                                              &bytes));
                sum += bytes;
        }
        tighten(mode);
        return sum;
}

void run_info(struct op *op)
{
        int device = device_of(current());
        size_t available = 0, total = 0, small, asked, live = live_bytes(device, &small, &asked);
        CUresult result = cuMemGetInfo(&available, &total);

        say(op, "%d free %zu of %zu, live %zu small %zu asked %zu, pools %zu, managed %zu, late %zu", (int)result,
            available >> 10, total >> 10, live >> 10, small >> 10, asked >> 10, reserved_bytes(device) >> 10,
            managed_bytes(device) >> 10, late_bytes >> 10);
}

/* One block of so many hundredths of what must be there besides what is live. */
void run_most(struct op *op)
{
        int device = device_of(current());
        size_t small, asked, live = live_bytes(device, &small, &asked), others = 16 * MIB, want;
        CUdeviceptr p;
        CUresult result, freed = CUDA_SUCCESS;

        for (int c = 0; c < SLOTS; c++)
                others += contexts[c].live && contexts[c].device == device ? context_bytes + GT_PAGE : 0;
        others += managed_bytes(device) + left_bytes + (open_captures ? late_bytes : 0);
        /* A block may be an eighth larger than was asked for, a small one twice as large; with --wide it may lie in a
         * mapping for more. */
        live += (wide ? live : live / 8) + 2 * small;
        if (live + others > total_bytes || strict_captures) {
                say(op, "skip");
                return;
        }
        want = (total_bytes - live - others) / 100 * (size_t)op->arg[0] / GT_PAGE * GT_PAGE;
        result = cuMemAlloc(&p, want);
        if (result == CUDA_SUCCESS)
                freed = cuMemFree(p);
        say(op, "%d %d", (int)result, (int)freed);
}

/* ---- another process ---- */

struct lent {
        CUipcMemHandle handle;
        size_t bytes;
        uint32_t expected, written;
};
struct returned {
        int opened, right, closed;
};

/* Opens what it is lent, compares both ends and writes others. */
int be_partner(int socket)
{
        struct lent lent;
        int fd;

        gt_open(&gt);
        while (peer_receive(socket, &lent, sizeof lent, &fd)) {
                struct returned returned = {.closed = -1};
                size_t words = lent.bytes / 4, part = ends_bytes / 4;
                uint32_t seen[2] = {0};
                CUdeviceptr at;

                returned.opened = (int)cuIpcOpenMemHandle(&at, lent.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
                if (returned.opened == CUDA_SUCCESS) {
                        GR_MUST(cuMemcpyDtoH(&seen[0], at, 4));
                        GR_MUST(cuMemcpyDtoH(&seen[1], at + (words - 1) * 4, 4));
                        returned.right = seen[0] == lent.expected && seen[1] == lent.expected;
                        GR_MUST(cuMemsetD32(at, lent.written, part));
                        GR_MUST(cuMemsetD32(at + (words - part) * 4, lent.written, part));
                        GR_MUST(cuCtxSynchronize());
                        returned.closed = (int)cuIpcCloseMemHandle(at);
                }
                peer_send(socket, &returned, sizeof returned, -1);
        }
        return EXIT_SUCCESS;
}

/* The memory goes to the other process and comes back with what that one wrote. */
void run_lend(struct op *op)
{
        static char mode[] = "--partner";
        static int socket = -1;
        struct memory *m = &memories[op->arg[0]];
        struct lent lent = {.bytes = m->bytes, .expected = m->value, .written = (uint32_t)op->line * 2654435761u | 1};
        struct returned returned = {0};
        CUresult result;
        int fd;

        if (m->kind != DEVICE || !m->known || m->bytes <= 2 * MIB || !at_home(m) || open_captures ||
            device_of(m->context) || !enter(m->context)) {
                say(op, "skip");
                return;
        }
        GR_MUST(cuStreamSynchronize(handle_of(m->home)));
        result = cuIpcGetMemHandle(&lent.handle, m->at);
        leave();
        m->shared = true;
        if (result == CUDA_SUCCESS) {
                if (socket < 0)
                        peer_start(program_path, mode, false, &socket);
                peer_send(socket, &lent, sizeof lent, -1);
                if (!peer_receive(socket, &returned, sizeof returned, &fd))
                        gt_die("program: the other process ended");
                if (returned.opened == CUDA_SUCCESS)
                        m->value = lent.written;
        }
        if (result != CUDA_SUCCESS)
                say_code(op, result);
        else
                say(op, "0, opened %d, %s, closed %d", returned.opened, returned.right ? "right" : "WRONG",
                    returned.closed);
}
