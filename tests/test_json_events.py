"""Reading JSON in pieces: whatever is cut, repaired or broken, every sound event comes out once and in order."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infprof.readers.json_events import EventStream

texts = st.text(st.sampled_from('ab"\\{}[],:\n\t é}, {"ph"'), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts | st.sampled_from(["ph", "name"]), inner, max_size=3)
    ),
    max_leaves=8,
)
events = st.lists(
    st.builds(lambda name, args: {"ph": "X", "name": name, "args": args}, texts, values), min_size=1, max_size=30
)
tops = st.dictionaries(st.sampled_from(["a", "deviceProperties", "x}, {"]), values, max_size=3)


def read(path: Path, piece_bytes: int) -> tuple[list[dict[str, Any]], EventStream[dict[str, Any]]]:
    stream: EventStream[dict[str, Any]] = EventStream(path, list[dict], lambda value: value, piece_bytes)
    return [event for piece in stream for event in piece], stream


def normal(value: Any) -> Any:
    """As the decoder gives it back: -0.0 and 0 aside."""
    return msgspec.json.decode(json.dumps(value))


common = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@common
@given(events, tops, tops, st.integers(1, 200), st.sampled_from([None, 2]), st.booleans())
def test_every_event_comes_out_once_whatever_the_pieces(
    tmp_path: Path, rows: list[Any], before: Any, after: Any, size: int, indent: int | None, zipped: bool
) -> None:
    data = json.dumps({**before, "traceEvents": rows, **after}, indent=indent).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(data) if zipped else data)
    found, stream = read(path, size)
    assert found == normal(rows)
    assert stream.top == normal({**before, **after})
    assert stream.report.cut_at is None
    assert stream.report.dropped == []


@common
@given(events, st.integers(1, 200), st.data())
def test_a_cut_text_gives_exactly_the_whole_events(
    tmp_path: Path, rows: list[Any], size: int, data: st.DataObject
) -> None:
    text = json.dumps(rows).encode()
    cut = data.draw(st.integers(1, len(text) - 1))
    path = tmp_path / "trace.json"
    path.write_bytes(text[:cut])
    whole, place = 0, 1
    for row in rows:
        place += len(json.dumps(row).encode())
        whole += place <= cut
        place += 2
    found, stream = read(path, size)
    assert found == normal(rows[:whole])
    assert stream.report.cut_at is not None
    assert stream.report.dropped == []


@common
@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(1, 300), st.data())
def test_one_bad_event_costs_itself_only(tmp_path: Path, numbers: list[int], size: int, data: st.DataObject) -> None:
    rows = [json.dumps({"ph": "X", "name": f"n{n}", "args": {"i": i}}) for i, n in enumerate(numbers)]
    bad = data.draw(st.integers(0, len(rows) - 1))
    broken = data.draw(
        st.sampled_from(['{"ph": "X", "name": "say "hello", now"}', '{"ph": "X", tid": 0}', '{"ph": "X", "ts": 1.2.3}'])
    )
    text = [*rows[:bad], broken, *rows[bad + 1 :]]
    path = tmp_path / "trace.json"
    path.write_text("[" + ",\n".join(text) + "]")
    found, stream = read(path, size)
    assert found == [json.loads(row) for i, row in enumerate(rows) if i != bad]
    assert stream.report.dropped == [1 + sum(len(t) + 2 for t in text[:bad])]


@pytest.mark.parametrize("count", [1, 3])
def test_members_of_a_gzip_file_are_one_text(tmp_path: Path, count: int) -> None:
    rows = [{"ph": "X", "name": str(i)} for i in range(1000)]
    text = json.dumps(rows).encode()
    step = len(text) // count + 1
    path = tmp_path / "trace.json.gz"
    # Padding behind the last member is no damage.
    path.write_bytes(b"".join(gzip.compress(text[i : i + step]) for i in range(0, len(text), step)) + b"\0" * 512)
    found, stream = read(path, 5000)
    assert found == rows
    assert not stream.report.gzip_damaged
    assert stream.report.cut_file_bytes is None


def test_damage_inside_a_gzip_file_is_said(tmp_path: Path) -> None:
    import random

    rows = [{"ph": "X", "name": str(random.Random(i).random())} for i in range(20_000)]
    data = bytearray(gzip.compress(json.dumps(rows).encode()))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(data)
    found, stream = read(path, 4096)
    assert 0 < len(found) < 20_000
    assert found[:1000] == rows[:1000]
    assert stream.report.gzip_damaged or stream.report.cut_file_bytes is not None or stream.report.dropped


def test_one_event_may_be_larger_than_a_piece(tmp_path: Path) -> None:
    rows = [{"ph": "X", "name": "x" * 100_000}, {"ph": "X", "name": "y"}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(rows))
    assert read(path, 1000)[0] == rows
