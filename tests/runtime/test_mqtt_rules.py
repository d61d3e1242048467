"""The rules around the connection: backoff, what waits for the broker, what is on its way. No broker."""

from __future__ import annotations

from random import Random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.config import OutboxConfig
from edge_runtime.supervisor.outbox import REPLIES_LIMIT, Item, Kind, Outbox
from edge_runtime.supervisor.publisher import MAX_INSIDE, Publisher
from edge_runtime.supervisor.reconnect import LONGEST_S, ReconnectRule
from edge_runtime.supervisor.transport import BrokerLimits, Outbound
from support.memory import MemoryTransport

SMALL = OutboxConfig(terminals=2, chunks=6, chunks_per_request=3)


def item(kind: Kind, name: str, *, key: int = 0, qos: int | None = None, expires_at: float | None = None) -> Item:
    qos = (0 if kind == "chunk" else 1) if qos is None else qos
    return Item(Outbound(name, name.encode(), qos), kind, key, expires_at)


def names(outbox: Outbox) -> list[str]:
    found = []
    while (taken := outbox.take()) is not None:
        found.append(taken.message.topic)
    return found


# ---- backoff


def test_waits_double_with_jitter_up_to_a_minute() -> None:
    rule = ReconnectRule(Random(1))
    for nominal in (1, 2, 4, 8, 16, 32, 60, 60):
        assert nominal * 0.75 <= rule.unreachable() <= nominal * 1.25


def test_only_a_connection_of_ten_seconds_begins_anew() -> None:
    for age, nominal in ((9.9, 4), (10.0, 1)):
        rule = ReconnectRule(Random(1))
        rule.unreachable()
        rule.unreachable()
        rule.connected(100.0)
        assert nominal * 0.75 <= rule.ended(100.0 + age, None) <= nominal * 1.25


@pytest.mark.fault("B3")
def test_connections_that_end_before_they_are_accepted_are_tried_ever_more_slowly() -> None:
    rule = ReconnectRule(Random(1))
    for nominal in (1, 2, 4, 8):
        assert nominal * 0.75 <= rule.ended(100.0, None) <= nominal * 1.25
        assert not rule.is_client_id_taken(100.0, None)


@pytest.mark.fault("B3")
@pytest.mark.parametrize(("code", "is_long"), [(0x86, True), (0x87, True), (0x88, False), (0x97, False)])
def test_a_wrong_password_is_tried_again_after_a_minute(code: int, is_long: bool) -> None:
    assert (ReconnectRule(Random(1)).refused(code) == LONGEST_S) == is_long


@pytest.mark.fault("B4")
def test_a_taken_client_id_is_known_by_its_code_or_by_five_short_connections() -> None:
    rule = ReconnectRule(Random(1))
    rule.connected(0.0)
    rule.ended(1.0, 0x8E)
    assert rule.is_client_id_taken(1.0, 0x8E)
    rule = ReconnectRule(Random(1))
    for number in range(5):
        assert not rule.is_client_id_taken(number * 10.0, None)
        rule.connected(number * 10.0)
        rule.ended(number * 10.0 + 1, None)
    assert rule.is_client_id_taken(41.0, None)


@pytest.mark.parametrize("reason", ["code", "unreachable", "slow"])
def test_short_connections_with_another_reason_are_no_sign_of_it(reason: str) -> None:
    rule = ReconnectRule(Random(1))
    step_s = 16.0 if reason == "slow" else 5.0
    for number in range(8):
        rule.connected(number * step_s)
        rule.ended(number * step_s + 1, 0x8B if reason == "code" else None)
        if reason == "unreachable":
            rule.unreachable()
        assert not rule.is_client_id_taken(number * step_s + 1, None)


def test_three_packets_too_large_in_a_row_are_counted() -> None:
    rule = ReconnectRule(Random(1))
    for expected in (1, 2, 3):
        rule.connected(float(expected))
        rule.ended(expected + 0.1, 0x95)
        assert rule.too_large == expected
    rule.connected(9.0)
    rule.ended(9.1, None)
    assert rule.too_large == 0


