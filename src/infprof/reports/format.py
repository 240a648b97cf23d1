"""Numbers and names as people read them: units, per cent, time ranges, kernel names, and the fold of small slices.

Every report goes through these functions, so one figure looks the same in the terminal, in Markdown and in HTML.
An unknown number is "not known", never 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from infprof.reports import labels
from infprof.results import (
    Cost,
    DeviceResult,
    Diagnosis,
    Evidence,
    Gain,
    NotEvaluated,
    Problem,
    Remedy,
    Slice,
    Where,
    Window,
    WorkRow,
)

NOT_KNOWN = "not known"
# A share that shows as 0.0 %.
SMALL_SLICE = 0.0005
# From here on a ratio is easier to read as a factor than as per cent.
_TIMES_FROM = 1.5
WINDOW_HINT = "Another window: `--window full`, `--window A:B` (1.5s:4s), or `--range NAME`."

_TIME_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_FLOP_UNITS = ((10**15, "PFLOP"), (10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"), (1, "FLOP"))
_BYTE_UNITS = ((10**15, "PB"), (10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))
_PLAIN_UNITS = {"watts": "W", "celsius": "°C", "mhz": "MHz"}
_UNITS_BY_SUFFIX = {"_bytes_per_s": "bytes_per_s", "_bytes": "bytes", "_ratio": "ratio", "_ns": "ns"}
_UNIT_SUFFIXES = ("_bytes_per_s", "_per_s", "_bytes", "_ratio", "_ns", "_watts", "_celsius", "_mhz")

# Control characters would let a name from a trace drive the terminal; bidirectional marks would reorder a line.
_UNPRINTABLE = re.compile(
    r"(?:\x1b\[[0-9;?]*[ -/]*[@-~]"
    r"|[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff])+"
)


def clean(text: object) -> str:
    """``text`` on one line, without control characters, direction marks or broken surrogates."""
    return _UNPRINTABLE.sub(" ", str(text)).strip()


# `quoted` text, and flags with what is certainly their value: after "=", and a number or 'text' after a space.
_CODE = re.compile(r"(`[^`]+`|(?<![\w-])--[A-Za-z][\w-]*(?:=[^\s;)]*[^\s;,).]| \d[\w.]*\b| '[^']*')?)")


def prose(text: object) -> list[tuple[str, bool]]:
    """Text that a person wrote (a sentence, a remedy) in pieces of (text, is it code): flags and `quoted` parts are."""
    pieces = (piece for piece in _CODE.split(clean(text)) if piece)
    return [(piece.strip("`") or piece, _CODE.fullmatch(piece) is not None) for piece in pieces]


def plain_prose(text: object) -> str:
    """The same text where code is not set apart."""
    return "".join(piece for piece, _ in prose(text))


def three_digits(value: float) -> str:
    """Three significant digits without an exponent: 0.0123, 1.23, 12.3, 123, and 1,234 from a thousand on."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3g}" if size >= 0.0001 else f"{value:.2e}"


def _scaled(value: float, units: Iterable[tuple[int, str]]) -> str:
    """``value`` in the largest unit in which it is at least 1 after rounding."""
    pairs = list(units)
    for factor, unit in pairs:
        # The last unit is whole (ns, B): 11 ns has no decimals to show.
        if factor > 1 and abs(value) >= 0.9995 * factor:
            return f"{three_digits(value / factor)} {unit}"
    return f"{count(value)} {pairs[-1][1]}"


def duration(ns: float | None) -> str:
    """Nanoseconds as ns, µs, ms or s with three significant digits."""
    return NOT_KNOWN if ns is None else _scaled(ns, _TIME_UNITS)


def size(count: float | None) -> str:
    """Bytes in decimal units (1 kB = 1,000 B)."""
    return NOT_KNOWN if count is None else _scaled(count, _BYTE_UNITS)


def byte_rate(bytes_per_s: float | None) -> str:
    """Bytes per second in decimal units."""
    return NOT_KNOWN if bytes_per_s is None else f"{_scaled(bytes_per_s, _BYTE_UNITS)}/s"


def flop_rate(flop_per_s: float | None) -> str:
    return NOT_KNOWN if flop_per_s is None else f"{_scaled(flop_per_s, _FLOP_UNITS)}/s"


def precision(row: WorkRow) -> str:
    return clean(row.precision) if row.precision else "–"


