"""The table of a stream's states."""

from __future__ import annotations

import pytest

from extproc.request import messages as m
from extproc.request.stream import _HANDLERS
from extproc.request.transitions import TABLE, CallState


def after(state: CallState) -> set[CallState]:
    """What may follow an event in `state`: by its type, or by its result."""
    moved = {TABLE[state][kind] for kind in m.EVENT_TYPES if kind in TABLE[state]}
    by_result = [set(TABLE[each].values()) - {CallState.HEADERS} for each in moved]
    return moved.union(*by_result)


@pytest.mark.parametrize("state", CallState)
def test_every_state_can_be_reached_and_ends(state: CallState) -> None:
    reached, before = {CallState.HEADERS}, set[CallState]()
    while reached != before:
        before = set(reached)
        reached |= {each for known in before for each in after(known)}

    assert state in reached
    assert TABLE[state][m.StreamEnded] is CallState.DONE


def test_nothing_follows_the_end() -> None:
    assert after(CallState.DONE) == {CallState.DONE}


def test_a_request_is_never_awaited_again_once_it_is_answered() -> None:
    assert after(CallState.RESPONSE) == {CallState.RESPONSE, CallState.DONE}
    assert after(CallState.LOCAL_REPLY) == {CallState.LOCAL_REPLY, CallState.DONE}


def test_only_what_the_table_allows_is_handled() -> None:
    assert [place for place in _HANDLERS if place[1] not in TABLE[place[0]]] == []


def test_every_message_of_the_data_plane_is_handled_before_the_end() -> None:
    """A legal message without an answer would leave the data plane waiting."""
    ours = {m.Wakeup, m.Overloaded}
    legal = {
        (state, kind)
        for state in CallState
        for kind in TABLE[state]
        if isinstance(kind, type)
        and state not in (CallState.DONE, CallState.LISTED)
        and kind not in ours
    }

    assert legal - set(_HANDLERS) == set()
    assert after(CallState.LISTED) == {CallState.LISTED, CallState.DONE}, (
        "answered, as the last one"
    )
