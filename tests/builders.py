"""Values with every field defaulted, so that a test names only what matters to it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from extproc.openai import Encoded, list_in_passes
from extproc.passes import last
from extproc.pods.completion import Completion
from extproc.pods.flights import Trust
from extproc.pods.listeners import PickObserver
from extproc.pods.peerpicks import pick_ids
from extproc.pods.pool import Pool, PoolSettings
from extproc.queue import HoldQueue, Waiting
from extproc.request.messages import BodyMode, RequestHeaders
from extproc.routing.catalog import Catalog
from extproc.routing.picker import Picker
from extproc.routing.policies import BUILT_IN
from extproc.routing.router import Router
from extproc.types import (
    Endpoint,
    EndpointView,
    LoadReport,
    ModelCard,
    Outcome,
    Pick,
    RequestInfo,
    Snapshot,
)

BASE = "base"
"""Name of the base model."""


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def address(number: int) -> str:
    """The address of endpoint `number`; the order of numbers below 10 is that of addresses."""
    return f"10.0.0.{number}:8000"


def endpoint(number: int = 1, *, is_ready: bool = True, name: str = "") -> Endpoint:
    return Endpoint(address(number), f"http://{address(number)}", name, is_ready)


def endpoint_view(number: int = 1, **fields: Any) -> EndpointView:
    """A view of an idle endpoint that lists the base model and the adapters a, b, c."""
    defaults: dict[str, Any] = {"registered": frozenset({BASE, "a", "b", "c"})}
    if "pending_by_adapter" in fields:
        defaults["num_pending"] = sum(fields["pending_by_adapter"].values())
    return EndpointView(address(number), **{**defaults, **fields})


def picker_of(policy: str = "founding", *, seed: int = 0, **fields: Any) -> Picker:
    """A picker with one of our policies; its picks are those of the router `r`."""
    rng, next_id = random.Random(seed), pick_ids("r")
    return Picker(BUILT_IN[policy](), policy, rng=rng, next_id=next_id, **fields)


def routing(
    picker: Picker | None = None,
    settings: PoolSettings | None = None,
    *,
    at: Callable[[float], None] = lambda _at_s: None,
    on_change: Callable[[Waiting], None] | None = None,
    observer: PickObserver | None = None,
    catalog: Catalog | None = None,
    **fields: Any,
) -> Router:
    """A router with a pool of its own; of the founding rule, without another picker."""
    queue, catalog = HoldQueue(at=at, on_change=on_change), catalog or Catalog()
    pool = Pool(settings, queue=queue, catalog=catalog, observer=observer)
    return Router(pool, picker or picker_of(), queue, catalog, **fields)


def fill(
    pool: Pool, *numbers: int, adapters: Iterable[str] = ("a",), load: LoadReport | None = None
) -> Pool:
    """Have endpoints that list the base model and `adapters`, and report `load` if it is given."""
    pool.set_endpoints(map(endpoint, numbers))
    for each in map(address, numbers):
        if load is not None:
            pool.record_report(each, load, taken_at_s=0.0)
        pool.record_models(each, cards(*adapters), now=0.0)
    return pool


def snapshot(*views: EndpointView, now: float = 0.0) -> Snapshot:
    return Snapshot(tuple(sorted(views, key=lambda view: view.address)), now)


def report(**fields: Any) -> LoadReport:
    return LoadReport(**fields)


def request(adapter: str | None = "a", **fields: Any) -> RequestInfo:
    """A request for an adapter, or for the base model where it is None."""
    defaults: dict[str, Any] = {"model": adapter or BASE, "path": "/v1/completions"}
    return RequestInfo(adapter=adapter, **{**defaults, **fields})


def by_pages(grace_s: float) -> Trust:
    """Pods' own counts are all that is believed of ends."""
    return Trust(grace_s, inf, lambda *_: inf)


def pick(
    id: str = "pick-1", number: int = 1, *, info: RequestInfo | None = None, **fields: Any
) -> Pick:
    """A pick of endpoint `number`."""
    defaults: dict[str, Any] = {"endpoints": (address(number),), "policy": "p", "reason": "r"}
    return Pick(id=id, request=info or request(), **{**defaults, **fields})


def completion(pick_id: str = "r-1", **changes: Any) -> Completion:
    """A request that endpoint 1 has answered."""
    answered: dict[str, Any] = {
        "pick_id": pick_id, "request_id": "", "address": address(1), "status": 200,
        "outcome": Outcome.COMPLETED, "is_from_endpoint": True, "first_byte_s": 0.1,
        "duration_s": 0.2, "attempts": 1, "lag_s": 0.0, "orca": "", "first_body_byte_s": 0.1,
    }  # fmt: skip
    return Completion(**(answered | changes))


def base_card(**fields: Any) -> ModelCard:
    return ModelCard(BASE, **fields)


def adapter_card(name: str = "a", **fields: Any) -> ModelCard:
    return ModelCard(name, parent=BASE, **fields)


def cards(*adapters: str) -> list[ModelCard]:
    """The model cards of an endpoint that serves the base model and `adapters`."""
    return [base_card(), *(adapter_card(name) for name in adapters)]


def body(model: str = "a", **fields: Any) -> bytes:
    """A JSON request body."""
    return json.dumps({"model": model, "prompt": "p", **fields}).encode()


def request_headers(
    method: str = "POST",
    path: str = "/v1/completions",
    *,
    headers: dict[str, str] | None = None,
    body_mode: BodyMode | None = BodyMode.BUFFERED,
    **fields: Any,
) -> RequestHeaders:
    """The headers of a completion request whose body comes BUFFERED."""
    pseudo = {":method": method, ":path": path, "content-type": "application/json"}
    return RequestHeaders({**pseudo, **(headers or {})}, body_mode=body_mode, **fields)


def models_body(cards: Iterable[ModelCard], encoded: Encoded | None = None) -> bytes:
    """The body of `GET /v1/models`, made at once."""
    return last(list_in_passes({card.id: card for card in cards}, encoded))
