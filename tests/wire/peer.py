"""A client made of raw frames, for tests of the wire's core.

It builds frames with `hyperframe`, or as bytes where they are broken on purpose, feeds them to a
`Connection`, and reads back what comes out, frame by frame.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import hpack
from hyperframe import frame as hf

from extproc.wire import Connection, Counters, Limits, frames
from extproc.wire.budget import Budget
from extproc.wire.limits import DEFAULT_LIMITS, ErrorCode
from extproc.wire.rpc import Call, Method

F = TypeVar("F", bound=hf.Frame)

ECHO = "/test.Echo/Echo"
WATCH = "/test.Echo/Watch"
BROKEN = "/test.Echo/Broken"
HASTY = "/test.Echo/Hasty"

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", ECHO),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


def request(**changes: str | None) -> list[tuple[str, str]]:
    """The usual request header list; `_` in a name is `-`, `pseudo_x` is `:x`, None removes."""
    fields = dict(REQUEST)
    for key, value in changes.items():
        name = (":" + key[7:] if key.startswith("pseudo_") else key).replace("_", "-")
        if value is None:
            fields.pop(name, None)
        else:
            fields[name] = value
    return list(fields.items())


def message(body: bytes, flag: int = 0) -> bytes:
    """A length-prefixed gRPC message."""
    return struct.pack(">BI", flag, len(body)) + body


def raw(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A frame as bytes, whatever is wrong with it."""
    return frames.frame(kind, flags, stream_id, payload)


def literals(fields: list[tuple[str, str]]) -> bytes:
    """A header block without any state: literals without indexing, no Huffman."""
    block = b""
    for name, value in fields:
        block += b"\x00"
        for text in (name.encode("latin-1"), value.encode("latin-1")):
            block += bytes(hpack.hpack.encode_integer(len(text), 7)) + text
    return block


def first_block(fields: list[tuple[str, str]] = REQUEST) -> bytes:
    """The same behind a table size update to 0, as the block after our SETTINGS must begin."""
    return b"\x20" + literals(fields)


@dataclass
class Session:
    """Records its calls; echoes messages if its method does."""

    call: Call
    metadata: Mapping[str, str]
    is_echo: bool
    messages: list[bytes] = field(default_factory=list)
    is_half_closed: bool = False
    num_closed: int = 0

    def receive(self, message: bytes) -> None:
        """Echo."""
        assert not self.num_closed, "a message after the end"
        self.messages.append(message)
        if message == b"raise":
            raise RuntimeError("as asked")
        if self.is_echo:
            self.call.send(message)

    def half_close(self) -> None:
        """End with the request."""
        assert not self.num_closed
        assert not self.is_half_closed
        self.is_half_closed = True
        if self.is_echo:
            self.call.end()

    def closed(self) -> None:
        """Once."""
        self.num_closed += 1


def method(
    path: str, sessions: list[Session], *, is_echo: bool = True, is_long_lived: bool = False
) -> Method:
    """One method of the test service; its sessions are added to `sessions`."""

    def begin(call: Call, metadata: Mapping[str, str]) -> Session:
        if path == BROKEN:
            raise RuntimeError("cannot open")
        sessions.append(Session(call, metadata, is_echo))
        if path == HASTY:
            call.send(b"at once")
            call.end()
        return sessions[-1]

    return Method(path, begin, is_long_lived)


@dataclass
class Response:
    """The response on one stream."""

    headers: list[list[tuple[str, str]]] = field(default_factory=list)
    data: bytes = b""
    frame_names: list[str] = field(default_factory=list)
    is_ended: bool = False
    reset_code: int | None = None

    @property
    def last(self) -> dict[str, str]:
        """The trailers, or the only header block."""
        return dict(self.headers[-1])

    @property
    def status(self) -> int | None:
        """`grpc-status`."""
        status = self.last.get("grpc-status") if self.headers else None
        return int(status) if status is not None else None


