"""Questions to the router that leads, as messages."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.core.beginnings import MARKS_BYTES
from extproc.core.bounds import MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS
from extproc.core.following import Answer, Question, Withdrawal
from extproc.core.pickids import pick_id_of
from extproc.core.types import NO_HINTS, Hints, RequestInfo
from extproc.shell.gen import peers_pb2
from extproc.shell.questions import MAX_SUBSET, MAX_TEXT_CHARS, Mail, decode, encode

NOW = 100.0
IDS = st.integers(0, 2**64 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ADDRESSES = st.frozensets(st.sampled_from(("10.0.0.1:1", "10.0.0.2")))
MARKS = st.floats(0, 1e6, exclude_min=True)
HINTS = st.builds(Hints, TEXTS, TEXTS, slo_ttft_ms=st.none() | MARKS, slo_tpot_ms=st.none() | MARKS)
REQUESTS = st.builds(
    RequestInfo,
    model=TEXTS,
    path=TEXTS,
    body_bytes=st.integers(0, 2**40),
    request_id=TEXTS,
    session=st.none() | TEXTS.filter(bool),
    subset=st.none() | ADDRESSES,
    arrived_at_s=st.integers(0, 100).map(float),
    hints=HINTS,
    prefix_hashes=st.lists(IDS, max_size=len(MARKS_BYTES)).map(tuple),
    written=TEXTS,
).map(lambda each: replace(each, body_bytes=each.body_bytes + MARKS_BYTES[-1]))


def sent(mail: Mail, *, sender: str = "far", receiver: str = "near") -> Any:
    message = encode(mail, now=NOW)
    assert message is not None
    return decode(sender, receiver, peers_pb2.PeerMessage.FromString(message), now=NOW)


@given(REQUESTS, IDS)
def test_a_question_arrives_with_all_that_a_policy_may_use(request: RequestInfo, id: int) -> None:
    question = Question(pick_id_of("far", id), request, NOW + 2.5)

    assert sent(question) == question


@pytest.mark.parametrize("milliseconds", [nan, inf, -1.0])
def test_a_time_that_nobody_can_want_is_heard_as_none(milliseconds: float) -> None:
    hints = Hints(slo_ttft_ms=milliseconds, slo_tpot_ms=milliseconds)
    question = sent(Question("far-1", RequestInfo("a", arrived_at_s=NOW, hints=hints), NOW + 3))

    assert question.request.hints == NO_HINTS


def test_the_times_of_a_question_are_those_of_the_receiver() -> None:
    message = encode(Question("far-1", RequestInfo("a", arrived_at_s=NOW - 1), NOW + 3), now=NOW)
    assert message is not None

    question = decode("far", "near", peers_pb2.PeerMessage.FromString(message), now=7.0)

    assert isinstance(question, Question)
    assert (question.request.arrived_at_s, question.give_up_s) == (6.0, 10.0)


@pytest.mark.parametrize(
    "answer", [Answer("near-1", "10.0.0.1:1"), Answer("near-2", held_s=0.25), Answer("near-3")]
)
def test_an_answer_is_about_a_pick_of_the_receivers_own(answer: Answer) -> None:
    assert sent(answer) == answer


def test_a_withdrawal_is_about_a_pick_of_the_sender() -> None:
    assert sent(Withdrawal("far-7")) == Withdrawal("far-7")
    assert sent(Withdrawal("other-7")) == Withdrawal("far-7")


def test_other_messages_are_none_of_these() -> None:
    assert decode("far", "near", peers_pb2.PeerMessage(), now=NOW) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "m" * (MAX_TEXT_CHARS + 1)},
        {"model": "\ud800"},
        {"session": "s" * (MAX_TEXT_CHARS + 1)},
        {"hints": Hints(objective="o" * (MAX_TEXT_CHARS + 1))},
        {"hints": Hints(fairness_id="\udfff")},
        {"subset": frozenset(str(number) for number in range(MAX_SUBSET + 1))},
    ],
)
def test_what_does_not_fit_in_a_question_is_not_asked(changes: dict[str, Any]) -> None:
    request = replace(RequestInfo("a"), **changes)

    assert encode(Question("near-1", request, NOW), now=NOW) is None


def test_of_a_longer_question_the_rest_is_not_read() -> None:
    message = peers_pb2.PeerMessage()
    asked = message.question
    asked.body_bytes = 2**40
    asked.model = asked.path = asked.request_id = asked.session = "x" * 5000
    asked.objective = asked.fairness_id = "x" * 5000
    asked.prefix_hashes.extend(range(5000))
    asked.subset.addresses.extend(map(str, range(5000)))

    question = decode("far", "near", message, now=NOW)

    assert isinstance(question, Question)
    request = question.request
    assert len(request.model) == len(request.session or "") == MAX_TEXT_CHARS
    assert len(request.hints.objective) == len(request.hints.fairness_id) == MAX_TEXT_CHARS
    assert (len(request.path), len(request.request_id)) == (MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS)
    assert len(request.prefix_hashes) == len(MARKS_BYTES)
    assert len(request.subset or ()) == MAX_SUBSET


def test_a_prompt_has_no_beginning_that_is_longer_than_the_body() -> None:
    """It would be computed in less than no time, and make its pod look idle."""
    message = peers_pb2.PeerMessage()
    message.question.body_bytes = MARKS_BYTES[1] + 1
    message.question.prefix_hashes.extend(range(3))

    question = decode("far", "near", message, now=NOW)

    assert isinstance(question, Question)
    assert question.request.prefix_hashes == (0, 1)


def test_no_long_text_is_kept_as_an_address() -> None:
    """It is no pod's; thousands of them might be held."""
    message = peers_pb2.PeerMessage()
    message.question.subset.addresses.extend(("10.0.0.1:1", "x" * 5000))

    question = decode("far", "near", message, now=NOW)

    assert isinstance(question, Question)
    assert question.request.subset == frozenset({"10.0.0.1:1"})
