"""Which count is true: what Envoys' access logs tell, or what pods show."""

from __future__ import annotations

from collections import deque
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.evidence import Evidence
from extproc.learned.expected import HEARD_S
from extproc.pods.accesslogs import KEPT_S, MAX_ENVOYS, PROOF_S, AccessLogs
from extproc.pods.accounting import Accounting, AccountingSettings, EndSource
from extproc.pods.pool import Pool
from tests.builders import address, completion, endpoint, pick, report, request

ENVOYS = ("10.9.0.1", "10.9.0.2")
STEP_S, PAGE_S, FLUSH_S = 0.1, 0.2, 1.0
NOTICE_S = 10.0
"""A log that is dead is noticed so late."""
WITHIN_S = 2.0 + PAGE_S


def whole(logs: AccessLogs, host: str = "a", *, first_s: float = 0.0, now: float = 0.0) -> float:
    return logs.whole_from_s(host, first_s, now=now)


def test_an_envoy_has_a_while_to_show_its_log() -> None:
    logs = AccessLogs()

    assert [whole(logs, now=now) for now in (0.0, PROOF_S, PROOF_S + 0.1)] == [-inf, -inf, inf]


def test_an_envoy_that_shows_its_log_in_time_has_lost_nothing_before() -> None:
    logs = AccessLogs()
    whole(logs)
    logs.heard("a", "log", now=PROOF_S)

    assert whole(logs, now=100.0) == -inf


def test_a_log_that_comes_late_counts_from_then_on() -> None:
    logs = AccessLogs()
    whole(logs)
    logs.heard("a", "log", now=PROOF_S + 1.0)

    assert whole(logs, now=100.0) == PROOF_S + 1.0


def test_where_the_access_log_is_chosen_it_need_not_be_shown() -> None:
    assert whole(AccessLogs(needs_proof=False), now=1000.0) == -inf


def test_a_log_that_is_lost_leaves_its_own_envoys_to_the_pods_until_they_are_heard_again() -> None:
    logs = AccessLogs()
    for host in "ab":
        logs.heard(host, f"log-{host}", now=0.0)
    logs.lost("log-a", now=5.0)
    seen = [whole(logs, host, now=6.0) for host in "ab"]
    logs.heard("a", "new", now=7.0)

    assert seen == [6.0, -inf]  # none of its requests until now
    assert whole(logs, now=8.0) == 7.0
    assert logs.num_losses == 1


def test_an_envoy_with_another_worker_s_log_counts_from_the_loss_on() -> None:
    logs = AccessLogs()
    for log in ("one", "two"):
        logs.heard("a", log, now=0.0)
    logs.lost("one", now=5.0)

    assert whole(logs, now=6.0) == 5.0


def test_a_link_that_closes_is_no_loss_to_other_routers() -> None:
    logs = AccessLogs()
    logs.heard("a", "link", now=0.0)
    logs.lost("link", now=1.0, is_direct=False)

    assert logs.num_losses == 0


def test_a_process_that_stood_still_may_have_lost_entries_of_all() -> None:
    logs = AccessLogs()
    logs.heard("a", "log", now=0.0)
    logs.stood_still(now=9.0)

    assert (whole(logs, now=10.0), logs.num_losses) == (9.0, 1)


def test_envoys_that_are_gone_are_forgotten_and_those_with_requests_are_not() -> None:
    logs = AccessLogs()
    for host in "abc":
        logs.heard(host, host, now=0.0)
    for log in "ab":
        logs.lost(log, now=1.0)
    for now in (2.0, KEPT_S + 2.0):
        logs.keep({"a"}, now=now)

    assert logs.by_source(now=KEPT_S + 3.0) == (1, ["a"])


def test_the_envoys_that_are_known_have_a_bound() -> None:
    logs = AccessLogs()
    for number in range(MAX_ENVOYS + 5):
        logs.heard(str(number), "log", now=0.0)

    assert logs.by_source(now=0.0) == (MAX_ENVOYS, [])


