/* Names for addresses: by addr2line or llvm-symbolizer, else from the table of symbols of the file (symbols.h). */
#include "symbols.h"

#include <elf.h>
#include <fcntl.h>
#include <inttypes.h>
#include <link.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define ADDRESSES_MOST 1024 /* in one call of a tool */

extern char **environ;

/* A file in memory. get_part() checks each access against its size. */
struct elf {
        const char *bytes;
        size_t size;
};

static const void *get_part(const struct elf *elf, uint64_t at, uint64_t bytes)
{
        return at <= elf->size && bytes <= elf->size - at ? elf->bytes + at : NULL;
}

static bool open_elf(const char *path, struct elf *ret)
{
        int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        const ElfW(Ehdr) * header;
        struct stat about;
        void *mapped = MAP_FAILED;

        if (fd < 0)
                return false;
        if (fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0)
                mapped = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        close(fd);
        if (mapped == MAP_FAILED)
                return false;
        *ret = (struct elf){mapped, (size_t)about.st_size};
        header = get_part(ret, 0, sizeof(*header));
        if (header && memcmp(header->e_ident, ELFMAG, SELFMAG) == 0 &&
            header->e_ident[EI_CLASS] == (sizeof(void *) == 8 ? ELFCLASS64 : ELFCLASS32))
                return true;
        munmap(mapped, ret->size);
        return false;
}

/* The section of this number; NULL: there is none. */
static const ElfW(Shdr) * get_section(const struct elf *elf, size_t number)
{
        const ElfW(Ehdr) *header = (const void *)elf->bytes;

        if (number >= header->e_shnum || header->e_shentsize != sizeof(ElfW(Shdr)))
                return NULL;
        return get_part(elf, header->e_shoff + number * sizeof(ElfW(Shdr)), sizeof(ElfW(Shdr)));
}

/* Whether the file has a build ID other than this one. */
static bool is_another(const struct elf *elf, const uint8_t *build_id, size_t build_id_bytes)
{
        const ElfW(Shdr) * found;

        for (size_t i = 0; build_id_bytes > 0 && (found = get_section(elf, i)); i++) {
                const char *note = found->sh_type == SHT_NOTE ? get_part(elf, found->sh_offset, found->sh_size) : NULL;
                const ElfW(Nhdr) *head = (const void *)note;

                if (note && found->sh_size >= sizeof(*head) + 4 && head->n_type == NT_GNU_BUILD_ID &&
                    head->n_namesz == 4 && memcmp(note + sizeof(*head), "GNU", 4) == 0)
                        return head->n_descsz != build_id_bytes ||
                               found->sh_size < sizeof(*head) + 4 + build_id_bytes ||
                               memcmp(note + sizeof(*head) + 4, build_id, build_id_bytes) != 0;
        }
        return false;
}

/* The function that the address is in, by the file's tables of symbols; NULL: not known. */
static const char *find_function(const struct elf *elf, uint64_t address)
{
        const ElfW(Shdr) * table, *names;
        const char *best = NULL;
        uint64_t best_at = 0;

        for (size_t i = 0; (table = get_section(elf, i)); i++) {
                if (table->sh_type != SHT_SYMTAB && table->sh_type != SHT_DYNSYM)
                        continue;
                names = get_section(elf, table->sh_link);
                for (uint64_t at = 0; names && at + sizeof(ElfW(Sym)) <= table->sh_size; at += sizeof(ElfW(Sym))) {
                        const ElfW(Sym) *symbol = get_part(elf, table->sh_offset + at, sizeof(*symbol));
                        const char *name;

                        if (!symbol)
                                break;
                        if (ELF64_ST_TYPE(symbol->st_info) != STT_FUNC || symbol->st_value > address ||
                            address - symbol->st_value >= symbol->st_size || symbol->st_value < best_at ||
                            symbol->st_name >= names->sh_size)
                                continue;
                        name = get_part(elf, names->sh_offset + symbol->st_name, names->sh_size - symbol->st_name);
                        if (name && memchr(name, '\0', names->sh_size - symbol->st_name)) {
                                best = name;
                                best_at = symbol->st_value;
                        }
                }
        }
        return best;
}

