"""Envoy's gRPC access log: which requests finished, how, and how fast.

One message carries many entries, so this is the cheapest way to learn how a pick ended, and no
response in progress depends on the router. An entry names its pick by an id that the pick set in
Envoy's dynamic metadata; it also has `x-request-id`, for a request that lost its metadata to a
reset.

Of several routers behind one Envoy, one gets all entries. It relays those about other routers'
picks; relayed entries are never relayed again.

Envoy opens a log stream with the first entry that it sends, not when it starts: without a stream,
either nothing was logged yet or no access log is configured.

Source: envoyproxy.io/docs/envoy/latest/api-v3/data/accesslog/v3/accesslog.proto.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any

from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf.message import DecodeError

from extproc.bounds import (
    MAX_ATTEMPTS,
    MAX_DURATION_S,
    MAX_LAG_S,
    MAX_REQUEST_ID_CHARS,
    MAX_RESPONSE_BYTES,
    MAX_STATUS,
    between,
)
from extproc.learned.evidence import FULL_STATUSES, Evidence, by_status
from extproc.meters import Meters
from extproc.passes import PassScheduler, TimerHandle, make_all
from extproc.pods.completion import Completion
from extproc.protocol import PICK_ID_KEY, PICK_NAMESPACE
from extproc.types import Outcome
from extproc.wire.rpc import Call, Code, Metadata, Method, Session

METHOD = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
ORCA_HEADER = "endpoint-load-metrics"
MAX_MESSAGE_BYTES = 1024 * 1024
"""One message of a log. Envoy sends one with each 16 KiB of entries (`buffer_size_bytes`). A byte
takes up to 30 of memory."""
MAX_ENTRIES = 8192
"""Entries read of one message, some 50 us each. Real ones have several hundred bytes."""
ENTRIES_A_PASS = 8
MAX_PUT_OFF = 64
"""Messages of a stream that wait for their turn. When it sends more than there is time for, what it
has sent is read at once, and its connection not in the meantime."""
FIRST_BODY_BYTE_TAG = "extproc-first-body-byte"
"""Custom tag of an entry: `N us` from the request's arrival to the first byte of the response body,
`- us` if there was none. Envoy's own fields have the time of the response headers."""

_USUAL = Outcome.COMPLETED, Evidence.SERVED  # to look up a member takes 0.1 us
# Entries without a type come from an Envoy older than the field. All other types report on a
# request in progress, or on one upstream attempt of it.
_NO_TYPE, _FINAL_TYPE = accesslog_pb2.NotSet, accesslog_pb2.DownstreamEnd
_ATTEMPT_TYPE = accesslog_pb2.UpstreamEnd

# Response flags of requests that failed at the endpoint or on the way to it; the status may still
# be 200 if the response broke off after its headers.
_FAILURE_FLAGS = (
    "failed_local_healthcheck",
    "no_healthy_upstream",
    "upstream_request_timeout",
    "local_reset",
    "upstream_remote_reset",
    "upstream_connection_failure",
    "upstream_connection_termination",
    "upstream_overflow",
    "upstream_retry_limit_exceeded",
    "stream_idle_timeout",
    "upstream_max_stream_duration_reached",
    "duration_timeout",
    "upstream_protocol_error",
    "no_cluster_found",
    "dns_resolution_failure",
)
# Those that the endpoint or its host caused. Not a full circuit breaker, the lack of a host, or an
# idle or overlong stream, whose length the client chose.
_ENDPOINTS_FLAGS = (
    "upstream_request_timeout",
    "upstream_protocol_error",
    "upstream_remote_reset",
    "upstream_connection_failure",
    "upstream_connection_termination",
)
_OK = 200
_CLIENT_LEFT_FLAGS = ("downstream_connection_termination", "downstream_remote_reset")
_CLIENT_LEFT = 499  # in the words of some proxies


