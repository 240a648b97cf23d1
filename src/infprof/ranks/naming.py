"""Which rank and which machine each file is of: by the trace itself, else by its name, else by order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infprof.ranks.inputs import identity, natural_key
from infprof.ranks.workers import FileResult
from infprof.results import Problem


@dataclass
class RankFile:
    """A file that could be read. ``twice`` marks one whose rank an earlier file has already."""

    path: Path
    file: str
    result: FileResult
    rank: int | None
    label: str = ""
    node: int | None = None
    twice: bool = False


def named(files: Sequence[tuple[Path, str, FileResult]], problems: list[Problem]) -> list[RankFile]:
    """The files in order of their ranks, each with a label of its own; says what is odd about the ranks."""
    out = []
    machines: list[str | None] = []
    for path, name, result in files:
        by_name = identity(path)
        machines.append(by_name.machine)
        out.append(RankFile(path, name, result, result.rank if result.rank is not None else by_name.rank))
    known = sorted({m for m in machines if m is not None}, key=natural_key)
    for one, machine in zip(out, machines, strict=True):
        one.node = None if machine is None else known.index(machine)
    if len(out) > 1 and all(one.rank is None for one in out):
        problems.append(
            Problem("ranks-by-order", "No file says which rank it is of: ranks are numbered in the order of the names.")
        )
        for number, one in enumerate(out):
            one.rank = number
    out.sort(key=lambda one: (one.rank is None, one.rank or 0, one.node or 0, natural_key(one.file)))
    _label(out, problems)
    return out


def _label(files: list[RankFile], problems: list[Problem]) -> None:
    held = Counter(one.rank for one in files)
    by_node = Counter((one.node, one.rank) for one in files)
    seen: set[int] = set()
    for one in files:
        if one.rank is None:
            one.label = one.file
        elif held[one.rank] == 1:
            one.label = f"rank {one.rank}"
        elif one.node is not None and by_node[one.node, one.rank] == 1 and one.result.rank is None:
            # Names often count the ranks of their own machine.
            one.label = f"node {one.node} rank {one.rank}"
        else:
            one.twice = one.rank in seen
            one.label = f"rank {one.rank} ({one.file})"
        seen.add(one.rank if one.rank is not None else -1)
    twice = [one for one in files if one.twice]
    if twice:
        names = ", ".join(f"{one.file} (rank {one.rank})" for one in twice[:3])
        more = f" and {len(twice) - 3} more" if len(twice) > 3 else ""
        text = f"Some ranks have several files; arrival compares the first one of each rank, not {names}{more}."
        problems.append(Problem("duplicate-ranks", text, len(twice)))


def missing_ranks(files: Sequence[RankFile], problems: list[Problem]) -> tuple[int | None, list[int]]:
    """The size of the job, None where not recorded, and the ranks without a usable file; says both."""
    sizes = sorted({one.result.world_size for one in files if one.result.world_size})
    if len(sizes) > 1:
        text = f"The files are of jobs of different size ({', '.join(map(str, sizes))} ranks): they may not belong together."
        problems.append(Problem("world-size-differs", text, len(sizes)))
    there = {one.rank for one in files if one.rank is not None}
    of_machines = any(one.label.startswith("node ") for one in files)
    size = max(sizes[-1] if sizes else 0, max(there, default=-1) + 1)
    absent = [] if of_machines else sorted(set(range(size)) - there)
    if absent:
        problems.append(
            Problem(
                "ranks-missing",
                f"{len(there)} of {size} ranks are here; missing: {_ranges(absent)}. Whoever is late among those is not seen.",
                len(absent),
            )
        )
    return (sizes[-1] if sizes else None), absent


def _ranges(numbers: Sequence[int]) -> str:
    """0–3, 7, 9–11, cut after five."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")
