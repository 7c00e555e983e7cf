"""Links over real connections: dialled, recognised, lost and taken up again."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from extproc.files.tls import HTTP2, client_context
from extproc.peers.dialler import MAX_UNSENT_BYTES, PeerDialler
from extproc.peers.links import METHOD
from extproc.wire import server as wire
from extproc.wire.rpc import Call, Session
from extproc.wire.tls import Certificates
from tests.peers.routers import Router
from tests.pki import Pki
from tests.servers import tcp_server
from tests.waiting import eventually


@asynccontextmanager
async def closing(*routers: Router) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for router in routers:
            await router.dialler.aclose()


async def test_of_the_addresses_listed_the_own_is_recognised_and_the_others_linked() -> None:
    routers = [Router(name) for name in "abc"]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(each.listening()) for each in routers]
        await stack.enter_async_context(closing(*routers))
        for router in routers:
            router.dialler.set_addresses(addresses)
        await eventually(lambda: all(None not in each.dialler.routers for each in routers))
        await eventually(lambda: all(len(each.relay.linked_routers()) == 2 for each in routers))
        known = [each.dialler.routers for each in routers]

    assert [sorted(str(each) for each in ids) for ids in known] == [["a", "b", "c"]] * 3


async def test_nobody_is_called_after_the_end() -> None:
    near, far = Router("a"), Router("b")
    changes: list[bool] = []
    async with far.listening() as address:
        near.dialler.set_addresses([address])
        await eventually(lambda: far.relay.linked_routers() == {"a"})
        near.dialler.on_change = lambda: changes.append(True)
        await near.dialler.aclose()

    assert changes == []


async def test_one_dials_and_both_can_send() -> None:
    near, far = Router("a"), Router("b")
    async with far.listening() as address, closing(near):
        await near.links_to(far, address)
        near.offer("b", b"1")
        far.offer("a", b"2")
        await eventually(lambda: far.taken == [b"1"] and near.taken == [b"2"])


async def test_with_a_key_those_who_have_it_are_linked_and_others_never() -> None:
    key, other = b"k" * 32, b"o" * 32
    near, far = Router("a", keys=[key]), Router("b", keys=[key])
    stranger = Router("c", keys=[other])
    async with far.listening() as address, closing(near, far, stranger):
        stranger.dialler.set_addresses([address])
        near.dialler.set_addresses([address])
        await eventually(lambda: near.dialler.routers == ["b"])
        near.offer("b", b"to b")
        await eventually(lambda: far.relay.linked_routers() == {"a"})
        far.offer("a", b"to a")
        await eventually(lambda: (near.taken, far.taken) == ([b"to a"], [b"to b"]))
        assert stranger.dialler.routers == [None]


async def test_many_large_entries_arrive_in_order() -> None:
    near, far = Router("a"), Router("b")
    entries = [b"%d" % number + bytes(20_000) for number in range(200)]
    async with far.listening() as address, closing(near):
        near.dialler.set_addresses([address])
        for entry in entries:
            near.offer("b", entry)
        await eventually(lambda: len(far.taken) == len(entries))

    assert far.taken == entries


async def test_after_a_restart_the_link_is_taken_up_again_and_the_new_name_learnt() -> None:
    near, before, after = Router("a"), Router("b"), Router("c")
    async with closing(near):
        async with before.listening() as address:
            near.dialler.set_addresses([address])
            await eventually(lambda: near.relay.linked_routers() == {"b"})
        await eventually(lambda: near.relay.linked_routers() == set())
        near.offer("c", b"early")
        async with after.listening(port=int(address.rpartition(":")[2])):
            await eventually(lambda: near.dialler.routers == ["c"])
            await eventually(lambda: after.taken == [b"early"])


async def test_a_routers_id_is_kept_while_it_is_unreachable_and_forgotten_with_its_address() -> (
    None
):
    near, far = Router("a"), Router("b")
    async with closing(near):
        async with far.listening() as address:
            near.dialler.set_addresses([address])
            await eventually(lambda: near.dialler.routers == ["b"])
        await eventually(lambda: near.relay.linked_routers() == set())
        remembered = near.dialler.routers
        near.dialler.set_addresses([])

    assert (remembered, near.dialler.routers) == (["b"], [])


async def test_an_address_that_is_not_listed_any_more_loses_its_link() -> None:
    near, far = Router("a"), Router("b")
    async with far.listening() as address, closing(near):
        await near.links_to(far, address)
        near.dialler.set_addresses([])
        await eventually(lambda: far.relay.linked_routers() == set())


class Flood:
    """Links whose sessions send so much at once."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_closed = 0

    def open(self, call: Call, on_hello: Callable[[str], None]) -> Session:
        on_hello("b")
        for _ in range(self.num_bytes // 65_536):
            call.send(bytes(65_536))
        return self

    def receive(self, message: bytes) -> None:
        pass

    def half_close(self) -> None:
        pass

    def closed(self) -> None:
        self.num_closed += 1


@asynccontextmanager
async def deaf() -> AsyncIterator[str]:
    """A server that reads nothing."""
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b"\0\0\0\4\0\0\0\0\0")  # empty SETTINGS

    async with tcp_server(accept) as address:
        yield address
        for writer in writers:
            writer.transport.abort()


