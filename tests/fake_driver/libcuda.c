/* A CUDA driver without a device, for tests of what the host does, and of what kernels compute.

Memory of the device is memory of the host, checked by ../ptx/executor.c. Kernels do not run, unless
their code is the path of a library that ../ptx/executor.py made from PTX: these run in the launch.
Calls are written to a log, one line each. Where copies are deferred, those from pinned memory are
pending until something waits for them: a copy whose source was changed before counts as torn. The
interface is that of cuda.h; its types are spelled as integers, since no header of CUDA is needed to
build this file. */

#include "../ptx/executor.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef unsigned long long Handle;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
    NOT_FOUND = 500, NOT_READY = 600, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801,
};
enum { CONTEXT = 0x1000, LEGACY = 1, PER_THREAD = 2 };

/* What tests read and set. */

static char *text;
static size_t used, room;
static int logging, capturing, deferring;
static long torn;

#define LOG(...)                                                                                   \
    do {                                                                                           \
        if (logging) {                                                                             \
            if (used + 256 > room) {                                                               \
                room = room ? 2 * room : 1 << 16;                                                  \
                text = realloc(text, room);                                                        \
            }                                                                                      \
            used += (size_t)snprintf(text + used, 256, __VA_ARGS__);                               \
            text[used++] = '\n';                                                                   \
            text[used] = 0;                                                                        \
        }                                                                                          \
    } while (0)

void fake_log(int on) {
    logging = on;
    used = 0;
    if (text)
        text[0] = 0;
}
const char *fake_text(void) { return text ? text : ""; }
void fake_capture(int status) { capturing = status; }
void fake_defer(int on) { deferring = on; }
long fake_torn(void) { return torn; }

/* Words of the arguments of the last launch, of which as many are read as a test asks for. */
static int watched;
static uint64_t words[128];
void fake_watch(int count) { watched = count; }
uint64_t fake_word(int k) { return words[k]; }

/* Pinned memory and the copies from it that are pending. */

typedef struct { char *first; size_t size; } Pinned;
typedef struct { long number; char *target; const char *source; char *was; size_t size; } Copy;

static Pinned pinned[4096];
static Copy pending[4096];
static int pins, copies;
static long number, done;

static int is_pinned(const void *address) {
    const char *at = address;
    for (int k = 0; k < pins; k++)
        if (at >= pinned[k].first && at < pinned[k].first + pinned[k].size)
            return 1;
    return 0;
}

/* Finish all copies up to a number. */
static void finish(long last) {
    int kept = 0;
    for (int k = 0; k < copies; k++) {
        Copy *copy = &pending[k];
        if (copy->number > last) {
            pending[kept++] = *copy;
            continue;
        }
        if (memcmp(copy->source, copy->was, copy->size))
            torn++;
        memcpy(copy->target, copy->source, copy->size);
        free(copy->was);
    }
    copies = kept;
    if (last > done)
        done = last;
}

/* Whether memory is allocated, which the host writes to. */
static int written(Handle target, size_t size) {
    if (!executor_holds(target, size))
        return 0;
    executor_written(target, size);
    return 1;
}

static Result upload(Handle target, const void *source, size_t size) {
    if (!written(target, size))
        return INVALID_VALUE;
    if (!deferring || !is_pinned(source) || copies == 4096) {
        finish(number);
        memcpy((void *)target, source, size);
        return SUCCESS;
    }
    Copy *copy = &pending[copies++];
    copy->number = ++number;
    copy->target = (char *)target;
    copy->source = source;
    copy->size = size;
    copy->was = malloc(size ? size : 1);
    memcpy(copy->was, source, size);
    return SUCCESS;
}

static Result download(void *target, Handle source, size_t size) {
    finish(number);
    return executor_holds(source, size) ? memcpy(target, (void *)source, size), SUCCESS : INVALID_VALUE;
}

static Result copy(Handle target, Handle source, size_t size) {
    finish(number);
    if (!executor_holds(target, size) || !executor_holds(source, size))
        return INVALID_VALUE;
    executor_copied(target, source, size);
    memmove((void *)target, (void *)source, size);
    return SUCCESS;
}

