"""Objects that declare something: their order, their bounds, and that each is read once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from extproc.discovery.kubernetes import declarers
from extproc.discovery.kubernetes.declarers import (
    MAX_SPEC_BYTES,
    MAX_STATUS_BYTES,
    Declared,
    DeclaredObject,
    decode_spec,
)
from extproc.discovery.kubernetes.objects import LLMRoute, routes_query
from extproc.discovery.kubernetes.objectstore import ObjectStore
from tests.discovery.kubernetes.apimodel import event, page
from tests.discovery.kubernetes.declared import item, listed

QUERY = routes_query()


class Counted:
    """Reads `spec` as a string: "" is nobody's, `other` another router's, and `no` cannot count."""

    def __init__(self) -> None:
        self.num_read = 0
        self.declared = Declared[LLMRoute, str](
            lambda source: {b'""': "", b'"other"': "of others"}.get(bytes(source.spec)),
            self._read,
            lambda source: source.metadata.name,
        )

    def _read(self, source: LLMRoute) -> tuple[str, str]:
        self.num_read += 1
        said = bytes(source.spec).decode().strip('"')
        if said == "no":
            raise ValueError("it says no")
        return said, f"{said} ignored"

    def read(self, *items: dict[str, Any]) -> list[DeclaredObject[str]]:
        return self.declared.read(listed(routes_query(keeper=self.declared), *items))


def test_the_oldest_counts_first_and_those_of_one_age_by_their_names() -> None:
    items = [item("x", "new"), item("x", "b", age=5), item("x", "a", age=5), item("x", "z", age=9)]

    assert [each.origin for each in Counted().read(*items)] == [
        f"llmroute n/{name}" for name in ("z", "a", "b", "new")
    ]


def test_an_object_without_a_time_is_the_oldest() -> None:
    items = [item("x", "known", age=9), item("x", "unknown", creationTimestamp=None)]

    assert [each.origin[-7:] for each in Counted().read(*items)] == ["unknown", "n/known"]


def test_what_is_being_deleted_or_nobody_s_says_nothing() -> None:
    gone = item("x", "gone", deletionTimestamp="2026-01-01T00:00:00Z")

    assert Counted().read(gone, item("", "other")) == []


def test_what_is_wrong_with_one_object_is_its_own_problem() -> None:
    read = Counted().read(item("no", "bad", age=1, generation=4), item("x", "good"))

    assert read == [
        DeclaredObject("llmroute n/bad", 4, problem="it says no", withheld="bad"),
        DeclaredObject("llmroute n/good", 1, "x", ignored="x ignored"),
    ]


def test_an_object_is_read_again_only_when_its_spec_is_another() -> None:
    counted = Counted()
    counted.read(item("x", status={"conditions": []}))
    counted.read(item("x", status={"conditions": None}))
    assert counted.num_read == 1

    assert counted.read(item("y", generation=2))[0].declared == "y"
    assert counted.read(item("z", generation=2, uid="another"))[0].declared == "z"
    assert counted.read() == []


def test_an_object_whose_generations_are_not_counted_is_read_every_time() -> None:
    counted = Counted()
    counted.read(item("x", generation=0))

    assert counted.read(item("y", generation=0))[0].declared == "y"


def test_the_newest_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarers, "MAX_OBJECTS", 2)
    read = Counted().read(*(item("x", f"o{number}", age=number) for number in range(4)))

    assert [(each.origin[-2:], bool(each.problem)) for each in read] == [
        *(("o3", False), ("o2", False)),
        *(("o1", True), ("o0", True)),
    ]
    assert read[-1].declared is None
    assert "allowed" in read[-1].problem
    assert [each.withheld for each in read] == ["", "", "o1", "o0"]


def test_objects_that_are_not_ours_take_no_room_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarers, "MAX_OBJECTS", 2)
    counted = Counted()
    others = [item("other", f"o{number}", age=9) for number in range(3)]
    read = counted.read(*others, item("x", "a"), item("x", "b"))

    assert [(each.origin[-2:], each.is_ours, each.problem) for each in read] == [
        *(("/a", True, ""), ("/b", True, "")),
        *(("o0", False, "of others"), ("o1", False, "of others")),
    ]
    assert counted.num_read == 2


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("x" * MAX_SPEC_BYTES, f"{MAX_SPEC_BYTES + 2} bytes; allowed: {MAX_SPEC_BYTES}"),
        (7, "Expected `str`"),
    ],
)
def test_a_spec_that_is_too_large_or_of_another_kind_is_an_error(spec: Any, why: str) -> None:
    (source,) = listed(QUERY, item(spec))
    with pytest.raises(ValueError, match=why):
        decode_spec(source, msgspec.json.Decoder(str))


class Kept:
    """A store that keeps what is ours: specs that are not `""`."""

    def __init__(self) -> None:
        self.declared = Counted().declared
        self.store = ObjectStore(routes_query(keeper=self.declared))

    def take(self, *pages: tuple[dict[str, Any], ...]) -> Kept:
        for number, items in enumerate(pages):
            is_last = number == len(pages) - 1
            body = page(1, *items, next_page="" if is_last else "more")
            self.store.read_page(body, is_first=number == 0)
        return self

    def hear(self, type_: str, thing: dict[str, Any]) -> bool:
        thing["metadata"]["resourceVersion"] = str(int(self.store.resource_version) + 1)
        is_news = self.store.read_event(event(type_, thing))
        self.store.bound()
        return is_news

    @property
    def num_bytes(self) -> int:
        objects = self.store.objects
        return sum(len(bytes(each.spec)) + len(bytes(each.status)) for each in objects)

    @property
    def read(self) -> list[tuple[str, str | None, str]]:
        read = self.declared.read(self.store.objects)
        return [(each.origin[-2:], each.declared, each.withheld) for each in read]


@pytest.mark.parametrize("own", [1, {}, {"num_bytes": 1, "named": "x"}])
def test_a_field_that_is_called_as_our_note_on_a_spec_says_nothing(own: object) -> None:
    kept = Kept().take(({**item("x", "o1"), ".withheld": own}, item("y", "o2")))

    assert kept.read == [("o1", "x", ""), ("o2", "y", "")]


def test_of_others_objects_nothing_is_kept() -> None:
    kept = Kept().take((item("", "theirs"), item("x", "ours")))
    assert [each.metadata.name for each in kept.store.objects] == ["ours"]

    assert not kept.hear("ADDED", item("", "more"))
    assert kept.hear("MODIFIED", item("", "ours", generation=2))
    assert not kept.store.objects


def test_of_a_long_spec_or_status_and_of_labels_nothing_is_kept() -> None:
    status = {"conditions": ["x" * MAX_STATUS_BYTES]}
    long = item("x" * MAX_SPEC_BYTES, "o1", status=status, labels={"a": "b"})
    kept = Kept().take((long, item("x", "o0", status={"conditions": []})))

    assert kept.num_bytes < 100
    assert [each.metadata.labels for each in kept.store.objects] == [None, None]
    assert kept.read == [("o0", "x", ""), ("o1", None, "o1")]
    assert "allowed" in kept.declared.read(kept.store.objects)[1].problem


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_all_specs_together_are_bounded_and_the_newest_beyond_are_refused(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declarers, "MAX_SPECS_BYTES", 250)
    items = [item("x" * 98, f"o{number}", age=number) for number in range(4)]
    kept = Kept().take(*((items[number],) for number in order))
    refused = [("o1", None, "o1"), ("o0", None, "o0")]
    assert kept.read == [("o3", "x" * 98, ""), ("o2", "x" * 98, ""), *refused]
    assert "allowed: 250" in kept.declared.read(kept.store.objects)[2].problem
    assert kept.num_bytes < 300

    newest = item("x" * 98, "o0", status={"conditions": []})
    assert not kept.hear("MODIFIED", newest)  # of its status alone
    assert kept.num_bytes < 300
    kept.store.bound()
    assert kept.read[2:] == refused

    assert kept.hear("DELETED", items[3])
    assert kept.read[0] == ("o2", "x" * 98, "")
    kept.take(tuple(items[:3]))
    assert kept.read == [("o2", "x" * 98, ""), ("o1", "x" * 98, ""), ("o0", None, "o0")]


def test_all_statuses_together_are_bounded_and_every_object_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(declarers, "MAX_STATUSES_BYTES", 250)
    items = [item("x", f"o{number}", age=number, status="y" * 98) for number in range(4)]
    kept = Kept().take(tuple(items))

    assert [declared for _, declared, _ in kept.read] == ["x"] * 4
    statuses = [bytes(each.status) for each in kept.store.objects]
    assert [status == b"null" for status in statuses] == [True, True, False, False]


def test_a_spec_that_was_not_kept_is_refused_until_the_next_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(declarers, "MAX_SPECS_BYTES", 150)
    items = [item("x" * 98, f"o{number}", age=number) for number in range(2)]
    kept = Kept().take(tuple(items))
    kept.hear("DELETED", items[1])
    assert kept.read == [("o0", None, "o0")]
    assert "next list" in kept.declared.read(kept.store.objects)[0].problem

    kept.take((items[0],))
    assert kept.read == [("o0", "x" * 98, "")]


def test_a_change_of_the_status_alone_is_no_news_and_known_all_the_same() -> None:
    store = ObjectStore(QUERY)
    store.read_page(b'{"metadata": {"resourceVersion": "1"}}', is_first=True)

    def is_news(spec: str, **metadata: Any) -> bool:
        thing = item(spec, resourceVersion=str(int(store.resource_version) + 1), **metadata)
        return store.read_event(event("MODIFIED", thing))

    assert is_news("x")
    assert not is_news("x", status={"conditions": []})
    assert [bytes(each.status) for each in store.objects] == [b'{"conditions": []}']
    assert is_news("y", generation=2)
    assert is_news("y", generation=2, deletionTimestamp="2026-01-01T00:00:00Z")
