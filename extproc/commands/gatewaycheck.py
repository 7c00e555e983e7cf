"""Tries every requirement of a gateway before routers: `extproc check-gateway URL`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from ssl import SSLContext

import aiohttp
from yarl import URL

from extproc.commands.checks import Check, tried
from extproc.commands.gatewayclient import Gateway
from extproc.commands.gatewayprobes import OPTIONAL, REQUIRED
from extproc.files.refusals import tls_failure

_FAILURES = (aiohttp.ClientError, OSError, ValueError)


async def check_gateway(
    url: str,
    admins: Sequence[str],
    *,
    model: str = "",
    headers: Mapping[str, str] | None = None,
    private: tuple[str, str] = ("", ""),
    ssl: SSLContext | bool = True,
    timeout_s: float = 60.0,
) -> list[Check]:
    """Try every requirement on the gateway at `url`, in the order of the documentation.

    Args:
        url: The gateway, e.g. `https://llm.example.com`.
        admins: The admin port of each router behind it, e.g. `http://127.0.0.1:9090`.
        model: To be asked for; "" for the first one that the gateway lists.
        headers: Sent with each request, e.g. `Host` or `Authorization`.
        private: A model that is private to a tenant, and that tenant; "" for none.
        ssl: For a gateway behind TLS.
        timeout_s: For each requirement.

    Returns:
        One check per requirement. Where the first one fails, the rest is left out.
    """
    connector = aiohttp.TCPConnector(ssl=ssl, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        places = [URL(each) for each in admins]
        gateway = Gateway(http, URL(url), places, model, headers or {}, private)
        checks = list[Check]()
        for probes, is_required in ((REQUIRED, True), (OPTIONAL, False)):
            for requirement, probe in probes.items():
                if is_required and checks and not checks[0].passed:
                    continue
                evidence = await tried(
                    probe(gateway),
                    timeout_s=timeout_s,
                    failures=_FAILURES,
                    describe=partial(_describe, timeout_s=timeout_s),
                )
                checks.append(Check(requirement, *evidence, is_required))
        return checks


def _describe(error: Exception, timeout_s: float) -> str:
    """As `podhttp.describe`, with the address: there are several."""
    if isinstance(error, TimeoutError):
        return f"no end within {timeout_s:g} s"
    return tls_failure(error, trust="--ca-file") or str(error) or type(error).__name__
