"""Access log entries become completions. Entries as Envoy 1.40 writes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from hypothesis import given
from hypothesis import strategies as st

from extproc.bounds import MAX_ATTEMPTS, MAX_DURATION_S, MAX_LAG_S, MAX_STATUS
from extproc.envoy.completions import ENTRIES_A_PASS, MAX_PUT_OFF, ORCA_HEADER, CompletionService
from extproc.learned.evidence import Evidence
from extproc.passes import PassScheduler
from extproc.pods.completion import Completion
from extproc.types import Outcome
from extproc.wire.rpc import Code
from tests.wire.fake_call import FakeCall, begin

START_WALL_S = 1_700_000_000
NOW_WALL_S = START_WALL_S + 3.0


def entry(
    *,
    status: int | None = 200,
    flags: Sequence[str] = (),
    pick_id: str | None = "pick-1",
    address: str = "10.0.0.1",
    details: str = "via_upstream",
    log_type: int = accesslog_pb2.DownstreamEnd,
) -> Any:
    made = accesslog_pb2.HTTPAccessLogEntry()
    common = made.common_properties
    common.access_log_type = log_type
    common.start_time.FromSeconds(START_WALL_S)
    common.time_to_first_upstream_rx_byte.FromMilliseconds(250)
    common.duration.FromMilliseconds(2500)
    common.upstream_request_attempt_count = 2
    common.response_flags.SetInParent()
    for flag in flags:
        setattr(common.response_flags, flag, True)
    if address:
        socket_address = common.upstream_remote_address.socket_address
        socket_address.address, socket_address.port_value = address, 8000
    if pick_id is not None:
        namespaces = common.metadata.filter_metadata
        namespaces["envoy.lb"].fields["x-gateway-destination-endpoint"].string_value = "10.0.0.1:1"
        namespaces["extproc.pick"].fields["id"].string_value = pick_id
    made.request.request_id = "request-1"
    if status is not None:
        made.response.response_code.value = status
    made.response.response_code_details = details
    return made


def encode(*entries: Any) -> bytes:
    message = als_pb2.StreamAccessLogsMessage()
    message.http_logs.log_entry.extend(entries)
    encoded: bytes = message.SerializeToString()
    return encoded


def into(seen: list[Completion]) -> Callable[[Completion, Hashable], None]:
    return lambda completion, _log: seen.append(completion)


def nobody(_completion: Completion, _log: Hashable) -> None: ...


def completions(*entries: Any) -> list[Completion]:
    seen: list[Completion] = []
    service = CompletionService(into(seen), wall_clock=lambda: NOW_WALL_S, reads_load=True)
    service.record(encode(*entries))
    return seen


def completion(**changes: Any) -> Completion:
    (only,) = completions(entry(**changes))
    return only


def test_an_entry_is_read_whole() -> None:
    logged = entry()
    logged.response.response_headers["endpoint-load-metrics"] = "TEXT x=1"
    logged.response.response_body_bytes = 2_500

    assert completions(logged) == [
        Completion(
            pick_id="pick-1",
            request_id="",  # its pick is known
            address="10.0.0.1:8000",
            status=200,
            outcome=Outcome.COMPLETED,
            is_from_endpoint=True,
            first_byte_s=0.25,
            duration_s=2.5,
            attempts=2,
            lag_s=0.5,
            orca="TEXT x=1",
            first_body_byte_s=0.25,
            shows_first_token=False,
            verdict=Evidence.SERVED,
            body_bytes=2_500,
        )
    ]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("1500000 us", 1.5),
        ("0 us", 0.0),
        ("- us", None),
        ("", None),
        ("-5 us", None),
        ("٣", None),
        ("9" * 5_000 + " us", MAX_DURATION_S),
    ],
)
def test_the_tag_with_the_first_body_byte_wins(told: str, expected: float | None) -> None:
    logged = entry()
    logged.common_properties.custom_tags["extproc-first-body-byte"] = told
    (read,) = completions(logged)

    assert (read.first_byte_s, read.first_body_byte_s) == (0.25, expected)
    assert read.shows_first_token


@pytest.mark.parametrize("start_s", [-(2**63), -1, 0, 2**63 - 1])
def test_absurd_numbers_of_an_entry_are_brought_into_range(start_s: int) -> None:
    logged = entry(status=2**32 - 1)
    common = logged.common_properties
    common.start_time.seconds = start_s
    common.duration.seconds, common.duration.nanos = 2**63 - 1, -(2**31)
    common.time_to_first_upstream_rx_byte.seconds = -5
    common.upstream_request_attempt_count = 2**32 - 1
    (read,) = completions(logged)

    assert (read.status, read.attempts) == (MAX_STATUS, MAX_ATTEMPTS)
    assert (read.first_byte_s, read.duration_s) == (0.0, MAX_DURATION_S)
    assert read.lag_s == (0.0 if start_s > NOW_WALL_S else MAX_LAG_S)


def test_a_request_id_is_cut_as_that_of_the_request_was() -> None:
    logged = entry(pick_id=None)
    logged.request.request_id = "x" * 60_000
    (read,) = completions(logged)

    assert read.request_id == "x" * 128


@pytest.mark.parametrize("status", [200, 206, 400, 404, 429])
def test_a_status_below_500_is_completed(status: int) -> None:
    assert completion(status=status).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_5xx_is_failed(status: int) -> None:
    assert completion(status=status).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    "flag",
    ["upstream_connection_termination", "upstream_remote_reset", "upstream_connection_failure",
     "upstream_request_timeout", "local_reset", "upstream_protocol_error", "stream_idle_timeout"],
)  # fmt: skip
def test_a_response_that_breaks_off_after_its_headers_is_failed(flag: str) -> None:
    assert completion(status=200, flags=[flag]).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("status", "expected"),
    [(200, "served"), (206, "served"), (302, "failed"), (400, "failed"), (401, "failed"),
     (404, "not_found"), (429, "full"), (499, "failed"), (0, "none"), (500, "failed"),
     (501, "failed"), (502, "broken"), (503, "full"), (504, "broken"), (505, "failed")],
)  # fmt: skip
def test_a_response_judges_its_endpoint_unless_the_client_left(status: int, expected: str) -> None:
    assert completion(status=status).verdict == expected
    assert completion(status=status, details="ext_proc_error").verdict is Evidence.NONE


@pytest.mark.parametrize(
    ("flag", "before_any_byte", "after"),
    [
        ("upstream_connection_failure", "unreachable", "broken"),
        ("upstream_remote_reset", "broken", "broken"),
        ("upstream_connection_termination", "broken", "broken"),
        ("upstream_request_timeout", "broken", "broken"),
        ("upstream_protocol_error", "broken", "broken"),
        ("upstream_overflow", "none", "none"),
        ("no_healthy_upstream", "none", "none"),
        ("stream_idle_timeout", "none", "none"),
        ("upstream_max_stream_duration_reached", "none", "none"),
        ("downstream_remote_reset", "unanswered", "none"),
        ("delay_injected", "none", "served"),
    ],
)
def test_flags_say_whether_the_endpoint_failed_and_whether_it_was_reached(
    flag: str, before_any_byte: str, after: str
) -> None:
    silent = entry(status=503, flags=[flag], details="upstream_reset")
    silent.common_properties.ClearField("time_to_first_upstream_rx_byte")

    assert completions(silent)[0].verdict == before_any_byte
    assert completion(status=200, flags=[flag]).verdict == after


def test_a_client_that_leaves_before_any_byte_of_a_response_was_not_answered() -> None:
    left = entry(status=0, flags=["downstream_connection_termination"], details="")
    left.common_properties.ClearField("time_to_first_upstream_rx_byte")
    answered = entry(status=200, flags=["downstream_connection_termination"], details="")

    assert completions(left)[0].verdict is Evidence.UNANSWERED
    assert completions(answered)[0].verdict is Evidence.NONE


def test_a_cancelled_request_does_not_judge_the_endpoint() -> None:
    flags = ["downstream_connection_termination", "upstream_remote_reset"]

    assert completion(flags=flags).verdict is Evidence.NONE


@pytest.mark.parametrize("flag", ["downstream_connection_termination", "downstream_remote_reset"])
@pytest.mark.parametrize("status", [None, 0, 200])
def test_a_client_that_leaves_is_cancelled(status: int | None, flag: str) -> None:
    assert completion(status=status, flags=[flag]).outcome is Outcome.CANCELLED


def test_a_client_that_leaves_is_cancelled_whatever_the_endpoint_does_then() -> None:
    flags = ["downstream_connection_termination", "upstream_remote_reset"]

    assert completion(flags=flags).outcome is Outcome.CANCELLED


@pytest.mark.parametrize("status", [None, 0, 499])
def test_an_end_without_a_response_is_cancelled(status: int | None) -> None:
    assert completion(status=status, details="").outcome is Outcome.CANCELLED


def test_an_endpoint_that_says_that_its_client_left_has_failed_a_request_like_with_any_4xx() -> (
    None
):
    assert completion(status=499).outcome is Outcome.COMPLETED
    assert completion(status=499).verdict is Evidence.FAILED


def test_other_flags_do_not_change_the_outcome() -> None:
    assert completion(flags=["delay_injected", "no_route_found"]).outcome is Outcome.COMPLETED


def test_a_404_of_envoy_differs_from_one_of_the_endpoint() -> None:
    assert completion(status=404).is_from_endpoint
    assert not completion(status=404, details="route_not_found", address="").is_from_endpoint


def test_entries_without_a_pick_are_handed_on_too() -> None:
    bare = accesslog_pb2.HTTPAccessLogEntry()
    bare.common_properties.metadata.filter_metadata["other"].fields["a"].string_value = "b"
    seen = completions(bare, entry(pick_id=None), entry(pick_id="pick-2"))

    assert [each.pick_id for each in seen] == ["", "", "pick-2"]
    assert (seen[0].address, seen[0].first_byte_s, seen[0].duration_s) == ("", None, None)
    assert seen[1].request_id == "request-1"


def test_the_namespace_without_our_key_names_no_pick() -> None:
    logged = entry(pick_id=None)
    logged.common_properties.metadata.filter_metadata["extproc.pick"].fields[
        "other"
    ].bool_value = True

    assert completions(logged)[0].pick_id == ""


def test_ipv6_is_bracketed() -> None:
    assert completion(address="2001:db8::1").address == "[2001:db8::1]:8000"


def test_duration_falls_back_to_the_last_byte_sent() -> None:
    logged = entry()
    logged.common_properties.ClearField("duration")
    logged.common_properties.time_to_last_downstream_tx_byte.FromMilliseconds(1500)

    assert completions(logged)[0].duration_s == 1.5


def test_lag_is_not_negative_when_clocks_disagree() -> None:
    logged = entry()
    logged.common_properties.start_time.FromSeconds(START_WALL_S + 3600)

    assert completions(logged)[0].lag_s == 0.0


@pytest.mark.parametrize(
    "log_type",
    [accesslog_pb2.DownstreamStart, accesslog_pb2.DownstreamPeriodic, accesslog_pb2.UpstreamEnd,
     accesslog_pb2.UpstreamPoolReady],
)  # fmt: skip
def test_entries_about_running_requests_are_passed_over(log_type: int) -> None:
    assert completions(entry(log_type=log_type), entry(log_type=accesslog_pb2.NotSet)) == [
        completion()
    ]


def test_intermediate_entries_are_passed_over() -> None:
    logged = entry(log_type=accesslog_pb2.NotSet)
    logged.common_properties.intermediate_log_entry = True

    assert completions(logged) == []


def test_load_reports_are_read_only_where_pods_are_asked_for_them() -> None:
    logged, seen = entry(), list[Completion]()
    logged.response.response_headers[ORCA_HEADER] = "TEXT x=1"
    CompletionService(into(seen), wall_clock=lambda: NOW_WALL_S).record(encode(logged))

    assert [each.orca for each in (*seen, *completions(logged))] == ["", "TEXT x=1"]


def test_the_service_reports_the_number_of_open_logs() -> None:
    told: list[int] = []
    service = CompletionService(nobody, wall_clock=lambda: NOW_WALL_S, on_streams=told.append)
    sessions = [begin(service.methods(), "StreamAccessLogs")[1] for _ in range(2)]
    for session in sessions:
        session.closed()

    assert told == [1, 2, 1, 0]
    assert service.num_streams == 0


def test_an_entry_comes_with_what_brought_it_and_the_end_of_a_stream_is_told() -> None:
    brought: list[Any] = []
    ended: list[Any] = []
    service = CompletionService(
        lambda _, log: brought.append(log), wall_clock=lambda: NOW_WALL_S, on_lost=ended.append
    )
    sessions = [begin(service.methods(), "StreamAccessLogs")[1] for _ in range(2)]
    for session in sessions:
        session.receive(encode(entry()))
    sessions[0].closed()
    service.record_relayed([entry().SerializeToString()], "link")

    assert brought == [*sessions, "link"]
    assert ended == sessions[:1]


def test_a_stream_hands_on_its_messages_and_ends_with_its_peer() -> None:
    seen: list[Completion] = []
    service = CompletionService(into(seen), wall_clock=lambda: NOW_WALL_S)
    call, session = begin(service.methods(), "StreamAccessLogs")
    session.receive(als_pb2.StreamAccessLogsMessage().SerializeToString())
    session.receive(encode(entry(pick_id="a"), entry(pick_id="b")))
    session.receive(encode(entry(pick_id="c")))
    session.half_close()

    assert [each.pick_id for each in seen] == ["a", "b", "c"]
    assert (call.sent, call.code) == ([b""], Code.OK)


class Later:
    """Rounds of an event loop: what is called later is called by `round`."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self.turns = PassScheduler(self._call_later)

    def _call_later(self, _after_s: float, callback: Callable[[], None]) -> Any:
        self._calls.append(callback)

    def round(self) -> bool:
        """Call what was put off until this round; return whether there was any."""
        calls, self._calls = self._calls, []
        for call in calls:
            call()
        return bool(calls)


