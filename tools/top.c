/* gpureclaim top: the GPUs and the processes on them, live in the terminal. */
#include <curses.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/ladder_rungs.h"
#include "base/options.h"
#include "base/size.h"
#include "command.h"
#include "gpus.h"

#define REFRESH_MS    1000 /* between two looks; --interval takes REFRESH_LEAST to REFRESH_MOST */
#define REFRESH_LEAST 100
#define REFRESH_MOST  3600000
#define ONCE_COLUMNS  160 /* of --once */
#define TEXT_BYTES    512 /* of a line */
#define BAR_WIDTH     20
#define BAR_AT        29  /* its column in the row of a process */
#define BAR_NEEDS     97  /* columns of a row that has a bar */
#define HISTORY       240 /* looks back */
#define HISTORIES     16  /* GPUs that have one */
#define ESCAPE        27

enum { LIVE_PAIR = 1, CACHED_PAIR };
enum order { BY_RESERVED, BY_CACHED, BY_IDLE, BY_PID, ORDERS };

static const char *const order_words[ORDERS] = {"reserved", "cached", "idle", "pid"};

/* One process on one GPU. */
struct row {
        struct gpu *gpu;
        struct gr_member *member;
};

static struct {
        struct gpu *gpus;
        size_t gpu_count;
        struct row rows[4096];
        size_t count, selected;
        uint64_t selected_owner; /* as others come and go, the process stays selected, and not its line */
        char selected_uuid[37];
        enum order order;
        char filter[32]; /* only processes with this in name, command or pid; "": all */
        char note[160];
        int columns, refresh_ms;
        bool coloured;
        struct history {
                char uuid[37];
                char levels[HISTORY + 1]; /* the newest last; as long as there have been looks */
        } histories[HISTORIES];
} view;

char *tigetstr(const char *name); /* of term.h, which defines common words as macros */

static volatile sig_atomic_t interrupted;

static void interrupt(int signal)
{
        (void)signal;
        interrupted = 1;
}

/* What stands for a GPU on the screen: its number in nvidia-smi or, where that is not known, a letter. */
static const char *gpu_mark(const struct gpu *gpu, char mark[12])
{
        char letter = 'A';

        for (const struct gpu *other = view.gpus; other < gpu; other++)
                letter += strcmp(other->uuid, other[1].uuid) != 0; /* they come by UUID, and groups have one letter */
        if (gpu->index >= 0)
                snprintf(mark, 12, "%d", gpu->index);
        else
                snprintf(mark, 12, "%c", letter);
        return mark;
}

static int compare_numbers(uint64_t a, uint64_t b)
{
        return a > b ? -1 : a < b;
}

static int by_order(const void *left, const void *right)
{
        const struct gr_member *a = ((const struct row *)left)->member, *b = ((const struct row *)right)->member;

        switch (view.order) {
        case BY_CACHED:
                return compare_numbers(a->figures[GR_FIGURE_cached], b->figures[GR_FIGURE_cached]);
        case BY_IDLE:
                return compare_numbers(b->active_ns, a->active_ns);
        case BY_PID:
                return compare_numbers(b->identity.pid, a->identity.pid);
        default:
                return compare_numbers(a->reserved_bytes, b->reserved_bytes);
        }
}

static void close_gpus(void)
{
        gpus_close(view.gpus, view.gpu_count);
        view.gpus = NULL;
        view.gpu_count = 0;
}

/* Selects this row, or the last one. */
static void select_row(size_t i)
{
        view.selected = i < view.count ? i : view.count ? view.count - 1 : 0;
        view.selected_owner = 0;
        if (view.count == 0)
                return;
        view.selected_owner = view.rows[view.selected].member->owner;
        memcpy(view.selected_uuid, view.rows[view.selected].gpu->uuid, sizeof(view.selected_uuid));
}

/* The command line of a process, as far as it goes into ret; "": not known. */
static const char *read_command(const struct gr_member *member, char *ret, size_t room)
{
        char path[32];
        ssize_t length = -1;
        int fd;

        snprintf(path, sizeof(path), "/proc/%u/cmdline", member->identity.pid);
        fd = member->same_namespace ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (fd >= 0) {
                length = read(fd, ret, room - 1);
                close(fd);
        }
        ret[length > 0 ? length : 0] = '\0';
        for (ssize_t i = 0; i < length; i++) {
                if (ret[i] == '\0' && i + 1 < length)
                        ret[i] = ' ';
                else if (ret[i] != '\0' && (ret[i] < ' ' || ret[i] > '~'))
                        ret[i] = '?';
        }
        return ret;
}

