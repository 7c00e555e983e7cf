"""The state that routing stands on: each fact alone, and all of them in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from msgspec.structs import replace

from extproc.costs import Costs
from extproc.learned.ejections import Cause, OutlierSettings
from extproc.learned.evidence import Evidence
from extproc.pods.accounting import Accounting
from extproc.pods.foreign import ALONE_S, STEADY_S
from extproc.pods.listedmodels import MAX_SILENCES
from extproc.pods.podreports import RESTART_TOLERANCE_S
from extproc.pods.pool import InFlight, Pool, PoolSettings
from extproc.pods.serverflags import ServerFlags
from extproc.types import Endpoint, EndpointView, LoadReport, ModelCard, Pick
from tests.builders import (
    BASE,
    adapter_card,
    address,
    base_card,
    by_pages,
    cards,
    endpoint,
    fill,
    pick,
    report,
    request,
)
from tests.otherrouters import OtherRouter
from tests.strategies import ADAPTERS, reports

EXPIRY_S = 2.0


def pool(*numbers: int, **fields: Any) -> Pool:
    made = Pool(PoolSettings(report_expiry_s=EXPIRY_S, **fields))
    made.set_endpoints(endpoint(number) for number in numbers or (1,))
    return made


def view(pool: Pool, *, now: float = 0.0) -> EndpointView:
    """The only endpoint there is."""
    [only] = pool.snapshot(now=now).endpoints
    return only


def start(pool: Pool, id: str = "pick-1", adapter: str | None = "a", *, now: float = 0.0) -> Pick:
    made = pick(id, info=request(adapter, request_id=f"request-of-{id}"))
    pool.flights.start(made, now=now)
    return made


# --- endpoints ------------------------------------------------------------------------------


def test_a_snapshot_is_sorted_by_address_and_names_the_nameless() -> None:
    made = Pool()
    made.set_endpoints([endpoint(2, name="pod-b"), endpoint(1)])

    snapshot = made.snapshot(now=3.0)
    assert [(v.address, v.name) for v in snapshot.endpoints] == [
        (address(1), address(1)),
        (address(2), "pod-b"),
    ]
    assert snapshot.now == 3.0


def test_a_snapshot_says_how_many_routers_there_are() -> None:
    made = pool()
    before = made.snapshot(now=0.0).num_routers
    made.flights.set_num_routers(3)

    assert (before, made.snapshot(now=0.0).num_routers) == (1, 3)


def test_an_endpoint_that_stays_keeps_its_state_and_takes_its_new_description() -> None:
    made = pool()
    start(made)
    made.set_endpoints([endpoint(1, is_ready=False, name="pod")])

    seen = view(made)
    assert (seen.num_in_flight, seen.is_ready, seen.name) == (1, False, "pod")


def test_an_endpoint_that_left_and_came_back_starts_from_zero() -> None:
    made = pool()
    start(made)
    made.record_models(address(1), cards("a"), now=0.0)
    made.set_endpoints([])
    made.set_endpoints([endpoint(1)])

    assert (view(made).num_in_flight, view(made).registered) == (0, None)
    assert len(made.flights) == 1
    assert made.flights.finish("pick-1", now=1.0) is not None
    assert (view(made).num_in_flight, len(made.flights)) == (0, 0)


def test_what_is_told_of_a_strange_endpoint_is_ignored() -> None:
    made = pool()
    strange = address(9)
    made.record_models(strange, cards("x"), now=0.0)
    made.record_orca(strange, (0.5, 1))

    assert made.record_report(strange, report(), taken_at_s=0.0) is False
    assert made.flights.reconcile(strange, by_pages(0.0), now=0.0) == []
    assert made.models.by_name == {}
    with pytest.raises(KeyError):
        made.flights.start(pick(number=9), now=0.0)


# --- reports --------------------------------------------------------------------------------


def test_an_endpoint_without_a_report_is_unknown_not_idle() -> None:
    seen = view(pool())

    assert (seen.is_known, seen.reported_at_s, seen.num_pending) == (False, None, 0)


@pytest.mark.parametrize("failure", ["", "no report", "no models", "no connection"])
def test_a_report_that_nobody_asked_to_replace_expires_later_unless_a_call_fails(
    failure: str,
) -> None:
    made, rest_s = pool(1), 5.0
    made.record_report(address(1), report(), taken_at_s=1.0, rest_s=rest_s)
    due = view(made, now=1.0).is_known
    if failure == "no report":
        made.record_late(address(1))
    elif failure == "no models":
        made.record_silence(address(1))
    elif failure == "no connection":
        made.record_unreachable(address(1))
    in_time = view(made, now=1.0 + EXPIRY_S).is_known
    late = view(made, now=1.0 + rest_s + EXPIRY_S).is_known

    assert (due, in_time, late) == (True, True, not failure)
    assert not view(made, now=1.1 + rest_s + EXPIRY_S).is_known


def test_of_a_strange_endpoint_no_report_is_late_or_as_expected() -> None:
    made = pool(1)
    made.record_late(address(9))

    assert not Accounting(made, "r").is_expected(address(9), now=0.0)


def test_a_report_is_trusted_until_it_expires_and_a_new_one_is_trusted_again() -> None:
    made = pool()
    made.record_report(address(1), report(num_running=3, max_loras=4), taken_at_s=1.0)
    fresh, old = view(made, now=1.0 + EXPIRY_S), view(made, now=1.1 + EXPIRY_S)
    made.record_report(address(1), report(num_running=5), taken_at_s=9.0)

    assert (fresh.is_known, fresh.num_running, fresh.num_foreign) == (True, 3, 3)
    assert (old.is_known, old.num_running, old.num_foreign) == (False, 0, 0)
    assert (old.reported_at_s, old.max_loras) == (1.0, 4)
    assert (view(made, now=9.0).is_known, view(made, now=9.0).num_running) == (True, 5)


def test_a_report_fills_the_view() -> None:
    made = pool(max_loras=2)
    made.record_report(
        address(1),
        report(num_running=2, num_waiting=1, num_deferred=1, kv_usage_ratio=0.25, max_loras=8),
        taken_at_s=0.0,
    )

    seen = view(made)
    assert (seen.num_running, seen.num_waiting, seen.num_deferred) == (2, 1, 1)
    assert (seen.kv_usage_ratio, seen.max_loras, seen.num_foreign) == (0.25, 8, 3)


def test_slots_are_configured_where_no_report_says_them() -> None:
    made = pool(max_loras=2)
    made.record_report(address(1), report(), taken_at_s=0.0)

    assert view(made).max_loras == 2


# --- what an engine says of itself -----------------------------------------------------------


def test_an_endpoint_that_says_that_it_sleeps_is_not_ready_until_it_says_otherwise() -> None:
    made = pool()
    made.record_models(address(1), cards("a"), now=0.0)
    made.record_report(address(1), report(is_asleep=True), taken_at_s=0.0)
    asleep, late = view(made), view(made, now=EXPIRY_S + 1)
    made.record_report(address(1), report(), taken_at_s=9.0)

    assert (asleep.is_ready, asleep.is_asleep, asleep.is_known) == (False, True, True)
    assert (late.is_ready, late.is_asleep, late.is_known) == (False, True, False)
    assert (view(made, now=9.0).is_ready, view(made, now=9.0).is_asleep) == (True, False)


def test_an_endpoint_whose_engine_is_dead_is_not_ready_until_it_is_alive() -> None:
    made = pool()
    assert made.record_health(address(1), is_dead=True, asked_at_s=1.0)
    assert not made.record_health(address(1), is_dead=True, asked_at_s=2.0)
    dead = view(made, now=2.0)
    assert made.record_health(address(1), is_dead=False, asked_at_s=3.0)

    assert (dead.is_ready, dead.died_at_s) == (False, 2.0)
    assert (view(made, now=3.0).is_ready, view(made, now=3.0).died_at_s) == (True, None)
    assert not made.record_health(address(9), is_dead=True, asked_at_s=4.0)


def test_what_a_process_said_of_itself_goes_with_it() -> None:
    made = pool()
    assert made.lacks_version(address(1))
    made.record_report(address(1), report(process_start_wall_s=1.0), taken_at_s=0.0)
    made.record_health(address(1), is_dead=True, asked_at_s=1.0)
    made.record_version(address(1), "0.32.0", asked_at_s=1.0)
    assert not made.lacks_version(address(1))
    made.record_report(address(1), report(process_start_wall_s=9.0), taken_at_s=2.0)
    assert (view(made, now=2.0).is_ready, made.lacks_version(address(1))) == (True, True)

    made.record_health(address(1), is_dead=True, asked_at_s=1.5)
    made.record_version(address(1), "0.32.0", asked_at_s=1.5)
    made.record_version(address(9), "0.32.0", asked_at_s=3.0)

    assert (view(made, now=2.0).is_ready, made.lacks_version(address(1))) == (True, True)
    assert not made.lacks_version(address(9))


def test_a_version_that_mixes_weights_is_told_to_who_loads_adapters_while_it_counts() -> None:
    made = pool(safe_loads_since=(0, 26, 0))
    start(made)
    made.record_version(address(1), "0.25.1", asked_at_s=0.0)
    mixing, state = view(made), made.pod_state(address(1), now=0.0)
    made.configure(PoolSettings())

    assert (mixing.engine_version, mixing.mixes_weights) == ("0.25.1", True)
    assert state is not None
    assert "0.25.1" in state.why_no_load
    [allowed] = made.pod_states(now=0.0)
    assert (allowed.unsafe_version, allowed.why_no_load) == ("", "")
    assert made.pod_state(address(9), now=0.0) is None


def test_another_expiry_holds_at_once() -> None:
    made = pool()
    made.record_report(address(1), report(), taken_at_s=0.0)
    before = view(made, now=1.0).is_known
    made.configure(PoolSettings(report_expiry_s=0.5))

    assert (before, view(made, now=1.0).is_known) == (True, False)


def test_a_load_report_of_a_response_is_newer_than_the_scrape() -> None:
    made = pool()
    made.record_orca(address(1), (0.9, 9))  # nothing to lay it over: still unknown
    assert view(made).is_known is False
    made.record_report(address(1), report(num_running=2, num_waiting=1), taken_at_s=0.0)
    before = view(made)
    made.record_orca(address(1), (0.5, 4))

    assert (before.kv_usage_ratio, before.num_waiting) == (0.0, 1)
    assert (view(made).kv_usage_ratio, view(made).num_waiting) == (0.5, 4)


@pytest.mark.parametrize(
    ("start_wall_s", "is_restart"),
    [(100.0, False), (100.0 + RESTART_TOLERANCE_S, False), (102.0, True), (90.0, True)],
)
def test_another_start_time_is_a_restart_and_forgets_what_the_process_held(
    start_wall_s: float, is_restart: bool
) -> None:
    made = pool(max_loras=2)
    made.record_report(address(1), report(process_start_wall_s=100.0), taken_at_s=0.0)
    made.record_models(address(1), cards("a"), now=0.0)
    held = view(made).gpu_adapters

    again = report(process_start_wall_s=start_wall_s)
    assert made.record_report(address(1), again, taken_at_s=1.0) is is_restart
    seen = view(made, now=1.0)
    assert held == ("a",)
    assert seen.gpu_adapters == (() if is_restart else held)
    assert (seen.registered is None, made.model("a") is None) == (is_restart, is_restart)


@pytest.mark.parametrize(("before", "after"), [(None, 5.0), (5.0, None)])
def test_without_two_start_times_there_is_no_telling_a_restart(
    before: float | None, after: float | None
) -> None:
    made = pool()
    made.record_report(address(1), report(process_start_wall_s=before), taken_at_s=0.0)

    again = report(process_start_wall_s=after)
    assert made.record_report(address(1), again, taken_at_s=1.0) is False


@pytest.mark.parametrize(("start_wall_s", "is_new"), [(None, True), (100.0, False), (200.0, True)])
def test_one_that_can_be_reached_again_has_nothing_until_it_lists_it_unless_it_is_the_same_process(
    start_wall_s: float | None, is_new: bool
) -> None:
    before = None if start_wall_s is None else 100.0
    made = pool(max_loras=2)
    made.record_report(address(1), report(process_start_wall_s=before), taken_at_s=0.0)
    made.record_models(address(1), cards("a"), now=0.0)
    made.record_unreachable(address(1))

    again = report(process_start_wall_s=start_wall_s)
    assert made.record_report(address(1), again, taken_at_s=5.0) is is_new
    assert (view(made, now=5.0).registered is None) is is_new
    assert (view(made, now=5.0).gpu_adapters == ()) is is_new
    made.record_models(address(1), cards("b"), now=5.1, asked_at_s=5.0)
    assert view(made, now=5.1).registered == frozenset({BASE, "b"})
    assert made.record_report(address(1), again, taken_at_s=5.2) is False


# --- models ---------------------------------------------------------------------------------


def test_a_list_that_is_the_same_counts_as_an_answer_unless_it_was_forgotten() -> None:
    made = pool(max_loras=2)
    where, process = address(1), report(process_start_wall_s=100.0)
    found = [made.record_same_models(at, now=0.0, asked_at_s=0.0) for at in (where, address(9))]
    made.record_report(where, process, taken_at_s=0.0)
    assert made.record_models(where, cards("a"), now=0.0)
    assert not made.record_models(where, cards("a"), now=0.0)
    made.record_silence(where)
    made.record_late(where)
    before = view(made, now=9.0).is_silent
    found.append(made.record_same_models(where, now=9.0, asked_at_s=9.0))
    after = view(made, now=9.0)
    made.record_unreachable(where)
    found.append(made.record_same_models(where, now=10.0, asked_at_s=10.0))

    assert found == [False, False, True, False]
    assert (before, after.is_silent, after.registered) == (True, False, frozenset({BASE, "a"}))


def test_models_are_registered_where_they_are_listed_and_known_to_the_pool() -> None:
    made = pool(1, 2)
    made.record_models(address(1), cards("a"), now=0.0)
    made.record_models(address(2), cards("b"), now=0.0)

    first, second = made.snapshot(now=0.0).endpoints
    assert first.registered == frozenset({BASE, "a"})
    assert second.registered == frozenset({BASE, "b"})
    assert (first.has_registered("b"), second.has_registered("b")) == (False, True)
    assert not view(pool()).has_registered("b")  # never asked
    assert sorted(card.id for card in made.models.by_name.values()) == ["a", "b", BASE]
    assert made.model("b") == adapter_card("b")
    assert made.model("nope") is None


def test_a_model_is_gone_with_the_last_endpoint_that_lists_it() -> None:
    made = pool(1, 2)
    for number in (1, 2):
        made.record_models(address(number), cards("a"), now=0.0)
    made.set_endpoints([endpoint(1)])
    still = made.model("a")
    made.record_models(address(1), cards(), now=1.0)

    assert (still, made.model("a")) == (adapter_card("a"), None)


def test_a_card_is_kept_until_the_model_behind_the_name_is_another() -> None:
    """vLLM's `created` is the time of its answer; a client should not see it change."""
    made = pool()
    for created, root in ((1, "x"), (2, "x"), (3, "y")):
        card = adapter_card("a", created_wall_s=created, root=root)
        made.record_models(address(1), [base_card(created_wall_s=created), card], now=0.0)
        if created == 2:
            same = made.model("a")

    assert same == adapter_card("a", created_wall_s=1, root="x")
    assert made.model("a") == adapter_card("a", created_wall_s=3, root="y")
    assert made.model(BASE) == base_card(created_wall_s=1)