def of_roof(row: WorkRow) -> str:
    """The share of the nearer roof that was reached, and which one: ``63.9 % compute``."""
    known = {"compute": row.compute_ratio, "bandwidth": row.dram_ratio}
    reached = {name: value for name, value in known.items() if value is not None}
    if not reached:
        return NOT_KNOWN
    name = max(reached, key=lambda n: reached[n])
    return f"{percent(reached[name])} {'cache' if row.limiter == 'cache' else name}"


def class_rows(diagnosis: Diagnosis) -> list[WorkRow]:
    """The work of kernel classes, without that of single operators."""
    return [row for row in diagnosis.work_table if row.operator is None]


def phase_lines(diagnosis: Diagnosis) -> list[str]:
    """What counted work says of each phase, a line for one: MFU, MBU and how much of its kernel time was counted."""
    phases: dict[str, dict[str, float | int | None]] = {}
    for measure in diagnosis.measures:
        if measure.scope.kind == "phase" and measure.scope.id is not None:
            phases.setdefault(measure.scope.id, {})[measure.name] = measure.value
    return [
        f"{clean(phase)}: MFU {percent(values.get('mfu_ratio'))}, MBU {percent(values.get('mbu_ratio'))} by the "
        f"{percent(values.get('work_covered_ratio'))} of its kernel time that could be counted"
        for phase, values in phases.items()
        if values.get("mfu_ratio") is not None or values.get("mbu_ratio") is not None
    ]


def percent(ratio: float | None) -> str:
    """A ratio (0–1) as per cent with one decimal; a share that only rounds to nothing is "<0.1 %"."""
    if ratio is None:
        return NOT_KNOWN
    if 0 < ratio < 0.0005:
        return "<0.1 %"
    return f"{100 * ratio:.1f} %"


def share(part: float | None, whole: float) -> str:
    """``part`` of ``whole`` as per cent; not known when either is missing."""
    return NOT_KNOWN if part is None or whole <= 0 else percent(part / whole)


def count(number: float | None) -> str:
    """A count with thousands separators."""
    if number is None:
        return NOT_KNOWN
    return f"{int(number):,}" if float(number).is_integer() else three_digits(number)


def value_with_unit(value: float | int | str | None, unit: str) -> str:
    """A measure's value for a person; ``unit`` as in names.MEASURES. Text passes through."""
    if value is None:
        return NOT_KNOWN
    if isinstance(value, str):
        return clean(value)
    if unit == "ns":
        return duration(value)
    if unit == "ratio":
        return percent(value) if value < _TIMES_FROM else f"{three_digits(value)} times"
    if unit == "bytes":
        return size(value)
    if unit == "bytes_per_s":
        return byte_rate(value)
    number = count(value) if float(value).is_integer() else three_digits(value)
    if unit == "per_s" or unit.endswith("_per_s"):
        return f"{number} {unit.removesuffix('per_s').replace('_', ' ').strip()}/s".replace(" /s", "/s")
    if unit in ("count", ""):
        return number
    return f"{number} {_PLAIN_UNITS.get(unit, clean(unit))}"


def measure_label(name: str) -> str:
    """A measure's name as words, without the unit suffix, which the value shows: ``idle_launch_ratio``: idle launch."""
    if name in labels.MEASURE_WORDS:
        return labels.MEASURE_WORDS[name]
    text = clean(name)
    for suffix in _UNIT_SUFFIXES:
        if text.endswith(suffix) and len(text) > len(suffix):
            text = text.removesuffix(suffix)
            break
    return text.replace("_", " ")


def unit_by_name(name: str) -> str:
    """The unit that a name's suffix says, "" where it says none: for free fields that are not measures."""
    return next((unit for suffix, unit in _UNITS_BY_SUFFIX.items() if name.endswith(suffix)), "")


def evidence_texts(evidence: Iterable[Evidence], limit: int, cost: Cost) -> list[str]:
    """Evidence as "label value" phrases: not what the cost says already, known values first, at most ``limit``."""
    items = [item for item in evidence if not (item.unit == cost.unit and item.value == cost.value is not None)]
    if len(items) > limit:
        items = sorted(items, key=lambda item: item.value is None)[:limit]
    return [f"{measure_label(item.measure)} {value_with_unit(item.value, item.unit)}" for item in items]


def window_argument(start_ns: int, end_ns: int) -> str:
    """A time range as ``--window`` takes it, rounded outwards to about 1 % of its length so that it can be read."""
    length = max(end_ns - start_ns, 1)
    step = 10 ** max(len(str(length)) - 3, 0)
    start, end = start_ns // step * step, -(-end_ns // step) * step
    factor, unit = (1_000_000_000, "s") if end >= 1_000_000_000 else (1_000_000, "ms")
    return f"{_decimal(start, factor)}{unit}:{_decimal(end, factor)}{unit}"


