#include "peer_process.h"

#include "gputest.h"

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

extern char **environ;

void peer_send(int socket, const void *data, size_t bytes, int fd)
{
        char room[CMSG_SPACE(sizeof fd)] __attribute__((aligned(8))) = {0};
        struct iovec piece = {(void *)(uintptr_t)data, bytes};
        struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};

        if (fd >= 0) {
                struct cmsghdr *header;

                message.msg_control = room;
                message.msg_controllen = sizeof room;
                header = CMSG_FIRSTHDR(&message);
                header->cmsg_level = SOL_SOCKET;
                header->cmsg_type = SCM_RIGHTS;
                header->cmsg_len = CMSG_LEN(sizeof fd);
                memcpy(CMSG_DATA(header), &fd, sizeof fd);
        }
        if (sendmsg(socket, &message, MSG_NOSIGNAL) != (ssize_t)bytes)
                gt_die("the other process is gone");
}

bool peer_receive(int socket, void *data, size_t bytes, int *ret_fd)
{
        char room[CMSG_SPACE(sizeof *ret_fd)] __attribute__((aligned(8)));
        struct iovec piece = {data, bytes};
        struct msghdr message = {
                .msg_iov = &piece, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
        struct cmsghdr *header;

        if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != (ssize_t)bytes)
                return false;
        header = CMSG_FIRSTHDR(&message);
        *ret_fd = -1;
        if (header && header->cmsg_type == SCM_RIGHTS)
                memcpy(ret_fd, CMSG_DATA(header), sizeof *ret_fd);
        return true;
}

pid_t peer_start(char *program, char *mode, bool plain, int *ret_socket)
{
        char end[12], *arguments[] = {program, mode, end, NULL};
        int ends[2];
        pid_t pid;

        /* Messages keep their bounds; the other end closes where the program is another. */
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
                gt_die("no sockets");
        *ret_socket = ends[0];
        snprintf(end, sizeof end, "%d", dup(ends[1]));
        close(ends[1]);
        if (plain)
                unsetenv("LD_PRELOAD");
        if (posix_spawn(&pid, program, NULL, NULL, arguments, environ) != 0)
                gt_die("no other process");
        close(atoi(end));
        return pid;
}