def test_names_that_vanish_are_a_restart_where_there_is_no_start_time() -> None:
    made = pool(max_loras=4)
    made.record_models(address(1), cards("a", "b"), now=0.0)
    start(made, adapter="b", now=1.0)
    made.flights.finish("pick-1", now=2.0)
    assert view(made).gpu_adapters == ("b", "a")
    made.record_models(address(1), cards("a"), now=3.0)
    made.record_models(address(1), cards("a", "b"), now=4.0)

    assert view(made).gpu_adapters == ("b", "a")  # b was loaded last, a at the start
    assert view(made).registered == frozenset({BASE, "a", "b"})


def test_one_that_can_be_reached_again_holds_what_it_began_with_where_there_is_no_start_time() -> (
    None
):
    made = pool(max_loras=1)
    made.record_models(address(1), cards("a", "b"), now=0.0)
    start(made, adapter="a", now=1.0)
    made.flights.finish("pick-1", now=2.0)
    held = view(made).gpu_adapters
    made.record_unreachable(address(1))
    made.record_models(address(1), cards("a", "b"), now=3.0)

    assert held == ("a",)
    assert view(made).gpu_adapters == ("b",)
    assert view(made).registered == frozenset({BASE, "a", "b"})


def test_names_that_vanish_are_an_unload_where_the_start_time_is_the_same() -> None:
    made = pool(max_loras=4)
    made.record_report(address(1), report(process_start_wall_s=1.0), taken_at_s=0.0)
    made.record_models(address(1), cards("a", "b"), now=0.0)
    start(made, adapter="b", now=1.0)
    made.flights.finish("pick-1", now=2.0)
    made.record_models(address(1), cards("b"), now=3.0)

    assert view(made).gpu_adapters == ("b",)
    assert view(made).registered == frozenset({BASE, "b"})