static bool is_wanted(const struct gr_member *member)
{
        char command[TEXT_BYTES], pid[16];

        snprintf(pid, sizeof(pid), "%u", member->identity.pid);
        return strcasestr(member->name, view.filter) || strstr(pid, view.filter) ||
               strcasestr(read_command(member, command, sizeof(command)), view.filter);
}

/* How much of the GPU was used at each look; NULL: there are too many GPUs. */
static struct history *history_of(const struct gpu *gpu)
{
        for (size_t i = 0; i < HISTORIES; i++) {
                struct history *history = &view.histories[i];

                if (!history->uuid[0])
                        memcpy(history->uuid, gpu->uuid, sizeof(history->uuid));
                if (strcmp(history->uuid, gpu->uuid) == 0)
                        return history;
        }
        return NULL;
}

static void note_use(const struct gpu *gpu)
{
        static const char levels[] = "_.:-=+*#";
        struct history *history = history_of(gpu);
        size_t length = history ? strlen(history->levels) : 0;
        uint64_t level = gpu->used_bytes / (gpu->total_bytes / (sizeof(levels) - 1) + 1);

        if (!history)
                return;
        if (length == HISTORY)
                memmove(history->levels, history->levels + 1, length--);
        history->levels[length] = levels[gr_min(level, sizeof(levels) - 2)];
        history->levels[length + 1] = '\0';
}

/* Groups of one GPU follow each other. */
static bool is_first_of_gpu(size_t i)
{
        return i == 0 || strcmp(view.gpus[i].uuid, view.gpus[i - 1].uuid) != 0;
}

/* 0, or -errno of gpus_open if the shared memory cannot be read. */
static int look_at_gpus(void)
{
        size_t other;
        int rc;

        close_gpus();
        view.count = 0;
        rc = gpus_open(true, &view.gpus, &view.gpu_count, &other);
        if (rc)
                view.gpu_count = 0;
        for (size_t i = 0; i < view.gpu_count; i++) {
                gpu_read(&view.gpus[i], true);
                if (is_first_of_gpu(i))
                        note_use(&view.gpus[i]);
                for (size_t j = 0; j < view.gpus[i].count && view.count < sizeof(view.rows) / sizeof(view.rows[0]); j++)
                        if (is_wanted(&view.gpus[i].members[j]))
                                view.rows[view.count++] = (struct row){&view.gpus[i], &view.gpus[i].members[j]};
        }
        qsort(view.rows, view.count, sizeof(view.rows[0]), by_order);
        for (size_t i = 0; i < view.count; i++)
                if (view.rows[i].member->owner == view.selected_owner &&
                    strcmp(view.rows[i].gpu->uuid, view.selected_uuid) == 0)
                        view.selected = i;
        select_row(view.selected);
        return rc == -ENOENT ? 0 : rc; /* -ENOENT: there is none, as nothing runs */
}

/* A bar of '#' for live, '+' for cached and '.' for all other memory of the GPU, and a blank. "": no room for it. */
static const char *format_bar(uint64_t live, uint64_t cached, uint64_t total, char bar[BAR_WIDTH + 2])
{
        if (view.columns < BAR_NEEDS)
                return "";
        for (unsigned i = 0; i < BAR_WIDTH; i++) {
                uint64_t at = total / BAR_WIDTH * i;

                bar[i] = total > 0 && at < live ? '#' : total > 0 && at < live + cached ? '+' : '.';
        }
        bar[BAR_WIDTH] = ' ';
        bar[BAR_WIDTH + 1] = '\0';
        return bar;
}

static void gpu_text(const struct gpu *gpu, char text[TEXT_BYTES])
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], c[GR_SIZE_TEXT_BYTES], bar[BAR_WIDTH + 2], mark[12],
                user[72], use[TEXT_BYTES / 2] = "memory unknown";

        if (gpu->total_bytes)
                snprintf(use, sizeof(use), "%s of %s, %s of others", gr_size_format(gpu->used_bytes, a, sizeof(a)),
                         gr_size_format(gpu->total_bytes, b, sizeof(b)),
                         gr_size_format(gpu_others_bytes(gpu), c, sizeof(c)));
        snprintf(text, TEXT_BYTES, "%s%s: %s %.8s, group %s%s: %s",
                 format_bar(gpu->used_bytes, 0, gpu->total_bytes, bar), gpu_mark(gpu, mark),
                 gpu->model[0] ? gpu->model : "GPU", gpu->uuid, gpu->group, gpu_of_user(gpu, user), use);
}

