"""Claims of real requests: what the router reads of them is what the virtual one is told."""

from __future__ import annotations

import msgspec
import pytest
import yaml

from extproc.config.configured import model_routes, queue_settings
from extproc.config.file import parse_config
from extproc.lab.fleet.router import claim_of
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.loadtest.fleetfiles import claim_headers, router_config
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import PLAIN, Tenant
from extproc.queue import QueueSettings
from extproc.request.controlheaders import names_of, read_hints
from extproc.routing.modelroutes import ModelRoutes
from tests.builders import request

TENANTS = {
    "people": Tenant(weight=2.5),
    "batch": Tenant(priority=-1, has_objectives=False),
    "gold": Tenant(priority=3, weight=0.5),
    "plain": Tenant(),
}


@pytest.mark.parametrize("declared", [None, Slo(0.6, 0.0125), Slo(1234.5, 1.0)])
@pytest.mark.parametrize("name", [*TENANTS, ""])
def test_a_request_claims_of_the_router_what_it_claims_in_virtual_time(
    name: str, declared: Slo | None
) -> None:
    settings = FleetSettings(declared=declared)
    pods = {"discovery": {"static": [{"address": "127.0.0.1:1"}]}}
    config = parse_config(yaml.safe_dump({**pods, **router_config("founding", settings, TENANTS)}))
    routes = ModelRoutes(model_routes(config), config.admission.priorities)
    headers = claim_headers(TENANTS, declared)[name]
    hints = read_hints(headers, names_of(config.request.trusted_headers))

    claim = routes.claim(request("any", hints=hints))

    told = claim_of(TENANTS.get(name, PLAIN), declared, name)
    assert msgspec.structs.replace(claim, route="") == told


def test_who_claims_nothing_sends_no_such_header() -> None:
    assert claim_headers({}, None) == {"": {}}


def test_the_router_s_queue_is_the_suite_s() -> None:
    queue = QueueSettings(
        order="first_come", fair=False, ageing_s=3.0, max_requests=50, max_bytes=6000
    )
    section = router_config("founding", FleetSettings(queue=queue))
    pods = {"discovery": {"static": [{"address": "127.0.0.1:1"}]}}

    assert queue_settings(parse_config(yaml.safe_dump({**pods, **section}))) == queue
