#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "check.h"

static char last_line[GR_LOG_LINE_BYTES + 1];
static size_t last_bytes;
static int lines;

static void keep(const char *line, size_t line_bytes, void *arg)
{
        GR_CHECK(arg == &lines);
        memcpy(last_line, line, line_bytes);
        last_line[line_bytes] = '\0';
        last_bytes = line_bytes;
        lines++;
}

static int evaluations;

static const char *evaluated(void)
{
        evaluations++;
        return "text";
}

static void test_lines(void)
{
        char wanted[128], long_text[2 * GR_LOG_LINE_BYTES];

        gr_log_set_sink(keep, &lines);
        errno = EDOM;
        gr_log(GR_LOG_WARN, "%s is %d", "answer", 42);
        GR_CHECK_EQ(errno, EDOM);
        snprintf(wanted, sizeof(wanted), "gpureclaim: [%ld] warn: answer is 42\n", (long)getpid());
        GR_CHECK_STR(last_line, wanted);

        /* One line stays one line, and no escape sequence reaches a terminal. */
        gr_log(GR_LOG_ERROR, "a\nb\033[31mc\r\x7f");
        GR_CHECK(strstr(last_line, "error: a b [31mc  \n") != NULL);

        /* Nor one that begins with a control character of eight bits, alone, in UTF-8, or in longer UTF-8. */
        gr_log(GR_LOG_ERROR, "%s",
               "a\x9b"
               "31mb \xc2\x9b"
               "31mc \xe0\x82\x9b \xf0\x80\x82\x9b \xf8 \xc3");
        GR_CHECK(strstr(last_line, "error: a 31mb   31mc             \n") != NULL);
        gr_log(GR_LOG_ERROR, "%s", "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x90\xa7 \xc2\xa0");
        GR_CHECK(strstr(last_line, "error: gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x90\xa7 \xc2\xa0\n") != NULL);

        /* Nor one that is cut short by what follows; the first and the last characters of each length are whole. */
        gr_log(GR_LOG_ERROR, "%s", "\xe2\x82( \xf0\x9f\x90( \xc3(");
        GR_CHECK(strstr(last_line, "error:   (    (  (\n") != NULL);
        gr_log(GR_LOG_ERROR, "%s", "\xf5\x80\x80\x80( \xff\x80\x80\x80("); /* beyond the last one */
        GR_CHECK(strstr(last_line, "error:     (     (\n") != NULL);
        gr_log(GR_LOG_ERROR, "%s", "\xdf\xbf \xe0\xa0\x80 \xef\xbf\xbd \xf0\x90\x80\x80 \xf4\x8f\xbf\xbf ~");
        GR_CHECK(strstr(last_line, ": \xdf\xbf \xe0\xa0\x80 \xef\xbf\xbd \xf0\x90\x80\x80 \xf4\x8f\xbf\xbf ~\n") !=
                 NULL);

        memset(long_text, 'y', sizeof(long_text));
        long_text[sizeof(long_text) - 1] = '\0';
        gr_log(GR_LOG_ERROR, "%s", long_text);
        GR_CHECK_EQ(last_bytes, GR_LOG_LINE_BYTES);
        GR_CHECK_STR(last_line + GR_LOG_LINE_BYTES - 6, "yy...\n");
        gr_log(GR_LOG_ERROR, "%s", "");
        GR_CHECK(strstr(last_line, "error: \n") != NULL);
        gr_log_set_sink(NULL, NULL);
}

/* The longest text that fits is not marked as cut, one more is. */
static void test_full_line(void)
{
        char text[GR_LOG_LINE_BYTES];
        size_t prefix;

        gr_log_set_sink(keep, &lines);
        gr_log(GR_LOG_ERROR, "%s", "");
        prefix = last_bytes - 1;
        memset(text, 'z', sizeof(text));
        text[GR_LOG_LINE_BYTES - 1 - prefix] = '\0';
        gr_log(GR_LOG_ERROR, "%s", text);
        GR_CHECK_EQ(last_bytes, GR_LOG_LINE_BYTES);
        GR_CHECK_STR(last_line + GR_LOG_LINE_BYTES - 4, "zzz\n");
        text[GR_LOG_LINE_BYTES - 1 - prefix] = 'z';
        text[GR_LOG_LINE_BYTES - prefix] = '\0';
        gr_log(GR_LOG_ERROR, "%s", text);
        GR_CHECK_EQ(last_bytes, GR_LOG_LINE_BYTES);
        GR_CHECK_STR(last_line + GR_LOG_LINE_BYTES - 5, "z...\n");
        gr_log_set_sink(NULL, NULL);
}

