"""The flags of `extproc epp`, under the names that inference gateways' charts pass.

The names are those of the endpoint picker of the Gateway API Inference Extension and of its
successor, llm-d-router. Flags without a meaning here are accepted because a chart may pass them.
"""

from __future__ import annotations

from typing import NamedTuple

from extproc.commands.goflags import Kind


class Flag(NamedTuple):
    """A supported flag, and its meaning here."""

    kind: Kind
    help: str


class Ignored(NamedTuple):
    """A flag without effect, and why. The values in `fits` ask for what is done anyway."""

    kind: Kind
    why: str
    fits: tuple[str, ...] = ()


FLAGS = {
    "pool-name": Flag(Kind.TEXT, "InferencePool to serve; or give --endpoint-selector"),
    "pool-namespace": Flag(
        Kind.TEXT, "namespace of the pool; by default $NAMESPACE, else the router's"
    ),
    "pool-group": Flag(Kind.TEXT, "API group of the pool: inference.networking.k8s.io only"),
    "endpoint-selector": Flag(Kind.TEXT, "label selector of the pods, instead of a pool"),
    "endpoint-target-ports": Flag(Kind.TEXT, "ports of each such pod, separated by commas"),
    "grpc-port": Flag(Kind.NUMBER, "port of ext_proc (default 9002)"),
    "grpc-health-port": Flag(Kind.NUMBER, "port of gRPC health, without TLS (default 9003)"),
    "metrics-port": Flag(Kind.NUMBER, "port of /metrics (default 9090)"),
    "grpc-max-recv-msg-size": Flag(Kind.SIZE, "raises request.max_body_bytes to this size"),
    "drain-timeout": Flag(Kind.DURATION, "server.drain_timeout_s (default 120s)"),
    "secure-serving": Flag(Kind.SWITCH, "TLS on the ext_proc port (default true)"),
    "cert-path": Flag(Kind.TEXT, "folder with tls.crt and tls.key; self-signed by default"),
    "refresh-metrics-interval": Flag(Kind.DURATION, "scrape.interval_s (default 50ms)"),
    "metrics-staleness-threshold": Flag(Kind.DURATION, "scrape.expiry_s (default 2s)"),
    "model-server-metrics-port": Flag(Kind.NUMBER, "pods.metrics_port; 0: the serving port"),
    "model-server-metrics-path": Flag(Kind.TEXT, "pods.metrics_path (default /metrics)"),
    "disable-endpoint-subset-filter": Flag(Kind.SWITCH, "turns request.use_subset_hint off"),
    "emit-endpoint-scores": Flag(Kind.SWITCH, "destination.emit_scores"),
    "tracing": Flag(Kind.SWITCH, "tracing.enabled; needs the extra `otel` (default false)"),
    "config-file": Flag(Kind.TEXT, "configuration file of the router; flags override it"),
    "config-text": Flag(Kind.TEXT, "the text of such a file"),
    "v": Flag(Kind.NUMBER, "log level: 4 and above is debug"),
    "zap-log-level": Flag(Kind.TEXT, "log level: debug, info, error or a number as for -v"),
    "zap-encoder": Flag(Kind.TEXT, "json (default) or console"),
    "zap-devel": Flag(Kind.SWITCH, "plain log lines instead of JSON"),
}

_PROFILE = "the engine's profile says which metrics are read (pods.engine)"
_PODS = "pods are read where they serve requests (section pods)"
_METRICS = "/metrics is plain HTTP; protect it with a NetworkPolicy"

IGNORED = {
    "health-checking": Ignored(
        Kind.SWITCH, "gRPC health is always on the ext_proc port too", ("true",)
    ),
    "enable-cert-reload": Ignored(Kind.SWITCH, "certificates are always reloaded", ("true",)),
    "ha-enable-leader-election": Ignored(
        Kind.SWITCH, "every replica serves; there is no leader", ("false",)
    ),
    "metrics-endpoint-auth": Ignored(Kind.SWITCH, _METRICS, ("false",)),
    "metrics-client-ca-file": Ignored(Kind.TEXT, _METRICS),
    "metrics-cert-dir": Ignored(Kind.TEXT, _METRICS),
    "enable-pprof": Ignored(Kind.SWITCH, "there is no pprof in Python", ("false",)),
    "enable-grpc-stream-metrics": Ignored(Kind.SWITCH, "stream metrics are always on", ("true",)),
    "refresh-prometheus-metrics-interval": Ignored(Kind.DURATION, "metrics are always current"),
    "allow-experimental-plugins": Ignored(Kind.SWITCH, "there are no such plugins", ("false",)),
    "grpc-max-send-msg-size": Ignored(Kind.SIZE, "messages sent have no limit"),
    "tls-min-version": Ignored(Kind.TEXT, "the minimum is TLS 1.2", ("VersionTLS12", "1.2")),
    "tls-cipher-suites": Ignored(Kind.TEXT, "OpenSSL's defaults apply"),
    "zap-stacktrace-level": Ignored(Kind.TEXT, "exceptions are always logged with their trace"),
    "zap-time-encoding": Ignored(Kind.TEXT, "times are ISO 8601", ("iso8601", "rfc3339")),
    "total-queued-requests-metric": Ignored(Kind.TEXT, _PROFILE),
    "total-running-requests-metric": Ignored(Kind.TEXT, _PROFILE),
    "kv-cache-usage-percentage-metric": Ignored(Kind.TEXT, _PROFILE),
    "lora-info-metric": Ignored(Kind.TEXT, _PROFILE),
    "cache-info-metric": Ignored(Kind.TEXT, _PROFILE),
    "model-server-metrics-scheme": Ignored(Kind.TEXT, _PODS, ("http",)),
    "model-server-metrics-https-insecure-skip-verify": Ignored(Kind.SWITCH, _PODS),
}

KINDS = {name: flag.kind for name, flag in FLAGS.items()}
KINDS |= {name: flag.kind for name, flag in IGNORED.items()}


def help_text() -> str:
    """Return the text of `--help`."""
    rows = [f"  --{name:<32} {flag.help}" for name, flag in FLAGS.items()]
    ignored = [f"  --{name:<32} {flag.why}" for name, flag in IGNORED.items()]
    head = (
        "Usage: extproc epp FLAGS\n\n"
        "Serve a gateway as its endpoint picker, with the flags of its charts (docs/epp.md).\n"
    )
    return "\n".join((head, *rows, "", "Accepted and without effect:", *ignored))
