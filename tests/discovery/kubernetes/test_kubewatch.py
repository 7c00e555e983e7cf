"""The loop of lists and watches: when it goes on, when it begins anew, how long it rests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from random import Random

import pytest

from extproc.discovery.kubernetes import kubewatch
from extproc.discovery.kubernetes.kubewatch import ListWatch, WatchStats, WatchTimes
from extproc.discovery.kubernetes.objects import Pod, pods_query
from extproc.discovery.kubernetes.objectstore import ApiError, error_of
from tests.discovery.kubernetes.apimodel import GONE, Api, bookmark

CUT = ApiError("connection", "cut")
Step = list[bytes] | Exception | float
"""The next step of a watch: lines, a failure, or seconds to wait."""


class ScriptedClient:
    """Lists what there is; each watch plays the next script, the last one without end.

    Attributes:
        asked: "list" or "watch", with its parameters, in order.
        now: Seconds.
    """

    def __init__(self, api: Api, *watches: Sequence[Step], page_size: int = 100) -> None:
        self.api = api
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.rests: list[float] = []
        self.now = 100.0
        self.is_over = asyncio.Event()
        self.list_errors: list[ApiError] = []
        self._watches = list(watches)
        self._page_size = page_size

    async def namespace(self) -> str:
        return "own"

    async def get(self, path: str, parameters: Mapping[str, str]) -> bytes:
        assert path == "/api/v1/namespaces/own/pods"
        self.asked.append(("list", dict(parameters)))
        if self.list_errors:
            raise self.list_errors.pop(0)
        return self.api.pages(self._page_size)[int(parameters.get("continue", 0))]

    async def watch(
        self, path: str, parameters: Mapping[str, str], *, within_s: float
    ) -> AsyncGenerator[list[bytes], None]:
        assert path == "/api/v1/namespaces/own/pods"
        assert within_s > float(parameters["timeoutSeconds"])
        self.asked.append(("watch", dict(parameters)))
        if not self._watches:
            self.is_over.set()
            yield []
            await asyncio.get_running_loop().create_future()
        for index, step in enumerate(self._watches.pop(0)):
            if index == 0 and not isinstance(step, Exception):
                yield []
            if isinstance(step, Exception):
                raise step
            if isinstance(step, list):
                yield step
            else:
                self.now += step

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.asked]

    @property
    def versions(self) -> list[str]:
        """Where the watches began."""
        return [each["resourceVersion"] for kind, each in self.asked if kind == "watch"]


class Played:
    """The result of a script."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.stats = WatchStats()
        self.troubles: list[str] = []

    def take(self, pods: Collection[Pod]) -> None:
        self.told.append(sorted(pod.metadata.name for pod in pods))


@pytest.fixture
def api() -> Api:
    api = Api()
    api.put("a", "1")
    return api


async def play(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, times: WatchTimes | None = None
) -> Played:
    """Run the loop to the end of the script, without resting."""
    played = Played()
    sleep = asyncio.sleep

    async def rest(delay_s: float) -> None:
        client.rests.append(delay_s)
        played.troubles = list(played.stats.troubles.values())
        await sleep(0)

    monkeypatch.setattr("extproc.discovery.kubernetes.kubewatch.asyncio.sleep", rest)
    watch = ListWatch(
        client,
        pods_query("app=vllm"),
        on_change=played.take,
        stats=played.stats,
        clock=lambda: client.now,
        rng=Random(1),
        times=times or WatchTimes(),
    )
    task = asyncio.ensure_future(watch.run())
    async with asyncio.timeout(60):
        await asyncio.wait(
            (task, asyncio.ensure_future(client.is_over.wait())),
            return_when=asyncio.FIRST_COMPLETED,
        )
    assert not task.done(), task.exception()
    contacts = dict(played.stats.contacts_s)
    assert not played.stats.troubles
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert contacts == {watch: client.now}
    assert played.stats.contacts_s == {}
    return played


