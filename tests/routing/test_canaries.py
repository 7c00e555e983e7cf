"""Targets that do worse than another one of their rule are taken back, and equal ones are not."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from extproc.phrases import FOR_ADAPTER, FOR_ROOM
from extproc.pods.completion import Completion, Ended
from extproc.routing.canaries import ERROR_RATE, Canaries
from extproc.routing.rewrites import Drawn, Rewrites, Rule
from extproc.types import Outcome, Pick, RequestInfo

RULE = Rule("sql", ("sql", "more"), (("v1", 90.0), ("v2", 10.0)))


def ended(
    drawn: Drawn,
    *,
    outcome: Outcome = Outcome.COMPLETED,
    status: int = 200,
    num_bytes: int = 2000,
    held_for: str = "",
    is_logged: bool = True,
) -> Ended:
    """How a request for a target ended, by the access log or by its stream."""
    request = RequestInfo(drawn.model, written="sql", drawn_target=drawn.number)
    pick = Pick("1", request, ("10.0.0.1:8000",), "p", "r", held_for=held_for)
    completion = Completion(
        *("1", "", pick.address, status, outcome, True, 0.1, 0.2, 1, 0.0, "", 0.1),
        body_bytes=num_bytes,
    )
    return Ended(pick, outcome, completion if is_logged else None)


class Traffic:
    """Requests for a rule's models, and how those for each target end.

    Args:
        bad: By target: a part of its requests, and how these end.
    """

    def __init__(
        self,
        rule: Rule = RULE,
        *,
        seed: int = 1,
        error_rate: float = ERROR_RATE,
        **bad: Any,
    ) -> None:
        self.rng, self.bad, self.rule = Random(seed), bad, rule
        self.rewrites = Rewrites([rule], error_rate, rng=self.rng)
        self.num_asked: Counter[str] = Counter()

    def ask(self, num: int) -> Counter[str]:
        """Return how many of so many requests each target got."""
        before = self.num_asked.copy()
        for _ in range(num):
            drawn = self.rewrites.draw((*self.rule.models, "any")[0])
            self.num_asked[drawn.model] += 1
            ratio, how = self.bad.get(drawn.model, (0, {}))
            is_bad = self.rng.random() < ratio
            self.end(drawn, how if is_bad else {})
        return self.num_asked - before

    def end(self, drawn: Drawn, how: dict[str, Any]) -> None:
        if how.get("is_refused"):
            self.rewrites.refused(drawn.number)
            return
        is_attained = how.get("is_attained")
        given = {name: value for name, value in how.items() if name != "is_attained"}
        self.rewrites.ended(ended(drawn, **given), is_attained)

    @property
    def taken_back(self) -> list[str]:
        return [target for _, target, _ in self.rewrites.taken_back]


WORSE: dict[str, dict[str, Any]] = {
    "an error": {"status": 500, "outcome": Outcome.FAILED},
    "an error of the request": {"status": 400},
    "broken off": {"outcome": Outcome.FAILED, "is_logged": False},
    "refused": {"is_refused": True},
    "late": {"is_attained": False},
    "next to nothing": {"num_bytes": 150},
}


@pytest.mark.parametrize("how", WORSE.values(), ids=WORSE)
def test_a_canary_that_does_worse_in_one_of_twenty_requests_is_taken_back(
    how: dict[str, Any],
) -> None:
    traffic = Traffic(v2=(0.05, how))
    traffic.ask(5000)

    assert traffic.taken_back == ["v2"]
    assert traffic.ask(100) == {"v1": 100}


@pytest.mark.parametrize("how", WORSE.values(), ids=WORSE)
def test_a_canary_that_does_as_badly_as_the_standard_stays(how: dict[str, Any]) -> None:
    traffic = Traffic(v1=(0.05, how), v2=(0.05, how))
    traffic.ask(5000)

    assert traffic.taken_back == []


def test_a_standard_that_does_worse_stays() -> None:
    traffic = Traffic(v1=(0.3, WORSE["an error"]))
    traffic.ask(3000)

    assert traffic.taken_back == []


def test_the_chance_of_a_false_alarm_is_no_larger_than_the_error_rate() -> None:
    """For all canaries of a rule together, each with failures, lateness and empty answers."""
    rule = Rule("r", ("sql",), (("v1", 60.0), ("v2", 20.0), ("v3", 20.0)))
    found = 0
    for seed in range(20):
        bad: dict[str, Any] = {target: (0.1, WORSE["an error"]) for target in ("v1", "v2", "v3")}
        traffic = Traffic(rule, seed=seed, **bad)
        traffic.ask(2000)
        found += bool(traffic.taken_back)

    assert found <= 3  # more in one of 60 such tests


@pytest.mark.long
@pytest.mark.parametrize("share", [10.0, 50.0])
def test_of_a_hundred_canaries_that_fail_in_one_of_twenty_requests_nearly_all_are_found(
    share: float,
) -> None:
    """Within 500 requests of theirs; of those that fail as often as the standard hardly any is."""
    rule, bad = (
        Rule("sql", ("sql",), (("v1", 100 - share), ("v2", share))),
        (0.05, WORSE["an error"]),
    )
    num_found = num_false = 0
    for seed in range(100):
        worse = Traffic(rule, seed=seed, v2=bad)
        while not worse.taken_back and worse.num_asked["v2"] < 500:
            worse.ask(20)
        alike = Traffic(rule, seed=1000 + seed, v1=bad, v2=bad)
        alike.ask(20_000)
        num_found += bool(worse.taken_back)
        num_false += bool(alike.taken_back)

    assert num_found >= 95
    assert num_false <= 5


def test_of_several_canaries_each_is_compared_with_the_standard() -> None:
    """Generic rules and equal weights are no exception."""
    rule = Rule("r", (), (("v1", None), ("v2", None), ("v3", None)))
    traffic = Traffic(rule, v2=(0.2, WORSE["an error"]))
    traffic.ask(1000)

    assert traffic.taken_back == ["v2"]
    assert set(traffic.ask(200)) == {"v1", "v3"}


def test_the_standard_is_the_target_with_the_largest_share_of_all_its_weights() -> None:
    weights = (("v2", 40.0), ("v1", 30.0), ("none", 0.0), ("v1", 30.0))
    traffic = Traffic(Rule("r", ("sql",), weights), v2=(0.2, WORSE["an error"]))
    traffic.ask(1000)

    assert traffic.taken_back == ["v2"]
    assert set(traffic.num_asked) == {"v1", "v2"}


def test_a_canary_stays_taken_back_until_its_rule_changes() -> None:
    traffic = Traffic(v2=(0.2, WORSE["an error"]))
    traffic.ask(2000)
    rules = [RULE, Rule("x", ("x",), (("y", None),))]

    traffic.rewrites.configure(rules)
    assert traffic.ask(100) == {"v1": 100}
    changed = Rule("sql", RULE.models, (("v1", 90.0), ("v2", 20.0)))
    traffic.rewrites.configure([changed])
    assert traffic.ask(100)["v2"] > 0


def test_a_changed_error_rate_begins_anew() -> None:
    traffic = Traffic(v2=(0.2, WORSE["an error"]))
    traffic.ask(2000)
    traffic.rewrites.configure([RULE], 0.01)

    assert traffic.taken_back == []


def test_nothing_is_taken_back_where_that_is_turned_off() -> None:
    traffic = Traffic(error_rate=0, v2=(1.0, WORSE["an error"]))
    traffic.ask(1000)

    assert traffic.ask(100)["v2"] > 0
    assert traffic.rewrites.draw("sql").number == 0


def test_an_end_that_was_drawn_under_another_rule_does_not_count() -> None:
    """Its target had another share then."""
    traffic = Traffic()
    old = next(d for d in (traffic.rewrites.draw("sql") for _ in range(1000)) if d.model == "v2")
    traffic.rewrites.configure([Rule("sql", ("sql",), (("v1", 50.0), ("v2", 50.0)))])
    for _ in range(1000):
        traffic.end(old, WORSE["an error"])

    assert traffic.taken_back == []


def test_one_target_alone_is_no_canary() -> None:
    traffic = Traffic(Rule("r", ("sql",), (("v1", 1.0), ("v1", 1.0), ("v2", 0.0))))

    assert traffic.rewrites.draw("sql") == Drawn("v1", 0)


# --- what counts ---------------------------------------------------------------------------------


OTHERS: dict[str, dict[str, Any]] = {
    "late by a wait for its adapter": {"is_attained": False, "held_for": FOR_ADAPTER},
    "in time": {"is_attained": True},
    "no objective": {"is_attained": None},
    "long enough": {"num_bytes": 1024},
    "by its stream": {"is_logged": False},
    **{
        outcome: {"outcome": outcome, "num_bytes": 0}
        for outcome in (Outcome.CANCELLED, Outcome.UNKNOWN, Outcome.EXPIRED)
    },
}


@pytest.mark.parametrize("how", OTHERS.values(), ids=OTHERS)
def test_what_is_no_fault_of_a_version_takes_none_back(how: dict[str, Any]) -> None:
    """A canary is asked for less often, and so its adapter is loaded less often."""
    traffic = Traffic(v2=(1.0, how))
    traffic.ask(3000)

    assert traffic.taken_back == []


def test_a_wait_for_room_that_makes_a_request_late_counts() -> None:
    traffic = Traffic(v2=(1.0, {"is_attained": False, "held_for": FOR_ROOM}))
    traffic.ask(1000)

    assert traffic.taken_back == ["v2"]


def test_what_is_taken_back_says_what_was_worse_than_what() -> None:
    canaries = Canaries({"v1": 1.0, "v2": 1.0}, {}, ERROR_RATE)
    while not canaries.judge("v2", failed=False, late=True):
        assert canaries.taken_back == {}

    [why] = canaries.taken_back.values()
    assert why.startswith("it is late more often than v1, by chance at most once in ")
    assert not canaries.judge("v2", failed=False, late=True)  # it is no news


def test_short_answers_are_nothing_unusual_where_the_standard_s_are_short_too() -> None:
    traffic = Traffic(v1=(0.5, {"num_bytes": 250}), v2=(1.0, {"num_bytes": 150}))
    traffic.ask(3000)

    assert traffic.taken_back == []


# --- what is said --------------------------------------------------------------------------------


class Read:
    """What is measured, by name."""

    def __init__(self, rewrites: Rewrites) -> None:
        self.found: dict[str, Any] = {}
        rewrites.add_metrics(self)

    def add_gauge(self, name: str, documentation: str, read: Any) -> None:
        self.found[name] = read()

    def add_histograms(self, name: str, *_: Any) -> None:
        raise AssertionError(name)

    def add_gauges(self, name: str, documentation: str, label: Any, read: Any) -> None:
        self.found[name] = label, read()

    add_counters = add_gauges


@pytest.mark.parametrize(("models", "shown"), [(("sql", "more"), "sql"), ((), "*")])
def test_what_is_taken_back_is_said_once_and_shown_as_long_as_it_is(
    models: tuple[str, ...], shown: str
) -> None:
    traffic = Traffic(Rule("sql", models, RULE.targets), v2=(0.2, WORSE["an error"]))
    rewrites = traffic.rewrites
    assert (rewrites.take_news(), rewrites.warnings(), rewrites.losses()) == ([], [], {})
    traffic.ask(2000)

    [line] = rewrites.take_news()
    assert line.startswith("sql: the canary v2 is taken back: ")
    assert (rewrites.take_news(), rewrites.warnings()) == ([], [line])
    assert [*rewrites.losses()] == ["sql"]
    measured = ("model", "version"), {(shown, "v2"): 1}
    assert Read(rewrites).found == {"canary_taken_back": measured}
