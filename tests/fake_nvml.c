/* A library that speaks NVML's binary interface and answers from a file of lines "key value".
 *
 * FAKE_NVML names the file; it is read at every call, so a test changes the answers between two calls. Keys are
 * "count", "gpu0.name", "gpu0.mig1.memory_used" ...; a return code is "FUNCTION", or "gpu0.FUNCTION" for one device.
 * A key that is missing makes a call "not supported" (3), as on a GPU that lacks it. Layouts: nvml.h.
 * With OLD_DRIVER the newer functions are left out.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, GPUS = 8, SLICES = 4 };

typedef struct { char scope[24]; } device_t;
typedef struct { device_t *device; uint64_t number; } gpm_sample_t;
typedef struct { uint32_t id, scope; int64_t timestamp, latency; uint32_t type; int32_t rc; uint64_t value; } field_t;
typedef struct { uint32_t pid; uint64_t memory; uint32_t gi, ci; } process_t;
typedef struct { device_t *device; uint64_t type, data; uint32_t gi, ci; } event_t;
typedef struct { uint32_t id; int32_t rc; double value; char *short_name, *long_name, *unit; } metric_t;
typedef struct { uint32_t version, count; gpm_sample_t *older, *newer; metric_t metrics[477]; } metrics_t;

static device_t devices[GPUS][SLICES + 1];

static int text(const char *key, char *value, unsigned size) {
    char line[512];
    size_t length = strlen(key);
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    int found = 0;
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, key, length) && line[length] == ' ') {
            line[strcspn(line, "\n")] = 0;
            snprintf(value, size, "%s", line + length + 1);
            found = 1;
        }
    if (file) fclose(file);
    return found;
}

static int number(const char *scope, const char *key, double *value) {
    char whole[128], found[64];
    snprintf(whole, sizeof whole, "%s%s%s", scope, *scope ? "." : "", key);
    if (!text(whole, found, sizeof found)) return 0;
    *value = strtod(found, NULL);
    return 1;
}

static double or_else(const char *scope, const char *key, double otherwise) {
    number(scope, key, &otherwise);
    return otherwise;
}

/* The return code asked for: of the device, else of the function. */
static int code(const char *scope, const char *function) {
    return (int)or_else(scope, function, or_else("", function, OK));
}

static int get_u32(device_t *d, const char *function, const char *key, uint32_t *out) {
    double value;
    int rc = code(d->scope, function);
    if (rc) return rc;
    if (!number(d->scope, key, &value)) return NOT_SUPPORTED;
    *out = (uint32_t)value;
    return OK;
}

static int get_text(device_t *d, const char *function, const char *key, char *out, uint32_t size) {
    char whole[128];
    int rc = code(d->scope, function);
    if (rc) return rc;
    snprintf(whole, sizeof whole, "%s.%s", d->scope, key);
    return text(whole, out, size) ? OK : NOT_SUPPORTED;
}

static int clock_of(device_t *d, const char *function, const char *prefix, uint32_t type, uint32_t *out) {
    char key[32];
    snprintf(key, sizeof key, "%s%u", prefix, type);
    return get_u32(d, function, key, out);
}

int nvmlInitWithFlags(uint32_t flags) { (void)flags; return code("", "nvmlInitWithFlags"); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int rc) { (void)rc; return "an error of the fake"; }

int nvmlSystemGetDriverVersion(char *out, uint32_t size) { return text("driver", out, size) ? OK : NOT_SUPPORTED; }
int nvmlSystemGetNVMLVersion(char *out, uint32_t size) { return text("nvml", out, size) ? OK : NOT_SUPPORTED; }

int nvmlDeviceGetCount_v2(uint32_t *out) { *out = (uint32_t)or_else("", "count", 1); return code("", "nvmlDeviceGetCount"); }

int nvmlDeviceGetHandleByIndex_v2(uint32_t index, device_t **out) {
    *out = &devices[index][0];
    snprintf((*out)->scope, sizeof (*out)->scope, "gpu%u", index);
    return code((*out)->scope, "nvmlDeviceGetHandleByIndex");
}

int nvmlDeviceGetName(device_t *d, char *out, uint32_t size) { return get_text(d, "nvmlDeviceGetName", "name", out, size); }
int nvmlDeviceGetUUID(device_t *d, char *out, uint32_t size) { return get_text(d, "nvmlDeviceGetUUID", "uuid", out, size); }

int nvmlDeviceGetPciInfo_v3(device_t *d, char *out) { return get_text(d, "nvmlDeviceGetPciInfo", "bus", out + 36, 32); }

int nvmlDeviceGetCudaComputeCapability(device_t *d, int *major, int *minor) {
    *minor = (int)or_else(d->scope, "minor", 0);
    return get_u32(d, "nvmlDeviceGetCudaComputeCapability", "major", (uint32_t *)major);
}

