"""Declared adapters as requests meet them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.adapters.adapterstates import (
    Action,
    AdapterSettings,
    AdapterState,
    CallKind,
    Failure,
    Result,
)
from extproc.adapters.declared import Declaration, LoadMode
from extproc.adapters.sources import DeclarationSources, SourceStatus
from extproc.costs import Costs
from extproc.learned.prefixes import prefix_hashes
from extproc.openai import NAMES_A_PASS
from extproc.passes import last
from extproc.pods.pool import PoolSettings
from extproc.queue import Ticket
from extproc.rejections import NOT_REWRITABLE, RENAMED
from extproc.routing.admission import AdmissionSettings
from extproc.routing.catalog import Catalog, CatalogSettings, Undeclared
from extproc.routing.conflicts import Offer, ResponseModel
from extproc.routing.modelroutes import ModelRoute
from extproc.types import Hints, ModelCard, Pick, Reason, Rejection, RequestInfo, Wait
from tests.builders import BASE, address, base_card, endpoint, report, request, routing
from tests.otherrouters import OtherRouter
from tests.routing.scene import ask, queued, refused, routed

SQL = Declaration("sql", "/adapters/sql")


READ = SourceStatus("store", True, True, True, 0.0)
UNREAD = SourceStatus("store", True, False, False, 0.0)
NAMES_UNREAD = SourceStatus("rewrites", False, False, False, 0.0)


class Scene:
    """A router over pods that list what they are told to, and its planner."""

    def __init__(
        self,
        *declared: Declaration | Offer,
        num_pods: int = 2,
        source: SourceStatus = READ,
        **settings: object,
    ) -> None:
        self.now = 0.0
        self.num_cold = 0
        self.source = source
        sources = DeclarationSources()
        sources.add(lambda: [self.source])
        self.catalog = Catalog(sources=sources, on_cold=self._on_cold)
        self.router = routing(catalog=self.catalog)
        pool = self.router.pool
        pool.set_endpoints(endpoint(number) for number in range(1, num_pods + 1))
        self.catalog.configure(CatalogSettings(**settings))  # type: ignore[arg-type]
        for number in range(1, num_pods + 1):
            self.lists(number)
        self.declare(*declared)

    def _on_cold(self) -> None:
        self.num_cold += 1

    def declare(self, *declared: Declaration | Offer) -> None:
        offers = [each if isinstance(each, Offer) else Offer(each) for each in declared]
        self.catalog.planner.declare([each.declaration for each in offers], now=self.now)
        self.catalog.declare({each.declaration.name: each for each in offers}, {frozenset(): BASE})
        self.begun = self.tick()

    def lists(self, number: int, *adapters: tuple[str, str]) -> None:
        """Have a pod list the base model and (name, root) of adapters, from now on."""
        self.now += 0.1
        cards = [base_card(), *(ModelCard(name, BASE, root) for name, root in adapters)]
        pool = self.router.pool
        pool.record_report(address(number), report(), taken_at_s=self.now)
        pool.record_models(address(number), cards, now=self.now)

    def offer(self) -> None:
        """Ask the queue about those who wait, as there may be room now."""
        self.router.queue.freed(self.now)
        self.router.offer(now=self.now)

    def tick(self) -> list[Action]:
        self.now += 0.1
        pods = self.router.pool.pod_states(now=self.now)
        held = self.router.queue.adapters(self.now)
        rates = self.catalog.demand.rates(self.now)
        return self.catalog.planner.tick(pods, rates, held, now=self.now)

    def ask(self, model: str, **fields: Any) -> Pick | Rejection | Wait | Ticket:
        return ask(self.router, model=model, now=self.now, **fields)

    def ask_at(self, arrived_s: float) -> Pick | Rejection | Wait | Ticket:
        """Ask for `sql`, so many seconds after the request arrived."""
        asked = request(None, model="sql", arrived_at_s=self.now + arrived_s)
        return self.router.route(asked, now=self.now)

    def picked(self, model: str) -> Pick:
        result = routed(self.ask(model))
        return result

    def listed(self, tenant: str = "", subset: frozenset[str] | None = None) -> list[str]:
        body = self.router.models.body(subset, tenant, now=self.now)
        assert isinstance(body, bytes)
        return [model["id"] for model in json.loads(body)["data"]]


def test_an_adapter_that_waits_for_an_idle_moment_is_refused_with_that_reason() -> None:
    scene = Scene(num_pods=1)
    pool = scene.router.pool
    pool.configure(PoolSettings(report_expiry_s=60.0, safe_loads_since=(0, 26, 0)))
    pool.record_version(address(1), "0.25.1", asked_at_s=scene.now)
    scene.picked(BASE)
    scene.declare(SQL)

    late = scene.ask_at(-60.0)

    assert scene.begun == []
    assert refused(late) == (503, Reason.ADAPTER_UNAVAILABLE)
    assert isinstance(late, Rejection)
    assert "(unsafe_version)" in late.message
    assert "0.25.1" in late.why


def test_a_request_for_an_adapter_that_no_pod_has_is_held_and_asks_for_it() -> None:
    scene = Scene(Declaration("sql", "/adapters/sql", load=LoadMode.LAZY))

    held = scene.ask("sql")

    assert isinstance(held, Ticket)
    assert held.reason == "load"
    assert scene.num_cold
    assert scene.router.queue.adapters(scene.now) == ["sql"]


def test_one_that_goes_on_waiting_asks_for_it_no_more() -> None:
    """Otherwise each look at it would make another, for as long as it waits."""
    scene = Scene(SQL)
    assert isinstance(scene.ask("sql"), Ticket)
    scene.tick()
    asked = scene.num_cold

    scene.offer()

    assert len(scene.router.queue) == 1
    assert scene.num_cold == asked == 1


@pytest.mark.parametrize(
    ("cold_wait_s", "route"),
    [(20.0, {"waits": False}), (20.0, {"max_wait_s": 0.0}), (0.0, {})],
)
def test_one_that_may_not_wait_has_its_adapter_loaded_for_those_after_it(
    cold_wait_s: float, route: dict[str, Any]
) -> None:
    sql = Declaration("sql", "/adapters/sql", load=LoadMode.LAZY)
    scene = Scene(sql, cold_wait_s=cold_wait_s)
    scene.router.routes.configure([ModelRoute("r", ("sql",), **route)], {})
    assert scene.begun == []

    assert refused(scene.ask("sql")) == (503, Reason.ADAPTER_UNAVAILABLE)

    [action] = scene.tick()
    assert (action.kind, action.name) == (CallKind.LOAD, "sql")


def test_it_goes_on_once_a_pod_lists_the_adapter() -> None:
    scene = Scene(SQL)
    held = queued(scene.ask("sql"))

    scene.lists(2, ("sql", "/adapters/sql"))
    scene.tick()
    scene.offer()

    result = routed(scene.router.resume(held, now=scene.now))
    assert result.address == address(2)


def test_one_whose_pods_have_just_gone_waits_for_others() -> None:
    """Before the planner has seen it, too: what a restarted pod lists is known at once."""
    scene = Scene(SQL, cold_wait_s=5.0)
    scene.lists(1, ("sql", "/adapters/sql"))
    scene.tick()
    scene.lists(1)

    assert refused(scene.ask_at(-5.0)) == (503, Reason.NO_ENDPOINTS)
    asked = scene.num_cold
    held = queued(scene.ask("sql"))
    assert held.reason == "load"
    assert scene.num_cold > asked

    scene.lists(2, ("sql", "/adapters/sql"))
    scene.tick()
    scene.offer()
    assert isinstance(scene.router.resume(held, now=scene.now), Pick)


def test_one_whose_pods_are_all_full_is_told_so() -> None:
    scene = Scene(SQL)
    scene.lists(1, ("sql", "/adapters/sql"))
    scene.tick()
    picker = scene.router.picker
    full = AdmissionSettings(max_pending=1)
    picker.configure(picker.policy, "founding", admission=full)
    scene.picked("sql")

    assert refused(scene.ask("sql")) == (429, Reason.SATURATED)


def test_it_waits_no_longer_than_cold_wait_s() -> None:
    scene = Scene(SQL, cold_wait_s=5.0)
    assert refused(scene.ask_at(-5.0)) == (503, Reason.ADAPTER_UNAVAILABLE)


def test_requests_do_not_follow_an_adapter_to_a_pod_that_is_gone() -> None:
    scene = Scene(SQL)
    scene.lists(1, ("sql", "/adapters/sql"))
    scene.tick()
    assert scene.picked("sql").address == address(1)

    scene.router.pool.record_unreachable(address(1))

    assert isinstance(scene.ask("sql"), Ticket)
    [action] = scene.tick()
    assert (action.kind, action.address) == (CallKind.LOAD, address(2))


def test_after_cold_wait_s_a_pod_that_may_be_gone_is_better_than_none() -> None:
    scene = Scene(SQL, cold_wait_s=5.0)
    scene.lists(1, ("sql", "/adapters/sql"))
    scene.tick()
    scene.router.pool.record_unreachable(address(1))

    result = scene.ask_at(-5.0)

    assert isinstance(result, Pick)
    assert result.address == address(1)


@pytest.mark.parametrize(("max_hold_s", "max_wait_s"), [(60.0, 2.0), (2.0, None)])
def test_a_route_that_waits_for_less_says_that_the_adapter_is_not_there_yet(
    max_hold_s: float, max_wait_s: float | None
) -> None:
    scene = Scene(SQL)
    scene.router.max_hold_s = max_hold_s
    scene.router.routes.configure([ModelRoute("r", ("sql",), max_wait_s=max_wait_s)], {})
    held = queued(scene.ask("sql"))

    result = scene.router.resume(held, now=scene.now + 2.0)

    assert refused(result) == (503, Reason.ADAPTER_UNAVAILABLE)
    assert isinstance(result, Rejection)
    assert result.retry_after_s


def test_a_route_that_waits_for_less_has_its_fallback_then() -> None:
    scene = Scene(Offer(SQL, fallback=BASE))
    scene.router.routes.configure([ModelRoute("r", ("sql",), max_wait_s=2.0)], {})
    held = queued(scene.ask("sql"))

    result = scene.router.resume(held, now=scene.now + 2.0)

    assert isinstance(result, Pick)
    assert result.request.model == BASE


def test_one_that_waited_in_vain_is_told_when_those_that_wait_will_have_gone() -> None:
    """At the pace at which they leave: where more is asked for than may be loaded, not at once."""
    scene = Scene(SQL, *(Declaration(f"a{number}", "/a") for number in range(4)), cold_wait_s=5.0)
    assert refused(scene.ask_at(-5.0)) == (503, Reason.ADAPTER_UNAVAILABLE)
    for name in ("sql", "a0", "a1", "a2", "a3"):
        assert isinstance(scene.ask(name), Ticket)
    scene.now += 3
    for number in (1, 2):
        scene.lists(number, ("sql", "/adapters/sql"))
    scene.tick()
    scene.offer()
    scene.lists(1)
    scene.lists(2)
    scene.tick()

    result = scene.ask_at(-5.0)

    assert isinstance(result, Rejection)
    assert result.retry_after_s is not None
    assert 4 * 3 <= result.retry_after_s <= 4 * 4


def test_where_it_cannot_be_loaded_the_reason_is_said_at_once() -> None:
    scene = Scene(SQL, num_pods=1)
    [action] = scene.begun
    scene.catalog.planner.finished(action, Result(Failure.FILES, "nothing there"), now=scene.now)
    scene.tick()

    result = scene.ask("sql")

    assert refused(result) == (503, Reason.ADAPTER_UNAVAILABLE)
    assert isinstance(result, Rejection)
    assert "(files)" in result.message
    assert "nothing there" in result.why


def test_a_pod_that_has_something_else_under_the_name_gets_no_requests() -> None:
    scene = Scene(SQL)
    scene.lists(1, ("sql", "/else"))
    scene.lists(2, ("sql", "/adapters/sql"))
    scene.tick()
    assert {scene.picked("sql").address for _ in range(4)} == {address(2)}


def test_a_pod_that_unloads_an_adapter_gets_no_requests_for_it_from_then_on() -> None:
    """Neither during the call, nor between its end and the next look at the fleet."""
    scene = Scene(Declaration("sql", "/adapters/sql", max_replicas=1))
    for wait_s in (0.0, 6.0):
        scene.now += wait_s
        for number in (1, 2):
            scene.lists(number, ("sql", "/adapters/sql"))
        begun = scene.tick()

    [unload] = begun
    there = frozenset({unload.address})

    assert refused(scene.ask("sql", subset=there)) == (503, Reason.NO_ENDPOINTS)
    scene.catalog.planner.finished(unload, Result(), now=scene.now)
    assert refused(scene.ask("sql", subset=there)) == (503, Reason.NO_ENDPOINTS)
    assert scene.picked("sql").address != unload.address


def test_what_has_the_name_of_a_base_model_is_loaded_nowhere() -> None:
    scene = Scene(Declaration(BASE, "/adapters/sql"))
    assert scene.begun == []
    status = scene.catalog.planner.status(BASE)
    assert status is not None
    assert (status.state, status.reason) == (AdapterState.FAILED, Failure.CONFLICT)


def test_the_gateways_own_subset_counts_as_well() -> None:
    scene = Scene(SQL)
    for number in (1, 2):
        scene.lists(number, ("sql", "/adapters/sql"))
    scene.tick()
    result = routed(scene.ask("sql", subset=frozenset({address(1)})))
    assert result.candidates[0].address == address(1)
    assert refused(scene.ask("sql", subset=frozenset({"1.1.1.1"})))[0] == 503


def test_pods_read_the_version_that_serves_and_the_client_its_own_name() -> None:
    scene = Scene(Declaration("sql", "/adapters/sql-2", "2"))
    scene.lists(1, ("sql@2", "/adapters/sql-2"))
    scene.tick()

    found: RequestInfo = scene.picked("sql").request

    assert (found.model, found.adapter, found.client_model) == ("sql@2", "sql@2", "sql")
    assert scene.router.pool.snapshot(now=scene.now).endpoints[0].pending("sql@2") == 1


def test_work_is_counted_for_the_adapter_whatever_its_version() -> None:
    scene = Scene(Declaration("sql", "/adapters/sql-2", "2"))
    scene.lists(1, ("sql@2", "/adapters/sql-2"))
    scene.tick()
    scene.picked("sql")
    assert set(scene.catalog.demand.rates(scene.now)) == {"sql"}


def test_work_that_another_router_tells_of_is_counted_for_the_adapter() -> None:
    scene = Scene(Declaration("sql", "/adapters/sql-2", "2"))
    other = OtherRouter(scene.router.pool, now=scene.now)
    for number, adapter in enumerate(("sql@2", "own", None)):
        other.start(str(number), adapter=adapter, now=scene.now)
    assert set(scene.catalog.demand.rates(scene.now)) == {"sql"}


def test_what_another_router_cannot_load_for_this_one_is_refused_with_its_reason() -> None:
    scene = Scene(SQL, Offer(Declaration("b", "/adapters/b"), fallback=BASE))
    scene.catalog.set_failed({"sql": ("files", "nothing there"), "b": ("files", "")})

    result = scene.ask("sql")

    assert refused(result) == (503, Reason.ADAPTER_UNAVAILABLE)
    assert isinstance(result, Rejection)
    assert "(files)" in result.message
    assert result.why == "nothing there"
    assert scene.picked("b").request.model == BASE


def test_what_is_being_unloaded_is_known_until_the_call_has_ended() -> None:
    scene = Scene(num_pods=1)
    scene.lists(1, ("sql", "/adapters/sql"))
    scene.declare(SQL)
    scene.declare()
    scene.now += AdapterSettings().grace_s
    scene.lists(1, ("sql", "/adapters/sql"))
    [action] = scene.tick()
    planner = scene.catalog.planner
    assert (action.kind, planner.unloading()) == (CallKind.UNLOAD, [(address(1), "sql")])

    planner.finished(action, Result(), now=scene.now)

    assert planner.unloading() == []


def test_no_request_goes_where_another_router_unloads_its_adapter() -> None:
    scene = Scene(SQL)
    for number in (1, 2):
        scene.lists(number, ("sql", "/adapters/sql"))
    scene.tick()

    scene.catalog.planner.set_leaving({(address(1), "sql"), (address(2), "other")})

    assert {scene.picked("sql").address for _ in range(4)} == {address(2)}


def test_the_queue_knows_adapters_by_the_names_that_pods_have() -> None:
    scene = Scene(Declaration("sql", "/adapters/sql-2", "2"), Declaration("cold", "/c", "1"))
    scene.lists(1, ("sql@1", "/adapters/sql-1"), ("own", "/own"))
    scene.tick()
    reach = scene.router.destinations(now=scene.now)

    names = ("sql", "cold", "own", BASE)
    assert [reach.served(name) for name in names] == ["sql@1", "cold@1", "own", BASE]
    assert [reach.of(RequestInfo(name)) for name in names] == [1, 0, 1, 3]


def test_one_that_is_held_needs_no_load_of_a_version_that_runs() -> None:
    scene = Scene(Declaration("sql", "/adapters/sql-2", "2"), num_pods=1)
    scene.lists(1, ("sql@2", "/adapters/sql-2"))
    scene.tick()
    assert scene.picked("sql").request.adapter == "sql@2"

    needed_s = [scene.router._least_ttft_s(request(each), scene.now) for each in ("sql", "own")]

    assert needed_s == [0.0, Costs().cold_load_s]


def test_one_that_is_held_needs_the_least_of_what_pods_have_of_it() -> None:
    """Its adapter is loaded on the first pod, and half of its prompt is cached on the second."""
    scene = Scene(num_pods=3)
    scene.lists(1, ("own", "/adapters/own"))
    assert scene.picked("own").address == address(1)
    cached = {address(2): 500, address(9): 900}
    byte_s, load_s = Costs().prompt_s_per_byte, Costs().cold_load_s

    def needed_s(name: str | None, num_bytes: int) -> float:
        asked = request(name, body_bytes=num_bytes, cached_bytes=cached)
        return scene.router._least_ttft_s(asked, scene.now)

    assert needed_s(None, 1_000) == pytest.approx(500 * byte_s)
    assert needed_s("own", 1_000) == pytest.approx(1_000 * byte_s)
    assert needed_s("cold", 1_000) == pytest.approx(500 * byte_s + load_s)
    scene.router.pool.set_endpoints([])
    assert needed_s(None, 1_000) == 0.0


def test_prompts_that_one_version_has_cached_are_not_those_of_another() -> None:
    scene = Scene(Declaration("sql", "/adapters/sql-1", "1"), num_pods=1)
    scene.router.picker.uses_cached_bytes = True
    scene.lists(1, ("sql@1", "/adapters/sql-1"))
    scene.tick()
    hashes = prefix_hashes("sql", bytes(2048))

    def cached() -> dict[str, int]:
        result = routed(scene.ask("sql", prefix_hashes=hashes))
        return dict(result.request.cached_bytes)

    assert [cached(), cached()] == [{}, {address(1): 2048}]
    scene.declare(Declaration("sql", "/adapters/sql-2", "2"))
    scene.lists(1, ("sql@1", "/adapters/sql-1"), ("sql@2", "/adapters/sql-2"))
    scene.tick()
    assert [cached(), cached()] == [{}, {address(1): 2048}]


def test_a_deleted_adapter_is_not_served_before_the_first_look_at_pods_either() -> None:
    """As after a start: its tombstone is read, and pods list what they have."""
    scene = Scene()
    scene.catalog.planner.declare([], deleted=[SQL], now=scene.now)
    scene.lists(1, ("sql", "/adapters/sql"))
    for _ in range(2):
        assert refused(scene.ask("sql")) == (404, Reason.MODEL_NOT_FOUND)
        assert scene.listed() == [BASE]
        scene.tick()


def test_another_router_s_name_for_what_a_resolver_finds_is_known() -> None:
    scene = Scene(Declaration("sql", "/adapters/sql-2", "2"), num_pods=1)
    pool = scene.router.pool
    assert refused(scene.ask("sql@2"))[0] == 404
    pool.configure(PoolSettings(resolver=True))
    pool.declare({"sql@2": ModelCard("sql@2", BASE)}, now=scene.now)
    scene.tick()

    assert scene.picked("sql@2").request.adapter == "sql@2"


def test_models_lists_what_is_declared_and_no_versions() -> None:
    scene = Scene(Declaration("sql", "/adapters/sql-2", "2"), Declaration("cold", "/adapters/c"))
    scene.lists(1, ("sql@2", "/adapters/sql-2"), ("sql@1", "/adapters/sql-1"), ("own", "/own"))
    assert scene.listed() == [BASE, "cold", "own", "sql"]
    assert scene.listed() == [BASE, "cold", "own", "sql"]  # from the cache as well
    card = scene.router.models.find("cold", None, now=scene.now)
    assert isinstance(card, ModelCard)
    assert card.parent == BASE


@pytest.mark.parametrize("is_admitted", [True, False])
def test_adapters_that_nobody_declares_are_admitted_or_refused(is_admitted: bool) -> None:
    undeclared = Undeclared.ADMIT if is_admitted else Undeclared.REFUSE
    scene = Scene(SQL, undeclared=undeclared)
    scene.lists(1, ("own", "/own"), ("sql@1", "/old"))

    assert isinstance(scene.ask("own"), Pick) is is_admitted
    assert ("own" in scene.listed()) is is_admitted
    assert isinstance(scene.ask(BASE), Pick)
    assert isinstance(scene.ask("sql@1"), Pick)  # a version of what is declared
    if not is_admitted:
        assert refused(scene.ask("own")) == (404, Reason.MODEL_NOT_FOUND)


@pytest.mark.parametrize(
    "sql",
    [Offer(SQL, tenants=frozenset({"acme"})), Offer(Declaration("sql", "/adapters/sql", "1"))],
)
def test_what_is_deleted_gets_no_requests_while_pods_still_list_it(sql: Offer) -> None:
    """Whoever may ask: its tenants are forgotten with it."""
    served = sql.declaration.served_name
    scene = Scene(sql, undeclared=Undeclared.ADMIT)
    scene.lists(1, (served, "/adapters/sql"), ("own", "/own"))
    scene.tick()

    scene.declare()

    for name in ("sql", served):
        assert refused(scene.ask(name)) == (404, Reason.MODEL_NOT_FOUND)
    assert scene.listed() == [BASE, "own"]
    assert isinstance(scene.ask("own"), Pick)


def test_a_pods_own_adapter_is_admitted_though_another_of_its_name_was_deleted() -> None:
    scene = Scene(SQL)
    scene.lists(1, ("sql", "/own"))
    scene.tick()

    scene.declare()

    assert isinstance(scene.ask("sql"), Pick)
    assert scene.listed() == [BASE, "sql"]


def test_without_declarations_pods_alone_say_what_there_is() -> None:
    listed, catalog = {"own": ModelCard("own", BASE, "/own")}, Catalog()
    registry = catalog.registry(listed)

    assert registry.keys() == listed.keys()
    assert catalog.registry(listed) is registry


def test_the_pool_says_what_was_configured_of_a_pod() -> None:
    pool = Scene().router.pool
    assert pool.flags(address(1)) == pool.flags("unknown")


def test_other_tenants_find_no_such_model_in_no_version() -> None:
    private = Offer(Declaration("sql", "/adapters/sql-2", "2"), tenants=frozenset({"acme"}))
    scene = Scene(private, undeclared=Undeclared.ADMIT)
    assert scene.catalog.num_private == 1
    scene.lists(1, ("sql@2", "/adapters/sql-2"), ("own", "/own"))
    scene.tick()

    assert isinstance(scene.ask("sql", hints=Hints(fairness_id="acme")), Pick)
    for name in ("sql", "sql@2"):
        assert refused(scene.ask(name)) == (404, Reason.MODEL_NOT_FOUND)
    assert isinstance(scene.ask("own"), Pick)
    assert (scene.listed(), scene.listed("acme")) == ([BASE, "own"], [BASE, "own", "sql"])
    assert refused(scene.router.models.find("sql", None, now=scene.now))[0] == 404
    first, second = (frozenset({f"10.0.0.{number}"}) for number in (1, 2))
    assert (scene.listed("", first), scene.listed("", second)) == ([BASE, "own"], [BASE])


@pytest.mark.parametrize(
    ("fallback", "found"), [(BASE, (BASE, None)), ("own", ("own", "own")), ("b", ("b", "b"))]
)
def test_a_fallback_serves_where_nothing_else_is_left(
    fallback: str, found: tuple[str, str | None]
) -> None:
    other = Declaration("b", "/adapters/b")
    scene = Scene(Offer(SQL, fallback=fallback), Offer(other), cold_wait_s=5.0)
    scene.lists(2, ("own", "/own"), ("b", "/adapters/b"))
    scene.tick()

    assert isinstance(scene.ask("sql"), Ticket)
    result = scene.ask_at(-5.0)

    assert isinstance(result, Pick)
    assert (result.request.model, result.request.adapter) == found
    assert result.request.client_model == "sql"


def test_a_held_request_gets_the_first_version_that_its_adapter_gets() -> None:
    scene = Scene(SQL)
    held = queued(scene.ask("sql"))

    scene.declare(Declaration("sql", "/adapters/sql-2", "2"))
    scene.lists(1, ("sql@2", "/adapters/sql-2"))
    scene.tick()
    scene.offer()

    result = routed(scene.router.resume(held, now=scene.now))
    assert (result.request.model, result.request.client_model) == ("sql@2", "sql")


@pytest.mark.parametrize(("fixed", "error"), [("held", RENAMED), ("gateway", NOT_REWRITABLE)])
def test_a_body_that_cannot_be_rewritten_goes_to_no_pod_that_knows_another_name(
    fixed: str, error: Rejection
) -> None:
    scene = Scene(Declaration("sql", "/adapters/sql-2", "2"), Declaration("b", "/adapters/b"))
    scene.lists(1, ("sql@2", "/adapters/sql-2"), ("b", "/adapters/b"))
    scene.tick()
    assert scene.ask("sql", fixed=fixed) is error
    assert isinstance(scene.ask("b", fixed=fixed), Pick)


def test_a_body_that_cannot_be_rewritten_gets_no_fallback_but_the_reason() -> None:
    scene = Scene(Offer(SQL, fallback=BASE), cold_wait_s=0.0)
    assert isinstance(scene.ask("sql"), Pick)
    result = scene.ask("sql", fixed="gateway")
    assert refused(result) == (503, Reason.ADAPTER_UNAVAILABLE)


def test_a_name_is_unknown_for_sure_once_all_that_is_declared_has_been_read() -> None:
    scene = Scene(SQL, source=UNREAD)
    assert refused(scene.ask("later")) == (503, Reason.ADAPTERS_UNKNOWN)
    assert refused(scene.router.models.find("later", None, now=scene.now))[0] == 503

    scene.source = READ
    assert refused(scene.ask("later")) == (404, Reason.MODEL_NOT_FOUND)


def test_what_nobody_declares_is_admitted_by_default_until_some_adapter_is_somebodys_own() -> None:
    """Nor is it after that one was deleted: pods may have it for ever, and not be asked to go."""
    scene = Scene(SQL)
    scene.lists(1, ("own", "/own"), ("sql", "/adapters/sql"))
    scene.tick()
    assert scene.listed() == [BASE, "own", "sql"]
    assert isinstance(scene.ask("own"), Pick)

    for declared in ([Offer(SQL, tenants=frozenset({"acme"}))], []):
        scene.declare(*declared)
        assert refused(scene.ask("own")) == (404, Reason.MODEL_NOT_FOUND)
        assert scene.listed() == [BASE]

    scene.catalog.configure(CatalogSettings(undeclared=Undeclared.ADMIT))
    assert isinstance(scene.ask("own"), Pick)


def test_before_all_terms_are_read_what_nobody_declares_may_be_somebodys_own() -> None:
    scene = Scene(SQL, source=UNREAD, undeclared=Undeclared.ADMIT)
    scene.lists(1, ("own", "/own"), ("sql", "/adapters/sql"))
    scene.tick()

    result = scene.ask("own")
    assert refused(result) == (503, Reason.ADAPTERS_UNKNOWN)
    assert isinstance(result, Rejection)
    assert result.retry_after_s
    assert scene.listed() == [BASE, "sql"]
    assert isinstance(scene.ask(BASE), Pick)
    assert isinstance(scene.ask("sql"), Pick)

    scene.source = READ
    assert isinstance(scene.ask("own"), Pick)
    assert scene.listed() == [BASE, "own", "sql"]


def test_names_alone_that_are_not_read_restrict_nobody() -> None:
    """As of InferenceModelRewrites: they say what a name stands for, not for whom."""
    scene = Scene(source=NAMES_UNREAD)
    scene.lists(1, ("own", "/own"))

    assert isinstance(scene.ask("own"), Pick)
    assert refused(scene.ask("alias")) == (503, Reason.ADAPTERS_UNKNOWN)


def test_an_adapter_whose_declaration_cannot_be_used_is_nobodys_and_others_are_served() -> None:
    scene = Scene(undeclared=Undeclared.ADMIT)
    scene.lists(1, ("own", "/own"), ("own@1", "/own-1"), ("other", "/other"))
    assert scene.listed() == [BASE, "other", "own", "own@1"]

    scene.catalog.withhold(frozenset({"own"}))

    for name in ("own", "own@1"):
        assert refused(scene.ask(name)) == (503, Reason.ADAPTERS_UNKNOWN)
    assert scene.listed() == [BASE, "other"]
    assert isinstance(scene.ask("other"), Pick)


def test_a_fallback_is_for_those_alone_who_may_ask_for_it() -> None:
    private = Offer(Declaration("b", "/adapters/b"), tenants=frozenset({"acme"}))
    scene = Scene(Offer(SQL, fallback="b"), private, cold_wait_s=0.0)
    scene.lists(1, ("b", "/adapters/b"))
    scene.tick()

    assert refused(scene.ask("sql"))[0] == 503
    result = routed(scene.ask("sql", hints=Hints(fairness_id="acme")))
    assert result.request.model == "b"


def test_a_fallback_that_was_deleted_is_none_though_pods_still_list_it() -> None:
    sql = Offer(SQL, fallback="b")
    scene = Scene(sql, Declaration("b", "/adapters/b"), cold_wait_s=0.0)
    scene.lists(1, ("b", "/adapters/b"))
    scene.tick()
    assert isinstance(scene.ask("sql"), Pick)

    scene.declare(sql)

    assert refused(scene.ask("sql"))[0] == 503


@pytest.mark.parametrize("fallback", ["nobody", "cold"])
def test_a_fallback_that_no_pod_has_is_none(fallback: str) -> None:
    cold = Declaration("cold", "/adapters/cold")
    scene = Scene(Offer(SQL, fallback=fallback), Offer(cold), cold_wait_s=5.0)
    assert refused(scene.ask_at(-5.0)) == (503, Reason.ADAPTER_UNAVAILABLE)


@pytest.mark.parametrize(
    ("response_model", "restores"),
    [(None, None), (ResponseModel.REQUESTED, True), (ResponseModel.SERVED, False)],
)
def test_an_offer_says_which_name_its_responses_show(
    response_model: ResponseModel | None, restores: bool | None
) -> None:
    scene = Scene(Offer(SQL, response_model=response_model))
    scene.lists(1, ("sql", "/adapters/sql"))
    scene.tick()
    assert scene.picked("sql").request.restores_model is restores


@pytest.mark.parametrize(("version", "served"), [("", "sql"), ("1", "sql@1")])
def test_a_deleted_adapter_is_unknown_although_pods_have_it_until_it_is_unloaded(
    version: str, served: str
) -> None:
    scene = Scene(Declaration("sql", "/adapters/sql", version=version))
    scene.lists(1, (served, "/adapters/sql"), ("own", "/own"))
    scene.tick()
    assert scene.picked("sql").request.model == served

    scene.declare()

    assert scene.listed() == [BASE, "own"]
    for name in ("sql", served):
        assert refused(scene.ask(name))[0] == 404
    assert scene.picked("own").request.model == "own"


def test_a_declared_name_without_a_source_that_no_pod_lists_is_unfit() -> None:
    rejection = Scene(Declaration("sql")).ask("sql")

    assert refused(rejection) == (503, Reason.ADAPTER_UNAVAILABLE)
    assert "(unfit)" in str(rejection)


def test_a_deleted_adapter_that_pods_found_by_themselves_is_served_on() -> None:
    scene = Scene(Declaration("sql"))
    scene.lists(1, ("sql", "/own"))
    scene.declare()

    assert scene.listed() == [BASE, "sql"]
    assert scene.picked("sql").request.model == "sql"


# --- what clients see of it ---------------------------------------------------------------------


@pytest.mark.parametrize("show_sources", [False, True])
def test_clients_see_where_an_adapter_s_files_are_only_if_the_operator_wants_it(
    show_sources: bool,
) -> None:
    scene = Scene(Declaration("sql", "/secret/sql"), show_sources=show_sources)
    scene.lists(1, ("sql", "/secret/sql"), ("own", "/secret/own"))
    models = scene.router.models
    body = models.body(None, now=scene.now)
    assert isinstance(body, bytes)
    listed = json.loads(body)["data"]
    single = {name: models.find(name, None, now=scene.now) for name in ("sql", "own", BASE)}
    roots = {card["id"]: card["root"] for card in listed}

    if show_sources:
        assert (roots["sql"], roots["own"]) == ("/secret/sql", "/secret/own")
    else:
        assert (roots["sql"], roots["own"]) == ("sql", "own")
    assert {name: getattr(card, "root", None) or None for name, card in single.items()} == roots


def test_where_nothing_is_declared_what_pods_list_may_be_refused_all_the_same() -> None:
    refusing = Catalog(CatalogSettings(undeclared=Undeclared.REFUSE))

    assert Catalog().admits_all()
    assert not refusing.admits_all()
    assert not refusing.admits("a", ModelCard("a", parent=BASE))


@pytest.mark.parametrize("liar", [1, 2])
def test_one_of_two_pods_takes_no_base_model_from_the_other_by_calling_it_an_adapter(
    liar: int,
) -> None:
    """Nor makes it an adapter's, which nobody declares, a base model there."""
    scene = Scene(undeclared=Undeclared.REFUSE)
    cards = {
        liar: [ModelCard(BASE, "of-mine"), ModelCard("own")],
        3 - liar: [base_card(), ModelCard("own", BASE)],
    }
    for number, listed in cards.items():
        scene.router.pool.record_models(address(number), listed, now=scene.now)

    assert scene.listed() == [BASE, "own"]
    for name, honest in ((BASE, 3 - liar), ("own", liar)):
        assert {scene.picked(name).address for _ in range(5)} == {address(honest)}
        assert scene.router.models.find(name, None, now=scene.now) == ModelCard(name)
        elsewhere = frozenset({address(3 - honest)})
        assert isinstance(scene.ask(name, subset=elsewhere), Rejection)


