"""Clocks and arrivals of ranks: what is told apart, how exactly, and when nothing is claimed."""

from __future__ import annotations

import numpy as np
import pytest

from infprof.measures.collectives import operation_of
from infprof.ranks.alignment import Participant, align
from infprof.ranks.arrivals import Arrivals, arrival_rows, arrivals, stragglers
from infprof.ranks.traffic import group_traffic, matrix
from infprof.resources import rules_dir
from infprof.results import Stragglers
from infprof.rules import Thresholds, load
from infprof.trace import IntArray
from rank_traces import ALL_REDUCE, EPOCH_NS, MS, US, S, columns

THRESHOLDS: Thresholds = load([rules_dir()]).thresholds
RNG = np.random.default_rng(4)
STEPS = 200


def true_times(steps: int = STEPS, every_ns: int = 2 * MS) -> IntArray:
    """When the steps begin: about every ``every_ns``, never quite."""
    return np.cumsum(RNG.integers(every_ns // 2, every_ns * 3 // 2, steps))


def ranks(late: IntArray, begin: IntArray | None = None, **more: object) -> list[tuple[IntArray, IntArray]]:
    """Arrivals and ends of each rank (rows of ``late``, ns) at collectives that all leave within 2 µs."""
    begin = true_times(late.shape[1]) if begin is None else begin
    start = begin + late
    end = start.max(axis=0) + 100 * US
    return [(s, end + RNG.integers(0, 2 * US, len(end))) for s in start]


def participants(
    spans: list[tuple[IntArray, IntArray]], wall: list[int | None] | None = None, one_file: bool = False
) -> list[Participant]:
    wall = wall or [None] * len(spans)
    return [
        Participant(0 if one_file else i, columns(s, e), w)
        for i, ((s, e), w) in enumerate(zip(spans, wall, strict=True))
    ]


def compared(people: list[Participant]) -> tuple[Arrivals, Stragglers]:
    found = arrivals(people, align(people))
    comm = sum(int((p.collectives.end - p.collectives.start).sum()) for p in people)
    return found, stragglers(found, people, [f"rank {i}" for i in range(len(people))], comm, THRESHOLDS)


def late_by(rank: int, ns: int, count: int = 4, steps: int = STEPS) -> IntArray:
    late = RNG.integers(0, 5 * US, (count, steps))
    late[rank] += ns
    return late


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_clocks_seconds_apart_are_found_within_microseconds() -> None:
    spans = ranks(late_by(1, 300 * US))
    moved = [(s + i * 3 * S, e + i * 3 * S) for i, (s, e) in enumerate(spans)]
    clocks = align(participants(moved))
    assert [c.how for c in clocks] == ["reference", "collectives", "collectives", "collectives"]
    for i, clock in enumerate(clocks):
        assert abs(clock.offset_ns + i * 3 * S) <= 2 * US
        assert clock.error_ns <= 2 * US
        assert np.abs(clock.on_reference(moved[i][1]) - moved[0][1]).max() <= 4 * US
    found, late = compared(participants(moved))
    assert late.kind == "persistent" and late.labels == ["rank 1"]
    assert abs(np.median(found.spread) - 300 * US) < 10 * US


@pytest.mark.parametrize("ppm", [-80, 15, 200])
def test_a_clock_that_drifts_is_straightened(ppm: int) -> None:
    spans = ranks(late_by(0, 0, count=2, steps=2000))
    start, end = ((t + t * ppm / 1e6).round().astype(np.int64) + 5 * S for t in spans[1])
    clocks = align(participants([spans[0], (start, end)]))
    assert clocks[1].drift * 1e6 == pytest.approx(ppm, abs=2)
    assert np.abs(clocks[1].on_reference(end) - spans[0][1]).max() <= 6 * US


def test_no_drift_is_read_into_noise() -> None:
    clocks = align(participants(ranks(late_by(0, 0, count=2))))
    assert clocks[1].drift == 0.0


def test_a_wall_clock_is_believed_where_the_ends_confirm_it() -> None:
    spans = ranks(late_by(2, 200 * US))
    bases = [EPOCH_NS, EPOCH_NS + 40 * US, EPOCH_NS + 7 * S, EPOCH_NS - S]
    own = [(s - (b - EPOCH_NS), e - (b - EPOCH_NS)) for (s, e), b in zip(spans, bases, strict=True)]
    clocks = align(participants(own, list(bases)))
    assert [c.how for c in clocks[1:]] == ["wall-clock"] * 3
    assert [c.offset_ns for c in clocks] == [b - EPOCH_NS for b in bases]


def test_wall_clocks_milliseconds_wrong_give_way_to_the_ends() -> None:
    spans = ranks(late_by(2, 200 * US))
    wall: list[int | None] = [EPOCH_NS, EPOCH_NS + 5 * MS, EPOCH_NS, EPOCH_NS - 30 * MS]
    clocks = align(participants(spans, wall))
    assert [c.how for c in clocks] == ["reference", "collectives", "wall-clock", "collectives"]
    assert max(abs(c.offset_ns) for c in clocks) <= 2 * US


def test_a_trace_that_began_some_collectives_later_is_laid_in_place() -> None:
    spans = ranks(late_by(1, 300 * US))
    cut = [(s[i * 7 :] + i * S, e[i * 7 :] + i * S) for i, (s, e) in enumerate(spans)]
    found, late = compared(participants(cut))
    assert (len(found), late.labels) == (STEPS - 7, ["rank 1"])


def test_equal_distances_and_unknown_clocks_allow_no_claim() -> None:
    begin = np.arange(STEPS) * 2 * MS
    (s0, e0), (s1, e1) = ranks(np.zeros((2, STEPS), dtype=np.int64), begin)
    people = participants([(s0, e0), (s1[5:] + S, e1[5:] + S)])
    assert [c.how for c in align(people)] == ["no", "no"]
    found, late = compared(people)
    assert (len(found), late.kind, late.waited_ns) == (0, "unknown", None)
    assert arrival_rows(found) == []


def test_too_few_common_collectives_allow_no_claim() -> None:
    spans = ranks(late_by(1, 300 * US, count=2, steps=5))
    assert [c.how for c in align(participants([spans[0], (spans[1][0] + S, spans[1][1] + S)]))] == ["no", "no"]


def test_ends_that_do_not_agree_are_not_those_of_the_same_collectives() -> None:
    one, other = ranks(late_by(0, 0, count=1))[0], ranks(late_by(0, 0, count=1))[0]
    assert [c.how for c in align(participants([one, other]))] == ["no", "no"]


def test_a_broadcast_says_nothing_about_clocks() -> None:
    (s0, e0), (s1, e1) = ranks(late_by(0, 0, count=2))
    people = [
        Participant(i, columns(s, e, operation="broadcast"), None) for i, (s, e) in enumerate([(s0, e0), (s1, e1)])
    ]
    assert [c.how for c in align(people)] == ["no", "no"]


def test_two_tensor_parallel_pairs_in_one_file_are_compared_among_themselves() -> None:
    first, second = ranks(late_by(1, 100 * US, count=2)), ranks(late_by(0, 100 * US, count=2))
    clocks = align(participants([*first, *second], one_file=True))
    assert [c.how for c in clocks] == ["reference", "same-file", "reference", "same-file"]
    assert [c.component for c in clocks] == [0, 0, 1, 1]


def test_groups_and_sequences_match_ranks_that_share_only_some_groups() -> None:
    """Ranks 0 and 1 are a pair, 2 and 3 another; 0 and 2 meet in a third group: all four get one clock."""
    pairs, across = true_times(), true_times(60)
    ends: dict[str, tuple[IntArray, IntArray]] = {"a": (pairs, pairs + MS), "b": (pairs + 5, pairs + MS + 5)}
    ends["c"] = (across, across + MS)
    groups = [["a", "c"], ["a"], ["b", "c"], ["b"]]
    people = []
    for rank, mine in enumerate(groups):
        parts = [columns(*ends[g], group=g, sequence=range(len(ends[g][0])), size=2, bytes=1000) for g in mine]
        people.append(Participant(rank, _joined(parts, rank * S), None))
    clocks = align(people)
    assert [c.component for c in clocks] == [0, 0, 0, 0]
    assert [round(c.offset_ns / S) for c in clocks] == [0, -1, -2, -3]
    traffic = group_traffic(people, ["r0", "r1", "r2", "r3"])
    assert {(t.group, tuple(t.ranks), t.count, t.bytes) for t in traffic} == {
        ("a", ("r0", "r1"), STEPS, STEPS * 1000),
        ("b", ("r2", "r3"), STEPS, STEPS * 1000),
        ("c", ("r0", "r2"), 60, 60 * 1000),
    }
    # Among two ranks an all-reduce sends the payload each way.
    assert {(m["from"], m["to"]): m["bytes"] for m in matrix(traffic, people)}[("r0", "r2")] == 60 * 1000


def _joined(parts: list, offset: int):  # type: ignore[no-untyped-def, type-arg]
    from dataclasses import fields, replace

    names = list(dict.fromkeys(n for p in parts for n in p.names))
    moved = [
        replace(
            p,
            start=p.start + offset,
            end=p.end + offset,
            group=np.array([names.index(p.names[g]) for g in p.group]),
            operation=np.array([names.index(p.names[o]) for o in p.operation]),
        )
        for p in parts
    ]
    arrays = [f.name for f in fields(parts[0]) if f.name not in ("device", "names")]
    together = {name: np.concatenate([getattr(p, name) for p in moved]) for name in arrays}
    order = np.argsort(together["start"], kind="stable")
    return replace(parts[0], names=names, **{name: column[order] for name, column in together.items()})


# --- who is late ------------------------------------------------------------------------------------------------------


def test_persistent_rotating_and_one_off_are_told_apart() -> None:
    rotating = RNG.integers(0, 5 * US, (4, STEPS))
    rotating[np.arange(STEPS) % 4, np.arange(STEPS)] += 300 * US
    one_off = RNG.integers(0, 60 * US, (4, STEPS))
    one_off[3, 100] += 200 * MS
    kinds = [compared(participants(ranks(late)))[1] for late in (late_by(2, 300 * US), rotating, one_off)]
    assert [k.kind for k in kinds] == ["persistent", "rotating", "one-off"]
    assert kinds[0].labels == ["rank 2"]
    assert sorted(kinds[1].labels) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert kinds[2].labels == ["rank 3"]


def test_of_two_ranks_taking_turns_neither_is_the_straggler() -> None:
    late = np.zeros((2, STEPS), dtype=np.int64)
    late[(RNG.random(STEPS) < 0.55).astype(int), np.arange(STEPS)] = 300 * US
    assert compared(participants(ranks(late)))[1].kind == "rotating"


def test_waits_are_exact() -> None:
    late = np.zeros((3, 50), dtype=np.int64)
    late[1] = 40 * US
    late[2] = 100 * US
    begin = true_times(50)
    spans = [(s, begin + 200 * US) for s, _ in ranks(late, begin)]
    found, told = compared(participants(spans, [EPOCH_NS] * 3))
    assert np.bincount(found.who, found.wait).tolist() == [50 * 100 * US, 50 * 60 * US, 0]
    assert (told.waited_ns, told.lost_ns, told.collectives) == (50 * 160 * US, 50 * 100 * US, 50)
    row = arrival_rows(found)[0]
    assert (row.name, row.count, row.spread_p50_ns, row.spread_max_ns) == ("all-reduce", 50, 100 * US, 100 * US)


def test_ranks_in_step_have_no_straggler() -> None:
    told = compared(participants(ranks(RNG.integers(0, 5 * US, (4, STEPS)))))[1]
    assert (told.kind, told.labels) == ("none", [])


def test_an_order_within_the_clocks_error_names_nobody() -> None:
    """Ends 150 µs apart bound what arrivals 40 µs apart can prove."""
    (s0, e0), (s1, e1) = ranks(late_by(1, 40 * US, count=2))
    noise = RNG.integers(-150 * US, 150 * US, STEPS)
    found, told = compared(participants([(s0, e0), (s1, e1 + noise)]))
    assert (found.last == -1).all()
    assert told.labels == []


def test_few_collectives_do_not_tell_what_kind_of_straggler() -> None:
    told = compared(participants(ranks(late_by(1, 300 * US, steps=12))))[1]
    assert (told.kind, told.labels) == ("unknown", [])
    assert "too few" in told.sentence


@pytest.mark.parametrize(
    ("column", "reason"), [("compute_before", "compute"), ("idle_before", "host"), (None, "unknown")]
)
def test_what_the_late_rank_does_meanwhile(column: str | None, reason: str) -> None:
    people = []
    for i, (s, e) in enumerate(ranks(late_by(1, 300 * US))):
        more = {} if column is None else {column: np.full(STEPS, 900 * US if i == 1 else 600 * US)}
        people.append(Participant(i, columns(s, e, **more), None))
    assert compared(people)[1].reason == reason


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        (ALL_REDUCE, "all-reduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclWorkElem)", "reduce-scatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send-recv"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)", "all-reduce"),
        ("_allgather_base", "all-gather"),
        ("reduce_scatter_tensor_coalesced", "reduce-scatter"),
        ("all_to_allv", "all-to-all"),
    ],
)
def test_what_a_collective_does_is_known_by_its_name(name: str, operation: str) -> None:
    assert operation_of(name) == operation
