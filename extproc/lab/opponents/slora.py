"""S-LoRA's orders of admission, moved from its engine to the router's queue.

Source: S-LoRA (MLSys 2024) section 5.2 and Appendix B; its code, `slora/server/router/`
`req_queue.py` (first come first served), `abort_req_queue.py` (early abort).

There the queue is in the engine. A vLLM engine serves its queue in order of arrival. So the router
holds requests, and an endpoint gets one at a time, once it has room: no request waits there, and
fewer than `max_running` run. For S-LoRA room is KV for the whole response, whose length it knows; a
policy does not, so it has a limit instead. The router's queue decides which request is next, in the
order that the policy sets.

Early abort differs from the code, which compares arrivals with admissions and then turns from the
oldest to the newest: see `extproc.queue.tenantorder.newest_in_time`.
"""

from __future__ import annotations

import random
from math import inf

from extproc.lab.opponents.recent import SinceReport
from extproc.lab.opponents.ties import least
from extproc.queue import QueueSettings
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait


class SloraRoom:
    """The endpoint with the fewest requests, of those that have room in S-LoRA's sense.

    Args:
        order: Of the queue, `first_come` or `in_time`.
        max_running: Unfinished requests at one endpoint; 0 for no limit but its own.

    Attributes:
        queue: Has no turns and no ageing, as S-LoRA's.
        aborts: Requests that would be late are refused.
    """

    def __init__(self, order: str = "first_come", max_running: int = 0) -> None:
        self.queue = QueueSettings(order, fair=False, ageing_s=inf)
        self.aborts = order == "in_time"
        self._max_running = max_running
        self._sent = SinceReport()

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose an endpoint with room, or wait for a report or an end of a request."""
        views = [view for view in snapshot.endpoints if self._has_room(view)]
        if not views:
            return Wait(inf, "room")
        view = least(views, lambda view: view.num_pending, rng)
        self._sent.record(view.address, 1, now=snapshot.now)
        return Choice((view,), self.queue.order)

    def _has_room(self, view: EndpointView) -> bool:
        if self._max_running and view.num_pending >= self._max_running:
            return False
        return view.num_waiting + self._sent.amount(view) < 1
