"""Whether an InferencePool is there, as readiness, metrics and the log tell it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from extproc.discovery.kubernetes.inferencepool import PoolPresence, PoolsTogether
from extproc.discovery.kubernetes.objects import InferencePool, Metadata
from extproc.types import Endpoint

POOL = InferencePool(Metadata(name="pool", namespace="llm"))
GOING = InferencePool(Metadata(name="pool", namespace="llm", deletion_timestamp="2026-01-01"))


def presence(*told: InferencePool | None) -> PoolPresence:
    made = PoolPresence("pool")
    for each in told:
        made.record(each, "llm")
    return made


@pytest.mark.parametrize(
    ("told", "reasons", "found"),
    [
        ((), [], {}),
        ((None,), ["InferencePool llm/pool does not exist"], {"llm/pool": 0.0}),
        ((GOING,), ["InferencePool llm/pool does not exist"], {"llm/pool": 0.0}),
        ((None, POOL), [], {"llm/pool": 1.0}),
        ((POOL, None), [], {"llm/pool": 0.0}),
        ((POOL, GOING), [], {"llm/pool": 0.0}),
    ],
)
def test_a_pool_that_never_was_is_a_reason_not_to_be_ready(
    told: tuple[InferencePool | None, ...], reasons: list[str], found: dict[str, float]
) -> None:
    made = presence(*told)

    assert made.why_not_ready() == reasons
    assert made.found() == found


def test_the_log_names_a_pool_that_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        presence(None, POOL, None)

    assert [record.getMessage() for record in caplog.records] == [
        "InferencePool llm/pool does not exist: not ready until it does",
        "InferencePool llm/pool was deleted: requests get 503 until it exists again",
    ]


def test_the_endpoints_of_several_pools_are_handed_on_once_those_of_each_are_known() -> None:
    seen: list[dict[str, frozenset[str]]] = []
    one, two = Endpoint("10.0.0.1:8000"), Endpoint("10.0.0.2:8000")
    together = PoolsTogether(
        ["a", "b"], lambda found: seen.append({each.address: each.pools for each in found})
    )
    together.taker("a")([one])
    assert not seen
    together.taker("b")([two])
    together.taker("a")([])

    assert seen == [{one.address: {"a"}, two.address: {"b"}}, {two.address: {"b"}}]


def test_those_of_one_pool_are_handed_on_as_they_are() -> None:
    seen: list[Sequence[Endpoint]] = []
    endpoints = (Endpoint("10.0.0.1:8000"),)
    PoolsTogether(["a"], seen.append).taker("a")(endpoints)

    assert seen == [endpoints]
