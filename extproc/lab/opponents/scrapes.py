"""What a picker sees that knows the endpoints by their metrics pages alone.

llm-d's default scorers and the filter tree before them read scrapes every 50 ms (llm-d-router
v0.10.0, `--refresh-metrics-interval`) and count nothing themselves, so that what was sent since is
not there, and an adapter is where a page last named it. Some of llm-d's scorers count the picker's
own requests in flight; those a policy finds in `num_in_flight`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from extproc.routing.policies import Policy
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait


@dataclass(slots=True)
class ScrapesOnly:
    """A policy that sees each endpoint's last report, and its own number of requests there.

    Nothing else: no adapters of requests since, no residency, nothing that other routers tell.
    """

    policy: Policy

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Let the policy choose by the reports."""
        views = {view.address: view for view in snapshot.endpoints}
        scraped = tuple(map(as_scraped, views.values()))
        choice = self.policy.choose(Snapshot(scraped, snapshot.now), request, rng=rng)
        if isinstance(choice, Wait):
            return choice
        return Choice(tuple(views[view.address] for view in choice.endpoints), choice.reason)


def as_scraped(view: EndpointView) -> EndpointView:
    """Return an endpoint as its last report shows it."""
    return replace(
        view,
        pending_by_adapter=dict.fromkeys(sorted(view.reported_adapters), 1),
        num_pending=view.num_running + view.num_waiting,
        num_told=0,
        num_unseen=0,
        num_foreign=0,
        gpu_adapters=(),
        cpu_adapters=(),
        num_adapter_loads=0,
        prompts_done_s=-inf,
    )
