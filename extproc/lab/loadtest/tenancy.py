"""What the requests of a workload claim, as headers.

Routers of a virtual fleet get the same claims as values (`extproc.lab.fleet.tenancy`).
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.lab.fleet.tenancy import claim_of
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import PLAIN, Tenant
from extproc.request.controlheaders import FAIRNESS_ID, OBJECTIVE, SLO_TPOT_MS, SLO_TTFT_MS
from extproc.tenancy import Claim


def claim_headers(
    tenants: Mapping[str, Tenant], declared: Slo | None
) -> dict[str, Mapping[str, str]]:
    """Return the headers of each tenant's requests; under "" those of everybody else's.

    An objective, in the words of these headers, names a priority: that of the tenant of its name.
    """
    claims = {name: claim_of(tenant, declared, name) for name, tenant in tenants.items()}
    return {
        name: _headers(claim) for name, claim in {"": claim_of(PLAIN, declared), **claims}.items()
    }


def _headers(claim: Claim) -> Mapping[str, str]:
    headers = {
        FAIRNESS_ID[0]: claim.tenant,
        OBJECTIVE[0]: claim.tenant if claim.priority else "",
        SLO_TTFT_MS[0]: _milliseconds(claim.ttft_s),
        SLO_TPOT_MS[0]: _milliseconds(claim.tpot_s),
    }
    return {name: value for name, value in headers.items() if value}


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3f}"
