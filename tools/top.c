/* gpureclaim top: the GPUs and the processes on them, live in the terminal. */
#include <curses.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/ladder_rungs.h"
#include "base/options.h"
#include "base/size.h"
#include "command.h"
#include "gpus.h"

#define REFRESH_MS 1000
#define BAR_WIDTH  20
#define BAR_NEEDS  97 /* columns of a row that has a bar */
#define ESCAPE     27

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
        char note[160];
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

static void look_at_gpus(void)
{
        size_t other;

        close_gpus();
        view.count = 0;
        if (gpus_open(&view.gpus, &view.gpu_count, &other) != 0)
                view.gpu_count = 0;
        for (size_t i = 0; i < view.gpu_count; i++) {
                gpu_read(&view.gpus[i], true);
                for (size_t j = 0; j < view.gpus[i].count && view.count < sizeof(view.rows) / sizeof(view.rows[0]); j++)
                        view.rows[view.count++] = (struct row){&view.gpus[i], &view.gpus[i].members[j]};
        }
        qsort(view.rows, view.count, sizeof(view.rows[0]), by_order);
        for (size_t i = 0; i < view.count; i++)
                if (view.rows[i].member->owner == view.selected_owner &&
                    strcmp(view.rows[i].gpu->uuid, view.selected_uuid) == 0)
                        view.selected = i;
        select_row(view.selected);
}

/* A bar of '#' for live, '+' for cached and '.' for all other memory of the GPU, and a blank. "": no room for it. */
static const char *format_bar(uint64_t live, uint64_t cached, uint64_t total, char bar[BAR_WIDTH + 2])
{
        if (COLS < BAR_NEEDS)
                return "";
        for (unsigned i = 0; i < BAR_WIDTH; i++) {
                uint64_t at = total / BAR_WIDTH * i;

                bar[i] = total > 0 && at < live ? '#' : total > 0 && at < live + cached ? '+' : '.';
        }
        bar[BAR_WIDTH] = ' ';
        bar[BAR_WIDTH + 1] = '\0';
        return bar;
}

/* One line of the screen. What does not fit is cut off. */
__attribute__((format(printf, 3, 4))) static void draw_line(int line, int attributes, const char *format, ...)
{
        char text[512];
        va_list args;

        va_start(args, format);
        vsnprintf(text, sizeof(text), format, args);
        va_end(args);
        attron(attributes);
        mvaddnstr(line, 0, text, COLS);
        attroff(attributes);
}

static void draw_screen(void)
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], c[GR_SIZE_TEXT_BYTES], bar[BAR_WIDTH + 2], idle[16],
                mark[12];
        size_t first = 0, room;
        int line = 0;

        erase();
        for (size_t i = 0; i < view.gpu_count; i++) {
                const struct gpu *gpu = &view.gpus[i];

                draw_line(line++, A_NORMAL, "%s%s: %s %.8s, group %s: %s of %s, %s of others",
                          format_bar(gpu->used_bytes, 0, gpu->total_bytes, bar), gpu_mark(gpu, mark),
                          gpu->model[0] ? gpu->model : "GPU", gpu->uuid, gpu->group,
                          gr_size_format(gpu->used_bytes, a, sizeof(a)), gr_size_format(gpu->total_bytes, b, sizeof(b)),
                          gr_size_format(gpu_others_bytes(gpu), c, sizeof(c)));
        }
        line++;
        draw_line(line++, A_BOLD, "%8s GPU %-15s %-*s%12s %12s %12s %7s", "PID", "NAME",
                  COLS < BAR_NEEDS ? 0 : BAR_WIDTH + 1, COLS < BAR_NEEDS ? "" : "USE", "LIVE", "CACHED", "LIMIT",
                  "IDLE");
        /* Scrolls so far that the selected row is shown. */
        room = LINES - 2 > line ? (size_t)(LINES - 2 - line) : 1;
        if (view.selected >= room)
                first = view.selected - room + 1;
        for (size_t i = first; i < view.count && line < LINES - 2; i++, line++) {
                const struct gr_member *member = view.rows[i].member;
                const uint64_t *figures = member->figures;

                snprintf(idle, sizeof(idle), "%.0fs", member_idle_s(view.rows[i].gpu, member));
                draw_line(line, i == view.selected ? A_REVERSE : A_NORMAL, "%8u %3s %-15.15s %s%12s %12s %12s %7s",
                          member->identity.pid, gpu_mark(view.rows[i].gpu, mark), member->name,
                          format_bar(figures[GR_FIGURE_live], figures[GR_FIGURE_cached],
                                     figures[GR_FIGURE_device_total], bar),
                          gr_size_format(figures[GR_FIGURE_live], a, sizeof(a)),
                          gr_size_format(figures[GR_FIGURE_cached], b, sizeof(b)),
                          gr_size_format(figures[GR_FIGURE_hard_limit], c, sizeof(c)),
                          figures[GR_FIGURE_asleep] > 0 ? "asleep" : idle);
        }
        if (view.count == 0)
                draw_line(line, A_NORMAL, "No process of yours runs under gpureclaim on a GPU here.");
        draw_line(LINES - 2, A_NORMAL, "%s", view.note);
        draw_line(LINES - 1, A_NORMAL, "q quit  up/down select  s sort (%s)  t trim  l limit  ? help",
                  order_words[view.order]);
        refresh();
}

/* Reads a line into ret_text, of which the terminal shows what is typed. False: nothing was, or ESC. */
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
                        return length > 0;
                if (key == ESCAPE || key == ERR)
                        return false;
                if ((key == KEY_BACKSPACE || key == 127 || key == '\b') && length > 0)
                        length--;
                else if (key >= ' ' && key < 127 && length + 1 < room)
                        ret_text[length++] = (char)key;
        }
}

/* Asks a question on the last line but one. Reads a line into ret_text; where that is NULL, a key, y for yes. */
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
        timeout(REFRESH_MS);
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
                if (!prompt_user(question, text, sizeof(text))) {
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
                snprintf(view.note, sizeof(view.note), "%u does not answer: nothing is changed",
                         row->member->identity.pid);
        else
                snprintf(view.note, sizeof(view.note), "%u: done, %s came back", row->member->identity.pid,
                         gr_size_format(given, a, sizeof(a)));
}

int command_top(const struct arguments *arguments)
{
        const struct sigaction action = {.sa_handler = interrupt};

        (void)arguments;
        if (!isatty(STDOUT_FILENO) || !isatty(STDIN_FILENO)) {
                complain("top: needs a terminal; gpureclaim status prints once");
                return STATUS_USAGE;
        }
        sigaction(SIGINT, &action, NULL); /* Ctrl-C ends it as q does */
        if (!newterm(NULL, stdout, stdin)) {
                complain("top: this terminal is not known (TERM)");
                return EXIT_FAILURE;
        }
        if (!tigetstr("cup")) {
                endwin();
                complain("top: this kind of terminal cannot show it (TERM); gpureclaim status prints once");
                return EXIT_FAILURE;
        }
        set_escdelay(50); /* or ESC would be seen a second late */
        noecho();
        cbreak();
        keypad(stdscr, TRUE);
        curs_set(0);
        timeout(REFRESH_MS);
        for (int key = ERR; key != 'q' && !interrupted;) {
                look_at_gpus();
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
                else if (key == 't' || key == 'l')
                        act_on_key(key);
        }
        endwin();
        close_gpus();
        return EXIT_SUCCESS;
}
