#include "base/address_table.h"

#include <unistd.h>

#include "check.h"
#include "short_of_memory.h"

#define BASE   UINT64_C(0x7f0000000000)
#define PLACES 300

static struct gr_address_table table;
static unsigned values[PLACES]; /* what is put in: the places of these */
static bool held[PLACES];

/* Squares have hashes that lie close together here, and far apart there. */
static uint64_t address(unsigned i)
{
        return BASE + UINT64_C(512) * i * i;
}

/* The places whose value is not found where it is, or is found where it is not. */
static unsigned wrong_places(void)
{
        unsigned wrong = 0;

        for (unsigned i = 0; i < PLACES; i++)
                wrong += gr_address_table_find(&table, address(i)) != (held[i] ? &values[i] : NULL);
        return wrong;
}

/*
 * Entries come and go at random, so that the table grows and runs around its end, and gaps close: each is found after
 * each step.
 */
static void test_random(void)
{
        uint64_t seed = 1;
        unsigned wrong = 0, count = 0;

        for (unsigned step = 0; step < 20000; step++) {
                /* Few for a while, then many: the slots around the end are now in use and now not. */
                unsigned i, among = step / 500 % 2 ? PLACES : PLACES / 8;

                seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                i = (seed >> 33) % among;
                if (held[i])
                        gr_address_table_remove(&table, gr_address_table_slot(&table, address(i)));
                else
                        wrong += !gr_address_table_put(&table, address(i), &values[i]);
                held[i] = !held[i];
                count += held[i] ? 1 : -1u;
                wrong += wrong_places() + (table.count != count);
        }
        GR_CHECK_EQ(wrong, 0);
        GR_CHECK(count > 0 && table.room >= 2 * count);
        gr_address_table_clear(&table);
        GR_CHECK(gr_address_table_find(&table, address(0)) == NULL && table.count == 0);
}

/* A walk that removes what it sees, and looks at the same slot again, misses none. */
static void test_remove_in_walk(void)
{
        for (unsigned i = 0; i < PLACES; i++)
                GR_CHECK(gr_address_table_put(&table, address(i), &values[i]));
        for (size_t i = 0; i < table.room;)
                if (table.slots[i].value && (unsigned *)table.slots[i].value < &values[PLACES / 2])
                        gr_address_table_remove(&table, &table.slots[i]);
                else
                        i++;
        for (unsigned i = 0; i < PLACES; i++)
                held[i] = i >= PLACES / 2;
        GR_CHECK_EQ(wrong_places(), 0);
        GR_CHECK_EQ(table.count, PLACES / 2);
        gr_address_table_clear(&table);
}

/* Without memory for more slots all are used but one, where searches end; and without any nothing is put in. */
static void test_no_memory(void)
{
        size_t room;

        memset(held, 0, sizeof(held));
        memory_runs_out(16 * sizeof(struct gr_address_slot));
        GR_CHECK(!gr_address_table_put(&table, address(0), &values[0]));
        GR_CHECK(gr_address_table_find(&table, address(0)) == NULL);
        memory_is_back();
        held[0] = gr_address_table_put(&table, address(0), &values[0]);
        room = table.room;
        memory_runs_out(2 * room * sizeof(struct gr_address_slot));
        for (unsigned i = 1; i < room - 1; i++)
                held[i] = gr_address_table_put(&table, address(i), &values[i]);
        alarm(20); /* or a search may go on for ever */
        GR_CHECK(!gr_address_table_put(&table, address((unsigned)room), &values[room]));
        GR_CHECK_EQ(wrong_places(), 0);
        alarm(0);
        GR_CHECK(table.room == room && table.count == room - 1);
        memory_is_back();
        held[room] = gr_address_table_put(&table, address((unsigned)room), &values[room]);
        GR_CHECK(held[room] && table.room == 2 * room);
        GR_CHECK_EQ(wrong_places(), 0);
        gr_address_table_clear(&table);
}

int main(void)
{
        test_random();
        test_remove_in_walk();
        test_no_memory();
        return GR_CHECK_RESULT();
}
