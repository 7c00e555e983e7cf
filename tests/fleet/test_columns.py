"""Columns say what the views say, however these are replaced."""

from __future__ import annotations

import random
from collections.abc import Sequence

from extproc.fleet.columns import MAX_MODELS, Columns
from extproc.types import EndpointView
from tests.builders import BASE, endpoint_view
from tests.fleets import fleet, view
from tests.strategies import ADAPTERS

NUM_FLEETS, NUM_CHANGES = 100, 12
MODELS = (BASE, *ADAPTERS, "unlisted")


def shown(columns: Columns) -> dict[str, object]:
    """All that a decision may read."""
    names = (*MODELS, "resident")
    return {
        "views": columns.views,
        "addresses": columns.addresses,
        "num_pending": columns.num_pending,
        "done_s": columns.done_s,
        "has_room": columns.has_room,
        "s_per_byte": columns.s_per_byte,
        "slots": (columns.num_slots, columns.num_used, columns.all_slots, columns.all_free),
        "least": (columns.least_s_per_byte, columns.least_cold_load_s),
        "open": {name: list(columns.open_rows(name)) for name in names},
        "running": {name: dict(columns.running(name)) for name in names},
        "holders": {name: set(columns.holders(name)) for name in names},
        "kept": (set(columns._running), set(columns._holders)),
    }


def said(views: Sequence[EndpointView]) -> dict[str, object]:
    """The same, view by each."""
    names = (*MODELS, "resident")
    slots = [each.max_loras or 0 for each in views]
    used = [each.num_active_adapters for each in views]
    free = [max(0, num - num_used) for num, num_used in zip(slots, used, strict=True)]
    flawless = [
        each.is_ready and not (each.is_lost or each.is_silent or each.is_gone) and not each.is_full
        for each in views
    ]
    rows = range(len(views))
    return {
        "views": list(views),
        "addresses": tuple(each.address for each in views),
        "num_pending": [each.num_pending for each in views],
        "done_s": [each.prompts_done_s for each in views],
        "has_room": [each.has_room for each in views],
        "s_per_byte": [each.costs.prompt_s_per_byte for each in views],
        "slots": (slots, used, sum(slots), sum(free)),
        "least": (
            min(each.costs.prompt_s_per_byte for each in views),
            min(each.costs.cold_load_s for each in views),
        ),
        "open": {n: [r for r in rows if flawless[r] and views[r].has_registered(n)] for n in names},
        "running": {
            n: {r: views[r].pending(n) for r in rows if views[r].pending(n)} for n in names
        },
        "holders": {n: {r for r in rows if views[r].has_loaded(n)} for n in names},
        "kept": (
            {name for each in views for name in each.pending_by_adapter},
            {n for n in names if any(each.has_loaded(n) for each in views)},
        ),
    }


def test_columns_say_what_their_views_say() -> None:
    """However these are replaced."""
    rng, every = random.Random(0), frozenset((BASE, *ADAPTERS))
    for _ in range(NUM_FLEETS):
        views = list(fleet(rng))
        columns = Columns(views)
        assert shown(columns) == said(views)
        for _ in range(NUM_CHANGES):
            row = rng.randrange(len(views))
            views[row] = view(rng, row + 1, every, is_flawed=rng.random() < 0.5)
            columns.set(row, views[row])
            assert shown(columns) == said(views)


def test_models_that_all_list_share_what_says_so() -> None:
    columns = Columns([endpoint_view(number) for number in (1, 2)])

    assert columns.open_rows("a") == columns.open_rows("b") == range(2)


def test_what_is_remembered_of_models_is_bounded() -> None:
    names = [f"m-{n}" for n in range(MAX_MODELS + 1)]
    columns = Columns([endpoint_view(1, registered=frozenset(names))])

    assert all(columns.open_rows(name) == range(1) for name in names)
    assert len(columns._listing) == 1
