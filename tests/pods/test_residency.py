"""Residency against an exact model of the engine, and rule by rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.pods.residency import MAX_REMEMBERED, Residency
from extproc.types import LoadReport

WALL_S = 1_790_000_000.0  # a wall time; our clock of the tests starts near 0

adapter_names = st.sampled_from([f"a{i}" for i in range(7)])
lengths = st.integers(1, 5)
skews_s = st.sampled_from([0.0, 1.75 * 2.0**30, 4096.5])


class Engine:
    """vLLM's slots, cache and log, literally: two LRU lists, touched step by step.

    A step takes a second and ends at a whole one.
    """

    def __init__(self, max_loras: int, max_cpu_loras: int, skew_s: float = WALL_S) -> None:
        self.max_loras, self.max_cpu_loras, self.skew_s = max_loras, max_cpu_loras, skew_s
        self.gpu: list[str] = []  # least recently used first, as the next one
        self.cpu: list[str] = []
        self.log: dict[str, float] = {}
        self.active: frozenset[str] = frozenset()
        self.touched_step: dict[str, int] = {}
        self.now = 0
        self._running: list[tuple[str, list[int]]] = []
        self._waiting: list[tuple[str, list[int]]] = []

    def load(self, adapter: str) -> None:
        if adapter in self.cpu:
            self.cpu.remove(adapter)
        elif len(self.cpu) == self.max_cpu_loras:
            evicted = self.cpu.pop(0)
            if evicted in self.gpu:
                self.gpu.remove(evicted)
        self.cpu.append(adapter)
        if adapter in self.gpu:
            self.gpu.remove(adapter)
        elif len(self.gpu) == self.max_loras:
            self.gpu.pop(0)
        self.gpu.append(adapter)
        self.touched_step[adapter] = self.now

    def submit(self, adapter: str, num_tokens: int) -> None:
        self._waiting.append((adapter, [num_tokens, 0]))

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def begin_step(self) -> None:
        """Give out free slots and touch the adapters of the batch."""
        self.now += 1
        in_slots = {adapter for adapter, _ in self._running}
        for request in list(self._waiting):
            if request[0] in in_slots or len(in_slots) < self.max_loras:
                in_slots.add(request[0])
                self._running.append(request)
                self._waiting.remove(request)
        for adapter, tokens in self._running:
            self.load(adapter)
            tokens[1] += 1

    def end_step(self) -> list[str]:
        """Answer the adapter of each request that ends, in the order of touching."""
        ended = [adapter for adapter, (wanted, done) in self._running if done == wanted]
        self._running = [request for request in self._running if request[1][1] < request[1][0]]
        # The log names whom a step left unfinished: an answer's last token never shows.
        self.active = frozenset(adapter for adapter, _ in self._running)
        self.log |= dict.fromkeys(self.active, self.now + self.skew_s)
        return ended

    def step(self) -> list[str]:
        self.begin_step()
        return self.end_step()

    def report(self) -> LoadReport:
        log = sorted(self.log.items(), key=lambda seen: (-seen[1], seen[0]))
        return LoadReport(
            max_loras=self.max_loras, active_adapters=self.active, adapter_log=tuple(log)
        )


def assert_same_but_for_ties(inferred: Sequence[str], held: Sequence[str], engine: Engine) -> None:
    """Of adapters last touched in one step nobody can know which came first."""
    edge = min((engine.touched_step[adapter] for adapter in held), default=0)
    tied = {adapter for adapter, step in engine.touched_step.items() if step == edge}
    assert len(inferred) == len(held)
    assert set(inferred) ^ set(held) <= tied


def report(
    *log: tuple[str, float],
    max_loras: int | None = 2,
    active: Iterable[str] = (),
    gpu: Iterable[str] | None = None,
    cpu: Iterable[str] | None = None,
) -> LoadReport:
    return LoadReport(
        max_loras=max_loras,
        active_adapters=frozenset(active),
        adapter_log=tuple(log),
        gpu_adapters=None if gpu is None else frozenset(gpu),
        cpu_adapters=None if cpu is None else frozenset(cpu),
    )


def used(residency: Residency, *adapters: str, now: float = 0.0) -> None:
    """One request after the other, the first ending at `now`, each a second after the other."""
    for i, adapter in enumerate(adapters):
        residency.picked(adapter)
        residency.ended(adapter, 1, True, now + i)


@pytest.fixture
def residency() -> Residency:
    return Residency(max_loras=2, max_cpu_loras=4)


# --- against the exact model ------------------------------------------------------------------

events = st.one_of(
    st.tuples(st.just("send"), adapter_names, lengths),
    st.tuples(st.just("refuse"), adapter_names, lengths),
    st.tuples(st.just("step"), st.just(""), lengths),
    st.tuples(st.just("report"), st.just(""), lengths),
)


@given(st.lists(events, max_size=60), st.integers(1, 3), st.integers(0, 3), skews_s, st.booleans())
def test_it_equals_an_exact_lru_when_every_request_is_ours(
    sequence: list[tuple[str, str, int]], slots: int, more: int, skew_s: float, is_polled: bool
) -> None:
    """In every step, with requests in flight and waiting for slots, scraped and polled or not."""
    listing = [f"a{i}" for i in (5, 1, 3, 0, 6, 2, 4)]
    engine = Engine(slots, slots + more, skew_s)
    residency = Residency(max_loras=slots, max_cpu_loras=slots + more)
    if is_polled:
        for adapter in listing:
            engine.load(adapter)
        residency.listed(listing, now=0.0)

    for kind, adapter, number in sequence:
        if kind == "send":
            engine.submit(adapter, number)
            residency.picked(adapter)
        elif kind == "refuse":
            residency.picked(adapter)
            residency.ended(adapter, 1, False, engine.now)
        elif kind == "report":
            residency.reported(engine.report(), now=engine.now + 0.5)
        else:
            for _ in range(number):
                engine.begin_step()

                assert set(residency.gpu_adapters) == set(engine.gpu)
                assert set(residency.cpu_adapters) == set(engine.cpu)

                for ended in engine.end_step():
                    residency.ended(ended, 1, True, engine.now)


@given(
    st.permutations([f"a{i}" for i in range(7)]),
    st.lists(st.tuples(adapter_names, st.integers(2, 5), st.integers(0, 4)), max_size=25),
    skews_s,
)
def test_one_report_and_one_listing_tell_it_too(
    listing: list[str], requests: list[tuple[str, int, int]], skew_s: float
) -> None:
    """A router that starts now, over an engine that is idle: all but ties within one step."""
    engine = Engine(2, 4, skew_s)
    for adapter in listing:
        engine.load(adapter)
        engine.now += 1
    for adapter, num_tokens, num_steps in requests:
        engine.submit(adapter, num_tokens)
        for _ in range(num_steps):
            engine.step()
    while not engine.is_idle:
        engine.step()

    residency = Residency(max_loras=None, max_cpu_loras=4)
    residency.listed(listing, now=engine.now)
    residency.reported(engine.report() if engine.log else report(), now=engine.now)

    assert_same_but_for_ties(residency.gpu_adapters, engine.gpu, engine)
    assert_same_but_for_ties(residency.cpu_adapters, engine.cpu, engine)


@given(
    st.lists(st.tuples(adapter_names, st.integers(2, 5), st.integers(0, 4)), max_size=25),
    skews_s,
)
def test_requests_of_others_are_placed_among_ours(
    requests: list[tuple[str, int, int]], skew_s: float
) -> None:
    """Half of the adapters are used by another router, whose requests only the log shows."""
    engine = Engine(2, 4, skew_s)
    residency = Residency(max_loras=2, max_cpu_loras=4)
    ours = {"a0", "a1", "a2", "a3"}

    def step() -> None:
        for adapter in engine.step():
            if adapter in ours:
                residency.ended(adapter, 1, True, engine.now)
        residency.reported(engine.report(), now=engine.now + 0.5)

    residency.reported(engine.report(), now=0.5)
    for adapter, num_tokens, num_steps in requests:
        engine.submit(adapter, num_tokens)
        if adapter in ours:
            residency.picked(adapter)
        for _ in range(num_steps):
            step()
    while not engine.is_idle:
        step()

    assert_same_but_for_ties(residency.gpu_adapters, engine.gpu, engine)
    assert_same_but_for_ties(residency.cpu_adapters, engine.cpu, engine)


@given(
    st.lists(
        st.tuples(adapter_names, st.integers(2, 5), st.integers(0, 4), st.integers(0, 4)),
        max_size=25,
    ),
    skews_s,
)
@example([("a0", 5, 0, 0), ("a1", 2, 0, 0), ("a2", 2, 1, 4)], 0.0)
def test_a_page_that_takes_its_time_leaves_the_logs_order_as_it_is(
    requests: list[tuple[str, int, int, int]], skew_s: float
) -> None:
    """What others do, seen through pages that are written long after they were asked for and arrive
    long after they were written, while the engine goes on."""
    engine = Engine(2, 4, skew_s)
    residency = Residency(max_loras=2, max_cpu_loras=4)

    def steps(number: int) -> None:
        for _ in range(number):
            engine.step()

    def scrape(steps_to_write: int = 0, steps_to_arrive: int = 0) -> None:
        asked_at_s = engine.now + 0.25
        steps(steps_to_write)
        page = engine.report()
        steps(steps_to_arrive)
        residency.reported(page, now=engine.now + 0.5, asked_at_s=asked_at_s)

    scrape()
    for adapter, num_tokens, steps_to_write, steps_to_arrive in requests:
        engine.submit(adapter, num_tokens)
        scrape(steps_to_write, steps_to_arrive)
    while not engine.is_idle:
        engine.step()
    scrape()

    assert_same_but_for_ties(residency.gpu_adapters, engine.gpu, engine)
    assert_same_but_for_ties(residency.cpu_adapters, engine.cpu, engine)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("start"), adapter_names),
            st.tuples(st.just("finish"), adapter_names),
            st.tuples(st.just("register"), st.sets(adapter_names)),
            st.tuples(st.just("report"), st.dictionaries(adapter_names, st.floats(1, 100))),
            st.tuples(st.just("forget"), st.none()),
        ),
        max_size=40,
    ),
    st.none() | st.integers(1, 3),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 3),
)
def test_what_it_says_is_always_possible(
    inputs: list[tuple[str, object]],
    max_loras: int | None,
    max_cpu_loras: int | None,
    stated_slots: int | None,
) -> None:
    """Whatever comes in: each name once, no more than fit, and the GPU's lead the cache's."""
    residency = Residency(max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    slots = stated_slots or max_loras or 1
    most = max(slots, max_loras or 1)
    for now, (kind, what) in enumerate(inputs):
        if kind == "start":
            residency.picked(str(what))
        elif kind == "finish":
            if what in residency.in_flight:
                residency.ended(str(what), 1, True, now)
        elif kind == "register":
            assert isinstance(what, set)
            residency.listed(sorted(what), now=now)
        elif kind == "report":
            assert isinstance(what, dict)
            log = sorted(what.items(), key=lambda seen: -seen[1])
            active = [name for name, wall_s in log if wall_s == log[0][1]]
            stated = report(*log, max_loras=stated_slots, active=active)
            residency.reported(stated, now=now)
        else:
            residency.forget()
        gpu, cpu = residency.gpu_adapters, residency.cpu_adapters
        assert len(set(cpu)) == len(cpu) <= max(most, max_cpu_loras or 1)
        assert len(gpu) <= most
        assert cpu[: len(gpu)] == gpu


# --- rule by rule -----------------------------------------------------------------------------


def test_nothing_is_resident_before_anything_is_known(residency: Residency) -> None:
    assert residency.gpu_adapters == residency.cpu_adapters == ()


def test_the_most_recently_used_come_first(residency: Residency) -> None:
    used(residency, "a0", "a1", "a2", "a3", "a4", "a1")

    assert residency.gpu_adapters == ("a1", "a4")
    assert residency.cpu_adapters == ("a1", "a4", "a3", "a2")


def test_with_unknown_slots_only_the_most_recent_one_is_sure() -> None:
    residency = Residency(max_loras=None, max_cpu_loras=None)
    used(residency, "a0", "a1")
    assert list(residency.gpu_adapters) == list(residency.cpu_adapters) == ["a1"]

    residency.reported(report(max_loras=2), now=9.0)

    assert residency.gpu_adapters == residency.cpu_adapters == ("a1", "a0")


def test_what_the_engine_says_of_its_slots_beats_configuration() -> None:
    """And the CPU cache is never smaller than the GPU slots."""
    residency = Residency(max_loras=2, max_cpu_loras=2)
    residency.reported(report(max_loras=3), now=-1.0)
    used(residency, *(f"a{i}" for i in range(6)))

    assert residency.gpu_adapters == residency.cpu_adapters == ("a5", "a4", "a3")


def test_an_end_that_is_heard_of_late_counts_from_when_it_was(residency: Residency) -> None:
    residency.picked("late")
    used(residency, "a0", "a1", now=5.0)

    residency.ended("late", 1, True, 4.0)

    assert residency.cpu_adapters == ("a1", "a0", "late")


def test_ends_heard_of_in_one_moment_keep_their_order(residency: Residency) -> None:
    """Whatever the log says of them later."""
    for adapter in ("a1", "a0"):
        residency.picked(adapter)
    for adapter in ("a1", "a0"):
        residency.ended(adapter, 1, True, 3.0)

    residency.reported(report(("a0", WALL_S), ("a1", WALL_S)), now=4.0)

    assert residency.gpu_adapters == ("a0", "a1")


def test_a_request_that_never_ran_loads_nothing(residency: Residency) -> None:
    used(residency, "a0")
    residency.picked("refused")
    assert list(residency.gpu_adapters) == ["refused", "a0"]

    residency.ended("refused", 1, False, 2.0)

    assert residency.cpu_adapters == ("a0",)


def test_the_end_of_what_a_process_had_that_is_gone_is_counted_and_touches_nothing(
    residency: Residency,
) -> None:
    residency.picked("a0", 2)
    residency.forget()

    residency.ended("a0", 1, True, 1.0)

    assert (residency.cpu_adapters, residency.in_flight) == ((), {"a0": 1})


def test_a_request_of_a_new_process_runs_beside_ends_of_the_last_one(residency: Residency) -> None:
    residency.picked("a0", 2)
    residency.forget()
    residency.picked("a0")

    residency.ended("a0", 2, True, 1.0)

    assert (residency.cpu_adapters, residency.in_flight) == (("a0",), {"a0": 1})


def test_what_waits_for_a_slot_gets_it_when_one_is_free(residency: Residency) -> None:
    for adapter in ("a0", "a1", "a2"):
        residency.picked(adapter)
    residency.picked("a0")
    assert set(residency.gpu_adapters) == set(residency.cpu_adapters) == {"a0", "a1"}

    residency.ended("a0", 1, True, 2.0)
    assert set(residency.gpu_adapters) == {"a0", "a1"}

    residency.ended("a0", 1, True, 3.0)
    assert set(residency.gpu_adapters) == {"a1", "a2"}
    assert residency.cpu_adapters[2:] == ("a0",)


def test_an_end_shows_that_an_adapter_had_a_slot(residency: Residency) -> None:
    """We can be wrong about which of many adapters run; what ended was there."""
    for adapter in ("a0", "a1", "a2", "a2"):
        residency.picked(adapter)
    assert "a2" not in residency.cpu_adapters

    residency.ended("a2", 1, True, 1.0)

    assert residency.cpu_adapters == ("a0", "a1", "a2")


def test_the_engine_shows_which_of_ours_hold_slots(residency: Residency) -> None:
    """Requests need not arrive in the order in which they were sent."""
    for adapter in ("a0", "a1", "a2"):
        residency.picked(adapter)

    log = [("a1", WALL_S), ("a2", WALL_S)]
    residency.reported(report(*log, active=["a1", "a2"]), now=1.0)

    assert set(residency.gpu_adapters) == {"a1", "a2"}


def test_a_slot_seen_is_lost_with_the_last_request() -> None:
    """What comes later waits its turn, though the last report still shows the adapter."""
    residency = Residency(max_loras=1, max_cpu_loras=1)
    residency.picked("a0")
    residency.reported(report(("a0", WALL_S), max_loras=1, active=["a0"]), now=1.0)
    residency.ended("a0", 1, True, 2.0)
    residency.picked("a1")
    residency.picked("a0")

    assert residency.gpu_adapters == ("a1",)


def test_what_others_run_stays_most_recent_until_a_report_says_otherwise(
    residency: Residency,
) -> None:
    residency.reported(report(("theirs", WALL_S), active=["theirs"]), now=0.0)
    used(residency, "a0", "a1", now=1.0)
    assert residency.gpu_adapters == ("theirs", "a1")

    residency.reported(report(("theirs", WALL_S)), now=4.0)

    assert residency.gpu_adapters == ("a1", "a0")
    assert residency.cpu_adapters == ("a1", "a0", "theirs")


def test_the_log_does_not_move_what_we_use_ourselves(residency: Residency) -> None:
    """An answer's last token does not show in it, and its clock is not ours."""
    residency.reported(report(("a0", WALL_S)), now=0.0)
    residency.picked("a0")
    residency.ended("a0", 1, True, 1.5)
    used(residency, "a1", now=1.6)

    residency.reported(report(("a0", WALL_S + 1.4), ("a1", WALL_S + 1.5)), now=9.0)

    assert residency.cpu_adapters == ("a1", "a0")