class Peer:
    """A client and the connection under test."""

    def __init__(
        self, *, limits: Limits = DEFAULT_LIMITS, handshake: bool = True,
        counters: Counters | None = None, budget: Budget | None = None,
        settings: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.sessions: list[Session] = []
        self.now = 0.0
        self.errors: list[tuple[Exception, str]] = []
        self.num_wakes = 0
        self.frames: list[hf.Frame] = []
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self.responses: dict[int, Response] = {}
        methods = [
            method(ECHO, self.sessions),
            method(WATCH, self.sessions, is_echo=False, is_long_lived=True),
            method(BROKEN, self.sessions),
            method(HASTY, self.sessions),
        ]
        self.connection = Connection(
            {each.path: each for each in methods},
            now=0.0,
            limits=limits,
            counters=counters,
            budget=budget,
            on_output_ready=self._wake,
            on_session_error=lambda error, path: self.errors.append((error, path)),
        )
        self.take()
        if handshake:
            first = hf.SettingsFrame(0, settings=dict(settings or {})).serialize()
            self.feed(frames.PREFACE + first + frames.SETTINGS_ACK)
            self.encoder.header_table_size = 0
            self.frames.clear()

    def _wake(self) -> None:
        self.num_wakes += 1

    @property
    def counters(self) -> Counters:
        """The connection's counters."""
        return self.connection.counters

    @property
    def budget(self) -> Budget:
        """The connection's budget."""
        return self.connection.budget

    @property
    def session(self) -> Session:
        """The latest session."""
        return self.sessions[-1]

    def feed(self, *parts: bytes | hf.Frame) -> list[hf.Frame]:
        """Feed all parts in one read; return the frames that came out."""
        data = b"".join(p if isinstance(p, bytes) else p.serialize() for p in parts)
        position = 0
        while position < len(data):
            position = self.connection.receive_pass(data, position, now=self.now)
        return self.take()

    def tick(self, after_s: float) -> list[hf.Frame]:
        """Let time pass."""
        self.now += after_s
        self.connection.tick(now=self.now)
        return self.take()

    def take(self) -> list[hf.Frame]:
        """Read what the connection wants to write."""
        data = memoryview(self.connection.data_to_send())
        new = []
        while data:
            frame, length = hf.Frame.parse_frame_header(data[:9])
            frame.parse_body(data[9 : 9 + length])
            data = data[9 + length :]
            new.append(frame)
            self._note(frame)
        self.frames += new
        return new

    def _note(self, frame: hf.Frame) -> None:
        if not frame.stream_id:
            return
        response = self.responses.setdefault(frame.stream_id, Response())
        response.frame_names.append(type(frame).__name__.removesuffix("Frame"))
        assert not (response.is_ended and not isinstance(frame, hf.RstStreamFrame))
        if isinstance(frame, hf.HeadersFrame):
            fields = self.decoder.decode(frame.data)
            response.headers.append([(str(name), str(value)) for name, value in fields])
        elif isinstance(frame, hf.DataFrame):
            response.data += frame.data
        elif isinstance(frame, hf.RstStreamFrame):
            response.reset_code = frame.error_code
        response.is_ended = response.is_ended or "END_STREAM" in frame.flags

    # ---- frames of a client

    def headers(
        self, stream_id: int = 1, fields: list[tuple[str, str]] | None = None, *, end: bool = False
    ) -> bytes:
        """HEADERS that open a stream."""
        block = self.encoder.encode(fields if fields is not None else REQUEST)
        flags = ["END_HEADERS"] + (["END_STREAM"] if end else [])
        return bytes(hf.HeadersFrame(stream_id, block, flags=flags).serialize())

    def data(self, stream_id: int, content: bytes, *, end: bool = False, pad: int = 0) -> bytes:
        """DATA."""
        flags = (["END_STREAM"] if end else []) + (["PADDED"] if pad else [])
        frame = hf.DataFrame(stream_id, content, pad_length=pad, flags=flags)
        return bytes(frame.serialize())

    def open(self, stream_id: int = 1, **changes: str | None) -> Session:
        """Open a stream and return its session."""
        self.feed(self.headers(stream_id, request(**changes)))
        return self.session

    # ---- what came back

    def of_type(self, kind: type[F]) -> list[F]:
        """Frames of one type that came since the handshake."""
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def pinged(self) -> bytes:
        """The payload of the connection's last PING."""
        return bytes(self.of_type(hf.PingFrame)[-1].opaque_data)

    @property
    def goaway(self) -> hf.GoAwayFrame | None:
        """The last GOAWAY."""
        found = self.of_type(hf.GoAwayFrame)
        return found[-1] if found else None

    def failed_with(self) -> ErrorCode | None:
        """The code of the connection error, if there was one."""
        if not self.connection.is_failed or self.goaway is None:
            return None
        assert self.connection.is_over
        return ErrorCode(self.goaway.error_code)

    def reset_with(self, stream_id: int = 1) -> ErrorCode | None:
        """The code of the stream error, if there was one; the connection must live."""
        assert not self.connection.is_failed
        response = self.responses.get(stream_id)
        code = response.reset_code if response else None
        return ErrorCode(code) if code is not None else None
