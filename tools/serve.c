/* gpureclaim serve: the page of gpureclaim metrics over HTTP. */
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "command.h"
#include "metrics.h"

#define CONNECTIONS 8u
#define TIMEOUT_S   10u

static enum MHD_Result send_reply(struct MHD_Connection *connection, unsigned status, const char *type, char *text,
                                  size_t length)
{
        struct MHD_Response *response = MHD_create_response_from_buffer(length, text, MHD_RESPMEM_MUST_COPY);
        enum MHD_Result result;

        if (!response)
                return MHD_NO;
        MHD_add_response_header(response, "Content-Type", type);
        if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
                MHD_add_response_header(response, "Allow", "GET, HEAD");
        result = MHD_queue_response(connection, status, response);
        MHD_destroy_response(response);
        return result;
}

/*
 * How much a reader wants this type, from 0 to 1, or -1 where its list does not have it. accept: the list, such as
 * "a/b;c=1;q=0.5, d/e", or NULL.
 */
static double quality(const char *accept, const char *type)
{
        size_t length = strlen(type);
        double most = -1;

        for (const char *at = accept; at; at = strchr(at, ','), at += at != NULL) {
                const char *part = at + strspn(at, " \t"), *end = at + strcspn(at, ",");
                double wanted = 1;

                if (strncasecmp(part, type, length) != 0 || !strchr(",; \t", part[length]))
                        continue;
                while ((part = memchr(part, ';', (size_t)(end - part)))) {
                        part += 1 + strspn(part + 1, " \t");
                        if (strncasecmp(part, "q=", 2) == 0)
                                wanted = strtod(part + 2, NULL);
                }
                most = wanted > most ? wanted : most;
        }
        return most;
}

/* Whether the reader wants OpenMetrics: it has to name that type, as readers that take anything may not know it. */
static bool wants_open_metrics(const char *accept)
{
        static const char *const plain[] = {"text/plain", "text/*", "*/*"}; /* the first of these in the list holds */
        double open = quality(accept, "application/openmetrics-text"), other = -1;

        for (size_t i = 0; i < sizeof(plain) / sizeof(plain[0]) && other < 0; i++)
                other = quality(accept, plain[i]);
        return open > 0 && open >= other;
}

/* Called by one thread, that of the server. */
static enum MHD_Result answer_request(void *arg, struct MHD_Connection *connection, const char *url, const char *method,
                                      const char *version, const char *data, size_t *data_bytes, void **state)
{
        const char *accept = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Accept"), *wrong;
        bool open_metrics = wants_open_metrics(accept);
        enum MHD_Result result;
        char text[256], *page;
        unsigned status;
        size_t length;

        (void)arg, (void)version, (void)data, (void)data_bytes, (void)state;
        if (strcmp(url, "/metrics") != 0) {
                status = MHD_HTTP_NOT_FOUND;
                snprintf(text, sizeof(text), "Only /metrics is here.\n");
        } else if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0) {
                status = MHD_HTTP_METHOD_NOT_ALLOWED;
                snprintf(text, sizeof(text), "Only GET is answered.\n");
        } else {
                wrong = make_metrics(open_metrics, &page, &length);
                if (!wrong) {
                        result = send_reply(connection, MHD_HTTP_OK,
                                            open_metrics ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
                                                         : "text/plain; version=0.0.4; charset=utf-8",
                                            page, length);
                        free(page);
                        return result;
                }
                status = MHD_HTTP_INTERNAL_SERVER_ERROR;
                snprintf(text, sizeof(text), "The shared memory cannot be read: %s.\n", wrong);
        }
        return send_reply(connection, status, "text/plain; charset=utf-8", text, strlen(text));
}

/*
 * A connection begins or ends; called by the server's thread. A reader that sends a byte now and then never times out:
 * so that there is a place for the next one, the oldest has to go.
 */
static void note_connection(void *arg, struct MHD_Connection *connection, void **state,
                            enum MHD_ConnectionNotificationCode code)
{
        static int fds[CONNECTIONS]; /* of those that are open, the oldest first */
        static unsigned count;
        int fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        unsigned at = 0;

