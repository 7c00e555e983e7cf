"""What a real Envoy sent, taken apart, and put together again for other requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from hyperframe.frame import DataFrame, Frame, HeadersFrame, RstStreamFrame

RECORDED: Final = Path(__file__).with_name("recorded.http2")
"""Bytes of one connection of Envoy 1.40: written by `bench.record`."""
PATH: Final = b"/v1/chat/completions"
BODY_BYTES: Final = 308
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CANCEL: Final = 8
_FRAME_BYTES: Final = 16_384
_FIRST_TOKEN_S, _RESPONSE_S = 0.01, 0.2
"""Of a streamed response, from which the router learns; those that were recorded came at once."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What an access log entry tells of a request.

    Attributes:
        pick_id: As the router gave it.
        address: `ip:port` of its endpoint.
    """

    pick_id: str
    address: str
    request_id: str


def frames_of(data: bytes) -> list[Frame]:
    """Return the whole frames of some bytes."""
    found = []
    while len(data) >= 9:
        frame, num_bytes = Frame.parse_frame_header(memoryview(data)[:9])
        frame.parse_body(memoryview(data)[9 : 9 + num_bytes])
        found.append(frame)
        data = data[9 + num_bytes :]
    return found


def messages_of(data: bytes) -> list[bytes]:
    """Return gRPC's messages of a stream's DATA."""
    found = []
    while data:
        end = 5 + int.from_bytes(data[1:5], "big")
        found.append(data[5:end])
        data = data[end:]
    return found


def shortened(data: bytes) -> bytes:
    """Leave out the first message of an access log: 60 KB about the extensions that Envoy has."""
    frames = frames_of(data.removeprefix(_PREFACE))
    long = {frame.stream_id for frame in frames if frame.body_len == _FRAME_BYTES}
    kept, is_whole = [], dict.fromkeys(long, False)
    for frame in frames:
        if not isinstance(frame, DataFrame) or is_whole.get(frame.stream_id, True):
            kept.append(frame.serialize())
        else:
            is_whole[frame.stream_id] = frame.body_len < _FRAME_BYTES
    return _PREFACE + b"".join(kept)


class Recording:
    """A connection of Envoy's as it was recorded, with requests of ours.

    Attributes:
        first: How it opened, and its access log; to be sent before any others.
    """

    def __init__(self, data: bytes) -> None:
        frames = frames_of(data.removeprefix(_PREFACE))
        streams: dict[int, bytes] = {}
        for frame in frames:
            if isinstance(frame, DataFrame):
                streams[frame.stream_id] = streams.get(frame.stream_id, b"") + frame.data
        self._last_id = max(frame.stream_id for frame in frames)
        self._log_id, log = next(_logs(streams))
        others = (f for f in frames if not isinstance(f, DataFrame))
        first = [f.serialize() for f in others if f.stream_id in (0, self._log_id)]
        self.first = _PREFACE + b"".join(first)
        requests = {each: messages_of(data) for each, data in streams.items()}
        del requests[self._log_id]
        last = max(requests)
        (self._block,) = [
            f.data for f in frames if isinstance(f, HeadersFrame) and f.stream_id == last
        ]
        self._headers, body = requests[last]
        self._body = pb.ProcessingRequest.FromString(body)
        self._entry = log.http_logs.log_entry[0]
        self._request_id = self._entry.request.request_id.encode()

    def request(self, number: int, body: bytes) -> tuple[int, str, bytes, list[bytes]]:
        """Return a request's stream and id, and its bytes: those of its headers and of its body.

        The latter are as a socket delivers them, 64 KiB at a time.
        """
        self._last_id += 2
        request_id = f"{number:08x}-5608-4e8f-a66e-84cd84099cd9"
        headers = self._headers.replace(self._request_id, request_id.encode())
        opened = HeadersFrame(self._last_id, self._block, flags=["END_HEADERS"]).serialize()
        self._body.request_body.body = body
        sent = _data(self._last_id, self._body.SerializeToString())
        reads = [sent[at : at + (1 << 16)] for at in range(0, len(sent), 1 << 16)]
        return self._last_id, request_id, opened + _data(self._last_id, headers), reads

    def reset(self, stream_id: int) -> bytes:
        """Return the bytes with which Envoy ends an answered stream."""
        return RstStreamFrame(stream_id, _CANCEL).serialize()

    def log(self, ended: Iterable[Ended], *, now_wall_s: float) -> bytes:
        """Return the bytes of one access log message about requests that have ended now."""
        message = als_pb2.StreamAccessLogsMessage()
        for each in ended:
            entry = message.http_logs.log_entry.add()
            entry.CopyFrom(self._entry)
            _tell(entry, each, now_wall_s)
        return _data(self._log_id, message.SerializeToString())


def _tell(entry: accesslog_pb2.HTTPAccessLogEntry, ended: Ended, now_wall_s: float) -> None:
    common, (host, _, port) = entry.common_properties, ended.address.rpartition(":")
    pick: Any = common.metadata.filter_metadata["extproc.pick"].fields["id"]
    pick.string_value = ended.pick_id
    common.upstream_remote_address.socket_address.address = host
    common.upstream_remote_address.socket_address.port_value = int(port)
    common.start_time.FromNanoseconds(int((now_wall_s - _RESPONSE_S) * 1e9))
    common.custom_tags["extproc-first-body-byte"] = f"{_FIRST_TOKEN_S * 1e6:.0f} us"
    for field, seconds in (
        (common.time_to_first_upstream_rx_byte, _FIRST_TOKEN_S),
        (common.time_to_last_downstream_tx_byte, _RESPONSE_S),
        (common.duration, _RESPONSE_S),
    ):
        field.FromNanoseconds(int(seconds * 1e9))
    common.stream_id = entry.request.request_id = ended.request_id


def _logs(streams: dict[int, bytes]) -> Any:
    """Yield the streams whose messages are access logs, and the last message of each."""
    for stream_id, data in streams.items():
        *_, last = messages_of(data)
        try:
            message = als_pb2.StreamAccessLogsMessage.FromString(last)
        except DecodeError:  # the other method's
            continue
        if message.http_logs.log_entry:
            yield stream_id, message


def _data(stream_id: int, message: bytes) -> bytes:
    sent = b"\0" + len(message).to_bytes(4, "big") + message
    pieces: Sequence[bytes] = [
        sent[at : at + _FRAME_BYTES] for at in range(0, len(sent), _FRAME_BYTES)
    ]
    return b"".join(DataFrame(stream_id, piece).serialize() for piece in pieces)


def answered(data: bytes) -> dict[int, tuple[str, str]]:
    """Return the pick id and the endpoint of each stream that some bytes of the router answer."""
    found = {}
    for frame in frames_of(data):
        if not isinstance(frame, DataFrame):
            continue
        for message in messages_of(frame.data):
            response = pb.ProcessingResponse.FromString(message)
            if response.HasField("request_body"):
                spaces = response.dynamic_metadata.fields
                pick = spaces["extproc.pick"].struct_value.fields["id"].string_value
                place = spaces["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"]
                found[frame.stream_id] = pick, place.string_value
    return found