def taking_turns(**options: Any) -> tuple[Later, list[str], FakeCall, Any]:
    """A stream whose long messages take turns, and the ids of the picks that it has ended."""
    seen, later = list[str](), Later()
    service = CompletionService(
        lambda each, _: seen.append(each.pick_id),
        wall_clock=lambda: NOW_WALL_S,
        pass_scheduler=later.turns,
        **options,
    )
    call, session = begin(service.methods(), "StreamAccessLogs")
    return later, seen, call, session


def named(numbers: Iterable[int]) -> bytes:
    return encode(*(entry(pick_id=str(each)) for each in numbers))


@given(st.lists(st.integers(0, 20), max_size=8), st.data())
def test_long_messages_are_read_in_passes_in_their_order(
    lengths: list[int], data: st.DataObject
) -> None:
    later, seen, _, session = taking_turns()
    begun, longest = 0, 0
    for length in lengths:
        session.receive(named(range(begun, begun + length)))
        begun += length
        before = len(seen)
        if data.draw(st.booleans()):
            later.round()
            longest = max(longest, len(seen) - before)
    while later.round():
        pass

    assert seen == [str(each) for each in range(begun)]
    assert longest <= ENTRIES_A_PASS


def test_what_is_left_of_long_messages_is_read_when_their_stream_ends() -> None:
    for end in ("half_close", "closed"):
        later, seen, _, session = taking_turns()
        session.receive(named(range(3 * ENTRIES_A_PASS)))
        at_once = len(seen)
        getattr(session, end)()

        assert (at_once, len(seen)) == (ENTRIES_A_PASS, 3 * ENTRIES_A_PASS)
        later.round()
        assert len(seen) == 3 * ENTRIES_A_PASS


