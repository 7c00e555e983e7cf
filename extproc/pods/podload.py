"""The work of one endpoint: the requests of all routers there that have not ended, and the room
that is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from extproc.learned.concurrency import EndpointRoom, Fullness
from extproc.learned.expected import Expected
from extproc.learned.prefixes import KvCache
from extproc.learned.prompts import MAX_AGE_S, Prompts
from extproc.pods.columns import Resident
from extproc.pods.foreign import ForeignRequests
from extproc.pods.podrow import PodRow
from extproc.pods.residency import NO_ADAPTER, OTHER_ADAPTERS, Residency
from extproc.pods.serverflags import ServerFlags
from extproc.tenancy import SlotUse


class PodLoad:
    """The load of one endpoint. A caller that changes it writes the row with `settle`, once for all
    that it changes at a time.

    Args:
        due: Called with the address once so much was sent there that its next report is due.

    Attributes:
        foreign: The requests of other routers.
        residency: It counts the unfinished requests of routers by adapter.
        seen: The resident adapters as of the last look.
        slots: The use of those that routers know to run there, as long as they have requests.
        num_sequences: Of our requests (`RequestInfo.num_sequences`).
        num_picks: Of all routers, that were ever counted here.
        prompts: That are to be computed.
        max_in_flight: Its configured limit.
        response_s: Mean time that our requests took of late that it has served; None without one.
    """

    def __init__(
        self,
        address: str,
        flags: ServerFlags,
        row: PodRow,
        expected: Expected,
        due: Callable[[str], None],
    ) -> None:
        self.address, self.row, self._expected, self._due = address, row, expected, due
        self.max_in_flight = flags.max_in_flight
        self.foreign = ForeignRequests()
        self.residency = Residency(max_loras=flags.max_loras, max_cpu_loras=flags.max_cpu_loras)
        self.seen: Resident = ((), (), 0)
        self.slots: dict[str, SlotUse] = {}
        self.num_sequences = self.num_picks = 0
        self.prompts = Prompts(flags.costs)
        self.kv_cache = KvCache(address)
        self.fullness, self.room = Fullness(), EndpointRoom()
        self.response_s: float | None = None

    def picked(
        self,
        pick_id: str | int,
        adapter: str | None,
        num_bytes: int,
        priority: int,
        flow: str,
        num: int,
        num_sequences: int,
        num_prompts: int,
        at_s: float,
        now: float,
    ) -> None:
        """Count requests that were picked at `at_s`, and for whom; and as so many prompts of
        `num_bytes` each, and an adapter's load, that are to be computed here.

        Residency is as of the last look: to know it as of now would sort all adapters for each pick
        of another router.
        """
        if now - at_s <= MAX_AGE_S:  # an older one has been sent before, over another link
            self.kv_cache.picked(num_prompts * num_bytes)
            prompts, load_s = self.prompts, 0.0
            if adapter is not None and adapter not in self.residency.in_flight:
                load_s = prompts.costs.load_s(adapter, self.seen[0], self.seen[1])
            prompts.picked(pick_id, num_bytes, num_prompts, load_s, at_s, now)
        self.num_picks += num
        has_many = self.room.picked(num_sequences, at_s)
        if adapter is not None:
            self.use(adapter, priority, flow, num, at_s)
        expected, num_known = self._expected, self.num_sequences + self.foreign.num_from_peers
        if (has_many or num_known > expected.most) and expected.becomes_due():
            self._due(self.address)

    def use(self, adapter: str, priority: int, flow: str, num: int, now: float) -> None:
        """Count requests for an adapter, and whose they are. It is in the columns at once, like
        their end."""
        residency, row, slots = self.residency, self.row, self.slots
        before = slots.get(adapter)
        since_s = now if before is None else before.since_s
        slots[adapter] = SlotUse(since_s, now, priority, flow)
        change, columns = residency.picked(adapter, num), row.columns
        if columns is not None:
            columns.count(row.number, adapter, residency.in_flight[adapter])
            if change is not NO_ADAPTER:
                columns.moved.add(row.number)

    def leave(self, adapter: str, num: int, has_run: bool, now: float) -> bool:
        """Stop counting requests for an adapter, and return whether none are left; `has_run` is
        False if the engine cannot have worked on them."""
        residency, row = self.residency, self.row
        change, columns = residency.ended(adapter, num, has_run, now), row.columns
        num_left = residency.in_flight.get(adapter, 0)
        if not num_left:
            self.slots.pop(adapter, None)
        if columns is not None:
            num_there = num_left
            if not num_left and row.is_known:
                num_there = self.foreign.adapters.get(adapter, 0)
            columns.count(row.number, adapter, num_there)
            if change is not NO_ADAPTER:
                columns.moved.add(row.number)
                if change is OTHER_ADAPTERS:
                    columns.refresh(row.number)
        return not num_left

    def note(
        self, adapter: str | None, priority: int, flow: str, *, now: float, has_run: bool
    ) -> None:
        """Note a pick of another endpoint, which refused it: the engine here has worked on it."""
        if adapter is not None:
            self.use(adapter, priority, flow, 1, now)
            self.leave(adapter, 1, has_run, now)
        self.settle()

    def arrange(self) -> Resident:
        """Return which adapters are resident now, and how many have come into a GPU slot."""
        gpu_adapters, cpu_adapters = self.residency.arranged
        gpu_before, cpu_before, num_loads = self.seen
        if gpu_adapters is not gpu_before or cpu_adapters is not cpu_before:
            num_loads += len(set(gpu_adapters).difference(gpu_before))
            self.seen = gpu_adapters, cpu_adapters, num_loads
        return self.seen

    def settle(self) -> None:
        """Write into the row what requests have changed."""
        row, foreign = self.row, self.foreign
        columns, number, is_known = row.columns, row.number, row.is_known
        if columns is None:
            row.touch()
            return
        num_there = num_pending = self.num_sequences + foreign.num_from_peers
        if is_known and foreign.num_foreign:
            num_there += foreign.num_foreign
            num_pending += foreign.num_steady
        if number not in columns.before:
            columns.keep(number)
        columns.done_s[number] = self.prompts.done_s
        columns.num_pending[number] = num_pending + row.trouble.num_failed
        columns.has_room[number] = self.room.is_open(num_there, self.max_in_flight, is_known)
        columns.outdated.add(number)

    def forget_memory(self) -> None:
        """Forget what the process had in its memory: it is gone."""
        self.residency.forget()
        self.kv_cache.lose()
        self.kv_cache = KvCache(self.address)

    def restarted(self) -> None:
        """Forget the state of the process before the restart."""
        self.forget_memory()
        self.prompts.restarted()
        self.foreign.restarted()
        self.fullness, self.room = Fullness(), EndpointRoom()

    def fields(self) -> Mapping[str, Any]:
        """Return what a view has of the load beside what columns have."""
        foreign, is_known, trouble = self.foreign, self.row.is_known, self.row.trouble
        # Told, and to be shown beside ours by the last report, which does not.
        num_unseen = max(0, foreign.num_before - foreign.num_reported) if is_known else 0
        return {
            "num_in_flight": self.num_sequences,
            "num_told": foreign.num_from_peers,
            "num_unseen": trouble.num_failed + num_unseen,
            "num_foreign": foreign.num_foreign - foreign.num_steady if is_known else 0,
            "is_ejected": trouble.is_ejected,
            "is_gone": trouble.is_gone,
            "is_suspect": trouble.is_suspect,
            "is_full": self.is_full,
            "response_s": self.response_s,
        }

    @property
    def num_known(self) -> int:
        """Sequences here of requests that routers know of, and that have not ended."""
        return self.num_sequences + self.foreign.num_from_peers

    @property
    def num_there(self) -> int:
        """The sequences there, as far as is known."""
        return self.num_known + (self.foreign.num_foreign if self.row.is_known else 0)

    @property
    def is_full(self) -> bool:
        """Whether it refused requests beside as many."""
        return self.fullness.is_full(self.num_there)

    def places(self) -> tuple[float, int]:
        """Return for how many sequences it has room, and how many are there: see `EndpointRoom`."""
        return self.room.places(self.num_there, self.max_in_flight, is_known=self.row.is_known)
