"""Binary reports of Nsight Systems (.nsys-rep, .qdrep): exported by an installed nsys, then read as SQLite.

Only nsys can read them, and only one that is not older than the one that made the report (NVIDIA's user guide, "Sharing
a report file"). Exports are kept (export_cache.py), named by the content of the report and the version of nsys.
"""

from __future__ import annotations

from pathlib import Path

from infprof.trace import Trace

MAGIC = b"NVIDIA Tegra Profiler Report "
SUFFIXES = (".nsys-rep", ".qdrep")


class NsysReportReader:
    """Reads binary reports through the newest nsys of the machine."""

    name = "nsys-report"

    def sniff(self, path: Path, head: bytes) -> bool:
        # The head of reports to come is not known: there the name counts, where the content is no text.
        return head.startswith(MAGIC) or (path.suffix in SUFFIXES and b"\0" in head)

    def read(self, path: Path) -> Trace:
        """The report as a Trace; takes as long as nsys needs to export it, once per report.

        Raises InfprofError where there is no nsys that can export it, or where it is damaged.
        """
        # What finds and calls nsys costs a tenth of a second at every start: other inputs do without.
        from infprof.readers.report_export import read_report

        return read_report(path)
