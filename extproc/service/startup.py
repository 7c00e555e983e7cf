"""The start, and the checks before it: the same for `serve`, `epp` and `check-config`.

The configuration itself was checked when it was read. These checks depend on the machine: whether
the policy can be loaded, files can be read and used, packages are installed, and addresses are
free.
"""

from __future__ import annotations

import datetime as dt
import gc
import logging
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import uvloop

from extproc import __version__
from extproc.config import Config, configured
from extproc.config.configfile import ConfigError, ConfigParser, parse_config, usable
from extproc.config.server import TlsConfig
from extproc.config.warnings import open_doors, short_expiry, unproven_peers
from extproc.discovery.file import parse_endpoints
from extproc.discovery.kubernetes.api import MissingLibraryError, load_library
from extproc.files.reading import check_readable, describe_failure, read_text
from extproc.observe import logs
from extproc.observe.shadowprocess import ShadowError, check_policy
from extproc.observe.tracing import Tracing, TracingError
from extproc.routing.policies import Policy
from extproc.service.app import App
from extproc.service.heap import return_large_blocks
from extproc.service.peeraccess import check_peers, link_tls
from extproc.service.routing import make_policy, make_tried, shadow_settings
from extproc.service.stores import make_medium
from extproc.wire.certificates import CLIENT_CA, authority_warnings, listener_warnings
from extproc.wire.listenertls import Certificates
from extproc.wire.ports import check_listeners

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
        *(_check_store, configured.registration_settings, make_tried, _check_shadow),
    ):
        check(part)
    found.tracing = check(make_tracing)
    found.warnings += [_one_line(warning) for warning in _missing_sources(config)]
    if not found.errors:
        found.warnings += _settings_that_work_badly(config)
    errors, found.in_use = check_listeners(
        {
            "server.address": config.server.address,
            "server.health_address": config.server.health_address,
            "admin.address": config.admin.address,
            "admin.metrics_address": config.admin.metrics_address,
        }
    )
    found.errors += errors
    return found


def _settings_that_work_badly(config: Config) -> list[str]:
    found = [
        *short_expiry(config),
        *open_doors(config),
        *unproven_peers(config),
    ]
    try:
        return [*found, *_certificate_warnings(config, dt.datetime.now(dt.UTC))]
    except OSError as error:  # the files are being replaced just now
        return [*found, _one_line(f"certificates: {error}")]


def _certificate_warnings(config: Config, now: dt.datetime) -> Iterator[str]:
    redis = config.adapters.store and config.adapters.store.redis
    tls, peers, pods = config.server.tls, config.peers, config.pods
    for name, ca_file in (
        ("pods.ca_file", pods.ca_file if pods.tls else None),
        (CLIENT_CA, tls.client_ca_file if tls else None),
        ("peers.ca_file", peers.ca_file if peers and tls else None),
        ("adapters.store.redis.ca_file", redis.ca_file if redis else None),
    ):
        if ca_file is not None:
            yield from authority_warnings(name, ca_file, now)
    if tls is not None:
        trust = "peers.ca_file" if peers and peers.ca_file else CLIENT_CA
        files = tls.cert_file, tls.key_file, tls.client_ca_file
        yield from listener_warnings(
            files, link_tls(config), trust=trust, name=peers.tls_name if peers else None
        )


def _check_packages(config: Config) -> None:
    if config.discovery.kubernetes is not None:
        try:
            load_library("discovery.kubernetes")
        except MissingLibraryError as error:
            raise ConfigError(str(error)) from error


def _check_store(config: Config) -> None:
    if config.adapters.store is not None:
        make_medium(config.adapters.store, clock=lambda: 0.0)


def _check_shadow(config: Config) -> None:
    settings = shadow_settings(config)
    if settings is not None:
        try:
            check_policy(settings)
        except ShadowError as error:
            raise ConfigError(f"policy.shadow: {error}") from error


def _check_server_tls(config: Config) -> None:
    tls = config.server.tls
    if tls is None:
        return
    for name in ("cert_file", "key_file", "client_ca_file"):
        with usable(f"server.tls.{name}", getattr(tls, name)):
            check_readable(getattr(tls, name))
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


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
