"""The client of `extproc watch`, against the real service on a real port."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server, Stream
from msgspec.structs import replace

from extproc.files.tls import HTTP2, client_context, server_context
from extproc.gen.client.extproc import v1
from extproc.observe.decisions import DecisionsService
from extproc.observe.watchclient import (
    Decision,
    WatchError,
    is_unfinished,
    render,
    watch,
)
from extproc.pods.completion import DecisionRecord, Ended, Shadowed
from extproc.types import EndpointView, Outcome, Pick, Reason, Rejection, RequestInfo
from extproc.wire.rpc import Call, Code, Metadata, Method
from tests.builders import completion
from tests.pki import Pki
from tests.servers import tcp_server
from tests.waiting import eventually
from tests.wire.fake_call import Idle
from tests.wire.rawcodec import RawCodec

WALL_S = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC).timestamp()


def picked(adapter: str | None = "a1", *, is_known: bool = True) -> DecisionRecord:
    request = RequestInfo(adapter or "base", adapter, "/v1/completions", 308, "request-1")
    views = (
        EndpointView(
            "10.0.0.1:80", name="pod-1", gpu_adapters=("a1",), num_pending=5, is_known=is_known
        ),
        EndpointView("10.0.0.2:80", name="pod-2"),
    )
    endpoints = ("10.0.0.1:80", "10.0.0.2:80")
    return DecisionRecord(
        Pick("id", request, endpoints, "founding", "affinity", views), WALL_S, 4e-5
    )


def rejected() -> DecisionRecord:
    rejection = Rejection(429, Reason.SATURATED, "full", retry_after_s=2, model="a1")
    return DecisionRecord(rejection, WALL_S, 0.0)


class Carrier:
    """The transport contract over grpclib's server, for one kind of call: server streaming."""

    def __init__(self, methods: tuple[Method, ...]) -> None:
        self._methods = methods

    def __mapping__(self) -> dict[str, Handler]:
        return {
            each.path: Handler(self._carry(each), Cardinality.UNARY_STREAM, bytes, bytes)
            for each in self._methods
        }

    def _carry(self, method: Method) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
        async def handle(stream: Stream[Any, Any]) -> None:
            call = QueueCall()
            session = method.open(call, {})
            try:
                session.receive(await stream.recv_message() or b"")
                while isinstance(item := await call.queue.get(), bytes):
                    await stream.send_message(item)
                if item[0] is not Code.OK:
                    raise GRPCError(Status(int(item[0])), item[1])
            finally:
                session.closed()

        return handle


class QueueCall(Call):
    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        raise AssertionError("keeps no messages")

    def send(self, message: bytes) -> None:
        self.queue.put_nowait(message)

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        self.queue.put_nowait((code, details))


