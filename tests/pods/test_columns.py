"""Columns say what the views say, however these are replaced."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from extproc.learned.evidence import Evidence
from extproc.pods.columns import MAX_MODELS, Candidates, Columns
from extproc.pods.pool import Pool, PoolSettings
from extproc.types import EndpointView, Pick
from tests.builders import BASE, address, cards, endpoint_view, fill, report, request
from tests.fleets import Shown, columns_of, fleet, view
from tests.otherrouters import OtherRouter
from tests.strategies import ADAPTERS

NUM_FLEETS, NUM_CHANGES = 100, 12
NUM_STEPS = 60
MODELS = (BASE, *ADAPTERS, "unlisted")
WITHIN = frozenset({address(1), address(3)})


def shown(columns: Columns) -> dict[str, object]:
    """All that a decision may read."""
    names = (*MODELS, "resident")
    return {
        "views": list(columns.views),
        "addresses": columns.addresses,
        "num_pending": columns.num_pending,
        "done_s": columns.done_s,
        "has_room": columns.has_room,
        "s_per_byte": columns.s_per_byte,
        "slots": (columns.num_slots, columns.num_used, columns.all_slots, columns.all_free),
        "least": columns.least(),
        "open": {name: list(columns.open_rows(name)) for name in names},
        "within": {name: list(columns.rows_within(name, WITHIN)) for name in names},
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
        "within": {
            n: [
                r
                for r in rows
                if flawless[r] and views[r].has_registered(n) and views[r].address in WITHIN
            ]
            for n in names
        },
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
        fleet_shown = Shown(views)
        columns = fleet_shown.columns
        assert shown(columns) == said(views)
        for _ in range(NUM_CHANGES):
            row = rng.randrange(len(views))
            views[row] = view(rng, row + 1, every, is_flawed=rng.random() < 0.5)
            fleet_shown.set(row, views[row])
            assert shown(columns) == said(views)


class _Life:
    """A pool to which things happen at random: picks and their ends, of this router and of another,
    reports with others' requests, listings, refusals and calls that fail."""

    def __init__(self, seed: int) -> None:
        self._rng, self.now, self._num = random.Random(seed), 0.0, 0
        self._ours: list[str] = []
        settings = PoolSettings(max_loras=2, max_cpu_loras=3, report_expiry_s=2.0)
        self.pool = fill(Pool(settings), 1, 2, 3, adapters=ADAPTERS, load=report())
        self._other = OtherRouter(self.pool)

    def step(self) -> None:
        """Have something happen."""
        rng, self.now = self._rng, self.now + self._rng.choice((0.01, 0.01, 0.3))
        self._num += 1
        where = address(rng.choice((1, 2, 3)))
        happens = rng.choice((self._start, self._start, self._start, self._end, self._end))
        rng.choice((happens, happens, happens, self._tell, self._report, self._trouble))(where)

    def _start(self, where: str) -> None:
        info = request(self._rng.choice((None, *ADAPTERS)), body_bytes=500)
        picked = Pick(f"r-{self._num}", info, (where,), "p", "r")
        self.pool.flights.start(picked, now=self.now)
        self._ours.append(picked.id)

    def _end(self, _where: str) -> None:
        if self._ours:
            verdict = self._rng.choice((Evidence.SERVED, Evidence.UNREACHABLE, Evidence.NONE))
            ended = self._ours.pop(self._rng.randrange(len(self._ours)))
            ago_s, has_run = self._rng.choice((0.0, 0.0, 0.2)), self._rng.random() < 0.8
            flights = self.pool.flights
            flights.finish(
                ended,
                now=self.now - ago_s,
                reported_at_s=self.now,
                verdict=verdict,
                has_run=has_run,
            )

    def _tell(self, where: str) -> None:
        other, rng = self._other, self._rng
        other.is_lost = rng.random() < 0.2
        if other.flights and rng.random() < 0.5:
            other.end([*other.flights][-1], now=self.now, has_run=rng.random() < 0.8)
            return
        adapter = rng.choice((None, *ADAPTERS))
        other.start(str(self._num), rng.choice((1, 2, 3)), adapter, now=self.now, body_bytes=500)

    def _report(self, where: str) -> None:
        rng = self._rng
        active = rng.sample(ADAPTERS, rng.randint(0, 2))
        num, num_waiting = rng.choice((0, 0, 1, 4)), rng.choice((0, 0, 3))
        said = report(
            num_running=num,
            num_waiting=num_waiting,
            active_adapters=frozenset(active if num else ()),
        )
        self.pool.record_report(where, said, taken_at_s=self.now)

    def _trouble(self, where: str) -> None:
        pool, rng = self.pool, self._rng
        kind = rng.randrange(6)
        if kind == 0:
            pool.record_unreachable(where)
        elif kind == 1 and self._ours:
            pool.flights.refused(self._ours[-1], where, now=self.now)
        elif kind == 2:
            listed = cards(*rng.sample(ADAPTERS, rng.choice((1, len(ADAPTERS)))))
            pool.record_models(where, listed, now=self.now)
        elif kind == 3 and self._ours:
            pool.flights.move(self._ours[-1], where, now=self.now)
        elif kind == 4:
            pool.record_same_models(where, now=self.now, asked_at_s=self.now)
        else:
            if rng.random() < 0.5:
                self._other.leave(now=self.now)
            self._other.is_lost = False
            self._other.tell_whole(now=self.now)


