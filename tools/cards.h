/* The cards that processes with the library use, from the regions in shared memory. */
#ifndef GR_CARDS_H
#define GR_CARDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver/nvml.h"
#include "region/region.h"

/* One group of processes on one GPU. */
struct card {
        struct gr_region region;
        char group[GR_GROUP_NAME_BYTES];
        char uuid[37];
        uint64_t total_bytes, used_bytes; /* of the card; 0 and 0: not known */
        uint64_t reserved_bytes;          /* of all members */
        struct gr_member *members;        /* by pid */
        size_t count;
        struct gr_nvml_use *uses; /* of all processes, from NVML; NULL: not known */
        size_t use_count;
};

/*
 * Opens every region that the user has and reads it, after freeing the slots of processes that are gone. 0, with cards
 * that have members, by UUID and group, for cards_close; or -errno. *ret_other: files that are no region of this
 * version.
 */
int cards_open(struct card **ret_cards, size_t *ret_count, size_t *ret_other);

void cards_close(struct card *cards, size_t count);

/*
 * Reads the members again, and what is used of the card: from NVML or, where that is missing, from what the members
 * have last seen. ask: one of them looks at the card now.
 */
void card_read(struct card *card, bool ask);

/* The memory of the card that is used, and not reserved by a member. */
uint64_t card_others_bytes(const struct card *card);

/*
 * The driver overhead of a member: what the member says, or else what NVML says that the process uses, less what it has
 * reserved. UINT64_MAX: not known.
 */
uint64_t member_driver_bytes(const struct card *card, const struct gr_member *member);

/* What is known of a member: what it says of itself, but for what the region or the driver knows better. */
void member_figures(const struct card *card, const struct gr_member *member, uint64_t ret[GR_FIGURE_COUNT]);

/* Whether process pid is one of the members. */
bool card_has_member(const struct card *card, uint32_t pid);

/* Asks a member for something and waits for it. 0, -ESRCH: it is gone; -ETIMEDOUT: it does not answer. */
int card_request(struct card *card, const struct gr_member *member, const struct gr_request *request,
                 uint64_t *ret_given_bytes);

/*
 * Free memory of a card, from NVML, so that no context is made for it. name: the card's number in nvidia-smi, or its
 * UUID ("GPU-...") or the beginning of that, as in CUDA_VISIBLE_DEVICES. -ENOTSUP: NVML is not there, or does not tell;
 * -ENODEV: no such card.
 */
int card_free(const char *name, uint64_t *ret_free_bytes, char ret_uuid[37]);

/* Seconds since the process last did something with its memory. */
double member_idle_s(const struct card *card, const struct gr_member *member);

/* Parses a size for a card of total_bytes. 0, or an error of gr_size_parse. */
int size_parse(const char *text, uint64_t total_bytes, uint64_t *ret_bytes);

/* Parses a size argument of command for a member or card of total_bytes. False: it is no size, which it has printed. */
bool size_argument(const char *command, const char *text, uint64_t total_bytes, uint64_t *ret_bytes);

#endif
