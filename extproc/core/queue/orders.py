"""Orders (placeholder until the branch with the orders comes)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from extproc.core.queue.tickets import Ticket


class Scene(Struct, frozen=True):
    now: float
    service_s: float = 0.0
    running: frozenset[str] = frozenset()


def first_come(tickets: Sequence[Ticket], _scene: Scene) -> list[Ticket]:
    return sorted(tickets, key=lambda each: each.request.arrived_at_s)


def timely(tickets: Sequence[Ticket], scene: Scene) -> list[Ticket]:
    now = scene.now
    good = [t for t in tickets if now <= t.late_s]
    late = [t for t in tickets if now > t.late_s]
    return good + late[::-1]


ORDERS: dict[str, Callable[[Sequence[Ticket], Scene], list[Ticket]]] = {
    "first_come": first_come,
    "timely": timely,
}
