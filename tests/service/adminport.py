"""An admin port of which a test says what matters to it."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from extproc.observe.admin import AdminServer
from extproc.types import Snapshot


def admin_server(host: str = "127.0.0.1", **fields: Any) -> AdminServer:
    """On a free port, with nothing to show but what `fields` say."""
    defaults: dict[str, Any] = {
        "registry": CollectorRegistry(),
        "snapshot": lambda: Snapshot(()),
        "queue": dict,
        "decisions": lambda limit: [],
        "health": tuple,
        "add_page": lambda app: None,
    }
    return AdminServer(host, 0, **defaults | fields)
