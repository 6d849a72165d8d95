/* The memory of the pool's own structures: each piece by itself, clean, and used again. */
#include "base/metadata.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/shard.h"
#include "check.h"

#define PIECES  4000
#define THREADS 4

/* More than a chunk of them, and some that are larger than what chunks are for. */
static const size_t sizes[] = {1, 64, 128, 128, 200, 4096, 40000, (512 << 10), (512 << 10) + 1, 300000};

struct piece {
        unsigned char *bytes;
        size_t size;
        unsigned char mark;
};

static bool is_all(const unsigned char *bytes, size_t size, unsigned char value)
{
        for (size_t i = 0; i < size; i++)
                if (bytes[i] != value)
                        return false;
        return true;
}

/* Whether the system knows of the mapping that ptr lies in that huge pages are wanted there. */
static bool wants_huge(const void *ptr)
{
        uintptr_t begin, end, at = (uintptr_t)ptr;
        bool found = false, wants = false;
        FILE *file = fopen("/proc/self/smaps", "re");
        char line[512];

        while (file && fgets(line, sizeof(line), file)) {
                if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2)
                        found = at >= begin && at < end;
                else if (found && !strncmp(line, "VmFlags:", 8))
                        wants = strstr(line, " hg");
        }
        if (file)
                fclose(file);
        return wants;
}

/* Small structures lie in huge pages where there are any. */
static void test_huge(void)
{
        const size_t bytes = (size_t)4 << 20;
        void *piece = gr_metadata_alloc(128);
        void *mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        bool there = GR_METADATA_IN_CHUNKS && mapping != MAP_FAILED && !madvise(mapping, bytes, MADV_HUGEPAGE) &&
                     wants_huge(mapping);

        if (there)
                GR_CHECK(wants_huge(piece));
        else
                printf("huge pages cannot be asked for here: left out\n");
        if (mapping != MAP_FAILED)
                munmap(mapping, bytes);
        gr_metadata_free(piece, 128);
}

/* Takes and gives back at random; each piece must come clean and stay as it was left. */
static void *use(void *arg)
{
        static __thread struct piece pieces[PIECES / 40];
        uint64_t seed = (uint64_t)(uintptr_t)arg;
        uintptr_t wrong = 0;

        for (unsigned step = 0; step < PIECES; step++) {
                struct piece *piece;

                seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                piece = &pieces[(seed >> 33) % (PIECES / 40)];
                if (piece->bytes) {
                        wrong += !is_all(piece->bytes, piece->size, piece->mark);
                        gr_metadata_free(piece->bytes, piece->size);
                        piece->bytes = NULL;
                        continue;
                }
                piece->size = sizes[(seed >> 20) % (sizeof(sizes) / sizeof(*sizes))];
                piece->mark = (unsigned char)(step | 1);
                piece->bytes = gr_metadata_alloc(piece->size);
                if (!piece->bytes || (uintptr_t)piece->bytes % GR_LINE_BYTES || !is_all(piece->bytes, piece->size, 0))
                        wrong++;
                else
                        memset(piece->bytes, piece->mark, piece->size);
        }
        for (unsigned i = 0; i < PIECES / 40; i++)
                if (pieces[i].bytes) {
                        wrong += !is_all(pieces[i].bytes, pieces[i].size, pieces[i].mark);
                        gr_metadata_free(pieces[i].bytes, pieces[i].size);
                }
        return (void *)wrong;
}

static void test_pieces(void)
{
        pthread_t threads[THREADS];
        void *wrong;

        for (uintptr_t i = 0; i < THREADS; i++)
                GR_CHECK_EQ(pthread_create(&threads[i], NULL, use, (void *)(i + 1)), 0);
        for (unsigned i = 0; i < THREADS; i++) {
                pthread_join(threads[i], &wrong);
                GR_CHECK_EQ((uintptr_t)wrong, 0);
        }
        gr_metadata_free(NULL, 64);
        gr_metadata_free(NULL, 300000);
}

/* What was freed serves again, of either kind: 1.2 GB in all, and never more than a piece at a time. */
static void test_again(void)
{
        struct rusage usage;

        for (unsigned i = 0; i < 300000; i++)
                gr_metadata_free(gr_metadata_alloc(4096), 4096);
        for (unsigned i = 0; i < 4000; i++)
                gr_metadata_free(gr_metadata_alloc(300000), 300000);
        getrusage(RUSAGE_SELF, &usage);
        GR_CHECK(usage.ru_maxrss < 1 << 20); /* KiB; a sanitizer keeps some of it */
}

/* Where the system has no memory left that is said. */
static void test_none_left(void)
{
#ifndef __SANITIZE_THREAD__ /* which ends the program where the system has no memory left */
        struct rlimit most = {0};
        int status;
        pid_t pid;

        if (!GR_METADATA_IN_CHUNKS)
                return;
        pid = fork();
        if (pid == 0) {
                setrlimit(RLIMIT_AS, &most);
                if (!gr_check_addresses_limited())
                        _exit(0);
                for (size_t i = 0; i < 1 << 20; i++)
                        if (!gr_metadata_alloc(4096))
                                _exit(0);
                _exit(1);
        }
        GR_CHECK(waitpid(pid, &status, 0) == pid);
        GR_CHECK_EQ(status, 0);
#endif
}

int main(void)
{
        test_pieces();
        test_again();
        test_huge();
        test_none_left();
        return GR_CHECK_RESULT();
}
