"""Events and commands are values."""

from __future__ import annotations

from typing import get_args

from extproc.request import messages as m


def test_the_table_of_events_lists_every_kind_of_event_once() -> None:
    assert sorted(m.EVENT_TYPES, key=str) == sorted(get_args(m.Event), key=str)


def test_body_modes_have_the_numbers_of_the_protocol() -> None:
    """`ProcessingMode.BodySendMode` in processing_mode.proto."""
    assert {mode.name: mode.value for mode in m.BodyMode} == {
        "NONE": 0,
        "STREAMED": 1,
        "BUFFERED": 2,
        "BUFFERED_PARTIAL": 3,
        "FULL_DUPLEX_STREAMED": 4,
    }


def test_commands_are_equal_by_what_they_say() -> None:
    assert m.EchoBody(b"x", True) == m.EchoBody(b"x", True)
    assert m.EchoBody(b"x") != m.EchoBody(b"x", True)
    assert (
        len({m.ContinueTrailers(), m.ContinueResponseTrailers(), m.EndStream(), m.EndStream()}) == 3
    )