        (void)arg, (void)state;
        if (code == MHD_CONNECTION_NOTIFY_STARTED && count < CONNECTIONS) {
                fds[count++] = fd;
                if (count == CONNECTIONS)
                        shutdown(fds[0], SHUT_RDWR);
        } else if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
                while (at < count && fds[at] != fd)
                        at++;
                if (at < count)
                        memmove(&fds[at], &fds[at + 1], (--count - at) * sizeof(fds[0]));
        }
}

/* A socket that listens at HOST:PORT or [HOST]:PORT, or -1: it has complained; *ret_status is the exit status. */
static int listen_at(const char *address, int *ret_status)
{
        const struct addrinfo hints = {.ai_flags = AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
        const char *colon = strrchr(address, ':');
        struct addrinfo *found;
        int fd, rc, on = 1;
        char host[256];
        size_t length;

        *ret_status = STATUS_USAGE;
        if (address[0] == '[' && colon && colon[-1] == ']')
                length = (size_t)snprintf(host, sizeof(host), "%.*s", (int)(colon - address - 2), address + 1);
        else
                length = (size_t)snprintf(host, sizeof(host), "%.*s", colon ? (int)(colon - address) : 0, address);
        if (length == 0 || length >= sizeof(host) || !colon[1] ||
            strlen(colon + 1) != strspn(colon + 1, "0123456789") || strlen(colon + 1) > 5 || atoi(colon + 1) > 65535) {
                complain("serve: --listen %s: not understood (expected HOST:PORT, such as 127.0.0.1:9835)", address);
                return -1;
        }
        *ret_status = EXIT_FAILURE;
        rc = getaddrinfo(host, colon + 1, &hints, &found);
        if (rc) {
                complain("serve: --listen %s: %s", address, rc == EAI_SYSTEM ? strerror(errno) : gai_strerror(rc));
                return -1;
        }
        fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        /* The address may be used again at once after an end. */
        if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
            bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, (int)CONNECTIONS) != 0) {
                complain("serve: cannot listen at %s: %s", address, strerror(errno));
                if (fd >= 0)
                        close(fd);
                fd = -1;
        }
        freeaddrinfo(found);
        return fd;
}

int command_serve(const struct arguments *arguments)
{
        const char *address = flag_value(arguments, "listen");
        char host[NI_MAXHOST], port[NI_MAXSERV];
        struct sockaddr_storage own;
        socklen_t own_bytes = sizeof(own);
        struct MHD_Daemon *server;
        sigset_t ends;
        int fd, status, number;

        /* Before the server's thread begins, so that this one gets them. */
        sigemptyset(&ends);
        sigaddset(&ends, SIGINT);
        sigaddset(&ends, SIGTERM);
        sigprocmask(SIG_BLOCK, &ends, NULL);
        signal(SIGPIPE, SIG_IGN);
        fd = listen_at(address ? address : "127.0.0.1:9835", &status);
        if (fd < 0)
                return status;
        server = MHD_start_daemon(MHD_USE_INTERNAL_POLLING_THREAD, 0, NULL, NULL, answer_request, NULL,
                                  MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS,
                                  MHD_OPTION_CONNECTION_TIMEOUT, TIMEOUT_S, MHD_OPTION_NOTIFY_CONNECTION,
                                  note_connection, NULL, MHD_OPTION_END);
        if (!server) {
                complain("serve: the server cannot start: %s", strerror(errno));
                return EXIT_FAILURE;
        }
        if (getsockname(fd, (struct sockaddr *)&own, &own_bytes) == 0 &&
            getnameinfo((struct sockaddr *)&own, own_bytes, host, sizeof(host), port, sizeof(port),
                        NI_NUMERICHOST | NI_NUMERICSERV) == 0)
                printf(own.ss_family == AF_INET6 ? "Serving http://[%s]:%s/metrics\n"
                                                 : "Serving http://%s:%s/metrics\n",
                       host, port);
        fflush(stdout);
        sigwait(&ends, &number);
        MHD_stop_daemon(server);
        return EXIT_SUCCESS;
}
