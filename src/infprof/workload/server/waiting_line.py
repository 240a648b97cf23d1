"""Who waits, and in which order: by priority, with aging so that nobody waits for ever."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

POLICIES = ("priority", "fcfs")
# Aging bounds a wait only where priorities are bounded.
PRIORITIES = range(-100, 101)


@dataclass(frozen=True)
class Aging:
    """The order of requests: a lower priority number goes first, as vLLM has it.

    Who waits gains one level every ``level_ns``. All who wait gain alike, so the order of two requests never changes, and
    a number fixed at arrival stands for it: priority × level_ns + arrival. A request is therefore overtaken only by those
    that arrive within (its priority - theirs) × level_ns after it. ``level_ns`` None: priority alone counts, and a stream
    of urgent requests starves the others. ``policy`` fcfs: arrival alone counts.
    """

    policy: str = "priority"
    level_ns: int | None = 1_000_000_000

    def place(self, priority: int, arrived_ns: int) -> int:
        """The lower goes first; equal ones in the order in which they were added."""
        if self.policy == "fcfs":
            return arrived_ns
        return priority if self.level_ns is None else priority * self.level_ns + arrived_ns


class WaitingLine(Generic[T]):
    """Items in the order of their places, equal ones in the order of their coming. Not safe for several threads."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, T]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first(self) -> T:
        """Raises IndexError where nobody waits."""
        return self._entries[0][2]

    @property
    def items(self) -> list[T]:
        return [item for _, _, item in self._entries]

    def add(self, item: T, place: int) -> None:
        """Queue an item."""
        bisect.insort(self._entries, (place, self._added, item), key=lambda entry: entry[:2])
        self._added += 1

    def pop(self) -> T:
        """Take the first one out. Raises IndexError where nobody waits."""
        return self._entries.pop(0)[2]

    def remove_if(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take out whom ``unwanted`` names, in order."""
        removed = [item for _, _, item in self._entries if unwanted(item)]
        if removed:
            self._entries = [entry for entry in self._entries if not any(entry[2] is item for item in removed)]
        return removed
