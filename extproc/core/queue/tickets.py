"""A held request's place in the queue."""

from __future__ import annotations

from math import inf

from msgspec import Struct

from extproc.core.types import RequestInfo


class Ticket(Struct, eq=False):
    """One held request.

    Attributes:
        give_up_s: It is held no longer than until this time.
        deadline_s: Of its first token: its arrival and its objective. inf for none.
    """

    request: RequestInfo
    give_up_s: float = inf
    deadline_s: float = inf
