/*
 * A table of pointers by address, with open addressing and linear probing. Among a million entries nearly every access
 * misses the processor's caches and the TLB; a look-up then costs one miss for the address and one for what it belongs
 * to, where chains cost four and more (docs/measurements.md, ledger-table).
 *
 * The table has no lock of its own: its owner locks it, and frees the values. Only put and clear take a lock inside, of
 * rank GR_RANK_METADATA, for the memory of the slots. Zero bytes are an empty table.
 */
#ifndef GR_ADDRESS_TABLE_H
#define GR_ADDRESS_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The hash's top bits: free for a choice among several tables. Those below choose the slot. */
#define GR_ADDRESS_CHOICE_BITS 6

struct gr_address_slot {
        uint64_t ptr;
        void *value; /* NULL: the slot is empty */
};

/* Others read the slots and their number, for a walk through all entries; address_table.c alone writes. */
struct gr_address_table {
        struct gr_address_slot *slots; /* NULL: none yet */
        size_t room, count;            /* all slots, a power of two; the slots in use */
        unsigned shift;                /* from a hash without the choice bits to a slot: 64 - log2(room) */
};

/*
 * Fibonacci hashing, of addresses and of sizes. Those of device memory are multiples of 512, so the low 9 bits do not
 * count. The product's high bits mix all others.
 */
static inline uint64_t gr_address_hash(uint64_t ptr)
{
        return (ptr >> 9) * UINT64_C(0x9E3779B97F4A7C15);
}

/* The slot at which a search for ptr begins. */
static inline size_t gr_address_table_first(const struct gr_address_table *table, uint64_t ptr)
{
        return (size_t)((gr_address_hash(ptr) << GR_ADDRESS_CHOICE_BITS) >> table->shift);
}

/* The slot of ptr, or the empty one at which the search for it ends; NULL: the table has no slots. */
static inline struct gr_address_slot *gr_address_table_slot(const struct gr_address_table *table, uint64_t ptr)
{
        size_t i;

        if (!table->slots)
                return NULL;
        for (i = gr_address_table_first(table, ptr); table->slots[i].value && table->slots[i].ptr != ptr;)
                i = (i + 1) & (table->room - 1);
        return &table->slots[i];
}

/* What was put in for ptr, or NULL. */
static inline void *gr_address_table_find(const struct gr_address_table *table, uint64_t ptr)
{
        const struct gr_address_slot *slot = gr_address_table_slot(table, ptr);

        return slot ? slot->value : NULL;
}

/*
 * Puts value in for ptr, which must not be in the table. At least half of the slots stay empty, so that searches are
 * short; without memory for more slots a single empty one suffices, as it ends a search. False: there is no slot for
 * it, and nothing has changed. Locks: rank GR_RANK_METADATA, where slots are made.
 */
bool gr_address_table_put(struct gr_address_table *table, uint64_t ptr, void *value);

/* Empties slot, which is in use. Entries behind it may move up, also into it. */
void gr_address_table_remove(struct gr_address_table *table, struct gr_address_slot *slot);

/* Frees the slots, which makes the table an empty one. Locks: rank GR_RANK_METADATA. */
void gr_address_table_clear(struct gr_address_table *table);

#endif
