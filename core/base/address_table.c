#include "base/address_table.h"

#include <assert.h>

#include "base/metadata.h"

#define ROOM_LEAST 16

_Static_assert((ROOM_LEAST & (ROOM_LEAST - 1)) == 0, "a mask finds the next slot");

/* There must be an empty slot beside the one that is taken, or a search would not end. */
static void put_in_slot(struct gr_address_table *table, uint64_t ptr, void *value)
{
        struct gr_address_slot *slot = gr_address_table_slot(table, ptr);

        assert(table->count + 1 < table->room && !slot->value);
        *slot = (struct gr_address_slot){ptr, value};
        table->count++;
}

/* Moves all entries to twice as many slots. False: out of memory, and nothing has changed. */
static __attribute__((noinline)) bool grow_table(struct gr_address_table *table)
{
        size_t room = table->room ? 2 * table->room : ROOM_LEAST;
        struct gr_address_table larger = {.room = room, .shift = 64 - (unsigned)__builtin_ctzll(room)};

        larger.slots = gr_metadata_alloc(room * sizeof(*larger.slots));
        if (!larger.slots)
                return false;
        for (size_t i = 0; i < table->room; i++)
                if (table->slots[i].value)
                        put_in_slot(&larger, table->slots[i].ptr, table->slots[i].value);
        assert(larger.count == table->count);
        gr_address_table_clear(table);
        *table = larger;
        return true;
}

bool gr_address_table_put(struct gr_address_table *table, uint64_t ptr, void *value)
{
        assert(value);
        if (2 * (table->count + 1) > table->room && !grow_table(table) && table->count + 1 >= table->room)
                return false;
        put_in_slot(table, ptr, value);
        return true;
}

void gr_address_table_remove(struct gr_address_table *table, struct gr_address_slot *slot)
{
        size_t last = table->room - 1, at = (size_t)(slot - table->slots);

        assert(table->count > 0 && at <= last && slot->value);
        /* Entries behind it move up where a search, which ends at an empty slot, would miss them. */
        for (size_t i = (at + 1) & last; table->slots[i].value; i = (i + 1) & last) {
                size_t first = gr_address_table_first(table, table->slots[i].ptr);

                if (((i - first) & last) < ((i - at) & last))
                        continue; /* it would come before the slot at which a search for it begins */
                table->slots[at] = table->slots[i];
                at = i;
        }
        table->slots[at].value = NULL;
        table->count--;
}

void gr_address_table_clear(struct gr_address_table *table)
{
        gr_metadata_free(table->slots, table->room * sizeof(*table->slots));
        *table = (struct gr_address_table){0};
}
