#include "system/messages.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "system/platform.h"

#define REGISTER_MAX 256

/*
 * The register: each descriptor plus 1; 0: a free place. A child that the program forks closes what is in it, because
 * memory of a device stays as long as a descriptor of it is open anywhere.
 */
static _Atomic int registered[REGISTER_MAX];

int gr_message_off_streams(int fd)
{
        int moved;

        if (fd < 0 || fd > STDERR_FILENO)
                return fd;
        moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        close(fd);
        return moved;
}

int gr_message_begin(int fd)
{
        int moved = gr_message_off_streams(fd), none;

        assert(moved < 0 || moved > STDERR_FILENO);
        for (size_t i = 0; moved >= 0 && i < sizeof(registered) / sizeof(registered[0]); i++) {
                none = 0;
                if (atomic_compare_exchange_strong(&registered[i], &none, moved + 1))
                        break;
        }
        return moved;
}

void gr_message_end(int fd)
{
        int open;

        assert(fd > STDERR_FILENO); /* as gr_message_begin returned it */
        for (size_t i = 0; i < sizeof(registered) / sizeof(registered[0]); i++) {
                open = fd + 1;
                if (atomic_compare_exchange_strong(&registered[i], &open, 0))
                        break;
        }
        close(fd);
}

socklen_t gr_message_address(uint64_t number, struct sockaddr_un *address)
{
        int length;

        *address = (struct sockaddr_un){.sun_family = AF_UNIX};
        length = snprintf(&address->sun_path[1], sizeof(address->sun_path) - 1, "gpureclaim-%016llx",
                          (unsigned long long)number);
        assert(length > 0 && (size_t)length < sizeof(address->sun_path) - 1);
        return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

/* Waits until a socket can be read (POLLIN) or written (POLLOUT). False: it was not ready by deadline_ns. */
static bool is_ready(int fd, short events, uint64_t deadline_ns)
{
        struct pollfd look = {.fd = fd, .events = events};

        for (;;) {
                uint64_t now_ns = gr_platform_now_ns();
                int rc = poll(&look, 1, now_ns < deadline_ns ? (int)((deadline_ns - now_ns) / 1000000) + 1 : 0);

                if (rc > 0)
                        return true;
                if ((rc < 0 && errno != EINTR) || now_ns >= deadline_ns)
                        return false;
        }
}

bool gr_message_is_trusted(int fd, bool may_serve)
{
        struct ucred peer;
        socklen_t bytes = sizeof(peer);

        return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
               (peer.uid == geteuid() || peer.uid == 0 || (may_serve && geteuid() == 0));
}

bool gr_message_send(int socket, const void *data, size_t bytes, int fd, uint64_t deadline_ns)
{
        struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
        union {
                struct cmsghdr header;
                char room[CMSG_SPACE(sizeof(int))];
        } control = {0};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
        ssize_t sent;

        assert(socket >= 0 && bytes > 0);
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

bool gr_message_receive(int socket, void *data, size_t bytes, int *ret_fd, uint64_t deadline_ns)
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

        assert(socket >= 0 && bytes > 0);
        do
                received = is_ready(socket, POLLIN, deadline_ns)
                                   ? recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)
                                   : 0;
        while (received < 0 && (errno == EINTR || errno == EAGAIN));
        header = received > 0 ? CMSG_FIRSTHDR(&message) : NULL;
        if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
                count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int); /* the padded room may hold more than one */
                assert(count <= sizeof(fds) / sizeof(fds[0])); /* the kernel wrote no more than there is room */
                memcpy(fds, CMSG_DATA(header), count * sizeof(int));
        }
        if (received == (ssize_t)bytes && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) &&
            count == (ret_fd ? 1 : 0)) {
                if (ret_fd)
                        *ret_fd = gr_message_begin(fds[0]);
                return !ret_fd || *ret_fd >= 0;
        }
        while (count > 0)
                close(fds[--count]);
        return false;
}

void gr_message_forget(void)
{
        for (size_t i = 0; i < REGISTER_MAX; i++) {
                int fd = atomic_exchange(&registered[i], 0) - 1;

                if (fd >= 0)
                        close(fd);
        }
}
