#include "hooks/segment_export.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/no_cancel.h"
#include "driver/mapped_memory.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "notes/note.h"
#include "system/messages.h"
#include "system/platform.h"
#include "system/workers.h"

#define BACKLOG     64
#define TRIES       2 /* of what may fail for lack of memory or of descriptors */
#define PAUSE_NS    UINT64_C(10000000)
#define LOOK_MS     400 /* longest sleep of the thread: a process whose own threads have ended waits for it */
#define ANSWER_NS   UINT64_C(5000000000) /* longest wait for an asker to ask, or to take what was sent */
#define ANSWERS_MAX 64                   /* askers that are answered at the same time */
#define SILENT_MAX  64                   /* askers that have not asked yet */
#define CROWDED_MS  100                  /* the longest wait for one of them once there are SILENT_MAX */

static struct gr_lock service_lock = GR_LOCK_INIT(GR_RANK_IPC);
static struct {
        uint64_t number; /* 0: none yet */
        int fd;
        ino_t inode; /* of the socket: the program may have closed fd, and opened something else as fd */
        bool running, stop;
} service GR_GUARDED_BY(service_lock) = {.fd = -1};

static _Atomic int answers; /* askers that are being answered by workers */

/*
 * Whether the block of the handle is still the same, live and exported. gr_mappings is held, so that no memory of it is
 * unmapped meanwhile.
 */
GR_HELD(gr_mappings) static bool is_there(const struct gr_segment_handle *handle, struct gr_block_info *ret_info)
{
        gr_assert_locked(&gr_mappings);
        if (gr_ledger_find(gr_core.ledger, handle->base, ret_info) != 0)
                return false;
        if (gr_notes_watch())
                gr_debug_correct(handle->base, ret_info);
        return ret_info->live && ret_info->is_range && ret_info->exported &&
               ret_info->generation == handle->generation && ret_info->requested_bytes == handle->bytes;
}

/* Fills the reply for a block in mapped memory. False: its memory is not mapped for core/. gr_mappings is held. */
GR_HELD(gr_mappings) static bool describe_mapped(const struct gr_segment_handle *handle, struct gr_segment_reply *reply)
{
        struct gr_piece piece, first;
        CUdeviceptr end = handle->base + handle->bytes;

        gr_assert_locked(&gr_mappings);
        if (gr_mapped_export(handle->base, &first, NULL) != CUDA_SUCCESS)
                return false;
        for (piece = first; piece.ptr + piece.bytes < end;)
                if (gr_mapped_export(piece.ptr + piece.bytes, &piece, NULL) != CUDA_SUCCESS)
                        return false;
        reply->offset_bytes = handle->base - first.ptr;
        reply->all_bytes = piece.ptr + piece.bytes - first.ptr;
        reply->memory = first.number;
        return true;
}

/* Fills the reply for a block in an allocation of the driver. False: the driver makes no handle of it. */
static bool describe_allocation(const struct gr_segment_handle *handle, CUcontext context,
                                struct gr_segment_reply *reply)
{
        CUresult results[2] = {CUDA_ERROR_UNKNOWN, CUDA_ERROR_UNKNOWN};
        CUdeviceptr start = 0;

        if (!gr_real.cuIpcGetMemHandle || gr_real.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
                return false;
        results[0] = gr_real.cuIpcGetMemHandle(&reply->driver, handle->base);
        for (int tries = 0; tries < TRIES && results[1] != CUDA_SUCCESS; tries++)
                results[1] = gr_real.cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, handle->base);
        gr_real.cuCtxPopCurrent_v2(&context);
        reply->offset_bytes = handle->base - start;
        reply->memory = UINT64_C(0xcbf29ce484222325);
        for (size_t i = 0; i < sizeof(reply->driver); i++) /* a hash of the driver's handle: FNV-1a */
                reply->memory = (reply->memory ^ ((unsigned char *)&reply->driver)[i]) * UINT64_C(0x100000001b3);
        return results[0] == CUDA_SUCCESS && results[1] == CUDA_SUCCESS;
}

/* Fills the reply to a handle. `memory` of a handle that is being made is still 0, and not compared. */
static void describe_handle(const struct gr_segment_handle *handle, struct gr_segment_reply *reply)
{
        struct gr_block_info info;
        bool there, mapped;
        CUuuid uuid;

        *reply = (struct gr_segment_reply){0};
        gr_lock(&gr_mappings);
        there = is_there(handle, &info);
        mapped = there && describe_mapped(handle, reply);
        gr_unlock(&gr_mappings);
        if (!there || (!mapped && !describe_allocation(handle, info.context->handle, reply)))
                return;
        reply->good = !handle->memory || handle->memory == reply->memory;
        if (gr_real.cuDeviceGetUuid_v2 && gr_real.cuDeviceGetUuid_v2(&uuid, info.context->ordinal) == CUDA_SUCCESS)
                memcpy(reply->device, &uuid, sizeof(reply->device));
}

