"""From the configuration file to the settings that each part takes. Part of `app`."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path

from extproc.config import Config
from extproc.config.file import ConfigError
from extproc.config.request import MESSAGE_OVERHEAD_BYTES
from extproc.core.accounting import AccountingSettings, Source
from extproc.core.admission import AdmissionSettings
from extproc.core.budget import DEFAULT_MAX_BYTES, Budget
from extproc.core.messages import BodyMode
from extproc.core.outliers import OutlierSettings
from extproc.core.picker import PickerSettings
from extproc.core.pool import PoolSettings
from extproc.core.ports import StreamSettings
from extproc.core.routes import RouteTable
from extproc.shell.files import describe_failure, read_text
from extproc.shell.loops import LoopSettings
from extproc.shell.memory import memory_limit_bytes
from extproc.shell.tls import client_context

BODY_SHARE_OF_MEMORY = 0.25
"""Of the process's memory limit, for bodies. The rest is for the program itself (about 80 MB), the
copies of the body that is being read, and what the allocator keeps."""
MAX_SCRAPE_REST_S, MAX_MODELS_REST_S = 1.0, 5.0
"""Longest rests between two questions to a pod that fails."""


def scheme(config: Config) -> str:
    """The scheme of our own requests to pods."""
    return "https" if config.pods.tls else "http"


def pool_settings(config: Config) -> PoolSettings:
    """The settings of the pool."""
    return PoolSettings(config.scrape.expiry_s, config.pods.max_loras, config.pods.max_cpu_loras)


def outlier_settings(config: Config) -> OutlierSettings:
    """The settings of the detection of outliers."""
    return OutlierSettings(**config.outliers.model_dump())


def picker_settings(config: Config) -> PickerSettings:
    """The settings of the picker."""
    destination = config.destination
    return PickerSettings(
        destination.num_fallbacks, destination.num_alternates, config.request.max_sessions
    )


def admission_settings(config: Config) -> AdmissionSettings:
    """The settings of admission."""
    admission = config.admission
    return AdmissionSettings(
        admission.max_pending_per_endpoint,
        admission.retry_after_s,
        admission.priorities,
        admission.sheddable_max_waiting,
        admission.sheddable_max_kv_usage_ratio,
    )


def accounting_settings(config: Config) -> AccountingSettings:
    """What accounting is configured with."""
    completions = config.completions
    return AccountingSettings(
        Source(completions.source),
        completions.scrape_grace_s,
        completions.lost_after_s,
        completions.max_age_s,
    )


def stream_settings(config: Config) -> StreamSettings:
    """The settings of every stream."""
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


def max_message_bytes(config: Config) -> int:
    """The largest gRPC message: the largest body and what comes with it."""
    return config.request.max_body_bytes + MESSAGE_OVERHEAD_BYTES


def budget(config: Config) -> Budget:
    """The budget of all bodies in memory: as configured, else a share of the process's memory."""
    largest_bytes = max_message_bytes(config)
    max_bytes = config.request.max_bytes_in_memory
    if max_bytes is None:
        share_bytes = int(memory_limit_bytes() * BODY_SHARE_OF_MEMORY)
        max_bytes = max(largest_bytes, min(share_bytes, DEFAULT_MAX_BYTES))
    return Budget(max_bytes, max_upload_bytes=largest_bytes)


def tls_files(config: Config) -> tuple[Path, Path, Path | None]:
    """The listener's certificate, key and client CAs; `server.tls` must be set."""
    tls = config.server.tls
    assert tls is not None
    return tls.cert_file, tls.key_file, tls.client_ca_file


def pod_access(config: Config) -> tuple[dict[str, str], ssl.SSLContext | None]:
    """Headers and TLS of our own requests to pods.

    Raises:
        ConfigError: A file cannot be read, or is not what it should be.
    """
    pods = config.pods
    headers = {}
    if pods.api_key_file is not None:
        headers["authorization"] = f"Bearer {_read_key(pods.api_key_file)}"
    try:
        context = client_context(pods.ca_file, verify=pods.tls_verify) if pods.tls else None
    except OSError as error:
        why = describe_failure(error)
        raise ConfigError(f"pods.ca_file: {pods.ca_file}: {why}") from error
    return headers, context


def pod_loops(config: Config) -> tuple[LoopSettings, LoopSettings]:
    """The loops that read the pods' metrics and, second, their models.

    Raises:
        ConfigError: As `pod_access`.
    """
    scrape, (headers, context) = config.scrape, pod_access(config)
    return (
        LoopSettings(scrape.interval_s, scrape.timeout_s, MAX_SCRAPE_REST_S, headers, context),
        LoopSettings(
            scrape.models_interval_s, scrape.timeout_s, MAX_MODELS_REST_S, headers, context
        ),
    )


def _read_key(path: Path) -> str:
    try:
        key = read_text(path).strip()
    except OSError as error:
        raise ConfigError(f"pods.api_key_file: {path}: {describe_failure(error)}") from error
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigError(f"pods.api_key_file: {path}: must be one line of printable ASCII")
    return key


_LIVE = {"policy", "admission", "outliers"}
_LIVE_FIELDS = {
    ("scrape", "expiry_s"),
    ("destination", "num_fallbacks"),
    ("destination", "num_alternates"),
    ("admin", "slo_ttft_s"),
}


def needs_restart(old: Config, new: Config) -> Iterable[str]:
    """The fields, as `section.field`, that differ between two configurations and are not live."""
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