async def test_the_link_to_a_router_that_does_not_read_ends_before_it_fills_the_memory() -> None:
    most, more = Flood(MAX_UNSENT_BYTES - 2**20), Flood(MAX_UNSENT_BYTES + 2**20)
    diallers = [PeerDialler(METHOD, "a", each.open, rng=random.Random(1)) for each in (most, more)]
    async with deaf() as address:
        for dialler in diallers:
            dialler.set_addresses([address])
        await eventually(lambda: more.num_closed >= 2)  # dialled again
        num_ended = most.num_closed
        for dialler in diallers:
            await dialler.aclose()

    assert num_ended == 0


async def _answer_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def test_clients_without_grpc_or_our_method_do_not_affect_others() -> None:
    near, far, stranger = Router("a"), Router("b"), socket.create_server(("127.0.0.1", 0))
    other = await wire.serve([])
    ports = [stranger.getsockname()[1], other.port]
    async with (
        far.listening() as address,
        tcp_server(_answer_http) as garbage,
        closing(near),
    ):
        strangers = [f"127.0.0.1:{port}" for port in ports]
        near.dialler.set_addresses([*strangers, garbage, address])
        await eventually(lambda: near.relay.linked_routers() == {"b"})
        known = near.dialler.routers
    stranger.close()
    await other.close()

    assert sorted(map(str, known)) == ["None", "None", "None", "b"]


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.mark.parametrize("tls_name", [None, "localhost"])
async def test_over_mutual_tls_with_the_certificate_that_all_replicas_share(
    pki: Pki, tls_name: str | None
) -> None:
    cert, key = pki.issue("routers")
    server = Certificates(cert, key, pki.ca).context

    def client() -> ssl.SSLContext:
        return client_context(
            pki.ca, checks_name=bool(tls_name), certificate=cert, key=key, protocols=HTTP2
        )

    near, far = Router("a", tls=client, tls_name=tls_name), Router("b")
    async with far.listening(context=server) as address, closing(near):
        await near.links_to(far, address)


async def test_a_certificate_may_vouch_for_itself(pki: Pki) -> None:
    cert, key = pki.issue("routers")
    server = Certificates(cert, key).context

    def client() -> ssl.SSLContext:
        return client_context(cert, checks_name=False, certificate=cert, key=key, protocols=HTTP2)

    near, far = Router("a", tls=client), Router("b")
    async with far.listening(context=server) as address, closing(near):
        await near.links_to(far, address)


@pytest.mark.parametrize(
    ("verify", "name", "is_linked"),
    [(True, None, False), (False, None, True), (False, "elsewhere", True)],
)
async def test_a_stranger_is_no_peer_unless_certificates_are_not_checked(
    pki: Pki, tmp_path: Path, verify: bool, name: str | None, is_linked: bool
) -> None:
    (tmp_path / "other").mkdir()
    strange_cert, strange_key = Pki(tmp_path / "other").issue("stranger")
    cert, key = pki.issue("routers")
    server = Certificates(strange_cert, strange_key).context
    asked = 0

    def client() -> ssl.SSLContext:
        nonlocal asked
        asked += 1
        return client_context(
            pki.ca,
            verify=verify,
            checks_name=bool(name),
            certificate=cert,
            key=key,
            protocols=HTTP2,
        )

    near, far = Router("a", tls=client, tls_name=name), Router("b")
    async with far.listening(context=server) as address, closing(near):
        near.dialler.set_addresses([address])
        await eventually(lambda: asked == 3 or far.relay.linked_routers() == {"a"})
        linked = far.relay.linked_routers() == {"a"}

    assert linked is is_linked


async def test_a_certificate_with_another_name_is_refused_where_a_name_is_wanted(pki: Pki) -> None:
    cert, key = pki.issue("routers")
    server = Certificates(cert, key).context
    asked = 0

    def client() -> ssl.SSLContext:
        nonlocal asked
        asked += 1
        return client_context(pki.ca, certificate=cert, key=key, protocols=HTTP2)

    near, far = Router("a", tls=client, tls_name="elsewhere"), Router("b")
    async with far.listening(context=server) as address, closing(near):
        near.dialler.set_addresses([address])
        await eventually(lambda: asked == 3)

    assert far.relay.linked_routers() == set()