def test_a_stream_that_sends_more_than_there_is_time_for_is_read_at_once() -> None:
    _, seen, _, session = taking_turns()
    for _ in range(MAX_PUT_OFF):
        session.receive(named(range(2 * ENTRIES_A_PASS)))
    waiting = len(seen)
    session.receive(named(range(2 * ENTRIES_A_PASS)))

    assert (waiting, len(seen)) == (ENTRIES_A_PASS, (MAX_PUT_OFF + 1) * 2 * ENTRIES_A_PASS)


def test_a_message_that_cannot_be_read_does_not_cost_those_after_it() -> None:
    later, seen, call, session = taking_turns()
    session.receive(named(range(ENTRIES_A_PASS + 1)))
    session.receive(b"\xff\xff\xff")
    session.receive(named([99]))
    while later.round():
        pass

    assert call.code is Code.INVALID_ARGUMENT
    assert seen == [*map(str, range(ENTRIES_A_PASS + 1)), "99"]


def test_garbage_ends_the_stream_as_an_invalid_argument() -> None:
    garbage: list[str] = []
    service = CompletionService(
        nobody,
        wall_clock=lambda: NOW_WALL_S,
        on_garbage=lambda: garbage.append("once"),
    )
    call, session = begin(service.methods(), "StreamAccessLogs")
    session.receive(b"\xff\xff\xff")

    assert (call.code, garbage) == (Code.INVALID_ARGUMENT, ["once"])


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda part: encode(entry()) + part))
def test_no_message_raises(message: bytes) -> None:
    service = CompletionService(nobody, wall_clock=lambda: NOW_WALL_S)
    call, session = begin(service.methods(), "StreamAccessLogs")
    session.receive(message)

    assert call.code in (None, Code.INVALID_ARGUMENT)


