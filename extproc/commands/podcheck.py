"""Tries every requirement of a model server: `extproc check-pod URL`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from ssl import SSLContext

import msgspec
from yarl import URL

from extproc.commands.checks import Check, tried
from extproc.commands.podprobes import OPTIONAL, REQUIRED, ProbedPod, Response
from extproc.reports.engines import EngineMetrics
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import FAILURES, describe

_MAX_BODY_BYTES = 64 * 1024 * 1024  # of a response: a page of metrics may have megabytes


async def check_pod(
    url: str,
    *,
    profile: EngineMetrics,
    adapter: str | None = None,
    headers: Mapping[str, str] | None = None,
    ssl: SSLContext | None = None,
    timeout_s: float = 30.0,
) -> list[Check]:
    """Try every requirement on the server at `url`, in the order of the documentation.

    Args:
        url: The server, e.g. `http://10.0.0.1:8000`.
        adapter: The adapter to request; None for the first one that the server lists.
        headers: Sent with every request, e.g. `Authorization`.
        ssl: For a server behind TLS; None for the system's trust.
        timeout_s: For each requirement. The first request for an adapter may have to load it.

    Returns:
        One check per requirement; an unreachable server fails them, without an exception.
    """
    client = PodClient(headers, ssl)

    async def ask(method: str, path: str, body: object) -> Response:
        asked = URL(url.rstrip("/") + path)
        return Response(*await client.ask(method, asked, body, max_bytes=_MAX_BODY_BYTES))

    pod = ProbedPod(ask, profile, adapter)
    attempt = partial(
        tried,
        timeout_s=timeout_s,
        failures=(*FAILURES, msgspec.DecodeError),
        describe=partial(describe, trust="--ca-file"),
    )
    return [
        Check(requirement, *await attempt(probe(pod)), is_required)
        for probes, is_required in ((REQUIRED, True), (OPTIONAL, False))
        for requirement, probe in probes.items()
    ]


def blind_spots(profile: EngineMetrics) -> list[str]:
    """Return a line for each setting of `pods` that no request to a server can show."""
    return [
        f"set   pods.max_cpu_loras to the server's {profile.cpu_cache_flag}: no response shows it, "
        "and a wrong value costs adapter loads",
        f"set   pods.max_lora_rank to the server's {profile.max_rank_flag}: no response shows it; "
        "for information only",
    ]
