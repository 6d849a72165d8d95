#include "hooks/segment_ipc.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <utlist.h>

#include "device/device.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "system/platform.h"
#include "system/workers.h"

#define MAGIC       UINT64_C(0x6d65726c75707267) /* no handle of the driver begins so */
#define BACKLOG     64
#define TRIES       2 /* what fails once, for want of something, is tried again */
#define PAUSE_NS    UINT64_C(10000000)
#define LOOK_MS     400                  /* longest sleep of the thread, as it delays the end of a process left alone */
#define ANSWER_NS   UINT64_C(5000000000) /* longest time for one asker */
#define OPEN_NS     UINT64_C(10000000000) /* longest wait of an importer for the exporter */
#define ANSWERS_MAX 16                    /* askers that are answered at the same time */

/* What the 64 bytes of a handle hold. The same block has the same bytes whenever it is asked for. */
struct handle {
        uint64_t magic, service; /* service: the number in the name of the exporter's socket */
        uint64_t base, bytes;    /* of the block, in the exporter */
        uint64_t memory;         /* a number of the memory there: another one when the address is used again */
        uint64_t generation;     /* of the block */
        uint64_t none[2];
};
_Static_assert(sizeof(struct handle) == sizeof(CUipcMemHandle), "one is copied to the other");

/*
 * The exporter's answer to a handle. After it comes a message for each piece, its bytes with its descriptor; none where
 * the memory is an allocation of the driver, or there is no such block.
 */
struct reply {
        uint64_t good;            /* 0: there is no such block */
        uint64_t offset_bytes;    /* of the block in its first piece, or in the allocation */
        uint64_t all_bytes;       /* of all pieces; 0: it is an allocation */
        uint64_t memory;          /* as in struct handle */
        CUipcMemHandle driver;    /* of an allocation */
        unsigned char device[16]; /* its UUID; zeros: unknown */
};

/* Memory of another process: on its way, open, or about to be given back. By one thread at a time but when open. */
enum opening_state { OPENING, OPEN, CLOSING };

struct opening {
        struct opening *prev, *next;
        struct handle handle;
        struct gr_segment_import import;
        CUdeviceptr at;   /* of the first piece, or of the allocation */
        size_t all_bytes; /* of all pieces; 0: it is an allocation, opened by the driver */
        unsigned count;   /* how often it is open */
        enum opening_state state;
        bool ended; /* the context has been destroyed meanwhile */
};

/* The exporter's side. */
static struct gr_lock service_lock = GR_LOCK_INIT(GR_RANK_IPC);
static struct {
        uint64_t number; /* 0: none yet */
        int fd;
        ino_t inode; /* of the socket: the program may have closed fd, and opened something else */
        bool running, stop;
} service GR_GUARDED_BY(service_lock) = {.fd = -1};

static _Atomic int answers; /* askers that are being answered by workers */

/* The importer's side. */
static struct gr_lock table_lock = GR_LOCK_INIT(GR_RANK_IMPORTS);
static pthread_cond_t state_changed = PTHREAD_COND_INITIALIZER; /* of an opening */
static struct opening *openings GR_GUARDED_BY(table_lock);
static _Atomic size_t opening_count;

/*
 * Descriptors that are open for a moment, plus 1. A child that the program forks then closes them, as memory stays for
 * as long as a descriptor of it is open.
 */
static _Atomic int moments[4 * ANSWERS_MAX];

/*
 * A descriptor that has just been opened, under a number that is none of the standard streams', should the program have
 * closed these. -1: it was none, or there is no other number.
 */
static int off_streams(int fd)
{
        int moved;

        if (fd < 0 || fd > STDERR_FILENO)
                return fd;
        moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        close(fd);
        return moved;
}

/* The same, for a descriptor that end_moment closes. */
static int begin_moment(int fd)
{
        int moved = off_streams(fd), none;

        for (size_t i = 0; moved >= 0 && i < sizeof(moments) / sizeof(moments[0]); i++) {
                none = 0;
                if (atomic_compare_exchange_strong(&moments[i], &none, moved + 1))
                        break;
        }
        return moved;
}

