/* A libcupti and, with -DDRIVER, a libcuda that speak NVIDIA's binary interfaces as far as the collector uses them.
 *
 * The program calls work(n): n kernels of 5 us, each with its launch, every tenth with a copy and a wait behind it. Their
 * records go into buffers that are asked for and given back by the callbacks, full ones from a thread of the library, the
 * rest at a flush, and once more when the library is unloaded, after the interpreter's end. Layouts: cupti_activity.h.
 *
 * FAKE_CUPTI_<FUNCTION> makes a function return a number; FAKE_CUPTI_KERNEL_BYTES is how long a kernel's record is,
 * FAKE_CUPTI_DROPPED how many records are said to be dropped. FAKE_CUDA_SYNC names a file that waiting for the GPU makes.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static uint64_t asked(const char *name, uint64_t otherwise) {
    char whole[128];
    snprintf(whole, sizeof whole, "FAKE_CUPTI_%s", name);
    return getenv(whole) ? strtoull(getenv(whole), NULL, 10) : otherwise;
}

#ifdef DRIVER

static int initialized;

int cuInit(unsigned flags) { (void)flags; initialized = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return initialized ? 0 : 3; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int size, int device) { (void)device; snprintf(name, size, "NVIDIA Fake 80GB"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = 80ull << 30; return 0; }
int cuDeviceGetUuid(char *uuid, int device) { (void)device; memset(uuid, 0xab, 16); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 50 ? 0 : 1000;
    return 0;
}
int cuCtxGetCurrent(void **context) { *context = &initialized; return 0; }
int cuCtxSetCurrent(void *context) { return context == &initialized ? 0 : 201; }
int cuCtxSynchronize(void) {
    /* As a kernel that still runs would have it: who does not wait does not see its record. */
    if (getenv("FAKE_CUDA_SYNC")) fclose(fopen(getenv("FAKE_CUDA_SYNC"), "w"));
    return 0;
}

#else

typedef void (*requested_t)(uint8_t **, size_t *, size_t *);
typedef void (*completed_t)(void *, uint32_t, uint8_t *, size_t, size_t);
enum { MEMCPY = 1, RUNTIME = 5, KERNEL = 10, SYNCHRONIZATION = 38, KINDS = 64 };
enum { LAUNCH = 211, COPY = 41, WAIT = 131 };

static requested_t request;
static completed_t complete;
static uint8_t *buffer;
static size_t room, used;
static int enabled[KINDS], calls_enabled[1024], subscribed, forced, correlation;
static uint64_t now_ns;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t stride(uint32_t kind) {
    return kind == KERNEL ? asked("KERNEL_BYTES", 216) : kind == MEMCPY ? 96 : kind == RUNTIME ? 40
        : kind == SYNCHRONIZATION ? 56 : 0;
}

static void *give_back(void *nothing) {
    complete(NULL, 0, buffer, room, used);
    return nothing;
}

static void put(const void *record, size_t size) {
    if (buffer && used + size > room) {
        pthread_t thread;
        pthread_create(&thread, NULL, give_back, NULL);
        pthread_join(thread, NULL);
        buffer = NULL;
    }
    if (!buffer) {
        size_t most;
        request(&buffer, &room, &most);
        used = 0;
        if (!buffer) return;
        memset(buffer, 0xee, room);
    }
    memcpy(buffer + used, record, size);
    used += size;
}

#define U32(record, offset) (*(uint32_t *)((record) + (offset)))
#define U64(record, offset) (*(uint64_t *)((record) + (offset)))

static void call(uint32_t cbid, uint64_t lasts_ns) {
    uint8_t r[40] = {0};
    if (!calls_enabled[cbid] && !enabled[RUNTIME]) return;
    U32(r, 0) = RUNTIME; U32(r, 4) = cbid; U64(r, 8) = now_ns; U64(r, 16) = now_ns + lasts_ns;
    U32(r, 24) = getpid(); U32(r, 28) = gettid(); U32(r, 32) = correlation;
    put(r, sizeof r);
}

static void kernel(void) {
    static const char *const names[] = {"_Z4gemmPKfS0_Pfi", "_ZN3vec3addIfEEvPT_i", "triton_poi_fused_0"};
    uint8_t r[1024] = {0};
    if (!enabled[KERNEL]) return;
    U32(r, 0) = KERNEL; U64(r, 16) = now_ns + 4000; U64(r, 24) = now_ns + 9000;
    U32(r, 44) = 1; U32(r, 48) = 7; U32(r, 92) = correlation; U64(r, 104) = (uint64_t)names[correlation % 3];
    U32(r, 52) = 132; U32(r, 56) = U32(r, 60) = 1; U32(r, 64) = 256; U32(r, 68) = U32(r, 72) = 1;
    put(r, stride(KERNEL));
}

