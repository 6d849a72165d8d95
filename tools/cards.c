/* The processes that use each card: their regions in shared memory, and what NVML says of the card (cards.h). */
#include "cards.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/options.h"
#include "command.h"
#include "driver/dlsym.h"
#include "driver/nvml.h"
#include "system/platform.h"

#define QUIET_NS UINT64_C(1000000000) /* longest wait without a sign of life */
#define WORK_NS  UINT64_C(5000000000) /* longest wait for a process that gives signs of life */

void *gr_real_symbol(void *handle, const char *name)
{
        return dlsym(handle, name);
}

static bool ask_nvml(struct card *card)
{
        struct gr_nvml_memory memory;
        void *device;

        if (gr_nvml_device(card->uuid, &device) != 0 || gr_nvml_memory(device, &memory) != 0)
                return false;
        card->total_bytes = memory.total;
        card->used_bytes = memory.used;
        free(card->uses);
        if (gr_nvml_processes(device, &card->uses, &card->use_count) != 0) {
                card->uses = NULL;
                card->use_count = 0;
        }
        return true;
}

int card_free(const char *name, uint64_t *ret_free_bytes, char ret_uuid[37])
{
        struct gr_nvml_memory memory;
        void *device;
        int rc = gr_nvml_device_named(name, &device, ret_uuid);

        if (rc == 0)
                rc = gr_nvml_memory(device, &memory);
        if (rc == 0)
                *ret_free_bytes = memory.free;
        return rc;
}

static int by_pid(const void *left, const void *right)
{
        const struct gr_member *a = left, *b = right;

        return a->identity.pid < b->identity.pid ? -1 : a->identity.pid > b->identity.pid;
}

static int by_name(const void *left, const void *right)
{
        const struct card *a = left, *b = right;
        int order = strcmp(a->uuid, b->uuid);

        return order ? order : strcmp(a->group, b->group);
}

static void read_members(struct card *card)
{
        if (!card->members)
                card->members = calloc(GR_REGION_SLOTS, sizeof(*card->members));
        card->count = 0;
        card->reserved_bytes = 0;
        for (unsigned i = 0; card->members && i < GR_REGION_SLOTS; i++)
                if (gr_region_read(&card->region, i, &card->members[card->count]) == 0)
                        card->reserved_bytes += card->members[card->count++].reserved_bytes;
        if (card->members)
                qsort(card->members, card->count, sizeof(*card->members), by_pid);
}

void card_read(struct card *card, bool ask)
{
        const struct gr_request refresh = {.orders = GR_ORDER_REFRESH};
        uint64_t newest = 0;

        gr_region_sweep(&card->region);
        read_members(card);
        if (ask_nvml(card))
                return;
        /* One answer suffices: it is about the whole card. */
        for (size_t i = 0; ask && i < card->count; i++) {
                uint64_t given, start;
                struct gr_member *member = &card->members[i];

                if (member->same_namespace &&
                    gr_platform_process_state(member->identity.pid, &start) == GR_PROCESS_STOPPED)
                        continue;
                if (card_request(card, member, &refresh, &given) == 0) {
                        gr_region_read(&card->region, member->slot, member);
                        card->total_bytes = member->figures[GR_FIGURE_device_total];
                        card->used_bytes = card->total_bytes - member->figures[GR_FIGURE_device_free];
                        return;
                }
        }
        for (size_t i = 0; i < card->count; i++)
                if (card->members[i].active_ns >= newest && card->members[i].figures[GR_FIGURE_device_free]) {
                        newest = card->members[i].active_ns;
                        card->total_bytes = card->members[i].figures[GR_FIGURE_device_total];
                        card->used_bytes = card->total_bytes - card->members[i].figures[GR_FIGURE_device_free];
                }
}

static void close_one(struct card *card)
{
        gr_region_close(&card->region);
        free(card->members);
        free(card->uses);
}

