"""Our server carries services as gRPC's own library does: what comes back is equal."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.codec import Codec
from extproc.request.interfaces import StreamSettings
from extproc.request.processor import ExternalProcessor
from extproc.wire import server as wire
from extproc.wire.limits import Limits
from extproc.wire.rpc import Code, Method
from tests import clients
from tests.request.fakerouter import FakeRouter
from tests.strategies import stream_settings
from tests.wire.fake_call import Idle
from tests.wire.h2client import Heard, call
from tests.wire.referenceserver import ReferenceServer

MAX_MESSAGE_BYTES = 4096
SCRIPT = "/test.Script/Run"
PATIENCE_S = 60.0


class Script(Idle):
    """Does what its messages say."""

    def receive(self, message: bytes) -> None:
        verb, rest = message[:1], message[1:]
        if verb == b"e":
            self.call.send(rest)
        elif verb == b"t":
            self.call.send(rest)
            self.call.send(rest[::-1])
        elif verb == b"o":
            self.call.end()
        elif verb == b"f":
            self.call.end(Code.FAILED_PRECONDITION, rest.decode("utf-8", "replace"))
        elif verb == b"l":
            # Said after the pass: by a timer, as an answer to a held request is.
            asyncio.get_running_loop().call_later(0.001, self.call.send, rest)

    def half_close(self) -> None:
        asyncio.get_running_loop().call_later(0.01, self.call.end)


class Servers:
    """Both servers with the same services, on a loop of their own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.processors: list[ExternalProcessor] = []
        self.addresses: list[str] = self.run(self._start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def methods(self) -> list[Method]:
        parts, times = FakeRouter().parts(), (self.loop.time, self.loop.call_later)
        processor = ExternalProcessor(parts, StreamSettings(), Codec(), *times)
        self.processors.append(processor)
        return [*processor.methods(), Method(SCRIPT, Script)]

    async def _start(self) -> list[str]:
        limits = Limits(max_message_bytes=MAX_MESSAGE_BYTES)
        self._wire = await wire.serve(self.methods(), limits=limits)
        self._reference = ReferenceServer(self.methods(), max_message_bytes=MAX_MESSAGE_BYTES)
        return [self._wire.address, await self._reference.start()]

    async def _stop(self) -> None:
        await self._wire.close()
        await self._reference.stop()

    def close(self) -> None:
        self.run(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def ask(self, path: str, messages: list[bytes]) -> list[Heard]:
        """The same RPC to each server."""

        async def both() -> list[Heard]:
            return [await call(address, path, messages) for address in self.addresses]

        heard: list[Heard] = self.run(both())
        return heard


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    running = Servers()
    yield running
    running.close()


@contextmanager
def configured(servers: Servers, **settings: Any) -> Iterator[None]:
    for each in servers.processors:
        each.settings = StreamSettings(**settings)
    yield
    for each in servers.processors:
        each.settings = StreamSettings()


verbs = st.sampled_from([b"e", b"t", b"n", b"l"])
script = st.lists(st.tuples(verbs, st.binary(max_size=300)).map(b"".join), max_size=6)
# No field's value begins or ends with a space (RFC 9113, 8.2.1): h2 takes that for an error.
details = st.text(max_size=20).map(str.strip)
endings = st.sampled_from([b"", b"o"]) | details.map(lambda text: b"f" + text.encode())


@given(script, endings)
def test_the_same_messages_get_the_same_responses(
    servers: Servers, messages: list[bytes], ending: bytes
) -> None:
    """Late answers may overtake nothing of their own kind; against others their place is open."""
    ours, theirs = servers.ask(SCRIPT, messages + ([ending] if ending else []))
    late = [message[1:] for message in messages if message[:1] == b"l"]

    assert (ours.code, ours.details) == (theirs.code, theirs.details)
    if ending or not late:
        prompt = [[m for m in heard.messages if m not in late] for heard in (ours, theirs)]
        assert prompt[0] == prompt[1]
    else:
        assert sorted(ours.messages) == sorted(theirs.messages)


@given(stream_settings(), st.lists(st.sampled_from(["headers", "get", "body", "junk"]), max_size=4))
def test_the_same_ext_proc_messages_get_the_same_responses(
    servers: Servers, settings: dict[str, Any], kinds: list[str]
) -> None:
    encoded = {
        "headers": clients.request_headers(),
        "get": clients.request_headers("/v1/models", "GET"),
        "body": clients.request_body("a"),
        "junk": b"\xff\xff",
    }
    with configured(servers, **settings):
        ours, theirs = servers.ask(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            [encoded[kind] for kind in kinds],
        )

    assert ours == theirs


def test_unknown_methods_are_unimplemented_on_both(servers: Servers) -> None:
    heard = servers.ask("/no.Such/Method", [b"x"])

    assert [each.code for each in heard] == [Code.UNIMPLEMENTED] * 2


def test_a_message_over_the_limit_is_refused_on_both(servers: Servers) -> None:
    heard = servers.ask(SCRIPT, [b"e" + b"x" * MAX_MESSAGE_BYTES])

    assert [each.code for each in heard] == [Code.RESOURCE_EXHAUSTED] * 2


def test_a_message_at_the_limit_passes_on_both(servers: Servers) -> None:
    heard = servers.ask(SCRIPT, [b"e" + b"x" * (MAX_MESSAGE_BYTES - 1)])

    assert [each.code for each in heard] == [Code.OK] * 2
    assert heard[0].messages == heard[1].messages == (b"x" * (MAX_MESSAGE_BYTES - 1),)
