"""When a service that has just started can answer: it knows its endpoints and has asked each."""

from __future__ import annotations

from collections.abc import Iterable

from extproc.core.types import Endpoint


class FirstLook:
    """The first look at the endpoints that were known first.

    It is over when each of them has told its models or failed to, and one has told them. Where all
    are silent, it is as likely that we are (a busy start, a network that comes up), so they are
    asked again. It is over in any case when `limit_s` have passed, and at once where no endpoint is
    up. Endpoints that come later, or are not up, are not waited for. Once over, it stays so.

    Args:
        limit_s: Seconds after the first list of endpoints.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s: float | None = None
        self._unasked: set[str] = set()
        self._has_heard = False

    def set_endpoints(self, endpoints: Iterable[Endpoint], *, now: float) -> None:
        """Take a list from discovery. The first one begins the look, later ones only shorten it."""
        up = {endpoint.address for endpoint in endpoints if endpoint.is_ready}
        if self._until_s is None:
            self._until_s = now + self._limit_s
            self._unasked = up
        self._unasked &= up
        self._has_heard = self._has_heard or not up

    def asked(self, address: str, *, has_told: bool) -> None:
        """An endpoint was asked for its models, and told them or did not."""
        self._unasked.discard(address)
        self._has_heard = self._has_heard or has_told

    def why_not_over(self, *, now: float) -> list[str]:
        """Reasons, for people; none when it is over."""
        if self._until_s is None:
            return ["discovery has not synced"]
        if now >= self._until_s:
            return []
        if self._unasked:
            return [f"endpoints not asked yet: {len(self._unasked)}"]
        return [] if self._has_heard else ["no endpoint has answered yet"]