@pytest.mark.parametrize("skew_s", [0.0, 5.0, -3600.0, 1e9])
@pytest.mark.parametrize(
    ("theirs_s", "order"), [(23.0, ("theirs", "a0")), (21.0, ("a0", "theirs"))]
)
def test_the_clocks_offset_is_learned(
    residency: Residency, skew_s: float, theirs_s: float, order: tuple[str, ...]
) -> None:
    """Between two reports far apart, another router's use is before or after our own."""
    log = {"x": skew_s}
    residency.reported(report(*log.items()), now=0.0)
    for taken_at_s, at_s in ((2.0, 0.1), (4.0, 3.9)):  # soon after a scrape, just before one
        log["x"] = skew_s + at_s
        residency.reported(report(*log.items()), now=taken_at_s)

    residency.reported(report(*log.items()), now=20.0)
    used(residency, "a0", now=22.0)
    log["theirs"] = skew_s + theirs_s
    residency.reported(report(*log.items()), now=24.0)

    assert residency.gpu_adapters == order


@pytest.mark.parametrize("step_s", [-1e6, -30.0, 30.0, 1e6])
def test_a_clock_that_is_set_misplaces_nothing_beyond_one_report(
    residency: Residency, step_s: float
) -> None:
    """An entry is never older than the report before it, nor newer than its own; and the new
    offset is learned."""
    log: dict[str, float] = {}
    for second in range(40):
        wall_s = WALL_S + (step_s if second >= 20 else 0.0)
        used(residency, "before", now=second + 0.1)
        residency.reported(report(*log.items()), now=second + 0.2)
        used(residency, "between", now=second + 0.3)
        log["theirs"] = wall_s + second + 0.5
        residency.reported(report(*log.items()), now=second + 0.6)
        used(residency, "after", now=second + 0.7)
        order = residency.cpu_adapters

        assert order.index("after") < order.index("theirs")
        assert second == 0 or order.index("theirs") < order.index("before")
        assert second in (0, 20) or order.index("theirs") < order.index("between")


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(adapter_names, st.integers(1, 50)), max_size=5),
            st.booleans(),
            st.none() | adapter_names,
        ),
        max_size=12,
    )
)
def test_a_log_that_is_the_last_one_says_what_an_equal_one_does(
    pages: list[tuple[list[tuple[str, int]], bool, str | None]],
) -> None:
    same, equal = (Residency(max_loras=3, max_cpu_loras=None) for _ in range(2))
    log: tuple[tuple[str, float], ...] = ()
    for now, (entries, is_new, sent) in enumerate(pages, start=1):
        if is_new:
            log = tuple((name, WALL_S + at_s) for name, at_s in dict(entries).items())
        if sent is not None:
            same.picked(sent)
            equal.picked(sent)
        active = frozenset(name for name, at_s in log if at_s == max(at for _, at in log))
        for made, said in ((same, log), (equal, tuple(each for each in log))):
            report = LoadReport(max_loras=3, active_adapters=active, adapter_log=said)
            made.reported(report, now=float(now))

        assert same.arranged == equal.arranged