static void copy_and_wait(void) {
    uint8_t c[96] = {0}, w[56] = {0};
    call(COPY, 2000);
    U32(c, 0) = MEMCPY; c[4] = 2; c[5] = 3; c[6] = 2; U64(c, 8) = 4096; U64(c, 16) = now_ns + 1000;
    U64(c, 24) = now_ns + 2000; U32(c, 36) = 1; U32(c, 40) = 7; U32(c, 44) = correlation++;
    if (enabled[MEMCPY]) put(c, sizeof c);
    now_ns += 2000;
    call(WAIT, 1000);
    U32(w, 0) = SYNCHRONIZATION; U32(w, 4) = 3; U64(w, 8) = now_ns; U64(w, 16) = now_ns + 1000;
    U32(w, 24) = correlation++; U32(w, 28) = 1; U32(w, 32) = 7; U32(w, 36) = ~0u;
    if (enabled[SYNCHRONIZATION]) put(w, sizeof w);
    now_ns += 1000;
}

static uint64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* What the program calls: returns how many kernels have run while they were recorded. */
int work(int n) {
    static int recorded;
    pthread_mutex_lock(&lock);
    if (!now_ns) now_ns = clock_ns();
    for (int i = 0; i < n; i++) {
        correlation++;
        call(LAUNCH, 3000);
        kernel();
        recorded += enabled[KERNEL];
        now_ns += 10000;
        if (i % 10 == 9) copy_and_wait();
    }
    pthread_mutex_unlock(&lock);
    return recorded;
}

int cuptiGetVersion(uint32_t *version) { *version = 130001; return 0; }
int cuptiGetTimestamp(uint64_t *ns) { *ns = clock_ns(); return 0; }
int cuptiSetThreadIdType(int type) { return type == 1 ? 0 : 1; }
int cuptiGetResultString(int result, const char **text) { *text = result == 999 ? "CUPTI_ERROR_UNKNOWN" : "CUPTI_ERROR_X"; return 0; }
int cuptiSubscribe(void **subscriber, void *callback, void *data) {
    (void)data;
    if (subscribed || asked("SUBSCRIBE", 0)) return asked("SUBSCRIBE", 39);
    *subscriber = &subscribed;
    return subscribed = callback != NULL, !callback;
}
int cuptiUnsubscribe(void *subscriber) { subscribed = 0; return subscriber == &subscribed ? 0 : 1; }
int cuptiGetCallbackName(int domain, uint32_t cbid, const char **name) {
    if (domain != 2) return 1;
    *name = cbid == LAUNCH ? "cudaLaunchKernel_v7000" : cbid == COPY ? "cudaMemcpyAsync_v3020"
        : cbid == WAIT ? "cudaStreamSynchronize_v3020" : cbid == 10 ? "cudaGetLastError_v3020" : NULL;
    return *name ? 0 : 1;
}
int cuptiActivityRegisterCallbacks(requested_t r, completed_t c) { request = r; complete = c; return 0; }
int cuptiActivityEnable(uint32_t kind) {
    if (!subscribed || !request) return 15;
    if (asked("ENABLE", 0)) return asked("ENABLE", 0);
    enabled[kind] = 1;
    return 0;
}
int cuptiActivityEnableAndDump(uint32_t kind) { return cuptiActivityEnable(kind); }
int cuptiActivityEnableRuntimeApi(uint32_t cbid, uint8_t on) { calls_enabled[cbid] = on; return 0; }
int cuptiActivityEnableDriverApi(uint32_t cbid, uint8_t on) { (void)cbid; (void)on; return 0; }
int cuptiActivityDisable(uint32_t kind) {
    enabled[kind] = 0;
    if (kind == RUNTIME) memset(calls_enabled, 0, sizeof calls_enabled);
    return 0;
}
int cuptiActivityFlushAll(uint32_t flag) {
    forced |= flag == 1;
    pthread_mutex_lock(&lock);
    if (buffer) complete(NULL, 0, buffer, room, used);
    buffer = NULL;
    pthread_mutex_unlock(&lock);
    return 0;
}
int cuptiActivityGetNextRecord(uint8_t *start, size_t valid, uint8_t **record) {
    uint8_t *next = *record ? *record + stride(U32(*record, 0)) : start;
    if (*record && !stride(U32(*record, 0))) return 21;
    if (next >= start + valid) return 12;
    *record = next;
    return 0;
}
int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped) {
    (void)context; (void)stream;
    *dropped = asked("DROPPED", 0);
    return 0;
}

__attribute__((destructor)) static void unload(void) {
    size_t most;
    if (request && !enabled[KERNEL]) {
        request(&buffer, &room, &most);
        complete(NULL, 0, NULL, 0, 0);
    }
}

#endif
