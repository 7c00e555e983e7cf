"""What counts as answered in time, and over which time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.observe.attainment import (
    MAX_LABEL_CHARS,
    OTHER,
    Attainment,
    CappedLabel,
)
from extproc.pods.completion import Completion
from extproc.rejections import model_not_found, no_endpoints, saturated
from extproc.types import Outcome, Rejection
from tests.builders import completion

PATH = "/v1/completions"


def answered(first_byte_s: float | None, duration_s: float | None, **more: Any) -> Completion:
    return completion(first_body_byte_s=first_byte_s, duration_s=duration_s, **more)


def judged(
    outcome: Outcome, status: int, first_byte_s: float | None, duration_s: float | None = None
) -> bool | None:
    """By an objective of one second."""
    entry = answered(first_byte_s, duration_s, outcome=outcome, status=status)
    counted = Attainment(1.0).completed(PATH, entry, 0.0)
    return None if counted is None else counted[1]


@pytest.mark.parametrize(
    ("status", "first_byte_s", "expected"),
    [
        (200, 0.2, True),
        (200, 1.0, True),
        (200, 1.1, False),
        (200, None, False),
        (404, 0.1, True),
        (429, 0.1, False),
        (500, 0.1, False),
        (503, None, False),
    ],
)
def test_an_answer_attains_by_its_status_and_its_first_byte(
    status: int, first_byte_s: float | None, expected: bool
) -> None:
    assert judged(Outcome.COMPLETED, status, first_byte_s) is expected


def test_another_objective_holds_from_the_next_answer_on() -> None:
    attainment = Attainment(1.0)
    attainment.configure(0.1)

    assert attainment.completed(PATH, answered(0.2, None), 0.0) == (PATH, False)


def test_an_answer_that_broke_off_is_missed_whatever_its_status() -> None:
    assert judged(Outcome.FAILED, 200, 0.1) is False


@pytest.mark.parametrize(
    ("first_byte_s", "duration_s", "expected"),
    [
        (0.5, 9.0, True),
        (1.5, 9.0, False),
        (None, 9.0, False),
        (None, 0.5, None),
        (None, None, None),
    ],
    ids=["had-it-in-time", "had-it-late", "waited-too-long", "left-early", "nobody-knows"],
)
def test_a_client_that_left_is_judged_by_what_it_had_got(
    first_byte_s: float | None, duration_s: float | None, expected: bool | None
) -> None:
    assert judged(Outcome.CANCELLED, 0, first_byte_s, duration_s) is expected


@pytest.mark.parametrize(
    ("rejection", "expected"),
    [
        (saturated("a", 1), (PATH, False)),
        (no_endpoints("a"), (PATH, False)),
        (model_not_found("a"), None),
    ],
)
def test_our_rejections_are_missed_unless_the_client_erred(
    rejection: Rejection, expected: tuple[str, bool] | None
) -> None:
    assert Attainment(1.0).rejected(PATH, rejection, now=0.0) == expected


def test_each_path_has_its_share_and_old_requests_leave_it() -> None:
    attainment = Attainment(1.0, window_s=10.0)
    attainment.completed("/a", answered(0.1, 0.2), 0.0)
    attainment.completed("/a", answered(2.0, 2.1), 0.5)
    attainment.completed("/b", answered(0.1, 0.2), 5.0)

    assert attainment.recent(now=9.0) == {"/a": (1, 2), "/b": (1, 1)}
    assert attainment.recent(now=12.0) == {"/b": (1, 1)}
    assert attainment.recent(now=99.0) == {}
    assert attainment.counts == {("/a", "true"): 1, ("/a", "false"): 1, ("/b", "true"): 1}


def test_paths_beyond_the_limit_share_one_label() -> None:
    attainment = Attainment(1.0, max_paths=2)
    for path in ("/a", "/b", "/c", "/d", "/a"):
        attainment.rejected(path, no_endpoints(), now=0.0)

    assert attainment.recent(now=0.0) == {
        "/a": (0, 2),
        "/b": (0, 1),
        OTHER: (0, 2),
    }


def test_another_objective_holds_from_the_next_request_on() -> None:
    attainment = Attainment(1.0)
    attainment.ttft_s = 3.0

    assert attainment.completed(PATH, answered(2.0, 2.0), 0.0) == (PATH, True)


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=200))
def test_the_window_counts_what_is_younger_than_it_to_a_second(
    requests: list[tuple[float, bool]],
) -> None:
    attainment, now, seen = Attainment(1.0, window_s=10.0), 0.0, []
    for pause_s, is_fast in requests:
        now += pause_s
        attainment.completed(PATH, answered(0.1 if is_fast else 2.0, 2.0), now)
        seen.append((now, is_fast))
    num_attained, num_requests = attainment.recent(now=now).get(PATH, (0, 0))
    surely = [fast for when, fast in seen if when > now - 9.0]
    perhaps = [fast for when, fast in seen if when > now - 11.0]

    assert len(surely) <= num_requests <= len(perhaps)
    assert sum(surely) <= num_attained <= sum(perhaps)


def test_a_value_that_is_too_long_has_one_label_for_all_its_beginning() -> None:
    labels, beginning = CappedLabel(1), "x" * MAX_LABEL_CHARS

    assert [labels.cap(beginning + rest) for rest in "ab"] == [beginning, beginning]
