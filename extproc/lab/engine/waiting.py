"""The queue of one engine, in front of its gate of adapter slots.

The queue is kept by adapter, so that finding the first request that may run takes time proportional
to the running adapters, however many requests wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from heapq import heappop, heappush

from extproc.lab.engine.sequences import Sequence


class WaitingQueue:
    """Sequences in order: `size` of them, of whom `num_deferred` were skipped since they came."""

    def __init__(self) -> None:
        self.num_deferred = 0
        self._queues: dict[str | None, deque[Sequence]] = {}
        self.size = 0
        self._first = 0
        self._last = 0
        # Both may hold sequences that have left (`_is_here` says so): the order over all adapters,
        # and those not yet marked as deferred, in order.
        self._heap: list[tuple[int, Sequence]] = []
        self._unmarked: deque[tuple[int, Sequence]] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        every = [sequence for queue in self._queues.values() for sequence in queue]
        return iter(sorted(every, key=lambda sequence: sequence.order))

    def append(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._last += 1
        sequence.order = self._last
        self._queues.setdefault(sequence.request.adapter, deque()).append(sequence)
        self._unmarked.append((sequence.order, sequence))
        self._enter(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence at the head."""
        self._first -= 1
        sequence.order = self._first
        self._queues.setdefault(sequence.request.adapter, deque()).appendleft(sequence)
        self._unmarked.appendleft((sequence.order, sequence))
        self._enter(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence` from anywhere."""
        adapter = sequence.request.adapter
        queue = self._queues[adapter]
        queue.remove(sequence)
        if not queue:
            del self._queues[adapter]
        self.size -= 1
        self.num_deferred -= sequence.deferred_s is not None
        sequence.order = 0
        if not self.size:
            self._heap.clear()
            self._unmarked.clear()

    def first(self, passing: Collection[str] | None) -> Sequence | None:
        """Return the first sequence that may run.

        Args:
            passing: Adapters that pass the gate like the base model; None for every one.
        """
        if passing is None:
            while self._heap and not _is_here(*self._heap[0]):
                heappop(self._heap)
            return self._heap[0][1] if self._heap else None
        found = self._queues.get(None)
        best = found[0] if found else None
        for adapter in passing:
            queue = self._queues.get(adapter)
            if queue and (best is None or queue[0].order < best.order):
                best = queue[0]
        return best

    def defer_all(self, *, now: float) -> None:
        """Mark everything as skipped at `now`."""
        self.defer(self._last + 1, now=now)

    def defer(self, before: int, *, now: float) -> None:
        """Mark as skipped at `now` what stands before place `before`."""
        unmarked = self._unmarked
        while unmarked and unmarked[0][0] < before:
            order, sequence = unmarked.popleft()
            if _is_here(order, sequence):
                sequence.deferred_s = now
                self.num_deferred += 1

    def _enter(self, sequence: Sequence) -> None:
        sequence.deferred_s = None
        self.size += 1
        heappush(self._heap, (sequence.order, sequence))


def _is_here(order: int, sequence: Sequence) -> bool:
    return not sequence.is_running and sequence.order == order
