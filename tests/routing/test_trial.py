"""A policy on trial: whose requests it decides, and until when."""

from __future__ import annotations

import random
from math import inf

import pytest
from msgspec.structs import replace

from extproc.learned.sequential import Verdict
from extproc.pods.peerpicks import pick_ids
from extproc.queue import Ticket
from extproc.routing import trial as trial_module
from extproc.routing.picker import Picker
from extproc.routing.policies import Founding, Policy
from extproc.routing.router import Router
from extproc.routing.trial import (
    LEFT,
    RAISED,
    REJECTED,
    TTFT_BOUNDS_S,
    PolicyTrial,
)
from extproc.types import Choice, Hints, Outcome, RequestInfo, Snapshot, Wait
from tests.builders import fill, report, request, routing
from tests.routing.scene import picker, routed

NUM = 4000


class Tried:
    """The policy on trial: it takes the last endpoint, or waits, or raises an error."""

    uses_cached_bytes = True
    waits_alike = True

    def __init__(self, answer: str = "last") -> None:
        self.answer = answer

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        if self.answer == "raises":
            raise ArithmeticError("bug")
        if self.answer == "waits":
            return Wait(inf, "never")
        return Choice(snapshot.endpoints[-1:], "tried")


class Scene:
    def __init__(
        self, policy: Policy | None = None, *, share: float = 0.5, by_tenant: bool = False
    ) -> None:
        self.verdicts: list[Verdict] = []
        self.errors: list[str] = []
        self.trial = PolicyTrial("mine", share, by_tenant=by_tenant, on_worse=self.verdicts.append)
        self.picker = Picker(
            Founding(),
            "policy",
            rng=random.Random(0),
            next_id=pick_ids("r"),
            on_trial=(policy or Tried(), self.trial),
            on_policy_error=lambda name, error: self.errors.append(f"{name}: {error}"),
        )
        self.router: Router = routing(self.picker)
        fill(self.router.pool, 1, 2, load=report())

    def of(self, arm: str, number: int = 0, **fields: object) -> RequestInfo:
        """The `number`th request of an arm."""
        found = (
            each
            for n in range(10_000)
            if self.trial.arm_of(each := request(request_id=f"id-{n}", **fields)) == arm  # type: ignore[arg-type]
        )
        return [next(found) for _ in range(number + 1)][-1]

    def end(self) -> None:
        """Have the policy found worse."""
        for number in range(100):
            self.trial.ended(self.of("trial", number), Outcome.FAILED)


def of_tenant(tenant: str, number: int = 0) -> RequestInfo:
    made = request(request_id=str(number), hints=Hints(fairness_id=tenant))
    claim = routing(picker()).routes.claim(made)
    return replace(made, claim=claim)


def test_the_policy_decides_for_the_share_of_requests() -> None:
    trial = Scene(share=0.05).trial
    num = sum(trial.tries(request(request_id=f"{n}")) for n in range(NUM))

    assert 0.03 * NUM < num < 0.07 * NUM


def test_a_request_has_the_same_arm_each_time_and_at_each_router() -> None:
    first, second = Scene().trial, Scene().trial

    for number in range(50):
        asked = request(request_id=str(number))
        assert first.arm_of(asked) == first.arm_of(asked) == second.arm_of(asked)


def test_a_conversation_stays_in_one_arm() -> None:
    trial = Scene().trial

    for session in ("s", "t", "u"):
        arms = {trial.arm_of(request(session=session, request_id=str(n))) for n in range(20)}
        assert len(arms) == 1


def test_another_trial_draws_anew() -> None:
    other = PolicyTrial("other", 0.5, by_tenant=False, on_worse=lambda _: None)
    asked = [request(request_id=str(number)) for number in range(100)]

    assert 20 < sum(other.arm_of(each) == Scene().trial.arm_of(each) for each in asked) < 80


def test_each_arm_is_decided_by_its_policy() -> None:
    scene = Scene()

    tried = routed(scene.router.route(scene.of("trial"), now=0.0))
    acting = routed(scene.router.route(scene.of("acting"), now=0.0))

    assert (tried.policy, tried.reason) == ("mine", "tried")
    assert acting.policy == "policy"


def test_the_router_computes_what_either_policy_weighs() -> None:
    assert Scene().router.uses_cached_bytes
    assert Scene().picker.policy is not None


def test_held_requests_of_different_arms_are_not_answered_alike() -> None:
    scene = Scene()
    tried, acting = scene.of("trial"), scene.of("acting")

    assert scene.picker.kind_of(tried) == scene.picker.kind_of(scene.of("trial", 1)) is not None
    assert scene.picker.kind_of(tried) != scene.picker.kind_of(acting)


