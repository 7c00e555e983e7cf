"""The configuration of `extproc epp`: flags override our file, which overrides `DEFAULTS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from extproc.address import MAX_PORT, Address
from extproc.commands.eppflags import (
    FLAGS,
    IGNORED,
    KINDS,
    FlagError,
    FlagKind,
    parse_flags,
    to_bool,
    to_bytes,
    to_int,
)
from extproc.config import Config
from extproc.config.configfile import ConfigError, check_sections, read_config, read_sections
from extproc.config.request import MESSAGE_OVERHEAD_BYTES, RequestConfig
from extproc.request.controlheaders import TRUSTABLE

POOL_GROUP = "inference.networking.k8s.io"
FOREIGN_KIND = "EndpointPickerConfig"
"""Kind of the document that charts put into `--config-file` by default: not our configuration."""
DEBUG_VERBOSITY = 4
"""The Go pickers log at debug from this `-v` on."""

_SOURCES = ("pool-name", "pool-namespace", "endpoint-selector")
"""Flags of which two values would be two sources of pods; the file may name several pools."""

_NEGATED = ("disable-endpoint-subset-filter",)
"""Switches that turn off what their fields turn on."""

_DEFAULTED = ("model-server-metrics-port", "model-server-metrics-path")
"""Flags whose 0 or empty text is the field's default."""

_Sections = dict[str, Any]

DEFAULTS: _Sections = {
    # Responses pass through us and are cut when we stop, so the limit is just below the 130 s that
    # charts give a pod to terminate.
    "server": {
        "address": "0.0.0.0:9002",
        "health_address": "0.0.0.0:9003",
        "drain_timeout_s": 120.0,
    },
    # Not the default 9090: charts expect /metrics there, on all addresses.
    "admin": {"address": "127.0.0.1:9091", "metrics_address": "0.0.0.0:9090"},
    # Gateways send the response's phases and no access log. Those that do not say how they send
    # bodies use full duplex: the protocol requires it. They are in front of us, and what llm-d's
    # picker believes is believed here. But not who asks: that opens private adapters, which only we
    # have, and a gateway that sets no tenant passes on the client's.
    "completions": {"source": "response_phases"},
    "request": {
        "assumed_body_mode": "full-duplex-streamed",
        "trusted_headers": [each for each in TRUSTABLE if each != "fairness_id"],
        "restore_model": True,
    },
}


def plan(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    make_certificate: Callable[[], tuple[Path, Path]],
) -> EppPlan:
    """Parse a command line and the configuration file that it names.

    Args:
        arguments: Without the program's name.
        environment: Of the process; `NAMESPACE` is the pool's default namespace.
        make_certificate: Returns the paths of a new certificate and its key, for TLS without files.

    Raises:
        FlagError: The command line cannot be used.
        ConfigError: The file cannot be read, or flags and file together are not a valid
            configuration.
    """
    given = parse_flags(arguments, KINDS, unrepeated=_SOURCES)
    for name, value in given.items():
        if KINDS[name] is FlagKind.SWITCH:
            to_bool(name, value)
    if "config-file" in given and "config-text" in given:
        raise FlagError("--config-file and --config-text: one of them")
    path = Path(given["config-file"]) if given.get("config-file") else None
    text = given.get("config-text", "") if path is None else read_config(path)
    made = EppPlan(given, environment, make_certificate, path, text)
    made.config = made.parse(text, source=str(path or "flags"))
    return made


