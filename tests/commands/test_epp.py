"""`extproc epp`: what each flag makes of the configuration, and what is said about the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.commands.eppflags import FLAGS, IGNORED, KINDS, FlagError, FlagKind, help_text
from extproc.commands.eppplan import EppPlan, plan
from extproc.config import Config
from extproc.config.configfile import ConfigError
from tests.commandline import error_line, invoke

CERTIFICATE = (Path("made.crt"), Path("made.key"))
POOL = ("--pool-name", "p")
OURS = "discovery: {static: ['10.0.0.7:8000']}\n"
THEIRS = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: []\n"


def planned(*arguments: str, environment: Mapping[str, str] | None = None) -> EppPlan:
    return plan(arguments, environment=environment or {}, make_certificate=lambda: CERTIFICATE)


def config(*arguments: str, environment: Mapping[str, str] | None = None) -> Config:
    return planned(*arguments, environment=environment).config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "extproc.yaml"
    path.write_text(OURS)
    return path


# --- which pods ------------------------------------------------------------------------------


def test_a_pool_is_discovered_by_its_name() -> None:
    found = config("--pool-name", "p", "--pool-namespace", "ns").discovery.kubernetes

    assert found is not None
    assert (found.inference_pool, found.namespace, found.port) == (("p",), "ns", None)


def test_a_selector_comes_with_the_pods_ports() -> None:
    found = config(
        *("--endpoint-selector", "app=vllm,tier in (a,b)"),
        *("--endpoint-target-ports", "8000,8001,8000"),
    ).discovery.kubernetes

    assert found is not None
    assert found.pod_selector == "app=vllm,tier in (a,b)"
    assert found.port == (8000, 8001)


@pytest.mark.parametrize(
    ("arguments", "namespace"),
    [((), "from-env"), (("--pool-namespace", "from-flag"), "from-flag")],
)
def test_the_namespace_is_the_flag_s_else_the_environment_s(
    arguments: tuple[str, ...], namespace: str
) -> None:
    found = config(*POOL, *arguments, environment={"NAMESPACE": "from-env"}).discovery.kubernetes

    assert found is not None
    assert found.namespace == namespace


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--pool-name=",),
        (*POOL, "--endpoint-selector=app=vllm", "--endpoint-target-ports=8000"),
    ],
)
def test_exactly_one_of_pool_and_selector_is_wanted(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="exactly one of: --pool-name, --endpoint-selector"):
        planned(*arguments)


@pytest.mark.parametrize("ports", ["", "1,2,3,4,5,6,7,8,9", "http"])
def test_a_selector_wants_one_to_eight_ports(ports: str) -> None:
    with pytest.raises(ConfigError, match="--endpoint-target-ports"):
        planned("--endpoint-selector=app=vllm", f"--endpoint-target-ports={ports}")


def test_a_pool_of_another_api_group_is_refused() -> None:
    assert config(*POOL, "--pool-group=inference.networking.k8s.io")
    with pytest.raises(ConfigError, match=r"--pool-group: .*inference\.networking\.k8s\.io"):
        planned(*POOL, "--pool-group=inference.networking.x-k8s.io")


# --- what gateways expect --------------------------------------------------------------------


def test_without_flags_it_is_what_charts_expect() -> None:
    made = config(*POOL)

    assert made.server.address == "0.0.0.0:9002"
    assert made.server.health_address == "0.0.0.0:9003"
    assert made.admin.metrics_address == "0.0.0.0:9090"
    assert made.admin.address.startswith("127.0.0.1:")
    assert made.server.tls is not None
    assert made.completions.source == "response_phases"
    assert made.request.assumed_body_mode == "full-duplex-streamed"
    assert made.request.trusted_headers == ("objective", "slo", "model_rewrite"), "no tenant"
    assert made.request.restore_model
    assert made.request.use_subset_hint
    assert not made.destination.emit_scores


def test_ports_are_set_on_all_addresses_or_on_the_file_s(file: Path) -> None:
    flags = ("--grpc-port=1", "--grpc-health-port=2", "--metrics-port=3")
    plain = config(*POOL, *flags)
    file.write_text(f"{OURS}server: {{address: '[::]:9002', health_address: '10.0.0.1:1'}}\n")
    ours = config(f"--config-file={file}", *flags)

    assert plain.server.address == "0.0.0.0:1"
    assert (plain.server.health_address, plain.admin.metrics_address) == ("0.0.0.0:2", "0.0.0.0:3")
    assert (ours.server.address, ours.server.health_address) == ("[::]:1", "10.0.0.1:2")


def test_a_port_for_an_address_without_one_is_refused(file: Path) -> None:
    file.write_text(f"{OURS}server: {{address: 'unix:/run/x'}}\n")

    with pytest.raises(ConfigError, match="--grpc-port: server.address: 'unix:/run/x' is not"):
        config(f"--config-file={file}", "--grpc-port=1")


@pytest.mark.parametrize(
    ("flag", "value", "section", "field", "expected"),
    [
        ("drain-timeout", "1m30s", "server", "drain_timeout_s", 90.0),
        ("refresh-metrics-interval", "100ms", "scrape", "interval_s", 0.1),
        ("metrics-staleness-threshold", "5s", "scrape", "expiry_s", 5.0),
        ("disable-endpoint-subset-filter", "true", "request", "use_subset_hint", False),
        ("disable-endpoint-subset-filter", "false", "request", "use_subset_hint", True),
        ("emit-endpoint-scores", "true", "destination", "emit_scores", True),
        ("grpc-max-recv-msg-size", "64Mi", "request", "max_body_bytes", 63 * 2**20),
        ("grpc-max-recv-msg-size", "4MiB", "request", "max_body_bytes", 26 * 2**20),
        ("tracing", "true", "tracing", "enabled", True),
        ("tracing", "false", "tracing", "enabled", False),
        ("v", "2", "log", "level", "info"),
        ("v", "4", "log", "level", "debug"),
        ("zap-log-level", "error", "log", "level", "error"),
        ("zap-log-level", "5", "log", "level", "debug"),
        ("zap-log-level", "warn", "log", "level", "warning"),
        ("model-server-metrics-port", "7080", "pods", "metrics_port", 7080),
        ("model-server-metrics-port", "0", "pods", "metrics_port", None),
        ("model-server-metrics-path", "/stats", "pods", "metrics_path", "/stats"),
        ("zap-encoder", "console", "log", "json_lines", False),
        ("zap-encoder", "json", "log", "json_lines", True),
        ("zap-devel", "true", "log", "json_lines", False),
    ],
)
def test_each_flag_sets_its_field(
    flag: str, value: str, section: str, field: str, expected: Any
) -> None:
    assert getattr(getattr(config(*POOL, f"--{flag}={value}"), section), field) == expected


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--refresh-metrics-interval=50", "must be a duration"),
        ("--refresh-metrics-interval=1ms", "interval_s"),
        ("--model-server-metrics-path=stats", "metrics_path"),
        ("--model-server-metrics-port=70000", "metrics_port"),
        ("--grpc-port=http", "whole number"),
        ("--grpc-port=70000", "at most 65535"),
        ("--zap-encoder=yaml", "json or console"),
        ("--zap-log-level=loud", "log.level"),
        ("--v=loud", "whole number"),
        ("--grpc-max-recv-msg-size=big", "a size"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(argument: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(*POOL, argument)


@pytest.mark.parametrize("argument", ["--secure-serving=yes", "--enable-pprof=2"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(argument: str) -> None:
    with pytest.raises(FlagError, match="true or false"):
        planned(*POOL, argument)


# --- TLS -------------------------------------------------------------------------------------


def tls_files(made: Config) -> tuple[Path, Path] | None:
    tls = made.server.tls
    return None if tls is None else (tls.cert_file, tls.key_file)


def test_tls_is_on_by_default_with_a_certificate_made_once() -> None:
    number_made = 0

    def make() -> tuple[Path, Path]:
        nonlocal number_made
        number_made += 1
        return CERTIFICATE

    made = plan(POOL, environment={}, make_certificate=make)
    again = made.parse("", source="again")

    assert tls_files(made.config) == tls_files(again) == CERTIFICATE
    assert number_made == 1


def test_a_given_certificate_is_read_from_its_folder() -> None:
    assert tls_files(config(*POOL, "--cert-path=/certs")) == (
        Path("/certs/tls.crt"),
        Path("/certs/tls.key"),
    )


def test_tls_is_switched_off_by_the_flag_alone(file: Path) -> None:
    file.write_text(f"{OURS}server: {{tls: {{cert_file: a, key_file: b}}}}\n")

    assert tls_files(config(f"--config-file={file}")) == (Path("a"), Path("b"))
    assert tls_files(config(f"--config-file={file}", "--secure-serving=false")) is None
    assert tls_files(config(*POOL, "--secure-serving=false", "--cert-path=/certs")) is None


# --- the file under the flags ----------------------------------------------------------------


def test_our_file_applies_where_no_flag_overrides_it(file: Path) -> None:
    file.write_text(
        f"{OURS}policy: {{name: least_pending}}\nscrape: {{interval_s: 0.2, expiry_s: 9}}\n"
        "completions: {source: access_log}\n"
    )
    made = config("--config-file", str(file), "--refresh-metrics-interval=1s")

    assert made.policy.name == "least_pending"
    assert (made.scrape.interval_s, made.scrape.expiry_s) == (1.0, 9.0)
    assert made.completions.source == "access_log"
    assert made.request.assumed_body_mode == "full-duplex-streamed"


def test_the_pool_of_the_flags_is_discovered_with_the_file_s_kubeconfig(file: Path) -> None:
    file.write_text("discovery: {kubernetes: {kubeconfig: kube, namespace: ours}}\n")
    found = config(*POOL, f"--config-file={file}").discovery.kubernetes

    assert found is not None
    assert (found.inference_pool, found.namespace, str(found.kubeconfig)) == (
        ("p",),
        "ours",
        "kube",
    )


def test_a_file_that_changes_is_read_with_the_flags(file: Path) -> None:
    made = planned(f"--config-file={file}", "--emit-endpoint-scores")
    fresh = made.parse(f"{OURS}admission: {{max_pending_per_endpoint: 3}}\n", source="new")

    assert fresh.admission.max_pending_per_endpoint == 3
    assert fresh.destination.emit_scores
    with pytest.raises(ConfigError):
        made.parse("discovery: 3\n", source="new")


def test_a_configuration_may_be_given_as_text() -> None:
    assert config(f"--config-text={OURS}").discovery.static
    with pytest.raises(FlagError, match="--config-file and --config-text"):
        planned("--config-text=a: b", "--config-file=x")


@pytest.mark.parametrize("text", ["server: []\n", "request: 3\n", "admin: text\n"])
def test_a_section_that_is_none_is_refused_in_words(file: Path, text: str) -> None:
    file.write_text(OURS + text)

    with pytest.raises(ConfigError, match="must be a mapping"):
        planned(f"--config-file={file}")


def test_another_picker_s_configuration_is_ignored_with_a_warning(file: Path) -> None:
    """It is what charts mount by default."""
    file.write_text(THEIRS)
    made = planned(*POOL, f"--config-file={file}")

    assert made.config.policy == Config.model_validate(yaml.safe_load(OURS)).policy
    assert made.warnings() == [f"{file}: an EndpointPickerConfig of another picker: ignored"]


# --- what is accepted without effect ---------------------------------------------------------


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_a_flag_without_effect_is_named_in_one_line_unless_it_asks_for_nothing(name: str) -> None:
    other = {
        FlagKind.SWITCH: "false" if IGNORED[name].fits == ("true",) else "true",
        FlagKind.NUMBER: "7",
    }.get(KINDS[name], "other")
    [line] = planned(*POOL, f"--{name}={other}").warnings()

    assert line.startswith(f"--{name}={other}: accepted without effect: ")
    assert [planned(*POOL, f"--{name}={value}").warnings() for value in IGNORED[name].fits] == [
        [] for _ in IGNORED[name].fits
    ]


def test_what_a_chart_passes_by_default_is_worth_no_warning() -> None:
    made = planned(
        *("--pool-name", "p", "--pool-namespace", "ns"),
        *("--pool-group", "inference.networking.k8s.io"),
        *("--zap-encoder", "json", "--grpc-health-port", "9003", "--v=1"),
        *("--tracing=false", "--metrics-endpoint-auth=false", "--health-checking=true"),
    )

    assert made.warnings() == []


# --- the command -----------------------------------------------------------------------------


def test_help_names_every_flag() -> None:
    result = invoke("epp", "--help")

    assert result.exit_code == 0
    assert result.output == f"{help_text()}\n"
    assert all(f"--{name} " in result.output for name in KINDS)
    assert FLAGS.keys().isdisjoint(IGNORED)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nope"], "--nope: unknown flag"),
        (["--pool-name", "p", "--grpc-port", "x"], "--grpc-port: 'x': must be a whole"),
        (["--config-file", "/nonexistent"], "/nonexistent: cannot be read: No such"),
        (["-v", "1"], "exactly one of: --pool-name"),
    ],
)
def test_a_mistake_ends_the_command_with_one_line(arguments: list[str], words: str) -> None:
    assert error_line(invoke("epp", *arguments)).startswith(words)
