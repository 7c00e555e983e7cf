"""Questions of other routers: answered, held, or left to the asker."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.core.claims import Claim
from extproc.core.following import Answer, Question
from extproc.core.leading import Leading, LeadingSettings
from extproc.core.modelroutes import ModelRoute, Objective
from extproc.core.pickids import pick_id_of
from extproc.core.queue import QueueSettings
from extproc.core.told import Told, ToldBounds
from extproc.core.types import Hints, RequestInfo, Snapshot, Wait
from tests.builders import address, request
from tests.core.team import EXPIRY_S, Member, Team
from tests.core.test_router_queue import Slots


@pytest.fixture
def member() -> Member:
    return Team(3).members["aa"]


class Hold:
    """A policy that takes its time."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Wait:
        return Wait(snapshot.now + 9)


def question(number: int = 0, asker: str = "bb", path: str = "/now", hold_s: float = 9) -> Question:
    info: RequestInfo = request(None, model="a", path=path, arrived_at_s=1.0)
    return Question(pick_id_of(asker, number), info, 1.0 + hold_s)


def leading_of(member: Member, **bounds: int) -> Leading:
    return Leading(member.router, settings=LeadingSettings(**bounds))


def test_each_answer_counts_for_the_next(member: Member) -> None:
    answers = [member.leading.ask(question(number), now=1.0) for number in range(3)]

    assert {each.address for each in answers if each} == {address(n) for n in (1, 2, 3)}
    assert member.told() == 3
    assert len(member.pool.flights) == 0


def test_beginnings_of_prompts_that_were_asked_about_are_known_here(member: Member) -> None:
    info = request(None, model="a", body_bytes=4096, prefix_hashes=(7,), arrived_at_s=1.0)

    answer = member.leading.ask(Question("bb-1", info, 2.0), now=1.0)

    assert answer is not None
    assert list(member.pool.beginnings.find(info)) == [answer.address]


def test_a_router_that_is_not_ready_leaves_the_decision_to_the_asker(member: Member) -> None:
    leading = Leading(member.router, is_ready=lambda: False)

    assert leading.ask(question(), now=1.0) == Answer("bb-0")
    assert leading.num_answered["declined"] == 1


def test_a_router_that_has_lost_sight_of_all_pods_leaves_the_decision_to_the_asker(
    member: Member,
) -> None:
    for number in member.pods:
        member.pool.record_unreachable(address(number))
    unreachable = member.leading.ask(question(1), now=1.0)
    late = Team(3).members["aa"].leading.ask(question(2), now=2 * EXPIRY_S)

    assert (unreachable, late) == (Answer("bb-1"), Answer("bb-2"))
    assert member.told() == 0


def test_a_stored_response_is_found_although_another_pod_cannot_be_reached(member: Member) -> None:
    """Only this router knows where it is; the pods are not alike for a request of no model."""
    kept = member.leading.ask(
        Question("bb-0", request(None, model="a", session="s", arrived_at_s=1.0), 2.0), now=1.0
    )
    assert kept is not None
    for number in member.pods:
        if address(number) != kept.address:
            member.pool.record_unreachable(address(number))
    stored = request(None, model="", session="s", arrived_at_s=1.0)

    assert member.leading.ask(Question("bb-1", stored, 2.0), now=1.0) == Answer(
        "bb-1", kept.address
    )


def test_what_would_be_rejected_here_is_left_to_the_asker(member: Member) -> None:
    unknown = Question("bb-1", request(None, model="unknown"), 2.0)

    assert member.leading.ask(unknown, now=1.0) == Answer("bb-1")


@pytest.mark.parametrize("bounds", [ToldBounds(max_per_router=1), ToldBounds(max_picks=1)])
def test_no_pod_is_named_for_a_pick_that_cannot_be_counted(
    bounds: ToldBounds, member: Member
) -> None:
    told = Told(member.pool.told._find, bounds)
    member.pool.told = member.pool.flights._told = told
    told.begin("bb", now=0.0)

    first, second = (member.leading.ask(question(number), now=1.0) for number in range(2))

    assert first is not None
    assert first.address
    assert second == Answer("bb-1")
    assert told.num_in_flight == 1


def test_a_router_that_does_not_tell_its_picks_gets_no_answer_that_would_go_uncounted(
    member: Member,
) -> None:
    assert member.leading.ask(question(asker="stranger"), now=1.0) == Answer("stranger-0")


def test_held_questions_are_bounded_for_each_asker_and_in_all(member: Member) -> None:
    member.policy.is_open = False
    leading = leading_of(member, max_held=3, max_held_per_router=2)

    asked = [(asker, number) for asker in ("bb", "cc") for number in range(3)]
    answers = [leading.ask(question(n, asker, "/held"), now=1.0) for asker, n in asked]

    assert [bool(each and each.held_s) for each in answers] == [
        True,
        True,
        False,
        True,
        *[False] * 2,
    ]
    assert leading.num_held == 3
    leading.forget("bb", now=1.0)
    assert leading.num_held == len(member.router.queue) == 1
    assert leading.ask(question(9, "bb", "/held"), now=1.0) != Answer("bb-9")


