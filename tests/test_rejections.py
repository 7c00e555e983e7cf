"""The wording of errors: statuses, fields, and what a client can do about them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from extproc import rejections
from extproc.types import Reason, Rejection

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("rejection", "status", "reason", "param", "retry_after_s"),
    [
        (rejections.model_not_found("a"), 404, Reason.MODEL_NOT_FOUND, "model", None),
        (rejections.no_endpoints("a"), 503, Reason.NO_ENDPOINTS, None, 1),
        (rejections.rank_too_high("a", 64, 8), 503, Reason.RANK_TOO_HIGH, "model", 1),
        (rejections.saturated("a", 5), 429, Reason.SATURATED, None, 5),
        (rejections.ENCODED_BODY, 415, Reason.ENCODED_BODY, None, None),
        (rejections.EMPTY_BODY, 400, Reason.INVALID_JSON, "model", None),
        (rejections.MISSING_MODEL, 400, Reason.MISSING_MODEL, "model", None),
        (rejections.TOO_MANY_LISTS, 429, Reason.TOO_MANY_LISTS, None, 1),
        (rejections.too_large(10), 413, Reason.BODY_TOO_LARGE, None, None),
        (rejections.BODY_NOT_SENT, 500, Reason.BODY_NOT_SENT, None, None),
        (rejections.invalid_header("x-a", "b"), 400, Reason.INVALID_HEADER, "x-a", None),
        (rejections.NO_WEBSOCKETS, 426, Reason.NO_WEBSOCKETS, None, None),
        (rejections.STORED_RESPONSE, 400, Reason.STORED_RESPONSE, "previous_response_id", None),
    ],
)
def test_each_error_has_its_status_reason_and_field(
    rejection: Rejection,
    status: int,
    reason: Reason,
    param: str | None,
    retry_after_s: int | None,
) -> None:
    assert (rejection.status, rejection.reason) == (status, reason)
    assert (rejection.param, rejection.retry_after_s) == (param, retry_after_s)
    assert rejection.message.endswith((".", ")."))
    assert "endpoint" not in rejection.message


def test_what_envoy_says_to_clients_is_in_the_pages_words() -> None:
    """Pods, as codes alone say endpoint."""
    files = [*(ROOT / "envoy").glob("*.yaml"), *(ROOT / "charts").rglob("*.yaml")]
    said = [
        message
        for path in files
        for message in re.findall(
            r"""["']?message["']?: ?["']([^"'\n]+ [^"'\n]+)["']""", path.read_text(encoding="utf-8")
        )
    ]

    assert "No pod was chosen for this request in time." in said
    assert len(set(said)) > 5
    assert [each for each in said if "endpoint" in each.lower()] == []


def test_an_unknown_model_is_named_as_the_engine_names_it() -> None:
    rejection = rejections.model_not_found("nope")

    assert rejection.message == "The model `nope` does not exist."
    assert rejection.model == "nope"


def test_the_size_limit_is_told() -> None:
    assert "4096 bytes" in rejections.too_large(4096).message


def test_errors_about_a_model_know_it_for_the_metrics() -> None:
    assert rejections.no_endpoints("a").model == rejections.saturated("a", 1).model == "a"
