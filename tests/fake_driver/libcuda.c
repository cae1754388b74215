/* A CUDA driver without a device, for tests of what the host does, and of what kernels compute.

Memory of the device is memory of the host, checked by ../ptx/executor.c. Kernels do not run, unless
their code is the path of a library that ../ptx/executor.py made from PTX: these run in the launch.
Calls are written to a log, one line each. Where work is deferred, launches and copies are pending
until something waits for them: a copy whose source was changed before counts as torn. The work of a
stream that is captured goes to a graph, which a launch of it repeats. The interface
is that of cuda.h; its types are spelled as integers, since no header of CUDA is needed to build this
file. */

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
    CAPTURED = 900, LEGACY_IN_CAPTURE = 906,
};
enum { CONTEXT = 0x1000, LEGACY = 1, PER_THREAD = 2 };

/* What tests read and set. */

static char *text;
static size_t used, room;
static int logging;
static unsigned deferring; /* 0, or the state of random numbers */
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
/* Defer work, in a random order that `seed` chooses; 0 ends this. */
void fake_defer(int seed) { deferring = (unsigned)seed; }
long fake_torn(void) { return torn; }

/* Words of the arguments of the last launch, of which as many are read as a test asks for. */

static struct { char *first; size_t size; } pinned[4096];
static int pins;

static int is_pinned(const void *address) {
    const char *at = address;
    for (int k = 0; k < pins; k++)
        if (at >= pinned[k].first && at < pinned[k].first + pinned[k].size)
            return 1;
    return 0;
}

/* Work of the device. Deferred work is done in a random order that streams and events allow. */

enum { UPLOAD, DOWNLOAD, COPY, SET, LAUNCH, WAIT };
typedef struct { Handle stream; long number; void *graph; } Event; /* work of a stream up to a number */
typedef struct {
    int kind;
    Handle stream;
    Handle target, source;
    size_t size;
    char *was;   /* of an upload, the bytes at the call */
    Event event; /* that the stream waits for */
    const Kernel *kernel;
    u32 grid[3], block[3];
    void **values; /* of the parameters */
    long number;
} Work;

static Work queue[512];
static int pending;
static long number;
static Result failure; /* of work that was deferred */
static Handle blocking[4096]; /* streams that wait for the legacy stream, and it for them */
static int blocking_count;

static int waits_for_legacy(Handle stream) {
    for (int k = 0; k < blocking_count; k++)
        if (blocking[k] == stream)
            return 1;
    return 0;
}
static int are_ordered(Handle a, Handle b) {
    a = a == LEGACY ? 0 : a, b = b == LEGACY ? 0 : b;
    return a == b || (!a && waits_for_legacy(b)) || (!b && waits_for_legacy(a));
}
static int is_part_of(const Work *work, Event event) {
    return work->number <= event.number && are_ordered(work->stream, event.stream);
}

static Result perform(Work *work) {
    void *target = (void *)work->target, *source = (void *)work->source;
    int on_device = work->kind == UPLOAD || work->kind == COPY || work->kind == SET;
    if (on_device && !executor_holds(work->target, work->size))
        return INVALID_VALUE;
    if ((work->kind == DOWNLOAD || work->kind == COPY) && !executor_holds(work->source, work->size))
        return INVALID_VALUE;
    switch (work->kind) {
    case UPLOAD:
        torn += is_pinned(source) && work->was && memcmp(source, work->was, work->size);
        executor_written(work->target, work->size);
        memcpy(target, work->was && !is_pinned(source) ? work->was : source, work->size);
        break;
    case DOWNLOAD:
        memcpy(target, source, work->size);
        break;
    case COPY:
        executor_copied(work->target, work->source, work->size);
        memmove(target, source, work->size);
        break;
    case SET:
        executor_written(work->target, work->size);
        memset(target, (int)work->source, work->size);
        break;
    case LAUNCH:
        if (work->kernel->body && !executor_run(work->kernel, work->grid, work->block, work->values)) {
            fprintf(stderr, "%s\n", executor_message());
            return LAUNCH_FAILED;
        }
    }
    return SUCCESS;
}

/* Do one piece of work: any, or the first that it waits for. */
static void do_next(void) {
    deferring = deferring * 1664525u + 1013904223u;
    int chosen = (int)((deferring >> 8) % (unsigned)pending);
    for (int k = 0; k < chosen; k++)
        if (are_ordered(queue[k].stream, queue[chosen].stream)
            || (queue[chosen].kind == WAIT && is_part_of(&queue[k], queue[chosen].event))) {
            chosen = k;
            k = -1;
        }
    Work *work = &queue[chosen];
    if (!failure) /* nothing is done after work that failed, as on a device */
        failure = perform(work);
    free(work->was), free(work->values);
    memmove(work, work + 1, (size_t)(--pending - chosen) * sizeof *work);
}

static int is_done(Event event) {
    for (int k = 0; k < pending; k++)
        if (is_part_of(&queue[k], event))
            return 0;
    return 1;
}
static Result finish(Event event) {
    while (!is_done(event))
        do_next();
    return failure;
}
static Result finish_all(void) {
    while (pending)
        do_next();
    return failure;
}