def test_a_pod_does_not_say_what_a_name_is_for_the_others() -> None:
    """One that lists everybody's adapter as a base model is alone with it."""
    for liar in (1, 3):
        made = pool(1, 2, 3)
        for number in (1, 2, 3):
            lie = ModelCard("a", root="/mine", owned_by="me")
            made.record_models(address(number), [lie] if number == liar else cards("a"), now=0.0)

        assert made.model("a") == adapter_card("a")


@pytest.mark.parametrize(("numbers", "is_adapter"), [((1,), False), ((1, 2), True)])
def test_where_as_many_say_so_a_name_is_an_adapter(
    numbers: tuple[int, ...], is_adapter: bool
) -> None:
    made = pool(*numbers)
    made.record_models(address(1), [ModelCard("a")], now=0.0)
    made.record_models(address(2), cards("a"), now=0.0)

    card = made.model("a")
    assert card is not None
    assert (card.parent is not None) is is_adapter


def test_when_those_of_one_mind_leave_the_others_are_believed() -> None:
    made = pool(1, 2, 3)
    for number in (1, 2):
        made.record_models(address(number), cards("a"), now=0.0)
    made.record_models(address(3), [ModelCard("a")], now=0.0)
    made.record_models(address(1), cards(), now=1.0)
    made.set_endpoints([endpoint(3)])

    assert made.model("a") == ModelCard("a")


@pytest.mark.parametrize(("said_to_be", "counted"), [("a", 0), (None, 1)])
def test_what_a_request_counts_as_on_an_endpoint_is_by_its_own_list(
    said_to_be: str | None, counted: int
) -> None:
    """The others say otherwise, and that may change while the request runs."""
    made = pool()
    own = [ModelCard("a")] if said_to_be else cards("a")
    made.record_models(address(1), own, now=0.0)
    made.flights.start(pick("x", info=request(said_to_be, model="a")), now=0.0)
    assert (view(made).num_pending, view(made).pending("a")) == (1, counted)

    made.record_models(address(1), cards("a") if said_to_be else [ModelCard("a")], now=1.0)
    made.flights.finish("x", now=2.0)
    assert (view(made).num_pending, view(made).pending("a")) == (0, 0)


# --- who is there, and who fails -------------------------------------------------------------


def refuses(pool: Pool, number: int = 1, *, now: float = 0.0) -> None:
    """A request there finds no connection."""
    pool.flights.start(pick("refused", number), now=now)
    pool.flights.finish("refused", now=now, has_run=False, verdict=Evidence.UNREACHABLE)


def test_that_nobody_is_there_outlives_the_reports_until_a_call_is_answered() -> None:
    for answer in ("report", "models"):
        made = pool()
        made.record_report(address(1), report(), taken_at_s=0.0)
        made.record_unreachable(address(1))
        made.record_unreachable(address(9))
        assert view(made, now=0.5).is_unreachable
        assert view(made, now=3600.0).is_unreachable
        if answer == "report":
            made.record_report(address(1), report(), taken_at_s=3601.0)
        else:
            made.record_models(address(1), cards(), now=3601.0)
        assert not view(made, now=3601.0).is_unreachable


def test_an_endpoint_that_refuses_is_ejected_until_it_answers_a_call_of_ours_made_since() -> None:
    made = pool(1, 2)
    refuses(made, now=1.0)

    def ejected(now: float) -> bool:
        return made.snapshot(now=now).endpoints[0].is_ejected

    made.record_models(address(1), cards(), now=1.2, asked_at_s=0.9)  # may be from before
    assert ejected(1.2)
    made.record_report(address(1), report(), taken_at_s=1.4, asked_at_s=1.3)
    assert not ejected(1.4)


def test_an_ejection_ends_in_the_snapshot_when_its_time_is_over() -> None:
    made = pool(1, 2)
    refuses(made)

    seen = [made.snapshot(now=now).endpoints[0].is_ejected for now in (0.0, 5.0, 5.1)]
    assert seen == [True, True, False]


def test_a_new_process_is_tried_at_once_and_one_that_restarts_without_end_is_not() -> None:
    made = pool(1, 2, 3)
    made.record_report(address(1), report(process_start_wall_s=1.0), taken_at_s=0.0)

    def is_tried_after_a_restart(at_s: float) -> bool:
        for _ in range(5):
            refuses(made, now=at_s)
        start = report(process_start_wall_s=1000 + at_s)
        made.record_report(address(1), start, taken_at_s=at_s + 1)
        return not made.snapshot(now=at_s + 1.1).endpoints[0].is_ejected

    assert is_tried_after_a_restart(20.0)
    assert not is_tried_after_a_restart(24.0)
    assert is_tried_after_a_restart(100.0)


def test_what_is_there_again_after_it_was_gone_is_tried_at_once() -> None:
    made = pool(1, 2)
    for _ in range(5):
        refuses(made)
    made.record_unreachable(address(1))
    made.record_report(address(1), report(), taken_at_s=3.0, asked_at_s=2.9)

    assert not made.snapshot(now=3.1).endpoints[0].is_ejected
    assert made.outliers.ejections.num[Cause.CONSECUTIVE_FAILURES] == 1


def test_a_retry_says_that_the_endpoint_before_it_broke_and_a_call_tells_whether_it_is_there() -> (
    None
):
    """Envoy's log does not say which of its attempts found nobody, and which were cut."""
    made = pool(1, 2, 3)
    made.flights.start(pick("x", endpoints=(address(1), address(2))), now=0.0)
    made.flights.finish("x", now=0.1, verdict=Evidence.SERVED, address=address(2), num_attempts=2)
    made.flights.start(pick("y", endpoints=(address(3), "gone:1")), now=0.0)
    made.flights.finish("y", now=0.1, verdict=Evidence.UNREACHABLE, num_attempts=2)

    def gone(now: float) -> list[bool]:
        return [each.is_gone for each in made.snapshot(now=now).endpoints]

    assert gone(0.1) == [True, False, True]
    assert not any(each.is_ejected for each in made.snapshot(now=0.1).endpoints)
    made.record_models(address(1), cards(), now=0.3, asked_at_s=0.2)
    made.record_unreachable(address(3))
    assert gone(0.3) == [False, False, True]
    assert made.snapshot(now=0.3).endpoints[2].is_unreachable


