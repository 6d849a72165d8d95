/*
 * Messages, which may carry a file descriptor, between processes that use this library. They go over Unix sockets of
 * type SOCK_SEQPACKET with abstract names. There is no CUDA in this file. Any thread may call these functions; they may
 * change errno. deadline_ns is a time on the clock of gr_platform_now_ns.
 */
#ifndef GR_MESSAGES_H
#define GR_MESSAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

/* Writes the address whose name contains the number. Returns its length. */
socklen_t gr_message_address(uint64_t number, struct sockaddr_un *address);

/*
 * For a descriptor that has just been opened. If it is 0, 1 or 2, moves it to a higher number: the program has closed
 * a standard stream, and may still print to it. Returns the number; -1: fd was negative, or no higher number is free.
 */
int gr_message_off_streams(int fd);

/*
 * As gr_message_off_streams, and registers the descriptor until gr_message_end closes it. A child that the program
 * forks meanwhile closes what is registered (gr_message_forget); if the register is full, it stays open in the child.
 */
int gr_message_begin(int fd);
void gr_message_end(int fd);

/*
 * Whether the process at the other end belongs to the user of this one, or to root. With may_serve, a process of root
 * trusts every other process.
 */
bool gr_message_is_trusted(int fd, bool may_serve);

/* Sends one message, and fd with it unless that is -1. False: it could not be sent by deadline_ns, or an error. */
bool gr_message_send(int socket, const void *data, size_t bytes, int fd, uint64_t deadline_ns);

/*
 * Receives one message of exactly this length. One descriptor must come with it, which the caller closes by
 * gr_message_end, or none where ret_fd is NULL. False: a different message came, none by deadline_ns, or an error.
 */
bool gr_message_receive(int socket, void *data, size_t bytes, int *ret_fd, uint64_t deadline_ns);

/* In a child after fork: closes all that is registered. */
void gr_message_forget(void);

#endif
