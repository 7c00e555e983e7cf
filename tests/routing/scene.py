"""Routers and pickers of the routing tests, and what a request got."""

from __future__ import annotations

import random
from math import inf
from typing import Any

from extproc.phrases import FOR_POD
from extproc.pods.peerpicks import pick_ids
from extproc.queue import Ticket
from extproc.routing.admission import AdmissionSettings, Ranks
from extproc.routing.picker import Picker, PickerSettings
from extproc.routing.policies import Founding, Policy
from extproc.routing.router import Router
from extproc.types import Choice, Hints, Pick, Reason, Rejection, RequestInfo, Snapshot, Wait
from tests.builders import fill, picker_of, report, request, routing


def router(
    *numbers: int,
    policy: str = "founding",
    seed: int = 0,
    max_pending: int | None = None,
    **parts: Any,
) -> Router:
    """A router over endpoints that were scraped and list the base and the adapter a."""
    picker = picker_of(policy, seed=seed, admission=AdmissionSettings(max_pending))
    made = routing(picker, **parts)
    fill(made.pool, *numbers, load=report())
    return made


def picker(
    policy: Policy | None = None,
    *,
    seed: int = 0,
    max_pending: int | None = None,
    ranks: Ranks | None = None,
    **settings: Any,
) -> Picker:
    """A picker of the founding rule, without another policy."""
    return Picker(
        policy or Founding(),
        "policy",
        rng=random.Random(seed),
        next_id=pick_ids("r"),
        settings=PickerSettings(**settings),
        admission=AdmissionSettings(max_pending, retry_after_s=3, ranks=ranks or Ranks()),
    )


def ask(
    made: Router, tenant: str = "", num_sequences: int = 1, *, now: float = 0.0, **fields: Any
) -> Pick | Rejection | Ticket:
    """What a tenant's request is told that arrives now; for the base model, without another."""
    if tenant:
        fields["hints"] = Hints(fairness_id=tenant)
    fields = {"num_sequences": num_sequences, "arrived_at_s": now, **fields}
    return made.route(request(None, **fields), now=now)


class Slots:
    """A policy for which an endpoint has room for `num` requests; it may name a time."""

    def __init__(self, num: int = 1, until_s: float = inf, ttft_s: float | None = None) -> None:
        self.num, self.until_s, self.ttft_s = num, until_s, ttft_s

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        if request.path == "/bug":
            raise ArithmeticError("a bug")
        free = [view for view in snapshot.endpoints if view.num_pending < self.num]
        return Choice(free[:1], "free") if free else Wait(self.until_s, "slot")


def routed(result: object) -> Pick:
    assert isinstance(result, Pick)
    return result


def queued(result: object) -> Ticket:
    assert isinstance(result, Ticket)
    return result


def rejected(result: object) -> Rejection:
    assert isinstance(result, Rejection)
    return result


def refused(result: object) -> tuple[int, Reason]:
    return rejected(result).status, rejected(result).reason


def refused_in_the_end(made: Router, held: object) -> tuple[int, Reason]:
    """What a request is told that waits for an endpoint, and none comes."""
    assert queued(held).reason == FOR_POD
    return refused(made.resume(queued(held), now=queued(held).give_up_s))