def test_what_serves_instead_is_a_base_model_though_one_pod_calls_it_an_adapter() -> None:
    offer = Offer(Declaration("sql", "/adapters/sql"), fallback=BASE)
    scene = Scene(offer, undeclared=Undeclared.REFUSE, cold_wait_s=0)
    scene.router.pool.record_models(address(1), [ModelCard(BASE, "of-mine")], now=scene.now)

    assert scene.picked("sql").request.model == BASE


def test_a_declared_name_is_itself_though_pods_differ_on_it_and_a_rule_has_it() -> None:
    scene = Scene(Declaration("sql", "/adapters/sql"), undeclared=Undeclared.REFUSE)
    scene.lists(1, ("sql", "/adapters/sql"))
    lie = [base_card(), ModelCard("sql")]
    scene.router.pool.record_models(address(2), lie, now=scene.now)
    scene.router.models.aliases.configure({"sql": (BASE,), "other": ("sql",)})
    scene.tick()

    assert {scene.picked("sql").address for _ in range(5)} == {address(1)}
    assert scene.listed() == [BASE, "other", "sql"]
    for name in ("sql", "other"):
        card = scene.router.models.find(name, None, now=scene.now)
        assert card == ModelCard(name, BASE, "sql")


@pytest.mark.parametrize("written", ["sql", "sql@2"])
def test_requests_go_where_an_adapter_has_shown_its_effect_by_whatever_name(written: str) -> None:
    """A client may know the names that pods have."""
    scene = Scene(num_pods=2)
    settings = AdapterSettings(checks_effect=True, needs_effect=True)
    scene.catalog.planner.configure(settings)
    for number in (1, 2):
        scene.lists(number, ("sql@2", "/adapters/sql-2"))
    scene.declare(Declaration("sql", "/adapters/sql-2", "2", min_replicas=1))
    checks = {action.address: action for action in scene.begun}
    assert {action.kind for action in scene.begun} == {CallKind.CHECK}
    assert not isinstance(scene.ask(written), Pick)

    scene.catalog.planner.finished(checks[address(2)], Result(), now=scene.now)
    scene.tick()

    assert {scene.picked(written).address for _ in range(8)} == {address(2)}
    assert routed(scene.ask(BASE)).request.model == BASE
    beside = scene.ask(written, subset=frozenset({address(1)}))
    assert not isinstance(beside, Pick)


