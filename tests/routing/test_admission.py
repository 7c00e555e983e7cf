"""The cap on unfinished requests per endpoint, and what is shed before the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.admission import AdmissionSettings, Ranks, admit, fitting
from extproc.tenancy import Claim
from extproc.types import EndpointView, Reason, Rejection, Snapshot
from tests.builders import endpoint_view, request
from tests.routing.scene import rejected
from tests.strategies import snapshots


@given(snapshots())
def test_without_a_cap_all_candidates_are_admitted(snapshot: Snapshot) -> None:
    assert admit(snapshot.endpoints, request(), AdmissionSettings()) == snapshot.endpoints


@given(snapshots(), st.integers(1, 5))
def test_a_cap_leaves_exactly_the_endpoints_below_it_or_sheds(snapshot: Snapshot, cap: int) -> None:
    below = [view for view in snapshot.endpoints if view.num_pending < cap]

    admitted = admit(snapshot.endpoints, request(), AdmissionSettings(cap, retry_after_s=3))

    if below:
        assert admitted == below
    else:
        assert isinstance(admitted, Rejection)
        assert (admitted.status, admitted.reason) == (429, Reason.SATURATED)
        assert (admitted.retry_after_s, admitted.model) == (3, "a")


@pytest.mark.parametrize("known", [{"num_pending": 2, "num_told": 2}, {"num_foreign": 2}])
def test_requests_of_others_count_against_the_cap(known: dict[str, int]) -> None:
    busy = endpoint_view(**known)

    assert isinstance(admit([busy], request(), AdmissionSettings(2)), Rejection)
    assert admit([busy], request(), AdmissionSettings(3)) == [busy]


def test_told_requests_that_the_report_does_not_show_leave_room() -> None:
    told = endpoint_view(num_pending=5, num_told=4, num_unseen=3)

    assert admit([told], request(), AdmissionSettings(3)) == [told]
    assert isinstance(admit([told], request(), AdmissionSettings(2)), Rejection)


# --- sheddable requests ----------------------------------------------------------------------

SHEDS = AdmissionSettings()
BATCH = request(claim=Claim(priority=-1))
IDLE = endpoint_view(1, num_waiting=5, kv_usage_ratio=0.8)


@pytest.mark.parametrize(
    "loaded",
    [endpoint_view(2, num_waiting=6), endpoint_view(3, kv_usage_ratio=0.81)],
    ids=["queue", "kv-cache"],
)
def test_a_sheddable_request_goes_only_where_there_is_room(loaded: EndpointView) -> None:
    assert admit([loaded, IDLE], BATCH, SHEDS) == [IDLE]
    shed = rejected(admit([loaded], BATCH, SHEDS))
    assert (shed.status, shed.reason, shed.retry_after_s) == (429, Reason.SATURATED, 1)


@pytest.mark.parametrize("priority", [0, 9])
def test_without_a_negative_priority_nothing_is_shed_for_load(priority: int) -> None:
    loaded = endpoint_view(num_waiting=100, kv_usage_ratio=1.0)

    assert admit([loaded], request(claim=Claim(priority=priority)), SHEDS) == [loaded]


def test_a_sheddable_request_heeds_the_cap_too() -> None:
    busy = endpoint_view(1, num_pending=2)
    settings = AdmissionSettings(2)

    assert isinstance(admit([busy], BATCH, settings), Rejection)
    assert admit([busy, IDLE], BATCH, settings) == [IDLE]


def test_an_endpoint_that_has_not_reported_is_not_known_to_be_loaded() -> None:
    silent = endpoint_view(is_known=False)

    assert admit([silent], BATCH, SHEDS) == [silent]


# --- ranks -----------------------------------------------------------------------------------

RANKED = AdmissionSettings(ranks=Ranks({"a": 32}))
SMALL, EXACT = endpoint_view(1, max_lora_rank=16), endpoint_view(2, max_lora_rank=32)
UNLIMITED = endpoint_view(3)


def test_an_adapter_goes_only_to_endpoints_that_take_its_rank_or_do_not_say() -> None:
    assert fitting([SMALL, EXACT, UNLIMITED], request("a"), RANKED) == [EXACT, UNLIMITED]


@pytest.mark.parametrize("model", ["b", None], ids=["of unknown rank", "base"])
def test_what_has_no_known_rank_goes_everywhere(model: str | None) -> None:
    assert fitting([SMALL, EXACT], request(model), RANKED) == [SMALL, EXACT]


def test_an_adapter_that_fits_nowhere_is_refused_with_its_rank_and_the_limit() -> None:
    refused = fitting([SMALL, endpoint_view(4, max_lora_rank=8)], request("a"), RANKED)

    assert isinstance(refused, Rejection)
    assert (refused.status, refused.reason) == (503, Reason.RANK_TOO_HIGH)
    assert (refused.param, refused.model, refused.retry_after_s) == ("model", "a", 1)
    assert "rank 32" in refused.message
    assert "up to 16" in refused.message


def test_where_no_endpoint_is_there_the_rank_is_not_to_blame() -> None:
    assert fitting([], request("a"), RANKED) == []
