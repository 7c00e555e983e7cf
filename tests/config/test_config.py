"""The configuration file: defaults that start, and mistakes told with path, value and allowance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from extproc.config import Config
from extproc.config.configfile import (
    MAX_MISTAKES,
    REMOVED,
    ConfigError,
    check_sections,
    load_config,
    parse_config,
)
from extproc.config.discovery import StaticEndpoint
from extproc.paths import DEFAULT_INFERENCE_PATHS
from extproc.reports.engines import PROFILES
from extproc.routing.policies import BUILT_IN

PODS = 'discovery: {static: ["10.0.0.7:8000"]}\n'


def mistakes(text: str) -> list[str]:
    """The lines of the message; `text` gets a discovery section if it has none."""
    with pytest.raises(ConfigError) as error:
        parse_config(text if "discovery" in text else PODS + text, source="file.yaml")
    lines = str(error.value).splitlines()
    assert all(line.startswith("file.yaml: ") for line in lines)
    return [line.removeprefix("file.yaml: ") for line in lines]


def test_endpoints_are_all_that_must_be_given() -> None:
    config = parse_config(PODS)

    assert config.discovery.static == (StaticEndpoint(address="10.0.0.7:8000"),)
    assert (config.policy.name, config.destination.num_fallbacks) == ("least_harm", 0)
    assert config.request.paths == DEFAULT_INFERENCE_PATHS
    assert config.admin.address.startswith("127.0.0.1:")


def test_endpoints_may_have_names_and_come_from_a_file() -> None:
    text = 'discovery: {static: [{address: "10.0.0.7:8000", name: a}, "[::1]:80"]}'
    named = StaticEndpoint(address="10.0.0.7:8000", name="a")

    assert parse_config(text).discovery.static == (named, StaticEndpoint(address="[::1]:80"))
    assert parse_config("discovery: {file: pods.yaml}").discovery.file == Path("pods.yaml")


def test_given_values_override_defaults() -> None:
    config = parse_config(
        PODS
        + """
