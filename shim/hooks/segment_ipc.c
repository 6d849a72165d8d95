#include "hooks/segment_ipc.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <utlist.h>

#include "driver/operations.h"
#include "driver/real.h"
#include "system/platform.h"
#include "system/workers.h"

#define MAGIC        UINT64_C(0x6d65726c75707267) /* no handle of the driver begins so */
#define BACKLOG      64
#define TRIES        2 /* what fails once, for want of something, is tried again */
#define PAUSE_NS     UINT64_C(10000000)
#define LOOK_MS      400 /* longest sleep of the thread, as it delays the end of a process left alone */
#define ASKER_WAIT_S 5   /* longest that the thread waits for one asker, while others wait */
#define REPLY_WAIT_S 30  /* longest that an importer waits for the next message */

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

struct opening {
        struct opening *prev, *next;
        struct handle handle;
        struct gr_segment_import import;
        CUdeviceptr at;   /* of the first piece, or of the allocation */
        size_t all_bytes; /* of all pieces; 0: it is an allocation, opened by the driver */
        unsigned count;
};

/* The exporter's side. */
static struct gr_lock service_lock = GR_LOCK_INIT(GR_RANK_IPC);
static struct {
        uint64_t number; /* 0: none yet */
        int fd;
        ino_t inode; /* of the socket: the program may have closed fd, and opened something else */
        bool running, stop;
} service GR_GUARDED_BY(service_lock) = {.fd = -1};

/* The importer's side. */
static struct gr_lock opening_lock = GR_LOCK_INIT(GR_RANK_IPC); /* held while memory is opened or closed */
static struct gr_lock table_lock = GR_LOCK_INIT(GR_RANK_IMPORTS);
static struct opening *openings GR_GUARDED_BY(table_lock);
static _Atomic size_t opening_count;

/* A socket that takes none of the numbers of the standard streams, should the program have closed these. -1: none. */
static int new_socket(int flags)
{
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0), moved;

        if (fd < 0 || fd > STDERR_FILENO)
                return fd;
        moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        close(fd);
        return moved;
}

static socklen_t address_of(uint64_t number, struct sockaddr_un *address)
{
        int length;

        *address = (struct sockaddr_un){.sun_family = AF_UNIX};
        length = snprintf(&address->sun_path[1], sizeof(address->sun_path) - 1, "gpureclaim-%016llx",
                          (unsigned long long)number);
        return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static void wait_at_most(int fd, int seconds)
{
        const struct timeval most = {.tv_sec = seconds};

        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most));
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof(most));
}

/* Whether the process at the other end has the user of this one, or is root's; may_serve: or this one is. */
static bool is_trusted(int fd, bool may_serve)
{
        struct ucred peer;
        socklen_t bytes = sizeof(peer);

        return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
               (peer.uid == geteuid() || peer.uid == 0 || (may_serve && geteuid() == 0));
}

/* Sends one message, with a descriptor where that is not -1. */
static bool send_message(int socket, const void *data, size_t bytes, int fd)
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
                sent = sendmsg(socket, &message, MSG_NOSIGNAL);
        while (sent < 0 && errno == EINTR);
        return sent == (ssize_t)bytes;
}

/* Receives one message of this length; *ret_fd: its descriptor, or -1. */
static bool receive_message(int socket, void *data, size_t bytes, int *ret_fd)
{
        struct iovec part = {.iov_base = data, .iov_len = bytes};
        union {
                struct cmsghdr header;
                char room[CMSG_SPACE(sizeof(int))];
        } control = {0};
        struct msghdr message = {
                .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof(control.room)};
        struct cmsghdr *header;
        ssize_t received;

        *ret_fd = -1;
        do
                received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
        while (received < 0 && errno == EINTR);
        header = received >= 0 ? CMSG_FIRSTHDR(&message) : NULL;
        if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)))
                memcpy(ret_fd, CMSG_DATA(header), sizeof(*ret_fd));
        if (received == (ssize_t)bytes && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
                return true;
        if (*ret_fd >= 0)
                close(*ret_fd);
        *ret_fd = -1;
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

/* One process that has connected. */
static void answer(int asker)
{
        struct gr_block_info info;
        struct handle handle;
        struct reply reply;
        bool good = true;
        int fd;

        wait_at_most(asker, ASKER_WAIT_S);
        if (!is_trusted(asker, false) || !receive_message(asker, &handle, sizeof(handle), &fd))
                return;
        if (fd >= 0)
                close(fd); /* nobody needs to send one */
        describe(&handle, &reply);
        good = send_message(asker, &reply, sizeof(reply), -1) && reply.good;
        for (CUdeviceptr at = handle.base; good && reply.all_bytes && at < handle.base + handle.bytes;) {
                struct gr_piece piece;
                uint64_t bytes;

                /* One by one, as a process may not have as many descriptors as a large block has pieces. */
                gr_lock(&gr_mappings);
                good = is_there(&handle, &info) && gr_operations_export(at, &piece, &fd) == CUDA_SUCCESS;
                gr_unlock(&gr_mappings);
                if (!good)
                        return;
                bytes = piece.bytes;
                good = send_message(asker, &bytes, sizeof(bytes), fd);
                close(fd);
                at = piece.ptr + bytes;
        }
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
                        asker = accept4(look.fd, NULL, NULL, SOCK_CLOEXEC);
                        if (asker >= 0) {
                                answer(asker);
                                close(asker);
                        } else {
                                gr_driver.sleep_ns(PAUSE_NS); /* there may be no descriptor left */
                        }
                }
                gr_lock(&service_lock);
        }
        if (is_open(look.fd, inode))
                close(look.fd);
        service.fd = -1;
        service.running = false;
        gr_unlock(&service_lock);
        return NULL;
}

