#include "notes/stack.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <setjmp.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <unwind.h>

#include "base/attributes.h"
#include "base/lock.h"
#include "driver/dlsym.h"
#include "notes/python.h"
#include "system/platform.h"

#define NATIVE_MOST 48 /* frames */
#define PYTHON_MOST 32
#define PATH_MOST   1024
#define KNOWN       (1u << 18) /* places for what has a record; a power of two */
#define KNOWN_MOST  (KNOWN / 4 * 3)

/* The library itself, from the linker. */
extern const char __ehdr_start[] GR_HIDDEN, _end[] GR_HIDDEN;

/*
 * The unwinder is linked into the library, so that this function can replace its look-up of tables (--wrap). Where the
 * unwinder finds no table for an address, it reads the code there, to see whether a signal handler returns to it. But
 * the return address of a coroutine's outermost function may be any number, and reading there would end the program.
 * This function asks the process's own look-up, which also knows code that was made at run time. If that finds no table
 * and the code cannot be read, it jumps out of the unwinder.
 */
const void *__wrap__Unwind_Find_FDE(void *pc, void *ret_bases) GR_HIDDEN;
static const void *(*find_table)(void *pc, void *ret_bases);
static _Thread_local jmp_buf *leave __attribute__((tls_model("initial-exec")));

const void *__wrap__Unwind_Find_FDE(void *pc, void *ret_bases)
{
        const void *table = find_table(pc, ret_bases);
        uint64_t code = (uintptr_t)pc + 1; /* pc is the byte before; the unwinder would read fewer than 16 here */

        if (!table && leave && (!gr_platform_can_read(code) || !gr_platform_can_read(code + 8)))
                longjmp(*leave, 1);
        return table;
}

/*
 * A table of what has a record, by its hash: modules, functions of Python, and stacks (each of these twice, as it is in
 * memory and as it is recorded). Read without the lock. Two entries have the same hash once in a thousand million
 * programs.
 */
static struct known {
        _Atomic uint64_t hash; /* written last */
        uint32_t record;
} * known;
static unsigned known_count;
static _Atomic bool is_full;                                /* no room in the table or file: no more records */
static char program[PATH_MOST];                             /* its file: the loader has no name for it */
static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_ORIGINS); /* held while records are added */

struct stack {
        unsigned native_count, python_count;
        bool to_python; /* leave out native frames from the interpreter's loop outward */
        uintptr_t native[NATIVE_MOST];
        struct gr_python_frame python[PYTHON_MOST];
};

static uint64_t mix_word(uint64_t hash, uint64_t word)
{
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        return hash ^ hash >> 32;
}

static uint64_t mix_text(uint64_t hash, const char *text, size_t bytes)
{
        for (size_t i = 0; i < bytes; i++)
                hash = mix_word(hash, (unsigned char)text[i]);
        return hash;
}

static uint32_t look_up_record(uint64_t hash)
{
        for (uint64_t i = hash;; i++) {
                struct known *at = &known[i % KNOWN];
                uint64_t found = atomic_load_explicit(&at->hash, memory_order_acquire);

                if (found == hash)
                        return at->record;
                if (!found)
                        return 0;
        }
}

static void remember_stack(uint64_t hash, uint32_t record)
{
        uint64_t i = hash;

        gr_assert_locked(&lock);
        if (!record || known_count == KNOWN_MOST)
                is_full = true;
        if (is_full)
                return;
        while (atomic_load_explicit(&known[i % KNOWN].hash, memory_order_relaxed))
                i++;
        known[i % KNOWN].record = record;
        atomic_store_explicit(&known[i % KNOWN].hash, hash, memory_order_release);
        known_count++;
}

static _Unwind_Reason_Code add_frame(struct _Unwind_Context *context, void *arg)
{
        struct stack *stack = arg;
        int before = 0;
        uintptr_t ip = _Unwind_GetIPInfo(context, &before);

        if (!ip || stack->native_count == NATIVE_MOST || (stack->to_python && gr_python_is_loop(ip)))
                return _URC_END_OF_STACK;
        if (ip - (uintptr_t)__ehdr_start >= (uintptr_t)(_end - __ehdr_start))
                stack->native[stack->native_count++] = ip + (unsigned)before; /* the byte before is the call's */
        return _URC_NO_REASON;
}

static void unwind_stack(struct stack *stack)
{
        jmp_buf *outer = leave, here;

        leave = &here;
        if (!_setjmp(here))
                _Unwind_Backtrace(add_frame, stack);
        leave = outer;
}

