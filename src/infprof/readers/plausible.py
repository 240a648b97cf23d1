"""Which times can be times of one capture: counter overflows and unset stamps cannot."""

from __future__ import annotations

DAY_NS = 86_400 * 10**9
# No capture spans more than this around its median event; stamps outside are counter overflows or unset records.
PLAUSIBLE_SPAN_NS = 30 * DAY_NS
