"""The command `extproc envoy`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from extproc.commands.failure import failing, failure

MIN_S = 0.001
"""A millisecond, Envoy's unit. It refuses 0 for pings and flushes, and would end each message's
timeout at once."""
MAX_MESSAGE_TIMEOUT_S = 3600.0
"""The most that Envoy takes."""
MAX_S = 9_000_000_000.0
"""Envoy counts other times in nanoseconds of 64 bits, and takes a little more than this."""
_HOW, _WHERE, _CLIENTS = "How requests reach router and pods", "Addresses", "Clients"
_LIMITS, _TLS = "Limits and times", "TLS"
_Enum = TypeVar("_Enum", bound=StrEnum)


def envoy(
    mode: Annotated[
        str,
        typer.Option(
            rich_help_panel=_HOW,
            help="How Envoy reaches the pods: original-dst, override-host or full-duplex "
            "(envoy/README.md).",
        ),
    ] = "original-dst",
    preset: Annotated[
        str,
        typer.Option(
            rich_help_panel=_HOW, help="`founding`: matches the router's preset of that name."
        ),
    ] = "",
    body: Annotated[
        str,
        typer.Option(
            rich_help_panel=_HOW,
            help="How request bodies are sent to the router: buffered, buffered-partial, streamed, "
            "streamed-strict, full-duplex or headers-only.",
        ),
    ] = "",
    listen: Annotated[
        str, typer.Option(rich_help_panel=_WHERE, help="ip:port on which Envoy accepts requests.")
    ] = "127.0.0.1:8080",
    admin: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WHERE, help="ip:port of Envoy's admin interface; it has no password."
        ),
    ] = "127.0.0.1:9901",
    router: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_WHERE, help="host:port or unix:PATH of a router; may be repeated."
        ),
    ] = None,
    pod: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_WHERE,
            help="ip:port of a pod, in place of endpoint discovery (override-host only); may be "
            "repeated.",
        ),
    ] = None,
    path: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_CLIENTS, help="Inference path to accept; may be repeated."),
    ] = None,
    registration: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_WHERE,
            help="host:port of a router's admin port. Envoy then serves the paths by which "
            "adapters are declared, and sends their requests there. May be repeated.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_CLIENTS,
            help="Origin of web pages that may use the API, as https://chat.example.com, or `*` "
            "for any; by default browsers refuse all. May be repeated.",
        ),
    ] = None,
    keep_request_id: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_CLIENTS,
            help="Keep a client's x-request-id. Use it only where all clients are trusted: a "
            "client that repeats an id ends another client's request in the router's counts.",
        ),
    ] = False,
    max_body_bytes: Annotated[
        int, typer.Option(rich_help_panel=_LIMITS, min=1, help="Bytes of the largest request body.")
    ] = 26 * 1024 * 1024,
    max_heap_bytes: Annotated[
        int,
        typer.Option(
            rich_help_panel=_LIMITS,
            min=1,
            help="Bytes of Envoy's memory; near this limit, requests are refused.",
        ),
    ] = 1024 * 1024 * 1024,
    max_connections: Annotated[
        int,
        typer.Option(
            rich_help_panel=_LIMITS, min=1, help="Largest number of connections from clients."
        ),
    ] = 50_000,
    request_timeout_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_LIMITS,
            min=0,
            max=MAX_S,
            help="Seconds in which a whole request must arrive; 0: any time. Responses may take "
            "longer.",
        ),
    ] = 60.0,
    router_ping_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_LIMITS,
            min=MIN_S,
            max=MAX_S,
            help="Seconds between two pings of a router, and for its reply.",
        ),
    ] = 5.0,
    message_timeout_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_LIMITS,
            min=MIN_S,
            max=MAX_MESSAGE_TIMEOUT_S,
            help="Seconds for the router to reply to a message.",
        ),
    ] = 10.0,
    max_message_timeout_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_LIMITS,
            min=0,
            max=MAX_MESSAGE_TIMEOUT_S,
            help="Longest time in seconds for which the router may hold a request; 0: no longer "
            "than the message timeout.",
        ),
    ] = 120.0,
    flush_interval_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=_HOW,
            min=MIN_S,
            max=MAX_S,
            help="Seconds by which an access log entry may be delayed.",
        ),
    ] = 0.05,
    response_phases: Annotated[
        bool | None,
        typer.Option(
            rich_help_panel=_HOW, help="Send response headers and trailers to the router, too."
        ),
    ] = None,
    access_log: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_HOW, help="Report finished requests to the router by gRPC access log."
        ),
    ] = True,
    shared_access_log: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_HOW,
            help="One access log for several routers, which pass its entries on to each other "
            "(section `peers`).",
        ),
    ] = False,
    fail_open: Annotated[
        bool | None,
        typer.Option(
            rich_help_panel=_HOW,
            help="With override-host, let Envoy choose a pod while no router can be reached. This "
            "gives up private adapters: any client then gets any adapter. Say so to the router, by "
            "server.fail_open.",
        ),
    ] = None,
    retry_resets: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_HOW,
            help="Try a request on another pod, once, where its own broke the connection before it "
            "answered anything; never on /v1/responses.",
        ),
    ] = True,
    allow_mode_override: Annotated[
        bool, typer.Option(rich_help_panel=_HOW, help="Allow the router to request bodies.")
    ] = False,
    tls_ca: Annotated[
        str,
        typer.Option(
            rich_help_panel=_TLS,
            help="PEM file with the CAs of the router's certificate; turns TLS on.",
        ),
    ] = "",
    tls_cert: Annotated[
        str,
        typer.Option(
            rich_help_panel=_TLS, help="PEM file with a client certificate, for mutual TLS."
        ),
    ] = "",
    tls_key: Annotated[
        str,
        typer.Option(
            rich_help_panel=_TLS, help="PEM file with the client certificate's private key."
        ),
    ] = "",
    tls_name: Annotated[
        str,
        typer.Option(
            rich_help_panel=_TLS,
            help="Name that the router's certificate must have; any by default.",
        ),
    ] = "",
    pod_tls_ca: Annotated[
        str,
        typer.Option(
            rich_help_panel=_TLS,
            help="PEM file with the CAs of the pods' certificates; turns TLS on.",
        ),
    ] = "",
    pod_tls_name: Annotated[
        str,
        typer.Option(
            rich_help_panel=_TLS, help="Name that the pods' certificates must have; any by default."
        ),
    ] = "",
) -> None:
    """Print a complete Envoy configuration."""
    from extproc.config.base import check_host_port, check_ip_port
    from extproc.envoy.bootstrap import BodyDelivery, BootstrapOptions, Mode, TlsFiles, render

    if preset not in ("", "founding"):
        raise failure(f"--preset {preset}: allowed: founding")
    if preset and (mode != "original-dst" or body not in ("", "buffered")):
        raise failure("--preset founding is original-dst with buffered bodies")
    routers = tuple(router or ("127.0.0.1:9002",))
    with failing(ValueError):
        _check_addresses("--listen", (listen,), check_ip_port)
        _check_addresses("--admin", (admin,), check_ip_port)
        _check_addresses("--router", routers, _check_router)
        _check_addresses("--registration", registration or (), check_host_port)
        _check_pods(mode, pod or ())
        _check_paths(path)
        # Options that do nothing without another are refused, lest TLS be off unnoticed.
        for needed, value, option, given in (
            ("--tls-ca", tls_ca, "--tls-cert", tls_cert),
            ("--tls-ca", tls_ca, "--tls-name", tls_name),
            ("--tls-key", tls_key, "--tls-cert", tls_cert),
            ("--tls-cert", tls_cert, "--tls-key", tls_key),
            ("--pod-tls-ca", pod_tls_ca, "--pod-tls-name", pod_tls_name),
        ):
            if given and not value:
                raise ValueError(f"{option} needs {needed}")
        options = BootstrapOptions(
            mode=_one_of(Mode, "--mode", mode),
            request_body=_one_of(BodyDelivery, "--body", body) if body else None,
            response_phases=response_phases,
            listen=listen,
            admin=admin,
            routers=routers,
            router_tls=TlsFiles(tls_ca, tls_cert, tls_key, tls_name) if tls_ca else None,
            pod_tls=TlsFiles(pod_tls_ca, server_name=pod_tls_name) if pod_tls_ca else None,
            static_pods=tuple(pod or ()),
            inference_paths=tuple(path) if path else None,
            registration=tuple(registration or ()),
            cors_origins=tuple(cors_origin or ()),
            keep_request_ids=keep_request_id,
            max_body_bytes=max_body_bytes,
            max_heap_bytes=max_heap_bytes,
            max_connections=max_connections,
            request_timeout_s=request_timeout_s,
            router_ping_s=router_ping_s,
            message_timeout_s=message_timeout_s,
            max_message_timeout_s=max_message_timeout_s,
            access_log_flush_interval_s=flush_interval_s,
            access_log=access_log,
            shared_access_log=shared_access_log,
            failure_mode_allow=fail_open,
            retry_resets=retry_resets,
            allow_mode_override=allow_mode_override,
        )
        typer.echo(render(options), nl=False)


def _one_of(kind: type[_Enum], option: str, value: str) -> _Enum:
    """Return the value as an enum.

    Raises:
        ValueError: It is not a member.
    """
    if value not in list(kind):
        raise ValueError(f"{option} {value}: allowed: {', '.join(kind)}")
    return kind(value)


def _check_addresses(option: str, addresses: Iterable[str], check: Callable[[str], object]) -> None:
    for address in addresses:
        try:
            check(address)
        except ValueError as error:
            raise ValueError(f"{option} {address}: {error}") from None


def _check_router(address: str) -> None:
    from extproc.address import MAX_UNIX_PATH_BYTES
    from extproc.config.base import check_host_port

    if not address.startswith("unix:"):
        check_host_port(address)
    elif not 1 <= len(os.fsencode(address.removeprefix("unix:"))) <= MAX_UNIX_PATH_BYTES:
        raise ValueError(f"must be `unix:PATH`, the path of 1 to {MAX_UNIX_PATH_BYTES} bytes")


def _check_pods(mode: str, pods: Sequence[str]) -> None:
    from extproc.address import check_endpoint_address

    if pods and mode != "override-host":
        raise ValueError(f"--pod: in {mode} mode Envoy does not know the pods")
    _check_addresses("--pod", pods, check_endpoint_address)


def _check_paths(paths: Sequence[str] | None) -> None:
    from extproc.paths import RouteTable

    try:
        RouteTable(paths or ())
    except ValueError as error:
        raise ValueError(f"--path: {error}") from None
