"""Tries what a model server must offer, requirement by requirement: `extproc check-pod URL`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from ssl import SSLContext

import msgspec

from extproc.core.engines import EngineProfile
from extproc.shell.podhttp import FAILURES, describe, open_session
from extproc.shell.podprobes import OPTIONAL, REQUIRED, Answer, Pod, Probe, Verdict


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one requirement.

    Attributes:
        requirement: The requirement in words.
        passed: None where it could not be tried, e.g. without an adapter on the server.
        detail: What was seen.
        is_required: False where routing works without, only worse.
    """

    requirement: str
    passed: bool | None
    detail: str
    is_required: bool = True


async def check_pod(
    url: str,
    *,
    profile: EngineProfile,
    adapter: str | None = None,
    headers: Mapping[str, str] | None = None,
    ssl: SSLContext | None = None,
    timeout_s: float = 30.0,
) -> list[Check]:
    """Try every requirement on the server at `url`, in the order of the documentation.

    Args:
        url: Where the server listens, e.g. `http://10.0.0.1:8000`.
        profile: What its engine calls its metrics.
        adapter: The adapter to ask for; None takes the first one that the server lists.
        headers: Sent with every request, e.g. `Authorization`.
        ssl: For a server behind TLS; None trusts what the system trusts.
        timeout_s: For each requirement. The first request for an adapter may have to load it.

    Returns:
        One check per requirement; a server that does not answer fails them, it raises nothing.
    """
    async with open_session(headers, ssl) as session:

        async def ask(method: str, path: str, body: object) -> Answer:
            async with session.request(
                method, url.rstrip("/") + path, json=body, allow_redirects=False
            ) as response:
                return Answer(response.status, response.content_type, await response.read())

        pod = Pod(ask, profile, adapter)
        return [
            Check(requirement, *await _try(pod, probe, timeout_s), is_required)
            for probes, is_required in ((REQUIRED, True), (OPTIONAL, False))
            for requirement, probe in probes.items()
        ]


def render(check: Check) -> str:
    """Two lines for a terminal: the requirement behind its verdict, and what was seen."""
    if check.passed is None:
        verdict = "skip"
    elif check.passed:
        verdict = "pass"
    else:
        verdict = "FAIL" if check.is_required else "lack"
    return f"{verdict}  {check.requirement}\n      {check.detail}"


async def _try(pod: Pod, probe: Probe, timeout_s: float) -> Verdict:
    try:
        async with asyncio.timeout(timeout_s):
            return await probe(pod)
    except (*FAILURES, msgspec.DecodeError) as error:
        return False, describe(error)
