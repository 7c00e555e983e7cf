"""Kinds that may be undefined: which definition is followed, whatever an API server says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from random import Random

import pytest

from extproc.discovery.kubernetes.kubewatch import MAX_REST_S, ListWatch, WatchStats, WatchTimes
from extproc.discovery.kubernetes.objects import InferenceObjective, objectives_query
from extproc.discovery.kubernetes.objectstore import ApiError
from tests.logs import warnings
from tests.virtualtime import in_virtual_time
from tests.waiting import beside

NEW, OLD = "llm-d.ai", "inference.networking.x-k8s.io"
RELIST_S = 600.0
NEW_API = f"/apis/{NEW}/v1alpha2"
LOST = ApiError("connection", "refused")
NOT_SERVED, FORBIDDEN = ApiError("status_404", "404: no"), ApiError("status_403", "403: no")


class Api:
    """An API server; `refusals` says which groups it does not list, and why, and `kinds` what it
    answers when it is asked for the kinds of a group.

    Each group has one object, which is named like it.
    """

    def __init__(self) -> None:
        self.refusals = dict.fromkeys((NEW, OLD), NOT_SERVED)
        self.kinds: ApiError | bytes = FORBIDDEN

    async def namespace(self) -> str:
        return "n"

    async def get(self, path: str, parameters: Mapping[str, str]) -> bytes:
        group = path.split("/")[2]
        if "/namespaces/" not in path:
            if isinstance(self.kinds, ApiError):
                raise self.kinds
            return self.kinds
        self._check(group)
        item = f'{{"metadata": {{"name": "{group}"}}}}'
        return f'{{"metadata": {{}}, "items": [{item}]}}'.encode()

    async def watch(
        self, path: str, parameters: Mapping[str, str], *, within_s: float
    ) -> AsyncGenerator[list[bytes], None]:
        self._check(path.split("/")[2])
        yield []
        await asyncio.sleep(float(parameters["timeoutSeconds"]))

    def _check(self, group: str) -> None:
        if refusal := self.refusals.get(group, None if group in (NEW, OLD) else NOT_SERVED):
            raise refusal


Objects = Collection[InferenceObjective]


def watch_of(api: Api, on_change: Callable[[Objects], None]) -> ListWatch[InferenceObjective]:
    return ListWatch(
        api,
        objectives_query(),
        on_change=on_change,
        stats=WatchStats(),
        clock=asyncio.get_running_loop().time,
        rng=Random(1),
        times=WatchTimes(relist_s=RELIST_S),
        hint="; what to do",
    )


async def followed(api: Api, *, for_s: float) -> ListWatch[InferenceObjective]:
    """The kind after it has been followed for a while."""
    watch = watch_of(api, lambda _: None)
    async with beside(watch.run()):
        await asyncio.sleep(for_s)
    return watch


async def told(*changes: Callable[[Api], object], every_s: float) -> list[list[str]]:
    """The objects that are known after each change of an API server that serves none."""
    api, known, seen = Api(), list[str](), []

    def on_change(objects: Objects) -> None:
        known[:] = [each.metadata.name for each in objects]
        assert bool(watch.api) == bool(known)

    watch = watch_of(api, on_change)
    async with beside(watch.run()):
        for change in changes:
            change(api)
            await asyncio.sleep(every_s)
            seen.append(list(known))
    return seen


@in_virtual_time
async def test_a_definition_is_found_and_lost_within_the_time_between_two_lists() -> None:
    seen = await told(
        lambda api: None,
        lambda api: api.refusals.pop(OLD),
        lambda api: api.refusals.pop(NEW),
        lambda api: api.refusals.update({NEW: NOT_SERVED}),
        lambda api: api.refusals.update({OLD: NOT_SERVED}),
        every_s=RELIST_S + 1.0,
    )

    assert seen == [[], [OLD], [NEW], [OLD], []]


@in_virtual_time
async def test_a_definition_that_is_removed_is_noticed_when_its_watch_ends() -> None:
    seen = await told(
        lambda api: api.refusals.pop(NEW),
        lambda api: api.refusals.update({NEW: NOT_SERVED}),
        every_s=2 * WatchTimes().watch_s,
    )

    assert seen == [[NEW], []]


@in_virtual_time
async def test_a_group_that_fails_does_not_keep_the_one_that_is_followed_from_being_read() -> None:
    api = Api()
    api.refusals = {OLD: LOST}
    watch = watch_of(api, lambda _: None)
    watch.api = NEW_API
    async with beside(watch.run()):
        await asyncio.sleep(1.0)
        assert not watch.stats.contacts_s, "the age of the endpoints is an alert, theirs is none"

    assert (watch.problem, watch.stats.lists) == ("", {"inferenceobjectives": 1})


@in_virtual_time
async def test_a_group_that_may_be_listed_counts_where_the_other_may_not() -> None:
    seen = await told(
        lambda api: api.refusals.update({NEW: FORBIDDEN}),
        lambda api: api.refusals.pop(OLD),
        every_s=RELIST_S + 1.0,
    )

    assert seen == [[], [OLD]]


@pytest.mark.parametrize("trouble", [LOST, FORBIDDEN], ids=["lost", "forbidden"])
@in_virtual_time
async def test_what_was_known_stands_while_nothing_can_be_listed(trouble: ApiError) -> None:
    seen = await told(
        lambda api: api.refusals.pop(NEW),
        lambda api: api.refusals.update({NEW: trouble, OLD: trouble}),
        every_s=RELIST_S + 1.0,
    )
    assert seen == [[NEW], [NEW]]


@pytest.mark.parametrize(
    ("refusal", "is_absent"), [(NOT_SERVED, True), (FORBIDDEN, False), (LOST, False), (None, False)]
)
@in_virtual_time
async def test_that_there_is_nothing_to_come_is_known_where_the_api_server_says_so(
    refusal: ApiError | None, is_absent: bool
) -> None:
    api = Api()
    api.refusals = {} if refusal is None else dict.fromkeys((NEW, OLD), refusal)
    kind = await followed(api, for_s=1.0)

    assert kind.is_absent is is_absent


@pytest.mark.parametrize("trouble", [LOST, FORBIDDEN], ids=["lost", "forbidden"])
@in_virtual_time
async def test_after_a_failure_it_is_tried_again_soon(trouble: ApiError) -> None:
    seen = await told(
        lambda api: api.refusals.update({NEW: trouble}),
        lambda api: api.refusals.pop(NEW),
        every_s=MAX_REST_S,
    )
    assert seen == [[], [NEW]]


@pytest.mark.parametrize(
    ("said", "is_absent"),
    [
        (ApiError("status_404", "404: no such group"), True),
        (b'{"resources": [{"name": "other"}, {"name": "inferenceobjectives/status"}]}', True),
        (b'{"resources": [{"name": "inferenceobjectives"}]}', False),
        (FORBIDDEN, False),
        (LOST, False),
        (b"<html>", False),
    ],
    ids=["no group", "no such kind", "is there", "forbidden", "lost", "garbage"],
)
@in_virtual_time
async def test_what_may_not_be_listed_is_absent_only_where_the_api_server_has_no_such_kind(
    said: ApiError | bytes, is_absent: bool
) -> None:
    """A Role of others, such as that of llm-d's chart, knows nothing of a kind of ours."""
    api = Api()
    api.refusals = dict.fromkeys((NEW, OLD), FORBIDDEN)
    api.kinds = said
    kind = await followed(api, for_s=12.0)

    assert kind.is_absent is is_absent
    assert bool(kind.problem) is not is_absent
    assert kind.age_s == (0.0 if is_absent else 12.0)


@in_virtual_time
async def test_a_role_that_may_not_list_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    await told(
        lambda api: api.refusals.update({NEW: FORBIDDEN, OLD: FORBIDDEN}),
        every_s=10 * RELIST_S,
    )

    lines = warnings(caplog)
    assert lines == ["InferenceObjectives: not read: 403: no; what to do"]


@in_virtual_time
async def test_a_refusal_after_a_loss_is_told_as_well_and_so_is_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    await told(
        lambda api: api.refusals.update({NEW: LOST}),
        lambda api: api.refusals.update({NEW: FORBIDDEN}),
        lambda api: api.refusals.pop(NEW),
        every_s=100.0,
    )

    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.INFO] == [
        "InferenceObjectives: not read: refused",
        "InferenceObjectives: not read: 403: no; what to do",
        "InferenceObjectives: can be read again",
    ]
