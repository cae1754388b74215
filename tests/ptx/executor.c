/* Execution of translated kernels on the CPU, one thread of a block after the other, in memory that
is checked. libcuda.c uses it as its device. */

#define _GNU_SOURCE
#include "executor.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGE = 4096 };
static const u64 CAPACITY = 1ull << 36; /* addresses, which are not used again when memory is freed */

static Machine machine;
static u64 used = PAGE;
static u32 launch_count;
static int races, reversed;
static char message[512];
static jmp_buf stop;

void executor_set(int with_races, int in_reverse) { races = with_races, reversed = in_reverse; }
const char *executor_message(void) { return message; }

static void fail(const Thread *t, int line, const char *what, u64 address) {
    snprintf(message, sizeof message, "line %d of the PTX: %s: %#llx, block %u, thread (%u, %u)", line,
             what, (unsigned long long)address, t->block, t->tid[0], t->tid[1]);
    longjmp(stop, 1);
}

/* Counts: the lanes of a warp that execute a line for the k-th time do so together. */

typedef struct { u32 warp, line, turn, write; u64 sector; } Access;
static Counts *counts;
static Access *accesses;
static u64 access_count, access_room;
static u32 *turns; /* by line and thread of the block */
enum { LINES = 1 << 12 };

void executor_count(Counts *target) { counts = target; }

static int compare(const void *a, const void *b) { return memcmp(a, b, sizeof(Access)); }

static void count_access(const Thread *t, u64 address, u32 size, int line, int write) {
    u32 turn = turns[(u64)line % LINES * 1024 + 32 * t->warp + t->lane]++;
    for (u64 sector = address / 32; sector <= (address + size - 1) / 32; sector++) {
        if (access_count == access_room)
            accesses = realloc(accesses, (access_room = 2 * access_room + 1024) * sizeof *accesses);
        accesses[access_count++] = (Access){t->warp, line, turn, write, sector};
    }
}

static void end_counts(const Thread *threads, u32 number) {
    for (u32 k = 0; k < number; k++)
        counts->instructions += threads[k].executed;
    qsort(accesses, access_count, sizeof *accesses, compare);
    for (u64 k = 0; k < access_count; k++)
        if (!k || compare(&accesses[k - 1], &accesses[k]))
            counts->sectors[accesses[k].write]++;
    access_count = 0;
    memset(turns, 0, (u64)LINES * 1024 * sizeof *turns);
}

/* Memory of the device. */

