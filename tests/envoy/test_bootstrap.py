"""The printed Envoy configurations: what options change, and that Envoy takes every result."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.address import MAX_UNIX_PATH_BYTES
from extproc.commands.envoy import MAX_MESSAGE_TIMEOUT_S, MAX_S, MIN_S
from extproc.envoy.bootstrap import BodyDelivery, BootstrapOptions, Mode, TlsFiles, render
from extproc.paths import DEFAULT_INFERENCE_PATHS
from extproc.stack.stack import find_envoy
from extproc.wire.httpserver import DEFAULT_HTTP_LIMITS
from tests.commandline import run
from tests.pki import Pki

FOLDER = Path(__file__).parents[2] / "envoy"
ALL_MODES = pytest.mark.parametrize("mode", list(Mode))


def rendered(**options: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.load(render(BootstrapOptions(**options)), yaml.CSafeLoader)
    return document


def manager(document: dict[str, Any]) -> dict[str, Any]:
    listener = document["static_resources"]["listeners"][0]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def ext_proc(document: dict[str, Any]) -> dict[str, Any]:
    filters = manager(document)["http_filters"]
    found: dict[str, Any] = next(f for f in filters if f["name"].endswith("ext_proc"))
    return found["typed_config"]  # type: ignore[no-any-return]


def cluster(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        each for each in document["static_resources"]["clusters"] if each["name"] == name
    )
    return found


@ALL_MODES
def test_without_options_the_file_itself_is_printed_with_its_comments(mode: Mode) -> None:
    expected = (FOLDER / f"{mode}.yaml").read_text()

    assert render(BootstrapOptions(mode=mode)) == expected


@ALL_MODES
def test_the_listed_paths_are_those_of_the_router(mode: Mode) -> None:
    """Otherwise one of the two refuses what the other serves."""
    routes = manager(rendered(mode=mode))["route_config"]["virtual_hosts"][0]["routes"]

    listed = tuple(route["match"]["path"] for route in routes if "path" in route["match"])
    assert listed == tuple(DEFAULT_INFERENCE_PATHS)


@ALL_MODES
def test_paths_that_are_not_listed_get_a_local_reply(mode: Mode) -> None:
    routes = manager(rendered(mode=mode))["route_config"]["virtual_hosts"][0]["routes"]

    assert routes[-1]["match"] == {"prefix": "/"}
    assert routes[-1]["direct_response"] == {"status": 404}


@ALL_MODES
def test_workers_learn_health_check_results_at_once(mode: Mode) -> None:
    """Otherwise a second late: requests go to a router that has gone, and retries, too."""
    settings = cluster(rendered(mode=mode), "router")["common_lb_config"]

    assert settings["update_merge_window"] == "0s"


def test_the_files_share_all_but_what_makes_them_different() -> None:
    """A fix in one of them that is missing in another shows here."""
    documents = [rendered(mode=mode) for mode in Mode]
    for document in documents:
        document["static_resources"]["clusters"].remove(cluster(document, "pods"))
        del cluster(document, "router")["common_lb_config"]
        filter_config = ext_proc(document)
        del filter_config["metadata_options"]["receiving_namespaces"]
        del filter_config["processing_mode"]
        del filter_config["failure_mode_allow"]
        filters = manager(document)["http_filters"]
        filters[:] = [each for each in filters if not each["name"].endswith("header_mutation")]
        filters[-1]["typed_config"].pop("upstream_log", None)  # of attempts: there is one
        for route in manager(document)["route_config"]["virtual_hosts"][0]["routes"]:
            route.get("route", {}).pop("retry_policy", None)

    assert documents[0] == documents[1] == documents[2]


def test_addresses_are_set() -> None:
    document = rendered(listen="0.0.0.0:80", admin="[::1]:1", routers=("10.0.0.1:2",))

    listener = document["static_resources"]["listeners"][0]["address"]
    assert listener["socket_address"] == {"address": "0.0.0.0", "port_value": 80}
    assert document["admin"]["address"]["socket_address"] == {"address": "::1", "port_value": 1}
    router = cluster(document, "router")
    assert router["type"] == "STATIC"
    assert router["load_assignment"]["endpoints"][0]["lb_endpoints"] == [
        {"endpoint": {"address": {"socket_address": {"address": "10.0.0.1", "port_value": 2}}}}
    ]


def test_a_router_with_a_name_is_resolved_by_dns() -> None:
    document = rendered(routers=("router.llm.svc:9002",))

    assert cluster(document, "router")["type"] == "STRICT_DNS"


def test_a_router_behind_a_unix_socket_is_reached_there() -> None:
    document = rendered(routers=("unix:/run/router",))

    endpoint = cluster(document, "router")["load_assignment"]["endpoints"][0]["lb_endpoints"][0]
    assert endpoint == {"endpoint": {"address": {"pipe": {"path": "/run/router"}}}}


@pytest.mark.parametrize("address", ["here", ":80", "a:b", "1.2.3.4:70000", "1.2.3.4:"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        render(BootstrapOptions(routers=(address,)))


def test_each_of_several_routers_gets_every_access_log_entry() -> None:
    document = rendered(routers=("10.0.0.1:2", "10.0.0.2:2"))

    logs = manager(document)["access_log"]
    names = [
        log["typed_config"]["common_config"]["grpc_service"]["envoy_grpc"]["cluster_name"]
        for log in logs
    ]
    addresses = [
        cluster(document, name)["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        for name in names
    ]
    assert [each["address"]["socket_address"]["address"] for each in addresses] == [
        "10.0.0.1",
        "10.0.0.2",
    ]


def test_the_access_log_can_be_slower_or_off() -> None:
    log = manager(rendered(access_log_flush_interval_s=0.5))["access_log"][0]

    assert log["typed_config"]["common_config"]["buffer_flush_interval"] == "0.5s"
    assert "access_log" not in manager(rendered(access_log=False))


@pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST])
def test_attempts_are_told_over_the_same_access_logs(mode: Mode) -> None:
    """So that Envoy keeps their order: it buffers for each configuration of a log."""

    def attempts(**options: Any) -> Any:
        router = manager(rendered(mode=mode, **options))["http_filters"][-1]["typed_config"]
        return router.get("upstream_log")

    for options in (
        {},
        {"routers": ("10.0.0.1:2", "10.0.0.2:2"), "access_log_flush_interval_s": 1},
    ):
        logs = manager(rendered(mode=mode, **options))["access_log"]
        told = attempts(**options)
        assert [each["typed_config"] for each in told] == [each["typed_config"] for each in logs]
        assert all("status_code_filter" in str(each["filter"]) for each in told)
    assert attempts(access_log=False) is None


def test_limits_times_and_failure_mode_are_set() -> None:
    document = rendered(
        max_body_bytes=1000,
        max_heap_bytes=2000,
        max_connections=30,
        request_timeout_s=20,
        router_ping_s=2,
        message_timeout_s=0.5,
        max_message_timeout_s=7,
        failure_mode_allow=True,
        allow_mode_override=True,
    )

    host = manager(document)["route_config"]["virtual_hosts"][0]
    assert host["request_body_buffer_limit"] == 1000
    monitors = document["overload_manager"]["resource_monitors"]
    assert [
        next(v for k, v in each["typed_config"].items() if k != "@type") for each in monitors
    ] == [
        2000,
        30,
    ]
    assert manager(document)["request_timeout"] == "20s"
    http = next(iter(cluster(document, "router")["typed_extension_protocol_options"].values()))
    http2 = http["explicit_http_config"]["http2_protocol_options"]
    assert http2["connection_keepalive"] == {"interval": "2s", "timeout": "1.6s"}
    config = ext_proc(document)
    assert config["message_timeout"] == "0.5s"
    assert config["max_message_timeout"] == "7s"
    assert config["failure_mode_allow"] is True
    assert config["allow_mode_override"] is True


@ALL_MODES
@pytest.mark.parametrize("shared_access_log", [False, True])
def test_every_cluster_that_envoy_speaks_grpc_to_is_pinged(
    mode: Mode, shared_access_log: bool
) -> None:
    """Otherwise a stream to a node that is gone without a reset lasts for a quarter of an hour."""
    routers = ("10.0.0.1:9002", "10.0.0.2:9002")
    document = rendered(mode=mode, routers=routers, shared_access_log=shared_access_log)
    named = set(grpc_clusters(document))

    assert len(named) == (1 if shared_access_log else 3)
    for name in named:
        (http,) = cluster(document, name)["typed_extension_protocol_options"].values()
        http2 = http["explicit_http_config"]["http2_protocol_options"]
        assert http2["connection_keepalive"] == {"interval": "5s", "timeout": "4s"}


def grpc_clusters(part: Any) -> Iterator[str]:
    """The clusters of all gRPC services that a configuration names, wherever."""
    if isinstance(part, dict):
        if "envoy_grpc" in part:
            yield part["envoy_grpc"]["cluster_name"]
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from grpc_clusters(each)


@ALL_MODES
def test_the_access_log_keeps_a_mebibyte_while_a_router_stands_still(mode: Mode) -> None:
    (log,) = manager(rendered(mode=mode))["access_log"]

    assert log["typed_config"]["common_config"]["buffer_size_bytes"] == 1024 * 1024


def test_pages_of_listed_origins_may_use_the_api_and_clients_ids_may_stay() -> None:
    origins = ("https://chat.example.com", "http://[::1]:3000")
    document = rendered(cors_origins=origins, keep_request_ids=True)

    assert manager(document)["http_filters"][0]["name"] == "envoy.filters.http.cors"
    host = manager(document)["route_config"]["virtual_hosts"][0]
    policy = host["typed_per_filter_config"]["envoy.filters.http.cors"]
    assert policy["allow_origin_string_match"] == [{"exact": each} for each in origins]
    assert manager(document)["preserve_external_request_id"] is True
    assert "cors" not in render(BootstrapOptions()), "it is off by default"


@pytest.mark.parametrize("origin", ["", "chat.example.com", "https://a.example/", "**", "null "])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="not an origin"):
        render(BootstrapOptions(cors_origins=(origin,)))


def test_registration_goes_to_the_named_admin_ports_before_any_route_to_pods() -> None:
    document = rendered(registration=("10.0.0.1:9090", "router:9090"), inference_paths=("/v1/x",))
    routes = manager(document)["route_config"]["virtual_hosts"][0]["routes"]

    # Behind the guards: no escaped slash reaches the admin port either.
    assert [each["direct_response"]["status"] for each in routes[:2]] == [503, 400]
    assert [each["route"]["cluster"] for each in routes[2:6]] == [*["registration"] * 3, "pods"]
    assert cluster(document, "registration")["type"] == "STRICT_DNS"
    assert not any("registration" in render(BootstrapOptions(mode=mode)) for mode in Mode), (
        "it is off by default"
    )


def test_registration_leaves_half_of_the_admin_port_s_connections_to_others() -> None:
    thresholds = cluster(rendered(registration=("a:1",)), "registration")["circuit_breakers"]

    [limits] = thresholds["thresholds"]
    assert max(limits.values()) <= DEFAULT_HTTP_LIMITS.max_connections / 2


def test_other_paths_replace_the_listed_ones_and_keep_the_rest() -> None:
    routes = manager(rendered(inference_paths=("/generate",)))["route_config"]["virtual_hosts"][0][
        "routes"
    ]

    assert [next(iter(route["match"].values())) for route in routes] == [
        {"regex": "/health|/ping|/version|/v1/models/.*%2[Ff].*"},
        {"regex": ".*%(2[Ff]|5[Cc]).*"},
        "/generate",
        {"regex": "/v1/models(/.*)?"},
        {"regex": "/v1/responses/[A-Za-z0-9_-]+(/input_items)?"},
        {"regex": "/v1/responses/[A-Za-z0-9_-]+"},
        {"regex": "/v1/responses/[A-Za-z0-9_-]+/cancel"},
        "/",
        "/",
    ]
    assert routes[2]["route"]["cluster"] == "pods"
    assert routes[2]["match"]["headers"] == [{"name": ":method", "string_match": {"exact": "POST"}}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (BodyDelivery.BUFFERED, "BUFFERED"),
        (BodyDelivery.BUFFERED_PARTIAL, "BUFFERED_PARTIAL"),
        (BodyDelivery.STREAMED, "STREAMED"),
        (BodyDelivery.STREAMED_STRICT, "STREAMED"),
        (BodyDelivery.FULL_DUPLEX, "FULL_DUPLEX_STREAMED"),
        (BodyDelivery.HEADERS_ONLY, "NONE"),
    ],
)
@ALL_MODES
def test_the_body_mode_is_an_option_of_every_file(
    mode: Mode, body: BodyDelivery, expected: str
) -> None:
    config = ext_proc(rendered(mode=mode, request_body=body))

    assert config["processing_mode"]["request_body_mode"] == expected
    sends_early = config.get("send_body_without_waiting_for_header_response", False)
    assert sends_early == (body is BodyDelivery.STREAMED)


@pytest.mark.parametrize("body", list(BodyDelivery))
@ALL_MODES
def test_envoy_retries_where_it_has_another_address_however_the_body_comes(
    mode: Mode, body: BodyDelivery
) -> None:
    routes = manager(rendered(mode=mode, request_body=body))["route_config"]["virtual_hosts"][0][
        "routes"
    ]

    to_pods = [route["route"] for route in routes if "route" in route]
    retries = mode is not Mode.FULL_DUPLEX
    assert ["retry_policy" in route for route in to_pods] == [retries] * len(to_pods)


UNREACHED = ("connect-failure,refused-stream,reset-before-request,retriable-status-codes", 2)
UNANSWERED = ("connect-failure,refused-stream,reset,retriable-status-codes", 1)
WITH_ALTERNATES = pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST])


def retries(**options: Any) -> dict[str, tuple[str, int]]:
    """How often a request of each path and method is tried again, and after what."""
    routes = manager(rendered(**options))["route_config"]["virtual_hosts"][0]["routes"]
    found = {}
    for route in routes:
        if "retry_policy" in route.get("route", ()):
            match, policy = route["match"], route["route"]["retry_policy"]
            assert policy["retriable_status_codes"] == [503, 429]
            path = match.get("path") or match["safe_regex"]["regex"]
            method = match["headers"][0]["string_match"].get("exact", "")
            found[f"{method} {path}"] = policy["retry_on"], policy["num_retries"]
    return found


@WITH_ALTERNATES
def test_what_no_pod_has_answered_is_tried_once_more_unless_it_may_have_side_effects(
    mode: Mode,
) -> None:
    found = retries(mode=mode)

    cautious = [name for name, policy in found.items() if policy == UNREACHED]
    assert cautious == [
        "POST /v1/responses",
        "DELETE /v1/responses/[A-Za-z0-9_-]+",
        "POST /v1/responses/[A-Za-z0-9_-]+/cancel",
    ]
    assert set(found.values()) == {UNREACHED, UNANSWERED}


@WITH_ALTERNATES
def test_requests_that_may_have_reached_an_engine_are_left_alone_where_that_is_wanted(
    mode: Mode,
) -> None:
    found = retries(mode=mode, retry_resets=False)

    assert found.keys() == retries(mode=mode).keys()
    assert set(found.values()) == {UNREACHED}


def test_listed_paths_have_the_retries_of_what_they_do() -> None:
    found = retries(inference_paths=("/v1/responses", "/generate", "/v1/completions"))

    posted = {name: policy for name, policy in found.items() if "[" not in name and "POST" in name}
    assert posted == {
        "POST /v1/responses": UNREACHED,
        "POST /generate": UNANSWERED,
        "POST /v1/completions": UNANSWERED,
    }


def test_the_address_that_is_dialled_comes_from_metadata_whatever_header_came() -> None:
    """`original-dst` reads a header: the last filter before the router takes a client's away."""
    document = rendered()

    name = cluster(document, "pods")["original_dst_lb_config"]["http_header_name"]
    *_, last, router = manager(document)["http_filters"]
    removed, *_ = last["typed_config"]["mutations"]["request_mutations"]
    assert router["name"] == "envoy.filters.http.router"
    assert removed == {"remove": name}
    values = [
        each["append"]["header"]["value"]
        for each in last["typed_config"]["mutations"]["request_mutations"]
        if "append" in each
    ]
    assert all(value.startswith("%DYNAMIC_METADATA(") for value in values)


