"""What an endpoint's own status says of it."""

from __future__ import annotations

import pytest

from extproc.learned.evidence import Evidence, by_status


@pytest.mark.parametrize(
    ("statuses", "evidence"),
    [
        ((502, 504), Evidence.BROKEN),
        ((429, 503), Evidence.FULL),
        ((404,), Evidence.NOT_FOUND),
        ((300, 302, 307, 399), Evidence.FAILED),
        ((400, 403, 405, 499, 500, 501, 505), Evidence.FAILED),
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_any_status_but_of_success_is_evidence_whole_or_not(
    statuses: tuple[int, ...], evidence: Evidence, is_whole: bool
) -> None:
    assert {by_status(each, is_whole=is_whole) for each in statuses} == {evidence}


@pytest.mark.parametrize("status", [200, 204, 206])
def test_an_endpoint_has_served_only_what_came_whole(status: int) -> None:
    assert by_status(status, is_whole=True) is Evidence.SERVED
    assert by_status(status, is_whole=False) is Evidence.NONE
