#include "notes/python.h"

#include <link.h>
#include <stdatomic.h>
#include <string.h>

#include "system/platform.h"

/* Offsets in the structures of CPython on 64-bit processors, the same in all releases of one version. */
struct layout {
        char version[6];
        /* The thread points to its frame; or, unless NOT_THROUGH, to a cframe that points to it, at through_cframe. */
        uint8_t thread_frame, through_cframe;
        uint8_t previous, code, at, owner;            /* in a frame; owner 0: none */
        bool at_is_index;                             /* `at` is a number of instructions, not an address */
        uint8_t name, file, first_line, instructions; /* in code */
        uint8_t ascii, compact;                       /* sizes of the headers of texts */
};

#define PAGE_BYTES       4096 /* or more */
#define PAGES            16
#define NOT_THROUGH      255
#define FRAME_BYTES      104
#define FRAME_BYTES_311  72 /* since 3.11; no more is read, as what follows may be on a page that is not mapped */
#define CODE_BYTES       136
#define OWNED_BY_C_STACK 3 /* a frame of no function */

static const struct layout layouts[] = {
        {"3.10.", 24, NOT_THROUGH, 24, 32, 96, 0, true, 112, 104, 40, 0, 48, 72},
        {"3.11.", 56, 8, 48, 32, 56, 0, false, 128, 112, 72, 184, 48, 72},
        {"3.12.", 56, 0, 8, 0, 56, 70, false, 128, 112, 68, 192, 40, 56},
        {"3.13.", 72, NOT_THROUGH, 8, 0, 56, 70, false, 128, 112, 68, 200, 40, 56},
};

static const struct layout *_Atomic layout; /* NULL: no interpreter that can be read */
static struct {
        void *(*this_thread)(void);
        int (*is_initialized)(void);
        int (*is_finalizing)(void);
        int (*line_of)(void *code, int at);
        const void *code_type, *text_type;
        uintptr_t loop, loop_end;
} python; /* final when layout is set */

/* Pages that are known to be there, so that one look asks the kernel only once for each. 0: none. */
struct reader {
        uint64_t pages[PAGES];
};

/* Copies memory that may not be there: asks the kernel for each page first. False: it is not there. */
static bool peek_memory(struct reader *reader, uint64_t address, void *to, size_t bytes)
{
        if (address < PAGE_BYTES || address + bytes < address)
                return false;
        if (bytes == 0)
                return true;
        for (uint64_t page = address / PAGE_BYTES; page <= (address + bytes - 1) / PAGE_BYTES; page++) {
                if (page == reader->pages[page % PAGES])
                        continue;
                if (!gr_platform_can_read(page * PAGE_BYTES))
                        return false;
                reader->pages[page % PAGES] = page;
        }
        memcpy(to, (const void *)(uintptr_t)address, bytes); // NOLINT: an address of another program's structures
        return true;
}

static uint64_t word_at(const char *bytes, size_t offset)
{
        uint64_t word;

        memcpy(&word, bytes + offset, sizeof(word));
        return word;
}

/* A library of the process, as the loader describes it, with its tables for finding a symbol. */
struct library {
        uintptr_t base;
        const ElfW(Sym) * symbols;
        const char *names;
        const uint32_t *hashes; /* ELF's table of the GNU kind; NULL: it has none */
};

static struct library open_library(const struct dl_phdr_info *info)
{
        struct library library = {.base = info->dlpi_addr};
        const ElfW(Dyn) *dynamic = NULL;

        for (int i = 0; i < info->dlpi_phnum; i++)
                if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
                        dynamic = (const void *)(library.base + info->dlpi_phdr[i].p_vaddr); // NOLINT
        for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
                uintptr_t at = dynamic->d_un.d_ptr;
                const void *there = (const void *)(at < library.base ? library.base + at : at); // NOLINT

                if (dynamic->d_tag == DT_SYMTAB)
                        library.symbols = there;
                else if (dynamic->d_tag == DT_STRTAB)
                        library.names = there;
                else if (dynamic->d_tag == DT_GNU_HASH)
                        library.hashes = there;
        }
        if (!library.symbols || !library.names)
                library.hashes = NULL;
        return library;
}