def test_names_of_the_first_listing_were_loaded_before_all_else(residency: Residency) -> None:
    residency.reported(report(("a1", WALL_S)), now=0.0)
    residency.listed(["a0", "a1", "a2", "a3", "a4"], now=1.0)

    assert residency.gpu_adapters == ("a1", "a4")
    assert residency.cpu_adapters == ("a1", "a4", "a3", "a2")


def test_a_name_that_appears_was_loaded(residency: Residency) -> None:
    residency.listed(["a0"], now=0.0)
    used(residency, "a0", now=1.0)

    residency.listed(["a0", "a1", "a2"], now=5.0)

    assert residency.cpu_adapters == ("a2", "a1", "a0")


def test_a_use_is_later_than_the_load_that_it_needed(residency: Residency) -> None:
    """The listing is polled rarely: an adapter may be used before we see that it is there."""
    residency.listed(["a0"], now=0.0)
    residency.reported(report(("a1", WALL_S)), now=1.0)
    used(residency, "a0", now=2.0)

    residency.listed(["a0", "a1"], now=5.0)

    assert residency.cpu_adapters == ("a0", "a1")


def test_an_unloaded_adapter_is_of_no_use_but_keeps_its_slot(residency: Residency) -> None:
    residency.listed(["a0", "a1", "a2"], now=0.0)

    residency.listed(["a0", "a1"], now=1.0)

    assert residency.gpu_adapters == ("a1",)
    assert residency.cpu_adapters == ("a1", "a0")

    used(residency, "a0", now=2.0)

    assert residency.gpu_adapters == ("a0",)


