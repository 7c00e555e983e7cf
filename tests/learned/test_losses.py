"""Each loss of a pod and each return is said once, whatever pods do and however many there are."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.losses import MAX_TITLES, STEADY_S, LogLine, Losses, PodPart
from extproc.types import EndpointView, Snapshot
from tests.builders import address

EXPIRY_S = 2.0
REFUSED = "connection refused"
UNAUTHORIZED = "HTTP 401 Unauthorized: pods.api_key_file?"


def text(line: LogLine) -> str:
    return line.template % line.values


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
        self.lines: list[LogLine] = []

    def view(self, number: int) -> EndpointView:
        reported_s = self.reported.get(number)
        return EndpointView(
            address(number),
            f"pod-{number}",
            is_ready=number not in self.unready,
            is_known=reported_s is not None and self.now - reported_s <= self.expiry_s,
            reported_at_s=reported_s,
            is_unreachable=number in self.refusing,
        )

    def report(self, number: int) -> None:
        self.refusing.discard(number)
        self.reported[number] = self.now
        self.losses.answered(address(number), PodPart.REPORTS, now=self.now)

    def fail(self, number: int, cause: str = REFUSED) -> None:
        if cause == REFUSED:
            self.refusing.add(number)
        self.losses.failed(address(number), PodPart.REPORTS, cause, now=self.now)

    def list_models(self, number: int, cause: str = "") -> None:
        if cause:
            self.losses.failed(address(number), PodPart.MODELS, cause, now=self.now)
        else:
            self.losses.answered(address(number), PodPart.MODELS, now=self.now)

    def look(self) -> list[str]:
        views = tuple(self.view(number) for number in self.pods)
        lines = self.losses.update(Snapshot(views, self.now))
        self.lines += lines
        return [text(line) for line in lines]

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

    assert fleet.run(41, [3]) == [
        "pod-3 (10.0.0.3:8000): no reports for 3 s: connection refused; lost: 1 of 4"
    ]
    assert fleet.run(100) == ["pod-3 (10.0.0.3:8000): reports again after 41 s; lost: 0 of 4"]
    assert [line.is_loss for line in fleet.lines] == [True, False]


def test_a_pod_without_a_name_is_called_by_its_address() -> None:
    losses = Losses()
    view = EndpointView(address(0), address(0), is_known=False)
    losses.update(Snapshot((view,), 0.0))
    for now in (0.0, 1.0):
        losses.failed(address(0), PodPart.REPORTS, REFUSED, now=now)
    [line] = losses.update(Snapshot((view,), 3.0))

    assert text(line) == "10.0.0.0:8000: no reports for 3 s: connection refused; lost: 1 of 1"


def test_a_pod_that_never_answered_is_said_once() -> None:
    fleet = healthy(2)
    fleet.pods.append(2)

    assert fleet.run(60, [2]) == [
        "pod-2 (10.0.0.2:8000): no reports for 3 s: connection refused; lost: 1 of 3"
    ]
    assert fleet.run(60) == ["pod-2 (10.0.0.2:8000): reports again after 59 s; lost: 0 of 3"]


def test_a_report_before_the_first_look_counts_as_one() -> None:
    fleet = Fleet(2)
    fleet.report(0)
    fleet.report(1)

    assert fleet.run(5, [1]) == [
        "pod-1 (10.0.0.1:8000): no reports for 4 s: connection refused; lost: 1 of 2"
    ]


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


def test_of_a_pod_that_lists_its_models_only_the_reports_are_lost() -> None:
    fleet = healthy(3)

    assert serve_without_reports(fleet, 20, 1) == [
        "pod-1 (10.0.0.1:8000): no reports for 2 s: HTTP 500; lost: 1 of 3"
    ]
    assert fleet.losses.warnings() == ["1 of 3 pods give no reports: HTTP 500: pod-1"]


def test_a_pod_that_hangs_is_lost_when_its_report_has_expired() -> None:
    fleet = healthy(2, expiry_s=20)

    assert fleet.run(19, [1], cause="timed out") == []
    assert fleet.run(5, [1], cause="timed out") == [
        "pod-1 (10.0.0.1:8000): no reports for 20 s: timed out; lost: 1 of 2"
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
    assert fleet.look() == [
        "pod-1 (10.0.0.1:8000): no reports for 3 s: connection refused; lost: 1 of 2"
    ]


def test_a_pod_that_flaps_is_said_once_until_it_is_steady() -> None:
    fleet = healthy(2)
    said = [line for _ in range(20) for line in fleet.run(4, [1]) + fleet.run(2)]

    assert said == ["pod-1 (10.0.0.1:8000): no reports for 3 s: connection refused; lost: 1 of 2"]
    assert fleet.run(20) == ["pod-1 (10.0.0.1:8000): reports again after 118 s; lost: 0 of 2"]


def test_failures_in_between_are_no_loss() -> None:
    fleet = healthy(1)
    for _ in range(50):
        fleet.fail(0, "HTTP 500 Internal Server Error")
        fleet.now += 1
        fleet.report(0)
        assert fleet.look() == []


def test_a_whole_fleet_takes_one_line() -> None:
    fleet = healthy(100)
    named = ", ".join(f"pod-{n} (10.0.0.{n}:8000)" for n in range(MAX_TITLES))

    assert fleet.run(60, range(100)) == [
        f"{named} and 90 more: no reports for 3 s: connection refused; lost: 100 of 100"
    ]
    assert fleet.run(60) == [f"{named} and 90 more: reports again after 60 s; lost: 0 of 100"]


def test_pods_lost_one_after_another_take_a_line_a_look() -> None:
    fleet = healthy(40)
    said = [fleet.run(1, range(0, 4 * each)) for each in range(1, 11)]
    said += [fleet.run(1, range(40)) for _ in range(5)]
    lines = [line for each in said for line in each]

    assert len(lines) == 10
    assert all(f"pod-{n} " in lines[n // 4] for n in range(40))
    assert [line.rpartition("; ")[2] for line in (lines[0], lines[-1])] == [
        "lost: 4 of 40",
        "lost: 40 of 40",
    ]


def test_a_cause_may_look_like_a_template() -> None:
    [line] = healthy(1).run(5, [0], cause="100 %s")

    assert line.endswith("no reports for 3 s: 100 %s; lost: 1 of 1")


def test_causes_that_differ_are_all_named() -> None:
    fleet = healthy(2)
    for _ in range(4):
        fleet.now += 1
        fleet.fail(0, "timed out")
        fleet.fail(1)
        said = fleet.look()
        if said:
            break

    [line] = said
    assert line.endswith(": no reports for 3 s: connection refused, timed out; lost: 2 of 2")


def test_a_pod_that_has_just_returned_counts_as_one_that_reports() -> None:
    fleet = healthy(2)
    fleet.run(5, [0])
    fleet.run(1)

    assert fleet.run(3, [1]) == [
        "pod-1 (10.0.0.1:8000): no reports for 3 s: connection refused; lost: 1 of 2"
    ]


def test_a_pod_that_is_removed_while_lost_is_not_back() -> None:
    fleet = healthy(3)
    fleet.run(5, [0, 1])
    fleet.pods = [2]
    assert fleet.run(20) == []
    fleet.pods = [1, 2]
    assert fleet.run(20) == []
    assert fleet.losses.warnings() == []


def test_pods_that_replace_lost_ones_are_neither_lost_nor_back() -> None:
    fleet = healthy(1)
    fleet.run(5, [0])
    fleet.pods = [1]
    fleet.look()
    assert fleet.losses.num_lost == 0
    assert fleet.run(20) == []
    assert len(fleet.run(5, [1])) == 1


def test_a_pod_that_is_not_ready_is_not_lost_but_one_that_was_lost_stays_so() -> None:
    fleet = healthy(3)
    fleet.unready = {0}
    fleet.pods.append(3)
    fleet.unready.add(3)
    assert fleet.run(30, [0, 3]) == []
    assert (fleet.losses.num_due, fleet.losses.num_lost) == (2, 0)
    fleet.unready.discard(3)
    assert fleet.run(30, [0, 3]) == [
        "pod-3 (10.0.0.3:8000): no reports for 3 s: connection refused; lost: 1 of 3"
    ]
    fleet.unready.add(3)
    assert fleet.run(30, [0, 3]) == []
    assert (fleet.losses.num_due, fleet.losses.num_lost) == (3, 1)
    assert fleet.run(30, [0]) == ["pod-3 (10.0.0.3:8000): reports again after 60 s; lost: 0 of 2"]


def test_models_that_fail_alone_are_said_once() -> None:
    fleet = healthy(2)
    who = "pod-0 (10.0.0.0:8000), pod-1 (10.0.0.1:8000)"

    assert fleet.run(30, models=UNAUTHORIZED) == [
        f"{who}: no list of models for 4 s: {UNAUTHORIZED}; lost: 2 of 2"
    ]
    assert fleet.run(30) == [f"{who}: list of models again after 30 s; lost: 0 of 2"]


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
    assert fleet.run(30) == ["pod-1 (10.0.0.1:8000): reports again after 30 s; lost: 0 of 2"]
    assert len(fleet.run(5, models=UNAUTHORIZED)) == 1
    assert len(fleet.run(30, [0, 1])) == 1
    said = fleet.run(30, models=UNAUTHORIZED)
    assert not [text for text in said if "models" in text]


def test_models_of_a_pod_that_refuses_are_not_lost_before_its_reports() -> None:
    """A scrape may hang where the list of models is refused."""
    fleet = healthy(1)
    fleet.refusing.add(0)
    for _ in range(9):
        fleet.now += 1
        fleet.list_models(0, REFUSED)
        assert fleet.look() == []


def test_warnings_say_what_is_lost_at_the_last_look() -> None:
    fleet = healthy(5)
    assert fleet.losses.warnings() == []
    fleet.run(5, [0, 1, 2, 3], models=UNAUTHORIZED)

    assert fleet.losses.warnings() == [
        "4 of 5 pods give no reports: connection refused: pod-0, pod-1, pod-2 and 1 more",
        f"1 of 5 pods give no list of models: {UNAUTHORIZED}: pod-4",
    ]
    fleet.run(2)
    assert fleet.losses.warnings() == []
    assert (fleet.losses.num_due, fleet.losses.num_lost) == (5, 0)


def test_a_pod_without_models_is_a_warning_only_while_it_is_due() -> None:
    fleet = healthy(1)
    fleet.run(5, models=UNAUTHORIZED)
    assert fleet.losses.warnings() == [f"1 of 1 pods give no list of models: {UNAUTHORIZED}: pod-0"]
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
    fleet.losses.answered("10.9.9.9:1", PodPart.MODELS, now=fleet.now)
    fleet.losses.failed("10.9.9.9:1", PodPart.REPORTS, REFUSED, now=fleet.now)

    assert fleet.run(5) == []


def test_a_long_cause_is_cut() -> None:
    [line] = healthy(1).run(5, [0], cause="x" * 10_000)

    assert len(line) < 300


@given(
    st.lists(
        st.tuples(
            st.integers(1, 9),
            st.sets(st.integers(0, 4)),
            st.sampled_from(["", "HTTP 401"]),
        ),
        max_size=12,
    )
)
def test_whatever_happens_losses_and_returns_alternate_and_all_return(
    phases: list[tuple[int, set[int], str]],
) -> None:
    fleet = healthy(5)
    for seconds, down, models in phases:
        fleet.run(seconds, down, models=models)
    fleet.run(int(STEADY_S) + 2)

    assert fleet.losses.warnings() == []
    for number in fleet.pods:
        own = [line for line in fleet.lines if f"pod-{number} " in text(line)]
        for part in (False, True):
            losses = [line.is_loss for line in own if ("models" in text(line)) is part]
            assert losses == [True, False] * (len(losses) // 2)


@given(st.lists(st.sets(st.integers(0, 29)), max_size=30))
def test_however_many_pods_flap_the_log_stays_small(phases: list[set[int]]) -> None:
    fleet = healthy(30)
    for down in phases:
        assert len(fleet.run(1, down)) <= 2