class World:
    """Two pods, two Envoys and a router, in virtual time.

    Attributes:
        running: The requests that truly run, by pick id: their pod, and their Envoy.
        given_up: Those that the router ended while they ran.
    """

    def __init__(self, seed: int, *, hides: bool, source: EndSource = EndSource.AUTO) -> None:
        self.rng, self.now, self.hides = Random(seed), 0.0, hides
        self.pool = Pool()
        self.pool.set_endpoints([endpoint(1), endpoint(2)])
        self.accounting = Accounting(self.pool, "r", AccountingSettings(source=source))
        self.running: dict[str, tuple[int, str, float]] = {}
        self.given_up: set[str] = set()
        self.entries: deque[tuple[float, str]] = deque()
        self.envoy_of: dict[str, str] = {}
        self.dead_until = dict.fromkeys(ENVOYS, -inf)
        self.log_of = {host: f"{host}-0" for host in ENVOYS}
        self.still_until = -inf
        self.num = 0

    def start(self, duration_s: float, *, on: int | None = None) -> str:
        self.num += 1
        pick_id, host = f"r-{self.num}", self.rng.choice(ENVOYS)
        number = on or self.rng.choice((1, 2))
        info = request(None, request_id=pick_id, envoy=host)
        self.pool.flights.start(pick(pick_id, number, info=info), now=self.now)
        self.running[pick_id] = number, host, self.now + duration_s
        self.envoy_of[pick_id] = host
        return pick_id

    def kill_log(self, host: str, for_s: float) -> None:
        """Entries are lost from now on; the router notices at the end, as does Envoy."""
        self.dead_until[host] = self.now + for_s

    def step(self) -> None:
        self.now += STEP_S
        for pick_id, (_, host, ends_s) in list(self.running.items()):
            if ends_s <= self.now:
                del self.running[pick_id]
                if self.dead_until[host] < self.now and self.still_until < self.now:
                    self.entries.append((self.now + self.rng.uniform(0, FLUSH_S), pick_id))
        for host, until_s in self.dead_until.items():
            if -inf < until_s <= self.now:
                self.dead_until[host] = -inf
                self.accounting.logs.lost(self.log_of[host], now=self.now)
                self.log_of[host] = f"{host}-{self.now}"
        if self.still_until >= self.now:
            return
        if self.still_until > -inf:
            self.still_until = -inf
            self.accounting.logs.stood_still(now=self.now)
        for due in [each for each in self.entries if each[0] <= self.now]:
            self.entries.remove(due)
            log = self.log_of[self.envoy_of[due[1]]]
            said = completion(pick_id=due[1], lag_s=0.0, verdict=Evidence.SERVED)
            self.accounting.complete(said, log, now=self.now)
        if round(self.now / STEP_S) % round(PAGE_S / STEP_S) == 0:
            self.read_pages()

    def read_pages(self) -> None:
        for number in (1, 2):
            num = 0 if self.hides else sum(on == number for on, *_ in self.running.values())
            taken = report(num_running=num)
            self.pool.record_report(address(number), taken, taken_at_s=self.now)
            lost = self.accounting.reconcile(address(number), now=self.now)
            self.given_up |= {each.pick.id for each in lost} & self.running.keys()

    def live(self, for_s: float, rate: float) -> None:
        """Let requests come and end."""
        end_s = self.now + for_s
        while self.now < end_s - 1e-9:
            if self.rng.random() < rate * STEP_S:
                self.start(self.rng.choice((0.3, 2.0, 30.0)))
            self.step()

    def run_on(self) -> None:
        """Have what runs now run for ever."""
        self.running = {key: (on, host, inf) for key, (on, host, _) in self.running.items()}

    def rest(self, for_s: float) -> None:
        self.live(for_s, 0.0)

    @property
    def untold(self) -> set[str]:
        """What has ended, and its entry is under way."""
        return {pick_id for _, pick_id in self.entries}

    @property
    def num_running(self) -> list[int]:
        """By pod: a page says how many have ended, and not which."""
        return [sum(on == number for on, *_ in self.running.values()) for number in (1, 2)]

    @property
    def num_counted(self) -> list[int]:
        """By pod, without what has ended and is told soon."""
        own = [each.pick for each in self.pool.flights if each.pick.id not in self.untold]
        return [sum(each.address == address(number) for each in own) for number in (1, 2)]

    @property
    def counted(self) -> set[str]:
        return {each.pick.id for each in self.pool.flights}


SEEDS = st.integers(0, 2**32)


@given(SEEDS)
def test_what_a_log_has_not_told_of_runs_whatever_its_pod_shows(seed: int) -> None:
    """And no longer than until the log tells."""
    world = World(seed, hides=True)
    world.live(30.0, 6.0)

    assert not world.given_up
    assert world.counted - world.untold == set(world.running)


@given(SEEDS, st.lists(st.sampled_from(["log", "both logs", "still"]), min_size=1, max_size=4))
def test_ends_that_are_lost_are_made_good_within_two_seconds_of_the_log_s_return(
    seed: int, losses: list[str]
) -> None:
    world = World(seed, hides=False)
    for loss in losses:
        world.live(15.0, 6.0)
        if loss == "still":
            world.still_until = world.now + 9.0
        else:
            for host in ENVOYS if loss == "both logs" else ENVOYS[:1]:
                world.kill_log(host, NOTICE_S)
        world.live(NOTICE_S + STEP_S, 6.0)
    for host in ENVOYS:  # each shows its log again
        world.accounting.logs.heard(host, world.log_of[host], now=world.now)
    world.run_on()
    world.rest(WITHIN_S)

    assert world.num_counted == world.num_running


@given(SEEDS)
def test_without_any_log_the_pods_correct_the_counts(seed: int) -> None:
    world = World(seed, hides=False)
    for host in ENVOYS:
        world.kill_log(host, inf)
    world.live(PROOF_S + 5.0, 6.0)
    world.run_on()
    world.rest(WITHIN_S)

    assert world.num_counted == world.num_running


def test_a_pod_that_has_served_much_later_requests_has_lost_the_older_one() -> None:
    world = World(1, hides=False)
    world.start(1.0, on=1)
    world.rest(5.0)
    assert world.counted == set()
    lost = world.start(0.5, on=1)
    world.entries = deque(maxlen=0)  # nobody tells of it, and nobody knows
    world.rest(1.0)
    world.entries = deque()
    for _ in range(65):
        world.start(1.0, on=1)
        world.rest(5.0)
        if lost not in world.counted:
            break

    assert lost not in world.counted
    assert world.now > AccountingSettings().lost_after_s


@pytest.mark.parametrize("source", [EndSource.RESPONSE_PHASES, EndSource.ACCESS_LOG])
def test_a_chosen_source_is_believed_from_the_start(source: EndSource) -> None:
    world = World(1, hides=True, source=source)
    held = world.start(1000.0)
    world.rest(PROOF_S + HEARD_S + 20.0)

    assert world.counted == {held}
    assert world.accounting.in_force(now=world.now)["pages"] == 0
