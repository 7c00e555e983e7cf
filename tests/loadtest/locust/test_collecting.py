"""Records of a whole test: who is missing, what was cut, and the figures of the page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.loadtest.locust.collecting import Collecting, News
from extproc.loadtest.locust.livefigures import MAX_BINS, LiveFigures
from extproc.loadtest.locust.plan import Plan
from extproc.loadtest.measures import summarize_records
from extproc.workload.exchange import RequestRecord
from tests.loadtest.loads import SLO, records

PLAN = Plan(
    url="http://pods",
    api_key="",
    workload="zipf",
    rate_rps=10.0,
    num_requests=9,
    seed=1,
    num_adapters=0,
    listed=None,
    base_model="base",
    api="completions",
    ignore_eos=False,
    timeout_s=10.0,
    patience_s=0.0,
    mode="open",
    think_s=0.0,
    slo_ttft_s=SLO.ttft_s,
    slo_tpot_s=SLO.tpot_s,
    workers=("w1", "w2"),
    starts_at_s=0.0,
    run="1",
)


def some(num: int, error: str = "") -> list[RequestRecord]:
    return [RequestRecord(n, "a", "", 0.0, 0.0, 1.0, error=error) for n in range(num)]


def test_a_test_is_whole_with_the_final_news_of_all_processes() -> None:
    collecting = Collecting(PLAN, [5, 4])

    collecting.take("w1", News(some(5), [], [], True))
    assert collecting.unfinished(["w1", "w2"]) == ["w2"]
    collecting.take("w2", News(some(3), [], [], False))
    collecting.take("w2", News(some(1), [], [], True))

    assert collecting.is_whole
    assert collecting.words() == []
    assert (len(collecting.records), collecting.num_requests) == (9, 9)


def test_cut_and_unsent_requests_are_counted() -> None:
    collecting = Collecting(PLAN, [5, 4])

    collecting.take("w1", News([*some(1), *some(2, "stopped")], [], [], True))
    collecting.take("w2", News(some(4), [], [], True))

    assert collecting.words() == [
        "stopped in the middle: 2 requests in flight were cut, 2 were never sent"
    ]


def test_an_error_that_ended_the_sending_of_a_process_is_said_and_fails_the_test() -> None:
    collecting = Collecting(PLAN, [5, 4])

    collecting.take("w1", News(some(5), [], [], True))
    before = collecting.has_failed
    collecting.take("w2", News(some(1), [], [], True, "ValueError: no"))

    assert (before, collecting.has_failed) == (False, True)
    assert collecting.words() == [
        "stopped in the middle: 0 requests in flight were cut, 3 were never sent",
        "worker w2 stopped sending: ValueError: no",
    ]


def test_a_lost_process_leaves_requests_unaccounted_for() -> None:
    collecting = Collecting(PLAN, [5, 4])

    collecting.take("w1", News(some(5), [], [], True))
    collecting.take("w2", News(some(1), [], [], False))

    assert collecting.missing(["w1"]) == ["w2"]
    assert collecting.unfinished(["w1"]) == []
    assert collecting.words() == [
        "worker w2 was lost: 3 of its 4 requests were never accounted for"
    ]


def test_news_after_the_final_ones_or_of_unknown_workers_do_not_count() -> None:
    collecting = Collecting(PLAN, [5, 4])

    collecting.take("w1", News(some(5), [], [], True))
    collecting.take("w1", News(some(2), [], [], True))
    collecting.take("w9", News(some(2), [], [], False))

    assert len(collecting.records) == 5


def test_the_page_s_figures_are_those_of_the_summary() -> None:
    made = records(num=200)
    figures = LiveFigures(SLO)
    for record in made:
        figures.begin(record.sent_s)
        if record.first_token_s is not None:
            figures.take_first(record.sent_s)
        figures.take(record)
    summary = summarize_records(made, slo=SLO)

    told = figures.describe()

    whole = told["whole"]
    assert whole["sent"] == whole["over"] == whole["told"] == summary.num_requests
    assert whole["met"] == summary.num_met
    assert (told["errors"], whole["errors"]) == (summary.errors, sum(summary.errors.values()))
    assert sum(num for *_, num in told["served"]) == sum(summary.by_pod.values())


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=50))
def test_however_long_a_test_is_its_bins_are_few_and_hold_every_request(
    times_s: list[float],
) -> None:
    figures = LiveFigures(SLO)
    for index, at_s in enumerate(times_s):
        figures.begin(at_s)
        figures.take_first(at_s)
        figures.take(RequestRecord(index, "a", "", at_s, at_s, at_s + 1, at_s + 0.5, num_tokens=3))

    told = figures.describe()

    assert len(told["bins"]) <= MAX_BINS
    for name in ("sent", "over", "told", "met"):
        assert sum(each[name] for each in told["bins"]) == told["whole"][name]
    assert told["whole"]["sent"] == len(times_s)


def test_a_request_that_is_under_way_is_sent_and_not_over() -> None:
    figures = LiveFigures(SLO)
    figures.begin(2.5)

    told = figures.describe()

    assert [each["sent"] for each in told["bins"]] == [0, 0, 1]
    assert (told["whole"]["sent"], told["whole"]["over"]) == (1, 0)


def test_a_first_token_counts_before_the_request_is_over() -> None:
    figures = LiveFigures(SLO)
    figures.begin(0.5)
    figures.take_first(0.5)

    whole = figures.describe()["whole"]

    assert (whole["told"], whole["over"]) == (1, 0)