/* What the library defines by this name; NULL: nothing. */
static const ElfW(Sym) * find_symbol(const struct library *library, const char *name)
{
        const uint32_t *table = library->hashes, *buckets, *chain;
        uint32_t hash = 5381, at;

        if (!table || table[0] == 0)
                return NULL;
        for (const char *c = name; *c; c++)
                hash = hash * 33 + (unsigned char)*c;
        buckets = table + 4 + table[2] * (sizeof(ElfW(Addr)) / sizeof(*table));
        chain = buckets + table[0];
        at = buckets[hash % table[0]];
        if (at < table[1])
                return NULL;
        for (;; at++) {
                const ElfW(Sym) *symbol = &library->symbols[at];
                uint32_t other = chain[at - table[1]];

                if ((other | 1) == (hash | 1) && symbol->st_shndx != SHN_UNDEF &&
                    strcmp(library->names + symbol->st_name, name) == 0)
                        return symbol;
                if (other & 1)
                        return NULL;
        }
}

static void *address_of(const struct library *library, const char *name)
{
        const ElfW(Sym) *symbol = find_symbol(library, name);

        return symbol ? (void *)(library->base + symbol->st_value) : NULL; // NOLINT
}

struct process {
        struct library program, interpreter;
};

/* The first library that is an interpreter. The program itself comes before all libraries. */
static int find_interpreter(struct dl_phdr_info *info, size_t bytes, void *arg)
{
        struct process *process = arg;

        (void)bytes;
        process->interpreter = open_library(info);
        if (!process->program.symbols)
                process->program = process->interpreter;
        return find_symbol(&process->interpreter, "Py_GetVersion") != NULL;
}

/* A library's variable. If the program uses it, the linker may have put it into the program (a copy relocation). */
static void *data_of(const struct process *process, const char *name)
{
        void *data = address_of(&process->program, name);

        return data ? data : address_of(&process->interpreter, name);
}

/* Does not use dlsym: another thread may hold its lock while it runs a constructor that waits for this thread. */
bool gr_python_find(void)
{
        static _Atomic bool finding;
        static uintptr_t found;
        struct process process = {0};
        const struct library *library = &process.interpreter;
        const ElfW(Sym) * loop;
        const char *version;

        if (atomic_exchange(&finding, true))
                return false;
        if (!dl_iterate_phdr(find_interpreter, &process)) {
                atomic_store(&layout, NULL); /* it may have been unloaded */
                found = 0;
        } else if (library->base + 1 != found) {
                atomic_store(&layout, NULL);
                found = library->base + 1;
                python.this_thread = (void *(*)(void))address_of(library, "PyGILState_GetThisThreadState");
                python.is_initialized = (int (*)(void))address_of(library, "Py_IsInitialized");
                python.is_finalizing = (int (*)(void))address_of(library, "Py_IsFinalizing");
                if (!python.is_finalizing)
                        python.is_finalizing = (int (*)(void))address_of(library, "_Py_IsFinalizing");
                python.line_of = (int (*)(void *, int))address_of(library, "PyCode_Addr2Line");
                python.code_type = data_of(&process, "PyCode_Type");
                python.text_type = data_of(&process, "PyUnicode_Type");
                loop = find_symbol(library, "_PyEval_EvalFrameDefault");
                python.loop = loop ? library->base + loop->st_value : 0;
                python.loop_end = loop ? python.loop + loop->st_size : 0;
                version = ((const char *(*)(void))address_of(library, "Py_GetVersion"))();
                for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++)
                        if (python.this_thread && python.is_initialized && python.is_finalizing && python.line_of &&
                            python.code_type && python.text_type &&
                            strncmp(version, layouts[i].version, strlen(layouts[i].version)) == 0)
                                atomic_store_explicit(&layout, &layouts[i], memory_order_release);
        }
        atomic_store(&finding, false);
        return true;
}

bool gr_python_is_loop(uintptr_t address)
{
        return address - python.loop < python.loop_end - python.loop;
}

/* A text of Python. */
struct text {
        uint64_t letters, at;
        uint32_t letter_bytes;
};

/* False: there is no text at the address, or it is not in one piece. */
static bool open_text(const struct layout *of, struct reader *reader, uint64_t address, struct text *ret)
{
        char head[40];
        uint32_t state;

        if (!peek_memory(reader, address, head, sizeof(head)) || word_at(head, 8) != (uintptr_t)python.text_type)
                return false;
        state = (uint32_t)word_at(head, 32);
        *ret = (struct text){word_at(head, 16), address + (state & 64 ? of->ascii : of->compact), state >> 2 & 7};
        return (state & 32) && (ret->letter_bytes == 1 || ret->letter_bytes == 2 || ret->letter_bytes == 4) &&
               ret->letters <= INT32_MAX;
}