/* Devices and contexts. */

static __thread Handle stack[64];
static __thread int depth;

static Handle current(void) { return depth ? stack[depth - 1] : 0; }
static int setting(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}
static int devices(void) { return setting("FAKE_DEVICES", 1); }
static int capability(void) { return setting("FAKE_CAPABILITY", 90); }

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
Result cuDeviceGetCount(int *count) { *count = devices(); return SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
Result cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, (size_t)size, "no device");
    return SUCCESS;
}
Result cuDeviceGetUuid(char *uuid, int device) { memset(uuid, device, 16); return SUCCESS; }
Result cuDeviceTotalMem(size_t *bytes, int device) { *bytes = 80ull << 30; return SUCCESS; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 75: *value = capability() / 10; break;
    case 76: *value = capability() % 10; break;
    case 16: *value = 132; break;         /* multiprocessors */
    case 1: case 2: case 3: *value = 1024; break;
    case 4: *value = 64; break;
    case 5: *value = 2147483647; break;   /* blocks */
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break;        /* shared memory of a block */
    case 10: *value = 32; break;          /* threads of a warp */
    case 12: *value = 65536; break;
    case 33: case 50: *value = device; break;
    case 34: *value = 0; break;
    case 39: *value = 2048; break;
    case 97: *value = 232448; break;
    default: *value = 1;
    }
    return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(Handle *context, int device) {
    *context = CONTEXT + (Handle)device;
    return SUCCESS;
}
Result cuDevicePrimaryCtxRelease(int device) { return SUCCESS; }
Result cuDevicePrimaryCtxReset(int device) { return SUCCESS; }
Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return SUCCESS;
}
Result cuCtxPushCurrent(Handle context) { stack[depth++] = context; return SUCCESS; }
Result cuCtxPopCurrent(Handle *context) {
    Handle last = current();
    if (depth)
        depth--;
    if (context)
        *context = last;
    return SUCCESS;
}
Result cuCtxGetCurrent(Handle *context) { *context = current(); return SUCCESS; }
Result cuCtxSetCurrent(Handle context) {
    if (!depth)
        depth++;
    stack[depth - 1] = context;
    return SUCCESS;
}
Result cuCtxGetDevice(int *device) {
    if (!depth)
        return INVALID_CONTEXT;
    *device = (int)(current() - CONTEXT);
    return SUCCESS;
}
Result cuCtxGetId(Handle context, Handle *id) { *id = context ? context : 1; return SUCCESS; }
Result cuCtxSynchronize(void) { LOG("wait context"); finish(number); return SUCCESS; }

/* Memory. */

