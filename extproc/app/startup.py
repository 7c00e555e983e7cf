"""The start, and the checks before it: the same for `serve`, `epp` and `check-config`.

The configuration by itself was checked when it was read. These checks need the machine: policies
that can be loaded, files that can be read and are what they should be, packages that are installed,
addresses that can be listened on. Part of `app`.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import ssl
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import uvloop

from extproc.app import settings
from extproc.app.app import App
from extproc.app.observers import Observers
from extproc.app.peering import Peering
from extproc.app.traced import make_tracing
from extproc.config import Config
from extproc.config.file import ConfigError, ConfigParser, parse_config
from extproc.core.address import Address
from extproc.plugins import PolicyError, load_policy
from extproc.shell import logs
from extproc.shell.certificates import Certificates
from extproc.shell.discovery.file import parse_endpoints
from extproc.shell.discovery.kubernetes import KubernetesClient, MissingLibraryError
from extproc.shell.files import check_readable, describe_failure, read_text

log = logging.getLogger(__name__)

MAX_UNIX_PATH_BYTES = 107
"""Of a Unix socket's path on Linux: `sun_path` has 108, the last of them zero (unix(7))."""


@dataclass(slots=True)
class Findings:
    """The findings of the checks, each one line that names the field.

    Attributes:
        errors: Nothing is served with these.
        in_use: Addresses that somebody listens on: nothing is served while they do.
        warnings: What serving begins with all the same, and waits for.
    """

    errors: list[str] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def serve(
    config: Config,
    *,
    path: Path | None,
    text: str,
    parse: ConfigParser = parse_config,
    warnings: Iterable[str] = (),
) -> None:
    """Check, then serve until a signal.

    Args:
        config: What is served.
        path: Its file, followed for changes; None without one.
        text: What was read there.
        parse: Reads the file when it has changed.
        warnings: Logged at the start.

    Raises:
        ConfigError: The checks found errors, a line each.
        OSError: An address cannot be bound.
    """
    found = check_start(config)
    if found.errors or found.in_use:
        raise ConfigError("\n".join([*found.errors, *found.in_use]))
    logs.configure_logging(config.log.level, is_json=config.log.json_lines)
    for line in warnings:
        log.warning(line)

    async def run() -> None:
        await App(config, path=path, text=text, parse=parse).run()

    uvloop.run(run())


def check_start(config: Config) -> Findings:
    """Look at everything that a start needs. Nothing is listened on, nobody is asked."""
    found = Findings()
    checks: tuple[Callable[[Config], object], ...] = (
        _check_policy,
        _check_packages,
        _check_server_tls,
        settings.pod_access,
        _check_peers,
        _check_tracing,
    )
    for check in checks:
        try:
            check(config)
        except ConfigError as error:
            found.errors.append(_one_line(error))
    found.warnings += [_one_line(warning) for warning in _missing_sources(config)]
    _check_addresses(config, found)
    return found


def _check_policy(config: Config) -> None:
    try:
        load_policy(config.policy.name, config.policy.args)
    except PolicyError as error:
        raise ConfigError(str(error)) from error


def _check_packages(config: Config) -> None:
    if config.server.transport == "grpcio" and find_spec("grpc") is None:
        raise ConfigError("server.transport: grpcio: needs the package grpcio")
    if config.discovery.kubernetes is not None:
        try:
            KubernetesClient()
        except MissingLibraryError as error:
            raise ConfigError(f"discovery.kubernetes: {error}") from error


def _check_server_tls(config: Config) -> None:
    tls = config.server.tls
    if tls is None:
        return
    for name in ("cert_file", "key_file", "client_ca_file"):
        _check_file(f"server.tls.{name}", getattr(tls, name))
    try:
        Certificates(tls.cert_file, tls.key_file)
    except ssl.SSLError as error:
        raise ConfigError(
            f"server.tls: {tls.cert_file} and {tls.key_file} are no certificate and its private "
            f"key: {describe_failure(error)}"
        ) from error
    try:
        Certificates(tls.cert_file, tls.key_file, tls.client_ca_file)
    except ssl.SSLError as error:
        why = describe_failure(error)
        raise ConfigError(f"server.tls.client_ca_file: {tls.client_ca_file}: {why}") from error


