"""The settings of each part, made from the configuration."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct
from yarl import URL

from extproc import __version__
from extproc.adapters.adaptercalls import CallSettings
from extproc.adapters.adapterfiles import Root
from extproc.adapters.adapterstates import AdapterSettings
from extproc.adapters.adapterstore import RegistrationSettings
from extproc.adapters.tokens import read_tokens
from extproc.config import Config
from extproc.config.base import Section
from extproc.config.configfile import usable
from extproc.config.discovery import KubernetesConfig
from extproc.config.pods import PodSettings
from extproc.config.request import MESSAGE_OVERHEAD_BYTES
from extproc.config.routes import ObjectiveConfig
from extproc.costs import BYTES_PER_TOKEN, Costs
from extproc.discovery.kubernetes.source import KubernetesSettings
from extproc.files.tls import client_context
from extproc.learned.ejections import OutlierSettings
from extproc.learned.slowness import SlownessSettings
from extproc.paths import RouteTable
from extproc.peers.relay import RelaySettings
from extproc.pods.accounting import AccountingSettings, EndSource
from extproc.pods.serverflags import PoolSettings, ServerFlags
from extproc.queue import QueueSettings
from extproc.reports.engines import PROFILES
from extproc.reports.longpages import LongPages
from extproc.reports.loops import LoopSettings
from extproc.reports.pace import ScrapePace
from extproc.reports.podhttp import base_url
from extproc.reports.podsecrets import PodAccess, PodSecrets
from extproc.request.controlheaders import REMOVED_HEADERS, names_of
from extproc.request.interfaces import StreamSettings
from extproc.request.messages import BodyMode
from extproc.request.sessions import SessionSources
from extproc.request.steering import FIELDS
from extproc.routing.admission import AdmissionSettings, Ranks
from extproc.routing.catalog import CatalogSettings, Undeclared
from extproc.routing.merging import ConfiguredAdapters
from extproc.routing.modelroutes import ModelRoute, Objective
from extproc.routing.picker import PickerSettings
from extproc.routing.rewrites import Rule
from extproc.types import Endpoint
from extproc.wire.budget import DEFAULT_MAX_BYTES, Budget
from extproc.wire.memory import body_share_bytes, memory_limit_bytes
from extproc.wire.transports import ListenerSettings

_Settings = TypeVar("_Settings", bound=Struct)

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
        name: _settings(ServerFlags, settings := group.over(pods), costs=_costs(settings))
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


def _costs(settings: PodSettings) -> Costs:
    """Return the costs of pods; the default ones where none are given."""
    rate, cold_s, cached_s = (
        settings.prefill_tokens_per_s,
        settings.cold_load_s,
        settings.cached_load_s,
    )
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


def call_settings(config: Config) -> CallSettings:
    """Return what calls to pods about adapters have to know."""
    adapters = config.adapters
    roots = tuple(Root(str(each.pod), each.router) for each in adapters.roots)
    return CallSettings(PROFILES[config.pods.engine], roots, adapters.no_effect == "refuse")


def configured_adapters(config: Config) -> ConfiguredAdapters:
    """Return what the configuration says of adapters."""
    adapters, routes = config.adapters, config.routes
    by_route = [route.adapter.declaration(route.models[0]) for route in routes if route.adapter]
    declared = [each.declaration(each.name) for each in adapters.declared]
    with_targets = (route for route in routes if route.targets)
    return ConfiguredAdapters(
        (*by_route, *declared),
        model_routes(config),
        frozenset(model for route in with_targets for model in route.models) - {"*"},
        tuple(str(each.pod).rstrip("/") for each in adapters.roots),
        config.server.fail_open,
    )


def registration_settings(config: Config) -> RegistrationSettings | None:
    """Return who may declare adapters over HTTP; None for nobody.

    Raises:
        ConfigError: The file of tokens cannot be used.
    """
    registration = config.adapters.registration
    if registration is None:
        return None
    with usable("adapters.registration.token_file", registration.token_file):
        read_tokens(registration.token_file)
    return _settings(RegistrationSettings, registration)


def catalog_settings(config: Config) -> CatalogSettings:
    """Return what becomes of requests for adapters that no pod has, or nobody declares."""
    undeclared = Undeclared(config.adapters.undeclared)
    return _settings(CatalogSettings, config.adapters, undeclared=undeclared)


def kubernetes_settings(config: KubernetesConfig | None) -> KubernetesSettings | None:
    """Return what is followed by the Kubernetes API; None for nothing."""
    return None if config is None else _settings(KubernetesSettings, config)


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
    return _settings(AccountingSettings, completions, source=EndSource(completions.source))


def slowness_settings(config: Config) -> SlownessSettings:
    """Return when a pod is called slow."""
    return SlownessSettings(config.pods.slow_ratio, config.pods.slow_for_s)


def stream_settings(config: Config) -> StreamSettings:
    """Return the settings of every stream."""
    request = config.request
    header = request.session_header
    first = () if header is None else (f"header:{header}",)
    return _settings(
        StreamSettings,
        request,
        routes=RouteTable(request.paths),
        version=__version__,
        trusted_headers=names_of(request.trusted_headers),
        removed_headers=REMOVED_HEADERS.difference(request.pass_through),
        removed_fields=frozenset(FIELDS).difference(request.pass_through),
        sessions=SessionSources(*first, *request.session_sources),
        noticed_headers=frozenset(),  # it makes them of the others
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


def budget(config: Config) -> Budget:
    """Return the memory budget of all bodies: as configured, else a share of the memory limit."""
    largest_bytes = max_message_bytes(config)
    max_bytes = config.request.max_bytes_in_memory
    if max_bytes is None:
        share_bytes = body_share_bytes(memory_limit_bytes())
        max_bytes = max(largest_bytes, min(share_bytes, DEFAULT_MAX_BYTES))
    return Budget(max_bytes, max_upload_bytes=largest_bytes)


def listener_settings(config: Config) -> ListenerSettings:
    """Return where the services listen, and how."""
    server, tls = config.server, config.server.tls
    return ListenerSettings(
        server.address,
        None if tls is None else (tls.cert_file, tls.key_file, tls.client_ca_file),
        max_message_bytes(config),
        server.max_concurrent_streams,
    )


def pod_access(config: Config) -> PodAccess:
    """Return the headers, the TLS context and the secrets of our own requests to pods.

    Raises:
        ConfigError: A file cannot be read or used.
    """
    pods = config.pods

    def trust() -> ssl.SSLContext | None:
        return client_context(pods.ca_file, verify=pods.tls_verify) if pods.tls else None

    with usable("pods.ca_file", pods.ca_file):
        context = trust()
    with usable("pods.api_key_file", pods.api_key_file):
        secrets = PodSecrets(pods.api_key_file, pods.ca_file, trust, tls_name=pods.tls_name)
        return {}, context, secrets


def pod_loops(config: Config) -> tuple[LoopSettings, LoopSettings]:
    """Return the settings of the loops that read the pods' metrics and, second, their models.

    Raises:
        ConfigError: As `pod_access`.
    """
    scrape, access, room = config.scrape, pod_access(config), LongPages()
    return (
        LoopSettings(scrape.interval_s, scrape.timeout_s, MAX_SCRAPE_REST_S, *access, room),
        LoopSettings(scrape.models_interval_s, scrape.timeout_s, MAX_MODELS_REST_S, *access, room),
    )


def pace(config: Config) -> ScrapePace:
    """Return what says how often pods are asked for their metrics."""
    scrape = config.scrape
    return ScrapePace(
        scrape.interval_s,
        scrape.expiry_s,
        budget=scrape.budget,
        models_interval_s=scrape.models_interval_s,
    )


def metrics_pages(config: Config) -> Callable[[Endpoint], str]:
    """Return what tells the URL of an endpoint's metrics page."""
    pods = config.pods
    groups = {name: group.over(pods) for name, group in pods.groups.items()}

    def page(endpoint: Endpoint) -> str:
        settings = groups.get(endpoint.group, pods)
        url = URL(base_url(endpoint))
        if settings.metrics_port is not None:
            url = url.with_port(settings.metrics_port)
        return str(url).rstrip("/") + (settings.metrics_path or "/metrics")

    return page