/* Captures: the graph of each stream that is captured. */

typedef struct { Work *works; int count, room; } Graph;
static struct { Handle stream; Graph *graph; } captures[64];
static int capture_count;
static __thread int mode; /* of a capture: 2 allows what is not part of it */
static int is_forbidden(void) { return capture_count && mode != 2; }

static Graph *graph_of(Handle stream) {
    for (int k = 0; k < capture_count; k++)
        if (captures[k].stream == stream)
            return captures[k].graph;
    return NULL;
}
static void capture(Handle stream, Graph *graph) {
    if (graph && !graph_of(stream)) {
        captures[capture_count].stream = stream;
        captures[capture_count++].graph = graph;
    }
}
static void keep_values(Work *work) {
    u32 count = work->kernel->params;
    void **values = malloc(2 * (count + 1) * sizeof *values);
    for (u32 k = 0; k < count; k++)
        values[k] = memcpy(values + count + k, work->values[k], sizeof *values);
    work->values = values;
}

static Result enqueue(Work work) {
    Graph *graph = graph_of(work.stream);
    if (graph && work.kind != WAIT) {
        if (graph->count == graph->room)
            graph->works = realloc(graph->works, (graph->room = 2 * graph->room + 8) * sizeof work);
        if (work.kind == LAUNCH)
            keep_values(&work);
        graph->works[graph->count++] = work;
    }
    if (graph)
        return SUCCESS;
    if (capture_count && (work.stream == 0 || work.stream == LEGACY))
        return LEGACY_IN_CAPTURE;
    if (!deferring || pending == sizeof queue / sizeof *queue) {
        finish_all();
        return perform(&work);
    }
    work.number = ++number;
    if (work.kind == UPLOAD)
        work.was = memcpy(malloc(work.size + 1), (void *)work.source, work.size);
    if (work.kind == LAUNCH)
        keep_values(&work);
    queue[pending++] = work;
    return SUCCESS;
}
static Result enqueue_and_wait(Work work) {
    Result result = enqueue(work);
    return result ? result : finish((Event){work.stream, number});
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

Result cuInit(unsigned flags) {
    deferring = (unsigned)setting("FAKE_DEFER", 0); /* see fake_defer */
    return SUCCESS;
}
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
Result cuCtxSynchronize(void) {
    LOG("wait context");
    return capture_count ? CAPTURED : finish_all(); /* whatever the mode */
}

/* Memory. */

Result cuMemGetInfo(size_t *left, size_t *total) { *left = *total = 80ull << 30; return SUCCESS; }
Result cuMemAlloc(Handle *address, size_t size) {
    LOG("allocate %zu", size);
    if (is_forbidden())
        return CAPTURED;
    *address = executor_allocate(size); /* zeros, so that results of kernels that do not run are 0 */
    return *address ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemFree(Handle address) {
    LOG("free");
    if (is_forbidden())
        return CAPTURED;
    finish_all();
    return executor_free(address) ? SUCCESS : INVALID_VALUE;
}
Result cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    LOG("allocate pinned %zu", size);
    if (is_forbidden())
        return CAPTURED;
    *memory = calloc(1, size ? size : 1);
    pinned[pins].first = *memory;
    pinned[pins++].size = size;
    return *memory ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemAllocHost(void **memory, size_t size) { return cuMemHostAlloc(memory, size, 0); }
Result cuMemFreeHost(void *memory) {
    LOG("free pinned");
    finish_all();
    for (int k = 0; k < pins; k++)
        if (pinned[k].first == memory)
            pinned[k] = pinned[--pins];
    free(memory);
    return SUCCESS;
}
Result cuMemcpyHtoD(Handle target, const void *source, size_t size) {
    LOG("upload and wait %zu", size);
    return enqueue_and_wait((Work){UPLOAD, 0, target, (Handle)source, size});
}
Result cuMemcpyDtoH(void *target, Handle source, size_t size) {
    LOG("download and wait %zu", size);
    return enqueue_and_wait((Work){DOWNLOAD, 0, (Handle)target, source, size});
}
Result cuMemcpyDtoD(Handle target, Handle source, size_t size) {
    LOG("copy %zu", size);
    return enqueue((Work){COPY, 0, target, source, size});
}
Result cuMemcpyHtoDAsync(Handle target, const void *source, size_t size, Handle stream) {
    LOG("upload %zu on %llx from %s", size, stream, is_pinned(source) ? "pinned" : "pageable");
    return enqueue((Work){UPLOAD, stream, target, (Handle)source, size});
}
Result cuMemcpyDtoHAsync(void *target, Handle source, size_t size, Handle stream) {
    LOG("download %zu on %llx", size, stream);
    Work work = {DOWNLOAD, stream, (Handle)target, source, size};
    return is_pinned(target) ? enqueue(work) : enqueue_and_wait(work);
}
Result cuMemcpyDtoDAsync(Handle target, Handle source, size_t size, Handle stream) {
    LOG("copy %zu on %llx", size, stream);
    return enqueue((Work){COPY, stream, target, source, size});
}
Result cuMemsetD8Async(Handle target, unsigned char value, size_t size, Handle stream) {
    LOG("set %zu", size);
    return enqueue((Work){SET, stream, target, value, size});
}
Result cuMemsetD8(Handle target, unsigned char value, size_t size) {
    return cuMemsetD8Async(target, value, size, 0);
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

/* Streams and events: the handle of an event is its address. */

static Handle fresh(Handle first) {
    static Handle count;
    return first + 16 * ++count;
}
Result cuStreamCreate(Handle *stream, unsigned flags) {
    *stream = fresh(0x5000);
    if (!(flags & 1))
        blocking[blocking_count++ % 4096] = *stream;
    return SUCCESS;
}
Result cuStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) {
    return cuStreamCreate(stream, flags);
}
Result cuStreamDestroy(Handle stream) { return SUCCESS; }
Result cuStreamSynchronize(Handle stream) {
    LOG("wait stream %llx", stream);
    if (graph_of(stream) || is_forbidden() || (capture_count && !stream))
        return CAPTURED;
    return finish((Event){stream, number});
}
Result cuStreamQuery(Handle stream) {
    return is_done((Event){stream, number}) ? failure : NOT_READY;
}
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
    capture(stream, ((Event *)event)->graph); /* the stream joins the capture of the event */
    return enqueue((Work){WAIT, stream, .event = *(Event *)event});
}
Result cuStreamIsCapturing(Handle stream, int *status) {
    if (capture_count && !stream)
        return LEGACY_IN_CAPTURE;
    *status = graph_of(stream) != NULL;
    return SUCCESS;
}
Result cuEventCreate(Handle *event, unsigned flags) {
    *event = (Handle)calloc(1, sizeof(Event));
    return SUCCESS;
}
Result cuEventRecord(Handle event, Handle stream) {
    *(Event *)event = (Event){stream, number, graph_of(stream)};
    return SUCCESS;
}
Result cuEventQuery(Handle event) {
    if (((Event *)event)->graph || is_forbidden())
        return CAPTURED;
    return is_done(*(Event *)event) ? failure : NOT_READY;
}
Result cuEventSynchronize(Handle event) {
    LOG("wait event");
    if (((Event *)event)->graph || is_forbidden())
        return CAPTURED;
    return finish(*(Event *)event);
}
Result cuEventDestroy(Handle event) { free((void *)event); return SUCCESS; }
Result cuEventElapsedTime(float *milliseconds, Handle first, Handle last) {
    *milliseconds = 1;
    return SUCCESS;
}

/* Graphs of captured work, in the order of its calls. */

Result cuStreamBeginCapture(Handle stream, int mode) {
    if (!stream || graph_of(stream))
        return CAPTURED;
    capture(stream, calloc(1, sizeof(Graph)));
    return SUCCESS;
}
Result cuThreadExchangeStreamCaptureMode(int *exchanged) {
    int before = mode;
    mode = *exchanged, *exchanged = before;
    return SUCCESS;
}
Result cuStreamEndCapture(Handle stream, Handle *graph) {
    *graph = (Handle)graph_of(stream);
    capture_count = 0;
    return *graph ? SUCCESS : INVALID_VALUE;
}
Result cuGraphInstantiateWithFlags(Handle *executable, Handle graph, unsigned long long flags) {
    *executable = graph;
    return SUCCESS;
}
Result cuGraphLaunch(Handle graph, Handle stream) {
    LOG("launch graph on %llx", stream);
    Result result = SUCCESS;
    for (int k = 0; !result && k < ((Graph *)graph)->count; k++) {
        Work work = ((Graph *)graph)->works[k];
        work.stream = stream;
        result = enqueue(work);
    }
    return result;
}

/* Code. */

Result cuLibraryLoadData(Handle *library, const void *code, void *a, void *b, unsigned c, void *d,
                         void *e, unsigned f) {
    if (*(const char *)code != '/') {
        *library = fresh(0x20000);
        return SUCCESS;
    }
    void **made = malloc(sizeof *made); /* a handle of its own, as several may be of one file */
    *made = dlopen(code, RTLD_NOW | RTLD_LOCAL);
    *library = (Handle)made;
    return *made ? SUCCESS : INVALID_IMAGE;
}
Result cuLibraryUnload(Handle library) { return SUCCESS; }
/* The handle of a kernel is the address of its code, which is none where it does not run. */
Result cuLibraryGetKernel(Handle *kernel, Handle library, const char *name) {
    Kernel *made = calloc(1, sizeof *made);
    const Kernel *found = library >> 32 ? dlsym(*(void **)library, name) : made;
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
    if (bx * by * bz > 1024)
        return INVALID_VALUE;
    return enqueue((Work){
        LAUNCH, stream, .kernel = (const Kernel *)kernel, .grid = {gx, gy, gz},
        .block = {bx, by, bz}, .values = values,
    });
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
    ENTRY(cuStreamBeginCapture), ENTRY(cuStreamEndCapture), ENTRY(cuGraphInstantiateWithFlags),
    ENTRY(cuGraphLaunch), ENTRY(cuThreadExchangeStreamCaptureMode), ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet),
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
