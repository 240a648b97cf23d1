"""What nsys may do on this machine, asked before the start: GPU counters, CPU samples, room for the data."""

from __future__ import annotations

import tempfile
from pathlib import Path

from infprof import doctor
from infprof.doctor import Machine
from infprof.probes import Unavailable
from infprof.probes.nsys_messages import Note

_MIB = 1 << 20
# Below this a capture is not begun; below LOW it is, with a warning; at RESERVE a running one should be stopped. The
# .qdstrm grows in the spool folder while recording, the report of about that size follows, an export again.
MINIMUM_BYTES = 128 * _MIB
LOW_BYTES = 2048 * _MIB
RESERVE_BYTES = 64 * _MIB


def gpu_metrics_obstacle(machine: Machine) -> Note | None:
    """Why GPU metrics need not be tried; None where they may work (that the counters are free only a try can tell)."""
    nvml = doctor.ask_nvml(machine)
    if not nvml.gpus and (nvml.error is None or nvml.code is not None):
        found = nvml.error or "it lists none"
        return Note("gpu-metrics-no-gpu", f"GPU metrics are left out: no GPU by NVML ({found}).", None)
    check = doctor.check_counters(machine, doctor.driver_version(machine) or nvml.driver)
    return not_permitted() if check.status == "warning" else None


def not_permitted() -> Note:
    """The note on counters that the driver keeps for administrators, with the ways out."""
    return Note(
        "gpu-metrics-not-permitted",
        "GPU metrics are left out: the driver lets only administrators read the counters, and being root in a "
        "container is not enough. Compute- and bandwidth-bound cannot be told apart by them.",
        "On the host set NVreg_RestrictProfilingToAdminUsers=0 (doctor shows the command) and reload the driver; or "
        "start the container with --cap-add=SYS_ADMIN. If you can change neither, NVML and GPM still give "
        "coarser figures.",
    )


def gpu_metrics_refused(machine: Machine, reason: Note) -> Note:
    """The note on counters that nsys could not get, naming who likely holds them."""
    if reason.code == "gpu-metrics-not-permitted":
        return not_permitted()
    if reason.code == "gpu-metrics-no-gpu":
        return Note(reason.code, f"GPU metrics are left out: {_lower(reason.sentence)}", None)
    users = doctor.check_counter_users(machine)
    remedy = (
        "Ask who runs it to pause it while recording (DCGM: dcgmi profmon --pause, afterwards dcgmi profmon --resume); "
        "from Hopper on GPM gives counters beside it."
    )
    if users.status == "warning":
        return Note("gpu-metrics-in-use", f"GPU metrics are left out: nsys could not get them. {users.found}.", remedy)
    if reason.code == "gpu-metrics-in-use":
        sentence = "GPU metrics are left out: another program holds the counters; none is seen from here."
        return Note(reason.code, sentence, remedy)
    sentence = f"GPU metrics are left out: nsys started only without them ({_lower(reason.sentence)})"
    return Note("gpu-metrics-refused", sentence, reason.remedy)


def _lower(sentence: str) -> str:
    return sentence if sentence.startswith("nsys") else sentence[:1].lower() + sentence[1:]


def sampling_obstacle(machine: Machine, version: tuple[int, ...]) -> Note | None:
    """Why CPU samples and context switches are left out; None where they may be recorded."""
    if version[:2] == (2022, 4):
        return Note(
            "sampling-hangs",
            "CPU samples and context switches are left out: with them nsys 2022.4 can hang on new kernels.",
            "Install a newer nsys.",
        )
    check = doctor.check_cpu_sampling(machine)
    if check.status != "warning":
        return None
    sentence = f"CPU samples and context switches are left out: {check.found}."
    return Note("sampling-not-permitted", sentence, f"{check.remedy} {check.command}")


def require_room(machine: Machine, folder: Path, spool: Path) -> Note | None:
    """A note where space is scarce.

    Raises Unavailable where a folder cannot be written to or has less than MINIMUM_BYTES.
    """
    for place in (folder, spool):
        _require_writable(place)
    known = [(free, place) for place in (spool, folder) if (free := free_bytes(machine, place)) is not None]
    if not known:
        return None
    free, place = min(known, key=lambda pair: pair[0])
    if free < MINIMUM_BYTES:
        raise Unavailable(
            f"{_room(place, free)}, and a capture needs {_size(MINIMUM_BYTES)} to begin. {_make_room(spool)}"
        )
    if free < LOW_BYTES:
        return Note("space-low", f"{_room(place, free)}: room for a short capture only.", _make_room(spool))
    return None


def _require_writable(folder: Path) -> None:
    try:
        # Asking for the permission says yes on file systems that are mounted read-only, and to root.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Unavailable(
            f"nsys cannot write to {folder}: {error.strerror}. Take a folder that it may write to."
        ) from None


def space_running_out(machine: Machine, folder: Path, spool: Path, recorded_bytes: int) -> Note | None:
    """A note once a running capture should be stopped: the report of what is recorded would soon not fit any more."""
    for place, needed in ((spool, RESERVE_BYTES), (folder, RESERVE_BYTES + recorded_bytes)):
        free = free_bytes(machine, place)
        if free is not None and free < needed:
            sentence = f"{_room(place, free)}, with {_size(recorded_bytes)} recorded: the capture has to end here."
            return Note("space-short", sentence, _make_room(spool))
    return None


def free_bytes(machine: Machine, folder: Path) -> int | None:
    """Free bytes where the folder lies; None = cannot be asked."""
    space = machine.disk_space(folder)
    return None if space is None else space[1]


def _room(place: Path, free: int) -> str:
    return f"{place} has {_size(free)} free"


def _make_room(spool: Path) -> str:
    return f"Free space there, or set TMPDIR to a larger disk: nsys spools to {spool}."


def _size(count: int) -> str:
    return doctor.binary_size(count)