static void end_moment(int fd)
{
        int open;

        for (size_t i = 0; i < sizeof(moments) / sizeof(moments[0]); i++) {
                open = fd + 1;
                if (atomic_compare_exchange_strong(&moments[i], &open, 0))
                        break;
        }
        close(fd);
}

static socklen_t address_of(uint64_t number, struct sockaddr_un *address)
{
        int length;

        *address = (struct sockaddr_un){.sun_family = AF_UNIX};
        length = snprintf(&address->sun_path[1], sizeof(address->sun_path) - 1, "gpureclaim-%016llx",
                          (unsigned long long)number);
        return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

/* Waits until a socket can be read (POLLIN) or written (POLLOUT). False: not until deadline_ns. */
static bool is_ready(int fd, short events, uint64_t deadline_ns)
{
        struct pollfd look = {.fd = fd, .events = events};

        for (;;) {
                uint64_t now_ns = gr_driver.now_ns();
                int rc = poll(&look, 1, now_ns < deadline_ns ? (int)((deadline_ns - now_ns) / 1000000) + 1 : 0);

                if (rc > 0)
                        return true;
                if ((rc < 0 && errno != EINTR) || now_ns >= deadline_ns)
                        return false;
        }
}

/* Whether the process at the other end has the user of this one, or is root's; may_serve: or this one is. */
static bool is_trusted(int fd, bool may_serve)
{
        struct ucred peer;
        socklen_t bytes = sizeof(peer);

        return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
               (peer.uid == geteuid() || peer.uid == 0 || (may_serve && geteuid() == 0));
}

/* Sends one message, with a descriptor where that is not -1. False: not until deadline_ns, or an error. */
static bool send_message(int socket, const void *data, size_t bytes, int fd, uint64_t deadline_ns)
{
        struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
        union {
                struct cmsghdr header;
                char room[CMSG_SPACE(sizeof(int))];
        } control = {0};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
        ssize_t sent;

        if (fd >= 0) {
                message.msg_control = control.room;
                message.msg_controllen = sizeof(control.room);
                control.header = (struct cmsghdr){
                        .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
                memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
        }
        do
                sent = is_ready(socket, POLLOUT, deadline_ns) ? sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
                                                              : 0;
        while (sent < 0 && (errno == EINTR || errno == EAGAIN));
        return sent == (ssize_t)bytes;
}

/*
 * Receives one message of this length with one descriptor, or with none: ret_fd is NULL. False: another one, none until
 * deadline_ns, or an error.
 */
static bool receive_message(int socket, void *data, size_t bytes, int *ret_fd, uint64_t deadline_ns)
{
        struct iovec part = {.iov_base = data, .iov_len = bytes};
        union {
                struct cmsghdr header;
                char room[CMSG_SPACE(sizeof(int))];
        } control = {0};
        struct msghdr message = {
                .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof(control.room)};
        int fds[sizeof(control.room) / sizeof(int)];
        struct cmsghdr *header;
        size_t count = 0;
        ssize_t received;

        do
                received = is_ready(socket, POLLIN, deadline_ns)
                                   ? recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)
                                   : 0;
        while (received < 0 && (errno == EINTR || errno == EAGAIN));
        header = received > 0 ? CMSG_FIRSTHDR(&message) : NULL;
        if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
                count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int); /* the room may be for more than one */
                memcpy(fds, CMSG_DATA(header), count * sizeof(int));
        }
        if (received == (ssize_t)bytes && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) &&
            count == (ret_fd ? 1 : 0)) {
                if (ret_fd)
                        *ret_fd = begin_moment(fds[0]);
                return !ret_fd || *ret_fd >= 0;
        }
        while (count > 0)
                close(fds[--count]);
        return false;
}