static void *reserve(u64 size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

u64 executor_allocate(u64 size) {
    Area *area = &machine.global;
    if (!area->base) {
        area->base = (u64)reserve(CAPACITY);
        area->state = reserve(CAPACITY);
        area->cells = races ? reserve(CAPACITY * sizeof(Cell)) : NULL;
        area->size = area->base && area->state && (!races || area->cells) ? CAPACITY : 0;
    }
    u64 room = (size + 2 * PAGE - 1) / PAGE * PAGE; /* a gap behind, and the size before */
    if (room > area->size || used > area->size - room)
        return 0;
    u64 first = used;
    used += room;
    memset(area->state + first, ALLOCATED, size);
    *(u64 *)(area->base + first - sizeof(u64)) = size;
    return area->base + first;
}

int executor_holds(u64 address, u64 size) {
    Area *area = &machine.global;
    u64 first = address - area->base;
    if (first >= area->size)
        return 1; /* memory of another library */
    for (u64 k = 0; k < size; k++)
        if (area->state[first + k] != ALLOCATED && area->state[first + k] != WRITTEN)
            return 0;
    return 1;
}

int executor_free(u64 address) {
    Area *area = &machine.global;
    if (address - area->base >= area->size)
        return 0;
    u64 first = address - area->base, size = *(u64 *)(address - sizeof(u64));
    if (!executor_holds(address, size ? 1 : 0))
        return 0;
    memset(area->state + first, FREED, size);
    madvise((void *)address, size, MADV_DONTNEED);
    return 1;
}

void executor_written(u64 address, u64 size) {
    Area *area = &machine.global;
    if (address - area->base < area->size)
        memset(area->state + (address - area->base), WRITTEN, size);
}

void executor_copied(u64 target, u64 source, u64 size) {
    Area *area = &machine.global;
    if (target - area->base < area->size && source - area->base < area->size)
        memmove(area->state + (target - area->base), area->state + (source - area->base), size);
    else
        executor_written(target, size);
}

/* Races: two accesses to a byte, one of them a write of another value, that no barrier orders. */

static int is_before(const Mark *m, const Thread *t) {
    if (m->launch != launch_count)
        return 1;
    if (m->block != t->block)
        return 0;
    if (m->epoch != t->epoch)
        return 1;
    return m->warp == t->warp && (m->warp_epoch != t->warp_epoch || m->lane == t->lane);
}

static void trace(const Thread *t, const Area *area, u64 address, u32 size, int line, const void *written) {
    Mark now = {launch_count, t->block, t->warp, t->lane, t->epoch, t->warp_epoch};
    for (u32 k = 0; k < size; k++) {
        Cell *cell = &area->cells[address - area->base + k];
        Mark *read = &cell->read;
        if (!written) {
            if (!is_before(&cell->written, t))
                fail(t, line, "race: a read after a write", address);
            if (is_before(read, t))
                *read = now;
            read->block = read->block == now.block ? now.block : ANY;
            read->warp = read->warp == now.warp ? now.warp : ANY;
            read->lane = read->lane == now.lane ? now.lane : ANY;
            continue;
        }
        if (((const u8 *)written)[k] != ((const u8 *)address)[k]) {
            if (!is_before(&cell->written, t))
                fail(t, line, "race: two writes", address);
            if (!is_before(read, t))
                fail(t, line, "race: a write after a read", address);
        }
        cell->written = now;
    }
}

/* Let lanes go on whose masks have all met; return how many. */
static int meet(Thread *warp, u32 lanes) {
    int released = 0;
    for (u32 k = 0; k < lanes; k++) {
        Thread *t = &warp[k];
        if (t->state != WARP && t->state != SHUFFLE)
            continue;
        u32 mask = lanes == 32 ? t->mask : t->mask & ((1u << lanes) - 1), state = t->state, all = 1;
        if (!(mask >> k & 1))
            fail(t, t->line, "a lane is not in its own mask", t->mask);
        for (u32 j = 0; j < lanes; j++)
            if (mask >> j & 1) {
                if (warp[j].state == DONE)
                    fail(t, t->line, "lanes wait for one that has ended", j);
                all &= warp[j].state == state && warp[j].mask == t->mask && warp[j].line == t->line;
            }
        for (u32 j = 0; all && j < lanes; j++)
            if (mask >> j & 1) {
                u32 other = j ^ (warp[j].distance & 31);
                if (state == SHUFFLE && warp[j].bound != 31)
                    fail(&warp[j], t->line, "a shuffle within parts of a warp, which has no translation", j);
                if (state == SHUFFLE && (other >= lanes || !(mask >> other & 1)))
                    fail(&warp[j], t->line, "shuffle from a lane that does not take part", other);
                warp[j].result = warp[other < lanes ? other : j].value;
                warp[j].warp_epoch += state == WARP; /* shuffles order no memory */
                warp[j].state = READY;
                released++;
            }
    }
    return released;
}

/* Let all threads go on that have met at a barrier. */
static void cross(Thread *threads, u32 count) {
    u32 sum = 0;
    for (u32 k = 0; k < count; k++) {
        Thread *t = &threads[k];
        if (t->state == DONE || t->line != threads[0].line)
            fail(t, threads[0].line, "a barrier that not all threads reach", k);
        if (t->state != BARRIER && t->state != COUNT)
            fail(t, t->line, "lanes wait for each other at different places", k);
        sum += t->value & 1;
    }
    for (u32 k = 0; k < count; k++) {
        threads[k].result = sum;
        threads[k].state = READY;
        threads[k].epoch++;
    }
}

static void run_block(Thread *threads, u32 count, void (*body)(Thread *)) {
    for (u32 ended = 0;;) {
        u32 moved = 0;
        for (u32 k = 0; k < count; k++) {
            Thread *t = &threads[reversed ? count - 1 - k : k];
            if (t->state == READY) {
                body(t);
                moved++;
                ended += t->state == DONE;
            }
        }
        if (ended == count)
            return;
        for (u32 k = 0; k < count; k += 32)
            moved += meet(threads + k, count - k < 32 ? count - k : 32);
        if (!moved)
            cross(threads, count);
    }
}

static u64 rounded(u64 size) { return (size + 63) / 64 * 64; }

int executor_run(const Kernel *kernel, const u32 grid[3], const u32 block[3], void **values) {
    u32 count = block[0] * block[1] * block[2], blocks = grid[0] * grid[1] * grid[2];
    u64 local = rounded(kernel->local), shared = rounded(kernel->shared);
    if (!blocks || !count || count > 1024 || grid[1] > 65535 || grid[2] > 65535) {
        snprintf(message, sizeof message, "a launch of %u blocks of %u threads", blocks, count);
        return 0;
    }
    Thread *threads = calloc(count, sizeof *threads);
    u64 *registers = calloc(count, 8 * (kernel->registers + 1));
    char *memory = aligned_alloc(64, shared + count * local + 64);
    u8 *state = malloc(shared + count * local + 1);
    Cell *cells = races && shared ? calloc(shared, sizeof *cells) : NULL;
    machine.fail = fail, machine.trace = trace, machine.count = counts ? count_access : NULL;
    if (counts && !turns)
        turns = calloc((u64)LINES * 1024, sizeof *turns);
    machine.shared = (Area){(u64)memory, kernel->shared, state, cells};
    launch_count++;
    int failed = setjmp(stop);
    for (u32 number = 0; !failed && number < blocks; number++) {
        u32 b = reversed ? blocks - 1 - number : number;
        memset(state, ALLOCATED, shared + count * local);
        if (cells)
            memset(cells, 0, shared * sizeof *cells);
        for (u32 k = 0; k < count; k++)
            threads[k] = (Thread){
                .tid = {k % block[0], k / block[0] % block[1], k / block[0] / block[1]},
                .ctaid = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]},
                .ntid = {block[0], block[1], block[2]},
                .nctaid = {grid[0], grid[1], grid[2]},
                .block = b, .warp = k / 32, .lane = k % 32, .values = values,
                .r = registers + (u64)k * kernel->registers,
                .local = {(u64)memory + shared + k * local, kernel->local, state + shared + k * local, NULL},
                .machine = &machine,
            };
        run_block(threads, count, kernel->body);
        if (counts)
            end_counts(threads, count);
    }
    free(threads), free(registers), free(memory), free(state), free(cells);
    return !failed;
}