int cards_open(struct card **ret_cards, size_t *ret_count, size_t *ret_other)
{
        static struct gr_options options;
        struct card *cards = NULL;
        char dir[GR_REGION_PATH_BYTES];
        struct gr_identity self;
        struct dirent *entry;
        size_t count = 0;
        DIR *open;
        int rc = gr_platform_identity(&self);

        if (rc)
                return rc;
        gr_options_load(&options, (const char *(*)(const char *))getenv, NULL, NULL, NULL);
        *ret_cards = NULL;
        *ret_count = *ret_other = 0;
        if (options.region_dir.text[0])
                memcpy(dir, options.region_dir.text, sizeof(dir));
        else
                rc = gr_region_default_dir(false, dir, sizeof(dir));
        if (rc)
                return rc == -ENOENT ? 0 : rc;
        open = opendir(dir);
        if (!open)
                return errno == ENOENT ? 0 : -errno;
        while ((entry = readdir(open))) {
                struct card *card, *more;

                if (entry->d_name[0] == '.')
                        continue;
                more = realloc(cards, (count + 1) * sizeof(*cards));
                if (!more)
                        break;
                cards = more;
                card = memset(&cards[count], 0, sizeof(*card));
                rc = gr_region_parse_file_name(entry->d_name, card->group, card->uuid);
                if (rc == 0)
                        rc = gr_region_open(&card->region, &gr_platform_ops, &self, dir, entry->d_name, false);
                if (rc) {
                        *ret_other += rc != -ENOENT; /* -ENOENT: a region whose processes have all ended */
                        continue;
                }
                card_read(card, false);
                if (card->count > 0)
                        count++;
                else
                        close_one(card);
        }
        closedir(open);
        if (count > 0)
                qsort(cards, count, sizeof(*cards), by_name);
        *ret_cards = cards;
        *ret_count = count;
        return 0;
}

void cards_close(struct card *cards, size_t count)
{
        for (size_t i = 0; i < count; i++)
                close_one(&cards[i]);
        free(cards);
}

uint64_t card_others_bytes(const struct card *card)
{
        return card->used_bytes > card->reserved_bytes ? card->used_bytes - card->reserved_bytes : 0;
}

uint64_t member_driver_bytes(const struct card *card, const struct gr_member *member)
{
        uint64_t own = member->figures[GR_FIGURE_driver];

        /* Another process may have the same pid here as a member of another pid namespace. */
        for (size_t i = 0; own == UINT64_MAX && member->same_namespace && i < card->use_count; i++)
                if (card->uses[i].pid == member->identity.pid && card->uses[i].bytes != UINT64_MAX &&
                    card->uses[i].bytes >= member->reserved_bytes)
                        own = card->uses[i].bytes - member->reserved_bytes;
        return own;
}

void member_figures(const struct card *card, const struct gr_member *member, uint64_t ret[GR_FIGURE_COUNT])
{
        memcpy(ret, member->figures, sizeof(member->figures));
        for (int i = GR_SHARED_FIGURES; i < GR_FIGURE_COUNT; i++)
                ret[i] = UINT64_MAX;
        ret[GR_FIGURE_reserved] = member->reserved_bytes;
        ret[GR_FIGURE_driver] = member_driver_bytes(card, member);
}

bool card_has_member(const struct card *card, uint32_t pid)
{
        for (size_t i = 0; i < card->count; i++)
                if (card->members[i].same_namespace && card->members[i].identity.pid == pid)
                        return true;
        return false;
}

int card_request(struct card *card, const struct gr_member *member, const struct gr_request *request,
                 uint64_t *ret_given_bytes)
{
        struct gr_slot *slot = &card->region.map->slots[member->slot];
        uint64_t before = atomic_load(&slot->given_bytes), now = gr_platform_now_ns();
        const struct gr_patience patience = {.begin_ns = now, .quiet_ns = QUIET_NS, .deadline_ns = now + WORK_NS};
        uint32_t sequence = gr_region_request(&card->region, member->slot, request);

        if (!gr_region_await(&card->region, member->slot, member->owner, sequence, &patience))
                return atomic_load(&card->region.map->owners[member->slot]) == member->owner ? -ETIMEDOUT : -ESRCH;
        *ret_given_bytes = atomic_load(&slot->given_bytes) - before;
        return 0;
}

double member_idle_s(const struct card *card, const struct gr_member *member)
{
        uint64_t now = card->region.ops->now_ns();

        return now > member->active_ns ? (double)(now - member->active_ns) / 1e9 : 0;
}

int size_parse(const char *text, uint64_t total_bytes, uint64_t *ret_bytes)
{
        struct gr_size size;
        int rc = gr_size_parse(text, &size);

        if (rc == 0)
                *ret_bytes = size.is_percent ? (uint64_t)((double)total_bytes * size.percent / 100) : size.bytes;
        return rc;
}

bool size_argument(const char *command, const char *text, uint64_t total_bytes, uint64_t *ret_bytes)
{
        int rc = size_parse(text, total_bytes, ret_bytes);

        if (rc)
                complain("%s: %s: %s (expected a size such as 4GiB, 512MB or 50%%, or none)", command, text,
                         gr_option_reason(rc));
        return rc == 0;
}