static void head_text(char text[TEXT_BYTES])
{
        bool bar = view.columns >= BAR_NEEDS;
        char user[72];

        snprintf(text, TEXT_BYTES, "%8s GPU %-15s %-*s%12s %12s %12s %7s  %s", "PID", "NAME", bar ? BAR_WIDTH + 1 : 0,
                 bar ? "USE" : "", "LIVE", "CACHED", "LIMIT", "IDLE",
                 view.gpu_count > 0 && gpu_of_user(view.gpus, user)[0] ? "USER       COMMAND" : "COMMAND");
}

static void row_text(const struct row *row, char text[TEXT_BYTES])
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], c[GR_SIZE_TEXT_BYTES], bar[BAR_WIDTH + 2], idle[16],
                mark[12], command[TEXT_BYTES / 2], user[72];
        const uint64_t *figures = row->member->figures;

        snprintf(idle, sizeof(idle), "%.0fs", member_idle_s(row->gpu, row->member));
        gpu_of_user(row->gpu, user);
        snprintf(text, TEXT_BYTES, "%8u %3s %-15.15s %s%12s %12s %12s %7s  %-*.*s%s", row->member->identity.pid,
                 gpu_mark(row->gpu, mark), row->member->name,
                 format_bar(figures[GR_FIGURE_live], figures[GR_FIGURE_cached], figures[GR_FIGURE_device_total], bar),
                 gr_size_format(figures[GR_FIGURE_live], a, sizeof(a)),
                 gr_size_format(figures[GR_FIGURE_cached], b, sizeof(b)),
                 gr_size_format(figures[GR_FIGURE_hard_limit], c, sizeof(c)),
                 figures[GR_FIGURE_waiting] > 0       ? "waits"
                 : figures[GR_FIGURE_asleep_deep] > 0 ? "deep"
                 : figures[GR_FIGURE_asleep] > 0      ? "asleep"
                                                      : idle,
                 user[0] ? 11 : 0, user[0] ? 10 : 0, user[0] ? user + strlen(" of ") : "",
                 read_command(row->member, command, sizeof(command)));
}

static const char no_process[] = "No process of yours runs under gpureclaim on a GPU here.";

/* The screen once, as text. */
static int print_once(void)
{
        int rc = look_at_gpus();
        char text[TEXT_BYTES];

        if (rc) {
                gpus_unread("top", strerror(-rc));
                return EXIT_FAILURE;
        }
        for (size_t i = 0; i < view.gpu_count; i++) {
                gpu_text(&view.gpus[i], text);
                puts(text);
        }
        head_text(text);
        if (view.count > 0)
                puts(text);
        for (size_t i = 0; i < view.count; i++) {
                row_text(&view.rows[i], text);
                puts(text);
        }
        if (view.count == 0)
                puts(no_process);
        close_gpus();
        return EXIT_SUCCESS;
}

/* One line of the screen. What does not fit is cut off. */
__attribute__((format(printf, 3, 4))) static void draw_line(int line, int attributes, const char *format, ...)
{
        char text[TEXT_BYTES];
        va_list args;

        va_start(args, format);
        vsnprintf(text, sizeof(text), format, args);
        va_end(args);
        attron(attributes);
        mvaddnstr(line, 0, text, COLS);
        attroff(attributes);
}

/* Gives the bar at this place its colours, where the terminal has any. */
static void colour_bar(int line, int column, const char *text)
{
        for (int i = 0; view.coloured && view.columns >= BAR_NEEDS && i < BAR_WIDTH; i++)
                if (text[column + i] != '.')
                        mvchgat(line, column + i, 1, A_NORMAL, text[column + i] == '#' ? LIVE_PAIR : CACHED_PAIR, NULL);
}