static void add_place(struct places *places, const char *function, const char *where)
{
        struct place *list = realloc(places->list, (places->count + 1) * sizeof(*list)), *place;
        const char *colon = strrchr(where, ':');

        if (!list)
                return;
        places->list = list;
        place = &list[places->count++];
        *place = (struct place){0};
        if (strcmp(function, "??") != 0)
                place->function = strdup(function);
        place->line = colon ? (unsigned)strtoul(colon + 1, NULL, 10) : 0; /* "?": not known */
        if (place->line > 0)
                place->file = strndup(where, (size_t)(colon - where));
}

/* Reads what the tool prints: for each address a line with the address, and then two lines for each place. */
static void read_names(FILE *from, size_t count, struct places *ret)
{
        char *function = NULL, *where = NULL;
        size_t function_room = 0, where_room = 0, at = 0;

        while (getline(&function, &function_room, from) > 0) {
                function[strcspn(function, "\n")] = '\0';
                if (strncmp(function, "0x", 2) == 0) {
                        at++;
                        continue;
                }
                if (at == 0 || at > count || getline(&where, &where_room, from) <= 0)
                        break;
                where[strcspn(where, "\n")] = '\0';
                add_place(&ret[at - 1], function, where);
        }
        free(function);
        free(where);
}

/* Runs a tool that names addresses, if there is one. */
static void run_tool(const char *path, const uint64_t *addresses, size_t count, struct places *ret)
{
        static const char *const tools[] = {"addr2line", "llvm-addr2line", "llvm-symbolizer"};
        static const char *const flags[] = {"-a", "-f", "-i", "-C", "-e"};
        static char texts[ADDRESSES_MOST][20];
        const char *argv[ADDRESSES_MOST + 9] = {NULL};
        posix_spawn_file_actions_t actions;
        int ends[2];
        pid_t tool;

        if (pipe2(ends, O_CLOEXEC) != 0)
                return;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
        posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
        for (size_t i = 0; i < sizeof(tools) / sizeof(tools[0]); i++) {
                size_t used = 0;
                FILE *from;

                argv[used++] = tools[i];
                if (i == 2)
                        argv[used++] = "--output-style=GNU";
                for (size_t f = 0; f < sizeof(flags) / sizeof(flags[0]); f++)
                        argv[used++] = flags[f];
                argv[used++] = path;
                for (size_t a = 0; a < count; a++) {
                        snprintf(texts[a], sizeof(texts[a]), "0x%" PRIx64, addresses[a]);
                        argv[used++] = texts[a];
                }
                argv[used] = NULL;
                if (posix_spawnp(&tool, tools[i], &actions, NULL, (char *const *)argv, environ) != 0) // NOLINT
                        continue;
                close(ends[1]);
                ends[1] = -1;
                from = fdopen(ends[0], "re");
                if (from) {
                        read_names(from, count, ret);
                        fclose(from);
                        ends[0] = -1;
                }
                waitpid(tool, NULL, 0);
                break;
        }
        posix_spawn_file_actions_destroy(&actions);
        for (int i = 0; i < 2; i++)
                if (ends[i] >= 0)
                        close(ends[i]);
}

void symbols_name(const char *path, const uint8_t *build_id, size_t build_id_bytes, const uint64_t *addresses,
                  size_t count, struct places *ret)
{
        struct elf elf = {0};
        bool opened = open_elf(path, &elf), usable = opened && !is_another(&elf, build_id, build_id_bytes);

        memset(ret, 0, count * sizeof(*ret));
        /* The tool would read arguments from a file whose path begins with '@'. */
        for (size_t i = 0; usable && path[0] != '@' && i < count; i += ADDRESSES_MOST)
                run_tool(path, addresses + i, count - i < ADDRESSES_MOST ? count - i : ADDRESSES_MOST, ret + i);
        for (size_t i = 0; i < count; i++) {
                struct place *last;

                if (ret[i].count == 0)
                        add_place(&ret[i], "??", "??");
                last = ret[i].count > 0 ? &ret[i].list[ret[i].count - 1] : NULL;
                /* Where the tool knows no line, it names the nearest function, which may end before the address. */
                if (usable && last && !(last->function && last->file)) {
                        const char *function = find_function(&elf, addresses[i]);

                        if (!function)
                                last->function = NULL;
                        else if (!last->function)
                                last->function = strdup(function);
                }
        }
        if (opened)
                munmap((void *)elf.bytes, elf.size); // NOLINT
}
