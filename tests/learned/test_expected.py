"""Which reports surprise, by what a pool knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from extproc.learned.concurrency import START
from extproc.learned.expected import FULL_RATIO, STILL_S, UNSEEN_S, WAITED_S, Expected
from extproc.pods.accounting import Accounting, AccountingSettings, EndSource
from extproc.pods.pool import Pool, PoolSettings
from extproc.types import Pick
from tests.builders import address, cards, endpoint, pick, report, request
from tests.otherrouters import OtherRouter

A = address(1)


def is_expected(pool: Pool) -> bool:
    """Whether its report said what the router expects, whoever tells of ends."""
    pod = pool.find(A)
    return pod is not None and pod.is_as_expected(len(pool.queue))


class Line:
    """The requests that wait in the router."""

    def __init__(self) -> None:
        self.num = 0

    def __len__(self) -> int:
        return self.num

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_named: None


class Scene:
    """A pod with two requests of ours and one of another router, as its reports say."""

    def __init__(self, **settings: Any) -> None:
        self.line = Line()
        self.pool = Pool(PoolSettings(**settings), queue=self.line)
        self.pool.set_endpoints([endpoint(1)])
        self.pool.record_models(A, cards("a", "b"), now=0.0)
        self.now, self.tokens, self.num = 0.0, 0, 0
        self.due = list[str]()
        self.pool.tell_due(self.due.append)
        self.other = OtherRouter(self.pool, "other")
        self.start("a")
        self.start("a")
        self.tell("a")
        for _ in range(100):
            self.report(3)
        assert self.is_expected
        self.due.clear()

    @property
    def is_expected(self) -> bool:
        return is_expected(self.pool)

    def start(self, adapter: str | None) -> Pick:
        self.num += 1
        made = pick(f"ours-{self.num}", info=request(adapter, request_id=f"r{self.num}"))
        self.pool.flights.start(made, now=self.now)
        return made

    def tell(self, adapter: str | None) -> None:
        self.num += 1
        self.other.start(f"{self.num}", adapter=adapter, now=self.now)

    def end(self, by: str, number: int, *, has_run: bool = True) -> None:
        if by == "us":
            self.pool.flights.finish(f"ours-{number}", now=self.now, has_run=has_run)
        else:
            self.other.end(f"{number}", now=self.now, has_run=has_run)

    def report(self, num_running: int, *, tokens: int | None = None, **fields: Any) -> bool:
        """Let a tenth of a second pass, and return whether the report is as expected then."""
        self.now += 0.1
        self.tokens += num_running if tokens is None else tokens
        given = {"active_adapters": frozenset({"a"}), **fields}
        made = report(
            num_running=num_running,
            generated_tokens=self.tokens,
            work_tokens=self.tokens,
            **given,
        )
        self.pool.record_report(A, made, taken_at_s=self.now)
        return self.is_expected


def test_requests_of_all_routers_that_run_are_expected_whatever_their_tokens() -> None:
    scene = Scene()

    assert all(scene.report(3, tokens=3 + number % 2) for number in range(20))


@pytest.mark.parametrize(
    ("num_running", "fields"),
    [
        (4, {}),
        (2, {}),
        (3, {"num_waiting": 1}),
        (2, {"num_waiting": 1}),
        (3, {"active_adapters": frozenset({"a", "b"})}),
        (3, {"kv_usage_ratio": 0.9}),
        (3, {"has_counts": False}),
        (3, {"is_asleep": True}),
        (3, {"process_start_wall_s": 1e9}),
        (3, {"tokens": 0, "kv_usage_ratio": 0.1}),
    ],
    ids=[
        "more",
        "fewer",
        "more wait",
        "one waits",
        "another adapter",
        "KV cache nearly full",
        "unreadable",
        "asleep",
        "restarted",
        "tokens late",
    ],
)
def test_a_report_that_says_anything_else_is_a_surprise(
    num_running: int, fields: dict[str, Any]
) -> None:
    scene = Scene()
    if "process_start_wall_s" in fields:
        scene.report(3, process_start_wall_s=1.0)
        assert scene.report(3, process_start_wall_s=1.0)
    if "tokens" in fields:  # a window of output tokens, of which few came
        scene.now += 4.0

    assert not scene.report(num_running, **fields)


def test_requests_too_short_to_show_what_a_token_takes_are_a_surprise_once_they_were_for_long() -> (
    None
):
    expected, made = Expected(), report(num_running=1)
    seen: dict[str, Any] = {
        "num_known": 1,
        "num_picks": 1,
        "adapters": (),
        "token_s": 0.0,
        "is_doubtful": False,
        "stood_s": 0.0,
        "limit": None,
    }

    expected.reported(made, now=1.0, is_new=False, unseen_s=UNSEEN_S, **seen)
    assert expected.is_met
    expected.reported(made, now=2.0, is_new=False, unseen_s=UNSEEN_S + 1, **seen)
    assert not expected.is_met


def test_requests_that_run_while_no_counter_moves_are_a_surprise() -> None:
    scene, seen = Scene(), list[bool]()
    for _ in range(int(STILL_S / 0.1) + 3):
        seen.append(scene.report(3, tokens=0))

    assert seen[0]
    assert not seen[-1]


def test_as_many_fewer_as_begin_and_end_until_we_hear_of_it_are_none() -> None:
    scene = Scene()
    for number in range(100):
        ours = scene.start("a")
        assert scene.report(4), number
        scene.pool.flights.finish(ours.id, now=scene.now)
        assert scene.report(3), number

    assert scene.report(2)
    assert scene.report(0, active_adapters=frozenset())
    assert not scene.report(4)


@pytest.mark.parametrize(
    ("num_more", "is_expected"),
    [
        ((0, 0), True),
        ((0, 4), True),  # three that ran before, and one that has begun and ended since
        ((0, 5), False),
        ((0, None), True),  # of a page without it
        ((0, None, 9), True),
    ],
)
def test_requests_that_nobody_knew_and_that_have_ended_again_are_a_surprise(
    num_more: tuple[int | None, ...], is_expected: bool
) -> None:
    """By their first tokens: as of routers that share no picks, between two reports."""
    scene, last = Scene(), num_more[-1]
    for num in num_more[:-1]:
        scene.report(3, num_first_tokens=None if num is None else 100 + num)
    begun = scene.start("a")
    scene.pool.flights.finish(begun.id, now=scene.now)

    reported = scene.report(3, num_first_tokens=None if last is None else 100 + last)
    assert reported == is_expected


@pytest.mark.parametrize("by", ["us", "another"])
def test_more_requests_than_have_ever_run_there_are_due_a_report_that_is_asked_for_once(
    by: str,
) -> None:
    scene = Scene()
    for _ in range(2):
        scene.start("a") if by == "us" else scene.tell("a")
    before, due, after = scene.is_expected, list(scene.due), scene.report(5)

    assert (before, due, after) == (False, [A], True)
    scene.start("a")
    assert scene.due == [A, A]


@pytest.mark.parametrize("by", ["us", "another"])
def test_a_report_is_due_before_a_pod_of_which_nothing_is_known_gets_no_more(by: str) -> None:
    """As many run there as before, but more have begun than may wait, instead of others."""
    scene, num, before = Scene(), 0, list[int]()
    for _ in range(30):
        scene.start("a") if by == "us" else scene.tell("a")
        before.append(scene.num)
    for _ in range(20):
        scene.report(33)
    scene.due.clear()
    while not scene.due and num <= START:
        num += 1
        scene.end(by, before.pop())
        scene.start("a") if by == "us" else scene.tell("a")

    assert num <= START
    assert scene.pool.snapshot(now=scene.now).endpoints[0].has_room
    assert scene.is_expected


@pytest.mark.parametrize("by", ["us", "another"])
def test_requests_that_begin_and_end_between_two_reports_are_expected_however_many(
    by: str,
) -> None:
    """As with ten routers that tell of theirs: none of what has been served waits."""
    scene = Scene()
    scene.start("a")
    scene.report(4)
    scene.end("us", scene.num)
    scene.due.clear()
    for _ in range(20):
        for _ in range(5 * START):
            scene.start("a") if by == "us" else scene.tell("a")
            scene.now += 0.0001
            scene.end(by, scene.num)
        has_room = scene.pool.snapshot(now=scene.now).endpoints[0].has_room

        assert (has_room, scene.due, scene.report(3)) == (True, [], True)


@pytest.mark.parametrize("by", ["us", "another"])
def test_of_requests_that_a_pod_refuses_many_are_due_its_report(by: str) -> None:
    scene = Scene()
    for _ in range(START):
        scene.start("a") if by == "us" else scene.tell("a")
        scene.end(by, scene.num, has_run=False)

    assert scene.due == [A]


@pytest.mark.parametrize("usage", [0.1, 0.4, 0.5])
def test_more_requests_than_would_nearly_fill_the_kv_cache_are_due_a_report(usage: float) -> None:
    scene = Scene()
    for _ in range(7):
        scene.start("a")
    scene.report(10, kv_usage_ratio=0.1)
    for number in range(4, 11):
        scene.pool.flights.finish(f"ours-{number}", now=scene.now)
    scene.now += 10.0  # nothing may have ended unheard
    scene.report(3, kv_usage_ratio=usage)
    num, most = 3, min(10, int(3 * FULL_RATIO / usage))
    for _ in range(20):
        assert scene.report(3, kv_usage_ratio=usage)
    while scene.is_expected:
        scene.start("a")
        num += 1

    assert num == most + 1


def test_once_requests_have_waited_in_an_engine_it_surprises_for_a_while() -> None:
    scene, seen = Scene(), list[bool]()
    assert not scene.report(2, num_waiting=1)
    for _ in range(int(WAITED_S / 0.1) + 2):
        seen.append(scene.report(3))

    assert not any(seen[: int(WAITED_S / 0.1) - 2])
    assert seen[-1]


def test_a_process_that_starts_anew_is_not_expected_to_run_what_the_last_one_ran() -> None:
    scene = Scene()
    for _ in range(2):
        scene.report(3, process_start_wall_s=1.0)
    scene.report(3, process_start_wall_s=1e9)

    assert scene.pool._pods[A].reports.expected.most == 3
    scene.report(0, process_start_wall_s=1e9 + 100)
    assert scene.pool._pods[A].reports.expected.most == 3  # those that are known to be there


@pytest.mark.parametrize("limit", ["configured", "learned"])
def test_more_requests_than_a_limit_are_due_a_report_and_as_many_are_not(limit: str) -> None:
    scene = Scene()
    if limit == "configured":
        scene = Scene(max_in_flight=4)
    else:
        for number in range(3):
            scene.start("a")
            scene.report(4, num_waiting=number, tokens=99)
        scene.pool.flights.finish("ours-4", now=scene.now)
        scene.pool.flights.finish("ours-5", now=scene.now)
        for _ in range(310):
            scene.report(3, tokens=99)
        scene.pool._pods[A].load.room.limit = 4
    pod = scene.pool._pods[A]
    num = pod.flags.max_in_flight or pod.load.room.limit
    assert num == 4
    while pod.load.num_known < num:
        scene.start("a")
    scene.report(num)
    at_limit = scene.is_expected
    scene.start("a")

    assert (at_limit, scene.is_expected) == (True, False)


def test_requests_that_the_router_holds_are_due_each_pod_s_report() -> None:
    for scene in (Scene(max_in_flight=3), Scene()):
        assert scene.is_expected
        scene.line.num = 1

        assert not scene.is_expected


def test_a_new_list_of_models_is_due_a_report_and_the_same_again_is_not() -> None:
    scene = Scene()
    scene.pool.record_models(A, cards("a", "b"), now=scene.now)
    same = scene.is_expected
    scene.pool.record_models(A, cards("a", "b", "c"), now=scene.now)

    assert (same, scene.is_expected) == (True, False)
    assert scene.report(3)


@pytest.mark.parametrize("trouble", ["unreachable", "dead", "a model not found", "full"])
def test_a_pod_in_trouble_is_due_its_report(trouble: str) -> None:
    scene = Scene()
    pod = scene.pool._pods[A]
    if trouble == "unreachable":
        scene.pool.record_unreachable(A)
    elif trouble == "dead":
        scene.pool.record_health(A, is_dead=True, asked_at_s=scene.now)
    elif trouble == "a model not found":
        pod.listed.disbelieve("a")
    else:
        pod.load.fullness.refused("ours-1", 3, now=scene.now)

    assert not scene.is_expected


@pytest.mark.parametrize(
    ("source", "is_read_seldom"),
    [
        (EndSource.AUTO, True),  # as long as no page has shown that the log is silent
        (EndSource.ACCESS_LOG, True),
        (EndSource.RESPONSE_PHASES, True),
        (EndSource.SCRAPE, False),
    ],
)
def test_while_ends_are_left_to_reports_they_are_asked_for_all_the_time(
    source: EndSource, is_read_seldom: bool
) -> None:
    scene = Scene()
    accounting = Accounting(scene.pool, "self", settings=AccountingSettings(source=source))

    assert accounting.is_expected(A, now=scene.now) == is_read_seldom
    for number in (1, 2):
        scene.pool.flights.finish(f"ours-{number}", now=scene.now)
    assert accounting.is_expected(A, now=scene.now)
    assert not accounting.is_expected(address(9), now=scene.now)


def test_ends_are_left_to_reports_from_when_a_log_falls_silent_until_it_is_whole_again() -> None:
    scene = Scene()
    accounting = Accounting(scene.pool, "self")
    envoy = request("a").envoy
    accounting.logs.heard(envoy, "log", now=0.0)
    told = accounting.is_expected(A, now=scene.now)
    accounting.logs.lost("log", now=scene.now)
    silent = accounting.is_expected(A, now=scene.now)
    accounting.logs.heard(envoy, "another", now=scene.now)
    old = accounting.is_expected(A, now=scene.now)
    for number in (1, 2):
        scene.pool.flights.finish(f"ours-{number}", now=scene.now)

    assert (told, silent, old) == (True, False, False)
    assert accounting.is_expected(A, now=scene.now)


def test_an_idle_pod_is_as_expected_where_no_queue_is() -> None:
    pool = Pool()
    pool.set_endpoints([endpoint(1)])
    pool.record_models(A, cards("a"), now=0.0)
    before = is_expected(pool)
    pool.record_report(A, report(num_running=0), taken_at_s=1.0)

    assert (before, is_expected(pool)) == (False, True)