static void draw_screen(void)
{
        static const char label[] = "  use over time ";
        char text[TEXT_BYTES];
        /* GPUs take up to half of the lines that are not for heads and keys; that of the selected process is shown. */
        size_t first = 0, room = LINES > 6 ? (size_t)(LINES - 4) / 2 : 1,
               gpu_end = view.count > 0 ? (size_t)(view.rows[view.selected].gpu - view.gpus) + 1 : 0;
        int line = 0;

        erase();
        view.columns = COLS;
        if (gpu_end < room)
                gpu_end = gr_min(room, view.gpu_count);
        for (size_t i = gpu_end > room ? gpu_end - room : 0; i < gpu_end; i++) {
                const struct history *history = is_first_of_gpu(i) ? history_of(&view.gpus[i]) : NULL;
                size_t known = history ? strlen(history->levels) : 0,
                       shown = COLS > (int)sizeof(label) ? (size_t)COLS - sizeof(label) : 1;

                gpu_text(&view.gpus[i], text);
                draw_line(line, A_NORMAL, "%s", text);
                colour_bar(line++, 0, text);
                if (known > 1 && LINES >= 12 + 2 * (int)view.gpu_count) /* the newest at the right */
                        draw_line(line++, A_DIM, "%s%s", label, history->levels + (known > shown ? known - shown : 0));
        }
        if (view.gpu_count > room)
                draw_line(line, A_DIM, "%zu more", view.gpu_count - room);
        line++;
        head_text(text);
        draw_line(line++, A_BOLD, "%s", text);
        /* Scrolls so far that the selected row is shown. */
        room = LINES - 2 > line ? (size_t)(LINES - 2 - line) : 1;
        if (view.selected >= room)
                first = view.selected - room + 1;
        for (size_t i = first; i < view.count && line < LINES - 2; i++, line++) {
                row_text(&view.rows[i], text);
                draw_line(line, i == view.selected ? A_REVERSE : A_NORMAL, "%s", text);
                if (i != view.selected)
                        colour_bar(line, BAR_AT, text);
        }
        if (view.count == 0)
                draw_line(line, A_NORMAL, view.filter[0] ? "No process matches the filter." : no_process);
        draw_line(LINES - 2, A_NORMAL, "%s", view.note);
        draw_line(LINES - 1, A_NORMAL, "q quit  up/down select  s sort (%s)  / filter%s%s%s  t trim  l limit  ? help",
                  order_words[view.order], view.filter[0] ? " (" : "", view.filter, view.filter[0] ? ")" : "");
        refresh();
}

/* Reads a line into ret_text, of which the terminal shows what is typed. False: ESC or Ctrl-C. */
static bool read_line(const char *question, char *ret_text, size_t room)
{
        size_t length = 0;

        for (;;) {
                int key;

                ret_text[length] = '\0';
                move(LINES - 2, 0);
                clrtoeol();
                draw_line(LINES - 2, A_NORMAL, "%s %s", question, ret_text);
                key = getch();
                if (key == '\n' || key == '\r' || key == KEY_ENTER)
                        return true;
                if (key == ESCAPE || key == ERR)
                        return false;
                if ((key == KEY_BACKSPACE || key == 127 || key == '\b') && length > 0)
                        length--;
                else if (key >= ' ' && key < 127 && length + 1 < room)
                        ret_text[length++] = (char)key;
        }
}

/*
 * Asks a question on the last line but one. Reads a line into ret_text; where that is NULL, a key, y for yes. False:
 * ESC, Ctrl-C or no.
 */
static bool prompt_user(const char *question, char *ret_text, size_t room)
{
        bool yes;

        timeout(-1);
        if (ret_text) {
                yes = read_line(question, ret_text, room);
        } else {
                move(LINES - 2, 0);
                clrtoeol();
                draw_line(LINES - 2, A_NORMAL, "%s ", question);
                yes = getch() == 'y';
        }
        timeout(view.refresh_ms);
        return yes;
}

