"""What the requests of a workload claim, as a route and trusted headers would say it."""

from __future__ import annotations

from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Tenant
from extproc.tenancy import Claim


def claim_of(tenant: Tenant, declared: Slo | None, name: str = "") -> Claim:
    """Return the claim of a tenant's requests.

    Args:
        declared: The objectives to claim, if the tenant has any.
        name: Whose share they count for.
    """
    slo = declared if tenant.has_objectives else None
    return Claim(
        tenant=name,
        priority=tenant.priority,
        weight=tenant.weight,
        ttft_s=None if slo is None else slo.ttft_s,
        tpot_s=None if slo is None else slo.tpot_s,
    )
