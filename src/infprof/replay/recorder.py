"""From a trace to its recording: calls, then streams, then who waited for whom and for how long."""

from __future__ import annotations

from infprof.measures.operations import Prepared
from infprof.replay.call_waits import call_waits
from infprof.replay.dependencies import engines, event_waits, inferred
from infprof.replay.host_calls import host_calls
from infprof.replay.layout import Layout
from infprof.replay.limits import limits
from infprof.replay.recording import Recording


def record(prepared: Prepared) -> Recording:
    """What bound each event of a trace."""
    ops = prepared.operations
    origin = _origin(prepared)
    begin = int(ops.start.min()) if len(ops) else origin
    calls, call_of_row = host_calls(prepared, origin, begin)
    layout = Layout(prepared, calls, call_of_row)
    known = [*event_waits(layout), *engines(layout)]
    chains, into_operations = limits(layout, known + inferred(layout, known))
    into_calls = call_waits(layout, chains)
    return Recording(prepared, calls, chains, into_operations, into_calls, origin, begin, int((chains.call < 0).sum()))


def _origin(prepared: Prepared) -> int:
    first = [int(prepared.operations.start.min())] if len(prepared.operations) else []
    table = prepared.trace.api_calls
    if table is not None and len(table):
        first.append(int(table["start"].min()))
    return min(first, default=0)
