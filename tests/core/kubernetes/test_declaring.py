"""Objects that declare something: their order, their bounds, and that each is read once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from extproc.core.kubernetes import declaring
from extproc.core.kubernetes.declaring import MAX_SPEC_BYTES, Reader, Reading, decode_spec
from extproc.core.kubernetes.objects import LLMRoute, route_queries
from extproc.core.kubernetes.store import Store
from tests.core.kubernetes.apimodel import event
from tests.core.kubernetes.declared import item, listed

QUERY = route_queries()[0]


class Counted:
    """Reads `spec` as a string: "" is nobody's, and `no` cannot count."""

    def __init__(self) -> None:
        self.num_read = 0
        self.reader = Reader(self._read, lambda source: source.metadata.name)

    def _read(self, source: LLMRoute) -> tuple[str, str] | None:
        self.num_read += 1
        said = bytes(source.spec).decode().strip('"')
        if said == "no":
            raise ValueError("it says no")
        return (said, f"{said} ignored") if said else None

    def read(self, *items: dict[str, Any]) -> list[Reading[str]]:
        return self.reader.read(listed(QUERY, *items))


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
        Reading("llmroute n/bad", 4, problem="it says no", withheld="bad"),
        Reading("llmroute n/good", 1, "x", ignored="x ignored"),
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
    monkeypatch.setattr(declaring, "MAX_OBJECTS", 2)
    read = Counted().read(*(item("x", f"o{number}", age=number) for number in range(4)))

    assert [(each.origin[-2:], bool(each.problem)) for each in read] == [
        *(("o3", False), ("o2", False)),
        *(("o1", True), ("o0", True)),
    ]
    assert read[-1].declared is None
    assert "allowed" in read[-1].problem
    assert [each.withheld for each in read] == ["", "", "o1", "o0"]


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


def test_a_change_of_the_status_alone_is_no_news_and_known_all_the_same() -> None:
    store = Store(QUERY)
    store.read_page(b'{"metadata": {"resourceVersion": "1"}}', is_first=True)

    def is_news(spec: str, **metadata: Any) -> bool:
        thing = item(spec, resourceVersion=str(int(store.resource_version) + 1), **metadata)
        return store.read_event(event("MODIFIED", thing))

    assert is_news("x")
    assert not is_news("x", status={"conditions": []})
    assert [bytes(each.status) for each in store.objects] == [b'{"conditions": []}']
    assert is_news("y", generation=2)
    assert is_news("y", generation=2, deletionTimestamp="2026-01-01T00:00:00Z")