server: {address: "unix:/run/x", tls: {cert_file: c, key_file: k, client_ca_file: ca}}
policy: {name: "mine:Policy", args: {deep: [1, 2]}}
pods: {engine: sglang, max_loras: 4}
log: {level: debug}
"""
    )

    assert config.server.address == "unix:/run/x"
    assert config.server.tls is not None
    assert config.server.tls.client_ca_file == Path("ca")
    assert (config.policy.name, config.policy.args) == ("mine:Policy", {"deep": [1, 2]})
    assert (config.pods.engine, config.pods.max_loras, config.log.level) == ("sglang", 4, "debug")


@pytest.mark.parametrize(
    ("text", "path", "value", "allowed"),
    [
        ("scrape: {interval_s: -1}", "scrape.interval_s", "-1", "greater than or equal to 0.01"),
        ("scrape: {interval_s: fast}", "scrape.interval_s", "'fast'", "valid number"),
        ("log: {level: loud}", "log.level", "'loud'", "'debug', 'info', 'warning' or 'error'"),
        ("pods: {engine: tgi}", "pods.engine", "'tgi'", "'vllm' or 'sglang'"),
        ("admin: 5", "admin", "5", "must be a mapping; allowed in it: address, metrics"),
        (
            "policy: random",
            "policy",
            "'random'",
            "must be a mapping; allowed in it: name, fallback, args",
        ),
        ("policy: {args: [3]}", "policy.args", "[3]", "must be a mapping"),
        ("server: {tls: true}", "server.tls", "True", "must be a mapping; allowed in it: cert_f"),
        ("server: {address: 9002}", "server.address", "9002", "must be text"),
        ("pods: {ca_file: 5}", "pods.ca_file", "5", "must be a path"),
        ("discovery: [a]", "discovery", "['a']", "must be a mapping; allowed in it: static"),
        ("discovery: {static: '1.1.1.1:1'}", "discovery.static", "'1.1.1.1:1'", "must be a list"),
        ("discovery: {static: [8000]}", "discovery.static.0.address", "8000", "must be text"),
        (
            "discovery: {static: ['[::1]:1', '[0::1]:1']}",
            "discovery.static",
            "0::1",
            "[::1]:1 is listed twice; allowed: once",
        ),
        (
            "discovery: {static: ['http://10.0.0.7:8000']}",
            "discovery.static.0.address",
            "'http://10.0.0.7:8000'",
            "must be `ip:port`, without `http://` or `https://`; for HTTPS set pods.tls",
        ),
        (
            "discovery: {dns: {name: 10.0.0.7, port: 1}}",
            "discovery.dns.name",
            "'10.0.0.7'",
            "list the pod in discovery.static",
        ),
        (
            "discovery: {dns: {name: x, port: 1, nameservers: ['ns:53']}}",
            "discovery.dns.nameservers.0",
            "'ns:53'",
            "must be `ip:port`: ns is a name",
        ),
        ("server: {address: nowhere}", "server.address", "'nowhere'", "`unix:PATH`"),
        ("request: {session_header: X-A}", "request.session_header", "'X-A'", "[a-z0-9_-]"),
        (
            "request: {session_sources: [x-session]}",
            "request.session_sources.0",
            "'x-session'",
            "header:NAME, cookie:NAME",
        ),
        (
            "request: {session_sources: ['body:model']}",
            "request.session_sources.0",
            "'body:model'",
            "a field that says nothing else",
        ),
        ("request: {paths: []}", "request.paths", "[]", "at least 1 item"),
        ("preset: other", "preset", "'other'", "'founding'"),
        ("discovery: {}", "discovery", "{}", "exactly one of: static, file"),
        ("discovery: {static: [], file: f}", "discovery", "'f'", "exactly one of: static, file"),
        ("discovery: {static: [10.0.0.7]}", "discovery.static.0", "'10.0.0.7'", "`ip:port`"),
        (
            'discovery: {static: ["1.1.1.1:1", "1.1.1.1:1"]}',
            "discovery.static",
            "1",
            "allowed: once",
        ),
        ('discovery: {static: ["1.1.1.1:99999"]}', "discovery.static.0.address", "9", "`ip:port`"),
        ('discovery: {static: ["1.1.1.1:0"]}', "discovery.static.0.address", ":0", "`ip:port`"),
        ('discovery: {static: ["localhost:1"]}', "discovery.static.0.address", "t:1", "dns does"),
        ("server: {address: '127.0.0.1:99999'}", "server.address", "99999", "at most 65535"),
        ("admin: {address: '127.0.0.1:99999'}", "admin.address", "99999", "at most 65535"),
        ("request: {paths: [v1/x]}", "request.paths", "'v1/x'", "in normal form"),
        ("request: {paths: [/]}", "request.paths", "'/'", "in normal form"),
        (
            "request: {paths: [/v1/models]}",
            "request.paths",
            "'/v1/models'",
            "not an inference path",
        ),
    ],
)
def test_a_mistake_is_reported_with_path_value_and_what_is_allowed(
    text: str, path: str, value: str, allowed: str
) -> None:
    line = mistakes(text)[-1]

    assert line.startswith(path)
    assert value in line
    assert allowed in line


@pytest.mark.parametrize("port", ["-1", "99999", "1.5", "{a: 1}", "Not a name", "[x]", "[1, 0]"])
def test_a_wrong_port_is_one_mistake_that_says_all_that_is_allowed(port: str) -> None:
    text = f"discovery: {{kubernetes: {{service: vllm, port: {port}}}}}"

    (line,) = mistakes(text)

    assert line == (
        f"discovery.kubernetes.port: {yaml.safe_load(port)!r}: must be a port from 1 to 65535, "
        "a list of them, or a port's name (^[a-z0-9-]{1,63}$)"
    )


def test_all_mistakes_are_reported_at_once() -> None:
    lines = mistakes("scrape: {interval_s: 0, expiry_s: -1}\nlog: {level: 1}")

    assert [line.partition(":")[0] for line in lines] == [
        "scrape.interval_s",
        "scrape.expiry_s",
        "log.level",
    ]


@pytest.mark.parametrize(
    ("text", "path"), [("scrpe: {}", "scrpe"), ("scrape: {timeuot_s: 1}", "scrape.timeuot_s")]
)
def test_an_unknown_name_is_an_error(text: str, path: str) -> None:
    [line] = mistakes(text)

    assert line.startswith(f"{path}: ")
    assert "unknown; allowed: " in line


@pytest.mark.parametrize("path", REMOVED)
def test_a_setting_of_before_is_refused_with_what_to_do_without_it(path: str) -> None:
    section, name = path.split(".")
    [line] = mistakes(f"{section}: {{static: [], {name}: 1}}")

    assert line == f"{path}: no longer there: {REMOVED[path]}"


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("scrpe: {}", "scrape"),
        ("scrape: {timeuot_s: 1}", "timeout_s"),
        ("server: {tls: {cert_file: c, key_file: k, ca: x}}", "client_ca_file"),
        ("discovery: {static: [{address: 'a:1', nmae: x}]}", "address, name"),
    ],
)
def test_the_error_for_an_unknown_name_lists_the_known_ones(text: str, allowed: str) -> None:
    assert allowed in mistakes(text)[-1]


def test_a_key_that_stands_twice_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="'policy' is given twice"):
        parse_config(PODS + "policy: {name: random}\npolicy: {name: founding}")


def test_the_pods_must_be_given() -> None:
    with pytest.raises(ConfigError, match="discovery: missing"):
        parse_config("log: {}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: {name: random}", "policy.name must be founding or left out"),
        ("destination: {num_fallbacks: 1}", "destination.num_fallbacks must be 0"),
        (
            "request: {assumed_body_mode: streamed}",
            "request.assumed_body_mode must be buffered",
        ),
    ],
)
def test_a_preset_refuses_contradicting_values(text: str, message: str) -> None:
    [line] = mistakes(f"preset: founding\n{text}")

    assert line == f"(top level): preset founding: {message}"
    assert parse_config(PODS + text).preset is None


@pytest.mark.parametrize("text", ["preset: founding", "preset: founding\npolicy: {}"])
def test_the_founding_preset_names_the_founding_policy(text: str) -> None:
    assert parse_config(PODS + text).policy.name == "founding"


def test_the_preset_allows_the_values_that_it_leaves_open() -> None:
    config = parse_config(f"{PODS}preset: founding\npolicy: {{args: {{threshold: 4}}}}")

    assert (config.preset, config.policy.args) == ("founding", {"threshold": 4})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("discovery: 2024-13-45", "not YAML: month must be in 1..12"),
        (500 * "[", "collections in one another"),
        (20 * "[" + 20 * "]", "must be a mapping of sections, got list"),
        ("", "must be a mapping of sections, got NoneType"),
        ("- a", "must be a mapping of sections, got list"),
    ],
)
def test_a_document_that_is_not_a_mapping_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="file.yaml: ") as error:
        parse_config(text, source="file.yaml")

    assert message in str(error.value)


def test_a_file_is_read_and_named_in_every_message(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    with pytest.raises(ConfigError, match=f"{path}: cannot be read: .*No such file"):
        load_config(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"{path}: cannot be read"):
        load_config(path)
    path.write_text("log: 1")
    with pytest.raises(ConfigError, match=f"{path}: log: 1: "):
        load_config(path)
    path.write_text(PODS)

    assert load_config(path) == parse_config(PODS)


def test_a_configuration_does_not_change() -> None:
    config = parse_config(PODS)
    with pytest.raises(ValidationError):
        config.log.level = "debug"  # type: ignore[misc] # it is read-only, and says so


def fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of every section, with its path."""
    for name, field in model.model_fields.items():
        yield f"{path}{name}", field
        annotation = field.annotation
        for kind in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields(kind, f"{path}{name}.")


