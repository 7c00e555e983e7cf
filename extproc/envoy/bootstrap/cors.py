"""Answers to browsers: which web pages may use the API (CORS).

Envoy answers preflights itself, before the router is asked, and adds the headers to the responses
of pods and of the router and to its own errors, wherever a route leads to pods. Its filter skips
routes that have a direct response, so preflights have one that leads to no endpoint.
"""

from __future__ import annotations

import re
from typing import Any

from extproc.envoy.bootstrap.sockets import TYPE_PREFIX

FILTER = "envoy.filters.http.cors"
ANY = "*"
MAX_AGE_S = 7200
"""For which a browser keeps the answer to a preflight; Chromium keeps none longer."""
_PREFLIGHT = ("origin", "access-control-request-method")
_NOWHERE = "nowhere"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._:\[\]-]+")


def route() -> dict[str, Any]:
    """Return the route of preflights, to come before all others.

    Those of other origins are not answered by the filter: the router refuses them.
    """
    asked = [{"name": name, "present_match": True} for name in _PREFLIGHT]
    method = {"name": ":method", "string_match": {"exact": "OPTIONS"}}
    return {"match": {"prefix": "/", "headers": [method, *asked]}, "route": {"cluster": _NOWHERE}}


def cluster() -> dict[str, Any]:
    """Return the cluster of that route, which has no endpoint."""
    return {"name": _NOWHERE, "type": "STATIC", "load_assignment": {"cluster_name": _NOWHERE}}


def http_filter() -> dict[str, Any]:
    """Return the filter, to come before all others."""
    typed = {"@type": TYPE_PREFIX + "extensions.filters.http.cors.v3.Cors"}
    return {"name": FILTER, "typed_config": typed}


def policy(origins: tuple[str, ...]) -> dict[str, Any]:
    """Return the policy of a virtual host.

    Without credentials: clients send keys in headers, never cookies.

    Raises:
        ValueError: An origin is none.
    """
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"not an origin: {origin!r}; allowed: scheme and host, as a browser sends it "
                f"(`https://chat.example.com`, without a path), or `{ANY}`"
            )
    return {
        "@type": TYPE_PREFIX + "extensions.filters.http.cors.v3.CorsPolicy",
        "allow_origin_string_match": [{"exact": origin} for origin in origins],
        "allow_methods": "GET, HEAD, POST, DELETE",
        # `*` means all but `authorization`. OpenAI's client adds a dozen headers of its own.
        "allow_headers": "authorization, *",
        "expose_headers": "x-request-id, retry-after, x-llm-d-request-dropped-reason",
        "max_age": str(MAX_AGE_S),
    }
