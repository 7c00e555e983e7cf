"""Fleets that are drawn at random: all that a choice may go by differs, and few are alike."""

from __future__ import annotations

import random
from collections.abc import Container, Mapping, Sequence
from math import inf
from typing import Any

from extproc.costs import Costs
from extproc.pods.columns import Columns, Resident
from extproc.routing.picker import Picker
from extproc.types import EndpointView, Pick, Rejection, RequestInfo, Snapshot, Wait
from tests.builders import BASE, endpoint_view
from tests.strategies import ADAPTERS


def fleet(rng: random.Random) -> tuple[EndpointView, ...]:
    """Up to nine endpoints, sorted; in most cases without any flaw."""
    is_flawed, every = rng.random() < 0.3, frozenset((BASE, *ADAPTERS))
    return tuple([view(rng, n, every, is_flawed) for n in range(1, rng.randint(1, 9) + 1)])


def view(rng: random.Random, number: int, every: frozenset[str], is_flawed: bool) -> EndpointView:
    """One of its endpoints; flawed ones are not always."""
    flaws = ("is_silent", "is_unreachable", "is_ejected", "is_gone", "is_full")
    pending = {each: rng.randint(1, 20) for each in ADAPTERS if rng.random() < 0.3}
    cached = rng.sample(ADAPTERS, rng.randint(0, len(ADAPTERS)))
    return endpoint_view(
        number,
        **{flaw: is_flawed and rng.random() < 0.2 for flaw in flaws},
        is_ready=not is_flawed or rng.random() < 0.8,
        registered=every - {"a"} if rng.random() < 0.1 else every,
        has_room=rng.random() < 0.9,
        pending_by_adapter=pending,
        num_pending=sum(pending.values()) + rng.choice((0, 0, 1, 5)),
        gpu_adapters=tuple(cached[: rng.randint(0, 2)]),
        cpu_adapters=tuple(cached),
        max_loras=rng.choice((None, 1, 2, 2, 3, 8)),
        prompts_done_s=rng.choice((-inf, -inf, 99.0, 100.01, 100.1, 100.2, 101.0)),
        costs=rng.choice((Costs(), Costs(), Costs(2e-5, 0.3, 0.02), Costs(3e-6, 0.01, 0.002))),
    )


class _Source:
    """An endpoint of which all is known by a view."""

    def __init__(self, view: EndpointView) -> None:
        self.view = view

    def arrange(self) -> Resident:
        """Return what is resident there."""
        view = self.view
        return view.gpu_adapters, view.cpu_adapters, view.num_adapter_loads

    @property
    def adapters(self) -> _Source:
        """It, which knows them."""
        return self

    def fields(self) -> Mapping[str, Any]:
        """Return nothing: what the view has of it is taken with the facts."""
        return {}


class Shown:
    """Columns that say what some views say."""

    def __init__(self, views: Sequence[EndpointView]) -> None:
        self._sources = [_Source(view) for view in views]
        self.columns = Columns([view.address for view in views], self._sources)
        for row, view in enumerate(views):
            self.set(row, view)

    def set(self, row: int, view: EndpointView) -> None:
        """Replace a view."""
        self._sources[row].view = view
        is_open = view.is_ready and not (view.is_full or view.has_flaw)
        pending = view.pending_by_adapter
        self.columns.set(row, view, pending, is_open=is_open)
        columns = self.columns
        columns.num_pending[row], columns.done_s[row] = view.num_pending, view.prompts_done_s
        columns.has_room[row] = view.has_room
        columns.outdated.add(row)

    def move(self, row: int, view: EndpointView) -> None:
        """Have other adapters be resident at a row than were at the last look."""
        self._sources[row].view = view
        self.columns.moved.add(row)


def columns_of(views: Sequence[EndpointView]) -> Columns:
    """Return columns that say what some views say."""
    return Shown(views).columns


def pick_of(
    picker: Picker, found: Snapshot, asked: RequestInfo, kept: Container[str] = (), **fields: Any
) -> Pick | Rejection | Wait:
    """Return what a picker chooses of a snapshot."""
    columns, num_routers = columns_of(found.endpoints), found.num_routers
    return picker.pick(columns, asked, kept, now=found.now, num_routers=num_routers, **fields)