@pytest.mark.parametrize("value", [-1, [[]], {"1": 1}, "\0"], ids=["-1", "list", "map", "NUL"])
def test_a_mistake_s_path_has_only_names_of_fields_and_places_in_lists(value: Any) -> None:
    """And none of the kinds of value that pydantic has tried."""
    names = {name for path, _ in fields(Config) for name in path.split(".")}
    for path, _ in fields(Config):
        sections = value
        for name in reversed(path.split(".")):
            sections = {name: sections}
        try:
            check_sections(sections)
        except ConfigError as error:
            for line in str(error).splitlines():
                parts = line.split(": ")[1].split(".")
                assert all(part in names or part.isdecimal() for part in parts), line


def test_every_field_says_what_it_is_for_and_numbers_say_their_range() -> None:
    for path, field in fields(Config):
        assert field.description, path
        if field.annotation in (int, float):
            limits = {type(limit).__name__ for limit in field.metadata}
            assert limits & {"Ge", "Gt"}, path
            assert limits & {"Le", "Lt"}, path


def test_times_and_sizes_have_their_unit_in_the_name() -> None:
    for path, field in fields(Config):
        if field.annotation is float:
            assert path.endswith(
                ("_s", "_ratio", ".seconds", ".percentile", ".share", ".weight", ".error_rate")
            ) or ("Cores" in (field.description or "")), path
        if field.annotation is int and "bytes" in (field.description or "").lower():
            assert path.endswith(("_bytes", "_bytes_per_s")), path