@pytest.mark.parametrize(
    ("bounds", "are_held"),
    [
        ({"max_addresses_per_router": 5}, [True, False, True, False]),
        ({"max_addresses": 5}, [True, False, False, False]),
        ({}, [True] * 4),
    ],
    ids=["of one router", "of all", "by default"],
)
def test_addresses_of_held_questions_are_bounded_and_questions_without_any_go_on(
    bounds: dict[str, int], are_held: list[bool], member: Member
) -> None:
    member.policy.is_open = False
    leading = leading_of(member, **bounds)
    addresses = frozenset(f"10.9.9.{n}" for n in range(2)) | {address(1)}

    def ask(asker: str, number: int, subset: frozenset[str] | None) -> bool:
        plain = question(number, asker, "/held")
        asked = plain._replace(request=replace(plain.request, subset=subset))
        answer = leading.ask(asked, now=1.0)
        return bool(answer and answer.held_s)

    asked = [(asker, number) for asker in ("bb", "cc") for number in range(2)]
    assert [ask(asker, number, addresses) for asker, number in asked] == are_held
    assert ask("bb", 8, None)
    leading.forget("bb", now=1.0)
    assert ask("bb", 9, addresses)


def test_a_question_asked_twice_is_held_once(member: Member) -> None:
    member.policy.is_open = False
    member.leading.ask(question(path="/held"), now=1.0)

    assert member.leading.ask(question(path="/held"), now=1.0) is None
    assert member.leading.num_held == 1


def test_a_question_is_held_no_longer_than_its_asker_holds_the_request(member: Member) -> None:
    member.policy.is_open = False
    leading = Leading(member.router, settings=LeadingSettings(sign_s=0.01))
    leading.ask(question(path="/held", hold_s=0.02), now=1.0)

    assert leading.look("bb-0", now=1.01) == Answer("bb-0", held_s=0.02)
    assert leading.look("bb-0", now=1.02) == Answer("bb-0")
    assert leading.due_s("bb-0") is None
    assert leading.look("bb-0", now=1.03) is None
    assert len(member.router.queue) == 0


def test_a_question_is_held_no_longer_than_requests_of_our_own(member: Member) -> None:
    member.policy.is_open = False
    member.router.max_hold_s = 0.01
    member.leading.ask(question(path="/held"), now=1.0)

    assert member.leading.look("bb-0", now=1.2) == Answer("bb-0")


def test_a_question_that_the_queue_does_not_take_is_left_to_the_asker(member: Member) -> None:
    member.policy.is_open = False
    member.router.queue.configure(QueueSettings(max_requests=0))

    assert member.leading.ask(question(path="/held"), now=1.0) == Answer("bb-0")
    assert member.leading.num_held == 0


def test_while_a_question_is_held_the_asker_gets_signs(member: Member) -> None:
    member.policy.is_open = False
    leading = Leading(member.router, settings=LeadingSettings(sign_s=0.01))
    first = leading.ask(question(path="/held"), now=1.0)

    assert leading.look("bb-0", now=1.009) is None
    assert first == leading.look("bb-0", now=1.01) == Answer("bb-0", held_s=0.02)
    assert leading.due_s("bb-0") == 1.02


def held_and_settled(member: Member) -> None:
    """A question is held until there is room; its answer has not been looked at."""
    member.policy.is_open = False
    member.leading.ask(question(path="/held"), now=1.0)
    member.policy.is_open = True
    member.router.queue.freed(1.01)
    member.router.offer(now=1.01)
    assert member.settled == ["bb-0"]
    assert member.told() == 1


def test_a_held_question_is_answered_as_soon_as_there_is_room(member: Member) -> None:
    held_and_settled(member)

    answer = member.leading.look("bb-0", now=1.01)

    assert answer is not None
    assert answer.address in map(address, member.pods)
    assert member.leading.num_held == len(member.router.queue) == 0
    assert member.leading.num_answered == {"picked": 1, "declined": 0, "withdrawn": 0}


def test_a_held_question_whose_pick_cannot_be_counted_is_left_to_the_asker(member: Member) -> None:
    member.policy.is_open = False
    member.leading.ask(question(path="/held"), now=1.0)
    member.pool.told.forget("bb", now=1.0)  # nobody tells its picks any more
    member.policy.is_open = True
    member.router.queue.freed(1.01)
    member.router.offer(now=1.01)

    assert member.leading.look("bb-0", now=1.01) == Answer("bb-0")
    assert member.told() == 0


def test_a_held_question_withdrawn_after_it_was_settled_leaves_no_pick(member: Member) -> None:
    held_and_settled(member)

    member.leading.withdraw("bb-0", now=1.01)

    assert member.told() == member.leading.num_held == 0
    assert member.leading.look("bb-0", now=1.01) is None
    assert member.leading.num_answered == {"picked": 0, "declined": 0, "withdrawn": 1}


