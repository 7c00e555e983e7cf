"""A decision learns how its pick ended; watchers hear of it, and one request can be told."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.bounds import MAX_DURATION_S
from extproc.gen import decisions_pb2
from extproc.gen.client.extproc import v1
from extproc.observe.decisionmessages import describe, encode, encode_end
from extproc.observe.decisions import MIN_BEHIND, DecisionsService
from extproc.observe.outcomes import tell_outcome
from extproc.pods.completion import DecisionRecord, Ended
from extproc.rejections import saturated
from extproc.types import Outcome, Pick
from extproc.wire.rpc import Code
from tests.builders import address, completion, endpoint_view, pick, request
from tests.observe.test_decisions import Loop, watch
from tests.wire.fake_call import FakeCall

WALL_S = 1_700_000_000.25
VIEWS = tuple(endpoint_view(number, name=f"pod-{number}") for number in (1, 2))


def chosen(number: int = 1) -> Pick:
    """The pick `pick-N` of the request `request-N`."""
    info = request("a", request_id=f"request-{number}")
    return pick(f"pick-{number}", info=info, candidates=VIEWS)


def publish(service: DecisionsService, decision: Pick) -> Pick:
    service.publish(DecisionRecord(decision, WALL_S, 0.000_04))
    return decision


def end(service: DecisionsService, decision: Pick, **entry: Any) -> None:
    outcome = entry.get("outcome", Outcome.COMPLETED)
    logged = completion(decision.id, **entry)
    service.ended(Ended(decision, outcome, logged, output_tokens=3.5), WALL_S + 1)


def told(call: FakeCall) -> list[tuple[int, str]]:
    """The number of each decision and the outcome that came with it."""
    messages = map(decisions_pb2.Decision.FromString, call.sent)
    return [(each.sequence, each.outcome.outcome) for each in messages]


def sentence(how: Outcome = Outcome.COMPLETED, *, is_logged: bool = True, **entry: Any) -> str:
    logged = completion("pick-1", **({"outcome": how} | entry)) if is_logged else None
    record = DecisionRecord(chosen(), WALL_S, 0.0)
    record.finish(Ended(chosen(), how, logged), WALL_S, 1)
    return tell_outcome(record)


def test_a_decision_that_is_kept_has_its_outcome() -> None:
    service = DecisionsService()
    decision = publish(service, chosen())
    assert [each["outcome"] for each in service.recent(1)] == [None]
    end(
        service,
        decision,
        first_body_byte_s=0.31,
        duration_s=4.2,
        attempts=2,
        address=address(2),
        body_bytes=512,
    )
    (described,) = service.recent(1)

    assert described["outcome"] == {
        "number": 1,
        "pick_id": "pick-1",
        "request_id": "request-1",
        "model": "a",
        "outcome": "completed",
        "status": 200,
        "ttft_seconds": 0.31,
        "duration_seconds": 4.2,
        "served_by": address(2),
        "served_by_name": "pod-2",
        "attempts": 2,
        "body_bytes": 512,
        "output_tokens": 3.5,
    }
    assert described["explanation"].endswith(
        "It ended after 4.20 s with status 200, its first token after 310 ms; "
        "served by pod-2, not the pod that was chosen; 2 attempts."
    )


@pytest.mark.parametrize(
    ("how", "entry", "words"),
    [
        (
            Outcome.COMPLETED,
            {"duration_s": 0.1},
            "It ended after 100 ms with status 200; served by pod-1.",
        ),
        (
            Outcome.FAILED,
            {"status": 503, "first_byte_s": None, "first_body_byte_s": None, "address": ""},
            "It failed after 200 ms with status 503, before the first byte of a response.",
        ),
        (
            Outcome.CANCELLED,
            {"status": 0, "first_byte_s": None, "first_body_byte_s": None},
            "Its client left after 200 ms, before the first byte of a response; served by pod-1.",
        ),
        (
            Outcome.CANCELLED,
            {},
            "Its client left after 200 ms, its first token after 100 ms; served by pod-1.",
        ),
        (
            Outcome.COMPLETED,
            {"duration_s": None, "address": "10.9.9.9:1"},
            "It ended with status 200; served by 10.9.9.9:1, not the pod that was chosen.",
        ),
    ],
)
def test_an_end_is_told_in_a_sentence(how: Outcome, entry: dict[str, Any], words: str) -> None:
    assert sentence(how, **entry) == words


def test_without_an_access_log_the_end_is_told_as_far_as_it_is_known() -> None:
    sentences = {sentence(how, is_logged=False) for how in Outcome}

    assert len(sentences) == len(Outcome)
    assert all(sentences)
    assert tell_outcome(DecisionRecord(chosen(), WALL_S, 0.0)) == ""


def test_the_clients_runtime_reads_an_outcome_and_absent_figures() -> None:
    record = DecisionRecord(chosen(), WALL_S, 0.0)
    record.finish(Ended(chosen(), Outcome.EXPIRED), WALL_S + 1, 7)
    news, whole = v1.Decision.parse(encode_end(record)), v1.Decision.parse(encode(3, record))

    assert news.outcome == whole.outcome
    assert news.outcome is not None
    assert (news.sequence, news.pick, news.explanation) == (0, None, "")
    assert (news.outcome.number, news.outcome.outcome) == (7, "expired")
    assert (news.outcome.status, news.outcome.ttft_seconds) == (None, None)
    assert news.time is not None
    assert news.time.timestamp() == WALL_S + 1


def test_figures_from_outside_are_within_their_fields() -> None:
    record = DecisionRecord(chosen(), WALL_S, 0.0)
    wild = completion("p", duration_s=1e99, attempts=10**9, status=10**9, address="a" * 9_999)
    record.finish(Ended(chosen(), Outcome.COMPLETED, wild), WALL_S, 1)
    outcome = describe(1, record)["outcome"]

    assert outcome["duration_seconds"] == MAX_DURATION_S
    assert (outcome["attempts"], outcome["status"]) == (1000, 999)
    assert len(outcome["served_by"]) == 1024


def test_a_decision_told_live_gets_its_outcome_later_if_the_watcher_asks() -> None:
    service = DecisionsService()
    plain, _ = watch(service)
    asking, _ = watch(service, outcomes=True, explain=True)
    first, second = (publish(service, chosen(number)) for number in (1, 2))
    end(service, second)
    end(service, first, outcome=Outcome.CANCELLED)

    assert told(plain) == [(1, ""), (2, "")]
    assert told(asking) == [(1, ""), (2, ""), (0, "completed"), (0, "cancelled")]
    news = decisions_pb2.Decision.FromString(asking.sent[2])
    assert (news.outcome.pick_id, news.outcome.request_id) == ("pick-2", "request-2")
    assert news.explanation.startswith("It ended after 200 ms")


def test_filters_hold_for_outcomes_too() -> None:
    service = DecisionsService()
    other, _ = watch(service, outcomes=True, models=["b"])
    refused, _ = watch(service, outcomes=True, only_rejections=True)
    elsewhere, _ = watch(service, outcomes=True, endpoint=address(2))
    end(service, publish(service, chosen()))

    assert [told(call) for call in (other, refused, elsewhere)] == [[], [], []]


def test_an_end_that_is_news_is_not_told_twice() -> None:
    loop = Loop()
    service = DecisionsService(later=loop.later)
    asking, _ = watch(service, outcomes=True)
    plain, _ = watch(service)
    loop.run()
    end(service, publish(service, chosen()))
    loop.run()

    assert told(asking) == [(1, ""), (0, "completed")]
    assert told(plain) == [(1, "completed")]


def test_a_replayed_decision_has_its_outcome() -> None:
    service = DecisionsService()
    end(service, publish(service, chosen()))
    call, _ = watch(service, outcomes=True, replay_last=5)

    assert told(call) == [(1, "completed")]


def test_a_watcher_that_resumes_gets_the_outcomes_that_it_missed() -> None:
    service = DecisionsService()
    decisions = [publish(service, chosen(number)) for number in range(3)]
    for decision in decisions:
        end(service, decision)
    call, _ = watch(service, outcomes=True, after_sequence=3, after_outcome=1)

    assert told(call) == [(0, "completed"), (0, "completed")]


def test_a_watcher_too_slow_for_outcomes_gets_the_last_ones() -> None:
    loop = Loop()
    service = DecisionsService(later=loop.later)
    call, _ = watch(service, outcomes=True, only_rejections=False)
    loop.run()
    decision = publish(service, chosen())
    for _ in range(MIN_BEHIND + 10):
        end(service, decision)
    while loop.calls:
        loop.run()

    assert len(told(call)) == 1 + MIN_BEHIND


def test_an_end_of_a_decision_that_is_forgotten_is_news_all_the_same() -> None:
    service = DecisionsService(num_kept=1)
    call, _ = watch(service, outcomes=True)
    decision = publish(service, chosen())
    for _ in range(MIN_BEHIND + 1):
        service.publish(DecisionRecord(saturated("a", 1), WALL_S, 0.0))
    end(service, decision)

    assert told(call)[-1] == (0, "completed")
    assert not service._in_flight


def test_a_watcher_gets_all_candidates_once_in_its_interval_and_else_the_chosen_one() -> None:
    service = DecisionsService()
    brief, _ = watch(service, candidates_interval_seconds=2)
    usual, _ = watch(service)
    for number in range(5):
        service.publish(DecisionRecord(chosen(number), WALL_S + number, 0.0))

    assert [*map(candidates_of, brief.sent)] == [2, 1, 2, 1, 2]
    assert [*map(candidates_of, usual.sent)] == [2] * 5
    first, second = map(decisions_pb2.Decision.FromString, brief.sent[:2])
    assert second.pick.candidates[0] == first.pick.candidates[0]
    assert second.pick.candidates[0].address == second.pick.endpoints[0]


def candidates_of(message: bytes) -> int:
    return len(decisions_pb2.Decision.FromString(message).pick.candidates)


def unread(service: DecisionsService, num: int) -> None:
    for _ in range(num):
        publish(service, chosen(99))


def test_what_nobody_reads_is_counted_and_not_remembered() -> None:
    service = DecisionsService(num_kept=0)
    decision = publish(service, chosen())
    end(service, decision)

    assert (service.num_published, service.num_ended) == (1, 1)
    assert (service.newest(9), service._in_flight, [*service._ends]) == ([], {}, [])
    call, _ = watch(service, outcomes=True)
    end(service, publish(service, chosen(2)))
    assert told(call) == [(2, ""), (0, "completed")]


def test_a_reader_has_decisions_remembered_that_are_not_kept_for_others() -> None:
    service = DecisionsService(num_kept=0)
    with service.reading():
        publish(service, chosen())
        assert len(service.newest(9)) == 1
        assert service.last(9) == []
    unread(service, 2)

    assert service.newest(9) == []


def test_a_watcher_that_comes_again_gets_the_outcomes_that_it_missed_where_none_are_kept() -> None:
    service = DecisionsService(num_kept=0)
    call, session = watch(service, outcomes=True)
    decision = publish(service, chosen())
    session.closed()
    end(service, decision)
    unread(service, MIN_BEHIND)
    again, soon = watch(service, outcomes=True, after_sequence=1, after_outcome=0)
    soon.closed()
    unread(service, MIN_BEHIND + 1)
    end(service, decision)
    late, _ = watch(service, outcomes=True, after_sequence=1, after_outcome=0)

    assert told(call) == [(1, "")]
    assert told(again) == [(0, "completed")]
    assert told(late) == []
    assert service.newest(9) == []


@pytest.mark.parametrize("by", ["pick-2", "request-2"])
def test_one_request_that_has_ended_is_told_and_the_call_ends(by: str) -> None:
    service = DecisionsService()
    for number in (1, 2, 3):
        end(service, publish(service, chosen(number)))
    call, _ = watch(service, request=by, explain=True)

    assert told(call) == [(2, "completed")]
    assert call.ended == (Code.OK, "")


def test_one_request_that_goes_on_is_told_to_its_end() -> None:
    service = DecisionsService()
    decision = publish(service, chosen())
    call, _ = watch(service, request="request-1")
    publish(service, chosen(2))
    assert (told(call), call.ended) == ([(1, "")], None)
    end(service, decision)

    assert told(call) == [(1, ""), (0, "completed")]
    assert call.ended == (Code.OK, "")


def test_a_refused_request_is_told_by_its_id() -> None:
    service = DecisionsService()
    service.publish(DecisionRecord(saturated("a", 1), WALL_S, 0.0, "request-9"))
    call, _ = watch(service, request="request-9")

    assert told(call) == [(1, "")]
    assert call.ended == (Code.OK, "")


def test_a_request_that_is_not_known_is_said_to_be_so_and_for_how_long_decisions_are_kept() -> None:
    service = DecisionsService(num_kept=300)
    publish(service, chosen())
    call, _ = watch(service, request="nobody")

    assert call.sent == []
    assert call.ended == (
        Code.NOT_FOUND,
        "no decision about nobody is known here: this router keeps its last 300 decisions "
        "(admin.max_decisions), now those since 2023-11-14T22:13:20.250Z. It was decided earlier, "
        "or by another router, or has not been decided yet",
    )
    empty, _ = watch(DecisionsService(num_kept=0), request="nobody")
    assert empty.ended is not None
    assert "keeps its last 0 decisions (admin.max_decisions). It" in empty.ended[1]


def test_a_refused_watcher_looks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    service = DecisionsService(max_watchers=0)
    monkeypatch.setattr(service, "last", lambda _limit: pytest.fail("looked for it"))
    call, _ = watch(service, request="nobody")

    assert call.ended == (Code.RESOURCE_EXHAUSTED, "too many watchers")


def test_a_watcher_of_an_unknown_request_takes_no_place() -> None:
    service = DecisionsService(max_watchers=1)
    watch(service, request="nobody")
    call, _ = watch(service)

    assert call.ended is None
