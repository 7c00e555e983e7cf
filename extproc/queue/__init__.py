"""Who waits, in which order, until when? The one queue of the requests that a policy holds.

Begin with `queue`; `plan` is the order, `offers` the way through it. `routing` and those who show
what is held import it.
"""

from __future__ import annotations

from extproc.queue.destinations import Destinations
from extproc.queue.queue import HoldQueue
from extproc.queue.tickets import HoldEnd, QueueSettings, Ticket
from extproc.queue.waiting import Waiting

__all__ = ["Destinations", "HoldEnd", "HoldQueue", "QueueSettings", "Ticket", "Waiting"]