def test_where_the_policy_raises_the_acting_one_answers_and_it_is_a_failure_of_the_arm() -> None:
    scene = Scene(Tried("raises"), share=0.05)

    results = [routed(scene.router.route(scene.of("trial", n), now=0.0)) for n in range(5)]

    assert {each.policy for each in results} == {"policy"}
    assert scene.trial.outcomes["trial", RAISED] == len(scene.errors) < 5
    assert scene.errors[0] == "mine: bug"
    assert [each.measure for each in scene.verdicts] == ["failures"]


def test_a_policy_that_is_worse_decides_for_nobody_from_then_on() -> None:
    scene = Scene()
    scene.end()

    tried = scene.of("trial")
    assert routed(scene.router.route(tried, now=0.0)).policy == "policy"
    assert scene.picker.kind_of(tried) is None
    assert [each.measure for each in scene.verdicts] == ["failures"]
    counted = dict(scene.trial.outcomes)
    scene.trial.ended(tried, Outcome.COMPLETED)
    assert scene.trial.outcomes == counted


def test_a_session_keeps_its_endpoint_when_the_trial_ends() -> None:
    scene = Scene()
    sessions = [f"s{n}" for n in range(10)]
    sent = {
        each: routed(scene.router.route(request(session=each, path="/v1/responses"), now=0.0))
        for each in sessions
    }
    scene.end()

    for each in sessions:
        again = scene.router.route(request(session=each, path="/v1/responses"), now=0.0)
        assert routed(again).address == sent[each].address


def test_what_the_policy_holds_too_long_counts_against_it() -> None:
    scene = Scene(Tried("waits"))
    held = scene.router.route(scene.of("trial"), now=0.0)
    left = scene.router.route(scene.of("trial", 1), now=0.0)
    assert isinstance(held, Ticket)
    assert isinstance(left, Ticket)

    scene.router.leave(left, now=1.0)
    scene.router.resume(held, now=held.give_up_s)

    assert scene.trial.outcomes == {("trial", LEFT): 1, ("trial", REJECTED): 1}
    assert scene.trial.attained == {("trial", "false"): 1}


def test_a_client_s_own_mistake_counts_against_no_arm() -> None:
    scene = Scene()

    scene.router.route(scene.of("trial", model="unheard-of"), now=0.0)

    assert not scene.trial.outcomes


def test_ends_are_counted_by_arm() -> None:
    scene = Scene()
    for arm in ("trial", "acting"):
        for ttft_s, affinity in ((0.5, "hit"), (1.5, "cold"), (None, "")):
            scene.trial.ended(
                scene.of(arm),
                Outcome.COMPLETED,
                in_time=None if ttft_s is None else ttft_s < 1,
                ttft_s=ttft_s,
                affinity=affinity,
            )
        assert scene.trial.outcomes[arm, Outcome.COMPLETED] == 3
        assert scene.trial.attained[arm, "true"] == scene.trial.attained[arm, "false"] == 1
        assert scene.trial.affinity[arm, "hit"] == scene.trial.affinity[arm, "cold"] == 1
        nums = zip(TTFT_BOUNDS_S, scene.trial.num_first_tokens[arm], strict=False)
        assert {bound_s: num for bound_s, num in nums if num} == {0.5: 1, 1.5: 1}
        assert scene.trial.first_tokens_s[arm] == 2.0


@pytest.mark.parametrize("unit", ["session", "tenant"])
def test_a_session_or_a_tenant_that_fails_again_and_again_ends_no_trial(unit: str) -> None:
    scene = Scene(share=0.05, by_tenant=unit == "tenant")
    names = (str(number) for number in range(1000))
    made = (request(session=name) if unit == "session" else of_tenant(name) for name in names)
    asked = next(each for each in made if scene.trial.arm_of(each) == "trial")
    for _ in range(100):
        scene.trial.ended(asked, Outcome.FAILED, in_time=False, ttft_s=9.0)

    assert scene.trial.verdict is None
    assert scene.trial.outcomes["trial", Outcome.FAILED] == 100


def test_tenants_that_fail_end_a_trial_by_tenant() -> None:
    scene = Scene(share=0.05, by_tenant=True)
    for number in range(1000):
        asked = of_tenant(str(number))
        if scene.trial.arm_of(asked) == "trial":
            scene.trial.ended(asked, Outcome.FAILED)

    assert [each.measure for each in scene.verdicts] == ["failures"]


@pytest.mark.parametrize("by_tenant", [False, True])
def test_what_cannot_be_told_apart_is_in_no_arm(by_tenant: bool) -> None:
    scene = Scene(share=0.5, by_tenant=by_tenant)
    asked = request(request_id="id" if by_tenant else "")

    assert scene.trial.arm_of(asked) is None
    assert routed(scene.router.route(asked, now=0.0)).policy == "policy"
    scene.trial.ended(asked, Outcome.FAILED)
    assert not scene.trial.outcomes


def test_a_bounded_number_of_sessions_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "MAX_UNITS", 1)
    scene = Scene()

    for number in range(20):
        scene.trial.ended(request(session=str(number)), Outcome.FAILED, in_time=False, ttft_s=1.0)

    assert len(scene.trial._counted) <= 3