/* A number that tells texts apart by their ends, because the paths of many files begin alike. */
static uint64_t mark_text(const struct layout *of, struct reader *reader, uint64_t address)
{
        char end[32] = {0};
        struct text text;
        uint64_t bytes, mark = 0;

        if (!open_text(of, reader, address, &text))
                return 0;
        bytes = text.letters * text.letter_bytes;
        if (!peek_memory(reader, text.at + (bytes > sizeof(end) ? bytes - sizeof(end) : 0), end,
                         bytes > sizeof(end) ? sizeof(end) : bytes))
                return 0;
        for (size_t i = 0; i < sizeof(end); i += 8)
                mark = (mark ^ word_at(end, i)) * UINT64_C(0x9e3779b97f4a7c15);
        return mark ^ mark >> 32;
}

unsigned gr_python_frames(struct gr_python_frame *ret, unsigned most)
{
        const struct layout *of = atomic_load_explicit(&layout, memory_order_acquire);
        struct reader reader = {0};
        char frame[FRAME_BYTES], code[CODE_BYTES];
        unsigned count = 0;
        uint64_t thread, at;

        if (!of || !python.is_initialized() || python.is_finalizing())
                return 0;
        thread = (uintptr_t)python.this_thread();
        if (!thread || !peek_memory(&reader, thread + of->thread_frame, &at, sizeof(at)))
                return 0;
        if (of->through_cframe != NOT_THROUGH && !peek_memory(&reader, at + of->through_cframe, &at, sizeof(at)))
                return 0;
        for (unsigned steps = 0; at && count < most && steps < 4 * most; steps++) {
                struct gr_python_frame *next = &ret[count];

                if (!peek_memory(&reader, at, frame, of->at_is_index ? sizeof(frame) : FRAME_BYTES_311))
                        break;
                at = word_at(frame, of->previous);
                if (of->owner && frame[of->owner] == OWNED_BY_C_STACK)
                        continue;
                next->code = word_at(frame, of->code);
                if (!peek_memory(&reader, next->code, code, sizeof(code)) ||
                    word_at(code, 8) != (uintptr_t)python.code_type)
                        break;
                next->at = of->at_is_index ? 2 * (int)word_at(frame, of->at)
                                           : (int64_t)(word_at(frame, of->at) - next->code - of->instructions);
                next->mark = mark_text(of, &reader, word_at(code, of->name)) * 31 +
                             mark_text(of, &reader, word_at(code, of->file)) * 7 +
                             word_at(code, of->first_line) % (UINT64_C(1) << 32);
                count++;
        }
        return count;
}

/* Copies a text as UTF-8. Returns its bytes with the NUL; 0: cannot be read. */
static size_t copy_text(const struct layout *of, struct reader *reader, uint64_t address, char *to, size_t room)
{
        char raw[1024];
        struct text text;
        size_t used = 0;

        if (!open_text(of, reader, address, &text))
                return 0;
        if (text.letters > sizeof(raw) / text.letter_bytes)
                text.letters = sizeof(raw) / text.letter_bytes;
        if (!peek_memory(reader, text.at, raw, text.letters * text.letter_bytes))
                return 0;
        for (uint64_t i = 0; i < text.letters && used + 5 <= room; i++) {
                uint32_t letter = 0;

                memcpy(&letter, raw + i * text.letter_bytes, text.letter_bytes);
                if (letter < 0x80) {
                        to[used++] = (char)(letter ? letter : '?');
                        continue;
                }
                if (letter >= 0x10000) {
                        to[used++] = (char)(0xf0 | letter >> 18);
                        to[used++] = (char)(0x80 | (letter >> 12 & 0x3f));
                } else if (letter >= 0x800) {
                        to[used++] = (char)(0xe0 | letter >> 12);
                }
                to[used++] = (char)(letter >= 0x800 ? 0x80 | (letter >> 6 & 0x3f) : 0xc0 | letter >> 6);
                to[used++] = (char)(0x80 | (letter & 0x3f));
        }
        to[used++] = '\0';
        return used;
}

size_t gr_python_name(const struct gr_python_frame *frame, char *text, size_t text_bytes, uint32_t *ret_line)
{
        const struct layout *of = atomic_load_explicit(&layout, memory_order_acquire);
        struct reader reader = {0};
        char code[CODE_BYTES];
        size_t name, file;
        int line;

        if (!peek_memory(&reader, frame->code, code, sizeof(code)))
                return 0;
        name = copy_text(of, &reader, word_at(code, of->name), text, text_bytes / 2);
        file = copy_text(of, &reader, word_at(code, of->file), text + name, text_bytes - name);
        if (!name || !file || python.is_finalizing())
                return 0;
        line = python.line_of((void *)(uintptr_t)frame->code, (int)frame->at); // NOLINT: another's address
        *ret_line = line > 0 ? (uint32_t)line : 0;
        return name + file;
}