int nvmlDeviceGetMigMode(device_t *d, uint32_t *current, uint32_t *pending) {
    int rc = get_u32(d, "nvmlDeviceGetMigMode", "mig", current);
    *pending = *current;
    return rc;
}
int nvmlDeviceGetMaxMigDeviceCount(device_t *d, uint32_t *out) { return get_u32(d, "nvmlDeviceGetMaxMigDeviceCount", "slices", out); }
int nvmlDeviceGetMigDeviceHandleByIndex(device_t *d, uint32_t index, device_t **out) {
    char name[64];
    device_t *slice = &devices[d->scope[3] - '0'][index + 1];
    snprintf(slice->scope, sizeof slice->scope, "%.8s.mig%u", d->scope, index);
    *out = slice;
    return get_text(slice, "nvmlDeviceGetMigDeviceHandleByIndex", "uuid", name, sizeof name) ? NOT_FOUND : OK;
}
int nvmlDeviceGetAttributes_v2(device_t *d, uint32_t *out) { return get_u32(d, "nvmlDeviceGetAttributes", "sms", out); }

int nvmlDeviceGetMemoryInfo(device_t *d, uint64_t *out) {
    double total;
    int rc = code(d->scope, "nvmlDeviceGetMemoryInfo");
    if (rc) return rc;
    if (!number(d->scope, "memory_total", &total)) return NOT_SUPPORTED;
    out[0] = (uint64_t)total;
    /* Version 1 counts the driver's reserve as used. */
    out[2] = (uint64_t)(or_else(d->scope, "memory_used", 0) + or_else(d->scope, "memory_reserved", 0));
    return OK;
}

int nvmlDeviceGetUtilizationRates(device_t *d, uint32_t *out) {
    out[1] = (uint32_t)or_else(d->scope, "memory_util", 0);
    return get_u32(d, "nvmlDeviceGetUtilizationRates", "util", out);
}
int nvmlDeviceGetClockInfo(device_t *d, uint32_t type, uint32_t *out) { return clock_of(d, "nvmlDeviceGetClockInfo", "clock", type, out); }
int nvmlDeviceGetMaxClockInfo(device_t *d, uint32_t type, uint32_t *out) { return clock_of(d, "nvmlDeviceGetMaxClockInfo", "clock_max", type, out); }
int nvmlDeviceGetPowerUsage(device_t *d, uint32_t *out) { return get_u32(d, "nvmlDeviceGetPowerUsage", "power_mw", out); }
int nvmlDeviceGetEnforcedPowerLimit(device_t *d, uint32_t *out) { return get_u32(d, "nvmlDeviceGetEnforcedPowerLimit", "power_limit_mw", out); }
int nvmlDeviceGetPowerManagementDefaultLimit(device_t *d, uint32_t *out) { return get_u32(d, "nvmlDeviceGetPowerManagementDefaultLimit", "power_limit_mw", out); }
int nvmlDeviceGetTemperature(device_t *d, uint32_t sensor, uint32_t *out) { (void)sensor; return get_u32(d, "nvmlDeviceGetTemperature", "temperature", out); }
int nvmlDeviceGetTemperatureThreshold(device_t *d, uint32_t type, uint32_t *out) { (void)type; return get_u32(d, "nvmlDeviceGetTemperatureThreshold", "slowdown", out); }

int nvmlDeviceGetCurrPcieLinkGeneration(device_t *d, uint32_t *out) { return get_u32(d, "nvmlDeviceGetCurrPcieLinkGeneration", "gen", out); }
int nvmlDeviceGetCurrPcieLinkWidth(device_t *d, uint32_t *out) { return get_u32(d, "nvmlDeviceGetCurrPcieLinkWidth", "width", out); }
int nvmlDeviceGetMaxPcieLinkGeneration(device_t *d, uint32_t *out) { return get_u32(d, "nvmlDeviceGetMaxPcieLinkGeneration", "gen_max", out); }
int nvmlDeviceGetMaxPcieLinkWidth(device_t *d, uint32_t *out) { return get_u32(d, "nvmlDeviceGetMaxPcieLinkWidth", "width_max", out); }
int nvmlDeviceGetPcieThroughput(device_t *d, uint32_t direction, uint32_t *out) { return get_u32(d, "nvmlDeviceGetPcieThroughput", direction ? "pcie_rx_kb" : "pcie_tx_kb", out); }

