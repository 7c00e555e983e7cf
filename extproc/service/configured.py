"""The settings of each part, made from the configuration."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from pydantic.fields import FieldInfo
from yarl import URL

from extproc import __version__
from extproc.adapters.states import AdapterSettings
from extproc.config import Config
from extproc.config.base import Section
from extproc.config.file import ConfigError
from extproc.config.pods import PodSettings
from extproc.config.request import MESSAGE_OVERHEAD_BYTES
from extproc.config.routes import ObjectiveConfig
from extproc.costs import BYTES_PER_TOKEN, Costs
from extproc.files.reading import describe_failure
from extproc.files.tls import client_context
from extproc.learned.ejections import OutlierSettings
from extproc.learned.slowness import SlownessSettings
from extproc.paths import RouteTable
from extproc.peers.relay import RelaySettings
from extproc.pods.accounting import AccountingSettings, Source
from extproc.pods.serverflags import PoolSettings, ServerFlags
from extproc.queue import QueueSettings
from extproc.reports.engines import PROFILES
from extproc.reports.longpages import Room
from extproc.reports.loops import LoopSettings
from extproc.reports.podhttp import base_url
from extproc.reports.podsecrets import PodSecrets
from extproc.request.controlheaders import REMOVED_HEADERS, names_of
from extproc.request.interfaces import StreamSettings
from extproc.request.messages import BodyMode
from extproc.request.steering import FIELDS
from extproc.routing.admission import AdmissionSettings, Ranks
from extproc.routing.catalog import CatalogSettings, Undeclared
from extproc.routing.modelroutes import ModelRoute, Objective
from extproc.routing.picker import PickerSettings
from extproc.routing.rewrites import Rule
from extproc.service.memory import memory_limit_bytes
from extproc.types import Endpoint
from extproc.wire.budget import DEFAULT_MAX_BYTES, Budget

_Settings = TypeVar("_Settings", bound=Struct)

PROGRAM_BYTES = 128 * 1024 * 1024
"""Of the process's memory limit, for the program itself: 80 MB, and twice as much where pods and
tokens fill all that they may."""
BODY_SHARE_OF_MEMORY = 0.25
"""Of the rest, for bodies. There are also the copies of the body that is being read, long responses
of pods, and what the allocator keeps."""
HEARD_S = 2.0
"""From a router's list of models to the end of the requests that it sends by the one before."""
MAX_SCRAPE_REST_S, MAX_MODELS_REST_S = 1.0, 5.0
"""The longest pauses between two requests to a pod that fails."""


def scheme(config: Config) -> str:
    """Return the scheme of our own requests to pods."""
    return "https" if config.pods.tls else "http"


def pool_settings(config: Config) -> PoolSettings:
    """Return the settings of the pool."""
    pods = config.pods
    groups = {
        name: _settings(ServerFlags, traits := group.over(pods), costs=_costs(traits))
        for name, group in pods.groups.items()
    }
    safe_since = PROFILES[pods.engine].safe_loads_since
    return _settings(
        PoolSettings,
        pods,
        report_expiry_s=config.scrape.expiry_s,
        costs=_costs(pods),
        groups=groups,
        safe_loads_since=None if config.adapters.allow_unsafe_versions else safe_since,
    )


def _costs(traits: PodSettings) -> Costs:
    """Return the costs of pods; the default ones where none are given."""
    rate, cold_s, cached_s = traits.prefill_tokens_per_s, traits.cold_load_s, traits.cached_load_s
    default = Costs()
    return Costs(
        1 / (rate * BYTES_PER_TOKEN) if rate else default.prompt_s_per_byte,
        default.cold_load_s if cold_s is None else cold_s,
        default.cached_load_s if cached_s is None else cached_s,
    )


def outlier_settings(config: Config) -> OutlierSettings:
    """Return the settings of the detection of outliers."""
    return _settings(OutlierSettings, config.outliers)


def picker_settings(config: Config) -> PickerSettings:
    """Return the settings of the picker."""
    return _settings(PickerSettings, config.destination, config.request)


def admission_settings(config: Config) -> AdmissionSettings:
    """Return the settings of admission."""
    max_pending = config.admission.max_pending_per_endpoint
    ranks = Ranks.of_rules(config.adapters.ranks)
    return _settings(AdmissionSettings, config.admission, max_pending=max_pending, ranks=ranks)


