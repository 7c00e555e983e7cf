"""How holds end: each way is counted by itself, and a refusal says what was in the way."""

from __future__ import annotations

from math import inf
from typing import Any

from extproc.queue import HoldEnd, HoldQueue, QueueSettings, Ticket
from extproc.queue.status import MAX_NAME_CHARS, MAX_SHOWN, describe_queue
from extproc.rejections import no_endpoints, saturated
from extproc.tenancy import NO_CLAIM, Claim
from extproc.types import Pick, Reason, Rejection, RequestInfo, Wait
from tests.builders import pick

FULL = Wait(inf, "slot")


def ticket(claim: Claim = NO_CLAIM, adapter: str | None = "a", **fields: Any) -> Ticket:
    info = RequestInfo(adapter or "base", adapter=adapter, claim=claim)
    return Ticket(info, lambda: None, **{"give_up_s": inf, "reason": "wait", **fields})


class Scene:
    """A queue, and what its policy answers."""

    def __init__(self, *claims: Claim, **settings: Any) -> None:
        self.queue = HoldQueue(QueueSettings(**settings))
        self.tickets = [ticket(claim) for claim in claims]
        for each in self.tickets:
            assert self.queue.add(each, now=0.0) is None

    def refuses(self, claim: Claim = NO_CLAIM, now: float = 0.0, **fields: Any) -> Rejection:
        rejection = self.queue.add(ticket(claim, held_at_s=now, **fields), now=now)
        assert rejection is not None
        return rejection

    def offer(self, *results: Pick | Rejection | Wait, now: float) -> None:
        """Answer the first requests in order with `results`, and let the others wait."""
        answers = iter(results)
        self.queue.freed(now)
        self.queue.offer(lambda _ticket, _now: next(answers, FULL), now=now)

    @property
    def ended(self) -> dict[str, int]:
        return {str(end): num for end, num in self.queue.num_ended.items() if num}


def why(result: object) -> str:
    assert isinstance(result, Rejection)
    return result.why


def test_every_way_to_end_is_counted_from_the_start() -> None:
    assert dict(HoldQueue().num_ended) == dict.fromkeys(HoldEnd, 0)


def test_each_offer_ends_as_its_answer_says() -> None:
    scene = Scene(*[Claim(route=str(number)) for number in range(4)])
    scene.offer(pick(), saturated("a", 1), no_endpoints("a"), now=2.0)

    assert scene.ended == {"picked": 1, "saturated": 1, "no_endpoints": 1}
    assert len(scene.queue) == 1


def test_a_client_that_leaves_is_counted_once_and_not_after_its_result() -> None:
    scene = Scene(Claim(priority=1), NO_CLAIM)
    scene.offer(pick(), now=1.0)
    for each in (*scene.tickets, *scene.tickets):
        scene.queue.remove(each, now=2.0)

    assert scene.ended == {"picked": 1, "left": 1}
    assert not scene.queue.occupancy.num_by_claim


def test_a_route_that_does_not_wait_says_so() -> None:
    scene = Scene(NO_CLAIM)

    assert scene.refuses(Claim(waits=False)).why == "Requests of its route do not wait: 1 held."
    assert scene.ended == {"no_wait": 1}


def test_one_that_waited_for_its_adapter_is_not_told_that_pods_are_full() -> None:
    queue = HoldQueue()
    held = ticket(give_up_s=5.0, held_at_s=1.0, reason="load")
    queue.add(held, now=1.0)
    queue.expire(held, now=5.0)

    assert isinstance(held.result, Rejection)
    assert (held.result.status, held.result.reason) == (503, Reason.ADAPTER_UNAVAILABLE)
    assert "held 4.00 s for its adapter" in held.result.why


def test_a_full_route_and_a_full_queue_are_told_apart() -> None:
    of_route = Claim(route="r", max_held=1)
    scene = Scene(of_route, max_requests=2)
    by_route = scene.refuses(of_route)
    assert scene.queue.add(ticket(), now=0.0) is None
    by_queue = scene.refuses()

    assert by_route.why == "Its route has as many requests held as allowed: 1 held."
    assert by_queue.why == "The queue is full: 2 held."
    assert scene.ended == {"route_full": 1, "full": 1}