def test_a_request_that_ends_after_its_endpoint_left_does_not_eject_the_one_that_came() -> None:
    made = pool(1, 2)
    start(made)
    made.set_endpoints([endpoint(2)])
    made.set_endpoints([endpoint(1), endpoint(2)])
    made.flights.finish("pick-1", now=1.0, verdict=Evidence.UNREACHABLE)

    assert not any(each.is_ejected for each in made.snapshot(now=1.0).endpoints)


def test_a_trial_ends_with_its_request_whatever_becomes_of_that() -> None:
    made = pool(1, 2)
    refuses(made)
    for number in range(3):
        start(made, f"trial-{number}", now=6.0)
    assert made.snapshot(now=6.0).endpoints[0].is_ejected
    made.flights.move("trial-0", address(2), now=6.5)
    made.flights.expire(now=7.0, max_age_s=0.5)

    assert not made.snapshot(now=7.0).endpoints[0].is_ejected


def test_detection_follows_its_settings() -> None:
    made = pool(1, 2)
    refuses(made)
    made.configure(PoolSettings(), OutlierSettings(enabled=False))

    assert not made.snapshot(now=0.0).endpoints[0].is_ejected


# --- accounting -----------------------------------------------------------------------------


def test_a_pick_counts_from_start_to_finish_and_finishes_once() -> None:
    made = pool()
    begun = start(made, now=1.0)
    during = view(made)

    finished = made.flights.finish("pick-1", now=4.0)

    assert isinstance(finished, InFlight)
    assert (finished.pick, finished.started_at_s) == (begun, 1.0)
    assert (during.num_in_flight, during.num_pending, during.pending("a")) == (1, 1, 1)
    assert (view(made).num_pending, view(made).num_active_adapters) == (0, 0)
    assert made.flights.finish("pick-1", now=5.0) is None
    assert made.flights.finish("never", now=5.0) is None


def test_the_base_model_is_pending_but_no_adapter() -> None:
    made = pool()
    start(made, adapter=None)

    assert (view(made).num_pending, view(made).num_active_adapters) == (1, 0)
    assert made.flights.finish("pick-1", now=1.0) is not None
    assert view(made).num_pending == 0


def test_several_picks_of_one_adapter_are_told_apart() -> None:
    made = pool()
    start(made, "one")
    start(made, "two")
    made.flights.finish("one", now=1.0)

    assert view(made).pending_by_adapter == {"a": 1}


def test_a_pick_is_found_by_its_request_id_while_it_is_in_flight() -> None:
    made = pool()
    start(made)
    assert made.flights.pick_id_of("request-of-pick-1") == "pick-1"
    made.flights.finish("pick-1", now=1.0)

    assert made.flights.pick_id_of("request-of-pick-1") is None


def test_a_request_counts_for_as_many_as_the_sequences_that_an_engine_runs_for_it() -> None:
    made = pool(max_in_flight=31)
    fill(made, 1)
    several = pick("several", info=request(num_sequences=30))
    made.flights.start(several, now=0.0)

    seen = view(made)
    assert (seen.num_pending, seen.num_in_flight, seen.has_room) == (30, 30, True)
    assert seen.pending_by_adapter == {"a": 1}
    start(made, "one", now=0.0)
    assert not view(made).has_room
    made.flights.finish("several", now=1.0)
    assert (view(made, now=1.0).num_pending, view(made, now=1.0).has_room) == (1, True)


def test_the_sequences_that_a_report_shows_of_our_requests_are_nobody_else_s() -> None:
    made = pool()
    made.flights.start(pick(info=request(num_sequences=30)), now=0.0)
    for tick in range(1, 3):
        loaded = report(num_running=8, num_waiting=23)
        made.record_report(address(1), loaded, taken_at_s=tick * STEADY_S)

    assert view(made, now=2 * STEADY_S).num_pending == 31


def test_no_pick_of_several_sequences_is_lost_because_some_of_them_have_ended() -> None:
    made = pool()
    made.flights.start(pick(info=request(num_sequences=30)), now=0.0)
    made.record_report(address(1), report(num_running=1), taken_at_s=5.0)

    assert made.flights.reconcile(address(1), by_pages(0.5), now=5.0) == []
    made.record_report(address(1), report(), taken_at_s=6.0)
    assert len(made.flights.reconcile(address(1), by_pages(0.5), now=6.0)) == 1
    assert view(made, now=6.0).num_pending == 0


def test_a_pick_without_a_request_id_is_found_by_none() -> None:
    made = pool()
    made.flights.start(pick(info=request(request_id="")), now=0.0)

    assert made.flights.pick_id_of("") is None


def test_of_two_picks_with_one_request_id_the_newer_is_found() -> None:
    made = pool()
    for id in ("old", "new"):
        made.flights.start(pick(id, info=request(request_id="same")), now=0.0)

    assert made.flights.pick_id_of("same") == "new"
    made.flights.finish("old", now=1.0)
    assert made.flights.pick_id_of("same") == "new"
    assert made.flights.pick_id_of("") is None


def test_the_oldest_pick_has_its_age() -> None:
    made = pool()
    start(made, "one", now=1.0)
    start(made, "two", now=3.0)

    assert made.oldest_in_flight_s(now=4.0)[address(1)] == 3.0
    made.flights.finish("one", now=4.0)
    assert made.oldest_in_flight_s(now=4.0)[address(1)] == 1.0
    made.flights.finish("two", now=4.0)
    assert made.oldest_in_flight_s(now=4.0)[address(1)] == 0.0


def test_picks_that_nobody_ends_expire_oldest_first() -> None:
    made = pool()
    for number in range(3):
        start(made, str(number), now=float(number))

    expired = made.flights.expire(now=11.0, max_age_s=10.0)

    assert [flight.pick.id for flight in expired] == ["0"]
    assert made.flights.expire(now=100.0, max_age_s=10.0)[0].pick.id == "1"
    assert len(made.flights) == 0


def reconciled(num_running: int, num_waiting: int = 0, *, grace_s: float = 1.0) -> list[str]:
    """Picks started at 0, 1, 2 and 3 s; what a report taken at 3 s leaves no room for."""
    made = pool()
    for number in range(4):
        start(made, str(number), now=float(number))
    seen = report(num_running=num_running, num_waiting=num_waiting)
    made.record_report(address(1), seen, taken_at_s=3.0)
    lost = made.flights.reconcile(address(1), by_pages(grace_s), now=3.5)
    assert len(made.flights) == 4 - len(lost)
    assert view(made, now=3.0).num_in_flight == 4 - len(lost)
    return [flight.pick.id for flight in lost]


def test_picks_that_the_report_leaves_no_room_for_are_ended_oldest_first() -> None:
    assert reconciled(0) == ["0", "1", "2"]  # the fourth may not have arrived yet
    assert reconciled(1, 1) == ["0"]
    assert reconciled(3) == []
    assert reconciled(0, grace_s=2.0) == ["0", "1"]
    assert reconciled(0, grace_s=10.0) == []
    assert reconciled(0, grace_s=0.0) == ["0", "1", "2", "3"]


def test_a_request_that_another_router_tells_of_stays_on_a_page_that_lacks_it() -> None:
    """Its router knows of the end, and tells."""
    made = pool()
    OtherRouter(made).start(adapter=None)
    start(made, "mine")
    made.flights.finish("mine", now=9.0, verdict=Evidence.SERVED)
    made.record_report(address(1), report(), taken_at_s=99.0)
    made.flights.reconcile(address(1), by_pages(1.0), now=99.0)

    assert made.peer_picks.num_in_flight == 1