def test_with_headers_only_envoy_reads_the_model_and_passes_it_on() -> None:
    document = rendered(request_body=BodyDelivery.HEADERS_ONLY)

    names = [each["name"] for each in manager(document)["http_filters"]]
    at = names.index("envoy.filters.http.json_to_metadata")
    assert names[at + 1] == "envoy.filters.http.ext_proc"
    assert all(each.startswith("inflate-") for each in names[:at]), (
        "the model is read in plain JSON"
    )
    forwarded = ext_proc(document)["metadata_options"]["forwarding_namespaces"]["untyped"]
    assert "extproc.request" in forwarded


@pytest.mark.parametrize("body", list(BodyDelivery))
@pytest.mark.parametrize("mode", list(Mode))
def test_bodies_are_inflated_unless_envoy_may_then_send_them_twice(
    mode: Mode, body: BodyDelivery
) -> None:
    names = [
        each["name"] for each in manager(rendered(mode=mode, request_body=body))["http_filters"]
    ]
    comes_whole = body in (BodyDelivery.BUFFERED, BodyDelivery.HEADERS_ONLY)

    inflating = {name for name in names if name.startswith("inflate-")}
    whole = {"inflate-gzip", "inflate-zstd", "inflate-br"}
    assert inflating == (whole if mode is Mode.FULL_DUPLEX or comes_whole else set())


