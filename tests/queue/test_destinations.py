"""Where requests may go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.queue import Destinations, destinations
from extproc.types import RequestInfo
from tests.builders import endpoint_view

PODS = [
    endpoint_view(1, registered=frozenset({"slot", "also here"})),
    endpoint_view(2, registered=frozenset({"elsewhere", "also here"})),
]


def test_a_declared_adapter_s_requests_go_where_its_pods_are_whatever_those_call_it() -> None:
    holders = {"sql": {PODS[0].address}, "slot": {PODS[1].address}, "cold": set[str]()}
    made = Destinations(PODS, holders.get)
    models = ("sql", "slot", "cold", "elsewhere")
    assert [made.of(RequestInfo(model)) for model in models] == [1, 2, 0, 2]


NAMES = st.frozensets(st.sampled_from("abc"))
ADDRESSES = [f"10.0.0.{number}:8000" for number in range(1, 6)]


@given(
    st.lists(st.none() | NAMES, max_size=5),
    st.dictionaries(st.sampled_from("ab"), st.frozensets(st.sampled_from(ADDRESSES))),
    st.none() | st.frozensets(st.sampled_from(ADDRESSES)),
)
def test_a_request_reaches_each_endpoint_that_has_its_model_and_is_allowed(
    lists: Sequence[frozenset[str] | None],
    holders: Mapping[str, frozenset[str]],
    subset: frozenset[str] | None,
) -> None:
    views = [endpoint_view(number, registered=each) for number, each in enumerate(lists, start=1)]
    made = Destinations(views, holders.get)
    for model in "abc":
        found = [
            (view.address in holders[model] if model in holders else view.has_registered(model))
            and (subset is None or view.address in subset)
            for view in views
        ]
        bits = made.of(RequestInfo(model, subset=subset))
        if model not in holders and not any(found):
            assert bits == -1
        else:
            assert [bool(bits >> place & 1) for place in range(len(views))] == found


def test_where_many_requests_may_go_is_remembered_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "MAX_KNOWN", 2)
    made = Destinations(PODS)

    for _ in range(2):
        for model, bits in (("slot", 1), ("elsewhere", 2), ("also here", 3), ("unknown", -1)):
            assert made.of(RequestInfo(model)) == bits
            assert len(made._known) <= 2
