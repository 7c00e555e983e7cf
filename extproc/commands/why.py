"""The command `extproc why`."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.commands.failure import failure, http_url

if TYPE_CHECKING:
    import aiohttp

    from extproc.observe.why import Facts

_ALL_KEPT = 999_999
_CHANGED = "extproc_config_applied_timestamp_seconds"


def why(
    model: Annotated[str, typer.Argument(help="A model's or an adapter's name.")],
    since: Annotated[
        str,
        typer.Option(
            help="Compare with before this time of the last 24 hours, as 02:40 or "
            "02:40:30. Without it, with the older half of what the router keeps."
        ),
    ] = "",
    admin: Annotated[
        str, typer.Option(callback=http_url, help="URL of the router's admin port.")
    ] = "http://127.0.0.1:9090",
) -> None:
    """Say why a model's first tokens come late: what has changed, and the cause in a sentence."""
    import asyncio

    import aiohttp

    from extproc.observe.why import answer

    since_s = latest(since).timestamp() if since else None
    try:
        facts = asyncio.run(_facts(admin.rstrip("/")))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise failure(f"{admin}: {str(error) or type(error).__name__}") from error
    for line in answer(facts, model, since_s, _clock):
        typer.echo("".join(each if each.isprintable() else "?" for each in line))


def latest(text: str) -> datetime:
    """Return the last time that a clock here showed this time of day."""
    for form in ("%H:%M", "%H:%M:%S"):
        with suppress(ValueError):
            now, shown = datetime.now().astimezone(), datetime.strptime(text, form)
            at = datetime.combine(now, shown.time(), now.tzinfo)
            return at if at <= now else at - timedelta(days=1)
    raise failure(f"--since {text}: must be a time of day, as 02:40 or 02:40:30")


def _clock(wall_s: float) -> str:
    return f"{datetime.fromtimestamp(wall_s).astimezone():%H:%M:%S}"


async def _facts(admin: str) -> Facts:
    """Return what the router tells of itself.

    Raises:
        aiohttp.ClientError: It tells nothing, or something else.
    """
    import aiohttp
    from prometheus_client.parser import text_string_to_metric_families

    from extproc.files.tls import client_context
    from extproc.observe.why import Facts

    connector = aiohttp.TCPConnector(ssl=client_context(None))
    async with aiohttp.ClientSession(connector=connector, raise_for_status=True) as http:
        decisions, snapshot = [
            json.loads(await _got(http, f"{admin}/debug/{path}"))
            for path in (f"decisions?n={_ALL_KEPT}", "snapshot")
        ]
        async with http.get(f"{admin}/healthz", raise_for_status=False) as answer:
            health = json.loads(await answer.text())  # also with 503
        page = await _got(http, f"{admin}/metrics")
    samples = [
        sample for family in text_string_to_metric_families(page) for sample in family.samples
    ]
    slow = {
        sample.labels["endpoint"]
        for sample in samples
        if sample.name == "extproc_endpoint_slow" and sample.value
    }
    changed = (each.value for each in samples if each.name == _CHANGED)
    kept = [
        (datetime.fromisoformat(each["time"]).timestamp(), each) for each in decisions["decisions"]
    ]
    warnings = [*health["reasons"], *health["warnings"]]
    return Facts(kept, snapshot["endpoints"], warnings, frozenset(slow), next(changed, 0.0))


async def _got(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(url) as answer:
        return await answer.text()