/* gr_mappings is held, so mapped memory stays: whether the block of the handle is still there, and exported. */
GR_HELD(gr_mappings) static bool is_there(const struct handle *handle, struct gr_block_info *ret_info)
{
        gr_assert_locked(&gr_mappings);
        return gr_ledger_find(gr_core.ledger, handle->base, ret_info) == 0 && ret_info->live && ret_info->split &&
               ret_info->exported && ret_info->generation == handle->generation &&
               ret_info->requested_bytes == handle->bytes;
}

/* gr_mappings is held. Describes a block whose memory was mapped. False: it was not. */
GR_HELD(gr_mappings) static bool describe_mapped(const struct handle *handle, struct reply *reply)
{
        struct gr_piece piece, first;
        CUdeviceptr end = handle->base + handle->bytes;

        gr_assert_locked(&gr_mappings);
        if (gr_operations_export(handle->base, &first, NULL) != CUDA_SUCCESS)
                return false;
        for (piece = first; piece.ptr + piece.bytes < end;)
                if (gr_operations_export(piece.ptr + piece.bytes, &piece, NULL) != CUDA_SUCCESS)
                        return false;
        reply->offset_bytes = handle->base - first.ptr;
        reply->all_bytes = piece.ptr + piece.bytes - first.ptr;
        reply->memory = first.number;
        return true;
}

/* Describes a block that lies in an allocation of the driver. */
static bool describe_allocation(const struct handle *handle, CUcontext context, struct reply *reply)
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
        for (size_t i = 0; i < sizeof(reply->driver); i++) /* FNV-1a */
                reply->memory = (reply->memory ^ ((unsigned char *)&reply->driver)[i]) * UINT64_C(0x100000001b3);
        return results[0] == CUDA_SUCCESS && results[1] == CUDA_SUCCESS;
}