@asynccontextmanager
async def serving(
    service: DecisionsService, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    server = Server([Carrier(service.methods())], codec=RawCodec())
    await server.start("127.0.0.1", 0, ssl=tls)
    (socket,) = server._server.sockets  # type: ignore[union-attr]
    try:
        yield socket.getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def take(decisions: AsyncIterator[Decision], count: int) -> list[Decision]:
    """The next `count`, then leave."""
    seen = [await anext(decisions) for _ in range(count)]
    await decisions.aclose()  # type: ignore[attr-defined]
    return seen


async def test_remembered_and_live_decisions_arrive_in_order() -> None:
    service = DecisionsService()
    service.publish(picked())
    async with serving(service) as port:
        decisions = watch(f"127.0.0.1:{port}", replay_last=10)
        first = await anext(decisions)
        service.publish(rejected())
        (second,) = await take(decisions, 1)

    assert (first.sequence, second.sequence) == (1, 2)
    assert first.pick is not None
    assert first.pick.id == "id"
    assert second.rejection is not None
    assert second.rejection.reason == "saturated"


async def test_the_reason_in_words_comes_if_asked_for_on_a_line_of_its_own() -> None:
    service = DecisionsService()
    service.publish(picked())
    async with serving(service) as port:
        (plain,) = await take(watch(f"127.0.0.1:{port}", replay_last=1), 1)
        (explained,) = await take(watch(f"127.0.0.1:{port}", replay_last=1, explain=True), 1)

    assert "\n" not in render(plain).plain
    line, reason = render(explained).plain.splitlines()
    assert line == render(plain).plain
    assert reason.startswith(
        "    pod-1: a1 is in a GPU slot there with none of its requests pending"
    )


async def test_filters_reach_the_server() -> None:
    service = DecisionsService()
    for record in (picked(), rejected(), picked("a2"), rejected()):
        service.publish(record)
    async with serving(service) as port:
        target = f"127.0.0.1:{port}"
        rejections = await take(watch(target, only_rejections=True, replay_last=9), 2)
        models = await take(watch(target, models=["a2"], replay_last=9), 1)
        endpoints = await take(watch(target, endpoint="10.0.0.2:80", replay_last=9), 2)

    assert [each.sequence for each in rejections + models + endpoints] == [2, 4, 3, 1, 3]


async def test_nothing_is_lost_when_the_server_ends_calls() -> None:
    """Here it ends each call after one decision."""
    service = DecisionsService(max_watch_bytes=1)
    for _ in range(3):
        service.publish(picked())
    async with serving(service) as port:
        decisions = watch(f"127.0.0.1:{port}", replay_last=2)
        seen = [await anext(decisions)]
        for _ in range(3):
            service.publish(picked())
        seen += await take(decisions, 4)

    assert [each.sequence for each in seen] == [2, 3, 4, 5, 6]


async def test_leaving_frees_the_place_on_the_server() -> None:
    service = DecisionsService(max_watchers=1)
    service.publish(picked())
    async with serving(service) as port:
        await take(watch(f"127.0.0.1:{port}", replay_last=1), 1)
        await eventually(lambda: not service._watchers)

    assert not service._watchers


async def test_a_refusal_is_an_error_with_the_servers_words() -> None:
    service = DecisionsService(max_watchers=0)
    async with serving(service) as port:
        with pytest.raises(WatchError, match=f"127.0.0.1:{port}: too many watchers"):
            await anext(watch(f"127.0.0.1:{port}"))


async def test_an_unreachable_server_is_an_error() -> None:
    async with serving(DecisionsService()) as port:
        pass

    with pytest.raises(WatchError, match=f"127.0.0.1:{port}"):
        await anext(watch(f"127.0.0.1:{port}"))


async def test_a_server_that_only_ends_calls_is_not_called_for_ever() -> None:
    class EndsAtOnce(Idle):
        def __init__(self, call: Call, metadata: Metadata) -> None:
            call.end()

    class Service(DecisionsService):
        def methods(self) -> tuple[Method, ...]:
            return (Method("/extproc.v1.Decisions/Watch", EndsAtOnce),)

    async with serving(Service()) as port:
        with pytest.raises(WatchError, match="ended the call"):
            await anext(watch(f"127.0.0.1:{port}"))


async def test_a_server_that_drops_the_connection_is_an_error() -> None:
    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with tcp_server(drop) as address:
        with pytest.raises(WatchError, match=address):
            await anext(watch(address))


async def test_something_else_than_grpc_is_an_error() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    async with tcp_server(speak) as address:
        with pytest.raises(WatchError, match=address):
            await anext(watch(address))


@pytest.mark.parametrize("target", ["", "localhost", ":80", "host:", "host:http", "host:²"])
async def test_a_target_without_host_and_port_is_an_error(target: str) -> None:
    with pytest.raises(WatchError, match="host:port"):
        await anext(watch(target))


async def test_watching_over_mutual_tls(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    cert, key = pki.issue("router", "127.0.0.1")
    server_tls = server_context(cert, key, client_ca=pki.ca, protocols=HTTP2)
    client_tls = client_context(pki.ca, certificate=cert, key=key, protocols=HTTP2)
    service = DecisionsService()
    service.publish(picked())
    async with serving(service, server_tls) as port:
        (decision,) = await take(watch(f"127.0.0.1:{port}", tls=client_tls, replay_last=1), 1)

    assert decision.sequence == 1


async def test_an_untrusted_server_is_an_error(tmp_path: Path) -> None:
    server_tls = server_context(*Pki(tmp_path).issue("router"), protocols=HTTP2)
    async with serving(DecisionsService(), server_tls) as port:
        with pytest.raises(WatchError, match="certificate refused: .* --tls-ca"):
            await anext(watch(f"127.0.0.1:{port}", tls=client_context(protocols=HTTP2)))


async def line_of(record: DecisionRecord) -> str:
    """The line for `record`, without the time of day."""
    service = DecisionsService()
    service.publish(record)
    async with serving(service) as port:
        (decision,) = await take(watch(f"127.0.0.1:{port}", replay_last=1), 1)
    clock, _, line = render(decision).plain.partition("  ")
    assert clock.endswith(":05.678")
    return line


async def test_a_pick_is_one_line() -> None:
    assert await line_of(picked()) == (
        "a1  ->  pod-1, pod-2  founding/affinity  on GPU, 5 pending, 0 of this adapter"
        "  loaded on 1/2  40 us"
    )


async def test_a_pick_that_was_held_says_so_on_its_line() -> None:
    record = picked(None)
    held = replace(record.decision, held_s=0.31, held_for="slot")

    assert await line_of(replace(record, decision=held)) == (
        "base  ->  pod-1, pod-2  founding/affinity  5 pending  held 310 ms for a slot  40 us"
    )


async def test_a_cold_pick_is_rendered_as_such() -> None:
    assert "cold, 5 pending, 0 of this adapter  loaded on 0/2" in await line_of(picked("a9"))


async def test_a_pick_of_the_base_model_is_rendered_without_adapters() -> None:
    assert await line_of(picked(None)) == (
        "base  ->  pod-1, pod-2  founding/affinity  5 pending  40 us"
    )


async def test_an_endpoint_without_a_report_is_shown_as_such() -> None:
    assert "5 pending (no report)" in await line_of(picked(is_known=False))


async def test_what_a_policy_in_shadow_answered_stands_in_the_line() -> None:
    record = picked()
    record.compare(
        Shadowed("mine:Policy", "differed", "10.0.0.2:8000", "pod-2", "", 0.0125, 1e-4, 40, 30)
    )
    assert "  shadow mine:Policy: pod-2, +12.5 ms of harm, 30 of 40 agree" in await line_of(record)
    record.compare(Shadowed("mine:Policy", "failed", error="KeyError: 'a'", num_asked=40))
    assert "  shadow mine:Policy: KeyError: 'a', 0 of 40 agree" in await line_of(record)
    record.compare(Shadowed("mine:Policy", "waited", num_asked=41))
    assert "  shadow mine:Policy: wait, 0 of 41 agree" in await line_of(record)


async def test_a_rejection_is_one_line() -> None:
    assert await line_of(rejected()) == "a1  429 saturated  full  retry after 2 s"


async def test_a_rejection_says_more_than_the_client_was_told() -> None:
    record = rejected()
    refused = replace(record.decision, why="The queue is full: 7 held.")

    assert await line_of(replace(record, decision=refused)) == (
        "a1  429 saturated  full  retry after 2 s  The queue is full: 7 held."
    )


def test_a_decision_of_a_newer_server_is_still_rendered() -> None:
    assert render(Decision(decision_seconds=1e-6)).plain == "--:--:--.---  1 us"


def test_a_clients_model_name_cannot_steer_the_terminal() -> None:
    rejection = v1.Rejection(status=404, reason="model_not_found", model="a\x1b[2J\nb\u202ec")
    line = render(Decision(rejection=rejection))

    assert line.plain.isprintable()
    assert "a?[2J?b?c" in line.plain
    reason = render(Decision(rejection=rejection, explanation=rejection.model)).plain
    assert reason.splitlines()[1:] == ["    a?[2J?b?c"]
    assert any("red" in str(span.style) for span in line.spans)


async def test_outcomes_are_lines_of_their_own_and_one_request_is_told_to_its_end() -> None:
    service = DecisionsService()
    record = picked()
    service.publish(record)
    entry = completion("id", first_body_byte_s=0.31, duration_s=4.2, address="10.0.0.1:80")
    async with serving(service) as port:
        decisions = watch(f"127.0.0.1:{port}", about="id", explain=True)
        first = await anext(decisions)
        assert is_unfinished(first)
        assert isinstance(record.decision, Pick)
        service.ended(Ended(record.decision, Outcome.COMPLETED, entry), WALL_S)
        rest = [each async for each in decisions]
        finished = [each async for each in watch(f"127.0.0.1:{port}", about="id")]

    (news,) = rest
    line, reason = render(news).plain.splitlines()
    words = "completed 200  first token after 310 ms  took 4.20 s"
    assert line[14:].startswith(f"a1  <-    pod-1  {words}")
    assert reason.strip().startswith("It ended after 4.20 s with status 200")
    (whole,) = finished
    assert not is_unfinished(whole)
    assert words in render(whole).plain


async def test_an_unknown_request_is_an_error_that_says_how_long_decisions_are_kept() -> None:
    async with serving(DecisionsService(num_kept=7)) as port:
        with pytest.raises(WatchError, match="keeps its last 7 decisions"):
            await anext(watch(f"127.0.0.1:{port}", about="nobody"))


async def test_resuming_loses_no_outcome_and_repeats_none() -> None:
    """Each message is more than the server sends in one call."""
    service = DecisionsService(max_watch_bytes=1)
    async with serving(service) as port:
        decisions = watch(f"127.0.0.1:{port}", outcomes=True, replay_last=9)
        records = [picked() for _ in range(2)]
        for record in records:
            service.publish(record)
        seen = [await anext(decisions) for _ in records]
        for record in records:
            assert isinstance(record.decision, Pick)
            service.ended(Ended(record.decision, Outcome.COMPLETED), WALL_S)
        seen += await take(decisions, 2)

    assert [each.sequence for each in seen] == [1, 2, 0, 0]
    assert [each.outcome.number for each in seen if each.outcome] == [1, 2]
