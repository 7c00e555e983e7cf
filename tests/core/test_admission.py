"""The cap on unfinished requests per endpoint."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.admission import AdmissionSettings, admit
from extproc.core.types import Reason, Rejection, Snapshot
from tests.builders import endpoint_view, request
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


def test_requests_of_others_count_against_the_cap() -> None:
    busy = endpoint_view(num_pending=2, num_in_flight=0)

    assert isinstance(admit([busy], request(), AdmissionSettings(2)), Rejection)
    assert admit([busy], request(), AdmissionSettings(3)) == [busy]