def test_nothing_is_reconciled_with_an_endpoint_that_never_reported() -> None:
    made = pool()
    start(made)

    assert made.flights.reconcile(address(1), by_pages(0.0), now=99.0) == []


# --- what others sent -----------------------------------------------------------------------


def busy(*active: str, num_running: int) -> LoadReport:
    return report(num_running=num_running, active_adapters=frozenset(active))


def test_what_a_report_has_and_we_did_not_send_is_others() -> None:
    made = pool()
    start(made)
    made.record_report(address(1), busy("a", "b", num_running=4), taken_at_s=1.0)

    seen = view(made, now=1.0)
    assert (seen.num_pending, seen.num_in_flight, seen.num_foreign) == (1, 1, 3)
    assert seen.pending_by_adapter == {"a": 1, "b": 1}
    assert seen.reported_adapters == {"a", "b"}
    assert view(made, now=99.0).reported_adapters == frozenset()


def test_an_adapter_that_others_use_is_active_whatever_we_send() -> None:
    made = pool()
    made.record_report(address(1), busy("a", num_running=3), taken_at_s=0.0)
    start(made)

    assert (view(made).num_pending, view(made).pending("a")) == (1, 1)
    made.flights.finish("pick-1", now=1.0)
    assert (view(made, now=1.0).num_pending, view(made, now=1.0).pending("a")) == (0, 1)


def test_an_adapter_of_ours_that_others_may_use_too_runs_on_when_our_last_request_ends() -> None:
    """Until the next report: five requests are others', and one adapter is theirs alone."""
    made = pool()
    start(made)
    made.record_report(address(1), busy("a", "b", num_running=6), taken_at_s=1.0)
    made.flights.finish("pick-1", now=1.1)
    assert view(made, now=1.1).pending_by_adapter == {"a": 1, "b": 1}

    made.record_report(address(1), busy("b", num_running=5), taken_at_s=2.0)
    assert view(made, now=2.0).pending_by_adapter == {"b": 1}


def test_an_adapter_of_ours_alone_ends_with_our_last_request() -> None:
    """As many requests are others' as there are adapters that only they have."""
    made = pool()
    start(made)
    made.record_report(address(1), busy("a", "b", num_running=2), taken_at_s=1.0)
    made.flights.finish("pick-1", now=1.1)

    assert view(made, now=1.1).pending_by_adapter == {"b": 1}


def test_how_many_others_there_are_does_not_count_for_the_choice() -> None:
    """Routers that all chose by the same old number would all choose the same endpoint."""
    made = pool(1, 2)
    made.record_report(address(1), busy("a", num_running=9), taken_at_s=0.0)
    made.record_report(address(2), busy("a", num_running=1), taken_at_s=0.0)

    seen = made.snapshot(now=0.0).endpoints
    assert [(each.num_pending, each.pending("a")) for each in seen] == [(0, 1), (0, 1)]


def test_what_others_have_when_a_router_starts_counts_for_the_choice_at_once() -> None:
    """And what comes later, or is on an endpoint that joins, once it has been there for a while."""
    pool = Pool(counts_first=True)
    pool.set_endpoints([])
    pool.set_endpoints([endpoint(1)])
    pool.record_report(address(1), report(num_running=100, num_waiting=50), taken_at_s=1.0)
    assert view(pool, now=1.0).num_pending == 150
    pool.record_report(address(1), report(num_running=9), taken_at_s=2.0)
    pool.record_report(address(1), report(num_running=70), taken_at_s=3.0)
    assert view(pool, now=3.0).num_pending == 9

    pool.set_endpoints([endpoint(1), endpoint(2)])
    pool.record_report(address(2), report(num_running=100), taken_at_s=4.0)
    assert [each.num_pending for each in pool.snapshot(now=4.0).endpoints] == [9, 0]


@pytest.mark.parametrize(("num_routers", "steady_s"), [(1, ALONE_S), (2, STEADY_S)])
def test_others_that_have_been_there_for_seconds_count_for_the_choice(
    num_routers: int, steady_s: float
) -> None:
    """Nine requests of others that stay, two more that come and go. Where another router does not
    tell us, they may be of a herd."""
    made = pool()
    made.flights.set_num_routers(num_routers)
    for second, num_running in enumerate((9, 11) * 20):
        made.record_report(address(1), busy("a", num_running=num_running), taken_at_s=second)
        if second == int(steady_s) - 1:
            assert view(made, now=second).num_pending == 0
        if second == int(2 * steady_s) + 2:
            assert view(made, now=second).num_pending == 9

    seen = view(made, now=39.0)
    assert (seen.num_pending, seen.num_foreign) == (9, 2)


def test_others_that_leave_count_no_longer_at_once() -> None:
    made = pool()
    for second in range(40):
        made.record_report(address(1), busy("a", num_running=9), taken_at_s=second)
    made.record_report(address(1), busy("a", num_running=1), taken_at_s=40.0)

    assert view(made, now=40.0).num_pending == 1


def test_a_restart_ends_what_others_had_there() -> None:
    made = pool()
    for second in range(40):
        made.record_report(
            address(1), report(num_running=9, process_start_wall_s=1e9), taken_at_s=second
        )
    made.record_report(address(1), report(num_running=9, process_start_wall_s=2e9), taken_at_s=40.0)

    assert (view(made, now=40.0).num_pending, view(made, now=40.0).num_foreign) == (0, 9)


def test_prompts_ahead_are_no_more_than_all_that_is_unfinished() -> None:
    """The cost of a prompt is a guess; what has ended has surely been computed."""
    made = pool()
    for number in range(3):
        made.flights.start(pick(f"p-{number}", info=request(None, body_bytes=96_000)), now=0.0)
    for number in range(2):
        made.flights.finish(f"p-{number}", now=0.5)

    assert view(made, now=0.5).prompts_done_s == pytest.approx(0.5 + 1.0)


def test_an_idle_endpoint_has_no_active_adapters_whatever_its_page_names() -> None:
    made = pool()
    made.record_report(address(1), busy("a", "b", num_running=0), taken_at_s=0.0)

    assert view(made).pending_by_adapter == {}


def test_requests_for_the_base_are_no_adapters_of_others() -> None:
    made = pool()
    made.record_report(address(1), busy(num_running=2), taken_at_s=0.0)

    assert (view(made).num_foreign, view(made).num_active_adapters) == (2, 0)


def test_others_are_forgotten_with_the_report_that_told_of_them() -> None:
    made = pool()
    made.record_report(address(1), busy("b", num_running=2), taken_at_s=0.0)
    start(made)

    old = view(made, now=EXPIRY_S + 1)
    assert (old.num_pending, old.pending_by_adapter) == (1, {"a": 1})


def test_a_report_of_less_than_we_sent_takes_nothing_away() -> None:
    """What we sent may not have arrived when the report was made."""
    made = pool()
    start(made, "one")
    start(made, "two")
    made.record_report(address(1), busy("b", num_running=1), taken_at_s=0.0)

    assert (view(made).num_pending, view(made).num_foreign) == (2, 0)
    assert view(made).pending_by_adapter == {"a": 2, "b": 1}


# --- residency ------------------------------------------------------------------------------


def test_what_we_dispatch_and_what_is_listed_is_resident() -> None:
    made = pool(max_loras=1, max_cpu_loras=2)
    made.record_models(address(1), cards("a", "b"), now=0.0)
    start(made, adapter="a", now=1.0)

    assert (view(made).gpu_adapters, view(made).cpu_adapters) == (("a",), ("a", "b"))


def test_loads_into_gpu_slots_are_counted() -> None:
    made = pool(max_loras=1)
    counted = [view(made).num_adapter_loads]
    for number, adapter in enumerate("aaba"):
        start(made, str(number), adapter, now=float(number))
        made.flights.finish(str(number), now=number + 0.5)
        counted.append(view(made).num_adapter_loads)

    assert counted == [0, 1, 1, 2, 3]


