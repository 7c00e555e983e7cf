"""Where endpoints come from: the one source that `discovery` names.

Each is a file in `discovery/` that is named like its section, with a class named accordingly
(`dns`, `DnsDiscovery`; see `Source`). It is imported only where it is configured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from extproc.config.base import Section
from extproc.config.discovery import DiscoveryConfig
from extproc.discovery.endpointlist import Source
from extproc.discovery.kubernetes.source import KubernetesDiscovery
from extproc.meters import Meters
from extproc.types import Endpoint

log = logging.getLogger(__name__)


def make_source(
    config: DiscoveryConfig,
    kubernetes: KubernetesDiscovery,
    meters: Meters,
    *,
    on_endpoints: Callable[[Sequence[Endpoint]], None],
    scheme: str,
    clock: Callable[[], float],
) -> Source:
    """Return the configured source.

    Args:
        kubernetes: The one that follows more than endpoints, made in any case.
        meters: Gets the metric of lookups.
        scheme: Of the endpoints' URLs.
        clock: Monotonic seconds.
    """
    name, section = config.source
    source: Any = kubernetes
    if name != "kubernetes":
        kind = getattr(import_module(f"extproc.discovery.{name}"), f"{name.capitalize()}Discovery")
        if isinstance(section, Section):
            fields = section.model_dump()
        else:
            fields = config.model_dump(include={name, f"{name}_interval_s"})
        source = kind(
            **fields,
            on_endpoints=on_endpoints,
            on_failure=lambda message: log.error("pods: %s", message),
            on_recovery=lambda: log.info("pods: discovery works again"),
            clock=clock,
            scheme=scheme,
        )
    meters.add_counters(
        "dns_failures",
        "Lookups of discovery.dns that failed, wholly or in part. The pods stay as they were.",
        "name",
        lambda: {config.dns.name: source.num_failures} if config.dns else {},
    )
    made: Source = source
    return made