@dataclass(eq=False)
class CompletionService:
    """Decodes access logs, and passes every finished request to a callable.

    Attributes:
        on_completion: Called once per finished request, with what brought its entry: Envoy's stream
            or a link; returns False if the pick is not ours.
        wall_clock: Wall seconds, for the lag.
        on_refusal: Called with the pick id, the request id and the endpoint's address for each
            attempt that an endpoint refused as it is full; returns False if the pick is not ours.
        on_garbage: Called once per malformed message or entry.
        on_foreign: Called with the pick id of each entry of Envoy's own stream that is not about a
            pick of ours, and the serialized `HTTPAccessLogEntry`.
        on_recorded: Called after each message of Envoy's own stream, and each pass of a long one;
            None where nobody waits for that.
        on_streams: Called with the number of open access logs whenever it changes.
        on_lost: Called with a stream of Envoy's that has closed.
        reads_load: Entries have the load reports that pods were asked for in response headers.
        pass_scheduler: Where all entries of a message but the first few wait, so that requests come
            in between; None for at once.
    """

    on_completion: Callable[[Completion, Hashable], bool | None]
    _: KW_ONLY
    wall_clock: Callable[[], float]
    on_refusal: Callable[[str, str, str], bool] = lambda *_: True
    on_garbage: Callable[[], None] = lambda: None
    on_foreign: Callable[[str, bytes], None] | None = None
    on_recorded: Callable[[], None] | None = None
    on_streams: Callable[[int], None] = lambda _: None
    on_lost: Callable[[Hashable], None] = lambda _: None
    reads_load: bool = False
    pass_scheduler: PassScheduler | None = None
    num_streams: int = 0

    def add_metrics(self, meters: Meters) -> None:
        """Register the streams that are open."""
        meters.add_gauge(
            "access_log_streams",
            "Open access log streams: one for each Envoy worker that has logged something.",
            lambda: self.num_streams,
        )

    def methods(self) -> tuple[Method, ...]:
        """Return StreamAccessLogs."""
        return (Method(METHOD, self._open, is_long_lived=True),)

    def record(self, message: bytes, log: Hashable = "") -> None:
        """Record the finished requests of one message of a stream of Envoy's.

        Raises:
            DecodeError: `message` is not an access log message, or too long; end the stream.
        """
        make_all(self.in_passes(message, log))

    def in_passes(self, message: bytes, log: Hashable) -> Iterator[None]:
        """Do the same, with a pass for each few entries."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise DecodeError(f"more than {MAX_MESSAGE_BYTES} bytes")
        entries = als_pb2.StreamAccessLogsMessage.FromString(message).http_logs.log_entry
        now_wall_s = self.wall_clock()
        if len(entries) > MAX_ENTRIES:
            self.on_garbage()
        for number, entry in enumerate(islice(entries, MAX_ENTRIES)):
            if number and number % ENTRIES_A_PASS == 0:
                if self.on_recorded is not None:
                    self.on_recorded()
                yield
            if not self._record(entry, now_wall_s, log) and self.on_foreign is not None:
                self.on_foreign(_pick_id(entry.common_properties), entry.SerializeToString())
        if self.on_recorded is not None:
            self.on_recorded()

    def record_relayed(self, entries: Iterable[bytes], link: Hashable = "") -> None:
        """Record finished requests relayed by another router: final entries, serialized."""
        now_wall_s = self.wall_clock()
        for serialized in islice(entries, MAX_ENTRIES):
            try:
                entry = accesslog_pb2.HTTPAccessLogEntry.FromString(serialized)
            except DecodeError:
                self.on_garbage()
                continue
            self._record(entry, now_wall_s, link)

    def _record(self, entry: Any, now_wall_s: float, log: Hashable) -> bool:
        """Record an entry; return False if it is about another router's pick."""
        common = entry.common_properties
        log_type = common.access_log_type
        if log_type == _ATTEMPT_TYPE:
            return not _is_refusal(entry) or self.on_refusal(
                _pick_id(common),
                entry.request.request_id[:MAX_REQUEST_ID_CHARS],
                _address(common.upstream_remote_address.socket_address),
            )
        if log_type != _FINAL_TYPE and (log_type != _NO_TYPE or common.intermediate_log_entry):
            return True
        completion = _completion(entry, common, now_wall_s, reads_load=self.reads_load)
        return self.on_completion(completion, log) is not False

    def _open(self, call: Call, metadata: Metadata) -> Session:
        self.count(1)
        return _Stream(self, call)

    def count(self, change: int) -> None:
        """Record that an access log was opened (1) or closed (-1)."""
        self.num_streams += change
        self.on_streams(self.num_streams)


@dataclass(eq=False)
class _Stream:
    """One worker thread of one Envoy."""

    service: CompletionService
    call: Call
    _put_off: deque[Iterator[None]] = field(default_factory=deque)
    _next_pass: TimerHandle | None = None

    def receive(self, message: bytes) -> None:
        self._put_off.append(self.service.in_passes(message, self))
        if self.service.pass_scheduler is None or len(self._put_off) > MAX_PUT_OFF:
            self._read_all()
        elif self._next_pass is None:
            self._read_on()

    def _read_all(self) -> None:
        if self._next_pass is not None:
            self._next_pass.cancel()
            self._next_pass = None
        while self._put_off:
            self._make_pass()

    def _read_on(self) -> None:
        """Make a pass, and have the next one wait for its turn."""
        self._next_pass = None
        try:
            self._make_pass()
        finally:
            if self._put_off and self.service.pass_scheduler is not None:
                self._next_pass = self.service.pass_scheduler.add(self._read_on)

    def _make_pass(self) -> None:
        is_over = True
        try:
            is_over = next(self._put_off[0], self) is not None
        except DecodeError:
            self.service.on_garbage()
            self.call.end(Code.INVALID_ARGUMENT, "not an access log message")
        finally:
            if is_over:
                self._put_off.popleft()

    def half_close(self) -> None:
        self._read_all()
        self.call.send(als_pb2.StreamAccessLogsResponse().SerializeToString())
        self.call.end()

    def closed(self) -> None:
        self._read_all()
        self.service.count(-1)
        self.service.on_lost(self)


