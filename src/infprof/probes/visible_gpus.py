"""Which of the machine's GPUs belong to the target, by its CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

NVML numbers GPUs in the order of their PCI addresses; CUDA puts the fastest first unless CUDA_DEVICE_ORDER says
otherwise. A number alone therefore names a GPU for sure only where every order is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU in NVML's order: its UUID, name, and the UUIDs of its MIG slices."""

    uuid: str
    name: str
    slices: tuple[str, ...] = ()


class Visible(NamedTuple):
    """UUID (of a GPU or slice) → "yes", "likely", "unknown" or "no", and what that rests on, in words."""

    target: dict[str, str]
    basis: str

    @property
    def none(self) -> bool:
        """Whether the target surely sees no GPU."""
        return all(answer == "no" for answer in self.target.values())


def visible_gpus(environ: Mapping[str, str], gpus: Sequence[Gpu], variable: str = "CUDA_VISIBLE_DEVICES") -> Visible:
    """Say of every GPU and MIG slice whether the target sees it. Values of the environment are not repeated."""
    everything = [uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.slices)]
    value = environ.get(variable)
    if value is None:
        # With MIG a program sees one slice only, and which one is CUDA's choice.
        slices = dict.fromkeys((uuid for gpu in gpus for uuid in gpu.slices), "unknown")
        target = dict.fromkeys(everything, "yes") | slices
        return Visible(target, f"{variable} is not set: every GPU is visible")
    numbers, uuids = _valid(value, gpus)
    target = dict.fromkeys(everything, "no")
    for uuid in uuids:
        target |= _with_relatives(uuid, gpus)
    if not numbers and not uuids:
        return Visible(target, f"{variable} hides every GPU")
    basis = f"{variable} names GPUs by UUID"
    if numbers:
        answers, why = _by_number(numbers, environ.get("CUDA_DEVICE_ORDER"), gpus)
        basis = f"{variable} names {why}"
        for index, answer in answers.items():
            target |= dict.fromkeys((gpus[index].uuid, *gpus[index].slices), answer)
    return Visible(target, basis)


def _valid(value: str, gpus: Sequence[Gpu]) -> tuple[list[int], list[str]]:
    """The numbers and UUIDs up to the first id that names nothing: CUDA ignores it and all that follow."""
    numbers: list[int] = []
    uuids: list[str] = []
    for part in (text.strip() for text in value.split(",")):
        if part.isdecimal() and int(part) < len(gpus):
            numbers.append(int(part))
            continue
        found = _by_prefix(part, gpus)
        if found is None:
            break
        uuids.append(found)
    return numbers, uuids


def _by_prefix(part: str, gpus: Sequence[Gpu]) -> str | None:
    if not part.startswith(("GPU-", "MIG-")):
        return None
    fitting = [uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.slices) if uuid.lower().startswith(part.lower())]
    return fitting[0] if len(fitting) == 1 else None


def _with_relatives(uuid: str, gpus: Sequence[Gpu]) -> dict[str, str]:
    """A GPU with MIG shows one of its slices; a slice's own signals partly live on its GPU."""
    for gpu in gpus:
        if uuid == gpu.uuid:
            return {uuid: "yes", **dict.fromkeys(gpu.slices, "unknown")}
        if uuid in gpu.slices:
            return {gpu.uuid: "yes", uuid: "yes"}
    return {}


def _by_number(numbers: Sequence[int], order: str | None, gpus: Sequence[Gpu]) -> tuple[dict[int, str], str]:
    """Index → answer of every GPU that a number may mean, and why."""
    chosen = set(numbers)
    if order == "PCI_BUS_ID":
        return dict.fromkeys(chosen, "yes"), "GPUs by number, in PCI order"
    if len(chosen) == len(gpus):
        return dict.fromkeys(chosen, "yes"), "every GPU"
    everything = dict.fromkeys(range(len(gpus)), "unknown")
    if len({gpu.name for gpu in gpus}) == 1:
        why = "GPUs by number: between equal GPUs that is most likely their PCI order"
        return everything | dict.fromkeys(chosen, "likely"), why
    return everything, "GPUs by number, in an order that is not known (CUDA_DEVICE_ORDER): which ones cannot be told"
