"""One endpoint's state in the pool."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from extproc.costs import Probe
from extproc.pods.listedmodels import ListedModels
from extproc.pods.podhealth import MIN_LIFE_S, PodHealth
from extproc.pods.podload import PodLoad
from extproc.pods.podreports import PodReports
from extproc.pods.podrequests import Flight, OwnRequests, PeerRequests
from extproc.pods.podrow import PodRow
from extproc.pods.podstate import PodState
from extproc.pods.serverflags import PoolSettings, ServerFlags
from extproc.types import Endpoint, EndpointView, LoadReport


class EndpointState:
    """All that is known of one endpoint, each part by itself. `describe` is to follow.

    Args:
        stale: Its row adds itself to these once it is no longer true.
        due: Called with its address once so much was sent there that its next report is due.

    Attributes:
        group: Of `PoolSettings.groups`, "" for none; its `flags` are this endpoint's.
        load: The requests of all routers here; `ours` and `peers` are whose they are.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        stale: dict[PodRow, None],
        due: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.endpoint, self.address = endpoint, endpoint.address
        self.group, self.flags = "", ServerFlags()
        self.row = row = PodRow(stale)
        self.health, self.listed, self.reports = PodHealth(row), ListedModels(row), PodReports(row)
        self.load = PodLoad(self.address, self.flags, row, self.reports.expected, due)
        self.ours = OwnRequests(self.load)
        self.peers = PeerRequests(self.load, self.listed)

    def describe(self, endpoint: Endpoint, settings: PoolSettings) -> None:
        """Apply what discovery and the configuration say of it; other flags hold from now on.

        The size of its cache is the configured one again: what was learned, its group has learned.
        """
        self.endpoint = endpoint
        self.row.renew()
        group = settings.group_of(endpoint)
        flags = settings.flags_of(group)
        if (group, flags) != (self.group, self.flags):
            self.group, self.flags, load = group, flags, self.load
            load.prompts.price(flags.costs)
            load.max_in_flight = flags.max_in_flight
            sizes = {"max_loras": flags.max_loras, "max_cpu_loras": flags.max_cpu_loras}
            self.load.residency.configure(**sizes)
            self.listed.configure(is_resolver=flags.resolver is True)

    def reported(
        self,
        report: LoadReport,
        *,
        next_s: float,
        rest_s: float,
        steady_s: float,
        is_new: bool,
        asked_at_s: float,
        now: float,
    ) -> None:
        """Record a report, true at some moment from `asked_at_s` to `now`, as far as it is
        believed; see `record_report` of the pool.

        Args:
            steady_s: After that, foreign requests count for the choice.
            is_new: Its process is.
        """
        load, reports, before_s = self.load, self.reports, self.reports.reported_at_s
        num_since, num_known = self.ours.num_since, load.num_known
        foreign, prompts, adapters = load.foreign, load.prompts, load.residency.in_flight
        report = reports.trust.of(report, num_known, adapters, now=now)
        load.room.reported(
            report,
            num_since,
            num_requests=len(self.ours.flights) + foreign.num_requests,
            next_s=next_s,
            asked_at_s=asked_at_s,
            now=now,
        )
        reports.reported(report, rest_s=rest_s, now=now)
        has_run_through = before_s is not None and num_known > num_since(before_s)
        reports.decoding.reported(report, has_run_through=has_run_through, now=now)
        load.fullness.reported(report, now=now)
        decode = reports.decoding.decode
        if decode is not prompts.costs.decode:
            prompts.price(replace(prompts.costs, decode=decode))
        prompts.reported(report, asked_at_s=asked_at_s, now=now)
        if report.kv_cache_tokens is not None:
            load.kv_cache.resize(report.kv_cache_tokens)
        load.residency.reported(report, asked_at_s=asked_at_s, now=now)
        foreign.reported(report, load.num_sequences, adapters, steady_s=steady_s, now=now)
        reports.expected.reported(
            report,
            is_new=is_new,
            num_known=num_known,
            num_picks=load.num_picks,
            adapters=adapters,
            token_s=0.0 if decode is None else decode.token_s,
            is_doubtful=foreign.num_steady > 0 or reports.trust.is_old,
            stood_s=reports.trust.stood_s(now),
            unseen_s=reports.decoding.unseen_s,
            limit=self.flags.max_in_flight or load.room.limit,
            now=now,
        )

    def is_as_expected(self, num_held: int) -> bool:
        """Return whether the last report said what was expected, and nothing is known since for
        which the next is due, where so many requests are held by the router."""
        health, expected = self.health, self.reports.expected
        if health.is_unreachable or health.died_at_s is not None or self.listed.disbelieved:
            return False
        if not expected.is_met or any(self.row.trouble) or not self.load.fullness.is_idle:
            return False
        return not num_held and self.load.num_known <= expected.most

    def restarted(self, now: float) -> None:
        """Forget the state of the process before the restart."""
        health, before_s = self.health, self.health.restarted_at_s
        health.restarted_at_s, health.died_at_s, health.version = now, None, None
        self.listed.forget(is_waited_for=now - before_s >= MIN_LIFE_S)
        self.load.restarted()

    def pod_state(self, view: EndpointView) -> PodState:
        """Return it as those see it who load adapters, given its view now."""
        report, flags = self.reports.report, self.flags
        return PodState(
            view.address,
            is_up=view.is_ready and not (view.is_silent or view.is_lost),
            models=self.listed.models,
            listed_at_s=self.listed.listed_at_s,
            max_loras=view.max_loras,
            max_cpu_loras=flags.max_cpu_loras or view.max_loras,
            max_rank=flags.max_lora_rank,
            num_pending=view.num_pending + view.num_foreign,
            pending_by_adapter=view.pending_by_adapter,
            process=report.process_start_wall_s if report and view.is_known else None,
            is_resolver=flags.resolver is True,
            pools=self.endpoint.pools,
            unsafe_version=view.engine_version if view.mixes_weights else "",
        )


class InFlight(Flight, frozen=True, kw_only=True):
    """A pick that has not finished, and the endpoint that it is counted at.

    Attributes:
        trial: Of outlier detection: the result of `Outliers.picked`.
        group: Of the endpoint when it was picked.
        probe: Of the endpoint's costs, where its first token tells (`speeds`).
    """

    pod: EndpointState
    trial: int = 0
    group: str = ""
    probe: Probe | None = None