@pytest.mark.parametrize("seed", range(40))
def test_the_columns_of_a_pool_say_what_its_views_say_whatever_happens(seed: int) -> None:
    """Only what has changed at an endpoint is looked at there."""
    life = _Life(seed)
    for _ in range(NUM_STEPS):
        for _ in range(random.Random(seed).choice((1, 2, 5))):
            life.step()
        columns = life.pool.columns(now=life.now)
        assert shown(columns) == said(columns.views)


@pytest.mark.parametrize("seed", range(40))
def test_columns_that_were_changed_in_place_are_those_that_are_made_anew(seed: int) -> None:
    """After some steps of each length, so that what is wrong is not mended by a later one."""
    life, rng = _Life(seed), random.Random(seed)
    for _ in range(NUM_STEPS // 2):
        for _ in range(rng.choice((1, 3, 9))):
            life.pool.columns(now=life.now)
            life.step()
        changed = shown(life.pool.columns(now=life.now))
        life.pool._views._columns = None

        assert changed == shown(life.pool.columns(now=life.now))


@pytest.mark.parametrize("seed", range(20))
def test_candidates_stay_as_they_were_whatever_comes_after(seed: int) -> None:
    """Also those of before: some are viewed at once, all again at the end."""
    life, rng = _Life(seed), random.Random(seed)
    kept: list[tuple[Candidates, list[tuple[EndpointView, dict[str, int]]]]] = []
    for _ in range(NUM_STEPS):
        columns = life.pool.columns(now=life.now)
        if rng.random() < 0.5:
            candidates = columns.candidates(range(len(columns.addresses)))
            seen = [candidates[row] for row in range(len(candidates))]
            kept.append((candidates, [(view, dict(view.pending_by_adapter)) for view in seen]))
        if rng.random() < 0.3:
            assert all(columns.views)
        life.step()

    for candidates, seen_then in kept:
        assert list(candidates) == [view for view, _ in seen_then]
        assert all(view.pending_by_adapter == pending for view, pending in seen_then)


def test_models_that_all_list_share_what_says_so() -> None:
    columns = columns_of([endpoint_view(number) for number in (1, 2)])

    assert columns.open_rows("a") == columns.open_rows("b") == range(2)


def test_rows_within_the_same_subset_are_found_once() -> None:
    columns = columns_of([endpoint_view(number, registered=frozenset("a")) for number in (1, 2)])
    one, two = frozenset({address(1)}), frozenset({address(1)})

    assert columns.rows_within("a", one) is columns.rows_within("a", one)
    assert columns.rows_within("a", two) == columns.rows_within("a", one) == [0]


def test_what_is_remembered_of_models_is_bounded() -> None:
    names = [f"m-{n}" for n in range(MAX_MODELS + 1)]
    columns = columns_of([endpoint_view(1, registered=frozenset(names))])

    assert all(columns.open_rows(name) == range(1) for name in names)
    assert len(columns._listing) == 1


def test_an_adapter_that_has_gone_from_several_endpoints_at_once_is_held_by_none() -> None:
    loaded, empty = endpoint_view(1, gpu_adapters=("a",)), endpoint_view(1)
    made = Shown([loaded] * 3)
    for row in range(3):
        made.move(row, empty)

    assert made.columns.holders("a") == set()


def test_candidates_are_viewed_as_they_were() -> None:
    views = [endpoint_view(number, num_pending=number) for number in (1, 2, 3)]
    made = Shown(views)
    candidates = made.columns.candidates([0, 2])
    made.set(2, endpoint_view(3, num_pending=9))

    assert candidates[1] == views[2]
    assert candidates[:1] == (views[0],)
    assert list(candidates) == [views[0], views[2]]
    assert candidates[1] is candidates.views[1]
    assert candidates == (views[0], views[2])
    assert candidates != 7


def test_one_candidate_is_found_by_its_address_as_it_was_and_none_that_is_no_candidate() -> None:
    views = [endpoint_view(number, num_pending=number) for number in (1, 2, 3)]
    addresses = [each.address for each in views]
    made = Shown(views)
    candidates = made.columns.candidates([0, 2])
    made.set(2, endpoint_view(3, num_pending=9))
    found = [views[0], None, views[2]]

    assert [*map(candidates.find, addresses)] == found
    assert candidates.find("elsewhere") is None
    assert candidates.views[1].address == addresses[2]
    assert [*map(candidates.find, addresses)] == found
    candidates.forget()
    assert [*map(candidates.find, addresses)] == [None] * 3


def test_an_adapter_that_has_no_requests_is_counted_off_without_effect() -> None:
    columns = columns_of([endpoint_view(1, pending_by_adapter={"a": 1})])
    before = shown(columns)
    columns.count(0, "b", 0)

    assert shown(columns) == before


@pytest.mark.parametrize("see", [lambda columns: columns.candidates([0]), lambda c: [*c.views]])
def test_what_was_seen_of_requests_stays_as_it_was_while_more_begin_and_end(
    see: Callable[[Columns], Sequence[EndpointView]],
) -> None:
    columns = columns_of([endpoint_view(1, pending_by_adapter={"a": 1})])
    for num in (2, 3, 0):
        before, seen = dict(columns.pending(0)), see(columns)
        columns.count(0, "a", num)
        columns.count(0, "b", num)
        columns.outdated.add(0)  # as whoever writes the row's load says

        assert seen[0].pending_by_adapter == before
    assert columns.pending(0) == {}