/* Answers one process that has asked, or is gone. */
static void answer_asker(int asker)
{
        struct gr_block_info info;
        struct gr_segment_handle handle;
        struct gr_segment_reply reply;
        bool good;
        int fd;

        if (!gr_message_receive(asker, &handle, sizeof(handle), NULL, gr_platform_now_ns() + ANSWER_NS))
                return;
        describe_handle(&handle, &reply);
        good = gr_message_send(asker, &reply, sizeof(reply), -1, gr_platform_now_ns() + ANSWER_NS) && reply.good;
        for (CUdeviceptr at = handle.base; good && reply.all_bytes && at < handle.base + handle.bytes;) {
                struct gr_piece piece;
                uint64_t bytes;

                /* One by one, as a process may not have as many descriptors as a large block has pieces. */
                gr_lock(&gr_mappings);
                good = is_there(&handle, &info) && gr_mapped_export(at, &piece, &fd) == CUDA_SUCCESS;
                gr_unlock(&gr_mappings);
                fd = good ? gr_message_begin(fd) : -1;
                if (fd < 0)
                        return;
                bytes = piece.bytes;
                good = gr_message_send(asker, &bytes, sizeof(bytes), fd, gr_platform_now_ns() + ANSWER_NS);
                gr_message_end(fd);
                at = piece.ptr + bytes;
        }
}

/* Runs on a worker: a process that is slow to read the answer delays no other one. */
static void answer_on_worker(void *arg)
{
        int asker = (int)(intptr_t)arg;

        answer_asker(asker);
        gr_message_end(asker);
        atomic_fetch_sub(&answers, 1);
}

static void begin_answer(int asker)
{
        if (atomic_fetch_add(&answers, 1) < ANSWERS_MAX && gr_worker_call(answer_on_worker, (void *)(intptr_t)asker))
                return;
        atomic_fetch_sub(&answers, 1);
        answer_asker(asker);
        gr_message_end(asker);
}

/* Whether fd is still the socket that the service has opened. */
static bool is_open(int fd, ino_t inode)
{
        struct stat now;

        if (fstat(fd, &now) != 0)
                return errno != EBADF;
        return S_ISSOCK(now.st_mode) && now.st_ino == inode;
}

/*
 * Processes that have connected and not asked yet, the oldest first. They take no worker. Where there are SILENT_MAX,
 * the next one waits until one of them asks or has been silent for CROWDED_MS.
 */
struct silent {
        struct pollfd looks[1 + SILENT_MAX]; /* the first one is the service's own socket */
        uint64_t since_ns[1 + SILENT_MAX];
        nfds_t count; /* of looks */
};

static bool is_crowded(const struct silent *silent)
{
        return silent->count == 1 + SILENT_MAX;
}

static void forget_silent(struct silent *silent, nfds_t at)
{
        assert(at > 0 && at < silent->count);
        silent->count--;
        memmove(&silent->looks[at], &silent->looks[at + 1], (silent->count - at) * sizeof(silent->looks[0]));
        memmove(&silent->since_ns[at], &silent->since_ns[at + 1], (silent->count - at) * sizeof(silent->since_ns[0]));
}

/* Answers those that have asked, and drops those that have been silent for most_ns. */
static void look_at_silent(struct silent *silent, uint64_t most_ns)
{
        uint64_t now_ns = gr_platform_now_ns();

        for (nfds_t at = 1; at < silent->count;) {
                struct pollfd look = silent->looks[at];

                if (!look.revents && now_ns < silent->since_ns[at] + most_ns) {
                        at++;
                        continue;
                }
                forget_silent(silent, at);
                if (look.revents)
                        begin_answer(look.fd);
                else
                        gr_message_end(look.fd);
        }
}

/* A process connects. Most often it has asked before the next look. */
static void accept_one(struct silent *silent)
{
        int asker = gr_message_begin(accept4(silent->looks[0].fd, NULL, NULL, SOCK_CLOEXEC));

        if (asker < 0) {
                gr_driver.sleep_ns(PAUSE_NS); /* there may be no descriptor left */
        } else if (!gr_message_is_trusted(asker, false)) {
                gr_message_end(asker);
        } else {
                silent->since_ns[silent->count] = gr_platform_now_ns();
                silent->looks[silent->count++] = (struct pollfd){.fd = asker, .events = POLLIN};
        }
}

/* Waits for what processes do, but not for long. */
static void serve_once(struct silent *silent, ino_t inode)
{
        bool crowded = is_crowded(silent);

        silent->looks[0].events = crowded ? 0 : POLLIN;
        if (poll(silent->looks, silent->count, crowded ? CROWDED_MS : LOOK_MS) < 0) {
                gr_driver.sleep_ns(PAUSE_NS);
                return;
        }
        look_at_silent(silent, crowded ? CROWDED_MS * UINT64_C(1000000) : ANSWER_NS);
        if (silent->looks[0].revents && !crowded && is_open(silent->looks[0].fd, inode))
                accept_one(silent);
}

