"""Each loss of a pod and each return is said once, whatever pods do and however many there are."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.losses import MAX_LINES, MAX_RECENT, RECENT_S, STEADY_S, Losses
from extproc.core.losslines import Line, Part
from extproc.core.types import EndpointView, Snapshot

EXPIRY_S = 2.0
REFUSED = "connection refused"
UNAUTHORIZED = "HTTP 401 Unauthorized: pods.api_key_file?"


def address(number: int) -> str:
    return f"10.0.0.{number}:8000"


class Fleet:
    """Pods in virtual time, a second at a time; `lines` is the log."""

    def __init__(self, num_pods: int = 1, *, expiry_s: float = EXPIRY_S) -> None:
        self.losses = Losses()
        self.now = 100.0
        self.expiry_s = expiry_s
        self.pods = list(range(num_pods))
        self.unready: set[int] = set()
        self.reported: dict[int, float] = {}
        self.refusing: set[int] = set()
        self.silent: set[int] = set()
        self.lines: list[Line] = []

    def view(self, number: int) -> EndpointView:
        reported_s = self.reported.get(number)
        return EndpointView(
            address(number),
            f"pod-{number}",
            is_ready=number not in self.unready,
            is_known=reported_s is not None and self.now - reported_s <= self.expiry_s,
            reported_at_s=reported_s,
            is_unreachable=number in self.refusing,
            is_silent=number in self.silent,
        )

    def report(self, number: int) -> None:
        self.refusing.discard(number)
        self.reported[number] = self.now
        self.losses.answered(address(number), Part.REPORTS, now=self.now)

    def fail(self, number: int, cause: str = REFUSED) -> None:
        if cause == REFUSED:
            self.refusing.add(number)
        self.losses.failed(address(number), Part.REPORTS, cause, now=self.now)

    def list_models(self, number: int, cause: str = "") -> None:
        if cause:
            self.losses.failed(address(number), Part.MODELS, cause, now=self.now)
        else:
            self.losses.answered(address(number), Part.MODELS, now=self.now)

    def look(self) -> list[str]:
        views = tuple(self.view(number) for number in self.pods)
        lines = self.losses.look(Snapshot(views, self.now))
        self.lines += lines
        return [line.text for line in lines]

    def run(
        self,
        seconds: int,
        down: Iterable[int] = (),
        *,
        cause: str = REFUSED,
        models: str = "",
    ) -> list[str]:
        """Let so many seconds pass; return what was said. Ten requests a second for reports."""
        said, down = [], set(down)
        for _ in range(seconds):
            for _ in range(10):
                for number in self.pods:
                    if number in down:
                        self.fail(number, cause)
                    else:
                        self.report(number)
                self.now += 0.1
            for number in self.pods:
                self.list_models(number, cause if number in down else models)
            said += self.look()
        return said


def healthy(num_pods: int, *, expiry_s: float = EXPIRY_S) -> Fleet:
    fleet = Fleet(num_pods, expiry_s=expiry_s)
    fleet.look()
    assert fleet.run(3) == []
    return fleet


def test_a_loss_is_said_once_with_its_cause_and_so_is_the_return() -> None:
    fleet = healthy(4)

    assert fleet.run(41, [3]) == ["pod-3 (10.0.0.3:8000): no report for 2 s: connection refused"]
    assert fleet.run(100) == ["pod-3 (10.0.0.3:8000): reports again after 42 s"]
    assert [line.is_loss for line in fleet.lines] == [True, False]


def test_a_pod_without_a_name_is_called_by_its_address() -> None:
    losses = Losses()
    view = EndpointView(address(0), address(0), is_known=False)
    losses.look(Snapshot((view,), 0.0))
    for now in (0.0, 1.0):
        losses.failed(address(0), Part.REPORTS, REFUSED, now=now)
    [line, _] = losses.look(Snapshot((view,), 3.0))

    assert line.text == "10.0.0.0:8000: no report yet, after 3 s: connection refused"


def test_a_pod_that_never_answered_is_said_once() -> None:
    fleet = healthy(2)
    fleet.pods.append(2)

    assert fleet.run(60, [2]) == [
        "pod-2 (10.0.0.2:8000): no report yet, after 2 s: connection refused"
    ]
    assert fleet.run(60) == ["pod-2 (10.0.0.2:8000): reports again after 60 s"]


def test_a_report_before_the_first_look_counts_as_one() -> None:
    fleet = Fleet(2)
    fleet.report(0)
    fleet.report(1)

    assert fleet.run(5, [1]) == ["pod-1 (10.0.0.1:8000): no report for 3 s: connection refused"]


def test_a_pod_that_refuses_is_lost_though_its_report_is_still_trusted() -> None:
    fleet = healthy(2, expiry_s=600)

    assert len(fleet.run(5, [1])) == 1


def serve_without_reports(fleet: Fleet, seconds: int, *pods: int) -> list[str]:
    """Let metrics pages fail for a while, and models be listed all the same."""
    said = []
    for _ in range(seconds):
        for number in fleet.pods:
            if number in pods:
                fleet.fail(number, "HTTP 500")
            else:
                fleet.report(number)
        fleet.now += 1.0
        for number in fleet.pods:
            fleet.list_models(number)
        said += fleet.look()
    return said


def test_of_a_pod_that_answers_without_reports_it_is_said_that_it_gets_its_share() -> None:
    fleet = healthy(3)

    assert serve_without_reports(fleet, 20, 1) == [
        "pod-1 (10.0.0.1:8000): no report for 2 s: HTTP 500; it answers, so it gets its share by "
        "what routers have sent there"
    ]
    assert fleet.losses.warnings() == [
        "1 of 3 pods give no reports: HTTP 500: pod-1; 1 of them answer, and get requests by "
        "routers' counts"
    ]
    fleet.silent.add(1)
    fleet.look()
    assert fleet.losses.warnings() == ["1 of 3 pods give no reports: HTTP 500: pod-1"]


def test_where_no_pod_reports_and_some_answer_requests_do_not_fail() -> None:
    last = serve_without_reports(healthy(2), 20, 0, 1)[-1]
    assert last == "no pod reports (2 of 2 lost): routing goes by what routers have sent to each"


def test_a_pod_that_hangs_is_lost_when_its_report_has_expired() -> None:
    fleet = healthy(2, expiry_s=20)

    assert fleet.run(19, [1], cause="timed out") == []
    assert fleet.run(5, [1], cause="timed out") == [
        "pod-1 (10.0.0.1:8000): no report for 20 s: timed out"
    ]


def test_old_reports_without_failures_are_no_loss() -> None:
    """The router was suspended: the first request after that fails, the next does not."""
    fleet = healthy(2)
    fleet.now += 300

    assert fleet.look() == []
    fleet.fail(0, "timed out")
    assert fleet.look() == []
    assert fleet.run(20) == []


def test_one_failed_scrape_is_no_loss_however_long_ago() -> None:
    """The router was suspended just after a scrape had failed."""
    fleet = healthy(2)
    fleet.fail(0, "timed out")
    fleet.now += 100

    assert fleet.look() == []
    assert fleet.run(20) == []


def test_a_pod_that_becomes_ready_after_its_last_failure_is_not_yet_lost() -> None:
    fleet = healthy(1)
    fleet.pods.append(1)
    fleet.unready.add(1)
    fleet.look()
    fleet.fail(1)
    fleet.unready.clear()
    fleet.now += 3
    fleet.report(0)

    assert fleet.look() == []
    fleet.fail(1)
    assert fleet.look() == ["pod-1 (10.0.0.1:8000): no report yet, after 3 s: connection refused"]


def test_a_pod_that_flaps_is_said_once_until_it_is_steady() -> None:
    fleet = healthy(2)
    said = [line for _ in range(20) for line in fleet.run(4, [1]) + fleet.run(2)]

    assert said == ["pod-1 (10.0.0.1:8000): no report for 2 s: connection refused"]
    assert fleet.run(20) == ["pod-1 (10.0.0.1:8000): reports again after 119 s, lost 20 times"]


def test_failures_in_between_are_no_loss() -> None:
    fleet = healthy(1)
    for _ in range(50):
        fleet.fail(0, "HTTP 500 Internal Server Error")
        fleet.now += 1
        fleet.report(0)
        assert fleet.look() == []


def test_a_whole_fleet_takes_a_few_lines() -> None:
    fleet = healthy(100)

    assert fleet.run(60, range(100)) == [
        "100 pods: no report: connection refused: pod-0, pod-1, pod-2 and 97 more",
        "no pod reports (100 of 100 lost): requests fail unless a pod answers Envoy",
    ]
    assert fleet.run(60) == [
        "100 pods: reports again: pod-0, pod-1, pod-2 and 97 more",
        "100 of 100 pods report",
    ]


def test_pods_lost_one_after_another_share_lines_once_there_are_many() -> None:
    fleet = healthy(40)
    said = [fleet.run(1, range(0, 4 * each)) for each in range(1, 11)]
    said += [fleet.run(1, range(40)) for _ in range(5)]
    lines = [text for each in said for text in each]

    assert [each.partition(" ")[0] for each in lines[:8]] == [f"pod-{n}" for n in range(8)]
    assert lines[8] == "4 pods: no report: connection refused: pod-8, pod-9, pod-10 and 1 more"
    assert lines[-1].startswith("no pod reports (40 of 40 lost)")
    assert len(lines) == 8 + 8 + 1


def test_pods_lost_later_have_lines_of_their_own_again() -> None:
    fleet = healthy(40)
    for each in range(1, 8):
        fleet.run(1, range(0, 4 * each))
    fleet.run(int(RECENT_S) + 3, range(28))

    assert len(fleet.run(4, range(32))) == 4


def test_a_pod_that_is_lost_alone_always_has_a_line_of_its_own() -> None:
    fleet = healthy(30)
    said = [line for each in range(30) for line in fleet.run(1, range(each))]

    assert len(said) > MAX_RECENT
    assert all(text.startswith("pod-") for text in said)


def test_a_cause_may_look_like_a_template() -> None:
    [line, _] = healthy(1).run(5, [0], cause="100 %s")

    assert line.endswith("no report for 2 s: 100 %s")


def test_causes_that_differ_are_counted() -> None:
    fleet = healthy(8)
    for _ in range(4):
        fleet.now += 1
        for number in range(6):
            fleet.fail(number, "timed out" if number < 2 else REFUSED)
        said = fleet.look()
        if said:
            break

    assert said == [
        "6 pods: no report: connection refused (4), timed out (2): pod-0, pod-1, pod-2 and 3 more"
    ]


def test_the_last_pod_and_the_first_that_is_back_are_said() -> None:
    fleet = healthy(2)

    assert fleet.run(5, [0])[0].startswith("pod-0")
    assert fleet.run(5, [0, 1])[1].startswith("no pod reports (2 of 2 lost): ")
    assert fleet.run(20, [0])[1] == "1 of 2 pods report"


def test_a_pod_that_has_just_returned_counts_as_one_that_reports() -> None:
    fleet = healthy(2)
    fleet.run(5, [0])
    fleet.run(1)

    assert fleet.run(3, [1]) == ["pod-1 (10.0.0.1:8000): no report for 2 s: connection refused"]


def test_a_pod_that_is_removed_while_lost_is_not_back() -> None:
    fleet = healthy(3)
    fleet.run(5, [0, 1])
    fleet.pods = [2]
    assert fleet.run(20) == []
    fleet.pods = [1, 2]
    assert fleet.run(20) == []
    assert fleet.losses.warnings() == []


def test_a_fleet_that_is_removed_while_lost_is_back_when_other_pods_report() -> None:
    fleet = healthy(2)
    fleet.run(5, [0, 1])
    fleet.pods = []
    assert fleet.run(20) == []
    fleet.pods = [2, 3]
    assert fleet.run(20) == ["2 of 2 pods report"]
    assert fleet.run(5, [2, 3])[-1].startswith("no pod reports (2 of 2 lost)")


def test_a_fleet_that_is_replaced_while_lost_is_only_back_when_a_pod_reports() -> None:
    fleet = healthy(1)
    fleet.run(5, [0])
    fleet.pods = [1]
    fleet.look()
    assert fleet.losses.num_lost == 0
    assert fleet.run(3) == ["1 of 1 pods report"]


def test_a_pod_that_is_not_ready_is_not_lost_but_one_that_was_lost_stays_so() -> None:
    fleet = healthy(3)
    fleet.unready = {0}
    fleet.pods.append(3)
    fleet.unready.add(3)
    assert fleet.run(30, [0, 3]) == []
    assert (fleet.losses.num_due, fleet.losses.num_lost) == (2, 0)
    fleet.unready.discard(3)
    assert fleet.run(30, [0, 3]) == [
        "pod-3 (10.0.0.3:8000): no report yet, after 2 s: connection refused"
    ]
    fleet.unready.add(3)
    assert fleet.run(30, [0, 3]) == []
    assert (fleet.losses.num_due, fleet.losses.num_lost) == (3, 1)
    assert fleet.run(30, [0]) == ["pod-3 (10.0.0.3:8000): reports again after 61 s"]


def test_models_that_fail_alone_are_said_once() -> None:
    fleet = healthy(2)
    said = fleet.run(30, models=UNAUTHORIZED)
    back = fleet.run(30)

    assert said == [f"pod-{n} (10.0.0.{n}:8000): models: {UNAUTHORIZED}" for n in range(2)]
    assert back == [f"pod-{n} (10.0.0.{n}:8000): models: listed again after 31 s" for n in range(2)]


def test_models_of_many_pods_take_one_line() -> None:
    fleet = healthy(9)

    assert fleet.run(9, models=UNAUTHORIZED) == [
        f"9 pods: models: {UNAUTHORIZED}: pod-0, pod-1, pod-2 and 6 more"
    ]
    assert fleet.run(9) == ["9 pods: models: listed again: pod-0, pod-1, pod-2 and 6 more"]


def test_one_failed_list_is_no_loss() -> None:
    fleet = healthy(1)
    fleet.list_models(0, "timed out")

    assert fleet.run(0) == []
    fleet.now += 10
    fleet.report(0)
    assert fleet.look() == []


def test_models_of_a_pod_that_is_lost_are_neither_lost_nor_back() -> None:
    fleet = healthy(2)
    assert len(fleet.run(30, [1])) == 1
    assert fleet.run(30) == ["pod-1 (10.0.0.1:8000): reports again after 31 s"]
    assert len(fleet.run(5, models=UNAUTHORIZED)) == 2
    assert len(fleet.run(30, [0, 1])) == 3
    said = fleet.run(30, models=UNAUTHORIZED)
    assert not [text for text in said if "models" in text]


def test_warnings_say_what_is_lost_at_the_last_look() -> None:
    fleet = healthy(5)
    assert fleet.losses.warnings() == []
    fleet.run(5, [0, 1, 2, 3], models=UNAUTHORIZED)

    assert fleet.losses.warnings() == [
        "4 of 5 pods give no reports: connection refused: pod-0, pod-1, pod-2 and 1 more",
        f"1 of 5 pods list no models: {UNAUTHORIZED}: pod-4",
    ]
    fleet.run(2)
    assert fleet.losses.warnings() == []
    assert (fleet.losses.num_due, fleet.losses.num_lost) == (5, 0)


def test_a_pod_without_models_is_a_warning_only_while_it_is_due() -> None:
    fleet = healthy(1)
    fleet.run(5, models=UNAUTHORIZED)
    assert fleet.losses.warnings() == [f"1 of 1 pods list no models: {UNAUTHORIZED}: pod-0"]
    fleet.unready.add(0)
    fleet.look()

    assert fleet.losses.warnings() == []


def test_a_pod_that_loses_both_parts_is_one_warning() -> None:
    fleet = healthy(1)
    fleet.run(5, models=UNAUTHORIZED)
    fleet.run(5, [0])

    assert fleet.losses.warnings() == [f"1 of 1 pods give no reports: {REFUSED}: pod-0"]


def test_events_of_unknown_pods_are_ignored() -> None:
    fleet = healthy(1)
    fleet.losses.answered("10.9.9.9:1", Part.MODELS, now=fleet.now)
    fleet.losses.failed("10.9.9.9:1", Part.REPORTS, REFUSED, now=fleet.now)

    assert fleet.run(5) == []


def test_a_long_cause_is_cut() -> None:
    [line, _] = healthy(1).run(5, [0], cause="x" * 10_000)

    assert len(line) < 300


@given(
    st.lists(
        st.tuples(
            st.integers(1, 9),
            st.sets(st.integers(0, MAX_LINES - 1)),
            st.sampled_from(["", "HTTP 401"]),
        ),
        max_size=12,
    )
)
def test_whatever_happens_losses_and_returns_alternate_and_all_return(
    phases: list[tuple[int, set[int], str]],
) -> None:
    fleet = healthy(MAX_LINES)
    for seconds, down, models in phases:
        fleet.run(seconds, down, models=models)
    fleet.run(int(STEADY_S) + 2)

    assert fleet.losses.warnings() == []
    for number in fleet.pods:
        own = [line for line in fleet.lines if line.text.startswith(f"pod-{number} ")]
        for part in (False, True):
            losses = [line.is_loss for line in own if ("models: " in line.text) is part]
            assert losses == [True, False] * (len(losses) // 2)


@given(st.lists(st.sets(st.integers(0, 29)), max_size=30))
def test_however_many_pods_flap_the_log_stays_small(phases: list[set[int]]) -> None:
    fleet = healthy(30)
    for down in phases:
        assert len(fleet.run(1, down)) <= 2 * MAX_LINES + 1
