"""A data plane: the messages that it sends for one request, and the router's replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio

from tests.request import ext_proc
from tests.request.ext_proc import phase, read

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
DROPPED_REASON = "x-llm-d-request-dropped-reason"
MAX_CHUNK_BYTES = 62_000
"""Of an echoed body: 64 KiB is what Envoy takes, and a message has a frame."""
PATIENCE_S = 60.0
_EOF: Any = getattr(aio, "EOF")  # noqa: B009


@dataclass(frozen=True)
class Spelling:
    """The way in which a data plane writes headers.

    Attributes:
        fields: Which of `raw_value` and `value` it fills.
        has_request_line: It sends `:method` and `:path`.
        is_canonical: Names as Go writes them, `Content-Type`.
    """

    fields: tuple[str, ...] = ("raw_value",)
    has_request_line: bool = True
    is_canonical: bool = False

    def respelled(self, message: bytes) -> bytes:
        """The message, its headers written in this way."""
        made = pb.ProcessingRequest.FromString(message)
        part = getattr(made, made.WhichOneof("request"))
        headers = {each.key: each.raw_value for each in part.headers.headers}
        del part.headers.headers[:]
        for name, value in headers.items():
            if name in (":method", ":path") and not self.has_request_line:
                continue
            header = part.headers.headers.add()
            header.key = name.title() if self.is_canonical and name[0] != ":" else name
            if "raw_value" in self.fields:
                header.raw_value = value
            if "value" in self.fields:
                header.value = value.decode()
        return bytes(made.SerializeToString())


ENVOY = Spelling()


@dataclass(frozen=True)
class Asks:
    """A request, as the data plane sends it.

    Attributes:
        model: Of a body that is made up; "" where `chunks` are the body.
        chunks: The body as it comes; none with `model` for the body in one piece.
        method, path, headers: Of the request.
        has_body: False: the request ends with its headers.
        is_late: The body does not come before the reply to the headers.
        has_trailers: Trailers end the request, not the last chunk.
        mode: The body mode that the message states; None for none.
        subset: The pods that the hint allows, as numbers or addresses; None for no hint.
        subset_as_text: The hint is one string with commas.
        subset_is_late: The hint comes with the body.
        spelling: Of headers.
    """

    model: str = ""
    chunks: tuple[bytes, ...] = ()
    method: str = "POST"
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    has_body: bool = True
    is_late: bool = False
    has_trailers: bool = False
    mode: Any = ext_proc.FULL_DUPLEX
    subset: tuple[int | str, ...] | None = None
    subset_as_text: bool = False
    subset_is_late: bool = False
    spelling: Spelling = ENVOY

    @property
    def body(self) -> tuple[bytes, ...]:
        """The chunks that are sent."""
        made = {"model": self.model, "messages": [{"role": "user", "content": "Guten Tag"}]}
        return self.chunks or (json.dumps(made).encode(),)

    def messages(self, pods: Sequence[str]) -> list[bytes]:
        """All messages of the request's phases that come unasked."""
        sent = [self._first(pods)]
        if self.has_body and not self.is_late:
            last = len(self.body) - 1
            for number, chunk in enumerate(self.body):
                is_last = number == last and not self.has_trailers
                sent.append(self._hinted(ext_proc.request_body(chunk, is_last), pods))
        if self.has_trailers:
            sent.append(ext_proc.request_trailers())
        return sent

    def _hinted(self, body: bytes, pods: Sequence[str]) -> bytes:
        message = pb.ProcessingRequest.FromString(body)
        for name, fields in (self._metadata(pods, is_late=True) or {}).items():
            message.metadata_context.filter_metadata[name].update(fields)
        return bytes(message.SerializeToString())

    def _first(self, pods: Sequence[str]) -> bytes:
        message = ext_proc.request_headers(
            self.path,
            method=self.method,
            headers={"content-type": "application/json", **self.headers},
            end_of_stream=not self.has_body,
            body_mode=self.mode,
            response_body_mode=self.mode,
            early=True,
            metadata=self._metadata(pods, is_late=False),
        )
        return self.spelling.respelled(message)

    def _metadata(self, pods: Sequence[str], *, is_late: bool) -> dict[str, dict[str, Any]] | None:
        if self.subset is None or is_late is not self.subset_is_late:
            return None
        named = [pods[each] if isinstance(each, int) else each for each in self.subset]
        hint: Any = ",".join(named) if self.subset_as_text else named
        return {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": hint}}


@dataclass
class Replies:
    """The router's replies, in order.

    Attributes:
        phases: Kind of each answer.
        destinations: The endpoints named, primary first.
        chunks: The echoed body.
        ends: For each of those, whether it is the last.
        status: Of the response that the router made itself, else 0.
        headers, body: Of that.
    """

    phases: list[str] = field(default_factory=list)
    destinations: list[str] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None

    def add(self, answer: bytes) -> None:
        """Add the next reply.

        Raises:
            AssertionError: Header and metadata do not say the same.
        """
        kind, message = phase(answer), read(answer)
        self.phases.append(kind)
        if kind == "immediate_response":
            self._take_reply(message.immediate_response)
        elif kind.endswith(("_headers", "_body")):
            self._take_common(getattr(message, kind).response, message)

    def _take_reply(self, reply: Any) -> None:
        self.status, self.body = int(reply.status.code), json.loads(reply.body)
        for option in reply.headers.set_headers:
            self.headers[option.header.key] = option.header.raw_value.decode()

    def _take_common(self, common: Any, message: Any) -> None:
        if common is None:
            return
        if common.header_mutation is not None:
            named = [
                option.header.raw_value.decode()
                for option in common.header_mutation.set_headers
                if option.header.key == DESTINATION
            ]
            assert [message.dynamic_metadata.to_dict()["envoy.lb"][DESTINATION]] == named
            self.destinations = named[0].split(",")
        if common.body_mutation is not None:
            chunk = common.body_mutation.streamed_response
            self.chunks.append(chunk.body)
            self.ends.append(chunk.end_of_stream)

    @property
    def code(self) -> str:
        """Of the error, "" where it is none."""
        return str(self.body.get("error", {}).get("code", "")) if self.body else ""


class Exchange:
    """One RPC: one HTTP request of the data plane."""

    def __init__(self, channel: Any) -> None:
        self._call = channel.stream_stream(PROCESS)()
        self.replies = Replies()

    async def ask(self, asks: Asks, pods: Sequence[str]) -> Replies:
        """Send a whole request, and read the replies to all of it."""
        for message in asks.messages(pods):
            await self._call.write(message)
        while not self._is_answered(asks):
            await self.next()
        return self.replies

    async def respond(self, *messages: bytes) -> Replies:
        """Send messages of the response's phases, and read as many replies."""
        self.replies = Replies()
        for message in messages:
            await self._call.write(message)
            await self.next()
        return self.replies

    async def next(self) -> None:
        """Read a reply."""
        answer = await asyncio.wait_for(self._call.read(), PATIENCE_S)
        assert answer is not _EOF, f"the router ended the call: {await self._call.details()}"
        self.replies.add(answer)

    async def end(self) -> int:
        """Close our side, expect no more replies, and return the call's status."""
        await self._call.done_writing()
        rest = await asyncio.wait_for(self._call.read(), PATIENCE_S)
        assert rest is _EOF, "more replies than expected"
        return int((await self._call.code()).value[0])

    def _is_answered(self, asks: Asks) -> bool:
        replies = self.replies
        if replies.status:
            return True
        if asks.has_trailers:
            return "request_trailers" in replies.phases
        if asks.mode == ext_proc.BUFFERED or not asks.has_body:
            return replies.destinations != []
        return replies.ends[-1:] == [True]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