def test_the_one_that_is_displaced_is_told_who_took_its_place() -> None:
    scene = Scene(Claim(priority=-1), max_requests=1)
    high = ticket(Claim(priority=1))
    refusal = scene.queue.add(high, now=3.0)

    assert refusal is None
    assert why(scene.tickets[0].result) == (
        "The queue is full, and its place went to a request of a higher priority, or of a tenant "
        "that holds fewer: 1 held; it was held 3.00 s (wait)."
    )
    assert scene.ended == {"displaced": 1}


def test_one_that_was_held_for_as_long_as_it_may_says_for_how_long_and_for_what() -> None:
    queue = HoldQueue()
    held = ticket(give_up_s=5.0, held_at_s=1.0, reason="slot")
    queue.add(held, now=1.0)
    queue.expire(held, now=5.0)

    assert why(held.result) == (
        "It was held for the longest time allowed: 1 held; it was held 4.00 s for a slot."
    )
    assert queue.num_ended[HoldEnd.EXPIRED] == 1


def test_one_whose_time_is_over_before_it_is_held_counts_like_one_that_was() -> None:
    scene = Scene()

    assert scene.refuses(give_up_s=1.0, now=1.0).why == (
        "It was held for the longest time allowed: 0 held."
    )
    assert scene.ended == {"expired": 1}


def test_a_late_one_says_how_many_are_held_and_how_fast_they_leave() -> None:
    scene = Scene(*[NO_CLAIM] * 10)
    for number in range(1, 5):
        scene.offer(pick(), now=number / 4)
    late = scene.refuses(Claim(ttft_s=0.1), now=1.0, deadline_s=0.5)

    assert late.reason == "late"
    assert late.why == "Its first token would come late: 6 held, about 4 leave a second."
    assert scene.ended == {"picked": 4, "late": 1}
    assert late.retry_after_s == 2


def test_a_fast_pace_is_a_whole_number() -> None:
    scene = Scene(*[NO_CLAIM] * 100)
    scene.offer(*[pick()] * 50, now=1.0)
    late = scene.refuses(Claim(ttft_s=0.1), now=1.0, deadline_s=0.5)

    assert late.why == "Its first token would come late: 50 held, about 50 leave a second."


def test_the_highest_priority_is_shown_first_and_the_oldest_has_its_age() -> None:
    scene = Scene(Claim("b"), Claim("a"), Claim("a"), Claim("c", priority=2))
    shown = describe_queue(scene.queue, now=1.5)

    assert shown["routes"] == [["c", 2, 1], ["a", 0, 2], ["b", 0, 1]]
    assert (shown["num_held"], shown["oldest_s"], shown["per_s"]) == (4, 1.5, None)
    assert shown["adapters"] == ["a"]


def test_an_empty_queue_is_shown_with_its_limits() -> None:
    queue = HoldQueue(QueueSettings(max_requests=7, max_bytes=9))

    assert describe_queue(queue, now=1.0) == {
        "num_held": 0,
        "max_held": 7,
        "num_bytes": 0,
        "max_bytes": 9,
        "oldest_s": 0.0,
        "per_s": None,
        "routes": [],
        "adapters": [],
        "ended": {str(end): 0 for end in HoldEnd},
    }


def test_what_is_shown_of_a_long_queue_is_short() -> None:
    queue = HoldQueue()
    for number in range(3 * MAX_SHOWN):
        claim = Claim(priority=number)
        queue.add(ticket(claim, f"{number:03}" + "x" * 500, num_bytes=1), now=0.0)
    shown = describe_queue(queue, now=1.0)

    assert (len(shown["routes"]), len(shown["adapters"])) == (MAX_SHOWN, MAX_SHOWN)
    assert {len(each) for each in shown["adapters"]} == {MAX_NAME_CHARS}
    assert shown["num_bytes"] == 3 * MAX_SHOWN


def test_the_pace_is_shown_once_it_is_known() -> None:
    scene = Scene(NO_CLAIM, NO_CLAIM, NO_CLAIM)
    scene.offer(pick(), pick(), now=1.0)

    assert describe_queue(scene.queue, now=1.0)["per_s"] == 2.0
