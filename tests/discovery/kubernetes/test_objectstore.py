"""Lists and watches to objects: whatever is repeated, lost or cut, the truth in the end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.discovery.kubernetes.objects import (
    Pod,
    objectives_query,
    pods_query,
    pool_query,
    rewrites_query,
    routes_query,
    slices_query,
)
from extproc.discovery.kubernetes.objectstore import ApiError, ObjectStore, error_of, refusal
from tests.discovery.kubernetes.apimodel import (
    GONE,
    Api,
    bookmark,
    event,
    page,
    pod,
    state_of,
)


@pytest.fixture
def store() -> ObjectStore[Pod]:
    store = ObjectStore(pods_query("app=vllm"))
    store.read_page(page(5, pod("a", 3, "1"), pod("b", 4, "2")), is_first=True)
    return store


def test_a_list_is_what_there_is(store: ObjectStore[Pod]) -> None:
    assert state_of(store) == {"a": "1", "b": "2"}
    assert store.resource_version == "5"


def test_a_list_takes_away_what_is_not_in_it(store: ObjectStore[Pod]) -> None:
    assert store.read_page(page(9, pod("c", 8, "3")), is_first=True) == ""
    assert state_of(store) == {"c": "3"}


@pytest.mark.parametrize("items", [[], None])
def test_an_empty_list_empties(store: ObjectStore[Pod], items: None | list[str]) -> None:
    body = json.dumps({"metadata": {"resourceVersion": "9"}, "items": items}).encode()
    store.read_page(body, is_first=True)

    assert state_of(store) == {}


def test_pages_count_when_the_last_has_come(store: ObjectStore[Pod]) -> None:
    assert store.read_page(page(9, pod("c", 8, "3"), next_page="x"), is_first=True) == "x"
    assert state_of(store) == {"a": "1", "b": "2"}
    assert store.read_page(page(9, pod("d", 9, "4")), is_first=False) == ""
    assert state_of(store) == {"c": "3", "d": "4"}


def test_a_list_that_is_begun_anew_forgets_its_first_pages(store: ObjectStore[Pod]) -> None:
    store.read_page(page(9, pod("c", 8, "3"), next_page="x"), is_first=True)
    store.read_page(page(9, pod("d", 8, "4")), is_first=True)

    assert state_of(store) == {"d": "4"}


def test_events_add_change_and_take_away(store: ObjectStore[Pod]) -> None:
    assert store.read_event(event("ADDED", pod("c", 6, "3")))
    assert store.read_event(event("MODIFIED", pod("a", 7, "9")))
    assert store.read_event(event("DELETED", pod("b", 8)))
    assert state_of(store) == {"a": "9", "c": "3"}
    assert store.resource_version == "8"


def test_a_bookmark_moves_on_and_is_no_news(store: ObjectStore[Pod]) -> None:
    assert not store.read_event(bookmark(100))
    assert store.resource_version == "100"
    assert not store.read_event(bookmark(50))
    assert store.resource_version == "100"


def test_what_is_older_than_known_is_passed_over(store: ObjectStore[Pod]) -> None:
    store.read_event(event("DELETED", pod("a", 7)))

    assert not store.read_event(event("MODIFIED", pod("a", 6, "9")))
    assert not store.read_event(event("DELETED", pod("b", 4)))
    assert state_of(store) == {"b": "2"}


def test_the_end_of_what_is_not_known_is_no_news(store: ObjectStore[Pod]) -> None:
    assert not store.read_event(event("DELETED", pod("z", 7)))
    assert store.resource_version == "7"


def test_versions_that_are_no_numbers_are_taken_as_they_come(store: ObjectStore[Pod]) -> None:
    assert store.read_event(event("MODIFIED", pod("a", "x1", "8")))
    assert store.read_event(event("MODIFIED", pod("a", "x0", "9")))
    assert (state_of(store)["a"], store.resource_version) == ("9", "x0")


def test_a_410_says_that_it_is_gone_and_changes_nothing(store: ObjectStore[Pod]) -> None:
    with pytest.raises(ApiError, match="too old") as raised:
        store.read_event(GONE)

    assert (raised.value.is_gone, raised.value.reason) == (True, "gone")
    assert state_of(store) == {"a": "1", "b": "2"}


def test_another_error_tells_how_long_to_wait(store: ObjectStore[Pod]) -> None:
    status = {"code": 429, "message": "busy", "details": {"retryAfterSeconds": 7}}
    with pytest.raises(ApiError) as raised:
        store.read_event(event("ERROR", status))

    assert not raised.value.is_gone
    assert (raised.value.reason, raised.value.retry_after_s) == ("status_429", 7)


@pytest.mark.parametrize("code", [410, 500])
def test_a_status_is_an_error_of_its_own_kind(code: int) -> None:
    assert error_of(code, "").is_gone == (code == 410)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"kind":"Status","code":403,"message":"pods is forbidden"}', "403: pods is forbidden"),
        (b"<html>", "403: <html>"),
        (b'{"message":"\xff"}', '403: {"message":"\ufffd"}'),
    ],
)
def test_a_refusal_says_what_the_server_said(body: bytes, message: str) -> None:
    assert str(refusal(403, body)) == message


@pytest.mark.parametrize(("header", "rest_s"), [("", 0), ("3", 3), ("Thu, 01 Jan", 0)])
def test_a_refusal_tells_how_long_to_wait(header: str, rest_s: float) -> None:
    assert refusal(429, b"", header).retry_after_s == rest_s


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"not JSON",
        b'{"type":"ADDED","object":{"metadata":{"name":"c","resourceVersion":"9"',
        b'{"type":"ADDED","object":{}}',
        b'{"type":"ADDED","object":{"metadata":{"name":"\xff"}}}',
        b'{"type":"ERROR","object":[]}',
    ],
)
def test_what_is_no_event_changes_nothing(store: ObjectStore[Pod], line: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        store.read_event(line)

    assert raised.value.reason == "malformed"
    assert (state_of(store), store.resource_version) == ({"a": "1", "b": "2"}, "5")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"no", b"{}", b'{"metadata":{},"items":[{"metadata":{"name":1}}]}'),
        b'{"kind":"Status","metadata":{},"status":"Success"}',  # as a proxy's or a plugin's answer
    ],
)
def test_what_is_no_list_changes_nothing(store: ObjectStore[Pod], body: bytes) -> None:
    with pytest.raises(ApiError, match="no list"):
        store.read_page(body, is_first=True)

    assert state_of(store) == {"a": "1", "b": "2"}


def test_queries_name_what_they_ask_for() -> None:
    pods, slices, pool = pods_query("a=b", namespace="n"), slices_query("vllm"), pool_query("p")
    assert pods_query("a=b").path("/api/v1", "own") == "/api/v1/namespaces/own/pods"
    assert pods.path(pods.apis[0], "own") == "/api/v1/namespaces/n/pods"
    assert (slices.apis, slices.resource) == (("/apis/discovery.k8s.io/v1",), "endpointslices")
    assert slices.selector == {"labelSelector": "kubernetes.io/service-name=vllm"}
    of_pools = ("/apis/inference.networking.k8s.io/v1",)
    assert (pool.apis, pool.resource) == (of_pools, "inferencepools")
    assert pool.selector == {"fieldSelector": "metadata.name=p"}
    groups = ("llm-d.ai", "inference.networking.x-k8s.io")
    beside = tuple(f"/apis/{each}/v1alpha2" for each in groups)
    objectives, rewrites, routes = objectives_query(), rewrites_query(), routes_query()
    assert (objectives.apis, objectives.resource) == (beside + of_pools, "inferenceobjectives")
    assert (rewrites.apis, rewrites.resource) == (beside, "inferencemodelrewrites")
    assert (routes.apis, routes.resource) == (("/apis/llm.extproc/v1alpha1",), "llmroutes")
    assert (pods.title, routes.title) == ("Pods", "LLMRoutes")
    assert all(each.is_optional for each in (objectives, rewrites, routes))
    assert not any(each.is_optional for each in (pods, slices, pool))


# --- any history, any faults --------------------------------------------------------------------

NAMES = st.sampled_from("abcd")
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.sampled_from("123")),
        st.tuples(st.just("delete"), NAMES),
    ),
    max_size=25,
)


def apply(api: Api, changes: list[tuple[str, ...]]) -> None:
    for name, *arguments in changes:
        getattr(api, name)(*arguments)


@given(before=CHANGES, after=CHANGES, size=st.integers(1, 5), data=st.data())
def test_whatever_is_repeated_cut_or_made_good_for_the_end_is_the_truth(
    before: list[Any], after: list[Any], size: int, data: st.DataObject
) -> None:
    """A stream with duplicates and bookmarks, cut anywhere; then it goes on, or lists again."""
    api, store = Api(), ObjectStore(pods_query("app=vllm"))
    apply(api, before)
    for index, body in enumerate(api.pages(size)):
        store.read_page(body, is_first=index == 0)
    apply(api, after)

    lines = api.since(store.resource_version)
    cut = data.draw(st.integers(0, len(lines)), label="cut after")
    passed: list[bytes] = []
    for line in lines[:cut]:
        passed.append(line)
        again = data.draw(st.lists(st.sampled_from(passed), max_size=2), label="repeated")
        for each in (line, *again):
            store.read_event(each)
        if data.draw(st.booleans(), label="bookmark"):
            store.read_event(bookmark(int(store.resource_version)))
    if data.draw(st.booleans(), label="gone"):
        with pytest.raises(ApiError):
            store.read_event(GONE)
        for index, body in enumerate(api.pages(size)):
            store.read_page(body, is_first=index == 0)
    else:
        for line in api.since(store.resource_version):
            store.read_event(line)

    assert state_of(store) == api.state
    assert int(store.resource_version) <= api.version


@given(before=CHANGES, lost=CHANGES, after=CHANGES, size=st.integers(1, 5))
def test_a_list_makes_good_for_events_that_never_came(
    before: list[Any], lost: list[Any], after: list[Any], size: int
) -> None:
    api, store = Api(), ObjectStore(pods_query("app=vllm"))
    apply(api, before)
    for index, body in enumerate(api.pages(size)):
        store.read_page(body, is_first=index == 0)
    apply(api, lost)
    version = str(api.version)
    apply(api, after)
    for line in api.since(version):
        store.read_event(line)
    for index, body in enumerate(api.pages(size)):
        store.read_page(body, is_first=index == 0)

    assert state_of(store) == api.state
