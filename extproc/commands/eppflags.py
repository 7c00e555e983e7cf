"""The flags of `extproc epp`, under the names that inference gateways' charts pass.

They are written Go's way, as `--name value`, `--name=value`, `-v 4`, and bare switches.

The names are those of the endpoint picker of the Gateway API Inference Extension and of its
successor, llm-d-router. They match in every common style: `--pool-name`, `-poolName`,
`--pool_name`. Flags without a meaning here are accepted because a chart may pass them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple


class FlagError(ValueError):
    """The command line cannot be used; the message names the flag and says what is allowed."""


class FlagKind(Enum):
    """The kind of a flag's value."""

    SWITCH = "true or false"  # never takes the next argument as its value
    NUMBER = "a whole number"
    DURATION = "a duration such as 50ms, 30s or 1m30s"
    SIZE = "a size such as 4194304, 10MiB or 25MB"
    TEXT = "text"


_CAMEL = re.compile(r"(?<=[a-z0-9])[A-Z]")
_TRUE = frozenset(("1", "t", "T", "true", "TRUE", "True"))
_FALSE = frozenset(("0", "f", "F", "false", "FALSE", "False"))
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_DURATION_UNITS_S = {
    **{"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3},
    **{"s": 1.0, "m": 60.0, "h": 3600.0},
}
_SIZE = re.compile(r"(\d+)([kMG]|[KMG]i)?B?")
_SIZE_UNITS: dict[str | None, int] = {
    **{None: 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000},
    **{"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30},
}


def parse_flags(
    arguments: Sequence[str], kinds: Mapping[str, FlagKind], *, unrepeated: Collection[str] = ()
) -> dict[str, str]:
    """Split a command line into values by flag, as text; the last value of a repeated flag counts.

    Raises:
        FlagError: An unknown flag, a missing value, a stray argument, or two values of one of
            `unrepeated`.
    """
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        written, has_value, value = argument.partition("=")
        name = _name(written)
        if name is None:
            raise FlagError(f"{argument}: not a flag; switches are written --name=false")
        if name not in kinds:
            raise FlagError(f"{written}: unknown flag; --help lists them")
        if not has_value:
            if kinds[name] is FlagKind.SWITCH:
                value = "true"
            elif rest:
                value = rest.pop(0)
            else:
                raise FlagError(f"{written}: needs a value: {kinds[name].value}")
        if name in unrepeated and found.get(name, value) != value:
            raise FlagError(f"{written}: {found[name]!r} and {value!r}: it takes one value")
        found[name] = value
    return found


def _name(written: str) -> str | None:
    """Return `pool-name` for `--pool-name`, `-poolName` and `--pool_name`; None for non-flags."""
    bare = written.removeprefix("-").removeprefix("-")
    if bare == written or not bare or bare.startswith("-"):
        return None
    return _CAMEL.sub(lambda match: f"-{match[0].lower()}", bare).replace("_", "-").lower()


def to_bool(name: str, value: str) -> bool:
    """Parse a switch as Go's `strconv.ParseBool` does.

    Raises:
        FlagError: Anything else.
    """
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise _not_a(FlagKind.SWITCH, name, value)


def to_int(name: str, value: str) -> int:
    """Parse a whole number in decimal digits.

    Raises:
        FlagError: Anything else.
    """
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise _not_a(FlagKind.NUMBER, name, value)
    return int(value)


def to_seconds(name: str, value: str) -> float:
    """Parse a Go duration.

    Raises:
        FlagError: Anything else, including a number without a unit.
    """
    parts = _DURATION.findall(value)
    if value == "0":
        return 0.0
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise _not_a(FlagKind.DURATION, name, value)
    return sum(float(number) * _DURATION_UNITS_S[unit] for number, unit in parts)


def to_bytes(name: str, value: str) -> int:
    """Parse a Kubernetes quantity, with or without a final `B`.

    Raises:
        FlagError: Anything else.
    """
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise _not_a(FlagKind.SIZE, name, value)
    return int(match[1]) * _SIZE_UNITS[match[2]]


def _not_a(kind: FlagKind, name: str, value: str) -> FlagError:
    return FlagError(f"--{name}: {value!r}: must be {kind.value}")


_READERS: dict[FlagKind, Callable[[str, str], Any]] = {
    FlagKind.SWITCH: to_bool,
    FlagKind.NUMBER: to_int,
    FlagKind.DURATION: to_seconds,
    FlagKind.SIZE: to_bytes,
}


# --- the flags ---------------------------------------------------------------------------------


class Flag(NamedTuple):
    """A flag, and its meaning here, or why it has none.

    Attributes:
        kind: The kind of its value.
        help: Its effect, or why it has none.
        sets: The one field of the configuration that it sets, as `section.field`.
        fits: Values of a flag without effect that ask for what is done anyway.
    """

    kind: FlagKind
    help: str
    sets: str = ""
    fits: tuple[str, ...] = ()

    def read(self, name: str, written: str) -> Any:
        """Read its value.

        Raises:
            FlagError: It is not of the kind.
        """
        read = _READERS.get(self.kind)
        return written if read is None else read(name, written)


FLAGS = {
    "pool-name": Flag(FlagKind.TEXT, "InferencePool to serve; or give --endpoint-selector"),
    "pool-namespace": Flag(
        FlagKind.TEXT, "namespace of the pool; by default $NAMESPACE, else the router's"
    ),
    "pool-group": Flag(FlagKind.TEXT, "API group of the pool: inference.networking.k8s.io only"),
    "endpoint-selector": Flag(FlagKind.TEXT, "label selector of the pods, instead of a pool"),
    "endpoint-target-ports": Flag(FlagKind.TEXT, "ports of each such pod, separated by commas"),
    "grpc-port": Flag(FlagKind.NUMBER, "port of ext_proc (default 9002)"),
    "grpc-health-port": Flag(FlagKind.NUMBER, "port of gRPC health, without TLS (default 9003)"),
    "metrics-port": Flag(FlagKind.NUMBER, "port of /metrics (default 9090)"),
    "grpc-max-recv-msg-size": Flag(FlagKind.SIZE, "raises request.max_body_bytes to this size"),
    "drain-timeout": Flag(
        FlagKind.DURATION, "server.drain_timeout_s (default 120s)", "server.drain_timeout_s"
    ),
    "secure-serving": Flag(FlagKind.SWITCH, "TLS on the ext_proc port (default true)"),
    "cert-path": Flag(FlagKind.TEXT, "folder with tls.crt and tls.key; self-signed by default"),
    "refresh-metrics-interval": Flag(
        FlagKind.DURATION, "scrape.interval_s (default 50ms)", "scrape.interval_s"
    ),
    "metrics-staleness-threshold": Flag(
        FlagKind.DURATION, "scrape.expiry_s (default 2s)", "scrape.expiry_s"
    ),
    "model-server-metrics-port": Flag(
        FlagKind.NUMBER, "pods.metrics_port; 0: the serving port", "pods.metrics_port"
    ),
    "model-server-metrics-path": Flag(
        FlagKind.TEXT, "pods.metrics_path (default /metrics)", "pods.metrics_path"
    ),
    "disable-endpoint-subset-filter": Flag(
        FlagKind.SWITCH, "turns request.use_subset_hint off", "request.use_subset_hint"
    ),
    "emit-endpoint-scores": Flag(
        FlagKind.SWITCH, "destination.emit_scores", "destination.emit_scores"
    ),
    "tracing": Flag(
        FlagKind.SWITCH,
        "tracing.enabled; needs the extra `otel` (default false)",
        "tracing.enabled",
    ),
    "config-file": Flag(FlagKind.TEXT, "configuration file of the router; flags override it"),
    "config-text": Flag(FlagKind.TEXT, "the text of such a file"),
    "v": Flag(FlagKind.NUMBER, "log level: 4 and above is debug"),
    "zap-log-level": Flag(FlagKind.TEXT, "log level: debug, info, error or a number as for -v"),
    "zap-encoder": Flag(FlagKind.TEXT, "json (default) or console"),
    "zap-devel": Flag(FlagKind.SWITCH, "plain log lines instead of JSON"),
}

_PROFILE = "the engine's profile says which metrics are read (pods.engine)"
_PODS = "pods are read where they serve requests (section pods)"
_METRICS = "/metrics is plain HTTP; protect it with a NetworkPolicy"

IGNORED = {
    "health-checking": Flag(
        FlagKind.SWITCH, "gRPC health is always on the ext_proc port too", fits=("true",)
    ),
    "enable-cert-reload": Flag(FlagKind.SWITCH, "certificates are always reloaded", fits=("true",)),
    "ha-enable-leader-election": Flag(
        FlagKind.SWITCH, "every replica serves; there is no leader", fits=("false",)
    ),
    "metrics-endpoint-auth": Flag(FlagKind.SWITCH, _METRICS, fits=("false",)),
    "metrics-client-ca-file": Flag(FlagKind.TEXT, _METRICS),
    "metrics-cert-dir": Flag(FlagKind.TEXT, _METRICS),
    "enable-pprof": Flag(FlagKind.SWITCH, "there is no pprof in Python", fits=("false",)),
    "enable-grpc-stream-metrics": Flag(
        FlagKind.SWITCH, "stream metrics are always on", fits=("true",)
    ),
    "refresh-prometheus-metrics-interval": Flag(FlagKind.DURATION, "metrics are always current"),
    "allow-experimental-plugins": Flag(
        FlagKind.SWITCH, "there are no such plugins", fits=("false",)
    ),
    "grpc-max-send-msg-size": Flag(FlagKind.SIZE, "messages sent have no limit"),
    "tls-min-version": Flag(FlagKind.TEXT, "the minimum is TLS 1.2", fits=("VersionTLS12", "1.2")),
    "tls-cipher-suites": Flag(FlagKind.TEXT, "OpenSSL's defaults apply"),
    "zap-stacktrace-level": Flag(FlagKind.TEXT, "exceptions are always logged with their trace"),
    "zap-time-encoding": Flag(FlagKind.TEXT, "times are ISO 8601", fits=("iso8601", "rfc3339")),
    "total-queued-requests-metric": Flag(FlagKind.TEXT, _PROFILE),
    "total-running-requests-metric": Flag(FlagKind.TEXT, _PROFILE),
    "kv-cache-usage-percentage-metric": Flag(FlagKind.TEXT, _PROFILE),
    "lora-info-metric": Flag(FlagKind.TEXT, _PROFILE),
    "cache-info-metric": Flag(FlagKind.TEXT, _PROFILE),
    "model-server-metrics-scheme": Flag(FlagKind.TEXT, _PODS, fits=("http",)),
    "model-server-metrics-https-insecure-skip-verify": Flag(FlagKind.SWITCH, _PODS),
}

KINDS = {name: flag.kind for name, flag in (FLAGS | IGNORED).items()}


def help_text() -> str:
    """Return the text of `--help`."""
    rows = [f"  --{name:<32} {flag.help}" for name, flag in FLAGS.items()]
    ignored = [f"  --{name:<32} {flag.help}" for name, flag in IGNORED.items()]
    head = (
        "Usage: extproc epp FLAGS\n\n"
        "Serve a gateway as its endpoint picker, with the flags of its charts (docs/epp.md).\n"
    )
    return "\n".join((head, *rows, "", "Accepted and without effect:", *ignored))