Result cuMemGetInfo(size_t *left, size_t *total) { *left = *total = 80ull << 30; return SUCCESS; }
Result cuMemAlloc(Handle *address, size_t size) {
    LOG("allocate %zu", size);
    *address = executor_allocate(size); /* zeros, so that results of kernels that do not run are 0 */
    return *address ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemFree(Handle address) {
    LOG("free");
    finish(number);
    return executor_free(address) ? SUCCESS : INVALID_VALUE;
}
Result cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    LOG("allocate pinned %zu", size);
    *memory = calloc(1, size ? size : 1);
    pinned[pins].first = *memory;
    pinned[pins++].size = size;
    return *memory ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemAllocHost(void **memory, size_t size) { return cuMemHostAlloc(memory, size, 0); }
Result cuMemFreeHost(void *memory) {
    LOG("free pinned");
    finish(number);
    for (int k = 0; k < pins; k++)
        if (pinned[k].first == memory)
            pinned[k] = pinned[--pins];
    free(memory);
    return SUCCESS;
}
Result cuMemcpyHtoD(Handle target, const void *source, size_t size) {
    LOG("upload and wait %zu", size);
    finish(number);
    return written(target, size) ? memcpy((void *)target, source, size), SUCCESS : INVALID_VALUE;
}
Result cuMemcpyDtoH(void *target, Handle source, size_t size) {
    LOG("download and wait %zu", size);
    return download(target, source, size);
}
Result cuMemcpyDtoD(Handle target, Handle source, size_t size) {
    LOG("copy %zu", size);
    return copy(target, source, size);
}
Result cuMemcpyHtoDAsync(Handle target, const void *source, size_t size, Handle stream) {
    LOG("upload %zu on %llx from %s", size, stream, is_pinned(source) ? "pinned" : "pageable");
    return upload(target, source, size);
}
Result cuMemcpyDtoHAsync(void *target, Handle source, size_t size, Handle stream) {
    LOG("download %zu on %llx", size, stream);
    return download(target, source, size);
}
Result cuMemcpyDtoDAsync(Handle target, Handle source, size_t size, Handle stream) {
    LOG("copy %zu on %llx", size, stream);
    return copy(target, source, size);
}
Result cuMemsetD8(Handle target, unsigned char value, size_t size) {
    LOG("set %zu", size);
    finish(number);
    return written(target, size) ? memset((void *)target, value, size), SUCCESS : INVALID_VALUE;
}
Result cuMemsetD8Async(Handle target, unsigned char value, size_t size, Handle stream) {
    return cuMemsetD8(target, value, size);
}
Result cuPointerGetAttribute(void *value, int attribute, Handle address) {
    switch (attribute) {
    case 1: *(Handle *)value = CONTEXT; break;
    case 2: *(unsigned *)value = 2; break; /* of a device */
    case 3: *(Handle *)value = address; break;
    case 9: *(int *)value = depth ? (int)(current() - CONTEXT) : 0; break;
    default: *(Handle *)value = 0;
    }
    return SUCCESS;
}
Result cuPointerGetAttributes(unsigned count, int *attributes, void **values, Handle address) {
    for (unsigned k = 0; k < count; k++)
        cuPointerGetAttribute(values[k], attributes[k], address);
    return SUCCESS;
}
Result cuDeviceGetDefaultMemPool(Handle *pool, int device) { *pool = 0x70000; return SUCCESS; }
Result cuDeviceGetMemPool(Handle *pool, int device) { *pool = 0x70000; return SUCCESS; }
Result cuMemPoolGetAttribute(Handle pool, int attribute, void *value) {
    *(Handle *)value = 0;
    return SUCCESS;
}
Result cuMemPoolSetAttribute(Handle pool, int attribute, void *value) { return SUCCESS; }

/* Streams and events: a handle of an event is followed by the last copy before it was recorded. */

static Handle fresh(Handle first) {
    static Handle count;
    return first + 16 * ++count;
}
Result cuStreamCreate(Handle *stream, unsigned flags) { *stream = fresh(0x5000); return SUCCESS; }
Result cuStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) {
    return cuStreamCreate(stream, flags);
}
Result cuStreamDestroy(Handle stream) { return SUCCESS; }
Result cuStreamSynchronize(Handle stream) {
    LOG("wait stream %llx", stream);
    finish(number);
    return SUCCESS;
}
Result cuStreamQuery(Handle stream) { return copies ? NOT_READY : SUCCESS; }
Result cuStreamGetCtx(Handle stream, Handle *context) {
    *context = depth ? current() : CONTEXT;
    return SUCCESS;
}
Result cuStreamGetCtx_v2(Handle stream, Handle *context, Handle *green) {
    if (green)
        *green = 0;
    return cuStreamGetCtx(stream, context);
}
Result cuStreamGetDevice(Handle stream, int *device) {
    *device = depth ? (int)(current() - CONTEXT) : 0;
    return SUCCESS;
}
Result cuStreamGetFlags(Handle stream, unsigned *flags) { *flags = 0; return SUCCESS; }
Result cuStreamGetPriority(Handle stream, int *priority) { *priority = 0; return SUCCESS; }
Result cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    LOG("stream waits %llx", stream);
    return SUCCESS;
}
Result cuStreamIsCapturing(Handle stream, int *status) {
    if (capturing && !stream)
        return 906; /* capture of another stream forbids the legacy stream */
    *status = capturing;
    return SUCCESS;
}
Result cuEventCreate(Handle *event, unsigned flags) {
    *event = (Handle)calloc(1, sizeof(long));
    return SUCCESS;
}
Result cuEventRecord(Handle event, Handle stream) { *(long *)event = number; return SUCCESS; }
Result cuEventQuery(Handle event) { return *(long *)event > done ? NOT_READY : SUCCESS; }
Result cuEventSynchronize(Handle event) {
    LOG("wait event");
    finish(*(long *)event);
    return SUCCESS;
}
Result cuEventDestroy(Handle event) { free((void *)event); return SUCCESS; }
Result cuEventElapsedTime(float *milliseconds, Handle first, Handle last) {
    *milliseconds = 1;
    return SUCCESS;
}