# --- everything in any order ----------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Any interleaving of what the outside says and what we do.

    Kept beside it: which picks are in flight, on which life of an endpoint they were counted, and
    the last report and list of each life.
    """

    picks = Bundle("picks")
    numbers = st.integers(1, 3)

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(max_loras=2)
        self.now = 0.0
        self.num_started = 0
        self.life = {1: 0}  # endpoint -> which life of it; a new one each time it comes
        self.num_lives = 1
        self.ready = {1: True}
        self.flights: dict[str, tuple[int, str | None, float]] = {}  # id -> life, adapter, start
        self.reports: dict[int, tuple[LoadReport, float, int]] = {}  # life -> report, time, others
        self.models: dict[int, set[str]] = {}

    @initialize(numbers=st.sets(numbers, min_size=1))
    def begin(self, numbers: set[int]) -> None:
        self.set_endpoints(numbers, True)

    @rule(numbers=st.sets(numbers), is_ready=st.booleans())
    def set_endpoints(self, numbers: set[int], is_ready: bool) -> None:
        for number in numbers - self.life.keys():
            self.num_lives += 1
            self.life[number] = self.num_lives
        self.life = {number: self.life[number] for number in numbers}
        self.ready = dict.fromkeys(numbers, is_ready)
        self.pool.set_endpoints(endpoint(number, is_ready=is_ready) for number in numbers)

    @rule(elapsed_s=st.sampled_from((0.0, 0.5, EXPIRY_S + 0.25)))
    def wait(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @rule(target=picks, number=numbers, adapter=st.none() | st.sampled_from(ADAPTERS))
    def start(self, number: int, adapter: str | None) -> Any:
        if number not in self.life:
            return multiple()
        self.num_started += 1
        id = f"pick-{self.num_started}"
        made = pick(id, number, info=request(adapter, request_id=id))
        self.pool.flights.start(made, now=self.now)
        self.flights[id] = (self.life[number], adapter, self.now)
        return id

    @rule(id=consumes(picks))
    def finish(self, id: str) -> None:
        finished = self.pool.flights.finish(id, now=self.now)
        assert (finished is not None) is (self.flights.pop(id, None) is not None)
        assert self.pool.flights.finish(id, now=self.now) is None
        assert self.pool.flights.pick_id_of(id) is None

    @rule(max_age_s=st.sampled_from((0.0, 1.0, 5.0)))
    def expire(self, max_age_s: float) -> None:
        old = [id for id, (_, _, at_s) in self.flights.items() if self.now - at_s > max_age_s]
        expired = self.pool.flights.expire(now=self.now, max_age_s=max_age_s)
        assert [flight.pick.id for flight in expired] == old
        for id in old:
            del self.flights[id]

    @rule(number=numbers, report=reports())
    def record_report(self, number: int, report: LoadReport) -> None:
        restarted = self.pool.record_report(address(number), report, taken_at_s=self.now)
        life = self.life.get(number)
        if life is None:
            assert not restarted
            return
        before = self.reports.get(life)
        starts = (before and before[0].process_start_wall_s, report.process_start_wall_s)
        assert restarted is (None not in starts and abs(starts[0] - starts[1]) > 1.0)  # type: ignore[operator]
        if restarted:
            self.models.pop(life, None)
        ours = sum(life == each for each, _, _ in self.flights.values())
        others = max(0, report.num_running + report.num_waiting - ours)
        self.reports[life] = (report, self.now, others)

    @rule(number=numbers, num_waiting=st.integers(0, 4))
    def record_orca(self, number: int, num_waiting: int) -> None:
        self.pool.record_orca(address(number), (0.5, num_waiting))
        life = self.life.get(number, -1)
        if life in self.reports:
            report, taken_at_s, others = self.reports[life]
            self.reports[life] = (replace(report, num_waiting=num_waiting), taken_at_s, others)

    @rule(number=numbers, names=st.lists(st.sampled_from(ADAPTERS), unique=True))
    def record_models(self, number: int, names: list[str]) -> None:
        self.pool.record_models(address(number), cards(*names), now=self.now)
        if number in self.life:
            self.models[self.life[number]] = {BASE, *names}

    @rule(number=numbers, grace_s=st.sampled_from((0.0, 1.0)))
    def reconcile(self, number: int, grace_s: float) -> None:
        lost = self.pool.flights.reconcile(address(number), by_pages(grace_s), now=self.now)
        life = self.life.get(number)
        if life is None or life not in self.reports:
            assert lost == []
            return
        report, taken_at_s, _ = self.reports[life]
        old = [
            id
            for id, (each, _, at_s) in self.flights.items()
            if each == life and taken_at_s - at_s >= grace_s
        ]
        room = report.num_running + report.num_waiting
        assert [flight.pick.id for flight in lost] == old[: max(0, len(old) - room)]
        for flight in lost:
            del self.flights[flight.pick.id]

    @invariant()
    def in_flight_is_what_was_started_and_not_finished(self) -> None:
        assert len(self.pool.flights) == len(self.flights)
        for id in self.flights:
            assert self.pool.flights.pick_id_of(id) == id

    @invariant()
    def views_say_what_was_told(self) -> None:
        views = self.pool.snapshot(now=self.now).endpoints
        assert [v.address for v in views] == [address(number) for number in sorted(self.life)]
        for number, seen in zip(sorted(self.life), views, strict=True):
            self.check_view(number, seen)

    def check_view(self, number: int, seen: EndpointView) -> None:
        life = self.life[number]
        adapters = [adapter for each, adapter, _ in self.flights.values() if each == life]
        report, taken_at_s, others = self.reports.get(life, (LoadReport(), None, 0))
        is_known = taken_at_s is not None and self.now - taken_at_s <= EXPIRY_S
        names = self.models.get(life)
        assert (seen.is_ready, seen.is_known) == (self.ready[number], is_known)
        assert seen.registered == (None if names is None else frozenset(names))
        assert seen.num_in_flight == len(adapters)
        foreign = others if is_known else 0
        steady = seen.num_pending - len(adapters)  # what others have had there for a while
        assert 0 <= steady <= foreign
        assert (seen.num_foreign, seen.num_told) == (foreign - steady, 0)
        shown = report if is_known else LoadReport()
        assert (seen.num_running, seen.num_waiting) == (shown.num_running, shown.num_waiting)
        for adapter in ADAPTERS:
            ours = adapters.count(adapter)
            theirs = is_known and adapter in report.active_adapters
            assert seen.pending(adapter) >= ours
            assert theirs or seen.pending(adapter) == ours

    @invariant()
    def a_view_is_never_older_than_what_it_shows(self) -> None:
        """Taking the same settings again makes every view anew."""
        kept = self.pool.snapshot(now=self.now)
        self.pool.configure(PoolSettings(report_expiry_s=EXPIRY_S, max_loras=2))
        assert self.pool.snapshot(now=self.now) == kept

    @invariant()
    def the_index_of_models_is_the_union_of_the_lists(self) -> None:
        listed: set[str] = set()
        for life in self.life.values():
            listed |= self.models.get(life, set())
        assert {card.id for card in self.pool.models.by_name.values()} == listed

    def teardown(self) -> None:
        for id in list(self.flights):
            assert self.pool.flights.finish(id, now=self.now) is not None
        assert len(self.pool.flights) == 0
        for seen in self.pool.snapshot(now=self.now + 1000 * EXPIRY_S).endpoints:
            assert (seen.num_pending, dict(seen.pending_by_adapter)) == (0, {})


PoolMachine.TestCase.settings = settings(stateful_step_count=30)
TestPoolInAnyOrder = PoolMachine.TestCase


def test_endpoints_are_values() -> None:
    assert endpoint(1) == Endpoint(address(1), f"http://{address(1)}")


def owing(pool: Pool, *, now: float = 0.0) -> list[bool]:
    return [view.is_owing for view in pool.snapshot(now=now).endpoints]


def test_an_endpoint_owes_its_models_until_it_has_told_them_or_kept_silent() -> None:
    made = pool(1, 2)
    made.record_models(address(1), cards("a"), now=0.0)

    assert owing(made) == [False, True]
    made.record_silence(address(1))
    made.record_silence(address(2))
    made.record_silence(address(9))
    assert owing(made) == [False, False]


def test_one_that_answers_scrapes_alone_is_asked_a_few_times_and_then_owes_nothing() -> None:
    made = pool()
    made.record_report(address(1), report(), taken_at_s=0.0)
    seen = []
    for _ in range(MAX_SILENCES):
        seen += owing(made)
        made.record_silence(address(1))

    assert (seen, owing(made)) == ([True] * MAX_SILENCES, [False])


def test_one_that_restarts_without_end_owes_nothing() -> None:
    made = pool()
    seen = []
    for at_s in (0.0, 10.0, 11.0, 12.0, 30.0):
        made.record_models(address(1), cards(), now=at_s)
        again = report(process_start_wall_s=100 + 2 * at_s)
        made.record_report(address(1), again, taken_at_s=at_s)
        seen += owing(made, now=at_s)

    assert seen == [False, True, False, False, True]  # the first report is no restart


# --- picks that another endpoint served ------------------------------------------------------


def counts(pool: Pool, now: float = 0.0) -> list[tuple[int, int]]:
    """Requests in flight on each endpoint: all, and those for the adapter a."""
    views = pool.snapshot(now=now).endpoints
    return [(view.num_in_flight, view.pending("a")) for view in views]


def test_a_moved_pick_is_counted_where_it_is_served_until_it_is_finished() -> None:
    made = pool(1, 2)
    made.flights.start(pick("x", 1), now=0.0)

    assert made.flights.move("x", address(2), now=1.0)
    assert counts(made) == [(0, 0), (1, 1)]
    assert made.oldest_in_flight_s(now=3.0)[address(2)] == 3.0
    finished = made.flights.finish("x", now=4.0)
    assert finished is not None
    assert finished.pod.address == address(2)
    assert counts(made) == [(0, 0), (0, 0)]


def test_a_moved_pick_leaves_no_adapter_behind_that_was_never_loaded() -> None:
    made = pool(1, 2, max_loras=2)
    made.flights.start(pick("x", 1), now=0.0)
    made.flights.move("x", address(2), now=1.0)

    first, second = made.snapshot(now=1.0).endpoints
    assert (first.has_loaded("a"), second.has_loaded("a")) == (False, True)


def test_a_moved_pick_takes_its_prompt_along() -> None:
    made = pool(1, 2)
    made.flights.start(pick("x", 1, info=request(None, body_bytes=960_000)), now=0.0)
    made.flights.move("x", address(2), now=0.5)

    first, second = made.snapshot(now=0.5).endpoints
    assert first.prompts_done_s <= 0.5
    assert second.prompts_done_s == pytest.approx(10.0)


def test_moving_changes_nothing_where_there_is_nothing_to_move() -> None:
    made = pool(1, 2)
    made.flights.start(pick("x", 1), now=0.0)

    assert not made.flights.move("x", address(1), now=1.0)
    assert not made.flights.move("x", address(9), now=1.0)
    assert not made.flights.move("unknown", address(2), now=1.0)
    assert counts(made) == [(1, 1), (0, 0)]


def test_of_two_requests_for_an_adapter_one_may_move() -> None:
    made = pool(1, 2)
    for name in ("x", "y"):
        made.flights.start(pick(name, 1), now=0.0)

    made.flights.move("y", address(2), now=1.0)

    assert counts(made) == [(1, 1), (1, 1)]


# --- groups ----------------------------------------------------------------------------------

SLOW = Costs(prompt_s_per_byte=1.0)
GROUPS = {"l4": ServerFlags(2, 3, 16, SLOW), "h200": ServerFlags(16, 64, 128)}


def grouped(**groups_by_number: str) -> Pool:
    made = pool(max_loras=8, max_cpu_loras=32, max_lora_rank=64, groups=GROUPS)
    made.set_endpoints(in_groups(*groups_by_number.values()))
    return made


def in_groups(*groups: str) -> list[Endpoint]:
    return [replace(endpoint(n), group=group) for n, group in enumerate(groups, start=1)]


def used_in_turn(pool: Pool, *adapters: str) -> Pool:
    for now, adapter in enumerate(adapters):
        pool.flights.finish(start(pool, f"use-{now}", adapter, now=float(now)).id, now=float(now))
    return pool


def test_an_endpoint_that_is_gone_or_of_an_unknown_group_has_no_group() -> None:
    made = grouped(a="l4", b="", c="unknown")

    assert [made.group_of(address(number)) for number in (1, 2, 3, 4)] == ["l4", "", "", ""]


def test_endpoints_of_a_group_have_its_slots_rank_limit_and_costs() -> None:
    made = grouped(a="l4", b="h200", c="", d="unknown")

    seen = made.snapshot(now=0.0).endpoints
    assert [each.max_loras for each in seen] == [2, 16, 8, 8]
    assert [each.max_lora_rank for each in seen] == [16, 128, 64, 64]
    assert [each.costs for each in seen] == [SLOW, Costs(), Costs(), Costs()]


def test_what_the_engine_says_of_its_slots_wins_over_the_group() -> None:
    made = grouped(a="l4")
    made.record_report(address(1), report(max_loras=5), taken_at_s=0.0)

    assert view(made).max_loras == 5


def test_residency_is_that_of_the_group() -> None:
    made = grouped(a="l4")
    used_in_turn(made, *"abcdef")

    assert view(made, now=9.0).gpu_adapters == tuple("fe")
    assert view(made, now=9.0).cpu_adapters == tuple("fed")


def test_a_prompt_is_queued_at_the_speed_of_the_group() -> None:
    made = grouped(a="l4")
    made.flights.start(pick(info=request(None, body_bytes=3)), now=0.0)

    assert view(made).prompts_done_s == 3.0


def test_an_endpoint_that_changes_its_group_keeps_its_requests() -> None:
    made = grouped(a="h200")
    used_in_turn(made, *"abcdef")
    start(made, now=9.0)
    made.set_endpoints(in_groups("l4"))

    seen = view(made, now=9.0)
    assert (seen.max_loras, seen.max_lora_rank, seen.costs) == (2, 16, SLOW)
    assert (seen.num_pending, seen.cpu_adapters) == (1, tuple("afe"))


def test_groups_that_are_configured_later_hold_for_endpoints_that_are_there() -> None:
    made = pool(max_loras=8)
    made.set_endpoints(in_groups("l4"))
    assert view(made).max_loras == 8

    made.configure(PoolSettings(report_expiry_s=EXPIRY_S, groups=GROUPS))
    assert (view(made).max_loras, view(made).max_lora_rank) == (2, 16)

    made.configure(PoolSettings(report_expiry_s=EXPIRY_S, max_loras=4))
    assert (view(made).max_loras, view(made).max_lora_rank) == (4, None)


# --- beginnings in KV caches ---------------------------------------------------------------------

BEGUN = request(body_bytes=3000, prefix_hashes=(7, 8))


def begun(*numbers: int, started_s: float | None = 1.0) -> Pool:
    """A pool that has sent a prompt with two known KiB to the endpoint 1."""
    made = pool(*numbers or (1,))
    made.record_report(address(1), report(process_start_wall_s=started_s), taken_at_s=0.0)
    made.record_models(address(1), cards("a"), now=0.0)
    made.flights.start(pick(info=BEGUN), now=0.0)
    assert made.prefix_index.find(BEGUN) == {address(1): 2048}
    return made


def test_a_restart_empties_the_kv_cache() -> None:
    made = begun()
    made.record_report(address(1), report(process_start_wall_s=9.0), taken_at_s=1.0)

    assert made.prefix_index.find(BEGUN) == {}
    made.flights.start(pick("pick-2", info=BEGUN), now=1.0)
    assert made.prefix_index.find(BEGUN) == {address(1): 2048}


def test_names_that_vanish_empty_the_kv_cache_where_there_is_no_start_time() -> None:
    made = begun(started_s=None)
    made.record_models(address(1), cards(), now=1.0)

    assert made.prefix_index.find(BEGUN) == {}


def test_an_endpoint_that_left_and_came_back_has_an_empty_kv_cache() -> None:
    made = begun()
    made.set_endpoints([])
    assert made.prefix_index.find(BEGUN) == {}
    made.set_endpoints([endpoint(1)])

    assert made.prefix_index.find(BEGUN) == {}


def test_the_size_of_the_kv_cache_is_the_reported_one() -> None:
    made = begun()
    made.record_report(
        address(1), report(process_start_wall_s=1.0, kv_cache_tokens=1000), taken_at_s=1.0
    )
    made.flights.start(pick("pick-2", info=request(body_bytes=1999)), now=1.0)
    assert made.prefix_index.find(BEGUN) == {address(1): 2048}
    made.flights.start(pick("pick-3", info=request(body_bytes=1)), now=1.0)

    assert made.prefix_index.find(BEGUN) == {}


def test_picks_of_other_routers_fill_the_kv_cache_as_well() -> None:
    made = begun()
    OtherRouter(made).start(adapter=None, body_bytes=300_000)

    assert made.prefix_index.find(BEGUN) == {}


def test_a_pick_that_is_told_again_over_a_new_link_fills_the_kv_cache_once() -> None:
    made = pool()
    other = OtherRouter(made)
    other.start(adapter=None, body_bytes=50_000)
    for told_s in (100.0, 200.0):
        other.leave(now=told_s)
        other.tell_whole(now=told_s)

    assert made._pods[address(1)].load.kv_cache.computed_bytes == 50_000


def test_a_prompt_that_has_moved_is_where_it_was_served_alone() -> None:
    made = begun(1, 2)
    assert made.flights.move("pick-1", address(2), now=0.5)

    assert made.prefix_index.find(BEGUN) == {address(2): 2048}


@pytest.mark.parametrize("has_run", [True, False])
def test_a_prompt_is_where_the_log_says_that_it_was_served(has_run: bool) -> None:
    made = begun(1, 2)
    made.flights.finish("pick-1", now=0.5, has_run=has_run, address=address(2))

    assert made.prefix_index.find(BEGUN) == ({address(2): 2048} if has_run else {})
    assert made._pods[address(2)].load.kv_cache.computed_bytes == (3000 if has_run else 0)


def test_a_prompt_that_no_engine_has_run_is_nowhere() -> None:
    made = begun()
    made.flights.finish("pick-1", now=0.5, has_run=False)

    assert made.prefix_index.find(BEGUN) == {}


def test_a_prompt_that_did_not_run_leaves_what_an_earlier_one_has_left() -> None:
    made = begun()
    longer = replace(BEGUN, prefix_hashes=(7, 8, 9), cached_bytes={address(1): 2048})
    made.flights.start(pick("pick-2", info=longer), now=0.1)
    assert made.prefix_index.find(longer) == {address(1): 3072}
    made.flights.finish("pick-2", now=0.5, has_run=False)

    assert made.prefix_index.find(longer) == {address(1): 2048}


def test_a_prompt_that_moves_is_weighed_by_what_is_cached_by_then() -> None:
    """An engine has lost it since, another has got it."""
    made = begun(1, 2, 3)
    info = replace(BEGUN, cached_bytes={address(2): 2048})
    made.flights.start(pick("pick-2", 3, info=info), now=0.1)
    made.flights.start(pick("pick-3", 1, info=BEGUN), now=0.1)
    made.flights.move("pick-2", address(2), now=0.5)
    assert made._pods[address(2)].load.prompts.sent_bytes == 3000
    made.flights.move("pick-2", address(1), now=0.6)

    prompts = made._pods[address(1)].load.prompts
    assert prompts.sent_bytes == 3000 + 3000 + 952


def test_a_pick_in_flight_keeps_what_is_cached_where_it_may_go_and_no_more() -> None:
    made = pool(1, 2, 3, 4, 5)
    cached = {address(number): 1024 for number in range(1, 6)}
    info = replace(BEGUN, cached_bytes=cached)
    made.flights.start(pick(info=info, endpoints=(address(1), address(2)), alternates=()), now=0.0)
    made.flights.start(pick("pick-2", info=info, alternates=(address(3),)), now=0.0)

    kept = [flight.pick.request.cached_bytes.keys() for flight in made.flights]
    assert kept == [{address(1), address(2)}, {address(1), address(3)}]
    assert info.cached_bytes == cached
    made.flights.move("pick-2", address(4), now=0.1)
    made.flights.move("pick-2", address(5), now=0.1)
    [*_, moved] = made.flights
    assert moved.pick.request.cached_bytes == {address(1): 1024}


def test_only_the_rest_of_a_prompt_is_to_be_computed() -> None:
    made = pool(1, 2)
    info = replace(BEGUN, cached_bytes={address(1): 2048})
    made.flights.start(pick(info=info), now=0.0)
    made.flights.start(pick("pick-2", 2, info=info), now=0.0)

    s_per_byte = Costs().prompt_s_per_byte
    first, second = (pod.load.prompts for pod in made._pods.values())
    assert (first.sent_bytes, second.sent_bytes) == (952, 3000)
    assert second.done_s - first.done_s == pytest.approx(2048 * s_per_byte)
    assert info.rest_bytes(address(1)) == 952


def test_a_late_end_says_nothing_of_the_process_that_came_back_under_the_address() -> None:
    made = begun()
    made.set_endpoints([])
    made.set_endpoints([endpoint(1)])
    made.flights.finish("pick-1", now=0.5, address=address(1))

    assert made.prefix_index.find(BEGUN) == {}
    assert made._pods[address(1)].load.kv_cache.computed_bytes == 0


# --- rows and views ------------------------------------------------------------------------------


def test_a_view_is_made_once_for_each_change() -> None:
    made = fill(Pool(), 1, 2, load=report())
    made.flights.start(pick(), now=1.0)
    first, again = (made.snapshot(now=1.0).endpoints for _ in range(2))
    made.flights.finish("pick-1", now=2.0)
    after = made.snapshot(now=2.0).endpoints

    assert [one is other for one, other in zip(first, again, strict=True)] == [True, True]
    assert [one is other for one, other in zip(first, after, strict=True)] == [False, True]


@pytest.mark.parametrize("left", [1, 2])
def test_what_ends_at_an_endpoint_that_has_left_changes_no_view_of_others(left: int) -> None:
    made = fill(Pool(), 1, 2, load=report())
    made.flights.start(pick(number=left), now=1.0)
    made.snapshot(now=1.0)
    made.set_endpoints([endpoint(3 - left)])
    before = made.snapshot(now=1.0).endpoints
    made.flights.finish("pick-1", now=2.0)
    after = made.snapshot(now=2.0).endpoints

    assert [view.address for view in after] == [address(3 - left)]
    assert after == before


def test_a_report_makes_a_view_at_once_only_where_the_last_one_was_read() -> None:
    """Many reports come between two decisions, or many decisions between two reports."""
    made, num_stale = fill(Pool(), 1, load=report()), []
    made.snapshot(now=1.0)
    for now in (1.0, 2.0, 3.0):
        made.record_report(address(1), report(num_running=int(now)), taken_at_s=now)
        num_stale.append(len(made._views.stale))
    num_running = made.snapshot(now=3.0).endpoints[0].num_running

    assert (num_stale, num_running) == ([0, 1, 1], 3)