def test_an_adapter_loaded_again_stands_beside_its_old_self(residency: Residency) -> None:
    residency.listed(["a0", "a1", "a2"], now=0.0)
    residency.listed(["a0", "a1"], now=1.0)
    residency.listed(["a0", "a1", "a2"], now=2.0)

    assert list(residency.gpu_adapters) == ["a2"]
    assert list(residency.cpu_adapters) == ["a2", "a1", "a0"]

    residency.listed(["a0", "a1", "a2", "a3"], now=3.0)
    assert list(residency.cpu_adapters) == ["a3", "a2", "a1"]

    used(residency, "a0", now=4.0)
    assert list(residency.cpu_adapters) == ["a0", "a3", "a2"]

    used(residency, "a1", now=5.0)
    assert list(residency.cpu_adapters) == ["a1", "a0", "a3", "a2"]


def test_after_forgetting_it_starts_from_nothing(residency: Residency) -> None:
    residency.listed(["a0"], now=0.0)
    residency.reported(report(("a0", WALL_S), active=["a0"]), now=1.0)
    residency.picked("a0")

    residency.forget()
    assert not residency.cpu_adapters

    residency.listed(["a1", "a2"], now=3.0)
    assert residency.cpu_adapters == ("a2", "a1")


def test_what_the_engine_states_wins(residency: Residency) -> None:
    """In our order, what we did not know of last; the GPU's are in the CPU cache too."""
    used(residency, "a0", "a1", "a2")

    residency.reported(report(gpu=["new", "a0"], cpu=["a1"]), now=9.0)

    assert residency.gpu_adapters == ("a0", "new")
    assert residency.cpu_adapters == ("a1", "a0", "new")