def model_routes(config: Config) -> tuple[ModelRoute, ...]:
    """Return the routes of models."""
    return tuple(
        _settings(
            ModelRoute,
            route,
            ttft=_objective(route.objectives.ttft),
            tpot=_objective(route.objectives.tpot),
            waits=route.on_unavailable == "wait",
        )
        for route in config.routes
    )


def rewrite_rules(config: Config) -> tuple[Rule, ...]:
    """Return the rules by which models are rewritten; of a route for all models, a generic one."""
    return tuple(
        Rule(
            route.name,
            () if route.models == ("*",) else route.models,
            tuple((target.model, target.weight) for target in route.targets),
        )
        for route in config.routes
        if route.targets
    )


def _objective(config: ObjectiveConfig | None) -> Objective | None:
    return None if config is None else _settings(Objective, config)


def adapter_settings(config: Config) -> AdapterSettings:
    """Return the limits of loading adapters."""
    adapters = config.adapters
    return AdapterSettings(
        max_loads=adapters.max_loads,
        max_loads_per_minute=adapters.max_loads_per_minute,
        load_s=adapters.load_timeout_s,
        unload_s=adapters.unload_timeout_s,
        drain_s=adapters.drain_s,
        grace_s=HEARD_S + config.scrape.models_interval_s,
        checks_effect=adapters.verify == "effect",
        needs_effect=adapters.verify == "effect" and adapters.no_effect == "refuse",
    )


def catalog_settings(config: Config) -> CatalogSettings:
    """Return what becomes of requests for adapters that no pod has, or nobody declares."""
    undeclared = Undeclared(config.adapters.undeclared)
    return _settings(CatalogSettings, config.adapters, undeclared=undeclared)


def queue_settings(config: Config) -> QueueSettings:
    """Return the settings of the queue."""
    return _settings(QueueSettings, config.queue)


def relay_settings(config: Config) -> RelaySettings:
    """Return the limits of what waits for other routers."""
    peers = config.peers
    if peers is None:
        return RelaySettings()
    return RelaySettings(peers.max_queued_bytes, peers.hold_s)


def accounting_settings(config: Config) -> AccountingSettings:
    """Return the settings of accounting."""
    completions = config.completions
    return _settings(AccountingSettings, completions, source=Source(completions.source))


def slowness_settings(config: Config) -> SlownessSettings:
    """Return when a pod is called slow."""
    return SlownessSettings(config.pods.slow_ratio, config.pods.slow_for_s)


def stream_settings(config: Config) -> StreamSettings:
    """Return the settings of every stream."""
    request = config.request
    return _settings(
        StreamSettings,
        request,
        routes=RouteTable(request.paths),
        version=__version__,
        trusted_headers=names_of(request.trusted_headers),
        removed_headers=REMOVED_HEADERS.difference(request.pass_through),
        removed_fields=frozenset(FIELDS).difference(request.pass_through),
        takes_adapter=PROFILES[config.pods.engine].joins_names,
        uses_response_phases=config.completions.source == "response_phases",
        assumed_body_mode=BodyMode[request.assumed_body_mode.upper().replace("-", "_")],
    )


def may_be_asked_again(config: Config) -> bool:
    """Return whether the data plane may ask several times about one request, as gateways do that
    have a filter for each match of a route."""
    is_gateway = config.request.assumed_body_mode == "full-duplex-streamed"
    return is_gateway or config.completions.source == "response_phases"


def _settings(kind: type[_Settings], *sections: Section, **others: Any) -> _Settings:
    """Return settings of a kind; each is the field of that name in a section, or in `others`.

    Raises:
        KeyError: A setting is nowhere.
    """
    given = {name: value for section in sections for name, value in section} | others
    return kind(**{name: given[name] for name in kind.__struct_fields__})


def max_message_bytes(config: Config) -> int:
    """Return the size of the largest gRPC message: the largest body and its overhead."""
    return config.request.max_body_bytes + MESSAGE_OVERHEAD_BYTES


def body_share_bytes(limit_bytes: int) -> int:
    """Return how much of a memory limit is for bodies."""
    return int(max(0, limit_bytes - PROGRAM_BYTES) * BODY_SHARE_OF_MEMORY)