/* How often libraries were loaded and unloaded: after a change an address may be in another library. */
static int count_changes(struct dl_phdr_info *info, size_t bytes, void *arg)
{
        (void)bytes;
        *(uint64_t *)arg = (uint64_t)info->dlpi_adds << 32 ^ info->dlpi_subs;
        return 1;
}

/* Whether this part of the module is in memory. */
static bool is_loaded(const struct dl_phdr_info *info, const ElfW(Phdr) * part)
{
        for (int i = 0; i < info->dlpi_phnum; i++) {
                const ElfW(Phdr) *load = &info->dlpi_phdr[i];
                uint64_t offset = part->p_vaddr - load->p_vaddr;

                if (load->p_type == PT_LOAD && offset <= load->p_filesz && part->p_memsz <= load->p_filesz - offset)
                        return true;
        }
        return false;
}

/* Reads the module's build ID, an ELF note, where it has one. */
static void read_build_id(const struct dl_phdr_info *info, struct gr_origins_module *module)
{
        for (int i = 0; i < info->dlpi_phnum; i++) {
                const ElfW(Phdr) *part = &info->dlpi_phdr[i];
                const char *at = (const char *)info->dlpi_addr + part->p_vaddr, *end = at + part->p_memsz; // NOLINT

                if (part->p_type != PT_NOTE || !is_loaded(info, part))
                        continue;
                while ((size_t)(end - at) >= sizeof(ElfW(Nhdr))) {
                        const ElfW(Nhdr) *note = (const void *)at;
                        size_t name = (note->n_namesz + 3) & ~3u, content = (note->n_descsz + 3) & ~3u;

                        if ((size_t)(end - at) < sizeof(*note) + name + content)
                                break;
                        at += sizeof(*note) + name;
                        if (note->n_type == NT_GNU_BUILD_ID && name == 4 && memcmp(at - 4, "GNU", 4) == 0 &&
                            note->n_descsz <= sizeof(module->id)) {
                                module->id_bytes = (uint8_t)note->n_descsz;
                                memcpy(module->id, at, note->n_descsz);
                                return;
                        }
                        at += content;
                }
        }
}

struct naming {
        const struct gr_stack_file *file;
        const struct stack *stack;
        uint64_t *frames; /* 0: not found yet */
};

/* The module's record, made where it has none. */
static uint32_t module_record(const struct gr_stack_file *file, const struct dl_phdr_info *info)
{
        union {
                struct gr_origins_module module;
                char bytes[sizeof(struct gr_origins_module) + PATH_MOST];
        } made = {.module = {.head.kind = GR_ORIGINS_MODULE, .base = info->dlpi_addr}};
        const char *name = info->dlpi_name[0] ? info->dlpi_name : program;
        size_t path = strnlen(name, PATH_MOST - 1);
        struct gr_origins_record *record;
        uint32_t known_record;
        uint64_t hash;

        gr_assert_locked(&lock);
        read_build_id(info, &made.module);
        memcpy(made.module.path, name, path);
        hash = mix_text(GR_ORIGINS_MODULE, made.bytes, sizeof(made.module) + path);
        known_record = look_up_record(hash);
        if (known_record)
                return known_record;
        record = file->append(sizeof(made.module) + path + 1);
        if (!record)
                return 0;
        memcpy(record + 1, made.bytes + sizeof(*record), sizeof(made.module) - sizeof(*record) + path);
        record->kind = GR_ORIGINS_MODULE;
        known_record = file->commit(record);
        remember_stack(hash, known_record);
        return known_record;
}

/* Called with the loader's lock held, and takes the lock: never the other way round. */
static int name_in_module(struct dl_phdr_info *info, size_t bytes, void *arg)
{
        const struct naming *naming = arg;
        const struct stack *stack = naming->stack;

        (void)bytes;
        for (unsigned i = 0; i < stack->native_count; i++) {
                uint64_t address = stack->native[i] - info->dlpi_addr;
                uint32_t record = 0;

                for (int p = 0; p < info->dlpi_phnum && !naming->frames[i]; p++)
                        if (info->dlpi_phdr[p].p_type == PT_LOAD &&
                            address - 1 - info->dlpi_phdr[p].p_vaddr < info->dlpi_phdr[p].p_memsz) {
                                gr_lock(&lock);
                                record = module_record(naming->file, info);
                                gr_unlock(&lock);
                                naming->frames[i] = (uint64_t)record << GR_ORIGINS_MODULE_SHIFT |
                                                    (address & GR_ORIGINS_ADDRESS_MASK);
                        }
        }
        return 0;
}

