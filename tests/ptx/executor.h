/* What a driver without a device uses of executor.c. Functions that may fail return 0. */

#include "runtime.h"

u64 executor_allocate(u64 size);
int executor_free(u64 address);

/* Whether all bytes are allocated, or memory of another library. */
int executor_holds(u64 address, u64 size);

/* The host has written to memory, or copied from memory on the device. */
void executor_written(u64 address, u64 size);
void executor_copied(u64 target, u64 source, u64 size);

int executor_run(const Kernel *kernel, const u32 grid[3], const u32 block[3], void **values);

/* What tests set and read. Launches are counted if counts are set: instructions of threads, and
32-byte sectors that are loaded and stored, once for each instruction of a warp. */
typedef struct { u64 instructions, sectors[2]; } Counts;
void executor_count(Counts *);
void executor_set(int with_races, int in_reverse);
const char *executor_message(void);
