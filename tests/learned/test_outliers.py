"""Who is ejected, for how long, and how it comes back."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import count
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from extproc.learned.chances import Count, Strata
from extproc.learned.comparison import HOLLOW_BYTES, MIN_BESIDE
from extproc.learned.ejections import (
    MAX_CHANGES,
    NUM_TRIALS,
    UNREACHABLE_S,
    Cause,
    Ejection,
    OutlierSettings,
    Readmission,
)
from extproc.learned.evidence import Evidence, judged_attempts
from extproc.learned.outliers import MAX_DOUBTS, MAX_SUSPECT_S, Outliers
from extproc.learned.recentends import NUM_BESIDE
from extproc.learned.tallies import (
    MAX_KINDS,
    MAX_OWN_KINDS,
    MAX_SOURCES,
    WINDOW_S,
    Like,
    ServedRequests,
)
from extproc.pods.pool import Pool
from tests.builders import address as address_of
from tests.builders import cards, endpoint, fill, pick, request

SERVED, FAILED, BROKEN, UNREACHABLE, UNANSWERED, NOT_FOUND, FULL, NONE = Evidence
NUM_PEERS = 40  # requests served elsewhere: enough to judge five that failed
BASE_S, MAX_S = OutlierSettings().base_ejection_s, OutlierSettings().max_ejection_s


def is_out(made: Outliers, address: str, *, now: float) -> bool:
    return made.standing(address, now=now)[0]


def end_s(made: Outliers, address: str) -> float:
    return made._records[address].until_s


def outliers(addresses: Iterable[str] = "abc", **fields: Any) -> Outliers:
    made = Outliers(OutlierSettings(**fields))
    made.set_endpoints(addresses)
    return made


def taken(made: Outliers) -> list[Ejection | Readmission]:
    """What has changed since the last time."""
    changes = made.ejections.changes
    return [changes.popleft() for _ in range(len(changes))]


def tell(
    made: Outliers,
    address: str,
    *verdicts: Evidence,
    now: float = 0.0,
    kind: str = "sql",
    source: int | None = None,
) -> None:
    """Requests there end so, one after the other: of one source, or each of its own."""
    for verdict in verdicts:
        trial = made.picked(address, now=now)
        like = Like(kind, next(SOURCES) if source is None else source)
        made.ended(address, verdict, like, now=now, trial=trial)


SOURCES = count()
LIKE = Like("sql", 0)


def ejected(made: Outliers, now: float, addresses: str = "abc") -> str:
    return "".join(each for each in addresses if is_out(made, each, now=now))


# --- what ejects ----------------------------------------------------------------------------


def serve(
    made: Outliers, addresses: Iterable[str] = "bc", num: int = NUM_PEERS, **how: Any
) -> None:
    """These serve requests like those that fail elsewhere."""
    for address in addresses:
        tell(made, address, *[SERVED] * num, **how)


@pytest.mark.parametrize("verdict", [FAILED, BROKEN])
def test_so_many_failures_in_a_row_of_what_others_serve_eject(verdict: Evidence) -> None:
    made = outliers()
    serve(made)
    tell(made, "a", *[verdict] * 4, SERVED, *[verdict] * 4)
    before = ejected(made, 0.0)
    serve(made)
    tell(made, "a", verdict)

    assert (before, ejected(made, 0.0)) == ("", "a")
    assert taken(made) == [Ejection("a", Cause.CONSECUTIVE_FAILURES, BASE_S)]


def test_what_a_request_rarely_explains_needs_few_that_were_served_elsewhere() -> None:
    alone, beside = outliers(), outliers()
    tell(alone, "b", *[SERVED] * (MIN_BESIDE - 1))
    tell(beside, "b", *[SERVED] * MIN_BESIDE)
    for made in (alone, beside):
        tell(made, "a", *[BROKEN] * 5)

    assert (ejected(alone, 0.0), ejected(beside, 0.0)) == ("", "a")


@pytest.mark.parametrize("verdict", [FAILED, BROKEN, UNANSWERED])
def test_failures_with_many_models_count_where_others_had_other_models(verdict: Evidence) -> None:
    """As with hundreds of adapters, of which each has a request now and then."""
    made = outliers()
    serve(made, kind="base")
    for number in range(6):
        tell(made, "a", verdict, kind=f"adapter-{number}")

    assert ejected(made, 0.0) == "a"


@pytest.mark.parametrize("verdict", [FAILED, BROKEN, UNANSWERED])
def test_two_models_that_fail_everywhere_and_were_asked_for_there_alone_eject_nobody(
    verdict: Evidence,
) -> None:
    made = outliers()
    serve(made, kind="base")
    for number in range(60):
        tell(made, "a", verdict, kind=f"adapter-{number % 2}")

    assert ejected(made, 0.0) == ""


@pytest.mark.parametrize("verdict", [FAILED, BROKEN, UNANSWERED])
def test_a_request_that_is_repeated_and_served_nowhere_ejects_nobody(verdict: Evidence) -> None:
    """As one that makes every endpoint close the connection, kept at one by its session."""
    made = outliers()
    serve(made)
    tell(made, "a", *[verdict] * 100, source=-1)

    assert ejected(made, 0.0) == ""


def test_what_others_have_not_served_ejects_nobody() -> None:
    """Only one has the adapter, or others had other paths and models."""
    made = outliers()
    serve(made, kind="base")
    tell(made, "a", *[FAILED] * 500, kind="sql")

    assert ejected(made, 0.0) == ""


def test_one_that_alone_has_a_model_is_judged_by_others_there_and_by_its_health() -> None:
    """Whether its failures are due to the requests nobody else can say, nor serve them."""

    def made() -> Pool:
        pool = fill(Pool(), 1, 2, 3)
        serve(pool.outliers, [address_of(2), address_of(3)], kind="base")
        tell(pool.outliers, address_of(1), *[FAILED] * 50, kind="a")
        return pool

    alone, by_models, by_breaks, by_health = made(), made(), made(), made()
    tell(by_models.outliers, address_of(1), *[FAILED] * 6, kind="base")
    tell(by_breaks.outliers, address_of(1), *[BROKEN] * 6, kind="a")
    by_health.record_health(address_of(1), is_dead=True, asked_at_s=0.0)
    views = [each.snapshot(now=0.0).endpoints[0] for each in (alone, by_models, by_breaks)]

    assert [view.is_ejected for view in views] == [False, True, False]
    assert [view.is_ready for view in by_health.snapshot(now=0.0).endpoints] == [False, True, True]


def test_failures_with_many_models_count_together() -> None:
    made = outliers()
    for number in range(6):
        serve(made, kind=f"adapter-{number}", num=4)
        tell(made, "a", FAILED, kind=f"adapter-{number}")

    assert ejected(made, 0.0) == "a"


def test_a_model_that_fails_beside_others_that_are_served_is_no_row() -> None:
    made = outliers()
    serve(made)
    for _ in range(50):
        tell(made, "a", FAILED, kind="sql")
        tell(made, "a", *[SERVED] * 9, kind="base")

    assert ejected(made, 0.0) == ""


def test_a_request_that_is_repeated_counts_once_until_another_has_served_it() -> None:
    made = outliers()
    serve(made)
    tell(made, "a", *[FAILED] * 500, source=-1)
    before = ejected(made, 0.0)
    tell(made, "b", SERVED, source=-1)
    tell(made, "a", *[FAILED] * 6, source=-1)

    assert (before, ejected(made, 0.0)) == ("", "a")


def test_its_own_service_of_a_request_is_not_anothers() -> None:
    made = outliers()
    serve(made)
    tell(made, "a", SERVED, *[FAILED] * 500, source=-1)

    assert ejected(made, 0.0) == ""


def test_a_few_that_others_served_may_be_a_coincidence() -> None:
    made = outliers()
    serve(made, num=2)
    tell(made, "a", *[FAILED] * 5)

    assert ejected(made, 0.0) == ""


def test_one_whose_failures_others_turn_out_to_share_is_back_at_once() -> None:
    """Requests of many sources that fail everywhere came to one endpoint first."""
    made = outliers("abcd")
    serve(made, "bcd")
    tell(made, "a", *[FAILED] * 6, now=1.0)
    assert ejected(made, 1.0, "abcd") == "a"
    tell(made, "b", *[FAILED] * 30, now=2.0, kind="base")
    assert ejected(made, 2.0, "abcd") == "a"
    for _ in range(2):
        for address in "bcd":
            tell(made, address, FAILED, now=2.0)

    assert ejected(made, 2.0, "abcd") == ""
    assert taken(made)[1:] == [Readmission("a")]
    assert made._records["a"].count == 0  # that one did not count


def test_one_that_breaks_first_of_all_is_back_once_others_break_alike() -> None:
    """What they share names none of them, not even where no request explains it."""
    made = outliers("abcd")
    serve(made, "bcd", num=2)
    tell(made, "a", *[BROKEN] * 5, now=1.0)
    assert ejected(made, 1.0, "abcd") == "a"
    for _ in range(2):
        for address in "bcd":
            tell(made, address, BROKEN, now=2.0)

    assert ejected(made, 2.0, "abcd") == ""


def test_a_rare_break_elsewhere_excuses_nobody() -> None:
    made = outliers()
    serve(made, num=8, kind="base")
    tell(made, "b", BROKEN, *[SERVED] * 5)
    tell(made, "a", *[BROKEN] * 6)

    assert ejected(made, 0.0) == "a"


def test_while_others_break_alike_five_in_a_row_are_a_coincidence() -> None:
    made = outliers("abcd")
    for address in "bcd":
        tell(made, address, SERVED, BROKEN)
    tell(made, "a", *[BROKEN] * 5)

    assert ejected(made, 0.0, "abcd") == ""


def test_one_that_cannot_be_reached_is_not_back_for_what_others_fail() -> None:
    made = outliers("abcd")
    made.answered("a", asked_at_s=-1.0)
    tell(made, "a", UNREACHABLE)
    for _ in range(3):
        for address in "bcd":
            tell(made, address, BROKEN, SERVED)

    assert "a" in ejected(made, 0.0, "abcd")


def test_what_says_nothing_neither_breaks_a_row_nor_makes_one() -> None:
    made = outliers()
    serve(made)
    tell(made, "a", *[NONE, FULL] * 50)
    tell(made, "a", *[FAILED, NONE] * 4)
    before = ejected(made, 0.0)
    tell(made, "a", *[FAILED] * 2)

    assert (before, ejected(made, 0.0)) == ("", "a")


@pytest.mark.parametrize("verdict", [FAILED, BROKEN])
def test_a_failure_rate_far_above_the_others_ejects(verdict: Evidence) -> None:
    made = outliers()
    for other in "bc":
        tell(made, other, *[verdict] * 3, *[SERVED] * 57)
    tell(made, "a", *[SERVED, verdict] * 30)

    assert ejected(made, 0.0) == "a"
    assert made.ejections.num[Cause.FAILURE_RATE] == 1


def test_a_failure_rate_is_judged_with_enough_requests_to_it_and_to_others() -> None:
    few_of_its_own, none_of_others = outliers(), outliers()
    serve(few_of_its_own, num=1000)
    tell(few_of_its_own, "a", *[SERVED, FAILED] * 9)
    serve(none_of_others, kind="base", num=1000)
    tell(none_of_others, "a", *[SERVED, FAILED] * 50)

    assert (ejected(few_of_its_own, 0.0), ejected(none_of_others, 0.0)) == ("", "")


def test_what_is_long_ago_says_nothing_of_a_failure_rate() -> None:
    for later_s, expected in ((16.0, "a"), (31.0, ""), (500.0, "")):
        made = outliers()
        tell(made, "a", *[SERVED, FAILED] * 25)
        serve(made, now=later_s)
        tell(made, "a", SERVED, FAILED, now=later_s)

        assert ejected(made, later_s) == expected


def test_what_others_served_long_ago_compares_with_nothing() -> None:
    made = outliers()
    serve(made)
    tell(made, "a", *[FAILED] * 50, now=WINDOW_S + 1)

    assert ejected(made, WINDOW_S + 1) == ""


def test_where_the_others_fail_alike_it_is_the_requests() -> None:
    made = outliers()
    for other in "bc":
        tell(made, other, *[SERVED, *[FAILED] * 4] * 4)
    tell(made, "a", *[FAILED] * 50)

    assert ejected(made, 0.0) == ""


def test_requests_that_fail_everywhere_eject_nobody() -> None:
    made = outliers()
    for number in range(300):
        for address in "abc":
            tell(made, address, SERVED if number < 10 else FAILED if number % 4 else SERVED)

    assert ejected(made, 0.0) == ""


def test_kinds_and_sources_beyond_the_bounds_count_for_nobody() -> None:
    made = outliers("abcdef")
    for number in range(max(MAX_KINDS, MAX_SOURCES) + 50):
        tell(made, "bcdef"[number % 5], SERVED, kind=f"adapter-{number}", source=number)
        tell(made, "a", FAILED, kind=f"adapter-{number}", source=number)
    for number in range(MAX_OWN_KINDS + 50):
        tell(made, "a", FAILED, source=-number)

    assert sum(made.ejections.num.values()) <= 1  # and it has neither failed nor grown


@pytest.mark.parametrize("addresses", ["abc", "abcdef", "abcdefghijklmnop"])
def test_where_all_begin_to_fail_at_one_moment_nobody_is_ejected(addresses: str) -> None:
    """Say, what requests refer to is gone."""
    made = outliers(addresses)
    serve(made, addresses, num=100)
    for _ in range(50):
        for address in addresses:
            tell(made, address, FAILED, now=1.0)

    assert not any(made.ejections.num.values())


def test_the_chance_of_a_share_is_small_only_where_it_is_more_than_its_requests() -> None:
    few, many, all_of_them = Strata(), Strata(), Strata()
    few.add(Count(10, 1), Count(10, 5))
    many.add(Count(30, 20), Count(60, 4))
    all_of_them.add(Count(30, 20), Count(60, 0))

    assert few.chance() == 1.0
    assert Strata().excess_ratio() == 0.0
    assert 1e-9 > all_of_them.chance() < many.chance() < 1e-4


def test_a_request_that_several_have_served_is_served_elsewhere_for_each() -> None:
    sources = ServedRequests()
    sources.served(1, "a")
    before = sources.is_served_elsewhere(1, "a")
    for address in "abb":
        sources.served(1, address)

    assert (before, sources.is_served_elsewhere(1, "a")) == (False, True)
    assert not sources.is_served_elsewhere(2, "a")


# --- by chance ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_one_that_fails_as_often_as_others_is_not_ejected(seed: int) -> None:
    """Of 38,252 pods of random fleets 1 was ejected (docs/archive/policy-evidence.md)."""
    rng = random.Random(seed)
    addresses = "abcdefghijklmnopqrstuvwxyz"[: rng.randint(2, 26)]
    made, ratio, interval_s = outliers(addresses), rng.random(), rng.choice((0.01, 0.1, 1.0))
    is_poison = rng.random() < 0.5  # one client repeats what fails everywhere, all else is served
    for number in range(600):
        fails = rng.random() < ratio
        source = -1 if is_poison and fails else number
        now, verdict = number * interval_s, FAILED if fails else SERVED
        tell(made, rng.choice(addresses), verdict, now=now, source=source)

    assert not any(made.ejections.num.values())


@pytest.mark.parametrize("seed", range(20))
def test_one_that_alone_fails_is_out_after_six_failures_at_most(seed: int) -> None:
    rng = random.Random(seed)
    addresses = "abcdefghijklmnopqrstuvwxyz"[: rng.randint(2, 26)]
    made, kinds = outliers(addresses), rng.choice((["sql"], ["sql", "base", "chat"]))
    for _ in range(60 * len(kinds)):
        tell(made, rng.choice(addresses[1:]), SERVED, kind=rng.choice(kinds))
    tell(made, "a", *[SERVED] * rng.randint(0, 30))
    for _ in range(6):
        tell(made, "a", FAILED, kind=rng.choice(kinds))

    assert ejected(made, 0.0, addresses) == "a"


def test_one_that_cannot_be_reached_is_ejected_at_once_and_shortly() -> None:
    made = outliers()
    tell(made, "a", UNREACHABLE, now=10.0)

    assert ejected(made, 10.0 + UNREACHABLE_S) == "a"
    assert ejected(made, 10.1 + UNREACHABLE_S) == ""
    assert taken(made) == [Ejection("a", Cause.UNREACHABLE, UNREACHABLE_S)]


def test_an_answer_to_a_call_of_ours_made_since_ends_that() -> None:
    made = outliers()
    tell(made, "a", UNREACHABLE, now=10.0)
    made.answered("a", asked_at_s=9.9)
    made.answered("a", asked_at_s=10.0)
    before = ejected(made, 10.0)
    made.answered("a", asked_at_s=10.1)

    assert (before, ejected(made, 10.2)) == ("a", "")


def test_one_that_has_answered_a_call_of_ours_made_since_is_not_ejected() -> None:
    """The news of the failure came late."""
    made = outliers()
    made.answered("a", asked_at_s=10.1)
    made.ended("a", UNREACHABLE, LIKE, now=10.2, ended_s=10.0)
    assert ejected(made, 10.2) == ""
    made.ended("a", UNREACHABLE, LIKE, now=10.3, ended_s=10.2)
    assert ejected(made, 10.3) == "a"


def test_one_that_answers_us_and_resets_requests_is_ejected_all_the_same() -> None:
    made = outliers()
    for number in range(5):
        tell(made, "a", UNREACHABLE, now=float(number))
        made.answered("a", asked_at_s=number + 0.5)

    assert ejected(made, 5.0) == "a"
    assert made.ejections.num == {
        Cause.UNREACHABLE: 4,
        Cause.CONSECUTIVE_FAILURES: 1,
        Cause.FAILURE_RATE: 0,
        Cause.FAILED_TRIAL: 0,
    }


def test_failures_that_follow_make_a_short_ejection_a_full_one() -> None:
    """As when all that ran on a pod ends with it."""
    made = outliers()
    trials = [made.picked("a", now=0.0) for _ in range(6)]
    for trial in trials:
        made.ended("a", UNREACHABLE, LIKE, now=0.0, trial=trial)

    assert ejected(made, UNREACHABLE_S + 1) == "a"


# --- how long, and how it comes back ---------------------------------------------------------


def eject(made: Outliers, address: str, now: float) -> float:
    """Have it fail what another has served; answer for how long it is ejected."""
    other = next(each for each in "cb" if each != address and made._records[each].cause is None)
    for _ in range(MIN_BESIDE):
        tell(made, other, SERVED, now=now)
    for _ in range(20):  # five, where no other was ejected a moment ago
        if not is_out(made, address, now=now):
            tell(made, address, BROKEN, now=now)
    assert is_out(made, address, now=now)
    return end_s(made, address) - now


def pass_trial(made: Outliers, address: str, now: float) -> None:
    assert not is_out(made, address, now=now)
    tell(made, address, *[SERVED] * NUM_TRIALS, now=now)


def test_ejections_grow_up_to_a_limit() -> None:
    made, now, lengths = outliers(), 0.0, []
    for _ in range(12):
        lengths.append(eject(made, "a", now))
        now = end_s(made, "a") + 1.0
        pass_trial(made, "a", now)

    assert lengths == [min(BASE_S * count, MAX_S) for count in range(1, 13)]


def test_health_makes_the_next_ejection_shorter() -> None:
    made = outliers()
    now = 0.0
    for _ in range(3):
        eject(made, "a", now)
        now = end_s(made, "a") + 1.0
        pass_trial(made, "a", now)

    assert eject(made, "a", now + 2 * BASE_S) == 2 * BASE_S  # the fourth, two taken off
    pass_trial(made, "a", end_s(made, "a") + 1.0)
    assert eject(made, "a", now + 100 * BASE_S) == BASE_S


def test_on_trial_it_gets_few_at_a_time_until_as_many_were_served() -> None:
    made = outliers()
    eject(made, "a", 0.0)
    now = end_s(made, "a") + 1.0
    trials = [made.picked("a", now=now) for _ in range(NUM_TRIALS)]
    full = is_out(made, "a", now=now)
    made.ended("a", NONE, LIKE, now=now, trial=trials[0])
    free = is_out(made, "a", now=now)
    for trial in trials[1:]:
        made.ended("a", SERVED, LIKE, now=now, trial=trial)
    tell(made, "a", SERVED, now=now)
    for _ in range(10):
        made.picked("a", now=now)

    assert (full, free, is_out(made, "a", now=now)) == (True, False, False)


def test_a_trial_that_fails_ejects_again_for_longer() -> None:
    made = outliers()
    eject(made, "a", 0.0)
    now = end_s(made, "a") + 1.0
    trials = [made.picked("a", now=now) for _ in range(NUM_TRIALS)]
    for trial in trials:
        made.ended("a", UNREACHABLE, LIKE, now=now, trial=trial)

    assert end_s(made, "a") - now == 2 * BASE_S
    assert made.ejections.num[Cause.FAILED_TRIAL] == 1
    assert not is_out(made, "a", now=end_s(made, "a") + 1.0)  # no trial is left open


def test_a_trial_that_fails_what_others_serve_ejects_again() -> None:
    made = outliers()
    eject(made, "a", 0.0)
    now = end_s(made, "a") + 1.0
    tell(made, "a", FAILED, now=now)
    before = ejected(made, now)
    serve(made, now=now)
    tell(made, "a", FAILED, now=now)

    assert (before, ejected(made, now)) == ("", "a")
    assert made.ejections.num[Cause.FAILED_TRIAL] == 1


def test_a_trial_goes_on_where_the_others_fail_alike() -> None:
    made = outliers()
    eject(made, "a", 0.0)
    now = end_s(made, "a") + 1.0
    for other in "bc":
        tell(made, other, *[SERVED, *[FAILED] * 4] * 4, now=now)
    tell(made, "a", FAILED, now=now)

    assert not is_out(made, "a", now=now)
    assert made.ejections.num[Cause.FAILED_TRIAL] == 0


def test_what_was_sent_before_or_while_it_was_ejected_changes_nothing() -> None:
    made = outliers()
    early = made.picked("a", now=0.0)
    eject(made, "a", 0.0)
    until_s = end_s(made, "a")
    tell(made, "a", *[FAILED, SERVED] * 9, now=1.0)  # nobody else could take them
    made.ended("a", FAILED, LIKE, now=until_s + 1.0, trial=early)

    assert end_s(made, "a") == until_s
    assert not is_out(made, "a", now=until_s + 1.0)


def test_one_that_came_back_is_tried_at_once() -> None:
    made = outliers()
    eject(made, "a", 0.0)
    made.restarted("a", now=2.0)
    made.restarted("b", now=2.0)

    assert ejected(made, 2.1) == ""
    assert made.picked("a", now=2.1)
    assert not made.picked("b", now=2.1)


# --- how many -------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "limit"), [(1, 0), (2, 1), (3, 1), (4, 2), (7, 3)])
def test_no_more_than_the_share_is_ejected(size: int, limit: int) -> None:
    addresses = "abcdefg"[:size]
    made = outliers(addresses)
    for address in addresses:
        tell(made, address, UNREACHABLE)

    assert len(ejected(made, 0.0, addresses)) == limit


def test_when_the_pool_shrinks_those_return_that_would_return_first() -> None:
    made = outliers("abcd")
    eject(made, "a", 1.0)
    serve(made, "cd")
    eject(made, "b", 0.0)
    made.set_endpoints("abc")

    assert ejected(made, 1.0) == "a"


def test_one_that_left_and_came_back_starts_from_nothing() -> None:
    made = outliers()
    eject(made, "a", 0.0)
    made.set_endpoints("bc")
    made.ended("a", FAILED, LIKE, now=0.0)
    made.set_endpoints("abc")

    assert ejected(made, 0.0) == ""
    assert eject(made, "a", 1.0) == BASE_S


@pytest.mark.parametrize("idle_s", [1.0, 16.0, 31.0, 400.0])
def test_one_that_has_had_no_requests_for_a_while_can_leave(idle_s: float) -> None:
    made = outliers()
    tell(made, "a", SERVED)
    tell(made, "b", UNREACHABLE, now=idle_s)
    made.set_endpoints("c")
    made.set_endpoints("abc")

    assert ejected(made, idle_s) == ""


def test_turned_off_it_ejects_nobody_and_readmits_who_was() -> None:
    made = outliers()
    eject(made, "a", 0.0)
    made.configure(OutlierSettings(enabled=False))
    tell(made, "b", *[BROKEN] * 50)

    assert ejected(made, 0.0) == ""


def test_the_end_of_an_ejection_is_news_whatever_ends_it() -> None:
    made = outliers()
    serve(made)
    eject(made, "a", 0.0)
    tell(made, "b", UNREACHABLE)
    assert [type(each) for each in taken(made)] == [Ejection]
    tell(made, "a", *[SERVED] * NUM_TRIALS, now=BASE_S + 1)
    passed = taken(made)
    tell(made, "b", UNREACHABLE, now=BASE_S + 2)
    made.answered("b", asked_at_s=BASE_S + 3)
    answered = taken(made)
    eject(made, "c", BASE_S + 4)
    made.configure(OutlierSettings(enabled=False))

    assert passed == [Readmission("a")]
    assert answered == [Ejection("b", Cause.UNREACHABLE, UNREACHABLE_S), Readmission("b")]
    assert taken(made)[1:] == [Readmission("c", is_recovered=False)]


def test_news_that_nobody_asks_for_are_bounded() -> None:
    made = outliers()
    for number in range(2 * MAX_CHANGES):
        tell(made, "a", SERVED, UNREACHABLE, now=float(number))
        made.answered("a", asked_at_s=number + 0.5)

    assert len(made.ejections.changes) == MAX_CHANGES


# --- what attempts say ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoints", "address", "num_attempts", "expected"),
    [
        ("a", "", 0, {"a": SERVED}),
        ("a", "a", 1, {"a": SERVED}),
        ("a", "x", 1, {"x": SERVED}),
        ("a", "a", 2, {"a": SERVED}),
        ("ab", "b", 2, {"a": BROKEN, "b": SERVED}),
        ("ab", "", 2, {"a": BROKEN, "b": SERVED}),
        ("ab", "b", 1, {"b": SERVED}),
        ("ab", "x", 3, {"a": BROKEN, "b": BROKEN, "x": SERVED}),
    ],
)
def test_a_retry_says_that_the_attempt_before_it_broke(
    endpoints: str, address: str, num_attempts: int, expected: dict[str, Evidence]
) -> None:
    made = pick(endpoints=tuple(endpoints))

    assert judged_attempts(made, SERVED, address=address, num_attempts=num_attempts) == expected


# --- in any order ---------------------------------------------------------------------------

ADDRESSES = st.sampled_from("abcde")


@given(
    st.lists(st.tuples(ADDRESSES, st.sampled_from((SERVED, NONE)), st.floats(0, 1e4)), max_size=200)
)
def test_healthy_traffic_ejects_nobody(events: list[tuple[str, Evidence, float]]) -> None:
    made = outliers("abcde")
    for address, verdict, now in events:
        tell(made, address, verdict, now=now)

    assert not any(made.ejections.num.values())


class OutlierMachine(RuleBasedStateMachine):
    """Requests, our own calls, endpoints that come and go, and thresholds that change."""

    @initialize(ratio=st.sampled_from((0.0, 0.3, 0.5, 1.0)))
    def begin(self, ratio: float) -> None:
        self.now = 0.0
        self.addresses = "abcde"
        self.settings = OutlierSettings(max_ejected_ratio=ratio)
        self.made = Outliers(self.settings)
        self.made.set_endpoints(self.addresses)
        self.open: list[tuple[str, int]] = []

    @rule(address=ADDRESSES, num=st.integers(1, 6))
    def send(self, address: str, num: int) -> None:
        if address in self.addresses:
            self.open += [(address, self.made.picked(address, now=self.now)) for _ in range(num)]

    @rule(verdict=st.sampled_from(Evidence), num=st.integers(1, 12), is_newest=st.booleans())
    def end(self, verdict: Evidence, num: int, is_newest: bool) -> None:
        for _ in range(min(num, len(self.open))):
            address, trial = self.open.pop(-1 if is_newest else 0)
            self.made.ended(address, verdict, LIKE, now=self.now, trial=trial)

    @rule(seconds=st.sampled_from((0.5, 6.0, 31.0, 400.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(address=ADDRESSES, ago_s=st.sampled_from((0.0, 1.0)), is_back=st.booleans())
    def hear(self, address: str, ago_s: float, is_back: bool) -> None:
        if address in self.addresses:
            self.made.answered(address, asked_at_s=self.now - ago_s)
            if is_back:
                self.made.restarted(address, now=self.now)

    @rule(addresses=st.sets(ADDRESSES))
    def set_endpoints(self, addresses: set[str]) -> None:
        self.addresses = "".join(sorted(addresses))
        self.made.set_endpoints(self.addresses)
        self.open = [each for each in self.open if each[0] in addresses]

    @rule(ratio=st.sampled_from((0.2, 0.5)), enabled=st.booleans())
    def configure(self, ratio: float, enabled: bool) -> None:
        self.settings = replace(self.settings, max_ejected_ratio=ratio, enabled=enabled)
        self.made.configure(self.settings)

    @invariant()
    def no_more_than_the_share_is_ejected(self) -> None:
        share = self.settings.max_ejected_ratio if self.settings.enabled else 0
        num_ejected = len(ejected(self.made, self.now, self.addresses))
        assert num_ejected <= share * len(self.addresses)

    @invariant()
    def every_ejection_has_an_end_and_not_too_late_a_one(self) -> None:
        for address in self.addresses:
            assert end_s(self.made, address) <= self.now + MAX_S

    def teardown(self) -> None:
        """Whoever is ejected returns, once what is on trial has ended."""
        for address, trial in self.open:
            self.made.ended(address, NONE, LIKE, now=self.now, trial=trial)
        later = self.now + MAX_S + 1.0
        assert ejected(self.made, later, self.addresses) == ""
        for address in self.addresses:
            for _ in range(NUM_TRIALS):
                tell(self.made, address, SERVED, now=later)
            assert not self.made.picked(address, now=later)


OutlierMachine.TestCase.settings = settings(stateful_step_count=40)
TestOutliersInAnyOrder = OutlierMachine.TestCase


# --- 404s for models ---------------------------------------------------------------------------


def doubt(made: Outliers, address: str, num: int, *, at_s: float = 0.0, trial: int = 0) -> None:
    """So many 404s there, each of a source of its own."""
    for source in range(num):
        like = Like(("sql", "/v1"), 1_000 + source)
        made.ended(address, NOT_FOUND, like, model="sql", trial=trial, now=at_s)


def serving(num: int = NUM_PEERS) -> Outliers:
    """The others have served such requests."""
    made = outliers()
    for source in range(num):
        made.ended("b", SERVED, Like(("sql", "/v1"), source), now=0.0)
    return made


@pytest.mark.parametrize(("models", "is_ejected"), [({"sql", "x"}, True), ({"x"}, False)])
def test_404s_for_a_model_count_where_it_goes_on_being_listed(
    models: set[str], is_ejected: bool
) -> None:
    made = serving()
    doubt(made, "a", 8)
    at_first = is_out(made, "a", now=0.0)
    made.listed("a", models, asked_at_s=1.0, now=1.1)

    assert not at_first
    assert is_out(made, "a", now=1.1) is is_ejected


def test_404s_that_all_give_eject_nobody() -> None:
    made = serving(0)
    for each in "abc":
        doubt(made, each, 9)
        made.listed(each, {"sql"}, asked_at_s=1.0, now=1.0)

    assert not any(is_out(made, each, now=1.0) for each in "abc")


def test_a_list_that_was_asked_for_before_a_404_shows_nothing_of_it() -> None:
    made = serving()
    doubt(made, "a", 8, at_s=1.0)
    made.listed("a", {"sql"}, asked_at_s=0.5, now=1.5)
    before = is_out(made, "a", now=1.5)
    made.listed("a", {"sql"}, asked_at_s=1.5, now=1.6)

    assert not before
    assert is_out(made, "a", now=1.6)


def test_a_404_on_trial_fails_it_once_the_model_is_listed_again() -> None:
    made = serving()
    doubt(made, "a", 8)
    made.listed("a", {"sql"}, asked_at_s=1.0, now=1.0)
    now = 1.0 + BASE_S + 0.1
    trials = [made.picked("a", now=now) for _ in range(NUM_TRIALS)]
    was_out = is_out(made, "a", now=now)
    for source in range(NUM_PEERS):
        made.ended("b", SERVED, Like(("sql", "/v1"), source), now=now)
    doubt(made, "a", 1, at_s=now, trial=trials[0])
    made.listed("a", {"sql"}, asked_at_s=now + 1, now=now + 1)

    assert was_out
    assert made.ejections.num[Cause.FAILED_TRIAL] == 1


def test_of_many_404s_without_a_list_the_oldest_count_for_nothing() -> None:
    made = serving()
    doubt(made, "a", MAX_DOUBTS + 9)
    doubt(made, "gone", 1)

    assert len(made._records["a"].doubts) == MAX_DOUBTS


def test_a_pod_that_lists_a_model_and_answers_404_for_it_is_ejected() -> None:
    pool = fill(Pool(), 1, 2)
    for number in range(NUM_PEERS + 8):
        is_served, info = number < NUM_PEERS, request(body_bytes=number)
        made = pick(f"r-{number}", 2 if is_served else 1, info=info)
        pool.flights.start(made, now=1.0)
        verdict = SERVED if is_served else Evidence.NOT_FOUND
        pool.flights.finish(made.id, now=2.0, has_run=is_served, verdict=verdict)
    before = pool.snapshot(now=2.0).endpoints[0].is_ejected
    pool.record_models(address_of(1), cards("a"), now=3.0)

    assert not before
    assert pool.snapshot(now=3.0).endpoints[0].is_ejected


def test_a_404_to_a_request_without_a_model_is_no_evidence() -> None:
    pool = Pool()
    pool.set_endpoints([endpoint(1)])
    made = pick(info=request(None, model=""))
    pool.flights.start(made, now=1.0)
    pool.flights.finish(made.id, now=2.0, verdict=Evidence.NOT_FOUND)

    assert not pool.outliers._records[address_of(1)].doubts


# --- answers that are errors, suspects, and what was sent before ----------------------------


@pytest.mark.parametrize(
    ("num_bytes", "others_bytes", "num_others", "expected"),
    [
        (138, 700, 10, True),
        (138, 700, 9, False),  # too few to say
        (138, 200, 10, False),  # they are nearly as short
        (500, 100_000, 10, True),
        (1024, 100_000, 10, False),  # too long for an error
    ],
)
def test_an_answer_far_shorter_than_those_of_others_is_hollow(
    num_bytes: int, others_bytes: int, num_others: int, expected: bool
) -> None:
    made = outliers()
    for number in range(num_others):
        made.ended("b", SERVED, Like("sql", number), now=0.0, num_bytes=others_bytes)
    for number in range(50):  # its own say nothing
        made.ended("a", SERVED, Like("sql", -number), now=0.0, num_bytes=num_bytes)

    assert made.is_hollow("a", "sql", num_bytes) is expected
    assert not made.is_hollow("a", "base", num_bytes)
    assert not made.is_hollow("gone", "sql", num_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "others_bytes", "num_others", "expected"),
    [
        (138, 700, 10, True),
        (138, 700, 9, False),  # too few to say
        (138, 200, 10, False),  # they are nearly as short
        (256, 100_000, 10, False),  # it may be a text
    ],
)
def test_a_text_as_short_as_an_error_is_hollow_whatever_model_others_had(
    num_bytes: int, others_bytes: int, num_others: int, expected: bool
) -> None:
    made = outliers()
    for number in range(num_others):
        made.ended("b", SERVED, Like(f"{number}", number), now=0.0, num_bytes=others_bytes)

    assert made.is_hollow("a", "sql", num_bytes, is_text=True) is expected
    assert not made.is_hollow("a", "sql", num_bytes)


def test_a_text_as_short_as_those_that_others_gave_to_its_kind_is_not_hollow() -> None:
    made = outliers()
    for number in range(10):
        made.ended("b", SERVED, Like("sql", number), now=0.0, num_bytes=200)
    for number in range(1000):
        made.ended("b", SERVED, Like("base", number), now=0.0, num_bytes=9000)

    assert not made.is_hollow("a", "sql", 200, is_text=True)
    assert made.is_hollow("a", "other", 200, is_text=True)


def is_suspect(made: Outliers, address: str, *, now: float) -> bool:
    return made.standing(address, now=now)[2]


def test_a_suspect_gets_single_requests_after_ever_longer_pauses_until_it_serves_one() -> None:
    made, now, pauses = outliers(), 0.0, []
    serve(made)
    tell(made, "a", *[FAILED] * 2, source=-1)
    assert not is_suspect(made, "a", now=0.0)
    for _ in range(8):
        tell(made, "a", FAILED, source=-1, now=now)
        pauses.append(made._records["a"].suspect_s - now)
        assert is_suspect(made, "a", now=now)
        now += pauses[-1] + 0.01
        assert not is_suspect(made, "a", now=now)
        made.picked("a", now=now)
        assert is_suspect(made, "a", now=now)  # one at a time
        serve(made, now=now)
    tell(made, "a", SERVED, now=now)

    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[MAX_SUSPECT_S] * 2])
    assert not is_suspect(made, "a", now=now)
    assert not any(made.ejections.num.values())


def test_no_more_than_the_share_is_suspect_and_nobody_where_others_fail_too() -> None:
    few, all_of_them = outliers("abcd"), outliers("abcd")
    for address in "abcd":
        tell(few, address, *[FAILED] * 3, source=-1)
    for _ in range(9):
        for address in "abcd":
            tell(all_of_them, address, FAILED)

    assert [is_suspect(few, each, now=0.0) for each in "abcd"] == [True, True, False, False]
    assert not any(is_suspect(all_of_them, each, now=9.0) for each in "abcd")


def send_and_end(
    made: Outliers, verdict: Evidence, sent_at_s: float, outlived_s: float, now: float
) -> None:
    like = Like("sql", next(SOURCES))
    made.ended("a", verdict, like, now=now, sent_at_s=sent_at_s, outlived_s=outlived_s)


@pytest.mark.parametrize(("outlived_s", "expected"), [(-1.0, "a"), (5.0, "")])
def test_answers_to_what_was_sent_before_do_not_hide_that_all_since_has_failed(
    outlived_s: float, expected: str
) -> None:
    """Long answers go on while new requests fail at once; where one of these lives on, too, it is
    not all that fails."""
    made = outliers()
    for number in range(NUM_PEERS):
        made.ended("b", SERVED, Like("sql", -number), now=4.0, sent_at_s=number / 10)
    for number in range(MIN_BESIDE):
        made.ended("b", SERVED, Like("sql", -number), now=5.1, sent_at_s=5.0)
    for number in range(6):
        send_and_end(made, FAILED, 5.0 + number / 10, outlived_s, now=5.1 + number / 10)
        send_and_end(made, SERVED, number / 10, -inf, now=5.1 + number / 10)

    assert ejected(made, 6.0) == expected


def test_what_others_have_not_ended_since_a_row_began_ejects_nobody() -> None:
    """All may have begun to fail at the same moment, and one of them shows it first."""
    made = outliers()
    for number in range(4 * NUM_PEERS):
        made.ended("bc"[number % 2], SERVED, Like("sql", -number), now=4.0, sent_at_s=3.0)
    for number in range(9):
        send_and_end(made, BROKEN, 5.0 + number / 10, -inf, now=5.1 + number / 10)
    before = ejected(made, 6.0)
    for number in range(MIN_BESIDE):
        made.ended("b", SERVED, Like("sql", -number), now=6.0, sent_at_s=5.5)
    send_and_end(made, BROKEN, 6.0, -inf, now=6.1)

    assert (before, ejected(made, 6.1)) == ("", "a")


def test_one_is_judged_again_when_others_have_served_what_they_were_sent_meanwhile() -> None:
    made = outliers()
    for number in range(NUM_PEERS):
        made.ended("b", SERVED, Like("sql", -number), now=4.0, sent_at_s=3.0)
    for number in range(6):
        send_and_end(made, FAILED, 5.0 + number / 10, -inf, now=5.1 + number / 10)
    found = []
    for sent_at_s in (4.9, 6.0, *[5.2] * MIN_BESIDE):  # before, after, and meanwhile
        found.append(ejected(made, 7.0))
        made.ended("c", SERVED, Like("sql", -1), now=7.0, sent_at_s=sent_at_s)

    assert found == [""] * len(found)
    assert ejected(made, 7.0) == "a"


def test_one_that_has_served_or_left_meanwhile_is_not_judged_again() -> None:
    served, left = outliers(), outliers()
    for made in (served, left):
        for number in range(NUM_PEERS):
            made.ended("b", SERVED, Like("sql", -number), now=4.0, sent_at_s=3.0)
        for number in range(6):
            send_and_end(made, FAILED, 5.0 + number / 10, -inf, now=5.1 + number / 10)
    send_and_end(served, SERVED, 5.6, -inf, now=6.0)
    left.set_endpoints("bc")
    for made in (served, left):
        for _ in range(NUM_PEERS):
            made.ended("c", SERVED, Like("sql", -1), now=7.0, sent_at_s=5.2)

    assert [ejected(served, 7.0), ejected(left, 7.0, "bc")] == ["", ""]
    assert not served._rows
    assert not left._rows


def test_one_that_fails_as_others_do_is_judged_again_a_bounded_number_of_times() -> None:
    made = outliers()
    for number in range(NUM_PEERS):
        made.ended("b", FAILED, Like("sql", -number), now=4.0, sent_at_s=3.0)
        made.ended("b", SERVED, Like("sql", -number), now=4.0, sent_at_s=3.0)
    for number in range(6):
        send_and_end(made, FAILED, 5.0 + number / 10, -inf, now=5.1 + number / 10)
    for _ in range(2 * NUM_BESIDE):
        made.ended("c", SERVED, Like("sql", -1), now=5.6, sent_at_s=5.2)

    assert made._records["a"].num_again == NUM_BESIDE
    assert ejected(made, 5.6) == ""


@pytest.mark.parametrize(("num_broken", "expected"), [(1, "a"), (2, "")])
def test_answers_to_what_was_sent_before_do_not_hide_breaks_that_others_hardly_have(
    num_broken: int, expected: str
) -> None:
    """Streams of which some still go on: they were sent to it like the others."""
    made = outliers()
    for number in range(NUM_PEERS):
        verdict = BROKEN if number < num_broken else SERVED
        made.ended("b", verdict, Like("sql", -number), now=4.0, sent_at_s=number / 10)
    for number in range(MIN_BESIDE):
        made.ended("b", SERVED, Like("sql", -number), now=5.1, sent_at_s=5.0)
    for number in range(6):
        send_and_end(made, BROKEN, 5.0 + number / 10, 5.0, now=5.1 + number / 10)
        send_and_end(made, SERVED, number / 10, -inf, now=5.1 + number / 10)

    assert ejected(made, 6.0) == expected


def test_a_rate_is_not_compared_with_those_of_others_that_got_nothing_meanwhile() -> None:
    """One of two gets nothing for a while, and all of a flood of bad ones comes to the other."""
    made = outliers()
    for number in range(200):
        made.ended("bc"[number % 2], SERVED, Like("sql", -number), now=4.0, sent_at_s=3.0)
        made.ended("a", SERVED, Like("sql", -number), now=4.0, sent_at_s=3.0)
    for number in range(90):
        verdict = FAILED if number % 3 else SERVED
        send_and_end(made, verdict, 5.0 + number / 50, -inf, now=5.1 + number / 50)

    assert ejected(made, 7.0) == ""


def test_short_answers_do_not_end_a_row_where_it_is_unknown_whether_they_are_errors() -> None:
    made = outliers()
    serve(made)
    for number in range(6):
        tell(made, "a", FAILED)
        made.ended("a", SERVED, Like("rare", number), now=0.0, num_bytes=HOLLOW_BYTES - 1)

    assert ejected(made, 0.0) == "a"


def test_one_where_nobody_listens_is_back_when_the_same_befalls_another() -> None:
    made = outliers()
    serve(made)
    tell(made, "a", *[UNREACHABLE] * 8)
    before = ejected(made, 0.0)
    tell(made, "c", *[UNREACHABLE] * 12)

    assert (before, made.ejections.num[Cause.CONSECUTIVE_FAILURES]) == ("a", 1)
    assert "a" not in ejected(made, 0.0)


def test_beyond_its_kinds_an_answer_counts_neither_as_one_nor_by_its_length() -> None:
    made = outliers()
    for number in range(MAX_OWN_KINDS):
        tell(made, "b", SERVED, kind=f"kind-{number}")
    for number in range(20):
        made.ended("b", SERVED, Like("sql", number), now=0.0, num_bytes=100)

    assert not made.is_hollow("a", "sql", 100)
    for number in range(10):
        made.ended("c", SERVED, Like("sql", number), now=0.0)
    assert made.is_hollow("a", "sql", 100)


def test_a_break_that_others_have_too_leaves_nobody_in_doubt() -> None:
    """Requests that make every endpoint close the connection do not make them all wait."""
    made = outliers()
    tell(made, "a", BROKEN)
    alone = made.standing("a", now=0.0)[1]
    for _ in range(3):
        for address in "bc":
            tell(made, address, BROKEN)
    made.answered("a", asked_at_s=0.5)
    tell(made, "a", BROKEN, now=1.0)

    assert (alone, made.standing("a", now=1.0)[1]) == (True, False)