static void test_levels(void)
{
        gr_log_set_sink(keep, &lines);
        lines = 0;
        gr_log(GR_LOG_INFO, "%s", evaluated());
        GR_CHECK_EQ(lines, 0);
        GR_CHECK_EQ(evaluations, 0);
        gr_log_set_level(GR_LOG_DEBUG);
        gr_log(GR_LOG_DEBUG, "%s", evaluated());
        GR_CHECK_EQ(lines, 1);
        GR_CHECK_EQ(evaluations, 1);
        gr_log_set_level(GR_LOG_SILENT);
        gr_log(GR_LOG_ERROR, "%s", evaluated());
        gr_log(GR_LOG_SILENT, "%s", evaluated());
        GR_CHECK_EQ(lines, 1);
        GR_CHECK_EQ(evaluations, 1);
        gr_log_set_level(GR_LOG_WARN);
        gr_log_set_sink(NULL, NULL);
}

/* In a child whose standard error is a pipe, so that the parent sees what arrives. */
static void test_stderr(void)
{
        char buf[4 * GR_LOG_LINE_BYTES];
        int fds[2], status;
        ssize_t got;
        pid_t pid;

        GR_CHECK_EQ(pipe(fds), 0);
        pid = fork();
        if (pid == 0) {
                dup2(fds[1], STDERR_FILENO);
                gr_log(GR_LOG_ERROR, "first");
                gr_log(GR_LOG_INFO, "never");
                gr_log(GR_LOG_WARN, "second");
                _exit(0);
        }
        close(fds[1]);
        GR_CHECK_EQ(waitpid(pid, &status, 0), pid);
        got = read(fds[0], buf, sizeof(buf) - 1);
        close(fds[0]);
        GR_CHECK(got > 0);
        buf[got > 0 ? got : 0] = '\0';
        GR_CHECK(strstr(buf, "] error: first\ngpureclaim: ") != NULL);
        GR_CHECK(strstr(buf, "] warn: second\n") != NULL);
        GR_CHECK(strstr(buf, "never") == NULL);
}

static void *read_slowly(void *arg)
{
        static char got[3 * PIPE_BUF + 1];
        const int *fds = arg;
        size_t length = 0;
        ssize_t part;

        while ((part = read(fds[0], got + length, 1000)) > 0 && (length += (size_t)part) < sizeof(got) - 1000)
                ;
        return (void *)(strlen(got) == length ? got : "torn");
}

#define NO_BYTE (-1)

/* What the system answers to the next write instead of writing: an error, or that it took no byte; 0: nothing. */
static int refusal;

ssize_t write(int fd, const void *bytes, size_t length)
{
        if (refusal) {
                bool no_byte = refusal == NO_BYTE;

                errno = refusal;
                refusal = 0;
                return no_byte ? 0 : -1;
        }
        return syscall(SYS_write, fd, bytes, length);
}

/* A signal, and another writer who was quicker, are no errors. */
static void test_write_again(void)
{
        static const int refusals[] = {EINTR, EAGAIN, ENOSPC, NO_BYTE}, answers[] = {0, 0, -ENOSPC, -EIO};
        char got[3] = "";
        int fds[2];

        GR_CHECK_EQ(pipe(fds), 0);
        for (int i = 0; i < 4; i++) {
                refusal = refusals[i];
                GR_CHECK_EQ(gr_log_write(fds[1], "x", 1, 1000), answers[i]);
                GR_CHECK_EQ(refusal, 0);
        }
        GR_CHECK_EQ(read(fds[0], got, sizeof(got)), 2);
        close(fds[0]);
        close(fds[1]);
}

static bool has_written;

static void *write_and_end(void *fd)
{
        pthread_cancel(pthread_self());
        GR_CHECK_EQ(gr_log_write(*(int *)fd, "x", 1, 1000), 0);
        has_written = true;
        pthread_testcancel();
        return NULL;
}

/* A thread that is told to end does so only afterwards: its caller may hold a lock. */
static void test_told_to_end(void)
{
        pthread_t thread;
        int fds[2];
        void *got;

        GR_CHECK_EQ(pipe(fds), 0);
        GR_CHECK_EQ(pthread_create(&thread, NULL, write_and_end, &fds[1]), 0);
        pthread_join(thread, &got);
        GR_CHECK(has_written && got == PTHREAD_CANCELED);
        close(fds[0]);
        close(fds[1]);
}

/* All of it, however little the reader takes at a time; and not for ever where nobody reads. */
static void test_write(void)
{
        static char text[2 * PIPE_BUF + 5];
        int fds[2];
        pthread_t reader;
        void *got;

        for (size_t i = 0; i < sizeof(text) - 1; i++)
                text[i] = (char)('a' + i % 23);
        GR_CHECK_EQ(pipe(fds), 0);
        fcntl(fds[1], F_SETPIPE_SZ, PIPE_BUF);
        errno = EDOM;
        GR_CHECK_EQ(gr_log_write(fds[1], text, PIPE_BUF, 0), 0);
        GR_CHECK_EQ(gr_log_write(fds[1], "x", 1, 1), -ETIMEDOUT);
        GR_CHECK_EQ(errno, EDOM);
        GR_CHECK_EQ(gr_log_write(fds[1], "", 0, 0), 0);
        GR_CHECK_EQ(read(fds[0], text, PIPE_BUF), PIPE_BUF);
        GR_CHECK_EQ(pthread_create(&reader, NULL, read_slowly, fds), 0);
        GR_CHECK_EQ(gr_log_write(fds[1], text, sizeof(text) - 1, 10000), 0);
        close(fds[1]);
        pthread_join(reader, &got);
        GR_CHECK_STR(got, text);
        GR_CHECK_EQ(gr_log_write(fds[1], "x", 1, 0), -EBADF);
        close(fds[0]);
}

