"""The endpoints, their load and their adapters: the state that routing is based on.

Rules:
1. `start` and `finish` come exactly once per pick, whatever ends the request; a second `finish` of
   the same pick returns None and changes nothing.
2. A report is true at the moment it was taken, unless it contradicts both routers and counters
   (`foreign.ReportTrust`). Our dispatches since are added to it. A report older than
   `report_expiry_s` is not trusted: the endpoint is then known by the requests that routers have
   sent there, as long as it answers. One that has not answered at all, or not the last call of
   ours, is not idle: it is silent.
3. A finish belongs to the endpoint object that the pick was started on: an endpoint that left and
   came back under the same address starts from zero.
4. An endpoint is believed about itself only. Where a name must mean one thing for all of them, the
   majority decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from extproc.learned.concurrency import START_S
from extproc.learned.ejections import OutlierSettings
from extproc.learned.outliers import Outliers
from extproc.learned.prefixes import PrefixIndex
from extproc.pods.disbelief import Disbelief
from extproc.pods.endpointstate import EndpointState, InFlight
from extproc.pods.flights import Flights
from extproc.pods.foreign import ALONE_S, STEADY_S
from extproc.pods.listeners import NOBODY, PickObserver, WaitingLine, WorkObserver
from extproc.pods.modelindex import NOTHING, Listing, ModelIndex
from extproc.pods.peerpicks import PeerPicks
from extproc.pods.podstate import PodState
from extproc.pods.serverflags import PoolSettings, ServerFlags
from extproc.pods.speeds import Speeds
from extproc.pods.tenants import EndpointPlaces
from extproc.pods.views import Views
from extproc.tenancy import SlotUse
from extproc.types import Endpoint, LoadReport, ModelCard, Snapshot

__all__ = ["InFlight", "Pool", "PoolSettings"]


class Pool:
    """All endpoints of one base model, with bookkeeping.

    Args:
        counts_first: Foreign requests on the first endpoints count for the choice at once, at the
            first look. They are not those of a herd, and without them a router that has just
            started would choose by chance.
        queue: Gets news of room, and of what requests get.
        catalog: Gets the models that requests of other routers ask for.
        observer: Gets our picks, if there is one.

    Attributes:
        speeds: Learns their costs.
        prefix_index: Prefixes of prompts in their KV caches.
        find: Returns the endpoint with an address, None where it is not in the pool.
        flights: Our picks there; `peer_picks` has other routers'.
        models: All that they list.
        num_listings: How often endpoints, or the models that they list, have changed.
        columns: Returns the pool at a time `now`, sorted by address; true until something is
            recorded.
    """

    def __init__(
        self,
        settings: PoolSettings | None = None,
        outliers: OutlierSettings | None = None,
        *,
        counts_first: bool = False,
        queue: WaitingLine = NOBODY,
        catalog: WorkObserver = NOBODY,
        observer: PickObserver | None = None,
    ) -> None:
        self._on_due: Callable[[str], None] = lambda _: None
        self._counts_first = counts_first
        self.queue = queue
        self._settings = settings or PoolSettings()
        self.speeds = Speeds()
        self.prefix_index = PrefixIndex()
        self._pods: dict[str, EndpointState] = {}
        self.find = self._pods.get
        self.outliers = Outliers(outliers, self._touch)
        self._views = Views(self._settings, self.outliers)
        self.columns = self._views.columns
        self.models = ModelIndex()
        self.num_listings = 0
        self._declared: Mapping[str, ModelCard] = {}
        self.peer_picks = PeerPicks(self.find, queue=queue, catalog=catalog)
        self._disbelief = Disbelief(self._takers)
        self.flights = Flights(
            self.find,
            disbelief=self._disbelief,
            peer_picks=self.peer_picks,
            prefix_index=self.prefix_index,
            outliers=self.outliers,
            queue=queue,
            observer=observer,
        )

    # --- reports ----------------------------------------------------------------------------

    def configure(self, settings: PoolSettings, outliers: OutlierSettings | None = None) -> None:
        """Apply new thresholds and flags."""
        self._settings = settings
        self._views.configure(settings)
        self.outliers.configure(outliers or OutlierSettings())
        for pod in self._pods.values():
            pod.describe(pod.endpoint, settings)
        self.speeds.set_endpoints(self._pods.values())

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the set of endpoints; those that stay keep their state."""
        pods: dict[str, EndpointState] = {}
        for endpoint in sorted(endpoints, key=lambda e: e.address):
            known = self._pods.get(endpoint.address) or EndpointState(
                endpoint, self._views.stale, self._due
            )
            known.load.foreign.counts_first |= self._counts_first
            known.describe(endpoint, self._settings)
            known.listed.declare(self._declared)
            pods[endpoint.address] = known
        self._counts_first = self._counts_first and not pods
        gone = [each for address, each in self._pods.items() if address not in pods]
        self._pods.clear()
        self._pods.update(pods)
        self.num_listings += 1
        self._views.set_endpoints(pods.values())
        self.speeds.set_endpoints(pods.values())
        self.outliers.set_endpoints(pods)
        for each in gone:
            each.load.kv_cache.lose()
            self.peer_picks.drop(each.peers)
            self._disbelief.drop(each)
            self.models.replace(each.listed.models or NOTHING, NOTHING)

    def declare(self, cards: Mapping[str, ModelCard], *, now: float) -> None:
        """Replace the adapters that endpoints which look for them find by themselves, by name.

        Args:
            cards: With the base model as `parent`, "" for any; a new mapping at each change.
        """
        self._declared = cards
        for pod in self._pods.values():
            pod.listed.declare(cards)
        self.queue.freed(now)

    def record_report(
        self,
        address: str,
        report: LoadReport,
        *,
        taken_at_s: float,
        asked_at_s: float | None = None,
        next_s: float = START_S,
        rest_s: float = 0.0,
    ) -> bool:
        """Record a report, true at some moment from `asked_at_s` to `taken_at_s`.

        Args:
            next_s: From one question to an endpoint that surprises to the next.
            rest_s: The longest time until this one is asked again: its report expires later by
                that, unless a call of ours fails.

        Return whether the process restarted, or may have: nobody listened at its address before,
        and its engine tells no start time. A new process has nothing until it has listed it.
        """
        if (pod := self.find(address)) is None:
            return False
        returns = pod.health.is_unreachable and report.process_start_wall_s is None
        restarted = returns or pod.reports.is_restart(report)
        if restarted:
            before = pod.listed.models or NOTHING
            pod.restarted(taken_at_s)
            self.models.replace(before, NOTHING)
            self.num_listings += 1
        asked_at_s = taken_at_s if asked_at_s is None else asked_at_s
        self._answered(pod, asked_at_s, now=taken_at_s, restarted=restarted)
        pod.row.renew()
        pod.reported(
            report,
            next_s=next_s,
            rest_s=rest_s,
            steady_s=ALONE_S if self.flights.num_alike == 1 else STEADY_S,
            is_new=restarted,
            asked_at_s=asked_at_s,
            now=taken_at_s,
        )
        self._views.renew(pod, now=taken_at_s)
        self.queue.freed(taken_at_s)
        return restarted

    def tell_due(self, on_due: Callable[[str], None]) -> None:
        """Call this with the address of each endpoint to which so much was sent that its next
        report is due."""
        self._on_due = on_due

    def record_late(self, address: str) -> None:
        """Record that an endpoint was asked for a report, and has given none."""
        if (pod := self.find(address)) is not None:
            pod.reports.missed()

    def record_models(
        self,
        address: str,
        cards: Sequence[ModelCard],
        *,
        now: float,
        asked_at_s: float | None = None,
    ) -> bool:
        """Record the models that an endpoint lists, in its order; requested at `asked_at_s`.

        Return whether they are others than before.
        """
        if (pod := self.find(address)) is None:
            return False
        asked_at_s = now if asked_at_s is None else asked_at_s
        returns = pod.health.is_unreachable
        self._answered(pod, asked_at_s, now=now)
        before = pod.listed.models or NOTHING
        models = self.models.listing(cards, before)
        is_other = models != before or pod.listed.models is None
        has_begun = returns or before.keys() - models
        if has_begun and not pod.reports.says_start(now, self._settings):
            # Then these are the only signs of a restart.
            pod.load.prompts.bound(now)
            pod.load.forget_memory()
            pod.health.version = None
        adapters = [card.id for card in models.values() if card.parent is not None]
        pod.load.residency.listed(adapters, now=now)
        if is_other:
            pod.listed.replace(models)
            pod.peers.listed(now=now)
            pod.reports.expected.surprise()
            self.models.replace(before, models)
            self.num_listings += 1
        self._listed(pod, models, asked_at_s, now=now)
        return is_other

    def record_same_models(self, address: str, *, now: float, asked_at_s: float) -> bool:
        """Record that an endpoint lists what it listed last.

        Return False where that is to be recorded by `record_models`: it has been forgotten, or may
        be another process's.
        """
        pod = self.find(address)
        if pod is None or pod.listed.models is None or pod.health.is_unreachable:
            return False
        self._answered(pod, asked_at_s, now=now)
        pod.load.residency.listed_same()
        self._listed(pod, pod.listed.models, asked_at_s, now=now)
        return True

    def _listed(
        self, pod: EndpointState, models: Listing, asked_at_s: float, *, now: float
    ) -> None:
        """Record that an endpoint has listed its models."""
        self._disbelief.listed(pod, models, asked_at_s=asked_at_s)
        self.outliers.listed(pod.address, models, asked_at_s=asked_at_s, now=now)
        pod.listed.answered(asked_at_s)
        if pod.row.columns is None:  # that it has answered may end some trouble
            pod.row.touch()
        self.queue.freed(now)

    def record_silence(self, address: str) -> None:
        """Record that an endpoint failed to list its models."""
        if (pod := self.find(address)) is not None:
            pod.health.answers = False
            pod.listed.was_silent()
            pod.reports.missed()
            pod.row.renew()

    def record_unreachable(self, address: str) -> None:
        """Record that a call of our own could not connect: refused, or no route.

        That holds until a call succeeds, even when all reports have expired. A timeout does not
        count: it may be this process that was stopped.
        """
        if (pod := self.find(address)) is not None:
            pod.health.is_unreachable = True
            pod.reports.missed()
            pod.row.renew()

    def record_health(self, address: str, *, is_dead: bool, asked_at_s: float) -> bool:
        """Record what an endpoint's health check says of its engine, which may list models still.

        Dead holds until it says otherwise, or a new process starts. Return whether it is news.
        """
        pod = self.find(address)
        if pod is None or asked_at_s < pod.health.restarted_at_s:
            return False
        was_dead = pod.health.died_at_s is not None
        pod.health.died_at_s = asked_at_s if is_dead else None
        pod.row.renew()
        self.queue.freed(asked_at_s)
        return is_dead is not was_dead

    def record_version(self, address: str, version: str, *, asked_at_s: float) -> None:
        """Record the version of an endpoint's engine, "" for one that tells none."""
        if (pod := self.find(address)) is not None and asked_at_s >= pod.health.restarted_at_s:
            pod.health.version = version
            pod.row.renew()
            self.queue.freed(asked_at_s)

    def lacks_version(self, address: str) -> bool:
        """Return whether an endpoint's process has not been asked for its version yet."""
        return (pod := self.find(address)) is not None and pod.health.version is None

    def record_orca(self, address: str, load: tuple[float, int]) -> None:
        """Record (KV use, waiting requests) from a response header: newer than the last scrape."""
        if (pod := self.find(address)) is not None:
            pod.reports.correct(*load)

    def flags(self, address: str) -> ServerFlags:
        """Return what an endpoint's server was started with."""
        pod = self.find(address)
        return self._settings.flags_of("") if pod is None else pod.flags

    def pod_state(self, address: str, *, now: float) -> PodState | None:
        """Return one of `pod_states`; None where it has left."""
        if (pod := self.find(address)) is None:
            return None
        return pod.pod_state(self.columns(now=now).views[pod.row.number])

    def pod_states(self, *, now: float) -> list[PodState]:
        """Return the endpoints as those see them who load adapters."""
        return [
            pod.pod_state(view)
            for pod, view in zip(self._pods.values(), self.snapshot(now=now).endpoints, strict=True)
        ]

    # --- state ------------------------------------------------------------------------------

    def places(self, address: str) -> tuple[float, int]:
        """Return for how many sequences an endpoint of the columns has room, and how many are
        there: see `Room`."""
        return self._pods[address].load.places()

    def running_places(self, address: str) -> EndpointPlaces:
        """Return those of such an endpoint in which nobody has to wait."""
        pod = self._pods[address]
        most, num_there = pod.load.places()
        spare = pod.load.room.num_spare if pod.flags.max_in_flight is None else 0
        return EndpointPlaces(pod.group, most - spare, num_there)

    def oldest_in_flight_s(self, *, now: float) -> dict[str, float]:
        """Return the age in seconds of each endpoint's oldest unfinished pick, 0 without any."""
        return {
            address: now - min([f.started_at_s for f in pod.ours.flights.values()], default=now)
            for address, pod in self._pods.items()
        }

    def model(self, name: str) -> ModelCard | None:
        """Return the model registered under `name` on any endpoint."""
        found = self.models.by_name.get(name)
        if found is None and name in self._declared:
            cards = (each.listed.card_of(name) for each in self._pods.values())
            found = next((card for card in cards if card is not None), None)
        return found

    def base_of(self, pools: frozenset[str]) -> str:
        """Return the one base model of the endpoints of some pools; "" for none, or several.

        The word of a single one of several endpoints does not count.
        """
        lists = [
            each.listed.models.bases
            for each in self._pods.values()
            if each.listed.models is not None
            and (not pools or not pools.isdisjoint(each.endpoint.pools))
        ]
        counts = Counter(name for bases in lists for name in bases)
        found = [name for name, num in counts.items() if num > 1 or len(lists) == 1]
        return found[0] if len(found) == 1 else ""

    def base_names(self) -> frozenset[str]:
        """Return the base models that most endpoints of some pool list, those counted that have not
        listed theirs, and at least two do. A fleet of one endpoint has those of that one.
        """
        num_of: Counter[str] = Counter()
        listing: Counter[tuple[str, str]] = Counter()
        for each in self._pods.values():
            for pool in each.endpoint.pools or ("",):
                num_of[pool] += 1
                listing.update((pool, name) for name in (each.listed.models or NOTHING).bases)
        least = min(2, len(self._pods))
        return frozenset(
            name for (pool, name), num in listing.items() if num >= least and 2 * num > num_of[pool]
        )

    def with_base(self, name: str) -> frozenset[str]:
        """Return the addresses of the endpoints that list a name as a base model."""
        found = self._pods.items()
        return frozenset(a for a, each in found if name in (each.listed.models or NOTHING).bases)

    def group_of(self, address: str) -> str:
        """Return an endpoint's group of `PoolSettings.groups`, "" for none."""
        return "" if (pod := self.find(address)) is None else pod.group

    def in_pool(self, address: str, name: str) -> bool:
        """Return whether an endpoint is of an InferencePool; of one alone, all are."""
        pod = self.find(address)
        pools = None if pod is None else pod.endpoint.pools
        return pools is not None and (not pools or name in pools)

    def slots(self, address: str) -> Mapping[str, SlotUse]:
        """Return the adapters that routers know to run on an endpoint."""
        return {} if (pod := self.find(address)) is None else pod.load.slots

    def snapshot(self, *, now: float) -> Snapshot:
        """Return the pool at `now`, sorted by address. Only endpoints that changed cost time."""
        return Snapshot(tuple(self.columns(now=now).views), now, self.flights.num_routers)

    # --- inside -----------------------------------------------------------------------------

    def _answered(
        self, pod: EndpointState, asked_at_s: float, *, now: float, restarted: bool = False
    ) -> None:
        """Record that an endpoint answered a call of ours."""
        self.outliers.answered(pod.address, asked_at_s=asked_at_s)
        pod.load.fullness.answered(asked_at_s=asked_at_s)
        if pod.health.answered(now=now, restarted=restarted):
            self.outliers.restarted(pod.address, now=now)

    def _touch(self, address: str) -> None:
        if (pod := self.find(address)) is not None:
            pod.row.touch()

    def _due(self, address: str) -> None:
        self._on_due(address)

    def _takers(self, now: float) -> list[EndpointState]:
        """Return the endpoints that can take requests at `now`."""
        pairs = zip(self._pods.values(), self.columns(now=now).views, strict=True)
        return [each for each, view in pairs if view.is_ready and not view.has_flaw]