static void act_on_key(int key)
{
        struct gr_request request = {0};
        char question[128], text[32], a[GR_SIZE_TEXT_BYTES];
        struct row *row = &view.rows[view.selected];
        uint64_t bytes, given;
        int rc;

        if (view.count == 0)
                return;
        if (key == 't') {
                request = (struct gr_request){.want_bytes = UINT64_C(1) << 50, .rung = GR_RUNG_TRIM};
                snprintf(question, sizeof(question), "Trim the cache of %u? (y)", row->member->identity.pid);
        } else {
                snprintf(question, sizeof(question),
                         "Hard limit of %u (such as 4GiB, 50%%, none):", row->member->identity.pid);
                if (!prompt_user(question, text, sizeof(text)) || !text[0]) {
                        snprintf(view.note, sizeof(view.note), "nothing changed");
                        return;
                }
                if (size_parse(text, row->member->figures[GR_FIGURE_device_total], &bytes) != 0 ||
                    bytes < (uint64_t)gr_option_table[GR_OPTION_HARD_LIMIT].min) {
                        snprintf(view.note, sizeof(view.note), "%s: not a size", text);
                        return;
                }
                request = (struct gr_request){.orders = GR_ORDER_LIMIT, .new_limit = bytes};
                snprintf(question, sizeof(question), "Set the hard limit of %u to %s? (y)", row->member->identity.pid,
                         gr_size_format(bytes, a, sizeof(a)));
        }
        if (!prompt_user(question, NULL, 0)) {
                snprintf(view.note, sizeof(view.note), "nothing changed");
                return;
        }
        rc = gpu_request(row->gpu, row->member, &request, &given);
        if (rc)
                snprintf(view.note, sizeof(view.note), "%u: %s", row->member->identity.pid, gpu_request_failure(rc));
        else
                snprintf(view.note, sizeof(view.note), "%u: done, %s came back", row->member->identity.pid,
                         gr_size_format(given, a, sizeof(a)));
}

static void ask_filter(void)
{
        char text[sizeof(view.filter)];

        if (prompt_user("Only those with this in name, command or pid (nothing: all):", text, sizeof(text)))
                memcpy(view.filter, text, sizeof(text));
}

int command_top(const struct arguments *arguments)
{
        const struct sigaction action = {.sa_handler = interrupt};
        const char *interval = flag_value(arguments, "interval");
        uint64_t interval_ns = REFRESH_MS * UINT64_C(1000000);
        int rc = 0;

        if (interval &&
            (gr_duration_parse(interval, &interval_ns) != 0 || interval_ns < REFRESH_LEAST * UINT64_C(1000000) ||
             interval_ns > REFRESH_MOST * UINT64_C(1000000))) {
                complain("top: --interval %s: not understood (expected a time from 100ms to 1h)", interval);
                return STATUS_USAGE;
        }
        view.refresh_ms = (int)(interval_ns / 1000000);
        view.columns = ONCE_COLUMNS;
        if (flag_value(arguments, "once"))
                return print_once();
        if (!isatty(STDOUT_FILENO) || !isatty(STDIN_FILENO)) {
                complain("top: needs a terminal; --once prints it as text");
                return STATUS_USAGE;
        }
        sigaction(SIGINT, &action, NULL); /* Ctrl-C ends it as q does */
        if (!newterm(NULL, stdout, stdin)) {
                complain("top: this terminal is not known (TERM)");
                return EXIT_FAILURE;
        }
        if (!tigetstr("cup")) {
                endwin();
                complain("top: this kind of terminal cannot show it (TERM); --once prints it as text");
                return EXIT_FAILURE;
        }
        set_escdelay(50); /* or ESC would be seen a second late */
        noecho();
        cbreak();
        keypad(stdscr, TRUE);
        curs_set(0);
        if (has_colour(stdout) && has_colors()) {
                start_color();
                use_default_colors();
                init_pair(LIVE_PAIR, COLOR_BLUE, -1);
                init_pair(CACHED_PAIR, COLOR_CYAN, -1);
                view.coloured = true;
        }
        timeout(view.refresh_ms);
        for (int key = ERR; key != 'q' && !interrupted;) {
                rc = look_at_gpus();
                if (rc)
                        break;
                draw_screen();
                key = getch();
                if (key == ERR && !isatty(STDIN_FILENO)) /* the terminal is gone: getch would no longer wait */
                        break;
                if (key == KEY_UP && view.selected > 0)
                        select_row(view.selected - 1);
                else if (key == KEY_DOWN)
                        select_row(view.selected + 1);
                else if (key == '?' || key == 'h')
                        snprintf(view.note, sizeof(view.note), "%s",
                                 "bars: # live (of a GPU: used), + cached, . the rest; LIMIT: the hard limit; "
                                 "IDLE: since memory was used");
                else if (key == 's')
                        view.order = (view.order + 1) % ORDERS;
                else if (key == '/')
                        ask_filter();
                else if (key == 't' || key == 'l')
                        act_on_key(key);
        }
        endwin();
        close_gpus();
        if (rc)
                gpus_unread("top", strerror(-rc));
        return rc ? EXIT_FAILURE : EXIT_SUCCESS;
}