/* The record of a function of Python and a line of it. */
static uint32_t python_record(const struct gr_stack_file *file, const struct gr_python_frame *frame)
{
        char text[PATH_MOST];
        struct gr_origins_python *made;
        uint32_t line = 0, record;
        size_t bytes = gr_python_name(frame, text, sizeof(text), &line);
        uint64_t hash = mix_word(mix_text(GR_ORIGINS_PYTHON, text, bytes), line);

        gr_assert_locked(&lock);
        record = bytes > 0 ? look_up_record(hash) : 0;
        if (record || bytes == 0)
                return record;
        made = (struct gr_origins_python *)file->append(sizeof(*made) + bytes);
        if (!made)
                return 0;
        made->head.kind = GR_ORIGINS_PYTHON;
        made->line = line;
        memcpy(made->name_and_file, text, bytes);
        record = file->commit(&made->head);
        remember_stack(hash, record);
        return record;
}

/* The record of a stack whose hash has none. */
static __attribute__((noinline)) uint32_t stack_record(const struct gr_stack_file *file, const struct stack *stack,
                                                       uint64_t hash)
{
        uint64_t frames[NATIVE_MOST + PYTHON_MOST] = {0}, frames_hash = GR_ORIGINS_STACK;
        unsigned count = stack->native_count;
        struct naming naming = {file, stack, frames};
        struct gr_origins_stack *made;
        uint32_t record;

        if (is_full)
                return 0;
        dl_iterate_phdr(name_in_module, &naming);
        for (unsigned i = 0; i < count; i++)
                if (!frames[i])
                        frames[i] = stack->native[i] & GR_ORIGINS_ADDRESS_MASK;
        gr_lock(&lock);
        for (unsigned i = 0; i < stack->python_count; i++)
                frames[count++] = GR_ORIGINS_IS_PYTHON | python_record(file, &stack->python[i]);
        for (unsigned i = 0; i < count; i++)
                frames_hash = mix_word(frames_hash, frames[i]);
        record = look_up_record(frames_hash);
        if (!record) {
                made = (struct gr_origins_stack *)file->append(sizeof(*made) + count * sizeof(frames[0]));
                if (made) {
                        made->head.kind = GR_ORIGINS_STACK;
                        memcpy(made->frames, frames, count * sizeof(frames[0]));
                        record = file->commit(&made->head);
                }
                remember_stack(frames_hash, record);
        }
        if (!look_up_record(hash))
                remember_stack(hash, record);
        gr_unlock(&lock);
        return record;
}

uint32_t gr_stack_here(const struct gr_stack_file *file)
{
        static _Atomic uint64_t changes_seen;
        uint64_t changes = 0, hash;
        struct stack stack;
        uint32_t record;

        dl_iterate_phdr(count_changes, &changes);
        if (atomic_load_explicit(&changes_seen, memory_order_relaxed) != changes && gr_python_find())
                atomic_store_explicit(&changes_seen, changes, memory_order_relaxed);
        stack.native_count = 0;
        stack.python_count = gr_python_frames(stack.python, PYTHON_MOST);
        stack.to_python = stack.python_count > 0;
        unwind_stack(&stack);
        hash = mix_word(0, changes & UINT32_MAX); /* unloads only: a load changes the meaning of no address */
        for (unsigned i = 0; i < stack.native_count; i++)
                hash = mix_word(hash, stack.native[i]);
        for (unsigned i = 0; i < stack.python_count; i++)
                hash = mix_word(mix_word(mix_word(hash, stack.python[i].code), (uint64_t)stack.python[i].at),
                                stack.python[i].mark);
        hash += !hash;
        record = look_up_record(hash);
        return record ? record : stack_record(file, &stack, hash);
}

int gr_stack_init(void)
{
        void *library = dlopen("libgcc_s.so.1", RTLD_NOW | RTLD_LOCAL);
        ssize_t ignored;
        void *places;

        if (!library)
                return -ENOSYS;
        find_table = (__typeof__(find_table))gr_real_symbol(library, "_Unwind_Find_FDE");
        places = mmap(NULL, KNOWN * sizeof(*known), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (!find_table || places == MAP_FAILED)
                return -ENOSYS;
        known = places;
        ignored = readlink("/proc/self/exe", program, sizeof(program) - 1);
        (void)ignored;
        gr_python_find();
        return 0;
}
