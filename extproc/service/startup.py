"""The start, and the checks before it: the same for `serve`, `epp` and `check-config`.

The configuration itself was checked when it was read. These checks depend on the machine: whether
the policy can be loaded, files can be read and used, packages are installed, and addresses are
free.
"""

from __future__ import annotations

import datetime as dt
import errno
import gc
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import uvloop

from extproc import __version__
from extproc.address import MAX_UNIX_PATH_BYTES, Address
from extproc.config import Config
from extproc.config.file import ConfigError, ConfigParser, parse_config
from extproc.config.server import TlsConfig
from extproc.discovery.file import parse_endpoints
from extproc.discovery.kubernetes.api import MissingLibraryError, load_library
from extproc.files.reading import check_readable, describe_failure, read_text
from extproc.observe import logs
from extproc.observe.tracing import Tracing, TracingError
from extproc.routing.policies import Policy
from extproc.service import configured
from extproc.service.app import App
from extproc.service.certificates import certificate_warnings
from extproc.service.heap import return_large_blocks
from extproc.service.peeraccess import check_peers, unproven_peers
from extproc.service.routing import make_policy
from extproc.service.stores import check_store
from extproc.wire.tls import Certificates

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True)
class Findings:
    """The results of the checks; each message is one line that names the field.

    Attributes:
        errors: Mistakes that keep the router from starting.
        in_use: Addresses that another process listens on: the router cannot start while it does.
        warnings: Missing parts that the router waits for, and settings that work badly.
        policy: The configured policy; None if it is among the errors.
        tracing: The maker of spans; None where tracing is off, or among the errors.
    """

    errors: list[str] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    policy: Policy | None = None
    tracing: Tracing | None = None

    def close(self) -> None:
        """Release what was made for a service that is not started."""
        if self.tracing is not None:
            self.tracing.close()


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
        config: The configuration.
        path: Its file, followed for changes; None without one.
        text: The content of that file.
        parse: Parses the file when it has changed.
        warnings: Logged at the start.

    Raises:
        ConfigError: The checks found errors, a line each.
        OSError: An address cannot be bound.
    """
    logs.configure_logging(config.log.level, is_json=config.log.json_lines)
    found = check_start(config)
    if found.errors or found.in_use or found.policy is None:
        found.close()
        raise ConfigError("\n".join([*found.errors, *found.in_use]))
    policy, tracing = found.policy, found.tracing
    for line in (*warnings, *_settings_that_work_badly(config)):
        log.warning(line)

    async def run() -> None:
        await App(config, policy, tracing, path=path, text=text, parse=parse).run()

    # Modules live until the end. Else a full collection visits them each time: 35 ms.
    gc.freeze()
    return_large_blocks()
    uvloop.run(run())


def check_start(config: Config) -> Findings:
    """Check everything that a start needs, without listening or connecting."""
    found = Findings()

    def check(part: Callable[[Config], _T]) -> _T | None:
        try:
            return part(config)
        except ConfigError as error:
            found.errors.append(_one_line(error))
            return None

    found.policy = check(make_policy)
    for part in (
        *(_check_packages, _check_server_tls, configured.pod_access, check_peers),
        check_store,
    ):
        check(part)
    found.tracing = check(make_tracing)
    found.warnings += [_one_line(warning) for warning in _missing_sources(config)]
    if not found.errors:
        found.warnings += _settings_that_work_badly(config)
    _check_addresses(config, found)
    return found


def _settings_that_work_badly(config: Config) -> list[str]:
    found = [
        *configured.short_expiry(config),
        *configured.open_doors(config),
        *unproven_peers(config),
    ]
    try:
        return [*found, *certificate_warnings(config, now=dt.datetime.now(dt.UTC))]
    except OSError as error:  # the files are being replaced just now
        return [*found, _one_line(f"certificates: {error}")]


def _check_packages(config: Config) -> None:
    if config.discovery.kubernetes is not None:
        try:
            load_library("discovery.kubernetes")
        except MissingLibraryError as error:
            raise ConfigError(str(error)) from error


def _check_server_tls(config: Config) -> None:
    tls = config.server.tls
    if tls is None:
        return
    for name in ("cert_file", "key_file", "client_ca_file"):
        _check_file(f"server.tls.{name}", getattr(tls, name))
    try:
        Certificates(tls.cert_file, tls.key_file)
    except ssl.SSLError as error:
        _check_not_swapped(tls)
        raise ConfigError(
            f"server.tls: {tls.cert_file} and {tls.key_file} are not a certificate and its private "
            f"key: {describe_failure(error)}"
        ) from error
    try:
        Certificates(tls.cert_file, tls.key_file, tls.client_ca_file)
    except ssl.SSLError as error:
        why = describe_failure(error)
        raise ConfigError(f"server.tls.client_ca_file: {tls.client_ca_file}: {why}") from error


def _check_not_swapped(tls: TlsConfig) -> None:
    with suppress(ssl.SSLError):
        Certificates(tls.key_file, tls.cert_file)
        raise ConfigError("server.tls: cert_file and key_file are swapped")


def _check_file(name: str, path: Path | None) -> None:
    try:
        check_readable(path)
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {describe_failure(error)}") from error


def _missing_sources(config: Config) -> Iterator[str]:
    """Yield a line for each source without pods: a file may be written later, by a sidecar say."""
    discovery = config.discovery
    if discovery.static == ():
        yield "discovery.static: empty: every request will be answered with 503"
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
        except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
            line = _one_line(f"{name}: {address}: {describe_failure(error)}")
            is_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            (found.in_use if is_in_use else found.errors).append(line)


def _check_unix_path(text: str) -> None:
    """Refuse a path where no Unix socket can be made; an existing socket will be replaced."""
    path = Path(text)
    if len(os.fsencode(text)) > MAX_UNIX_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"longer than {MAX_UNIX_PATH_BYTES} bytes")
    if not stat.S_ISDIR(path.parent.stat().st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    if path.exists() and not path.is_socket():
        raise OSError(errno.EEXIST, "exists and is not a socket")


def _try_to_bind(name: str, address: str, taken: dict[tuple[int, str, int], str]) -> None:
    """Bind as a listener does, without listening, so that nobody can connect.

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


def make_tracing(config: Config) -> Tracing | None:
    """Make the tracing that is configured; None where it is off.

    Raises:
        ConfigError: OpenTelemetry is not installed, or its environment variables cannot be used.
    """
    if not config.tracing.enabled:
        return None
    ratio = config.tracing.sample_ratio
    try:
        return Tracing(sample_ratio=ratio, version=__version__)
    except TracingError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # OpenTelemetry reads its own environment variables
        raise ConfigError(f"tracing: {error or type(error).__name__}") from error


def _claim(name: str, place: tuple[int, str, int], taken: dict[tuple[int, str, int], str]) -> None:
    family, host, port = place
    for (other_family, other_host, other_port), other in taken.items():
        is_same_host = host == other_host or {host, other_host} & {"0.0.0.0", "::"}
        if (family, port) == (other_family, other_port) and is_same_host and other != name:
            raise OSError(errno.EINVAL, f"already used by {other}")
    taken[place] = name


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
