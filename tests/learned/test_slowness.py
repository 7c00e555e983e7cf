"""A pod that is slower than its peers is found, said once, and said to have recovered once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.costs import Costs, Decode
from extproc.learned.slowness import RECOVERY, SlownessSettings, SlowPods
from extproc.types import EndpointView, Snapshot
from tests.builders import address, snapshot

SETTINGS = SlownessSettings(ratio=2.0, for_s=30.0)


def view(number: int, decode: Decode | None, *, num_running: int = 1) -> EndpointView:
    costs = Costs(decode=decode)
    return EndpointView(address(number), f"pod-{number}", num_running=num_running, costs=costs)


def fleet(*token_ms: float, num_running: float = 1) -> Snapshot:
    """Pods from number 1 on that take so long."""
    return snapshot(
        *(view(n, Decode(num_running, ms / 1000)) for n, ms in enumerate(token_ms, start=1))
    )


def ratios(of: Snapshot, groups: Mapping[str, str] | None = None) -> dict[str, float]:
    found = SlowPods(lambda each: (groups or {}).get(each, "")).compare(of)
    return {each: slowness.ratio for each, slowness in found.items()}


class Watched:
    """Two pods of which one takes `slow_ms`, a look each second; `lines` is the log."""

    def __init__(self) -> None:
        self.pods = SlowPods(lambda _address: "", SETTINGS)
        self.now = 100.0
        self.lines: list[tuple[bool, str]] = []

    def run(self, seconds: float, slow_ms: float, *, num_running: int = 1) -> None:
        for _ in range(round(seconds)):
            self.now += 1
            views = (
                view(1, Decode(1, slow_ms / 1000), num_running=num_running),
                view(2, Decode(1, 0.01)),
            )
            for line in self.pods.update(Snapshot(views, self.now)):
                self.lines.append((line.is_loss, line.template % line.values))


def test_a_pod_is_compared_with_the_median_of_its_groups_other_pods() -> None:
    found = ratios(fleet(10, 10, 20, 40))

    assert found == pytest.approx(
        {address(1): 0.5, address(2): 0.5, address(3): 2.0, address(4): 4.0}
    )
    assert ratios(fleet(10, 30, 20)) == pytest.approx(
        {address(1): 1 / 3, address(2): 1.5, address(3): 2 / 3}
    )


@given(
    honest_ms=st.lists(st.floats(10, 19), min_size=2, max_size=8), false_ms=st.floats(0.001, 1e4)
)
def test_a_pod_with_false_counters_makes_no_other_look_slow(
    honest_ms: list[float], false_ms: float
) -> None:
    found = ratios(fleet(false_ms, *honest_ms))

    assert all(found[address(2 + place)] < 2.0 for place in range(len(honest_ms)))


def test_pods_of_another_group_are_no_peers() -> None:
    groups = {address(1): "large", address(2): "large"}

    assert ratios(fleet(40, 40, 10, 10), groups) == dict.fromkeys(map(address, (1, 2, 3, 4)), 1.0)


def test_a_pod_without_a_figure_or_without_peers_is_not_judged() -> None:
    assert ratios(fleet(10)) == {}
    assert ratios(snapshot(view(1, Decode(1, 0.01)), view(2, None))) == {}


def beside(other: Decode, own: Decode) -> float:
    """The slowness of the second of two pods."""
    return ratios(snapshot(view(1, other), view(2, own)))[address(2)]


def test_a_larger_batch_is_no_slowness() -> None:
    small = Decode(11, 0.020, alone_s=0.010)

    assert beside(small, Decode(21, 0.030)) == pytest.approx(1.0)
    assert beside(small, Decode(11, 0.030)) == pytest.approx(1.5)
    assert beside(Decode(11, 0.020), Decode(21, 0.030)) == pytest.approx(1.5)
    assert beside(Decode(21, 0.030, alone_s=0.010), small) == pytest.approx(2 / 3)


def test_a_batch_beyond_twice_as_large_is_an_excuse_for_no_more() -> None:
    assert beside(Decode(11, 0.020, alone_s=0.010), Decode(101, 0.062)) == pytest.approx(2.0)


def test_single_requests_that_differ_by_chance_tell_no_line() -> None:
    assert beside(Decode(1.05, 0.020, alone_s=0.010), Decode(4, 0.1)) == pytest.approx(5.0)


@given(st.lists(st.floats(1e-5, 10.0), min_size=2, max_size=12))
def test_a_group_of_any_size_has_pods_on_both_sides(token_s: list[float]) -> None:
    found = ratios(fleet(*(1000 * each for each in token_s)))

    assert len(found) == len(token_s)
    assert min(found.values()) <= 1.0 + 1e-9
    assert max(found.values()) >= 1.0 - 1e-9


def test_becoming_slow_and_recovering_are_said_once_each_with_figures() -> None:
    watched = Watched()
    watched.run(31, slow_ms=24)
    assert watched.pods.is_slow(address(1))
    watched.run(60, slow_ms=24)
    watched.run(90, slow_ms=11)

    assert watched.lines == [
        (
            True,
            f"pod pod-1 ({address(1)}) is slower than its peers: 24 ms per output token, "
            "2.4 times the 10 ms of the other pods of its group (1), for 30 s of work",
        ),
        (
            False,
            f"pod pod-1 ({address(1)}) is as fast as its peers again: 11 ms per output token, "
            "1.1 times the 10 ms of the other pods of its group (1); it was slow for 90 s",
        ),
    ]
    assert not watched.pods.is_slow(address(1))


def test_a_short_spell_is_not_said_and_does_not_add_up() -> None:
    watched = Watched()
    for _ in range(5):
        watched.run(20, slow_ms=40)
        watched.run(1, slow_ms=10)

    assert watched.lines == []


def test_time_without_work_shows_nothing() -> None:
    watched = Watched()
    watched.run(20, slow_ms=40)
    watched.run(600, slow_ms=40, num_running=0)
    assert watched.lines == []
    watched.run(15, slow_ms=40)
    assert len(watched.lines) == 1


def test_a_pod_just_below_the_limit_has_not_recovered() -> None:
    watched = Watched()
    watched.run(40, slow_ms=21)
    watched.run(90, slow_ms=10 * SETTINGS.ratio * RECOVERY + 0.5)

    assert [is_loss for is_loss, _ in watched.lines] == [True]


def test_a_pod_that_has_left_is_forgotten_in_silence() -> None:
    watched = Watched()
    watched.run(40, slow_ms=40)
    watched.pods.update(Snapshot((), watched.now + 1))

    assert not watched.pods.is_slow(address(1))


def test_a_suspended_router_has_seen_no_work() -> None:
    watched = Watched()
    watched.run(2, slow_ms=40)
    watched.now += 3600
    watched.run(2, slow_ms=40)

    assert watched.lines == []
