#!/usr/bin/env python3
"""A small CUDA program with a known shape, for checking what a profiler records on a real GPU.

It needs no CUDA toolkit and no Python package: the driver's own library, through ctypes, copies memory and launches a
kernel written in PTX. One step is a copy to the GPU, a few kernels, a copy back, and a pause on the host, so that the
recording must show host-to-device copies, kernels, device-to-host copies, and idle time with a cause.

    cuda-probe.py [STEPS]

Prints one line of JSON with what it did, which a recording can be compared with. Ends with 4 where there is no GPU.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

ELEMENTS = 1 << 20
KERNELS_PER_STEP = 8
PAUSE_S = 0.002

# x[i] += 1, in a loop so that a launch takes tens of microseconds. The driver compiles sm_50 code for any later GPU.
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry infprof_probe(.param .u64 data, .param .u32 rounds)
{
    .reg .pred %p<2>;
    .reg .f32 %f<3>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [data];
    ld.param.u32 %r1, [rounds];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.s32 %rd3, %r5, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    mov.u32 %r6, 0;
loop:
    add.f32 %f1, %f1, 0f3F800000;
    add.s32 %r6, %r6, 1;
    setp.lt.u32 %p1, %r6, %r1;
    @%p1 bra loop;
    st.global.f32 [%rd4], %f1;
    ret;
}
"""


class Driver:
    """libcuda.so.1 with every return code checked."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name} gave {code}: {(text.value or b'?').decode()}")


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    try:
        driver = Driver()
        driver.call("cuInit", 0)
        run(driver, steps)
    except (OSError, RuntimeError) as error:
        print(f"cuda-probe: no usable GPU here ({error}).", file=sys.stderr)
        return 4
    return 0


def run(driver: Driver, steps: int) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver.call("cuDeviceGet", ctypes.byref(device), 0)
    # The primary context is what every CUDA runtime uses, and its call has kept one signature over all versions.
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver.call("cuCtxSetCurrent", context)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuModuleLoadData", ctypes.byref(module), PTX)
    driver.call("cuModuleGetFunction", ctypes.byref(function), module, b"infprof_probe")
    size = ctypes.c_size_t(ELEMENTS * 4)
    memory = ctypes.c_uint64()
    driver.call("cuMemAlloc_v2", ctypes.byref(memory), size)
    host = (ctypes.c_float * ELEMENTS)()
    rounds = ctypes.c_uint32(1000)
    pointers = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in (memory, rounds)]
    parameters = (ctypes.c_void_p * 2)(*pointers)
    threads = 256
    begin = time.perf_counter_ns()
    for _ in range(steps):
        driver.call("cuMemcpyHtoD_v2", memory, host, size)
        for _ in range(KERNELS_PER_STEP):
            driver.call("cuLaunchKernel", function, ELEMENTS // threads, 1, 1, threads, 1, 1, 0, None, parameters, None)
        driver.call("cuMemcpyDtoH_v2", host, memory, size)
        time.sleep(PAUSE_S)
    driver.call("cuCtxSynchronize")
    span = time.perf_counter_ns() - begin
    expected = float(min(steps * KERNELS_PER_STEP * rounds.value, 1 << 24))  # above 2**24 a float stays as it is
    facts = {
        "steps": steps,
        "kernels": steps * KERNELS_PER_STEP,
        "copies_each_way": steps,
        "bytes_per_copy": size.value,
        "span_ns": span,
        "result_is_right": bool(host[0] == expected and host[ELEMENTS - 1] == expected),
    }
    print(json.dumps(facts), flush=True)
    driver.call("cuMemFree_v2", memory)
    driver.call("cuDevicePrimaryCtxRelease_v2", device)


if __name__ == "__main__":
    sys.exit(main())