def _completion(entry: Any, common: Any, now_wall_s: float, *, reads_load: bool) -> Completion:
    # Each look at a field takes a thousand instructions.
    response, flags = entry.response, common.response_flags
    status, pick_id = response.response_code.value, _pick_id(common)
    if status > MAX_STATUS:
        status = MAX_STATUS
    if not flags.ByteSize():  # mostly none of thirty is set
        flags = None
    tag, start = common.custom_tags.get(FIRST_BODY_BYTE_TAG), common.start_time
    first_byte_s = _seconds(common, "time_to_first_upstream_rx_byte")
    duration_s = _seconds(common, "duration")
    if duration_s is None:
        duration_s = _seconds(common, "time_to_last_downstream_tx_byte")
    lag_s = now_wall_s - (start.seconds + start.nanos * 1e-9 + (duration_s or 0.0))
    is_from_endpoint = response.response_code_details == "via_upstream"
    if status == _OK and flags is None and is_from_endpoint:  # as mostly
        outcome, verdict = _USUAL
    else:
        own_status, has_answered = status if is_from_endpoint else None, first_byte_s is not None
        outcome = _outcome(flags, status, own_status)
        verdict = _verdict(flags, outcome, own_status, has_answered=has_answered)
    return Completion(
        pick_id=pick_id,
        request_id="" if pick_id else entry.request.request_id[:MAX_REQUEST_ID_CHARS],
        address=_address(common.upstream_remote_address.socket_address),
        status=status,
        outcome=outcome,
        is_from_endpoint=is_from_endpoint,
        first_byte_s=first_byte_s,
        duration_s=duration_s,
        attempts=min(common.upstream_request_attempt_count, MAX_ATTEMPTS),
        lag_s=lag_s if 0.0 < lag_s < MAX_LAG_S else between(lag_s, MAX_LAG_S),
        orca=response.response_headers.get(ORCA_HEADER, "") if reads_load else "",
        first_body_byte_s=first_byte_s if tag is None else _tagged_s(tag),
        shows_first_token=tag is not None,
        verdict=verdict,
        body_bytes=min(response.response_body_bytes, MAX_RESPONSE_BYTES),
    )


def _verdict(flags: Any, outcome: Outcome, status: int | None, *, has_answered: bool) -> Evidence:
    """Judge the endpoint by an entry; `status` is the endpoint's own, None without one."""
    if outcome is Outcome.CANCELLED:
        return Evidence.NONE if has_answered or status is not None else Evidence.UNANSWERED
    if flags and flags.upstream_connection_failure and not has_answered:
        return Evidence.UNREACHABLE
    if flags and any(getattr(flags, name) for name in _ENDPOINTS_FLAGS):
        return Evidence.BROKEN
    if status is None:
        return Evidence.NONE
    return by_status(status, is_whole=outcome is Outcome.COMPLETED)


def _is_refusal(entry: Any) -> bool:
    """Return whether an attempt's endpoint has answered that it is full."""
    common = entry.common_properties
    is_its_own = not any(getattr(common.response_flags, name) for name in _FAILURE_FLAGS)
    return entry.response.response_code.value in FULL_STATUSES and is_its_own


def _tagged_s(tag: str) -> float | None:
    number = tag.removesuffix(" us")
    if not (number.isascii() and number.isdecimal()):
        return None
    return min(float(number) / 1e6, MAX_DURATION_S)  # int() refuses thousands of digits


def _pick_id(common: Any) -> str:
    # Not by brackets: reading a missing key would create it.
    namespace = common.metadata.filter_metadata.get(PICK_NAMESPACE)
    value = None if namespace is None else namespace.fields.get(PICK_ID_KEY)
    return "" if value is None else value.string_value


def _outcome(flags: Any, status: int, own_status: int | None) -> Outcome:
    if flags:
        if any(getattr(flags, name) for name in _CLIENT_LEFT_FLAGS):
            return Outcome.CANCELLED
        if any(getattr(flags, name) for name in _FAILURE_FLAGS):
            return Outcome.FAILED
    # An endpoint that says so is wrong: its client is the data plane, which would have a flag.
    if status == 0 or (status == _CLIENT_LEFT and own_status is None):
        return Outcome.CANCELLED
    return Outcome.FAILED if status >= 500 else Outcome.COMPLETED


def _address(socket_address: Any) -> str:
    host, port = socket_address.address, socket_address.port_value
    if not host:
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"  # `Address` costs twice as much


def _seconds(common: Any, name: str) -> float | None:
    duration = getattr(common, name)
    found_s = duration.seconds + duration.nanos * 1e-9
    if 0 < found_s < MAX_DURATION_S:
        return float(found_s)
    return between(found_s, MAX_DURATION_S) if common.HasField(name) else None