def test_a_router_that_goes_while_its_question_is_settled_leaves_nothing(member: Member) -> None:
    held_and_settled(member)

    member.miss("bb")

    assert member.told() == member.leading.num_held == 0
    assert member.leading.look("bb-0", now=1.01) is None


def test_however_many_questions_are_held_signs_are_bounded(member: Member) -> None:
    """New questions show soon enough that a leader with many is silent."""
    leading = leading_of(member, max_signs_per_s=10)
    member.router.picker.policy = Hold()
    answers = [leading.ask(question(number, path="/held"), now=1.0) for number in range(5)]

    assert [each and each.held_s for each in answers] == [0.4, 0.4, 0.6, 0.8, 1.0]
    assert leading.due_s("bb-4") == 1.5


def test_a_policy_that_raises_holds_nothing_for_ever(member: Member) -> None:
    member.policy.is_open = False
    member.leading.ask(question(path="/held"), now=1.0)
    del member.policy.is_open
    member.router.offer(now=1.03)

    with pytest.raises(AttributeError):
        member.leading.look("bb-0", now=1.03)
    assert member.leading.num_held == len(member.router.queue) == 0


def test_a_withdrawn_question_leaves_nothing_behind(member: Member) -> None:
    member.leading.ask(question(0), now=1.0)
    member.policy.is_open = False
    member.leading.ask(question(1, path="/held"), now=1.0)

    for number in (0, 1, 2):
        member.leading.withdraw(pick_id_of("bb", number), now=1.0)

    assert member.leading.num_held == len(member.router.queue) == member.told() == 0
    assert member.leading.num_answered == {"picked": 1, "declined": 0, "withdrawn": 1}


# --- fair to all that ask ----------------------------------------------------------------------


def full(member: Member) -> None:
    """Every pod has room for one more request and gets it."""
    member.router.picker.configure(Slots(1), "slots")
    for number in member.pods:
        member.leading.ask(claiming(90 + number, "bb", fairness_id="first"), now=1.0)
    assert member.told() == len(member.pods)


def claiming(number: int, asker: str, path: str = "/now", **hints: Any) -> Question:
    """A question about a request that claims so much, in a session of its own."""
    asked = question(number, asker, path)
    info = replace(asked.request, hints=Hints(**hints), session=f"{asker}-{number}")
    return asked._replace(request=info)


def test_what_a_question_claims_is_judged_by_the_routes_of_the_leader(member: Member) -> None:
    full(member)
    route = ModelRoute("r", ("a",), weight=3.0, tenants={"t": 2.0}, ttft=Objective(9.0, 95))
    member.router.routes.configure([route], {"soon": 5})
    asked = claiming(1, "cc", objective="soon", fairness_id="t", slo_tpot_ms=40.0)
    member.leading.ask(asked, now=1.0)

    [ticket] = member.router.queue
    claim = Claim("r", "t", priority=5, ttft_s=9.0, tpot_s=0.04, weight=6.0, has_own_turns=True)
    assert ticket.request.claim == claim


def test_of_held_questions_that_of_the_highest_priority_goes_first(member: Member) -> None:
    full(member)
    member.router.routes.configure([], {"soon": 5})
    member.leading.ask(claiming(1, "bb"), now=1.0)
    member.leading.ask(claiming(2, "cc", objective="soon"), now=1.1)

    member.pool.told.finish("bb-91", now=2.0)
    member.router.offer(now=2.0)

    assert member.settled == ["cc-2"]


def test_a_tenant_whose_questions_are_answered_at_once_is_behind_in_the_queue(
    member: Member,
) -> None:
    member.policy.is_open = False
    member.leading.ask(claiming(1, "bb", "/held", fairness_id="a"), now=1.0)
    member.leading.ask(claiming(2, "cc", "/held", fairness_id="b"), now=1.1)
    member.leading.ask(claiming(3, "bb", "/now", fairness_id="a"), now=1.2)
    member.policy.is_open = True
    member.router.queue.freed(2.0)
    member.router.offer(now=2.0)

    assert member.settled == ["cc-2", "bb-1"]


@pytest.mark.parametrize("rest_s", [0.3, 0.0])
def test_a_question_does_not_take_the_room_of_those_that_are_held(
    member: Member, rest_s: float
) -> None:
    """Not even while the queue rests."""
    full(member)
    member.leading.ask(claiming(1, "bb"), now=1.0)
    member.router.offer(now=1.5)
    member.router.queue.freed(1.5)
    member.router.offer(now=1.5)  # in vain
    member.pool.told.finish("bb-91", now=1.5 + rest_s)
    member.leading.ask(claiming(2, "cc"), now=1.5 + rest_s)
    member.router.offer(now=1.8)

    assert member.settled == ["bb-1"]
    assert member.leading.num_held == 2