def relaying(*, is_ours: bool) -> tuple[CompletionService, list[Completion], list[bytes]]:
    """A service whose completions are all ours or all another router's; what it got, what left."""
    seen: list[Completion] = []
    passed_on: list[bytes] = []

    def complete(completion: Completion, _log: Hashable) -> bool:
        seen.append(completion)
        return is_ours

    service = CompletionService(
        complete,
        wall_clock=lambda: NOW_WALL_S,
        on_foreign=lambda _, serialized: passed_on.append(serialized),
    )
    return service, seen, passed_on


def test_entries_of_other_routers_are_relayed_and_read_there_as_from_envoy() -> None:
    first, _, passed_on = relaying(is_ours=False)
    second, seen, _ = relaying(is_ours=True)
    first.record(encode(entry(status=503)))
    second.record_relayed(passed_on)

    assert seen == completions(entry(status=503))


def test_entries_of_our_own_picks_are_not_relayed() -> None:
    service, _, passed_on = relaying(is_ours=True)
    service.record(encode(entry()))

    assert passed_on == []


def test_relayed_entries_are_never_relayed_again() -> None:
    service, seen, passed_on = relaying(is_ours=False)
    service.record_relayed([entry().SerializeToString()])

    assert (len(seen), passed_on) == (1, [])


