"""The table of a stream's states."""

from __future__ import annotations

import pytest

from extproc.request import messages as m
from extproc.request.stream import _HANDLERS
from extproc.request.transitions import TABLE, State


def after(state: State) -> set[State]:
    """What may follow an event in `state`: by its type, or by the turn that comes of it."""
    moved = {TABLE[state][kind] for kind in m.EVENT_TYPES if kind in TABLE[state]}
    turns = [set(TABLE[each].values()) - {State.HEADERS} for each in moved]
    return moved.union(*turns)


@pytest.mark.parametrize("state", State)
def test_every_state_can_be_reached_and_ends(state: State) -> None:
    reached, before = {State.HEADERS}, set[State]()
    while reached != before:
        before = set(reached)
        reached |= {each for known in before for each in after(known)}

    assert state in reached
    assert TABLE[state][m.Ended] is State.DONE


def test_nothing_follows_the_end() -> None:
    assert after(State.DONE) == {State.DONE}


def test_a_request_is_never_awaited_again_once_it_is_answered() -> None:
    assert after(State.RESPONSE) == {State.RESPONSE, State.DONE}
    assert after(State.LOCAL_REPLY) == {State.LOCAL_REPLY, State.DONE}


def test_only_what_the_table_allows_is_handled() -> None:
    assert [place for place in _HANDLERS if place[1] not in TABLE[place[0]]] == []


def test_every_message_of_the_data_plane_is_handled_before_the_end() -> None:
    """A legal message without an answer would leave the data plane waiting."""
    ours = {m.Wakeup, m.Overloaded}
    legal = {
        (state, kind)
        for state in State
        for kind in TABLE[state]
        if isinstance(kind, type) and state not in (State.DONE, State.LISTED) and kind not in ours
    }

    assert legal - set(_HANDLERS) == set()
    assert after(State.LISTED) == {State.LISTED, State.DONE}, "answered, as the last one"
