"""Endpoints that answer 404 for a model that they list."""

from __future__ import annotations

from extproc.learned.evidence import Evidence
from extproc.pods.disbelief import EXCUSED_S, FIRST_S, MAX_MODELS
from extproc.pods.pool import Pool
from tests.builders import address, cards, fill, pick, request

LISTED = cards("a", "b")


def pool(num: int = 2) -> Pool:
    return fill(Pool(), *range(1, 1 + num), adapters=("a", "b"))


def answer(made: Pool, number: int, verdict: Evidence, *, now: float, model: str = "a") -> None:
    sent = pick(f"r-{number}-{now}-{verdict}", number, info=request(model))
    made.flights.start(sent, now=now)
    made.flights.finish(sent.id, now=now, has_run=False, verdict=verdict)


def have(made: Pool, model: str = "a", *, now: float = 100.0) -> list[int]:
    """The endpoints that may get requests for a model."""
    views = made.snapshot(now=now).endpoints
    return [place for place, view in enumerate(views, start=1) if view.has_registered(model)]


def test_a_404_for_a_model_sends_the_next_request_for_it_elsewhere_at_once() -> None:
    made = pool()
    answer(made, 1, Evidence.NOT_FOUND, now=1.0)

    assert (have(made), have(made, "b")) == ([2], [1, 2])


def test_a_list_that_was_asked_for_since_and_has_the_model_is_believed() -> None:
    made = pool()
    answer(made, 1, Evidence.NOT_FOUND, now=1.0)
    made.record_models(address(1), LISTED, now=2.0, asked_at_s=0.5)
    before = have(made)
    made.record_models(address(1), LISTED, now=2.0, asked_at_s=1.5)

    assert (before, have(made)) == ([2], [1, 2])


def test_a_list_that_says_the_same_as_the_last_is_believed_as_well() -> None:
    made = pool()
    answer(made, 1, Evidence.NOT_FOUND, now=1.0)
    assert made.record_same_models(address(1), now=2.0, asked_at_s=0.5)
    before = have(made)
    assert made.record_same_models(address(1), now=2.0, asked_at_s=1.5)

    assert (before, have(made)) == ([2], [1, 2])


def test_further_404s_take_longer_until_it_serves_the_model() -> None:
    made, now = pool(), 1.0
    for expected_s in (0.0, FIRST_S, 2 * FIRST_S, 4 * FIRST_S):
        answer(made, 1, Evidence.NOT_FOUND, now=now)
        made.record_models(address(1), LISTED, now=now, asked_at_s=now + expected_s)
        assert have(made) == [2]
        now += expected_s + 0.1
        made.record_models(address(1), LISTED, now=now, asked_at_s=now)
        assert have(made) == [1, 2]
    answer(made, 2, Evidence.SERVED, now=now)
    answer(made, 1, Evidence.SERVED, now=now)
    answer(made, 1, Evidence.NOT_FOUND, now=now)
    made.record_models(address(1), LISTED, now=now, asked_at_s=now + 0.1)

    assert have(made) == [1, 2]


def test_the_only_endpoint_that_can_take_a_model_is_believed() -> None:
    alone, beside_a_dead_one = pool(1), pool(2)
    beside_a_dead_one.record_unreachable(address(2))
    for made in (alone, beside_a_dead_one):
        answer(made, 1, Evidence.NOT_FOUND, now=1.0)

    assert (have(alone), have(beside_a_dead_one)) == ([1], [1, 2])


def test_a_404_of_several_is_the_requests_fault_and_moves_nothing_for_a_while() -> None:
    """As of one for a stored response that does not exist."""
    made = pool(3)
    answer(made, 1, Evidence.NOT_FOUND, now=1.0)
    answer(made, 2, Evidence.NOT_FOUND, now=2.0)
    after_both = have(made)
    answer(made, 3, Evidence.NOT_FOUND, now=2.0 + EXCUSED_S - 0.1)
    excused = have(made)
    answer(made, 3, Evidence.NOT_FOUND, now=2.0 + EXCUSED_S + 0.1)

    assert (after_both, excused, have(made)) == ([1, 2, 3], [1, 2, 3], [1, 2])


def test_an_endpoint_that_leaves_and_one_that_lost_the_model_are_forgotten() -> None:
    made = pool(3)
    answer(made, 1, Evidence.NOT_FOUND, now=1.0)
    made.record_models(address(1), cards("b"), now=2.0, asked_at_s=2.0)
    made.record_models(address(1), LISTED, now=3.0, asked_at_s=3.0)
    back = have(made)
    answer(made, 1, Evidence.NOT_FOUND, now=4.0)
    fill(made, 2, 3, adapters=("a", "b"))
    fill(made, 1, 2, 3, adapters=("a", "b"))

    assert (back, have(made)) == ([1, 2, 3], [1, 2, 3])


def test_disbelief_about_many_models_is_bounded_and_makes_room() -> None:
    names = [f"m-{number}" for number in range(MAX_MODELS + 2)]
    made = fill(Pool(), 1, 2, adapters=names)
    for name in names:
        answer(made, 1, Evidence.NOT_FOUND, now=1.0, model=name)
    assert [have(made, name) for name in (names[0], names[-1])] == [[2], [1, 2]]
    made.record_models(address(1), cards(*names), now=2.0, asked_at_s=2.0)
    answer(made, 1, Evidence.NOT_FOUND, now=3.0, model=names[-1])

    assert have(made, names[-1]) == [2]