def test_an_unreadable_entry_does_not_cost_the_others() -> None:
    num_garbage = 0

    def count() -> None:
        nonlocal num_garbage
        num_garbage += 1

    seen: list[Completion] = []
    service = CompletionService(into(seen), wall_clock=lambda: NOW_WALL_S, on_garbage=count)
    service.record_relayed([b"\xff\xff", entry().SerializeToString()])

    assert (num_garbage, len(seen)) == (1, 1)


# --- attempts ---------------------------------------------------------------------------------


def refusals(*entries: Any, is_ours: bool = True) -> tuple[list[Any], list[str]]:
    """The refusals that were read, and the pick ids of entries that are passed on."""
    seen: list[Any] = []
    foreign: list[str] = []

    def on_refusal(*what: str) -> bool:
        seen.append(what)
        return is_ours

    service = CompletionService(
        lambda *_: pytest.fail("no request has ended"),
        wall_clock=lambda: NOW_WALL_S,
        on_refusal=on_refusal,
        on_foreign=lambda pick_id, _: foreign.append(pick_id),
    )
    service.record(encode(*entries))
    service.record_relayed([each.SerializeToString() for each in entries])
    return seen, foreign


@pytest.mark.parametrize("status", [429, 503])
def test_an_attempt_that_its_endpoint_refused_is_told(status: int) -> None:
    attempt = entry(status=status, log_type=accesslog_pb2.UpstreamEnd)
    told = ("pick-1", "request-1", "10.0.0.1:8000")

    assert refusals(attempt) == ([told, told], [])
    assert refusals(attempt, is_ours=False) == ([told, told], ["pick-1"])


@pytest.mark.parametrize(
    "attempt", [{"status": 200}, {"status": 500}, {"status": 503, "flags": ["upstream_overflow"]}]
)
def test_other_attempts_say_nothing(attempt: Any) -> None:
    assert refusals(entry(**attempt, log_type=accesslog_pb2.UpstreamEnd)) == ([], [])
