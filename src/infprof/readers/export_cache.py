"""Exports of binary reports, kept so that each report is exported once.

They lie in ``nsys-exports`` below ``$INFPROF_CACHE_DIR``, else ``$XDG_CACHE_HOME/infprof``, else ``~/.cache/infprof``,
in a folder that only its owner may enter: an export holds the environment of the recorded program. The one used longest
ago goes first when there are more than ``MAX_EXPORTS`` or together they take more than ``MAX_BYTES``. Where there is no
room that may be written to, nothing is kept.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_EXPORTS = 20
MAX_BYTES = 10 << 30
# A workspace this old was left by a program that was killed.
_LEFT_BEHIND_S = 86_400
_WORKSPACE = ".export-"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the exports are kept."""
    chosen, base = environ.get("INFPROF_CACHE_DIR"), environ.get("XDG_CACHE_HOME", "")
    if chosen:
        return Path(chosen) / "nsys-exports"
    # By its specification a relative XDG_CACHE_HOME does not count.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "infprof" / "nsys-exports"


class ExportCache:
    """The kept exports: ``key`` names a report by its content, ``version`` the nsys that exported it."""

    def __init__(self, folder: Path, max_exports: int = MAX_EXPORTS, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self._max_exports, self._max_bytes = max_exports, max_bytes

    def find(self, key: str, version: str | None) -> Path | None:
        """The export of a report by this nsys, or by any where ``version`` is None; it then counts as used now."""
        found = sorted(self.folder.glob(f"{key}-{version or '*'}.sqlite"))
        if not found:
            return None
        with suppress(OSError):
            os.utime(found[-1])
        return found[-1]

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A folder to export into, removed at the end with all that was not kept."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            place = tempfile.mkdtemp(prefix=_WORKSPACE, dir=self.folder)
        except OSError:
            place = tempfile.mkdtemp(prefix="infprof-")
        try:
            yield Path(place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def keep(self, export: Path, key: str, version: str) -> None:
        """Move an export out of its workspace into the cache, in one step, and make room for it."""
        with suppress(OSError):
            export.replace(self.folder / f"{key}-{version}.sqlite")
            self._prune()

    def _prune(self) -> None:
        used = sorted(((p.stat(), p) for p in self.folder.glob("*.sqlite")), key=lambda e: e[0].st_mtime, reverse=True)
        total = 0
        for number, (stat, path) in enumerate(used):
            total += stat.st_size
            # The newest stays, however large: it is what was just asked for.
            if number and (number >= self._max_exports or total > self._max_bytes):
                total -= stat.st_size
                path.unlink(missing_ok=True)
        for place in self.folder.glob(f"{_WORKSPACE}*"):
            if time.time() - place.stat().st_mtime > _LEFT_BEHIND_S:
                shutil.rmtree(place, ignore_errors=True)