/* Fills the reply to a handle, in which memory is 0 while it is made. */
static void describe(const struct handle *handle, struct reply *reply)
{
        struct gr_block_info info;
        bool there, mapped;
        CUuuid uuid;

        *reply = (struct reply){0};
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

/* Answers one process that has connected. */
static void answer(int asker)
{
        uint64_t deadline_ns = gr_driver.now_ns() + ANSWER_NS;
        struct gr_block_info info;
        struct handle handle;
        struct reply reply;
        bool good;
        int fd;

        if (!is_trusted(asker, false) || !receive_message(asker, &handle, sizeof(handle), NULL, deadline_ns))
                return;
        describe(&handle, &reply);
        good = send_message(asker, &reply, sizeof(reply), -1, deadline_ns) && reply.good;
        for (CUdeviceptr at = handle.base; good && reply.all_bytes && at < handle.base + handle.bytes;) {
                struct gr_piece piece;
                uint64_t bytes;

                /* One by one, as a process may not have as many descriptors as a large block has pieces. */
                gr_lock(&gr_mappings);
                good = is_there(&handle, &info) && gr_operations_export(at, &piece, &fd) == CUDA_SUCCESS;
                gr_unlock(&gr_mappings);
                fd = good ? begin_moment(fd) : -1;
                if (fd < 0)
                        return;
                bytes = piece.bytes;
                good = send_message(asker, &bytes, sizeof(bytes), fd, deadline_ns);
                end_moment(fd);
                at = piece.ptr + bytes;
        }
}

/* On a worker, so that one that is slow to ask or to read keeps no other one waiting. */
static void answer_on_worker(void *arg)
{
        int asker = (int)(intptr_t)arg;

        answer(asker);
        end_moment(asker);
        atomic_fetch_sub(&answers, 1);
}

static void accepted(int asker)
{
        if (atomic_fetch_add(&answers, 1) < ANSWERS_MAX && gr_worker_call(answer_on_worker, (void *)(intptr_t)asker))
                return;
        atomic_fetch_sub(&answers, 1);
        answer(asker);
        end_moment(asker);
}

/* Whether fd is still the socket that the service has opened. */
static bool is_open(int fd, ino_t inode)
{
        struct stat now;

        if (fstat(fd, &now) != 0)
                return errno != EBADF;
        return S_ISSOCK(now.st_mode) && now.st_ino == inode;
}

/* The thread that answers. It ends when the process exits, or when the program has closed the socket. */
static void *serve(void *arg)
{
        struct pollfd look = {.events = POLLIN};
        ino_t inode;
        int asker;

        (void)arg;
        gr_operations_relax_captures();
        gr_lock(&service_lock);
        look.fd = service.fd;
        inode = service.inode;
        while (!service.stop && !gr_platform_left_alone(gr_workers_running()) && is_open(look.fd, inode)) {
                gr_unlock(&service_lock);
                if (poll(&look, 1, LOOK_MS) > 0 && is_open(look.fd, inode)) {
                        asker = begin_moment(accept4(look.fd, NULL, NULL, SOCK_CLOEXEC));
                        if (asker >= 0)
                                accepted(asker);
                        else
                                gr_driver.sleep_ns(PAUSE_NS); /* there may be no descriptor left */
                }
                gr_lock(&service_lock);
        }
        if (is_open(look.fd, inode))
                close(look.fd);
        if (service.inode == inode) { /* else another thread serves already */
                service.fd = -1;
                service.running = false;
        }
        gr_unlock(&service_lock);
        return NULL;
}

/* Lock held. Opens the socket and starts the thread, unless one of these cannot be had. */
GR_HELD(service_lock) static void begin_service(void)
{
        struct sockaddr_un address;
        struct stat status;
        socklen_t length;
        int rc;

        gr_assert_locked(&service_lock);
        /* Never 0, which stands for none. The name stays when the thread has to start again. */
        while (!service.number)
                if (getrandom(&service.number, sizeof(service.number), 0) != (ssize_t)sizeof(service.number))
                        return;
        length = address_of(service.number, &address);
        service.fd = off_streams(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (service.fd < 0)
                return;
        /* The thread may still wait at a socket of this name, which the program has closed. */
        for (int waits = 0; (rc = bind(service.fd, (struct sockaddr *)&address, length)) != 0 && errno == EADDRINUSE &&
                            waits < (int)(2 * LOOK_MS * UINT64_C(1000000) / PAUSE_NS);
             waits++)
                gr_driver.sleep_ns(PAUSE_NS);
        if (rc == 0 && listen(service.fd, BACKLOG) == 0 && fstat(service.fd, &status) == 0) {
                service.inode = status.st_ino;
                service.running = gr_workers_start_thread(serve, NULL);
        }
        if (!service.running) {
                service.number = 0; /* a child that the program forked may keep the name */
                close(service.fd);
                service.fd = -1;
        }
}

/* The number of the service, which runs then; 0: it cannot. */
static uint64_t serving(void)
{
        uint64_t number;

        gr_lock(&service_lock);
        if (service.running && !is_open(service.fd, service.inode))
                service.running = false; /* the thread will see it, too, and end */
        for (int tries = 0; !service.running && !service.stop && tries < TRIES; tries++)
                begin_service();
        number = service.running ? service.number : 0;
        gr_unlock(&service_lock);
        return number;
}

static bool is_own(const struct handle *handle)
{
        bool own;

        gr_lock(&service_lock);
        own = handle->service == service.number;
        gr_unlock(&service_lock);
        return own;
}

bool gr_segment_ipc_export(CUdeviceptr base, const struct gr_block_info *info, CUipcMemHandle *ret_handle)
{
        struct handle handle = {
                .magic = MAGIC, .base = base, .bytes = info->requested_bytes, .generation = info->generation};
        struct reply reply;
        int cancel;

        assert(info->live && info->split);
        /* A thread that is cancelled must not end here or below: its locks would stay locked. */
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
        describe(&handle, &reply);
        handle.memory = reply.memory;
        if (reply.good)
                handle.service = serving();
        pthread_setcancelstate(cancel, NULL);
        if (!handle.service)
                return false;
        memcpy(ret_handle, &handle, sizeof(*ret_handle));
        return true;
}

bool gr_segment_ipc_made(const CUipcMemHandle *handle)
{
        return memcmp(handle, &(uint64_t){MAGIC}, sizeof(uint64_t)) == 0;
}

/* The ordinal of the device with this UUID; -1: not seen here. */
static int device_of(const unsigned char uuid[16])
{
        CUuuid seen;
        int count = 0;

        if (!gr_real.cuDeviceGetUuid_v2 || !gr_real.cuDeviceGetCount ||
            gr_real.cuDeviceGetCount(&count) != CUDA_SUCCESS)
                return -1;
        for (int i = 0; i < count; i++)
                if (gr_real.cuDeviceGetUuid_v2(&seen, i) == CUDA_SUCCESS && memcmp(&seen, uuid, sizeof(seen)) == 0)
                        return i;
        return -1;
}

/* Maps the memory behind a descriptor, of bytes bytes, at `at`. */
static CUresult map_piece(CUdeviceptr at, size_t bytes, int fd)
{
        CUmemGenericAllocationHandle memory;
        CUresult result;

        gr_lock(&gr_mappings);
        result = gr_real.cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)fd,
                                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        if (result == CUDA_SUCCESS) {
                result = gr_real.cuMemMap(at, bytes, 0, memory, 0);
                gr_real.cuMemRelease(memory); /* the mapping keeps it */
        }
        gr_unlock(&gr_mappings);
        return result;
}

/* Unmaps the first bytes of what was mapped, and gives its addresses back. adopted: as map_for does. */
static CUresult unmap(CUdeviceptr at, size_t mapped_bytes, size_t all_bytes, bool adopted)
{
        CUresult result = CUDA_SUCCESS;

        gr_lock(&gr_mappings);
        for (int tries = 0; mapped_bytes > 0 && tries < TRIES; tries++) {
                result = gr_real.cuMemUnmap(at, mapped_bytes);
                if (result == CUDA_SUCCESS)
                        break;
        }
        if (result == CUDA_SUCCESS && adopted)
                gr_operations_drop(at);
        if (result == CUDA_SUCCESS)
                gr_real.cuMemAddressFree(at, all_bytes);
        gr_unlock(&gr_mappings);
        return result;
}

/* Receives all pieces and maps them side by side at `at`. *ret_mapped_bytes is always written. */
static CUresult map_all(int exporter, CUdeviceptr at, size_t all_bytes, size_t *ret_mapped_bytes, uint64_t deadline_ns)
{
        CUresult result = CUDA_SUCCESS;
        size_t mapped = 0;

        while (mapped < all_bytes && result == CUDA_SUCCESS) {
                uint64_t bytes;
                int fd;

                result = CUDA_ERROR_MAP_FAILED;
                if (!receive_message(exporter, &bytes, sizeof(bytes), &fd, deadline_ns))
                        break;
                if (bytes > 0 && bytes % GR_PAGE_BYTES == 0 && bytes <= all_bytes - mapped)
                        result = map_piece(at + mapped, bytes, fd);
                end_moment(fd);
                if (result == CUDA_SUCCESS)
                        mapped += bytes;
        }
        *ret_mapped_bytes = mapped;
        return result;
}

/* Maps all pieces where dev, and all devices that this process uses, can use them. */
static CUresult map_for(int exporter, CUdevice dev, struct opening *opening, uint64_t deadline_ns)
{
        int owner = opening->import.ordinal;
        size_t mapped = 0;
        CUresult result = gr_real.cuMemAddressReserve(&opening->at, opening->all_bytes, GR_PAGE_BYTES, 0, 0);

        if (result != CUDA_SUCCESS)
                return result;
        result = map_all(exporter, opening->at, opening->all_bytes, &mapped, deadline_ns);
        if (result == CUDA_SUCCESS) {
                gr_lock(&gr_mappings);
                result = gr_operations_adopt(opening->at, opening->all_bytes, owner < 0 ? dev : owner, 0);
                gr_unlock(&gr_mappings);
        }
        if (result != CUDA_SUCCESS)
                unmap(opening->at, mapped, opening->all_bytes, false);
        return result;
}

/*
 * Opens what the exporter at the other end of the socket offers, for the device dev. Fills all of opening but count.
 * *ret_again: it failed for a reason that may have gone when it is tried again.
 */
static CUresult take(int exporter, CUdevice dev, struct opening *opening, uint64_t deadline_ns, bool *ret_again)
{
        struct gr_segment_import *import = &opening->import;
        struct reply reply;
        CUresult result;

        *ret_again = true;
        if (!is_trusted(exporter, true))
                return CUDA_ERROR_INVALID_VALUE;
        if (!send_message(exporter, &opening->handle, sizeof(opening->handle), -1, deadline_ns) ||
            !receive_message(exporter, &reply, sizeof(reply), NULL, deadline_ns))
                return CUDA_ERROR_MAP_FAILED;
        if (!reply.good) {
                *ret_again = false;
                return CUDA_ERROR_INVALID_VALUE;
        }
        if (reply.all_bytes && (reply.all_bytes % GR_PAGE_BYTES || reply.offset_bytes >= reply.all_bytes ||
                                opening->handle.bytes > reply.all_bytes - reply.offset_bytes))
                return CUDA_ERROR_MAP_FAILED;
        opening->all_bytes = reply.all_bytes;
        import->ordinal = device_of(reply.device);
        result = reply.all_bytes ? map_for(exporter, dev, opening, deadline_ns)
                                 : gr_real.cuIpcOpenMemHandle_v2(&opening->at, reply.driver,
                                                                 CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        import->base = opening->at + reply.offset_bytes;
        import->bytes = opening->handle.bytes;
        return result;
}

/* As take, from the exporter that the handle names. */
static CUresult fetch(CUdevice dev, struct opening *opening, uint64_t deadline_ns, bool *ret_again)
{
        struct sockaddr_un address;
        socklen_t length = address_of(opening->handle.service, &address);
        CUresult result = CUDA_ERROR_MAP_FAILED;
        int exporter = begin_moment(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), rc;

        *ret_again = true;
        if (exporter < 0)
                return result;
        while ((rc = connect(exporter, (struct sockaddr *)&address, length)) != 0 &&
               (errno == EINTR || errno == EAGAIN) && gr_driver.now_ns() < deadline_ns)
                gr_driver.sleep_ns(PAUSE_NS); /* too many are waiting */
        if (rc == 0) {
                result = take(exporter, dev, opening, deadline_ns, ret_again);
        } else if (errno == ECONNREFUSED) {
                *ret_again = false;
                result = CUDA_ERROR_INVALID_VALUE;
        }
        end_moment(exporter);
        return result;
}

/* Lock held. The entry of a handle, in whatever context; NULL. */
GR_HELD(table_lock) static struct opening *opened(const struct handle *handle)
{
        struct opening *opening;

        gr_assert_locked(&table_lock);
        DL_FOREACH (openings, opening)
                if (memcmp(&opening->handle, handle, sizeof(*handle)) == 0)
                        return opening;
        return NULL;
}

/* Counts what is open as imported. Without memory for the entry it is not shown: the limit does not count it anyway. */
static void count_import(const struct opening *opening, struct gr_device *device)
{
        uint64_t bytes = (opening->import.bytes + GR_PAGE_BYTES - 1) & ~(uint64_t)(GR_PAGE_BYTES - 1);

        gr_budget_force(device, GR_MEMORY_IMPORTED, bytes);
        (void)gr_accounted_add(gr_core.accounted, device, GR_MEMORY_IMPORTED, opening->import.base,
                               opening->import.context, bytes);
}

/* Waits for all work of the context and gives back what an opening has. The driver does not wait when it unmaps. */
static CUresult close_memory(const struct opening *opening)
{
        struct gr_context *context = gr_context_find(&gr_core, opening->import.context);
        int rc = 0;

        if (!opening->all_bytes)
                return gr_real.cuIpcCloseMemHandle(opening->at);
        if (context)
                rc = gr_fence_wait_work(context->fence);
        return rc ? gr_result_of(rc) : unmap(opening->at, opening->all_bytes, opening->all_bytes, true);
}

/* Lock held. */
GR_HELD(table_lock) static void leave(struct opening *opening)
{
        gr_assert_locked(&table_lock);
        DL_DELETE(openings, opening);
        atomic_fetch_sub(&opening_count, 1);
        pthread_cond_broadcast(&state_changed);
}

/* This thread's new entry for a handle; NULL: none is needed, as it is open and *ret_import says what, or none can be had. */
static struct opening *begin_opening(CUcontext context, const struct handle *handle,
                                     struct gr_segment_import *ret_import, CUresult *ret_result)
{
        struct opening *opening;

        *ret_result = CUDA_SUCCESS;
        gr_lock(&table_lock);
        while ((opening = opened(handle)) && opening->state != OPEN)
                pthread_cond_wait(&state_changed, &table_lock.mutex);
        if (opening && opening->import.context != context) {
                *ret_result = CUDA_ERROR_INVALID_HANDLE; /* as the driver does */
                opening = NULL;
        } else if (opening) {
                opening->count++;
                *ret_import = opening->import;
                opening = NULL;
        } else if ((opening = calloc(1, sizeof(*opening)))) {
                opening->handle = *handle;
                opening->import.context = context;
                DL_APPEND(openings, opening);
                atomic_fetch_add(&opening_count, 1);
        } else {
                *ret_result = CUDA_ERROR_OUT_OF_MEMORY;
        }
        gr_unlock(&table_lock);
        return opening;
}

/* Fetches what a new entry stands for. On failure the entry is gone. */
static CUresult finish_opening(CUdevice dev, struct opening *opening)
{
        uint64_t deadline_ns = gr_driver.now_ns() + OPEN_NS;
        CUresult result = CUDA_ERROR_MAP_FAILED;
        struct gr_device *device;
        bool again = true, ended;

        for (int tries = 0; result != CUDA_SUCCESS && again && tries < TRIES; tries++)
                result = fetch(dev, opening, deadline_ns, &again);
        if (result == CUDA_SUCCESS) {
                device = opening->import.ordinal >= 0 ? gr_device_get(opening->import.ordinal) : NULL;
                count_import(opening, device ? device : gr_device_get(dev));
        }
        gr_lock(&table_lock);
        ended = opening->ended;
        if (result == CUDA_SUCCESS && !ended) {
                opening->count = 1;
                opening->state = OPEN;
                pthread_cond_broadcast(&state_changed);
        } else {
                leave(opening);
        }
        gr_unlock(&table_lock);
        if (result == CUDA_SUCCESS && !ended)
                return result;
        if (result == CUDA_SUCCESS) {
                gr_accounted_drop_owner(gr_core.accounted, opening->import.context);
                if (opening->all_bytes)
                        unmap(opening->at, opening->all_bytes, opening->all_bytes, true);
                result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
        }
        free(opening);
        return result;
}

CUresult gr_segment_ipc_open(CUcontext context, CUdevice dev, const CUipcMemHandle *handle, CUdeviceptr *ret_ptr)
{
        struct gr_segment_import import;
        struct opening *opening;
        struct handle wanted;
        CUresult result;
        int cancel;

        assert(gr_segment_ipc_made(handle));
        memcpy(&wanted, handle, sizeof(wanted));
        if (is_own(&wanted))
                return CUDA_ERROR_INVALID_CONTEXT;
        if (!gr_driver.mem_reserve || !gr_real.cuIpcOpenMemHandle_v2)
                return CUDA_ERROR_INVALID_VALUE;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
        opening = begin_opening(context, &wanted, &import, &result);
        if (opening) {
                result = finish_opening(dev, opening);
                if (result == CUDA_SUCCESS)
                        import = opening->import;
        }
        pthread_setcancelstate(cancel, NULL);
        if (result == CUDA_SUCCESS)
                *ret_ptr = import.base;
        return result;
}

int gr_segment_ipc_find(CUdeviceptr ptr, struct gr_segment_import *ret_import)
{
        struct opening *opening;
        int rc = -ENOENT;

        if (atomic_load_explicit(&opening_count, memory_order_relaxed) == 0)
                return rc;
        gr_lock(&table_lock);
        DL_FOREACH (openings, opening)
                if (opening->state != OPENING && ptr - opening->import.base < opening->import.bytes) {
                        *ret_import = opening->import;
                        rc = 0;
                        break;
                }
        gr_unlock(&table_lock);
        return rc;
}

/* Gives back what one entry has, which this thread alone may change. */
static CUresult finish_closing(struct opening *opening)
{
        struct gr_accounted *entry = gr_accounted_take(gr_core.accounted, GR_MEMORY_IMPORTED, opening->import.base);
        CUresult result = close_memory(opening);
        bool gone;

        gr_accounted_settle(gr_core.accounted, entry, result == CUDA_SUCCESS);
        gr_lock(&table_lock);
        gone = result == CUDA_SUCCESS || opening->ended;
        if (gone) {
                leave(opening);
        } else {
                opening->state = OPEN;
                pthread_cond_broadcast(&state_changed);
        }
        gr_unlock(&table_lock);
        if (!gone)
                return result;
        if (result != CUDA_SUCCESS && opening->all_bytes)
                result = unmap(opening->at, opening->all_bytes, opening->all_bytes, true);
        free(opening);
        return result;
}

int gr_segment_ipc_close(CUdeviceptr base, CUresult *ret_result)
{
        struct opening *opening;
        bool last = false;
        int cancel;

        if (atomic_load_explicit(&opening_count, memory_order_relaxed) == 0)
                return -ENOENT;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
        gr_lock(&table_lock);
        DL_FOREACH (openings, opening)
                if (opening->state == OPEN && opening->import.base == base)
                        break;
        if (opening) {
                last = opening->count == 1;
                opening->count -= !last;
                opening->state = last ? CLOSING : OPEN;
        }
        gr_unlock(&table_lock);
        if (opening)
                *ret_result = last ? finish_closing(opening) : CUDA_SUCCESS;
        pthread_setcancelstate(cancel, NULL);
        return opening ? 0 : -ENOENT;
}

void gr_segment_ipc_end(CUcontext context)
{
        struct opening *opening, *tmp, *ended = NULL;

        if (atomic_load(&opening_count) == 0)
                return;
        gr_lock(&table_lock);
        DL_FOREACH_SAFE (openings, opening, tmp)
                if (opening->import.context == context) {
                        opening->ended = true; /* where another thread is at it, that one cleans up */
                        if (opening->state == OPEN) {
                                leave(opening);
                                DL_APPEND(ended, opening);
                        }
                }
        gr_unlock(&table_lock);
        DL_FOREACH_SAFE (ended, opening, tmp) {
                if (opening->all_bytes)
                        unmap(opening->at, opening->all_bytes, opening->all_bytes, true);
                free(opening);
        }
}

void gr_segment_ipc_stop(void)
{
        gr_lock(&service_lock);
        service.stop = true;
        if (service.running && is_open(service.fd, service.inode))
                shutdown(service.fd, SHUT_RDWR); /* wakes the thread */
        gr_unlock(&service_lock);
}

/* The child has one thread, and the locks may be held by others that it has not. */
GR_NOT_CHECKED void gr_segment_ipc_forget(void)
{
        if (service.running && is_open(service.fd, service.inode))
                close(service.fd);
        for (size_t i = 0; i < sizeof(moments) / sizeof(moments[0]); i++) {
                int fd = atomic_exchange(&moments[i], 0) - 1;

                if (fd >= 0)
                        close(fd);
        }
}
