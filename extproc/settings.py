"""From the configuration file to the settings that each part takes. Part of `app`."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

from extproc.config import Config
from extproc.configfile import ConfigError
from extproc.core.admission import AdmissionSettings
from extproc.core.messages import BodyMode
from extproc.core.outliers import OutlierSettings
from extproc.core.picker import PickerSettings
from extproc.core.pool import PoolSettings
from extproc.core.ports import StreamSettings
from extproc.core.routes import RouteTable
from extproc.shell.tls import TlsFiles, client_context


def scheme(config: Config) -> str:
    """Of our own calls to pods."""
    return "https" if config.pods.tls else "http"


def pool_settings(config: Config) -> PoolSettings:
    """What the pool is configured with."""
    return PoolSettings(config.scrape.expiry_s, config.pods.max_loras, config.pods.max_cpu_loras)


def outlier_settings(config: Config) -> OutlierSettings:
    """What the detection of outliers is configured with."""
    return OutlierSettings(**config.outliers.model_dump())


def picker_settings(config: Config) -> PickerSettings:
    """What the picker is configured with."""
    return PickerSettings(config.destination.num_fallbacks, config.request.max_sessions)


def admission_settings(config: Config) -> AdmissionSettings:
    """What admission is configured with."""
    admission = config.admission
    return AdmissionSettings(
        admission.max_pending_per_endpoint,
        admission.retry_after_s,
        admission.priorities,
        admission.sheddable_max_waiting,
        admission.sheddable_max_kv_usage_ratio,
    )


def stream_settings(config: Config) -> StreamSettings:
    """What each stream is configured with."""
    request = config.request
    mode = request.assumed_body_mode.upper().replace("-", "_")
    return StreamSettings(
        routes=RouteTable(request.paths),
        max_body_bytes=request.max_body_bytes,
        early_decision_bytes=request.early_decision_bytes,
        allow_mode_override=request.allow_mode_override,
        uses_response_phases=config.completions.source == "response_phases",
        assumed_body_mode=BodyMode[mode],
        session_header=request.session_header,
        max_hold_s=request.max_hold_s,
    )


def tls_files(config: Config) -> TlsFiles:
    """The listener's certificate files; `server.tls` must be set."""
    tls = config.server.tls
    assert tls is not None
    return TlsFiles(tls.cert_file, tls.key_file, tls.client_ca_file)


def pod_access(config: Config) -> tuple[dict[str, str], ssl.SSLContext | None]:
    """Headers and TLS of our own calls to pods.

    Raises:
        ConfigError: A file cannot be read.
    """
    pods = config.pods
    try:
        headers = {}
        if pods.api_key_file is not None:
            key = pods.api_key_file.read_text(encoding="utf-8").strip()
            headers["authorization"] = f"Bearer {key}"
        context = client_context(pods.ca_file, verify=pods.tls_verify) if pods.tls else None
    except OSError as error:
        raise ConfigError(f"pods: {error}") from error
    return headers, context


_LIVE = {"policy", "admission", "outliers"}
_LIVE_FIELDS = {
    ("scrape", "expiry_s"),
    ("destination", "num_fallbacks"),
    ("admin", "slo_ttft_s"),
}


def needs_restart(old: Config, new: Config) -> Iterable[str]:
    """What differs between two configurations and is not live, as `section.field`."""
    for section in Config.model_fields:
        before, after = getattr(old, section), getattr(new, section)
        if section in _LIVE or before == after:
            continue
        fields = type(after).model_fields if hasattr(type(after), "model_fields") else {}
        for name in fields or ("",):
            if (section, name) in _LIVE_FIELDS:
                continue
            if not name or getattr(before, name) != getattr(after, name):
                yield f"{section}.{name}".rstrip(".")
