"""The server's policies by themselves, without PyTorch or HTTP: limits, order, admission, text, and what requests may ask."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infprof.workload.server.admission import BatchWindow, KvAdmission
from infprof.workload.server.errors import ApiError
from infprof.workload.server.protocol import Answering, Ask, ServedModel, parse_ask
from infprof.workload.server.rate_limit import TokenBuckets
from infprof.workload.server.tokenizer import (
    ASSISTANT,
    END_OF_TURN,
    USER,
    TextStream,
    decode,
    encode,
    encode_chat,
    token_bytes,
)
from infprof.workload.server.waiting_line import PRIORITIES, Aging, WaitingLine

SECOND = 1_000_000_000
MODEL = ServedModel("m", vocabulary=512, context=100)

# Rate limit


def test_a_client_may_send_its_burst_and_then_its_rate() -> None:
    buckets = TokenBuckets(rate_per_s=2, burst=3)
    assert [buckets.take("a", 0) for _ in range(4)] == [0, 0, 0, 0.5]
    assert buckets.take("a", SECOND // 4) == 0.25
    assert buckets.take("a", SECOND // 2) == 0
    assert buckets.take("a", SECOND // 2) == 0.5


def test_clients_do_not_take_each_others_tokens() -> None:
    buckets = TokenBuckets(rate_per_s=1, burst=1)
    assert [buckets.take(client, 0) for client in "abab"] == [0, 0, 1, 1]


def test_many_clients_do_not_fill_the_memory() -> None:
    buckets = TokenBuckets(rate_per_s=1, burst=1, most_clients=10)
    for number in range(1000):
        buckets.take(f"client {number}", number)
    assert len(buckets) == 10
    # Who came lately is still known.
    assert buckets.take("client 999", 1000) > 0


@given(
    st.floats(0.1, 1000),
    st.integers(1, 20),
    st.lists(st.integers(0, 3 * SECOND), min_size=1, max_size=60),
)
def test_no_stretch_of_time_lets_through_more_than_burst_and_rate(rate: float, burst: int, pauses: list[int]) -> None:
    buckets = TokenBuckets(rate, burst)
    now, passed = 0, []
    for pause in pauses:
        now += pause
        if buckets.take("a", now) == 0:
            passed.append(now)
    for first, start in enumerate(passed):
        for last, end in enumerate(passed[first:], first):
            assert last - first + 1 <= burst + rate * (end - start) / SECOND + 1e-6


@given(st.floats(0.1, 1000), st.integers(1, 5), st.lists(st.integers(0, SECOND), max_size=30))
def test_who_waits_as_long_as_told_gets_through(rate: float, burst: int, pauses: list[int]) -> None:
    buckets = TokenBuckets(rate, burst)
    now = 0
    for pause in pauses:
        now += pause
        wait_s = buckets.take("a", now)
        if wait_s:
            now += int(wait_s * SECOND) + 1
            assert buckets.take("a", now) == 0


# Who goes first


def line_of(aging: Aging, *arrivals: tuple[str, int, int]) -> list[str]:
    """Names in the order in which they leave; arrivals are (name, priority, time)."""
    line: WaitingLine[str] = WaitingLine()
    for name, priority, arrived in arrivals:
        line.add(name, aging.place(priority, arrived))
    return [line.pop() for _ in range(len(line))]


def test_a_lower_priority_goes_first_and_equal_ones_in_order() -> None:
    assert line_of(Aging(), ("a", 5, 0), ("b", 0, 1), ("c", 0, 2), ("d", -1, 3)) == ["d", "b", "c", "a"]


def test_who_has_waited_long_enough_goes_before_the_urgent() -> None:
    waited = ("old", 3, 0), ("urgent", 0, 4 * SECOND)
    assert line_of(Aging(level_ns=SECOND), *waited) == ["old", "urgent"]
    assert line_of(Aging(level_ns=2 * SECOND), *waited) == ["urgent", "old"]
    assert line_of(Aging(level_ns=None), *waited) == ["urgent", "old"]


def test_first_come_first_served_knows_no_priority() -> None:
    assert line_of(Aging("fcfs"), ("a", 9, 0), ("b", -9, 1)) == ["a", "b"]


@given(
    st.integers(1, 3 * SECOND),
    st.lists(st.tuples(st.integers(PRIORITIES[0], PRIORITIES[-1]), st.integers(0, SECOND)), min_size=1, max_size=60),
    st.integers(1, 3),
)
def test_aging_bounds_who_may_overtake(level: int, arrivals: list[tuple[int, int]], served_per_arrival: int) -> None:
    """However many urgent ones come: who arrives too late for its priority never goes first."""
    aging, line, now = Aging(level_ns=level), WaitingLine[tuple[int, int, int]](), 0
    left: list[tuple[int, int, int]] = []
    for number, (priority, pause) in enumerate(arrivals):
        now += pause
        line.add((number, priority, now), aging.place(priority, now))
        if number % 4 == 0:
            left += [line.pop() for _ in range(min(served_per_arrival, len(line)))]
    left += [line.pop() for _ in range(len(line))]
    assert sorted(number for number, _, _ in left) == list(range(len(arrivals)))
    for place, (_, priority, arrived) in enumerate(left):
        for _, other, came in left[:place]:
            assert came <= arrived + (priority - other) * level or came <= arrived


def test_a_stream_of_urgent_requests_starves_nobody() -> None:
    aging, line = Aging(level_ns=SECOND), WaitingLine[str]()
    line.add("patient", aging.place(10, 0))
    for second in range(100):
        # Two come for each that is served: the line only grows.
        for _ in range(2):
            line.add("urgent", aging.place(0, second * SECOND))
        for _ in range(2):
            if line.pop() == "patient":
                assert second == 10
                return
    pytest.fail("never served")


def test_who_leaves_the_line_is_gone() -> None:
    line: WaitingLine[str] = WaitingLine()
    for place, name in enumerate("abcd"):
        line.add(name, place)
    assert line.remove_if(lambda name: name in "bd") == ["b", "d"]
    assert (line.items, line.first, len(line)) == (["a", "c"], "a", 2)


# Memory


def test_a_request_is_promised_its_whole_length() -> None:
    admission = KvAdmission(blocks=10, block_size=4)
    assert admission.blocks_for(prompt_tokens=5, output_tokens=4) == 2  # 8 tokens: the last one is never computed on
    assert admission.blocks_for(prompt_tokens=5, output_tokens=5) == 3
    admission.promise(8)
    assert admission.fits(2) and not admission.fits(3) and not admission.fits(2, beside=1)
    admission.release(1)
    assert admission.fits(3)


def test_overcommitting_promises_more_than_there_is() -> None:
    assert KvAdmission(10, 4, overcommit=1.5).fits(15)
    assert not KvAdmission(10, 4, overcommit=1.5).fits(16)
    assert KvAdmission(10, 4, overcommit=None).fits(10**9)


def test_an_answer_is_shortened_to_a_quarter_at_most() -> None:
    admission = KvAdmission(blocks=10, block_size=4)
    assert admission.shortened(8, 20) == 20
    admission.promise(5)
    # 20 tokens of room, 8 of them for the prompt, and the last of the output needs none.
    assert admission.shortened(8, 20) == 13
    assert admission.shortened(8, 52) == 13
    assert admission.shortened(8, 53) is None


@given(
    st.integers(1, 60),
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100), st.booleans()), max_size=30),
)
def test_promises_never_exceed_the_cache(blocks: int, size: int, requests: list[tuple[int, int, bool]]) -> None:
    admission, held = KvAdmission(blocks, size), []
    for prompt, output, leaves in requests:
        allowed = admission.shortened(prompt, output)
        if allowed is not None:
            assert output / 4 <= allowed <= output
            held.append(admission.blocks_for(prompt, allowed))
            assert admission.fits(held[-1])
            admission.promise(held[-1])
        if leaves and held:
            admission.release(held.pop(0))
        assert admission.promised == sum(held) <= blocks


def test_an_idle_engine_gathers_a_batch() -> None:
    window = BatchWindow(wait_ns=50, size=4)
    assert window.opens_ns(waiting=1, oldest_arrived_ns=100, now_ns=110) == 150
    assert window.opens_ns(waiting=4, oldest_arrived_ns=100, now_ns=110) == 110
    assert BatchWindow(0, 4).opens_ns(1, 100, 110) <= 110


# Text


@given(st.text())
def test_every_text_survives_the_way_there_and_back(text: str) -> None:
    assert decode(encode(text)) == text
    stream = TextStream()
    assert "".join(stream.add(token)[0] for token in encode(text)) == text
    assert stream.end() == ("", False)


@given(st.lists(st.integers(0, 128_255), max_size=40))
def test_pieces_joined_are_the_text_and_every_piece_is_whole(tokens: list[int]) -> None:
    stream = TextStream()
    pieces = [stream.add(token)[0] for token in tokens]
    assert "".join(pieces) + stream.end()[0] == decode(tokens)


def test_a_character_is_never_split() -> None:
    stream = TextStream()
    assert [stream.add(token)[0] for token in encode("a€😀")] == ["a", "", "", "€", "", "", "", "😀"]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    stream = TextStream()
    assert [stream.add(token)[0] for token in encode("é")[:1]] == [""]
    assert stream.end() == ("�", False)


def test_tokens_beyond_the_bytes_are_words_of_their_own_and_special_ones_are_silent() -> None:
    words = [token_bytes(token) for token in range(264, 20_000)]
    assert len(set(words)) == len(words)
    assert all(word.startswith(b" ") and word[1:].isalpha() for word in words)
    assert token_bytes(END_OF_TURN) == b""


def test_a_stop_string_is_found_across_tokens_and_never_shown() -> None:
    stream = TextStream(["END"])
    assert [stream.add(token) for token in encode("an ENEND")] == [
        ("a", False),
        ("n", False),
        (" ", False),
        ("", False),
        ("", False),
        ("EN", False),
        ("", False),
        ("", True),
    ]


def test_the_beginning_of_a_stop_string_that_does_not_come_is_shown_at_the_end() -> None:
    stream = TextStream(["END"])
    assert [stream.add(token)[0] for token in encode("xEN")] == ["x", "", ""]
    assert stream.end() == ("EN", False)


@given(
    st.lists(st.sampled_from([*encode("abé"), 264, 265]), max_size=40),
    st.lists(st.text("abé d", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stopped_text_is_what_comes_before_the_first_stop_string(tokens: list[int], stops: list[str]) -> None:
    stream, shown, stopped = TextStream(stops), "", False
    for token in tokens:
        text, stopped = stream.add(token)
        shown += text
        if stopped:
            break
    if not stopped:
        text, stopped = stream.end()
        shown += text
    full = decode(tokens)
    assert not any(stop in shown for stop in stops)
    if stopped:
        assert any(full.startswith(shown + stop) for stop in stops)
    else:
        assert shown == full


# Requests


def ask(chat: bool = False, served: ServedModel = MODEL, **fields: Any) -> Ask:
    body: dict[str, Any] = {"model": "m"}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hello"}
    return parse_ask(json.dumps(body | fields).encode(), chat, served)


def refused(data: bytes | None = None, chat: bool = False, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        if data is not None:
            parse_ask(data, chat, MODEL)
        else:
            ask(chat, **fields)
    return caught.value


def test_a_completion_is_read() -> None:
    found = ask(max_tokens=7, temperature=0, stop="x", seed=3, priority=-2, stream=True, ignore_eos=True)
    assert found.prompt == tuple(encode("hello"))
    assert (found.max_tokens, found.temperature, found.stops, found.seed) == (7, 0, ("x",), 3)
    assert (found.priority, found.stream, found.ignore_eos, found.include_usage) == (-2, True, True, False)


def test_a_chat_is_read_in_both_spellings_of_its_content() -> None:
    expected = (USER, *encode("hi"), END_OF_TURN, ASSISTANT)
    assert ask(chat=True).prompt == expected == tuple(encode_chat([("user", "hi")]))
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert ask(chat=True, messages=[{"role": "user", "content": parts}]).prompt == expected


def test_output_tokens_have_two_names_and_defaults_within_the_context() -> None:
    assert ask(chat=True, max_completion_tokens=9, max_tokens=3).max_tokens == 9
    assert ask().max_tokens == 16
    assert ask(prompt="x" * 90).max_tokens == 10
    assert ask(chat=True).max_tokens == MODEL.context - 5


def test_tokens_are_a_prompt_too() -> None:
    assert ask(prompt=[1, 511]).prompt == ask(prompt=[[1, 511]]).prompt == (1, 511)
    assert ask(prompt=["hello"]).prompt == ask().prompt


def test_without_a_seed_each_request_has_its_own() -> None:
    assert ask(temperature=1).seed != ask(temperature=1).seed


def test_a_fault_may_put_prompts_before_the_model_again_and_again() -> None:
    repeated = ServedModel("m", 512, 100, repeat_prompt=4)
    assert ask(served=repeated).prompt == ask().prompt * 4


def test_fields_that_change_nothing_are_let_through() -> None:
    assert ask(n=1, top_p=1.0, top_k=-1, presence_penalty=0, logit_bias={}, tools=[], user="me", metadata={"a": "b"})


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": None}, 400, "missing_value", "model"),
        ({"model": "gpt"}, 404, "model_not_found", "model"),
        ({"prompt": None}, 400, "missing_value", "prompt"),
        ({"prompt": ""}, 400, "invalid_value", "prompt"),
        ({"prompt": [512]}, 400, "invalid_value", "prompt"),
        ({"prompt": [True]}, 400, "invalid_value", "prompt"),
        ({"prompt": ["a", "b"]}, 400, "invalid_value", "prompt"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": "9"}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": 96}, 400, "context_length_exceeded", "prompt"),
        ({"prompt": "x" * 100}, 400, "context_length_exceeded", "prompt"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"temperature": float("nan")}, 400, "invalid_value", "temperature"),
        ({"stop": [""]}, 400, "invalid_value", "stop"),
        ({"stop": ["a"] * 5}, 400, "invalid_value", "stop"),
        ({"priority": 101}, 400, "invalid_value", "priority"),
        ({"stream": "yes"}, 400, "invalid_value", "stream"),
        ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
        ({"n": 2}, 400, "unsupported_parameter", "n"),
        ({"logprobs": 0}, 400, "unsupported_parameter", "logprobs"),
        ({"top_p": 0.5}, 400, "unsupported_parameter", "top_p"),
        ({"chat": True, "messages": []}, 400, "missing_value", "messages"),
        ({"chat": True, "messages": ["hi"]}, 400, "invalid_value", "messages[0]"),
        ({"chat": True, "messages": [{"role": "boss", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
        ({"chat": True, "messages": [{"role": "user"}]}, 400, "invalid_value", "messages[0].content"),
        ({"chat": True, "tools": [{"type": "function"}]}, 400, "unsupported_parameter", "tools"),
        ({"chat": True, "max_tokens": 99}, 400, "context_length_exceeded", "messages"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_field(
    fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    error = refused(**fields)
    assert (error.status, error.code, error.param) == (status, code, param)
    assert set(error.body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'"text"', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    assert (refused(data).status, refused(data).code) == (400, "invalid_json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    ),
    st.booleans(),
)
def test_no_body_is_answered_with_a_crash(value: Any, chat: bool) -> None:
    for name in ("prompt", "messages", "max_tokens", "stop", "stream_options", "temperature", "seed", "n", "model"):
        body = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}], name: value}
        try:
            parse_ask(json.dumps(body).encode(), chat, MODEL)
        except ApiError as error:
            assert error.status in (400, 404)


def test_the_answer_names_the_shape_that_clients_expect() -> None:
    completion = Answering(ask(stream=True, stream_options={"include_usage": True}), MODEL)
    assert completion.opening() is None
    assert completion.chunk("a", [97], None, 1)["choices"][0]["text"] == "a"
    assert completion.last_usage(2) == {
        **{key: completion.chunk("", [], "length", 2)[key] for key in ("id", "object", "created", "model")},
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }
    whole = Answering(ask(chat=True, return_token_ids=True), MODEL).whole("ab", [97, 98], "stop")
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
    assert whole["choices"][0]["token_ids"] == [97, 98]
    assert whole["usage"]["completion_tokens"] == 2


def test_waiting_is_advised_in_whole_seconds() -> None:
    assert ApiError(429, "x", "y", retry_after_s=0.2).headers == {"retry-after": "1"}
    assert ApiError(503, "x", "y", retry_after_s=1.2).headers == {"retry-after": "2"}
    assert ApiError(400, "x", "y").headers == {}