/* Lock held. Opens the socket and starts the thread, unless one of these cannot be had. */
GR_HELD(service_lock) static void begin_service(void)
{
        struct sockaddr_un address;
        struct stat status;
        socklen_t length;

        gr_assert_locked(&service_lock);
        /* Never 0, which stands for none. The name stays when the thread has to start again. */
        while (!service.number)
                if (getrandom(&service.number, sizeof(service.number), 0) != (ssize_t)sizeof(service.number))
                        return;
        length = address_of(service.number, &address);
        service.fd = new_socket(SOCK_NONBLOCK);
        if (service.fd < 0)
                return;
        if (bind(service.fd, (struct sockaddr *)&address, length) == 0 && listen(service.fd, BACKLOG) == 0 &&
            fstat(service.fd, &status) == 0) {
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

        assert(info->live && info->split);
        describe(&handle, &reply);
        handle.memory = reply.memory;
        if (reply.good)
                handle.service = serving();
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
static CUresult map_all(int exporter, CUdeviceptr at, size_t all_bytes, size_t *ret_mapped_bytes)
{
        CUresult result = CUDA_SUCCESS;
        size_t mapped = 0;

        while (mapped < all_bytes && result == CUDA_SUCCESS) {
                uint64_t bytes;
                int fd;

                result = CUDA_ERROR_MAP_FAILED;
                if (!receive_message(exporter, &bytes, sizeof(bytes), &fd))
                        break;
                if (fd >= 0 && bytes > 0 && bytes % GR_PAGE_BYTES == 0 && bytes <= all_bytes - mapped)
                        result = map_piece(at + mapped, bytes, fd);
                if (fd >= 0)
                        close(fd);
                if (result == CUDA_SUCCESS)
                        mapped += bytes;
        }
        *ret_mapped_bytes = mapped;
        return result;
}

/* Maps all pieces where dev, and all devices that this process uses, can use them. */
static CUresult map_for(int exporter, CUdevice dev, struct opening *opening)
{
        int owner = opening->import.ordinal;
        size_t mapped = 0;
        CUresult result = gr_real.cuMemAddressReserve(&opening->at, opening->all_bytes, GR_PAGE_BYTES, 0, 0);

        if (result != CUDA_SUCCESS)
                return result;
        result = map_all(exporter, opening->at, opening->all_bytes, &mapped);
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
static CUresult take(int exporter, CUdevice dev, struct opening *opening, bool *ret_again)
{
        struct gr_segment_import *import = &opening->import;
        struct reply reply;
        CUresult result;
        int none;

        *ret_again = true;
        if (!is_trusted(exporter, true))
                return CUDA_ERROR_INVALID_VALUE;
        if (!send_message(exporter, &opening->handle, sizeof(opening->handle), -1) ||
            !receive_message(exporter, &reply, sizeof(reply), &none))
                return CUDA_ERROR_MAP_FAILED;
        if (none >= 0)
                close(none);
        if (!reply.good) {
                *ret_again = false;
                return CUDA_ERROR_INVALID_VALUE;
        }
        if (reply.all_bytes && (reply.all_bytes % GR_PAGE_BYTES || reply.offset_bytes >= reply.all_bytes ||
                                opening->handle.bytes > reply.all_bytes - reply.offset_bytes))
                return CUDA_ERROR_MAP_FAILED;
        opening->all_bytes = reply.all_bytes;
        import->ordinal = device_of(reply.device);
        result = reply.all_bytes ? map_for(exporter, dev, opening)
                                 : gr_real.cuIpcOpenMemHandle_v2(&opening->at, reply.driver,
                                                                 CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        import->base = opening->at + reply.offset_bytes;
        import->bytes = opening->handle.bytes;
        return result;
}

/* As take, from the exporter that the handle names. */
static CUresult fetch(CUdevice dev, struct opening *opening, bool *ret_again)
{
        struct sockaddr_un address;
        socklen_t length = address_of(opening->handle.service, &address);
        CUresult result = CUDA_ERROR_MAP_FAILED;
        int exporter = new_socket(0), rc;

        *ret_again = true;
        if (exporter < 0)
                return result;
        wait_at_most(exporter, REPLY_WAIT_S);
        do
                rc = connect(exporter, (struct sockaddr *)&address, length);
        while (rc != 0 && errno == EINTR);
        if (rc == 0) {
                result = take(exporter, dev, opening, ret_again);
        } else if (errno == ECONNREFUSED) {
                *ret_again = false;
                result = CUDA_ERROR_INVALID_VALUE;
        }
        close(exporter);
        return result;
}

/* Lock held. */
GR_HELD(table_lock) static struct opening *opened(CUcontext context, const struct handle *handle)
{
        struct opening *opening;

        gr_assert_locked(&table_lock);
        DL_FOREACH (openings, opening)
                if (opening->import.context == context && memcmp(&opening->handle, handle, sizeof(*handle)) == 0)
                        return opening;
        return NULL;
}

CUresult gr_segment_ipc_open(CUcontext context, CUdevice dev, const CUipcMemHandle *handle,
                             struct gr_segment_import *ret_import, bool *ret_first)
{
        CUresult result = CUDA_SUCCESS;
        struct opening *opening;
        struct handle wanted;
        bool first = false, again = true;

        assert(gr_segment_ipc_made(handle));
        memcpy(&wanted, handle, sizeof(wanted));
        if (is_own(&wanted))
                return CUDA_ERROR_INVALID_CONTEXT;
        if (!gr_driver.mem_reserve || !gr_real.cuIpcOpenMemHandle_v2)
                return CUDA_ERROR_INVALID_VALUE;
        gr_lock(&opening_lock);
        gr_lock(&table_lock);
        opening = opened(context, &wanted);
        gr_unlock(&table_lock);
        if (!opening) {
                opening = calloc(1, sizeof(*opening));
                if (!opening) {
                        gr_unlock(&opening_lock);
                        return CUDA_ERROR_OUT_OF_MEMORY;
                }
                opening->handle = wanted;
                opening->import.context = context;
                first = true;
                result = CUDA_ERROR_MAP_FAILED;
                for (int tries = 0; result != CUDA_SUCCESS && again && tries < TRIES; tries++)
                        result = fetch(dev, opening, &again);
        }
        if (result == CUDA_SUCCESS) {
                opening->count++;
                *ret_import = opening->import;
                *ret_first = first;
                gr_lock(&table_lock);
                if (first) {
                        DL_APPEND(openings, opening);
                        atomic_fetch_add(&opening_count, 1);
                }
                gr_unlock(&table_lock);
        } else {
                free(opening);
        }
        gr_unlock(&opening_lock);
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
                if (ptr - opening->import.base < opening->import.bytes) {
                        *ret_import = opening->import;
                        rc = 0;
                        break;
                }
        gr_unlock(&table_lock);
        return rc;
}

/* Lock held. Takes an opening out of the table. */
GR_HELD(table_lock) static void leave(struct opening *opening)
{
        gr_assert_locked(&table_lock);
        DL_DELETE(openings, opening);
        atomic_fetch_sub(&opening_count, 1);
}

/* Gives back what an opening has. The driver does not wait when memory is unmapped. */
static CUresult close_memory(const struct opening *opening)
{
        int rc;

        if (!opening->all_bytes)
                return gr_real.cuIpcCloseMemHandle(opening->at);
        rc = gr_driver.context_sync(opening->import.context);
        if (rc && gr_driver.context_drain) /* while there is a capture only this one is not refused */
                rc = gr_driver.context_drain(opening->import.context);
        return rc ? gr_result_of(rc) : unmap(opening->at, opening->all_bytes, opening->all_bytes, true);
}

int gr_segment_ipc_close(CUdeviceptr base, CUresult *ret_result, bool *ret_last)
{
        struct opening *opening;

        if (atomic_load_explicit(&opening_count, memory_order_relaxed) == 0)
                return -ENOENT;
        gr_lock(&opening_lock);
        gr_lock(&table_lock);
        DL_FOREACH (openings, opening)
                if (opening->import.base == base)
                        break;
        gr_unlock(&table_lock);
        if (!opening) {
                gr_unlock(&opening_lock);
                return -ENOENT;
        }
        *ret_last = opening->count == 1;
        *ret_result = CUDA_SUCCESS;
        if (*ret_last) {
                *ret_result = close_memory(opening);
                *ret_last = *ret_result == CUDA_SUCCESS;
        }
        if (*ret_result == CUDA_SUCCESS && --opening->count == 0) {
                gr_lock(&table_lock);
                leave(opening);
                gr_unlock(&table_lock);
                free(opening);
        }
        gr_unlock(&opening_lock);
        return 0;
}

void gr_segment_ipc_end(CUcontext context)
{
        struct opening *opening, *tmp, *ended = NULL;

        if (atomic_load(&opening_count) == 0)
                return;
        gr_lock(&opening_lock);
        gr_lock(&table_lock);
        DL_FOREACH_SAFE (openings, opening, tmp)
                if (opening->import.context == context) {
                        leave(opening);
                        DL_APPEND(ended, opening);
                }
        gr_unlock(&table_lock);
        DL_FOREACH_SAFE (ended, opening, tmp) {
                if (opening->all_bytes)
                        unmap(opening->at, opening->all_bytes, opening->all_bytes, true);
                free(opening);
        }
        gr_unlock(&opening_lock);
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
}
