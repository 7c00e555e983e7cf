"""A service as the wire sees it: its methods, a session for each call, and the call's way back.

The contract is `extproc.shell.rpc`; here is as much of it as the wire relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol


class CallLike(Protocol):
    """The way back for one call."""

    def send(self, message: bytes) -> None:
        """Queue one message. Ignored after `end` and after the peer has left."""

    def end(self, code: int = 0, details: str = "") -> None:
        """End the call, after all queued messages. Later calls are ignored."""

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        """Say what the service now keeps of this call's messages."""


class SessionLike(Protocol):
    """A service's side of one call."""

    def receive(self, message: bytes) -> None:
        """Take one message from the peer."""

    def half_close(self) -> None:
        """The peer will send nothing more."""

    def closed(self) -> None:
        """The call is over, whoever ended it. Called exactly once, last."""

    # And `give_up()` where it can answer better than RESOURCE_EXHAUSTED that memory is short.


class MethodLike(Protocol):
    """One method that a service offers."""

    @property
    def path(self) -> str:
        """`/package.Service/Method`."""

    @property
    def open(self) -> Callable[[CallLike, Mapping[str, str]], SessionLike]:
        """Begins a call."""

    @property
    def is_long_lived(self) -> bool:
        """Ends with UNAVAILABLE at drain."""


class _NoSession:
    """Stands where no session is: before the method has answered, and when it failed to."""

    def receive(self, message: bytes) -> None: ...

    def half_close(self) -> None: ...

    def closed(self) -> None: ...


NO_SESSION: Final = _NoSession()