def _decimal(value: int, factor: int) -> str:
    """``value / factor`` exactly, as a decimal number without trailing zeros (``factor`` is a power of ten)."""
    sign, value = ("-", -value) if value < 0 else ("", value)
    whole, rest = divmod(value, factor)
    digits = f"{rest:0{len(str(factor)) - 1}d}".rstrip("0")
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"


def window_text(window: Window) -> str:
    """How long the window is and how it was chosen; a window with holes says how much of its span it covers."""
    length = duration(window.duration_ns)
    if window.covered_ns is not None and window.covered_ns != window.end_ns - window.start_ns:
        length = f"{length} of {duration(window.end_ns - window.start_ns)}"
    return f"{length} ({clean(window.how)})"


def where_place(where: Where, name_width: int = 40) -> str:
    """What is found at a place: the name, the device and the stream, as far as they are known."""
    moved = _COPY_NAME.fullmatch(where.name or "")
    name = size(int(moved[1])) if moved else short_kernel_name(where.name or "")
    parts = [shorten(name, name_width)] if name else []
    if where.device is not None:
        parts.append(f"GPU {where.device}")
    if where.stream is not None:
        parts.append(f"stream {where.stream}")
    return ", ".join(parts)


def device_label(device: DeviceResult) -> str:
    """``GPU 0 (NVIDIA H200)``, or ``GPU 0`` where the name is not known."""
    return f"GPU {device.id} ({clean(device.name)})" if device.name else f"GPU {device.id}"


# Places of copies are named by their size.
_COPY_NAME = re.compile(r"(\d+) bytes")
# How a C++ name starts, and how a short form of one looks. Ranges and calls may be called anything.
_CPP_NAME = re.compile(r"(?:<unnamed>|[A-Za-z_(])")
# AMD's matrix products are told apart by their tile, which stands in the middle of some hundred characters.
_TENSILE = re.compile(r"(Cijk_[A-Za-z]+_[A-Za-z]+_[A-Z0-9]+)_.*?(MT\d+x\d+x\d+)")
_SHORT_NAME = re.compile(r"[A-Za-z_][\w:~]*(?:<[\w:~]+>)?")


