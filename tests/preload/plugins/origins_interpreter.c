/*
 * As much of an interpreter of Python as the library looks at. Its frames are laid out as those of version 3.13, and
 * the outer ones may be wrong.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define DEEP 40

struct text {
        uint64_t references;
        const void *type;
        uint64_t letters, hash, state;
        char ascii[16];
        uint32_t wide[4];
};

struct code {
        uint64_t references;
        const void *type;
        char other[52];
        uint32_t first_line;
        char another[40];
        const void *file, *unused, *name;
        char more[64], instructions[16];
};

struct frame {
        const void *code;
        const struct frame *previous;
        char other[40];
        const char *at;
        char another[6], owner, more[33];
};

static struct {
        char other[72];
        const struct frame *frame;
} thread;
_Static_assert(offsetof(struct text, ascii) == 40 && offsetof(struct text, wide) == 56, "");
_Static_assert(offsetof(struct code, first_line) == 68 && offsetof(struct code, file) == 112, "");
_Static_assert(offsetof(struct code, name) == 128 && offsetof(struct code, instructions) == 200, "");
_Static_assert(offsetof(struct frame, at) == 56 && offsetof(struct frame, owner) == 70, "");

#pragma GCC visibility push(default)
extern char PyCode_Type, PyUnicode_Type;
char PyCode_Type, PyUnicode_Type;
const char *Py_GetVersion(void);
int Py_IsInitialized(void);
int Py_IsFinalizing(void);
void *PyGILState_GetThisThreadState(void);
int PyCode_Addr2Line(void *code, int at);
void _PyEval_EvalFrameDefault(void (*work)(void)); // NOLINT: as CPython has it
void work_in_frames(const char *how, void (*work)(void));

const char *Py_GetVersion(void)
{
        return "3.13.0";
}

int Py_IsInitialized(void)
{
        return 1;
}

int Py_IsFinalizing(void)
{
        return 0;
}

void *PyGILState_GetThisThreadState(void)
{
        return &thread;
}

int PyCode_Addr2Line(void *code, int at)
{
        return (int)((struct code *)code)->first_line + at;
}

__attribute__((noinline)) void _PyEval_EvalFrameDefault(void (*work)(void)) // NOLINT
{
        work();
        __asm__ volatile(""); /* no tail call */
}
#pragma GCC visibility pop

#define TEXT(word)                                                                                                     \
        {                                                                                                              \
                .type = &PyUnicode_Type, .letters = sizeof(word) - 1, .state = 1 << 2 | 32 | 64, .ascii = (word)       \
        }

static const struct text file = TEXT("some.py"), plain = TEXT("plain"), beyond = TEXT("beyond");
/* A letter for each number of bytes that UTF-8 has for one */
static const struct text wide = {
        .type = &PyUnicode_Type, .letters = 4, .state = 4 << 2 | 32, .wide = {'a', 0xdf, 0x6f22, 0x10348}};
static const struct text no_text = {.type = &PyCode_Type, .letters = 5, .state = 1 << 2 | 32 | 64, .ascii = "wrong"};

/*
 * Calls work() below a frame of plain, one of no function, one of wide, and what `how` says: nothing more; one that is
 * nowhere; one with what is no code, or with code that is nowhere; one whose name is no text; one of no function that
 * is below itself; or many of plain.
 * Behind what is wrong comes a frame of beyond.
 */
__attribute__((visibility("default"))) void work_in_frames(const char *how, void (*work)(void))
{
        static struct code codes[4];
        static struct frame frames[5 + DEEP];
        const struct text *names[] = {&plain, &wide, &beyond, &no_text};
        struct frame *end = &frames[3];
        void *nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        for (int i = 0; i < 4; i++)
                codes[i] = (struct code){.type = &PyCode_Type, .first_line = 5, .file = &file, .name = names[i]};
        for (int i = 0; i < 5 + DEEP; i++)
                frames[i] = (struct frame){&codes[0], &frames[i + 1], .at = codes[0].instructions + 2};
        frames[1].owner = 3;
        frames[2].code = &codes[1];
        frames[2].at = codes[1].instructions + 3;
        frames[4].code = &codes[2];
        frames[4].at = codes[2].instructions + 4;
        frames[4 + DEEP].previous = NULL;
        if (strcmp(how, "deep") != 0)
                frames[4].previous = NULL;
        if (strcmp(how, "whole") == 0)
                frames[2].previous = NULL;
        else if (strcmp(how, "lost") == 0)
                frames[2].previous = nowhere;
        else if (strcmp(how, "no-code") == 0)
                end->code = &file;
        else if (strcmp(how, "nowhere") == 0)
                end->code = nowhere;
        else if (strcmp(how, "no-name") == 0)
                end->code = &codes[3];
        else if (strcmp(how, "circle") == 0)
                *end = (struct frame){.previous = end, .owner = 3};
        thread.frame = frames;
        _PyEval_EvalFrameDefault(work);
        thread.frame = NULL;
}
