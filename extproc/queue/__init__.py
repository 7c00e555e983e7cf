"""Who waits, in which order, until when? The one queue of the requests that a policy holds.

Begin with `queue`; `plan` is the order, `sweep` the way through it. `routing` and those who show
what is held import it.
"""

from __future__ import annotations

from extproc.queue.elsewhere import Waiting
from extproc.queue.precedence import Reach
from extproc.queue.queue import HoldQueue
from extproc.queue.tickets import End, QueueSettings, Ticket

__all__ = ["End", "HoldQueue", "QueueSettings", "Reach", "Ticket", "Waiting"]