def test_an_engine_that_states_its_slots_alone_leaves_the_cache_to_inference(
    residency: Residency,
) -> None:
    used(residency, "a0", "a1", "a2", "a3")

    residency.reported(report(gpu=["a0", "new"]), now=9.0)

    assert residency.gpu_adapters == ("a0", "new")
    assert residency.cpu_adapters == ("a0", "new", "a3", "a2")


def test_an_engine_that_states_its_cache_alone_leaves_the_slots_to_inference(
    residency: Residency,
) -> None:
    used(residency, "a0", "a1", "a2", "a3")

    residency.reported(report(cpu=["a0", "a3", "a2"]), now=9.0)

    assert residency.gpu_adapters == ("a3", "a2")
    assert residency.cpu_adapters == ("a3", "a2", "a0")


@pytest.mark.parametrize("max_loras", [None, 4, 10**9])
def test_an_engine_that_never_stops_naming_adapters_is_remembered_in_part(
    max_loras: int | None,
) -> None:
    """What it says of its slots does not make us keep more. Of one moment all stay, or none."""
    residency = Residency(max_loras=None, max_cpu_loras=None)
    num_each = 1000
    for scrape in range(12):
        log = [(f"{scrape}-{number}", 1e9 + scrape) for number in range(num_each)]
        told = LoadReport(adapter_log=tuple(log), max_loras=max_loras)
        residency.reported(told, now=float(scrape))

    remembered = [value for value in vars(residency).values() if hasattr(value, "__len__")]
    assert max(map(len, remembered)) < MAX_REMEMBERED + num_each
    assert residency.gpu_adapters[0].startswith("11-")


