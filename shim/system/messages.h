/*
 * Messages between processes of this library, with descriptors: over Unix sockets of kind SOCK_SEQPACKET that have
 * abstract names. There is no CUDA in this file. Any thread may call these functions; errno is not kept. deadline_ns is
 * by gr_platform_now_ns.
 */
#ifndef GR_MESSAGES_H
#define GR_MESSAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

/* The address with a number in its name. Returns its length. */
socklen_t gr_message_address(uint64_t number, struct sockaddr_un *address);

/*
 * A descriptor that has just been opened, under a number that is none of the standard streams', should the program have
 * closed these. -1: it was none, or there is no other number.
 */
int gr_message_off_streams(int fd);

/*
 * The same, for a descriptor that is open for a moment only, until gr_message_end closes it: a child that the program
 * forks meanwhile closes it, too (gr_message_forget).
 */
int gr_message_begin(int fd);
void gr_message_end(int fd);

/* Whether the process at the other end has the user of this one, or is root's; may_serve: or this one is. */
bool gr_message_is_trusted(int fd, bool may_serve);

/* Sends one message, with a descriptor where that is not -1. False: not until deadline_ns, or an error. */
bool gr_message_send(int socket, const void *data, size_t bytes, int fd, uint64_t deadline_ns);

/*
 * Receives one message of this length with one descriptor, for gr_message_end, or with none: ret_fd is NULL. False:
 * another one, none until deadline_ns, or an error.
 */
bool gr_message_receive(int socket, void *data, size_t bytes, int *ret_fd, uint64_t deadline_ns);

/* In a child after fork: closes what is open for a moment. */
void gr_message_forget(void);

#endif