def short_kernel_name(name: str) -> str:
    """The short form of a C++ kernel's name, whole (``kernel_class.short_name``); any other name as it is."""
    # Imported here: the classifier reads its pattern table, and a report may have no kernel.
    from infprof.measures.kernel_class import short_name

    name = clean(name)
    tensile = _TENSILE.match(name)
    if tensile is not None:
        return f"{tensile[1]}_{tensile[2]}"
    if not _CPP_NAME.match(name):
        return name
    short = short_name(name, width=max(len(name), 1))
    return short if _SHORT_NAME.fullmatch(short) else name


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters: the middle goes, since tile shapes and suffixes tell kernels apart."""
    if len(text) <= width:
        return text
    head = max((width - 1) * 2 // 3, 1)
    tail = width - 1 - head
    return f"{text[:head]}…{text[-tail:] if tail > 0 else ''}"


@dataclass(frozen=True)
class SliceShare:
    """One row of the time accounting: a slice, or several small ones of one device folded together."""

    kind: str
    cause: str | None
    ns: int
    ratio: float
    folded: tuple[tuple[str, str | None], ...] = ()


def slice_shares(slices: Iterable[Slice], window_ns: int, keep: int | None = None) -> list[SliceShare]:
    """Slices that hold time, compute first and then by length.

    With ``keep`` there are at most that many rows: the smallest, and all under 0.05 % where they are several, are
    folded into one. The rows' ns add up to the slices' ns whatever is folded.
    """
    held = [item for item in slices if item.ns > 0]
    held.sort(key=lambda item: (item.kind != "compute", -item.ns, item.kind, item.cause or ""))
    rows = [SliceShare(s.kind, s.cause, s.ns, s.ns / window_ns if window_ns > 0 else 0.0) for s in held]
    if keep is None:
        return rows
    large = sum(row.ratio >= SMALL_SLICE or row.kind == "compute" for row in rows)
    keep = min(keep, large + 1)
    if len(rows) <= keep:
        return rows
    rest = rows[keep - 1 :]
    total = sum(row.ns for row in rest)
    folded = tuple((row.kind, row.cause) for row in rest)
    return [*rows[: keep - 1], SliceShare("other", None, total, total / window_ns if window_ns > 0 else 0.0, folded)]


SliceKey = tuple[str, "str | None"]


def slice_order(devices: Iterable[DeviceResult]) -> list[SliceKey]:
    """Slices that hold time on any device, in one order for all: compute first, then by the longest on a device."""
    longest: dict[SliceKey, int] = {}
    for device in devices:
        for item in device.slices:
            if item.ns > 0:
                key = (item.kind, item.cause)
                longest[key] = max(item.ns, longest.get(key, 0))
    return sorted(longest, key=lambda key: (key[0] != "compute", -longest[key], key[0], key[1] or ""))


def lost_ns(device: DeviceResult) -> int:
    """Time of a device that a change could win back: not compute, no demand, the profiler or kernel turn-around."""
    kept = ("no-demand", "profiler", "kernel-gap")
    return sum(s.ns for s in device.slices if s.kind != "compute" and not (s.kind == "idle" and s.cause in kept))


def rules_by_need(items: Iterable[NotEvaluated]) -> dict[str, list[str]]:
    """Rules that could not be evaluated, grouped by what they need; first come, first listed."""
    groups: dict[str, list[str]] = {}
    for item in items:
        groups.setdefault(clean(item.needs), []).append(clean(item.rule))
    return groups


def problem_text(problem: Problem) -> str:
    """The message, and how often it was met where the message does not say so itself."""
    numbers = re.findall(r"\d+", problem.message.replace(",", ""))
    said = problem.count in (None, 1) or str(problem.count) in numbers
    return problem.message if said else f"{problem.message} ({count(problem.count)})"


def no_findings(diagnosis: Diagnosis) -> str:
    """Why there is no finding."""
    if diagnosis.verdict.cls == "unusable":
        return "None: the trace does not allow any."
    if any(problem.code == "too-short" for problem in diagnosis.problems):
        return "Withheld: so short a capture allows none."
    return "None: no rule found time to win back."


def cost_text(cost: Cost, window_ns: int) -> str:
    """What a finding costs: time with its share of the window, or bytes."""
    if cost.value is None:
        return "cost not known"
    if cost.unit != "ns":
        return value_with_unit(cost.value, cost.unit)
    if cost.value == 0:
        return "its time counts above"
    return f"{duration(cost.value)}, {share(cost.value, window_ns)} of window"


def gain_text(gain: Gain) -> str:
    """The bounds on a gain."""
    low, high = gain.low or None, gain.high
    if low is None and high is None:
        return NOT_KNOWN
    if high == 0:
        return "none by itself"
    if high is None:
        return f"at least {percent(low)} of the window"
    if low is None:
        return f"up to {percent(high)} of the window"
    return f"{100 * low:.1f} to {percent(high)} of the window" if low < high else f"{percent(high)} of the window"


def verdict_remedies(diagnosis: Diagnosis) -> list[Remedy]:
    """The verdict's remedies that no finding repeats: the finding that explains the class has the same ones."""
    in_findings = {(r.stack, r.change) for finding in diagnosis.findings for r in finding.remedies}
    return [r for r in diagnosis.verdict.remedies if (r.stack, r.change) not in in_findings]


def whatif_note(diagnosis: Diagnosis) -> str:
    """What the lines are about: their times are not the window's where more or less than that was replayed."""
    note = "each step on top of the ones before; gains are bounds"
    recorded, window = (diagnosis.whatif or {}).get("recorded_span_ns"), diagnosis.window.duration_ns
    if not recorded or not (diagnosis.whatif or {}).get("chain"):
        return note
    if 0.98 * window <= recorded <= 1.02 * window:
        return note
    replayed = f"all {duration(recorded)} recorded" if recorded > window else f"{duration(recorded)} in the middle"
    return f"of {replayed}; each on top of the last; gains are bounds"


def whatif_lines(diagnosis: Diagnosis) -> list[str]:
    """The chain of fixes in words: what each gains, and what limits then."""
    if not diagnosis.whatif:
        return []
    if diagnosis.whatif.get("off"):
        return [f"Off: {clean(diagnosis.whatif['off'])}"]
    lines = []
    for number, step in enumerate(diagnosis.whatif.get("chain") or [], 1):
        fix, words = clean(step.get("fix", "")), clean(step.get("words") or "")
        following, cause = clean(step.get("next_verdict") or ""), clean(step.get("next_cause") or "")
        then = f"; then {labels.second_title(f'{following}/{cause}' if cause else following)}" if following else ""
        span = duration(step.get("predicted_span_ns"))
        gain = percent(step.get("gain_ratio"))
        lines.append(f"{number}. {fix}{f', {words}' if words else ''}: {span}, up to {gain} less{then}")
    if not lines:
        from infprof.replay.command import nothing_gains

        lines.append(nothing_gains())
    return lines
