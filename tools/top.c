/* gpureclaim top: the GPUs and the processes on them, live in the terminal. */
#include <curses.h>
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
        enum order order;
        char note[160];
} view;

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
        if (view.selected >= view.count)
                view.selected = view.count ? view.count - 1 : 0;
}

/* A bar of '#' for live, '+' for cached and '.' for all other memory of the GPU. */
static void draw_bar(uint64_t live, uint64_t cached, uint64_t total)
{
        for (unsigned i = 0; i < BAR_WIDTH; i++) {
                uint64_t at = total / BAR_WIDTH * i;

                addch(total > 0 && at < live ? '#' : total > 0 && at < live + cached ? '+' : '.');
        }
}

static void draw_screen(void)
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], c[GR_SIZE_TEXT_BYTES];
        size_t first = 0, room;
        int line = 0;

        erase();
        for (size_t i = 0; i < view.gpu_count; i++) {
                const struct gpu *gpu = &view.gpus[i];

                move(line++, 0);
                draw_bar(gpu->used_bytes, 0, gpu->total_bytes);
                printw(" GPU %.8s %s: %s of %s, %s of others", gpu->uuid, gpu->group,
                       gr_size_format(gpu->used_bytes, a, sizeof(a)), gr_size_format(gpu->total_bytes, b, sizeof(b)),
                       gr_size_format(gpu_others_bytes(gpu), c, sizeof(c)));
        }
        attron(A_BOLD);
        mvprintw(++line, 0, "%8s %-15s %-*s %12s %12s %12s %7s", "PID", "NAME", BAR_WIDTH, "USE", "LIVE", "CACHED",
                 "LIMIT", "IDLE");
        attroff(A_BOLD);
        line++;
        /* Scrolls so far that the selected row is shown. */
        room = LINES - 2 > line ? (size_t)(LINES - 2 - line) : 1;
        if (view.selected >= room)
                first = view.selected - room + 1;
        for (size_t i = first; i < view.count && line < LINES - 2; i++, line++) {
                const struct gr_member *member = view.rows[i].member;
                const uint64_t *figures = member->figures;

                if (i == view.selected)
                        attron(A_REVERSE);
                mvprintw(line, 0, "%8u %-15.15s ", member->identity.pid, member->name);
                draw_bar(figures[GR_FIGURE_live], figures[GR_FIGURE_cached], figures[GR_FIGURE_device_total]);
                printw(" %12s %12s %12s %6.0fs", gr_size_format(figures[GR_FIGURE_live], a, sizeof(a)),
                       gr_size_format(figures[GR_FIGURE_cached], b, sizeof(b)),
                       gr_size_format(figures[GR_FIGURE_hard_limit], c, sizeof(c)),
                       member_idle_s(view.rows[i].gpu, member));
                attroff(A_REVERSE);
        }
        if (view.count == 0)
                mvprintw(line, 0, "No process of yours runs under gpureclaim on a GPU here.");
        mvprintw(LINES - 2, 0, "%s", view.note);
        mvprintw(LINES - 1, 0, "q quit  up/down select  s sort (%s)  t trim  l limit", order_words[view.order]);
        refresh();
}

/* Asks a question on the last line but one. Reads a line into ret_text; where that is NULL, a key, y for yes. */
static bool prompt_user(const char *question, char *ret_text, int room)
{
        bool yes;

        move(LINES - 2, 0);
        clrtoeol();
        printw("%s ", question);
        timeout(-1);
        if (ret_text) {
                echo();
                yes = getnstr(ret_text, room - 1) == OK && ret_text[0];
                noecho();
        } else {
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
                if (!prompt_user(question, text, sizeof(text)))
                        return;
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
                snprintf(view.note, sizeof(view.note), "%u does not answer", row->member->identity.pid);
        else
                snprintf(view.note, sizeof(view.note), "%u: done, %s came back", row->member->identity.pid,
                         gr_size_format(given, a, sizeof(a)));
}

int command_top(const struct arguments *arguments)
{
        (void)arguments;
        if (!isatty(STDOUT_FILENO) || !isatty(STDIN_FILENO)) {
                complain("top: needs a terminal; gpureclaim status prints once");
                return STATUS_USAGE;
        }
        if (!newterm(NULL, stdout, stdin)) {
                complain("top: this terminal is not known (TERM)");
                return EXIT_FAILURE;
        }
        noecho();
        cbreak();
        keypad(stdscr, TRUE);
        curs_set(0);
        timeout(REFRESH_MS);
        for (int key = ERR; key != 'q';) {
                look_at_gpus();
                draw_screen();
                key = getch();
                if (key == ERR && !isatty(STDIN_FILENO)) /* the terminal is gone: getch would no longer wait */
                        break;
                if (key == KEY_UP && view.selected > 0)
                        view.selected--;
                else if (key == KEY_DOWN)
                        view.selected++;
                else if (key == 's')
                        view.order = (view.order + 1) % ORDERS;
                else if (key == 't' || key == 'l')
                        act_on_key(key);
        }
        endwin();
        close_gpus();
        return EXIT_SUCCESS;
}
