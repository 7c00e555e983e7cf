"""The queue of requests that are held: who is next, and who is refused."""

from __future__ import annotations

from extproc.core.queue.elsewhere import Waiting
from extproc.core.queue.endings import End
from extproc.core.queue.queue import HoldQueue
from extproc.core.queue.settings import QueueSettings
from extproc.core.queue.tickets import Ticket

__all__ = ["End", "HoldQueue", "QueueSettings", "Ticket", "Waiting"]