def test_as_many_are_remembered_as_the_operator_says_there_are() -> None:
    num = 2 * MAX_REMEMBERED
    residency = Residency(max_loras=1, max_cpu_loras=num)
    residency.listed([str(number) for number in range(num)], now=0.0)

    assert len(residency.cpu_adapters) == num


def test_of_a_listing_of_thousands_the_last_loaded_are_remembered() -> None:
    residency = Residency(max_loras=3, max_cpu_loras=None)
    residency.listed(["old", "used"], now=0.0)
    residency.picked("used")
    residency.ended("used", 1, True, 2.0)
    new = [str(number) for number in range(3 * MAX_REMEMBERED)]
    residency.listed(["used", *new, "old"], now=3.0)

    assert residency.gpu_adapters == (new[-1], new[-2], new[-3])


def test_one_that_is_loaded_again_first_of_thousands_is_no_second_one() -> None:
    residency = Residency(max_loras=3, max_cpu_loras=None)
    residency.listed(["again"], now=0.0)
    residency.listed([], now=1.0)
    new = [str(number) for number in range(MAX_REMEMBERED)]
    residency.listed(["again", *new], now=2.0)

    assert residency.gpu_adapters == (new[-1], new[-2], new[-3])


# --- places -----------------------------------------------------------------------------------


@given(st.lists(adapter_names, max_size=60), st.integers(1, 8), st.integers(1, 8))
def test_another_size_of_the_cpu_cache_holds_at_once(
    uses: list[str], before: int, after: int
) -> None:
    """Of what a smaller one has evicted, nothing is known until it is used."""
    resized, always = (Residency(max_loras=1, max_cpu_loras=size) for size in (before, after))
    for now, adapter in enumerate(uses):
        for residency in (resized, always):
            used(residency, adapter, now=float(now))
            residency.reported(report(), now=now + 0.5)
    num_kept = len(resized.cpu_adapters)
    resized.configure(max_loras=1, max_cpu_loras=after)

    assert resized.cpu_adapters == always.cpu_adapters[:num_kept]
    assert resized.gpu_adapters == always.gpu_adapters
