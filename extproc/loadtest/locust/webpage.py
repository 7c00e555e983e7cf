"""Our page of locust's web UI: `/extproc`, and `/extproc/data` with the figures on it.

The page is one file without external resources. The router's admin port is queried from here,
because browsers refuse requests to another origin.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from flask import Response, request

from extproc.loadtest.listing import ListingError, base_url, fetch_json
from extproc.loadtest.locust.plan import options_of
from extproc.loadtest.locust.threads import InThread

if TYPE_CHECKING:
    from locust.env import Environment

ROUTER_TIMEOUT_S = 1.0
ROUTER_AGE_S = 0.5
"""Longest age of what the page shows of the router, however many pages are open."""
_LINK = (
    '<a href="extproc" style="position:fixed;right:1rem;bottom:3.5rem;z-index:9999;'
    "padding:.5rem 1rem;"
    "border-radius:2rem;background:#15803d;color:#fff;font:600 14px system-ui,sans-serif;"
    'text-decoration:none;box-shadow:0 2px 8px #0006">Tokens and adapters</a>'
)


def add_page(
    web_ui: Any,
    environment: Environment,
    describe: Callable[[], dict[str, Any]],
    clock: Callable[[], float],
) -> None:
    """Add the page, and a link to it on locust's own.

    Args:
        web_ui: Locust's `WebUI`, not started yet.
        environment: Locust's.
        describe: The test as it is now, as plain values.
        clock: Monotonic seconds.
    """
    base = (options_of(environment).web_base_path or "").rstrip("/")
    html = files("extproc.loadtest.locust").joinpath("page.html").read_text(encoding="utf-8")
    router = _Router(environment, clock)

    def page() -> Response:
        return Response(html, mimetype="text/html")

    def data() -> Response:
        content = msgspec.json.encode({**describe(), "router": router.describe()})
        return Response(content, mimetype="application/json", headers={"cache-control": "no-store"})

    def add_link(response: Response) -> Response:
        if request.path == f"{base}/" and response.mimetype == "text/html":
            response.set_data(response.get_data(as_text=True).replace("</body>", f"{_LINK}</body>"))
        return response

    app, guarded = web_ui.app, web_ui.auth_required_if_enabled
    app.add_url_rule(f"{base}/extproc", "extproc", guarded(page))
    app.add_url_rule(f"{base}/extproc/data", "extproc_data", guarded(data))
    app.after_request(add_link)


class _Router:
    """The endpoints as the router's admin port shows them, queried at most every `ROUTER_AGE_S`."""

    def __init__(self, environment: Environment, clock: Callable[[], float]) -> None:
        self._environment = environment
        self._clock = clock
        self._shown: dict[str, Any] = {}
        self._shown_s = -ROUTER_AGE_S
        self._url = ""

    def describe(self) -> dict[str, Any] | None:
        """Return `{"endpoints": [...]}` as in `/debug/snapshot`, or `{"problem": why not}`.

        None if no admin port was given.
        """
        url = str(options_of(self._environment).router_admin).rstrip("/")
        if not url:
            return None
        now = self._clock()
        if url != self._url or now - self._shown_s >= ROUTER_AGE_S:
            self._shown = _query(url)
            self._url, self._shown_s = url, now
        return self._shown


class _Snapshot(msgspec.Struct):
    endpoints: list[Any]


def _query(url: str) -> dict[str, Any]:
    try:
        url = f"{base_url(url)}/debug/snapshot"
        fetched = InThread(lambda: fetch_json(url, _Snapshot, {}, ROUTER_TIMEOUT_S))
        return {"endpoints": fetched.wait().endpoints}
    except ListingError as error:
        return {"problem": f"--router-admin: {error}"}