# ---- outbox


@pytest.mark.fault("R8")
def test_the_oldest_chunk_of_a_request_goes_first_and_terminal_frames_stay() -> None:
    outbox = Outbox(SMALL)
    for number in range(5):
        outbox.put(item("chunk", f"a{number}", key=1))
    outbox.put(item("terminal", "end"))
    assert outbox.dropped_chunks == 2
    assert names(outbox) == ["a2", "a3", "a4", "end"]


def test_chunks_are_bounded_over_all_requests_too() -> None:
    outbox = Outbox(SMALL)
    for number in range(3):
        for key in (1, 2, 3):
            outbox.put(item("chunk", f"{key}.{number}", key=key))
    assert outbox.dropped_chunks == 3
    assert names(outbox) == ["1.1", "2.1", "3.1", "1.2", "2.2", "3.2"]


def test_terminal_frames_are_never_dropped_but_admission_is_told() -> None:
    outbox = Outbox(SMALL)
    for number in range(100):
        assert outbox.is_full == (number >= 2)
        outbox.put(item("terminal", str(number)))
    assert len(names(outbox)) == 100
    assert not outbox.is_full


def test_replies_that_can_be_asked_for_again_are_bounded() -> None:
    outbox = Outbox(SMALL)
    for number in range(REPLIES_LIMIT + 5):
        outbox.put(item("reply", str(number)))
    assert outbox.dropped_replies == 5
    assert len(outbox) == REPLIES_LIMIT


def test_c64_of_a_retained_topic_only_the_latest_waits() -> None:
    outbox = Outbox(SMALL)
    for number in range(10):
        outbox.put(Item(Outbound("status", str(number).encode(), 1, retain=True), "latest"))
        outbox.put(item("reply", f"r{number}"))
    assert len(outbox) == 11
    taken = [outbox.take() for _ in range(11)]
    statuses = [one.message.payload for one in taken if one and one.kind == "latest"]
    assert statuses == [b"9"]


def test_c64_a_hundred_thousand_chunks_need_no_more_room_than_a_thousand() -> None:
    outbox = Outbox(OutboxConfig())
    for number in range(100_000):
        outbox.put(item("chunk", "c", key=number % 50))
    assert len(outbox) == 1024
    assert outbox.dropped_chunks == 100_000 - 1024


def test_what_comes_back_goes_first_but_not_before_a_newer_status() -> None:
    outbox = Outbox(SMALL)
    old = [Item(Outbound(topic, b"old", 1), "latest") for topic in ("status", "status", "info", "info")]
    outbox.put(item("reply", "r"))
    outbox.put(Item(Outbound("status", b"new", 1), "latest"))
    outbox.put_back([item("terminal", "t"), *old])
    assert names(outbox) == ["t", "info", "r", "status"]


@given(
    st.lists(st.tuples(st.sampled_from(["terminal", "reply", "chunk", "latest", "take", "back"]), st.integers(1, 3)))
)
@settings(max_examples=500, deadline=None)
def test_bounds_and_order_hold_for_any_sequence(actions: list[tuple[str, int]]) -> None:
    outbox = Outbox(SMALL)
    taken: list[int] = []
    terminals = 0
    for number, (kind, key) in enumerate(actions):
        if kind in ("take", "back"):
            found = [one for _ in range(key) if (one := outbox.take())]
            if kind == "back":
                outbox.put_back(found)
                continue
            taken += [int(one.message.payload) for one in found]
            terminals -= sum(one.kind == "terminal" for one in found)
            continue
        terminals += kind == "terminal"
        topic = f"s{key}" if kind == "latest" else str(number)
        message = Outbound(topic, str(number).encode(), 1)
        outbox.put(Item(message, cast(Kind, kind), key if kind == "chunk" else 0))
        assert outbox.is_full == (terminals >= SMALL.terminals)
    while last := outbox.take():
        taken.append(int(last.message.payload))
        terminals -= last.kind == "terminal"
    assert taken == sorted(taken)
    assert terminals == 0
    assert not outbox._rings