def _check_peers(config: Config) -> None:
    peers = config.peers
    if peers is None:
        return
    peering = Peering(
        config,
        router_id="",
        on_entries=lambda _entries: None,
        on_num_routers=lambda _count: None,
        on_garbage=lambda: None,
        clock=lambda: 0.0,
        rng=random.Random(0),
        observers=Observers(),
    )
    if config.server.tls is not None:
        _check_file("peers.ca_file", peers.ca_file)
        try:
            peering.tls()
        except OSError as error:
            raise ConfigError(
                f"peers: ca_file and server.tls cannot be used: {describe_failure(error)}"
            ) from error


def _check_tracing(config: Config) -> None:
    try:
        tracing = make_tracing(config.tracing)
    except ConfigError as error:
        raise ConfigError(f"tracing: {error}") from error
    except Exception as error:  # OpenTelemetry reads its own environment variables
        raise ConfigError(f"tracing: {error or type(error).__name__}") from error
    if tracing is not None:
        tracing.close()


def _check_file(name: str, path: Path | None) -> None:
    try:
        check_readable(path)
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {describe_failure(error)}") from error


def _missing_sources(config: Config) -> Iterator[str]:
    """Files that may come later: a sidecar writes them, say."""
    discovery = config.discovery
    if discovery.file is not None:
        try:
            parse_endpoints(read_text(discovery.file))
        except OSError as error:
            yield f"discovery.file: {discovery.file}: {describe_failure(error)}"
        except ValueError as error:
            yield f"discovery.file: {discovery.file}: {error}"
    for name, section in (("discovery.kubernetes", discovery.kubernetes), ("peers", config.peers)):
        path = None if section is None else section.kubeconfig
        try:
            check_readable(None if path is None else path.expanduser())
        except OSError as error:
            yield f"{name}.kubeconfig: {path}: {describe_failure(error)}"


# --- addresses -----------------------------------------------------------------------------------


def _check_addresses(config: Config, found: Findings) -> None:
    listeners = {
        "server.address": config.server.address,
        "server.health_address": config.server.health_address,
        "admin.address": config.admin.address,
        "admin.metrics_address": config.admin.metrics_address,
    }
    taken: dict[tuple[int, str, int], str] = {}
    for name, address in listeners.items():
        if address is None:
            continue
        try:
            if address.startswith("unix:"):
                _check_unix_path(address.removeprefix("unix:"))
            else:
                _try_to_bind(name, address, taken)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name has such a part
            line = _one_line(f"{name}: {address}: {describe_failure(error)}")
            is_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            (found.in_use if is_in_use else found.errors).append(line)


def _check_unix_path(text: str) -> None:
    """Refuse a path where no Unix socket can be made; a socket that is there is replaced."""
    path = Path(text)
    if len(os.fsencode(text)) > MAX_UNIX_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"longer than {MAX_UNIX_PATH_BYTES} bytes")
    if not stat.S_ISDIR(path.parent.stat().st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    if path.exists() and not path.is_socket():
        raise OSError(errno.EEXIST, "there is something that is no socket")


def _try_to_bind(name: str, address: str, taken: dict[tuple[int, str, int], str]) -> None:
    """Bind as a listener does, without listening: nobody connects to a check.

    Raises:
        OSError: It cannot be bound, or another listener of ours has it.
    """
    wanted = Address.parse(address)
    for family, kind, protocol, _, where in socket.getaddrinfo(
        wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)
        if wanted.port:
            _claim(name, (int(family), str(where[0]), wanted.port), taken)


def _claim(name: str, place: tuple[int, str, int], taken: dict[tuple[int, str, int], str]) -> None:
    family, host, port = place
    for (other_family, other_host, other_port), other in taken.items():
        is_same_host = host == other_host or {host, other_host} & {"0.0.0.0", "::"}
        if (family, port) == (other_family, other_port) and is_same_host and other != name:
            raise OSError(errno.EINVAL, f"{other} has this address, too")
    taken[place] = name


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