def budget(config: Config) -> Budget:
    """Return the memory budget of all bodies: as configured, else a share of the memory limit."""
    largest_bytes = max_message_bytes(config)
    max_bytes = config.request.max_bytes_in_memory
    if max_bytes is None:
        share_bytes = body_share_bytes(memory_limit_bytes())
        max_bytes = max(largest_bytes, min(share_bytes, DEFAULT_MAX_BYTES))
    return Budget(max_bytes, max_upload_bytes=largest_bytes)


def tls_files(config: Config) -> tuple[Path, Path, Path | None]:
    """Return the listener's certificate files; `server.tls` must be set."""
    tls = config.server.tls
    assert tls is not None
    return tls.cert_file, tls.key_file, tls.client_ca_file


PodAccess = tuple[dict[str, str], ssl.SSLContext | None, PodSecrets]
"""The arguments of a `PodClient`."""


def pod_access(config: Config) -> PodAccess:
    """Return the headers, the TLS context and the secrets of our own requests to pods.

    Raises:
        ConfigError: A file cannot be read or used.
    """
    pods = config.pods

    def trust() -> ssl.SSLContext | None:
        return client_context(pods.ca_file, verify=pods.tls_verify) if pods.tls else None

    try:
        context = trust()
    except OSError as error:
        why = describe_failure(error)
        raise ConfigError(f"pods.ca_file: {pods.ca_file}: {why}") from error
    try:
        return (
            {},
            context,
            PodSecrets(pods.api_key_file, pods.ca_file, trust, tls_name=pods.tls_name),
        )
    except OSError as error:
        why = describe_failure(error)
        raise ConfigError(f"pods.api_key_file: {pods.api_key_file}: {why}") from error


def pod_loops(config: Config) -> tuple[LoopSettings, LoopSettings]:
    """Return the settings of the loops that read the pods' metrics and, second, their models.

    Raises:
        ConfigError: As `pod_access`.
    """
    scrape, access, room = config.scrape, pod_access(config), Room()
    return (
        LoopSettings(scrape.interval_s, scrape.timeout_s, MAX_SCRAPE_REST_S, *access, room),
        LoopSettings(scrape.models_interval_s, scrape.timeout_s, MAX_MODELS_REST_S, *access, room),
    )


def metrics_pages(config: Config) -> Callable[[Endpoint], str]:
    """Return what tells the URL of an endpoint's metrics page."""
    pods = config.pods
    groups = {name: group.over(pods) for name, group in pods.groups.items()}

    def page(endpoint: Endpoint) -> str:
        traits = groups.get(endpoint.group, pods)
        url = URL(base_url(endpoint))
        if traits.metrics_port is not None:
            url = url.with_port(traits.metrics_port)
        return str(url).rstrip("/") + (traits.metrics_path or "/metrics")

    return page


def short_expiry(config: Config) -> Iterator[str]:
    """Yield a line if reports expire before the next ones: pods' load is unknown in between."""
    scrape = config.scrape
    if scrape.expiry_s <= scrape.interval_s:
        yield (
            f"scrape.expiry_s ({scrape.expiry_s:g}) is not more than scrape.interval_s "
            f"({scrape.interval_s:g}): the load of pods will be unknown at times; "
            "raise expiry_s to a few intervals"
        )


def open_doors(config: Config) -> Iterator[str]:
    """Yield a line if Envoy passes requests by where no router answers."""
    if config.server.fail_open:
        yield (
            "server.fail_open: no adapter is private, as Envoy serves any client where no router "
            "answers"
        )


def needs_restart(old: Config, new: Config) -> Iterator[str]:
    """Yield the fields, as `section.field`, that differ and are not live."""
    for section, whole in Config.model_fields.items():
        before, after = getattr(old, section), getattr(new, section)
        if before == after or _is_live(whole):
            continue
        if not (isinstance(before, Section) and isinstance(after, Section)):
            yield section
            continue
        for name, field in type(after).model_fields.items():
            if not _is_live(field) and getattr(before, name) != getattr(after, name):
                yield f"{section}.{name}"


def _is_live(field: FieldInfo) -> bool:
    return (field.description or "").endswith("Live.")
