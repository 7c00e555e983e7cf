"""When a router that has just started is ready: it knows its endpoints and has asked each."""

from __future__ import annotations

from collections.abc import Iterable

from extproc.types import Endpoint


class Readiness:
    """The router's readiness after its start.

    It is ready when each endpoint that was up in the first list, and still is, has been asked for
    its models, and one has listed them. If all fail, the cause may as well be on our side (a busy
    start, a network that comes up), so they are asked again. It is ready in any case after
    `limit_s`, and at once where no endpoint is up. Endpoints that join later are not waited for.
    Once ready, it stays ready.

    Args:
        limit_s: Seconds after the first list of endpoints.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s: float | None = None
        self._unasked: set[str] = set()
        self._has_models = False

    def set_endpoints(self, endpoints: Iterable[Endpoint], *, now: float) -> None:
        """Record a list from discovery.

        The first sets the endpoints to wait for; later ones can only remove some.
        """
        up = {endpoint.address for endpoint in endpoints if endpoint.is_ready}
        if self._until_s is None:
            self._until_s = now + self._limit_s
            self._unasked = up
        self._unasked &= up
        self._has_models = self._has_models or not up

    def record_asked(self, address: str, *, has_listed: bool) -> None:
        """Record that an endpoint was asked for its models, and whether it listed them."""
        self._unasked.discard(address)
        self._has_models = self._has_models or has_listed

    def problems(self, *, now: float) -> list[str]:
        """Return why it is not ready, for people; empty when it is."""
        if self._until_s is None:
            return ["discovery has not synced"]
        if now >= self._until_s:
            return []
        if self._unasked:
            return [f"pods not asked yet: {len(self._unasked)}"]
        return [] if self._has_models else ["no pod has answered yet"]