async def test_a_list_is_taken_by_pages_and_watched_from_where_it_was(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.put("b", "2")
    client = ScriptedClient(api, page_size=1)
    played = await play(client, monkeypatch)

    assert played.told == [["a", "b"]]
    (_, first), (_, second), (_, watch) = client.asked
    assert (first["labelSelector"], "continue" in first) == ("app=vllm", False)
    assert (second["labelSelector"], second["continue"]) == ("app=vllm", "1")
    assert watch["labelSelector"] == "app=vllm"
    assert (watch["resourceVersion"], watch["allowWatchBookmarks"]) == ("12", "true")
    assert played.stats.lists == {"pods": 1}
    assert not played.stats.failures


async def test_changes_in_one_batch_are_reported_once(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = str(api.version)
    api_later = Api()
    api_later.version, api_later.state = api.version, dict(api.state)
    for name in "bcd":
        api_later.put(name, "2")
    lines = api_later.since(begun)
    played = await play(ScriptedClient(api, [lines, lines, [bookmark(99)], CUT]), monkeypatch)

    assert played.told == [["a"], ["a", "b", "c", "d"]]


async def test_after_a_cut_it_goes_on_from_the_last_event_or_bookmark(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = str(api.version)
    api.put("b", "2")
    lines = api.since(begun)
    client = ScriptedClient(api, [lines, CUT], [[bookmark(50)]], [10.0])
    api.version, api.state = int(begun), {"a": "1"}
    played = await play(client, monkeypatch)

    assert client.kinds == ["list", "watch", "watch", "watch", "watch"]
    assert client.versions == [begun, "12", "50", "50"]
    assert played.stats.failures == {"connection": 1, "short": 1}


@pytest.mark.parametrize(
    "gone",
    [[[GONE]], [error_of(410, "too old")]],
    ids=["as an event", "as a status"],
)
async def test_after_a_410_it_lists_again(
    api: Api, monkeypatch: pytest.MonkeyPatch, gone: list[Step]
) -> None:
    client = ScriptedClient(api, gone)
    played = await play(client, monkeypatch)

    assert client.kinds == ["list", "watch", "list", "watch"]
    assert played.stats.failures == {"gone": 1}


async def test_changes_before_a_failure_in_the_same_batch_are_reported(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = str(api.version)
    api.put("b", "2")
    lines = [*api.since(begun), b"garbage"]
    api.version, api.state = int(begun), {"a": "1"}
    played = await play(ScriptedClient(api, [lines]), monkeypatch)

    assert played.told == [["a"], ["a", "b"]]
    assert played.stats.failures == {"malformed": 1}


async def test_repeated_failures_cause_a_new_list(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient(api, [CUT], [CUT], [CUT])
    await play(client, monkeypatch)

    assert client.kinds == ["list", "watch", "watch", "watch", "list", "watch"]


async def test_a_list_is_taken_anew_after_its_time(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient(api, [60.0], [60.0], [60.0])
    played = await play(client, monkeypatch, WatchTimes(watch_s=60.0, relist_s=100.0))

    assert client.kinds == ["list", "watch", "watch", "list", "watch", "watch"]
    assert client.rests == [0.0, 0.0, 0.0]
    assert played.stats.lists == {"pods": 2}


async def test_nothing_is_reported_while_the_server_is_unreachable(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient(api, [CUT], [CUT], [CUT])
    client.list_errors = [error_of(403, "no") for _ in range(4)]
    played = await play(client, monkeypatch)

    assert played.stats.failures["status_403"] == 4
    assert all(names == ["a"] for names in played.told)


async def test_a_list_that_breaks_off_is_begun_anew(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.put("b", "2")
    client = ScriptedClient(api, page_size=1)
    get = client.get

    async def get_badly(path: str, parameters: Mapping[str, str]) -> bytes:
        if "continue" in parameters and len(client.asked) < 3:
            client.asked.append(("list", dict(parameters)))
            raise error_of(410, "the token is too old")
        return await get(path, parameters)

    monkeypatch.setattr(client, "get", get_badly)
    played = await play(client, monkeypatch)

    assert ["continue" in each for _, each in client.asked[:4]] == [False, True, False, True]
    assert played.told == [["a", "b"]]


async def test_pages_that_are_too_long_are_asked_for_in_parts(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large objects of some must not keep those of others from being read."""
    client = ScriptedClient(api)
    get = client.get

    async def get_small(path: str, parameters: Mapping[str, str]) -> bytes:
        if int(parameters["limit"]) > 10:
            client.asked.append(("list", dict(parameters)))
            raise ApiError("too_long", "response longer than 16 MiB")
        return await get(path, parameters)

    monkeypatch.setattr(client, "get", get_small)
    played = await play(client, monkeypatch)

    assert [each.get("limit") for _, each in client.asked] == ["250", "31", "3", None]
    assert played.told == [["a"]]


async def test_rests_double_up_to_a_limit_and_are_short_again_after_news(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    news: list[Step] = [[bookmark(99)], CUT]
    cuts: list[list[Step]] = [[CUT]] * 12
    client = ScriptedClient(api, *cuts, news)
    await play(client, monkeypatch)

    *growing, last = client.rests
    limits = [min(kubewatch.MIN_REST_S * 2**n, kubewatch.MAX_REST_S) for n in range(12)]
    assert all(limit / 2 <= rest <= limit for rest, limit in zip(growing, limits, strict=True))
    assert last <= kubewatch.MIN_REST_S


async def test_a_watch_that_held_counts_as_a_good_one_though_nothing_came(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    good: list[list[Step]] = [[30.0, CUT]] * 5
    client = ScriptedClient(api, *good)
    await play(client, monkeypatch)

    assert client.kinds == ["list", *["watch"] * 6]
    assert max(client.rests) <= kubewatch.MIN_REST_S


async def test_the_server_is_left_alone_for_as_long_as_it_asks(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient(api)
    client.list_errors = [error_of(429, "", 7.0), error_of(429, "", 1e9)]
    await play(client, monkeypatch)

    assert client.rests == [7.0, kubewatch.MAX_RETRY_AFTER_S]


async def test_a_mistake_of_our_own_does_not_end_it(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient(api, [ValueError("ours")])
    played = await play(client, monkeypatch)

    assert client.kinds == ["list", "watch", "watch"]
    assert played.stats.failures == {"internal": 1}


async def test_repeated_failures_are_logged_once_and_so_is_their_end(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await play(ScriptedClient(api, *[[CUT]] * 5, [[bookmark(99)], CUT]), monkeypatch)

    messages = [record.getMessage() for record in caplog.records if "Pods" in record.getMessage()]
    assert messages == ["Pods: not read: cut", "Pods: can be read again"]


@pytest.mark.parametrize(
    ("watches", "troubles"),
    [
        ([[CUT]], []),
        ([[CUT], [CUT]], ["Pods: not read: cut"]),
        ([[CUT], [CUT], [[bookmark(99)], CUT]], []),
    ],
    ids=["one is normal", "again and again", "over"],
)
async def test_what_fails_again_and_again_is_a_trouble_until_the_server_answers(
    api: Api, monkeypatch: pytest.MonkeyPatch, watches: list[list[Step]], troubles: list[str]
) -> None:
    played = await play(ScriptedClient(api, *watches), monkeypatch)

    assert played.troubles == troubles