def test_a_list_that_something_is_declared_during_is_made_anew_next_time() -> None:
    scene = Scene()
    names = [f"own-{number}" for number in range(6 * NAMES_A_PASS)]
    for number in (1, 2):
        scene.lists(number, *((name, "/x") for name in names))
    private = Offer(Declaration("own-7", "/x"), tenants=frozenset({"acme"}))
    scene.declare(SQL)
    making = scene.router.models.make_body(None, now=scene.now)
    first = next(making)
    scene.declare(SQL, private)
    body = last(making)

    assert first == b""
    assert isinstance(body, bytes)
    assert b'"own-7"' not in body
    assert "own-7" not in scene.listed()
    assert "own-7" in scene.listed("acme")


def test_a_long_list_of_declared_adapters_is_made_in_passes_for_who_may_not_see_all() -> None:
    named = [Declaration(f"own-{number}", "/x") for number in range(6 * NAMES_A_PASS)]
    hidden = Offer(named[0], tenants=frozenset({"acme"}))
    scene = Scene(hidden, *(Offer(each) for each in named[1:]))
    passes = list(scene.router.models.make_body(None, now=scene.now))

    assert len(passes) > 6
    assert set(passes[:-1]) == {b""}
    assert len(scene.listed()) == len(named)
    assert len(scene.listed("acme")) == len(named) + 1
