"""Whose requests run on endpoints, and how many places who runs many leaves to others."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.concurrency import MANY
from extproc.pods.tenants import LATELY_S, MAX_SEEN, EndpointPlaces, Tenants, left
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
            self.tenants.count(claim(tenant, priority), 1, now=self.now)
        return self

    def end(self, tenant: str, *, priority: int = 0) -> Scene:
        self.tenants.count(claim(tenant, priority), -1, now=self.now)
        return self

    def num_left(self, tenant: str, *, priority: int = 0) -> int:
        return self.tenants.num_left(claim(tenant, priority), self.now)

    def leaves_one(self, tenant: str) -> bool:
        return self.num_left(tenant) == 1


def test_who_runs_many_while_others_run_none_leaves_them_one_place() -> None:
    scene = Scene().begin("modest").end("modest").begin("greedy", MANY)

    assert scene.leaves_one("greedy")
    assert not scene.num_left("modest")
    assert not scene.num_left("new")


def test_others_have_as_many_places_left_as_they_had_in_the_mean_of_late_and_one() -> None:
    scene = Scene().begin("modest", 4).begin("greedy", MANY)
    scene.now += 10 * LATELY_S
    assert scene.leaves_one("greedy")
    scene.end("modest").end("modest").end("modest")
    assert scene.num_left("greedy") == 1 + 4 - 1
    scene.now += LATELY_S / 2  # the mean is 2.8
    assert scene.num_left("greedy") == 1 + 3 - 1
    scene.begin("modest", 3)
    assert scene.leaves_one("greedy")  # their ends may be told late


def test_who_has_its_places_for_a_short_time_leaves_none() -> None:
    scene = Scene().begin("modest")
    for _ in range(20):
        scene.begin("greedy", MANY)
        scene.now += 0.1
        for _ in range(MANY):
            scene.end("greedy")
    scene.begin("greedy", MANY)

    assert not scene.num_left("greedy")
    scene.now += 10 * LATELY_S
    assert scene.num_left("greedy")


def test_a_tenant_without_a_request_has_a_place_left_for_a_while() -> None:
    scene = Scene().begin("greedy", MANY).begin("modest").end("modest")

    scene.now += LATELY_S
    assert scene.leaves_one("greedy")
    scene.now += 0.1
    assert not scene.num_left("greedy")


def test_whose_requests_run_on_counts_however_long() -> None:
    scene = Scene().begin("greedy", MANY).begin("modest")
    for _ in range(5):
        scene.now += 10 * LATELY_S
        assert scene.leaves_one("greedy")
    scene.end("modest")
    assert scene.num_left("greedy") == 2


def test_who_runs_few_takes_every_place() -> None:
    assert not Scene().begin("modest").end("modest").begin("greedy", MANY - 1).num_left("greedy")


def test_nobody_alone_leaves_a_place() -> None:
    assert not Scene().begin("greedy", 2 * MANY).num_left("greedy")


def test_of_two_that_run_alike_neither_leaves_a_place() -> None:
    scene = Scene().begin("a", MANY).begin("b", MANY)

    assert not scene.num_left("a")
    assert not scene.num_left("b")


@pytest.mark.parametrize(("priority", "leaves"), [(-1, False), (0, True), (1, True)])
def test_places_are_left_to_those_of_the_same_or_a_higher_priority(
    priority: int, leaves: bool
) -> None:
    scene = Scene().begin("modest", priority=priority).end("modest", priority=priority)

    assert scene.begin("greedy", MANY).leaves_one("greedy") is leaves


def test_one_of_two_thousand_that_runs_many_leaves_a_place() -> None:
    scene = Scene().begin("greedy", MANY)
    for number in range(2000):
        scene.begin(f"t{number}").end(f"t{number}")

    assert scene.leaves_one("greedy")
    assert not scene.begin("t0").num_left("t0")


def test_who_was_not_seen_for_long_is_forgotten() -> None:
    scene = Scene()
    for number in range(2000):
        scene.begin(f"t{number}").end(f"t{number}")
        scene.now += LATELY_S / 10
    assert len(scene.tenants._loads) <= 12


def test_of_more_than_are_remembered_the_first_that_run_nothing_are_forgotten() -> None:
    scene = Scene().begin("running", 8)
    for number in range(MAX_SEEN + 100):
        scene.begin(f"{number}").end(f"{number}")

    assert len(scene.tenants._loads) <= MAX_SEEN + 1
    assert scene.num_left("running") == 1


def test_somebody_is_alone_once_no_request_of_others_has_come_or_gone_lately() -> None:
    scene = Scene().begin("a").begin("b").end("b")
    assert not scene.tenants.is_alone(claim("a"), scene.now)

    scene.now += LATELY_S + 0.1
    assert scene.tenants.is_alone(claim("a"), scene.now)
    scene.begin("a")
    assert scene.tenants.is_alone(claim("a"), scene.now)
    assert not scene.tenants.is_alone(claim("b"), scene.now)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), max_size=30))
def test_it_never_happens_that_all_who_run_leave_places(begun: list[tuple[str, int]]) -> None:
    scene = Scene()
    for tenant, num in begun:
        scene.begin(tenant, num)

    assert not begun or not all(scene.num_left(tenant) for tenant, _ in begun)


# --- where they are left -----------------------------------------------------------------------

PLACES = st.builds(
    EndpointPlaces, st.sampled_from("ab"), st.integers(1, 9) | st.just(inf), st.integers(0, 12)
)


@given(st.dictionaries(st.sampled_from("uvwxyz"), PLACES, min_size=1), st.integers(1, 5))
def test_what_is_left_is_free_or_known_and_one_of_a_group_without_limits_is_tried(
    places: dict[str, EndpointPlaces], num_left: int
) -> None:
    found = left(places, num_left)

    for group in {each.group for each in places.values()}:
        alike = {name: each for name, each in places.items() if each.group == group}
        most = max(each.num_there for each in alike.values())
        if all(each.most == inf for each in alike.values()):
            assert any(each.num_there == most and n not in found for n, each in alike.items())
    for name in found:
        more = places | {name: places[name]._replace(num_there=places[name].num_there + 1)}
        sizes = {each.group: each.most for each in more.values() if each.most < inf}
        if sizes.keys() == {each.group for each in places.values()} and len(set(sizes)) == 1:
            free = [max(0, each.most - each.num_there) for each in more.values() if each.most < inf]
            assert sum(free) <= num_left