/*
 * Standard error has no reader, or is a file that may not grow: the line is lost, the program lives, and of the two
 * signals only the one that the program had pending stays so.
 */
static void test_refused_writes(bool is_file)
{
        const int raised = is_file ? SIGXFSZ : SIGPIPE, own = is_file ? SIGPIPE : SIGXFSZ;
        int fds[2], status;
        pid_t pid;

        pid = fork();
        if (pid == 0) {
                sigset_t pending, blocked;

                signal(raised, SIG_DFL);
                sigemptyset(&blocked);
                sigaddset(&blocked, own);
                sigprocmask(SIG_BLOCK, &blocked, NULL);
                raise(own);
                if (is_file) {
                        FILE *file = tmpfile();

                        if (!file || setrlimit(RLIMIT_FSIZE, &(struct rlimit){0, 0}) != 0)
                                _exit(3);
                        dup2(fileno(file), STDERR_FILENO);
                } else {
                        if (pipe(fds) != 0)
                                _exit(3);
                        close(fds[0]);
                        dup2(fds[1], STDERR_FILENO);
                }
                errno = EDOM;
                gr_log(GR_LOG_ERROR, "nobody reads this");
                if (errno != EDOM)
                        _exit(4);
                sigpending(&pending);
                _exit(sigismember(&pending, raised) ? 5 : !sigismember(&pending, own) ? 6 : 0);
        }
        GR_CHECK_EQ(waitpid(pid, &status, 0), pid);
        GR_CHECK_EQ(status, 0);
}

/* What no terminal should be sent is a blank, the first character, too. */
static void test_clean(void)
{
        char text[] = "\x1b[1mred\n\xc3\xa9\xff.";
        /* A surrogate, and what is beyond the last character, are no UTF-8; their neighbours are. */
        char strange[] = "\xed\xa0\x80\xed\x9f\xbf\xf4\x90\x80\x80\xf4\x8f\xbf\xbf";

        gr_log_clean(text, sizeof(text) - 1);
        GR_CHECK_STR(text, " [1mred \xc3\xa9 .");
        gr_log_clean(strange, sizeof(strange) - 1);
        GR_CHECK_STR(strange, "   \xed\x9f\xbf    \xf4\x8f\xbf\xbf");
}

#define MS 1000000ull

static struct gr_ratelimit shared_limit = GR_RATELIMIT_INIT(100, 1000 * MS);
static atomic_int passes;

static void *hammer(void *arg)
{
        int i;

        (void)arg;
        for (i = 0; i < 1000; i++)
                if (gr_log_ratelimit(&shared_limit, 5 * MS))
                        atomic_fetch_add(&passes, 1);
        return NULL;
}

static void test_ratelimit(void)
{
        struct gr_ratelimit limit = GR_RATELIMIT_INIT(2, 10 * MS);
        pthread_t threads[4];
        int i;

        GR_CHECK(gr_log_ratelimit(&limit, 0));
        GR_CHECK(gr_log_ratelimit(&limit, 1 * MS));
        GR_CHECK(!gr_log_ratelimit(&limit, 2 * MS));
        GR_CHECK(!gr_log_ratelimit(&limit, 9 * MS));
        GR_CHECK(gr_log_ratelimit(&limit, 10 * MS));
        GR_CHECK_EQ(gr_log_ratelimit_take(&limit), 2);
        GR_CHECK_EQ(gr_log_ratelimit_take(&limit), 0);
        GR_CHECK(gr_log_ratelimit(&limit, 1000000 * MS));
        GR_CHECK(gr_log_ratelimit(&limit, 1000001 * MS));
        GR_CHECK(!gr_log_ratelimit(&limit, 1000002 * MS));

        for (i = 0; i < 4; i++)
                GR_CHECK_EQ(pthread_create(&threads[i], NULL, hammer, NULL), 0);
        for (i = 0; i < 4; i++)
                pthread_join(threads[i], NULL);
        GR_CHECK_EQ(passes, 100);
        GR_CHECK_EQ(gr_log_ratelimit_take(&shared_limit), 3900);
}

int main(void)
{
        test_lines();
        test_full_line();
        test_levels();
        test_stderr();
        test_write();
        test_write_again();
        test_told_to_end();
        test_clean();
        test_refused_writes(false);
        test_refused_writes(true);
        test_ratelimit();
        return GR_CHECK_RESULT();
}