#ifdef OLD_DRIVER
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t *d, uint64_t *out) {
#else
int nvmlDeviceGetCurrentClocksEventReasons(device_t *d, uint64_t *out) {
#endif
    uint32_t value = 0;
    int rc = get_u32(d, "nvmlDeviceGetCurrentClocksEventReasons", "reasons", &value);
    *out = value;
    return rc;
}

/* "gpu0.processes 777:20971520000,41:1" */
int nvmlDeviceGetComputeRunningProcesses_v3(device_t *d, uint32_t *count, process_t *out) {
    char list[256];
    uint32_t found = 0;
    int rc = get_text(d, "nvmlDeviceGetComputeRunningProcesses", "processes", list, sizeof list);
    if (rc) return rc;
    for (char *part = strtok(list, ","); part; part = strtok(NULL, ","), found++)
        if (out) {
            out[found].pid = (uint32_t)strtoul(part, &part, 10);
            out[found].memory = part[1] == '?' ? UINT64_MAX : strtoull(part + 1, NULL, 10);
        }
    *count = found;
    return found && !out ? TOO_SMALL : OK;
}

/* "gpu0.field.197 12345"; its type is 3 (64 bits) unless "gpu0.field_type.197" says otherwise. */
int nvmlDeviceGetFieldValues(device_t *d, int count, field_t *fields) {
    char key[64];
    double value;
    for (int i = 0; i < count; i++) {
        snprintf(key, sizeof key, "field_type.%u", fields[i].id);
        fields[i].type = (uint32_t)or_else(d->scope, key, 3);
        snprintf(key, sizeof key, "field_rc.%u", fields[i].id);
        fields[i].rc = (int32_t)or_else(d->scope, key, OK);
        snprintf(key, sizeof key, "field.%u", fields[i].id);
        if (!number(d->scope, key, &value)) fields[i].rc = fields[i].rc ? fields[i].rc : NOT_SUPPORTED;
        else fields[i].value = (uint64_t)value;
    }
    return code(d->scope, "nvmlDeviceGetFieldValues");
}

/* Events: "event.gpu 1", "event.type 8", "event.data 79"; each value of "event.serial" is delivered once. */
static double delivered;
int nvmlEventSetCreate(void **out) { *out = &delivered; delivered = 0; return code("", "nvmlEventSetCreate"); }
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceGetSupportedEventTypes(device_t *d, uint64_t *out) {
    uint32_t value = 0;
    int rc = get_u32(d, "nvmlDeviceGetSupportedEventTypes", "event_types", &value);
    *out = value;
    return rc;
}
int nvmlDeviceRegisterEvents(device_t *d, uint64_t types, void *set) { (void)types; (void)set; return code(d->scope, "nvmlDeviceRegisterEvents"); }
int nvmlEventSetWait_v2(void *set, event_t *out, uint32_t ms) {
    double serial;
    int rc = code("", "nvmlEventSetWait");
    (void)set; (void)ms;
    if (rc) return rc;
    if (!number("", "event.serial", &serial) || serial <= delivered) return TIMEOUT;
    delivered = serial;
    out->device = &devices[(int)or_else("", "event.gpu", 0)][0];
    out->type = (uint64_t)or_else("", "event.type", 8);
    out->data = (uint64_t)or_else("", "event.data", 0);
    return OK;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(device_t *d, uint64_t *out) {
    uint64_t old[3];
    int rc = nvmlDeviceGetMemoryInfo(d, old);
    if ((uint32_t)out[0] != 0x02000028) return 25;
    out[1] = old[0];
    out[4] = (uint64_t)or_else(d->scope, "memory_used", 0);
    return rc;
}

int nvmlDeviceGetTemperatureV(device_t *d, uint32_t *out) {
    if (out[0] != 0x0100000C) return 25;
    return get_u32(d, "nvmlDeviceGetTemperature", "temperature", out + 2);
}

/* "gpu0.gpm 1" is the support flag, "gpu0.gpm.5 80" a metric, "gpu0.gpm_rc.9 3" its return code. The value of a metric
 * is multiplied by the distance of the two samples, so that a pair in the wrong order, or not of neighbours, shows. */
int nvmlGpmQueryDeviceSupport(device_t *d, uint32_t *out) { return get_u32(d, "nvmlGpmQueryDeviceSupport", "gpm", out + 1); }
int nvmlGpmSampleAlloc(gpm_sample_t **out) { *out = calloc(1, sizeof **out); return OK; }
int nvmlGpmSampleFree(gpm_sample_t *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(device_t *d, gpm_sample_t *sample) {
    static uint64_t taken[GPUS];
    int rc = code(d->scope, "nvmlGpmSampleGet");
    if (rc) return rc;
    sample->device = d;
    sample->number = ++taken[d->scope[3] - '0'];
    return OK;
}
int nvmlGpmMetricsGet(metrics_t *m) {
    char key[64];
    if (m->version != 1) return 25;
    for (uint32_t i = 0; i < m->count; i++) {
        const char *scope = m->newer->device->scope;
        snprintf(key, sizeof key, "gpm_rc.%u", m->metrics[i].id);
        m->metrics[i].rc = (int32_t)or_else(scope, key, OK);
        snprintf(key, sizeof key, "gpm.%u", m->metrics[i].id);
        if (!number(scope, key, &m->metrics[i].value)) m->metrics[i].rc = m->metrics[i].rc ? m->metrics[i].rc : NOT_SUPPORTED;
        m->metrics[i].value *= (double)(int64_t)(m->newer->number - m->older->number);
    }
    return code("", "nvmlGpmMetricsGet");
}
#endif