@pytest.mark.parametrize(
    ("body", "response_body"),
    [(BodyDelivery.FULL_DUPLEX, "FULL_DUPLEX_STREAMED"), (BodyDelivery.BUFFERED, "NONE")],
)
def test_response_phases_bring_the_body_in_full_duplex_alone(
    body: BodyDelivery, response_body: str
) -> None:
    mode = ext_proc(rendered(request_body=body, response_phases=True))["processing_mode"]

    assert mode["response_header_mode"] == mode["response_trailer_mode"] == "SEND"
    assert mode["response_body_mode"] == response_body


@ALL_MODES
def test_without_response_phases_nothing_of_a_response_is_sent(mode: Mode) -> None:
    processing = ext_proc(rendered(mode=mode, response_phases=False))["processing_mode"]

    assert processing["response_header_mode"] == processing["response_trailer_mode"] == "SKIP"
    assert processing["response_body_mode"] == "NONE"


def test_mutual_tls_to_the_router_checks_its_name() -> None:
    tls = TlsFiles(ca="/ca", cert="/cert", key="/key", server_name="router")

    socket = cluster(rendered(router_tls=tls), "router")["transport_socket"]["typed_config"]
    assert socket["sni"] == "router"
    common = socket["common_tls_context"]
    assert common["alpn_protocols"] == ["h2"]
    assert common["validation_context"] == {
        "trusted_ca": {"filename": "/ca"},
        "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "router"}}],
    }
    assert common["tls_certificates"] == [
        {"certificate_chain": {"filename": "/cert"}, "private_key": {"filename": "/key"}}
    ]


