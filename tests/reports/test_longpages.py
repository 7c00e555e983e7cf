"""Room for the long responses of all pods together, and who gets it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.reports.longpages import FREE_BYTES, Lease, LongPages


class Reading:
    """One response after the other, of one client."""

    def __init__(self, room: LongPages) -> None:
        self.lease: Lease = room.lease()
        self.num_bytes = 0
        self.num_lost = 0

    def take(self, num_bytes: int) -> bool:
        """As a client does: who gets no room gives back what it has."""
        self.num_bytes += num_bytes
        if self.lease.take(num_bytes, self._lose):
            return True
        self._give_back()
        return False

    def release(self) -> None:
        self.num_bytes = 0
        self.lease.release()

    def _lose(self) -> None:
        self.num_lost += 1
        self._give_back()

    def _give_back(self) -> None:
        self.lease.give_back(self.num_bytes)
        self.num_bytes = 0


def test_short_responses_take_none_of_the_room() -> None:
    room = LongPages(max_bytes=0)
    readings = [Reading(room) for _ in range(100)]

    assert all(each.take(FREE_BYTES) for each in readings)
    assert room.num_bytes == 0
    assert not readings[0].take(1), "the free part is of a visit, not of a response"
    readings[0].release()
    assert readings[0].take(FREE_BYTES)


def test_the_longest_that_is_arriving_gives_way_to_a_shorter_one() -> None:
    room = LongPages(max_bytes=1000)
    long, short = Reading(room), Reading(room)
    assert long.take(FREE_BYTES + 900)
    assert short.take(FREE_BYTES + 200)

    assert (long.num_lost, short.num_lost) == (1, 0)
    assert room.num_bytes == 200


def test_the_longest_gives_way_itself_where_it_wants_more() -> None:
    room = LongPages(max_bytes=1000)
    long, short = Reading(room), Reading(room)
    assert short.take(FREE_BYTES + 200)
    assert not long.take(FREE_BYTES + 900)

    assert short.num_lost == 0
    assert room.num_bytes == 200


def test_what_is_being_read_keeps_its_room() -> None:
    room = LongPages(max_bytes=1000)
    long, short = Reading(room), Reading(room)
    assert long.take(FREE_BYTES + 900)
    long.lease.arrived()
    assert not short.take(FREE_BYTES + 200)
    assert long.num_lost == 0
    long.release()
    short.release()

    assert short.take(FREE_BYTES + 200)
    assert room.num_bytes == 200


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4), st.sampled_from(["take", "arrived", "release"]), st.integers(1, 700)
        ),
        max_size=60,
    )
)
def test_the_sum_is_what_is_held_and_never_above_the_room(
    steps: list[tuple[int, str, int]],
) -> None:
    room = LongPages(max_bytes=1000)
    readings = [Reading(room) for _ in range(5)]
    for each in readings:
        each.take(FREE_BYTES)
    for number, step, num_bytes in steps:
        reading = readings[number]
        if step == "take":
            reading.take(num_bytes)
        elif step == "arrived":
            reading.lease.arrived()
        else:
            reading.release()

        assert room.num_bytes == sum(each.lease.num_bytes for each in readings)
        assert 0 <= room.num_bytes <= 1000
    for each in readings:
        each.release()
    assert room.num_bytes == 0