/* Code. */

Result cuLibraryLoadData(Handle *library, const void *code, void *a, void *b, unsigned c, void *d,
                         void *e, unsigned f) {
    if (*(const char *)code != '/') {
        *library = fresh(0x20000);
        return SUCCESS;
    }
    *library = (Handle)dlopen(code, RTLD_NOW | RTLD_LOCAL);
    return *library ? SUCCESS : INVALID_IMAGE;
}
Result cuLibraryUnload(Handle library) { return SUCCESS; }
/* The handle of a kernel is the address of its code, which is none where it does not run. */
Result cuLibraryGetKernel(Handle *kernel, Handle library, const char *name) {
    Kernel *made = calloc(1, sizeof *made);
    const Kernel *found = library >> 32 ? dlsym((void *)library, name) : made;
    *kernel = (Handle)made;
    return found ? *made = *found, SUCCESS : NOT_FOUND;
}
Result cuLibraryGetModule(Handle *module, Handle library) { *module = library; return SUCCESS; }
Result cuLibraryGetKernelCount(unsigned *count, Handle library) { *count = 1; return SUCCESS; }
Result cuLibraryEnumerateKernels(Handle *kernels, unsigned count, Handle library) {
    *kernels = fresh(0x30000);
    return SUCCESS;
}
Result cuKernelGetLibrary(Handle *library, Handle kernel) { *library = 0x20010; return SUCCESS; }
Result cuKernelGetFunction(Handle *function, Handle kernel) { *function = kernel; return SUCCESS; }
Result cuKernelGetAttribute(int *value, int attribute, Handle kernel, int device) {
    *value = 64;
    return SUCCESS;
}
Result cuKernelGetParamInfo(Handle kernel, size_t k, size_t *offset, size_t *size) { return 1; }
Result cuFuncGetParamInfo(Handle kernel, size_t k, size_t *offset, size_t *size) { return 1; }
Result cuFuncGetAttribute(int *value, int attribute, Handle kernel) { *value = 64; return SUCCESS; }
Result cuFuncGetModule(Handle *module, Handle kernel) { *module = 0x20010; return SUCCESS; }
Result cuModuleUnload(Handle module) { return SUCCESS; }
Result cuModuleGetGlobal(Handle *address, size_t *size, Handle module, const char *name) {
    return NOT_FOUND;
}
Result cuLaunchKernel(Handle kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                      unsigned bz, unsigned shared, Handle stream, void **values, void **extra) {
    LOG("launch %ux%u on %llx in %llx", gx, bx * by * bz, stream, current());
    for (int k = 0; k < watched; k++)
        memcpy(&words[k], values[k], 8);
    if (!((const Kernel *)kernel)->body)
        return SUCCESS;
    finish(number);
    u32 grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    if (executor_run((const Kernel *)kernel, grid, block, values))
        return SUCCESS;
    fprintf(stderr, "%s\n", executor_message());
    return LAUNCH_FAILED;
}
typedef struct {
    unsigned gx, gy, gz, bx, by, bz, shared;
    Handle stream;
    void *attributes;
    unsigned count;
} Launch;
Result cuLaunchKernelEx(Launch *of, Handle kernel, void **values, void **extra) {
    return cuLaunchKernel(kernel, of->gx, of->gy, of->gz, of->bx, of->by, of->bz, of->shared,
                          of->stream, values, extra);
}
Result cuGetErrorName(int error, const char **name) { *name = "ERROR"; return SUCCESS; }
Result cuGetErrorString(int error, const char **words) { *words = "error"; return SUCCESS; }

