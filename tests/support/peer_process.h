/*
 * Another process of the same program, and messages to it, with descriptors. A failure ends the program with status 1.
 */
#ifndef GR_TEST_PEER_PROCESS_H
#define GR_TEST_PEER_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* Runs "program mode SOCKET"; plain: without what is preloaded. The caller closes *ret_socket, and waits for the
 * process. */
pid_t peer_start(char *program, char *mode, bool plain, int *ret_socket);

/* One message; fd goes along unless it is -1, and stays the caller's. */
void peer_send(int socket, const void *data, size_t bytes, int fd);

/* False at the end. *ret_fd, the caller's to close, is -1 where none came. */
bool peer_receive(int socket, void *data, size_t bytes, int *ret_fd);

#endif