# ---- publisher


class Way:
    """Outbox, connection and publisher, and the acknowledgements that came out."""

    def __init__(self) -> None:
        self.outbox = Outbox(OutboxConfig())
        self.transport = MemoryTransport()
        self.acknowledged: list[tuple[str, int]] = []
        self.publisher = Publisher(self.outbox, self.transport, self._note)

    def _note(self, item: Item, code: int) -> None:
        self.acknowledged.append((item.message.topic, code))

    def sent(self) -> list[str]:
        return [message.topic for message in self.transport.published]


def test_nothing_is_published_while_disconnected_and_all_of_it_afterwards() -> None:
    way = Way()
    for name in "abc":
        way.outbox.put(item("terminal", name))
    way.publisher.pump(0.0)
    assert way.sent() == []
    way.transport.connect()
    way.publisher.pump(0.0)
    assert way.sent() == ["a", "b", "c"]
    assert not way.publisher.is_idle
    for token in (1, 2, 3):
        way.publisher.published(token, 0)
    assert way.publisher.is_idle
    assert way.acknowledged == [("a", 0), ("b", 0), ("c", 0)]


@pytest.mark.parametrize(("receive_maximum", "expected"), [(65_535, MAX_INSIDE), (5, 5)])
def test_only_so_many_frames_are_inside_the_library(receive_maximum: int, expected: int) -> None:
    way = Way()
    way.transport.connect(BrokerLimits(receive_maximum=receive_maximum))
    for number in range(100):
        way.outbox.put(item("terminal", str(number)))
    way.publisher.pump(0.0)
    assert len(way.sent()) == expected
    way.publisher.published(1, 0)
    way.publisher.pump(0.0)
    assert len(way.sent()) == expected + 1


def test_negative_acknowledgements_are_counted_by_code() -> None:
    way = Way()
    way.transport.connect()
    for name in "abc":
        way.outbox.put(item("terminal", name))
    way.publisher.pump(0.0)
    for token, code in ((1, 0x10), (2, 0x87), (3, 0x10)):
        way.publisher.published(token, code)
    assert way.publisher.negative_codes == {0x10: 2, 0x87: 1}


def test_of_what_was_on_its_way_only_unacknowledged_frames_are_lost_with_the_connection() -> None:
    way = Way()
    way.transport.connect()
    way.outbox.put(item("chunk", "c", key=1))
    way.outbox.put(item("terminal", "t"))
    way.publisher.pump(0.0)
    way.publisher.disconnected()
    assert way.publisher.lost_chunks == 1
    way.publisher.published(2, 0)  # the library has sent it again
    assert way.acknowledged == [("t", 0)]
    assert way.publisher.is_idle


def test_frames_that_the_connection_gave_up_are_sent_again_without_the_largest() -> None:
    way = Way()
    way.transport.connect()
    for name in ("a", "b" * 1000, "c"):
        way.outbox.put(item("terminal", name))
    way.publisher.pump(0.0)
    way.publisher.dropped((1, 2, 3))
    way.publisher.pump(0.0)
    assert way.sent()[3:] == ["a", "c"]
    assert way.publisher.too_large == 1


def test_a_frame_that_the_broker_can_not_take_does_not_block_the_others() -> None:
    way = Way()
    way.transport.connect(BrokerLimits(packet_bytes=300))
    for name in ("a" * 300, "b"):
        way.outbox.put(item("terminal", name))
    way.publisher.pump(0.0)
    assert way.sent() == ["b"]
    assert way.publisher.too_large == 1


def test_the_rest_of_its_life_goes_with_a_frame() -> None:
    way = Way()
    way.transport.connect()
    for expires_at in (None, 100.0, 12.4, 3.0):
        way.outbox.put(item("terminal", "t", expires_at=expires_at))
    way.publisher.pump(10.0)
    assert [message.expiry_s for message in way.transport.published] == [None, 90, 3, 1]
