"""Whose requests run on endpoints, and who leaves the last place to others."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.tenants import LATELY_S, MANY, Tenants
from extproc.tenancy import Claim


def claim(tenant: str, priority: int = 0) -> Claim:
    return Claim(tenant=tenant, priority=priority)


@dataclass
class Scene:
    """Tenants, from a moment on."""

    tenants: Tenants = field(default_factory=Tenants)
    now: float = 100.0

    def begin(self, tenant: str, num: int = 1, *, priority: int = 0) -> Scene:
        for _ in range(num):
            self.tenants.begin(claim(tenant, priority), 1, now=self.now)
        return self

    def end(self, tenant: str, *, priority: int = 0) -> Scene:
        self.tenants.end(claim(tenant, priority), 1, now=self.now)
        return self

    def leaves_last(self, tenant: str, *, priority: int = 0) -> bool:
        return self.tenants.leaves_last(claim(tenant, priority), self.now)


def test_who_runs_many_and_others_few_leaves_the_last_place_to_them() -> None:
    scene = Scene().begin("greedy", MANY).begin("modest")

    assert scene.leaves_last("greedy")
    assert not scene.leaves_last("modest")
    assert not scene.leaves_last("new")


def test_a_tenant_without_a_request_has_a_place_left_for_a_while() -> None:
    scene = Scene().begin("greedy", MANY).begin("modest").end("modest")

    scene.now += LATELY_S
    assert scene.leaves_last("greedy")
    scene.now += 0.1
    assert not scene.leaves_last("greedy")


def test_whose_requests_run_on_is_left_a_place_however_long() -> None:
    scene = Scene().begin("greedy", MANY).begin("modest")
    scene.now += 10 * LATELY_S

    assert scene.leaves_last("greedy")


def test_who_runs_few_takes_the_last_place() -> None:
    assert not Scene().begin("greedy", MANY - 1).begin("modest").leaves_last("greedy")


def test_nobody_alone_leaves_a_place() -> None:
    assert not Scene().begin("greedy", 2 * MANY).leaves_last("greedy")


def test_of_two_that_run_alike_neither_leaves_a_place() -> None:
    scene = Scene().begin("a", MANY).begin("b", MANY)

    assert not scene.leaves_last("a")
    assert not scene.leaves_last("b")


@pytest.mark.parametrize(("priority", "leaves"), [(-1, False), (0, True), (1, True)])
def test_places_are_left_to_those_of_the_same_or_a_higher_priority(
    priority: int, leaves: bool
) -> None:
    scene = Scene().begin("greedy", MANY).begin("modest", priority=priority)

    assert scene.leaves_last("greedy") is leaves


def test_one_of_two_thousand_that_runs_many_leaves_the_last_place() -> None:
    scene = Scene().begin("greedy", MANY)
    for number in range(2000):
        scene.begin(f"t{number}").end(f"t{number}")

    assert scene.leaves_last("greedy")
    assert not scene.begin("t0").leaves_last("t0")


def test_somebody_is_alone_once_no_request_of_others_has_come_or_gone_lately() -> None:
    scene = Scene().begin("a").begin("b").end("b")
    assert not scene.tenants.is_alone(claim("a"), scene.now)

    scene.now += LATELY_S + 0.1
    assert scene.tenants.is_alone(claim("a"), scene.now)
    scene.begin("a")
    assert scene.tenants.is_alone(claim("a"), scene.now)
    assert not scene.tenants.is_alone(claim("b"), scene.now)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), max_size=30))
def test_it_never_happens_that_all_who_run_leave_the_last_place(
    begun: list[tuple[str, int]],
) -> None:
    scene = Scene()
    for tenant, num in begun:
        scene.begin(tenant, num)

    assert not begun or not all(scene.leaves_last(tenant) for tenant, _ in begun)
