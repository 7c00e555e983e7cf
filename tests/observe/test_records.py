"""A decision in plain values that can be encoded, whatever the core's own are."""

from __future__ import annotations

from extproc.bounds import MAX_DURATION_S
from extproc.observe.explanation import describe_result
from extproc.observe.outcomes import MAX_TEXT_CHARS
from extproc.pods.completion import DecisionRecord
from extproc.rejections import late, no_endpoints, saturated
from extproc.types import Reason, Rejection
from tests.builders import endpoint_view, pick, request


def test_numbers_are_within_their_fields_and_texts_have_an_end() -> None:
    view = endpoint_view(
        1, name="n" * 9_999, pending_by_adapter={"a": 2**40}, num_pending=-1, kv_usage_ratio=7.0
    )
    info = request("a", body_bytes=10**30, request_id="\ud800")
    decision = pick(info=info, candidates=(view,))
    described = describe_result(DecisionRecord(decision, 0.0, 0.0))["pick"]
    [candidate] = described["candidates"]

    assert (described["body_bytes"], described["request_id"]) == (2**64 - 1, "?")
    assert (candidate["num_pending"], candidate["num_adapter_pending"]) == (0, 2**32 - 1)
    assert (len(candidate["name"]), candidate["kv_usage_ratio"]) == (MAX_TEXT_CHARS, 1.0)


def test_a_rewritten_request_has_both_names() -> None:
    decision = pick(info=request("a", written="alias"))
    described = describe_result(DecisionRecord(decision, 0.0, 0.0))["pick"]

    assert (described["model"], described["served_model"]) == ("alias", "a")
    assert described["adapter"] == "a"


def test_a_base_model_has_no_adapters_counts() -> None:
    decision = pick(info=request(None), candidates=(endpoint_view(1),))
    described = describe_result(DecisionRecord(decision, 0.0, 0.0))["pick"]

    assert described["adapter"] is None
    assert described["candidates"][0]["num_adapter_pending"] == 0


def test_a_rejection_says_when_to_come_again_if_it_is_known() -> None:
    rejections = (saturated("a", 2**40), no_endpoints("a"), Rejection(404, Reason.UNKNOWN_PATH, ""))
    described = [describe_result(DecisionRecord(each, 0.0, 0.0)) for each in rejections]

    assert [each["rejection"]["retry_after_seconds"] for each in described] == [2**32 - 1, 1, None]


def test_what_was_held_says_how_long_and_a_refusal_why() -> None:
    decisions = (
        pick(),
        pick(held_s=0.5, held_for="slot"),
        pick(held_s=1e99),
        late("a", 1, why="w" * 9_999),
    )
    plain, held, endless, refused = (
        describe_result(DecisionRecord(each, 0.0, 0.0)) for each in decisions
    )

    assert (plain["pick"]["held_seconds"], plain["pick"]["held_for"]) == (None, "")
    assert (held["pick"]["held_seconds"], held["pick"]["held_for"]) == (0.5, "slot")
    assert endless["pick"]["held_seconds"] == MAX_DURATION_S
    assert len(refused["rejection"]["why"]) == MAX_TEXT_CHARS