def test_tls_to_the_pods_without_a_ca_takes_any_certificate() -> None:
    pods = cluster(rendered(pod_tls=TlsFiles()), "pods")

    common = pods["transport_socket"]["typed_config"]["common_tls_context"]
    assert common == {"alpn_protocols": ["http/1.1"]}


def test_static_pods_replace_endpoint_discovery() -> None:
    pods = cluster(rendered(mode=Mode.OVERRIDE_HOST, static_pods=("10.0.0.9:8000",)), "pods")

    assert pods["type"] == "STATIC"
    assert "eds_cluster_config" not in pods


def test_static_pods_are_refused_where_envoy_does_not_know_the_pods() -> None:
    with pytest.raises(ValueError, match="does not know the pods"):
        render(BootstrapOptions(static_pods=("10.0.0.9:8000",)))


def combinations() -> list[BootstrapOptions]:
    """Every mode, body mode and response phase; each other option once per mode."""
    crossed = [
        BootstrapOptions(mode=mode, request_body=body, response_phases=phases)
        for mode, body, phases in itertools.product(Mode, BodyDelivery, (True, False))
    ]
    others = [
        BootstrapOptions(
            mode=mode,
            listen="[::]:8080",
            routers=("10.0.0.1:2", "router.llm.svc:2", "unix:/run/router"),
            inference_paths=("/generate",),
            registration=("10.0.0.1:9090", "router.llm.svc:9090"),
            cors_origins=("*",) if is_first else ("https://a.example:3000", "http://[::1]:1"),
            keep_request_ids=is_first,
            access_log=is_first,
            failure_mode_allow=is_first,
            allow_mode_override=not is_first,
        )
        for mode, is_first in itertools.product(Mode, (True, False))
    ]
    static = BootstrapOptions(mode=Mode.OVERRIDE_HOST, static_pods=("10.0.0.9:8000",))
    return [*crossed, *others, static]