def test_names_in_the_configuration_exist() -> None:
    engines = Config.model_fields["pods"].annotation.model_fields["engine"].annotation  # type: ignore[union-attr]
    policy = Config.model_fields["policy"].annotation.model_fields["name"]  # type: ignore[union-attr]

    assert set(engines.__args__) == set(PROFILES)
    assert policy.default in BUILT_IN
    assert all(f"`{name}`" in (policy.description or "") for name in BUILT_IN)


def test_many_mistakes_are_reported_in_part() -> None:
    lines = mistakes(f"discovery: {{static: [{', '.join(['x'] * 1000)}]}}")

    assert len(lines) == MAX_MISTAKES + 1
    assert lines[-1] == f"and {1000 - MAX_MISTAKES} more mistakes"


def test_a_long_value_is_shortened_and_a_strange_name_stays_on_one_line() -> None:
    [long] = mistakes(f"log: {{level: {'x' * 4000}}}")
    [strange] = mistakes('"a\\nb\\x1b[2J": {}')

    assert len(long) < 400
    assert strange.startswith(r"'a\nb\x1b[2J': unknown; allowed: ")


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
names = st.sampled_from([path.rpartition(".")[2] for path, _ in fields(Config)])


@given(
    st.dictionaries(
        st.sampled_from(sorted(Config.model_fields)) | st.text(max_size=5) | st.integers(),
        values | st.dictionaries(names | st.text(max_size=5), values, max_size=3),
        max_size=4,
    )
)
def test_any_document_is_a_configuration_or_a_configuration_error(document: Any) -> None:
    told: list[str] = []
    try:
        parse_config(yaml.safe_dump(document, allow_unicode=True), source="file.yaml")
    except ConfigError as error:
        told = str(error).splitlines()

    assert all(line.startswith("file.yaml: ") for line in told)


@given(st.text(max_size=100))
def test_any_text_is_a_configuration_or_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text)


def test_a_file_that_would_not_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    with pytest.raises(ConfigError, match="fifo: cannot be read: not a regular file"):
        load_config(tmp_path / "fifo")