/* The thread that answers. It ends when the process exits, or when the program has closed the socket. */
static void *serve_exports(void *arg)
{
        struct silent silent = {.count = 1};
        ino_t inode;
        int fd;

        (void)arg;
        gr_operations_relax_captures();
        gr_lock(&service_lock);
        fd = service.fd;
        inode = service.inode;
        silent.looks[0].fd = fd;
        while (!service.stop && !gr_platform_left_alone(gr_workers_running()) && is_open(fd, inode)) {
                gr_unlock(&service_lock);
                serve_once(&silent, inode);
                gr_lock(&service_lock);
        }
        if (is_open(fd, inode))
                close(fd);
        if (service.inode == inode) { /* else another thread serves already */
                service.fd = -1;
                service.running = false;
        }
        gr_unlock(&service_lock);
        while (silent.count > 1)
                gr_message_end(silent.looks[--silent.count].fd);
        return NULL;
}

/* Lock held. Whether it is still this thread that is to start the service under this number. */
GR_HELD(service_lock) static bool is_start_wanted(uint64_t number)
{
        gr_assert_locked(&service_lock);
        return !service.running && !service.stop && service.number == number;
}

/*
 * Gives the socket its name. The program may have closed the socket of this name. The name is free once the thread that
 * polls it has noticed. Lock held, but released while it waits, as opening another process's handle needs it, too.
 * False: that failed, or is not wanted any more.
 */
GR_NOT_CHECKED static bool bind_patiently(int fd, uint64_t number)
{
        struct sockaddr_un address;
        socklen_t length = gr_message_address(number, &address);

        gr_assert_locked(&service_lock);
        for (int waits = 0; bind(fd, (struct sockaddr *)&address, length) != 0; waits++) {
                if (errno != EADDRINUSE || waits == (int)(2 * LOOK_MS * UINT64_C(1000000) / PAUSE_NS))
                        return false;
                gr_unlock(&service_lock);
                gr_driver.sleep_ns(PAUSE_NS);
                gr_lock(&service_lock);
                if (!is_start_wanted(number))
                        return false;
        }
        return true;
}

/*
 * Lock held, but released while it waits. Opens the socket and starts the thread, unless another thread does so
 * meanwhile. Where that fails, service.running stays false.
 */
GR_HELD(service_lock) static void begin_service(void)
{
        struct stat status;
        uint64_t number;
        bool bound;
        int fd;

        gr_assert_locked(&service_lock);
        /* 0 stands for none. The number is kept when the thread is started again, so that handles stay good. */
        while (!service.number)
                if (getrandom(&service.number, sizeof(service.number), 0) != (ssize_t)sizeof(service.number))
                        return;
        number = service.number;
        fd = gr_message_off_streams(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (fd < 0)
                return;
        bound = bind_patiently(fd, number);
        if (!is_start_wanted(number)) {
                close(fd);
                return;
        }
        if (bound && listen(fd, BACKLOG) == 0 && fstat(fd, &status) == 0) {
                service.fd = fd;
                service.inode = status.st_ino;
                service.running = gr_workers_start_thread(serve_exports, NULL);
        }
        if (!service.running) {
                service.number = 0; /* another one next time: a child of the program may still have this name open */
                close(fd);
                service.fd = -1;
        }
}

/* Starts the service unless it runs, and returns its number; 0: it could not be started. */
static uint64_t ensure_service(void)
{
        uint64_t number;

        gr_lock(&service_lock);
        if (service.running && !is_open(service.fd, service.inode))
                service.running = false; /* the program has closed the socket, and the thread will end */
        for (int tries = 0; !service.running && !service.stop && tries < TRIES; tries++)
                begin_service();
        number = service.running ? service.number : 0;
        gr_unlock(&service_lock);
        return number;
}

bool gr_segment_export_is_own(const struct gr_segment_handle *handle)
{
        bool own;

        gr_lock(&service_lock);
        own = handle->service == service.number;
        gr_unlock(&service_lock);
        return own;
}

bool gr_segment_export(CUdeviceptr base, const struct gr_block_info *info, CUipcMemHandle *ret_handle)
{
        struct gr_segment_handle handle = {.magic = GR_SEGMENT_MAGIC,
                                           .base = base,
                                           .bytes = info->requested_bytes,
                                           .generation = info->generation};
        struct gr_segment_reply reply;
        GR_NO_CANCEL;

        assert(info->live && info->is_range);
        describe_handle(&handle, &reply);
        handle.memory = reply.memory;
        if (reply.good)
                handle.service = ensure_service();
        if (!handle.service)
                return false;
        memcpy(ret_handle, &handle, sizeof(*ret_handle));
        return true;
}

void gr_segment_export_stop(void)
{
        gr_lock(&service_lock);
        service.stop = true;
        if (service.running && is_open(service.fd, service.inode))
                shutdown(service.fd, SHUT_RDWR); /* wakes the thread */
        gr_unlock(&service_lock);
}

/* Takes no lock: a thread that the child does not have may hold it for ever. */
GR_NOT_CHECKED void gr_segment_export_forget(void)
{
        if (service.running && is_open(service.fd, service.inode))
                close(service.fd);
        gr_message_forget();
}