@dataclass(slots=True)
class EppPlan:
    """The configuration of a command line.

    Attributes:
        given: Values by flag, as text.
        path: Our configuration file, followed for changes; None without one.
        text: Its content.
        config: The result of flags and file.
    """

    given: Mapping[str, str]
    environment: Mapping[str, str]
    make_certificate: Callable[[], tuple[Path, Path]]
    path: Path | None
    text: str
    config: Config = field(init=False)
    _certificate: tuple[Path, Path] | None = None

    def parse(self, text: str, *, source: str) -> Config:
        """Return the configuration of a file's text together with the flags.

        Raises:
            ConfigError: The text is not a valid configuration, or not with these flags.
        """
        file = read_sections(text, source=source) if text.strip() else {}
        if file.get("kind") == FOREIGN_KIND:
            file = {}
        for name, section in file.items():
            if name in DEFAULTS and not isinstance(section, dict):
                raise ConfigError(f"{source}: {name}: must be a mapping")
        sections = _merged(DEFAULTS, file)
        try:
            self._set_ports(sections)
            sections = _merged(sections, _from_flags(self.given))
            self._set_discovery(sections)
            self._set_size(sections)
            self._set_tls(sections)
        except FlagError as error:
            raise ConfigError(str(error)) from error
        return check_sections(sections, source=source)

    def warnings(self) -> list[str]:
        """Return a line for each flag or file without effect."""
        lines = [
            f"--{name}={value}: accepted without effect: {IGNORED[name].help}"
            for name, value in self.given.items()
            if name in IGNORED and value not in IGNORED[name].fits
        ]
        if self.text.strip() and read_sections(self.text).get("kind") == FOREIGN_KIND:
            where = self.path or "--config-text"
            lines.append(f"{where}: an {FOREIGN_KIND} of another picker: ignored")
        return lines

    def _set_ports(self, sections: _Sections) -> None:
        ports = (
            ("grpc-port", "server", "address"),
            ("grpc-health-port", "server", "health_address"),
            ("metrics-port", "admin", "metrics_address"),
        )
        for name, section, key in ports:
            if name in self.given:
                port = _port(name, self.given[name])
                try:
                    address = Address.parse(str(sections[section][key]))
                except ValueError as error:
                    raise FlagError(f"--{name}: {section}.{key}: {error}") from error
                sections[section][key] = str(replace(address, port=port))

    def _set_discovery(self, sections: _Sections) -> None:
        given = self.given
        pool, selector = given.get("pool-name", ""), given.get("endpoint-selector", "")
        if (pool and selector) or not (pool or selector or "discovery" in sections):
            raise FlagError("exactly one of: --pool-name, --endpoint-selector")
        if given.get("pool-group", POOL_GROUP) != POOL_GROUP:
            raise FlagError(f"--pool-group: {given['pool-group']!r}: must be {POOL_GROUP}")
        wanted: _Sections = {}
        if pool:
            wanted["inference_pool"] = pool
        elif selector:
            wanted |= {"pod_selector": selector, "port": _ports(given)}
        else:
            return
        namespace = given.get("pool-namespace") or self.environment.get("NAMESPACE")
        if namespace:
            wanted["namespace"] = namespace
        merged = _merged(sections, {"discovery": {"kubernetes": wanted}})
        sections["discovery"] = merged["discovery"]

    def _set_size(self, sections: _Sections) -> None:
        """Raise the largest body to the flag's size; never lower it.

        A gateway's message may be a part of a body, so a lower limit would refuse larger bodies.
        """
        name = "grpc-max-recv-msg-size"
        if name not in self.given:
            return
        wanted = to_bytes(name, self.given[name]) - MESSAGE_OVERHEAD_BYTES
        request = sections["request"]
        known = request.get("max_body_bytes", RequestConfig().max_body_bytes)
        if isinstance(known, int):
            request["max_body_bytes"] = max(known, wanted)

    def _set_tls(self, sections: _Sections) -> None:
        server, folder = sections["server"], self.given.get("cert-path")
        if not to_bool("secure-serving", self.given.get("secure-serving", "true")):
            server["tls"] = None
        elif folder:
            server["tls"] = _files(Path(folder) / "tls.crt", Path(folder) / "tls.key")
        elif server.get("tls") is None:
            if self._certificate is None:
                self._certificate = self.make_certificate()
            server["tls"] = _files(*self._certificate)


def _from_flags(given: Mapping[str, str]) -> _Sections:
    """Return the sections of the flags that set one field each."""
    found: _Sections = {"log": _log(given)}
    for name, flag in FLAGS.items():
        if flag.sets and name in given:
            section, _, key = flag.sets.partition(".")
            value = flag.read(name, given[name])
            if name in _NEGATED:
                value = not value
            elif name in _DEFAULTED:
                value = value or None
            found.setdefault(section, {})[key] = value
    return found


def _log(given: Mapping[str, str]) -> _Sections:
    found: _Sections = {}
    if "v" in given:
        found["level"] = _level(to_int("v", given["v"]))
    if "zap-log-level" in given:
        written = given["zap-log-level"]
        named = {"warn": "warning", "panic": "error"}.get(written, written)
        found["level"] = _level(to_int("zap-log-level", written)) if written.isdecimal() else named
    if "zap-devel" in given:
        found["json_lines"] = not to_bool("zap-devel", given["zap-devel"])
    if "zap-encoder" in given:
        if given["zap-encoder"] not in ("json", "console"):
            raise FlagError(f"--zap-encoder: {given['zap-encoder']!r}: must be json or console")
        found["json_lines"] = given["zap-encoder"] == "json"
    return found


def _level(verbosity: int) -> str:
    return "debug" if verbosity >= DEBUG_VERBOSITY else "info"


def _ports(given: Mapping[str, str]) -> list[int]:
    name = "endpoint-target-ports"
    ports = [_port(name, port) for port in given.get(name, "").split(",") if port]
    if not 1 <= len(set(ports)) <= 8:
        raise FlagError(f"--{name}: from 1 to 8 ports, such as 8000 or 8000,8001")
    return list(dict.fromkeys(ports))


def _port(name: str, value: str) -> int:
    port = to_int(name, value)
    if not 0 <= port <= MAX_PORT:
        raise FlagError(f"--{name}: {port}: a port must be at most {MAX_PORT}")
    return port


def _files(certificate: Path, key: Path) -> _Sections:
    return {"cert_file": str(certificate), "key_file": str(key)}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> _Sections:
    """Return both mappings merged recursively; `above` overrides `below`."""
    merged = dict(below)
    for key, value in above.items():
        before = merged.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[key] = _merged(before, value)
        else:
            merged[key] = value
    # Copies, so that nobody writes into the arguments.
    return {key: dict(value) if isinstance(value, dict) else value for key, value in merged.items()}
