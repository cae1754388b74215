/* What kernels that translate.py made from PTX are compiled with: threads, checked accesses to
memory, and the arithmetic of a GPU where it is not that of C. Blocks and launches: executor.c. */

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;
typedef u8 b8;
typedef u16 b16;
typedef u32 b32;
typedef u64 b64;
typedef u8 pred;

/* When and by which thread a byte was last accessed. Barriers of a block, and of a warp, begin a new
epoch; ANY stands for several threads, warps or blocks in one epoch. */
enum { ANY = 0xffffffffu };
typedef struct { u32 launch, block, warp, lane, epoch, warp_epoch; } Mark;
typedef struct { Mark written, read; } Cell;

/* Memory with a state and, where races are looked for, a cell for each byte. */
enum { ABSENT, ALLOCATED, WRITTEN, FREED };
typedef struct { u64 base, size; u8 *state; Cell *cells; } Area;
enum { GLOBAL = 1, SHARED = 2, LOCAL = 4, GENERIC = GLOBAL | SHARED | LOCAL };

/* A thread that waits for others has returned from the kernel; its state says why, `line` where,
and `resume` where it goes on. */
enum { READY, BARRIER, COUNT, WARP, SHUFFLE, DONE };

typedef struct Thread Thread;
typedef struct {
    Area global, shared;
    void (*count)(const Thread *, u64 address, u32 size, int line, int write); /* or NULL */
    void (*fail)(const Thread *, int line, const char *what, u64 address);
    void (*trace)(const Thread *, const Area *, u64 address, u32 size, int line, const void *written);
} Machine;
struct Thread {
    u32 tid[3], ctaid[3], ntid[3], nctaid[3];
    u32 block, warp, lane, epoch, warp_epoch;
    u32 state, line, resume, mask, value, distance, bound, result;
    void **values; /* of the parameters */
    u64 *r;        /* registers */
    u64 executed; /* instructions */
    Area local;
    const Machine *machine;
};
typedef struct { void (*body)(Thread *); u32 params, registers, local, shared; } Kernel;

/* Find the memory of an access, and check it. */
static inline const Area *checked(const Thread *t, int space, u64 address, u32 size, int line, int write) {
    const Machine *m = t->machine;
    const Area *area = NULL;
    if (space & GLOBAL && address - m->global.base < m->global.size)
        area = &m->global;
    else if (space & SHARED && address - m->shared.base < m->shared.size)
        area = &m->shared;
    else if (space & LOCAL && address - t->local.base < t->local.size)
        area = &t->local;
    if (!area || address - area->base + size > area->size)
        m->fail(t, line, "access outside of allocated memory", address);
    if (address % size)
        m->fail(t, line, "misaligned access", address);
    u8 *state = area->state + (address - area->base);
    for (u32 k = 0; k < size; k++)
        if (state[k] != WRITTEN && !(write && state[k] == ALLOCATED))
            m->fail(t, line, state[k] == FREED ? "access to freed memory"
                    : state[k] == ABSENT ? "access outside of allocated memory"
                    : "read of memory that was not written", address);
    if (write)
        memset(state, WRITTEN, size);
    if (m->count && area == &m->global)
        m->count(t, address, size, line, write);
    return area;
}
static inline void load(const Thread *t, int space, u64 address, void *value, u32 size, int line) {
    const Area *area = checked(t, space, address, size, line, 0);
    if (area->cells)
        t->machine->trace(t, area, address, size, line, NULL);
    memcpy(value, (void *)address, size);
}
static inline void store(const Thread *t, int space, u64 address, const void *value, u32 size, int line) {
    const Area *area = checked(t, space, address, size, line, 1);
    if (area->cells)
        t->machine->trace(t, area, address, size, line, value);
    memcpy((void *)address, value, size);
}

/* Numbers and their bits; a NaN that is computed has the bits that a GPU gives it. */
static inline f32 from_f32(u32 x) { f32 y; memcpy(&y, &x, 4); return y; }
static inline f64 from_f64(u64 x) { f64 y; memcpy(&y, &x, 8); return y; }
static inline f32 from_f16(u16 x) { _Float16 y; memcpy(&y, &x, 2); return (f32)y; }
static inline u64 to_f32(f32 y) { u32 x; memcpy(&x, &y, 4); return y != y ? 0x7fffffff : x; }
static inline u64 to_f64(f64 y) { u64 x; memcpy(&x, &y, 8); return y != y ? 0x7fffffffffffffff : x; }
static inline u64 to_f16(f32 v) { _Float16 y = (_Float16)v; u16 x; memcpy(&x, &y, 2); return v != v ? 0x7fff : x; }

/* Like a CPU that has no fused multiply-add, or like a GPU. */
#ifdef SPLIT_FMA
#define fused(a, b, c) ((a) * (b) + (c))
#else
#define fused kept_fused
#endif
#define kept_fused(a, b, c) _Generic((a), f32: fmaf, f64: fma)(a, b, c)

/* The upper 32 bits: approximations, which iterations refine, have no others. */
static inline f64 coarse(f64 v) {
    return from_f64(to_f64(v) & 0xffffffff00000000ull);
}
static inline s32 truncated(f64 v) {
    return v != v ? 0 : v <= INT32_MIN ? INT32_MIN : v >= INT32_MAX ? INT32_MAX : (s32)v;
}
static inline f64 least(f64 a, f64 b) { return a != a || b < a || (a == b && signbit(b)) ? b : a; }
static inline f64 most(f64 a, f64 b) { return a != a || b > a || (a == b && signbit(a)) ? b : a; }

/* `b` with the lowest bits of `a` in the place of `count` bits. */
static inline u64 inserted(u64 a, u64 b, u32 first, u32 count, u32 width) {
    for (u32 k = 0; k < (count & 255) && (first & 255) + k < width; k++)
        b = (b & ~(1ull << ((first & 255) + k))) | (a >> k & 1) << ((first & 255) + k);
    return b;
}

/* Bytes of `a` and `b` by number, or their signs. */
static inline u32 permuted(u32 a, u32 b, u32 numbers) {
    u64 bytes = (u64)b << 32 | a;
    u32 result = 0;
    for (int k = 0; k < 4; k++) {
        u32 number = numbers >> 4 * k & 15, byte = bytes >> 8 * (number & 7) & 255;
        result |= (number & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * k;
    }
    return result;
}