/* How callers find all this. */

static Result missing(void) { return NOT_SUPPORTED; }

Result cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags,
                           int *status);

#define ENTRY(f) {#f, (void *)f}
static const struct { const char *name; void *function; } entries[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet),
    ENTRY(cuDeviceGetName), ENTRY(cuDeviceGetUuid), ENTRY(cuDeviceTotalMem),
    ENTRY(cuDeviceGetAttribute), ENTRY(cuDevicePrimaryCtxRetain),
    ENTRY(cuDevicePrimaryCtxRelease), ENTRY(cuDevicePrimaryCtxReset),
    ENTRY(cuDevicePrimaryCtxGetState), ENTRY(cuCtxPushCurrent), ENTRY(cuCtxPopCurrent),
    ENTRY(cuCtxGetCurrent), ENTRY(cuCtxSetCurrent), ENTRY(cuCtxGetDevice), ENTRY(cuCtxGetId),
    ENTRY(cuCtxSynchronize), ENTRY(cuMemGetInfo), ENTRY(cuMemAlloc), ENTRY(cuMemFree),
    ENTRY(cuMemHostAlloc), ENTRY(cuMemAllocHost), ENTRY(cuMemFreeHost), ENTRY(cuMemcpyHtoD),
    ENTRY(cuMemcpyDtoH), ENTRY(cuMemcpyDtoD), ENTRY(cuMemcpyHtoDAsync), ENTRY(cuMemcpyDtoHAsync),
    ENTRY(cuMemcpyDtoDAsync), ENTRY(cuMemsetD8), ENTRY(cuMemsetD8Async),
    ENTRY(cuPointerGetAttribute), ENTRY(cuPointerGetAttributes), ENTRY(cuDeviceGetDefaultMemPool),
    ENTRY(cuDeviceGetMemPool), ENTRY(cuMemPoolGetAttribute), ENTRY(cuMemPoolSetAttribute),
    ENTRY(cuStreamCreate), ENTRY(cuStreamCreateWithPriority), ENTRY(cuStreamDestroy),
    ENTRY(cuStreamSynchronize), ENTRY(cuStreamQuery), ENTRY(cuStreamGetCtx),
    ENTRY(cuStreamGetCtx_v2), ENTRY(cuStreamGetDevice), ENTRY(cuStreamGetFlags),
    ENTRY(cuStreamGetPriority), ENTRY(cuStreamWaitEvent), ENTRY(cuStreamIsCapturing),
    ENTRY(cuEventCreate), ENTRY(cuEventRecord), ENTRY(cuEventQuery), ENTRY(cuEventSynchronize),
    ENTRY(cuEventDestroy), ENTRY(cuEventElapsedTime), ENTRY(cuLibraryLoadData),
    ENTRY(cuLibraryUnload), ENTRY(cuLibraryGetKernel), ENTRY(cuLibraryGetModule),
    ENTRY(cuLibraryGetKernelCount), ENTRY(cuLibraryEnumerateKernels), ENTRY(cuKernelGetLibrary),
    ENTRY(cuKernelGetFunction), ENTRY(cuKernelGetAttribute), ENTRY(cuKernelGetParamInfo),
    ENTRY(cuFuncGetParamInfo), ENTRY(cuFuncGetAttribute), ENTRY(cuFuncGetModule),
    ENTRY(cuModuleUnload), ENTRY(cuModuleGetGlobal), ENTRY(cuLaunchKernel),
    ENTRY(cuLaunchKernelEx), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString),
    {"cuGetProcAddress", (void *)cuGetProcAddress_v2},
};

Result cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags,
                           int *status) {
    *found = (void *)missing;
    if (status)
        *status = 0;
    for (size_t k = 0; k < sizeof entries / sizeof *entries; k++)
        if (!strcmp(entries[k].name, name))
            *found = entries[k].function;
    return SUCCESS;
}
Result cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