async def complaint(options: BootstrapOptions, path: Path, slots: asyncio.Semaphore) -> str | None:
    path.write_text(render(options))
    command = (find_envoy(), "-c", str(path), "--mode", "validate", "--disable-hot-restart")
    async with slots:
        done = await asyncio.to_thread(run, *command)
    return None if done.returncode == 0 else f"{options}: {done.stderr[-1000:]}"


@pytest.mark.e2e
@pytest.mark.timeout(120)
async def test_envoy_accepts_every_combination_of_options(tmp_path: Path) -> None:
    slots = asyncio.Semaphore(2)
    complaints = await asyncio.gather(
        *(
            complaint(options, tmp_path / f"{number}.yaml", slots)
            for number, options in enumerate(combinations())
        )
    )

    assert [each for each in complaints if each] == []


@pytest.mark.e2e
async def test_envoy_accepts_the_shortest_and_longest_times(tmp_path: Path) -> None:
    slots = asyncio.Semaphore(2)
    extremes = [
        BootstrapOptions(
            request_timeout_s=time_s,
            router_ping_s=max(time_s, MIN_S),
            access_log_flush_interval_s=max(time_s, MIN_S),
            message_timeout_s=min(max(time_s, MIN_S), MAX_MESSAGE_TIMEOUT_S),
            max_message_timeout_s=min(time_s, MAX_MESSAGE_TIMEOUT_S),
            routers=(f"unix:{'a' * MAX_UNIX_PATH_BYTES}",),
        )
        for time_s in (0.0, MAX_S)
    ]

    for number, options in enumerate(extremes):
        assert await complaint(options, tmp_path / f"{number}.yaml", slots) is None


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0.0, "0s"), (0.001, "0.001s"), (1e-5, "0.00001s"), (60.0, "60s"), (1e8, "100000000s")],
)
def test_times_are_written_without_an_exponent(time_s: float, text: str) -> None:
    assert manager(rendered(request_timeout_s=time_s))["request_timeout"] == text


@pytest.mark.e2e
async def test_envoy_accepts_tls_to_the_router_and_to_the_pods(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    cert, key = (str(path) for path in pki.issue("envoy"))
    tls = TlsFiles(ca=str(pki.ca), cert=cert, key=key, server_name="localhost")

    options = BootstrapOptions(router_tls=tls, pod_tls=TlsFiles(ca=str(pki.ca)))
    assert await complaint(options, tmp_path / "envoy.yaml", asyncio.Semaphore()) is None


def test_routers_that_pass_entries_on_share_one_access_log() -> None:
    shared = rendered(routers=("10.0.0.1:2", "10.0.0.2:2"), shared_access_log=True)
    alone = rendered(routers=("10.0.0.1:2",))

    assert manager(shared)["access_log"] == manager(alone)["access_log"]
    assert [each["name"] for each in shared["static_resources"]["clusters"]] == ["pods", "router"]
