"""Replicas of a router put together: found, counted, fed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from extproc.config.file import ConfigError
from extproc.gen import peers_pb2
from extproc.peers.links import METHOD
from extproc.peers.peering import ObservedRelay
from extproc.service.peeraccess import check_peers, link_tls, peer_port
from extproc.wire import server as wire
from extproc.wire.rpc import Call, Code, Metadata, Method
from tests.dnsserver import DnsServer
from tests.e2e.harness import free_port
from tests.peers.peered import Peered, configured
from tests.pki import Pki
from tests.waiting import eventually
from tests.wire.fake_call import Idle

PATIENCE_S = 60.0
ELSEWHERE = "192.0.2.1"
"""Documentation range (RFC 5737): nobody answers there."""


class Replica(Peered):
    """A router that passes on what access logs tell of other routers' picks."""

    def __init__(self, router_id: str, peers: dict[str, Any] | None) -> None:
        super().__init__(router_id, peers)
        self._entries = ObservedRelay(self.relay, self.observers, time.monotonic)

    def pass_on(self, pick_id: str, entry: bytes) -> None:
        self._entries.pass_on(pick_id, entry)
        self._entries.flush()


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Replica, Replica]]:
    """`aa`, which does not listen, and `bb`, which both know by its address."""
    far = Replica("bb", {"static": []})
    server = await wire.serve(far.peering.methods())
    near = Replica("aa", {"static": [server.address]})
    async with near.running(), far.running():
        await eventually(lambda: near.sizes == [2])
        yield near, far
    await server.close()


async def test_an_entry_goes_to_the_router_that_its_pick_names() -> None:
    async with two() as (near, far):
        near.pass_on("cc-1", b"for another")
        near.pass_on("nonsense", b"for nobody")
        near.pass_on("bb-7", b"for it")
        await eventually(lambda: far.taken == [b"for it"])
        fed = (near.relay.is_fed, far.relay.is_fed)

    assert fed == (False, True)


class DeadCall(Call):
    """A way back that fails with each message but the first, our hello."""

    num_sent = 0

    def send(self, message: bytes) -> None:
        self.num_sent += 1
        if self.num_sent > 1:
            raise RuntimeError("no way back")

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        pass

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        pass


async def test_a_relay_that_fails_is_counted_and_no_access_log_breaks_off_for_it() -> None:
    replica = Replica("aa", {"static": [], "key_file": None})
    [method] = replica.peering.methods()
    session = method.open(DeadCall(), {})
    hello = peers_pb2.PeerMessage(hello=peers_pb2.Hello(router_id="bb"))
    session.receive(hello.SerializeToString())
    replica.pass_on("bb-7", b"for it")

    assert replica.observers.num_errors["relay"] == 1


async def test_an_entry_without_a_pick_goes_to_all_peers() -> None:
    """Its metadata was lost; whoever picked finds it by its request id."""
    async with two() as (near, far):
        near.pass_on("", b"whose?")
        await eventually(lambda: far.taken == [b"whose?"])


async def test_before_the_end_what_is_left_is_passed_on() -> None:
    async with two() as (near, far):
        for number in range(100):
            near.pass_on("bb-1", b"%d" % number)
        await near.peering.drain()

        assert len(far.taken) == 100


class Silent(Idle):
    """A peer that says who it is and then takes nothing."""

    def __init__(self, call: Call, metadata: Metadata) -> None:
        super().__init__(call, metadata)
        hello = peers_pb2.Hello(router_id="bb", believes_callers=True)
        call.send(peers_pb2.PeerMessage(hello=hello).SerializeToString())


async def test_the_end_does_not_wait_for_a_peer_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = await wire.serve([Method(METHOD, Silent)])
    near = Replica("aa", {"static": [server.address], "key_file": None})
    async with near.running():
        await eventually(lambda: near.sizes == [2])
        near.pass_on("bb-1", b"1")
        async with asyncio.timeout(PATIENCE_S):
            await near.peering.drain()
    await server.close()

    assert "have not accepted all" in caplog.text


async def test_a_router_without_peers_is_alone() -> None:
    alone = Replica("aa", None)
    await alone.peering.run()

    assert alone.peering.num_routers == 1
    assert alone.peering.methods() == ()


async def test_routers_are_counted_as_the_name_system_lists_them() -> None:
    async with DnsServer() as names:
        names.records["routers.test.", "A"] = ["127.0.0.1", ELSEWHERE]
        port = free_port()
        section = {
            "dns": "routers.test",
            "port": port,
            "interval_s": 0.1,
            "nameservers": [names.address],
        }
        replica = Replica("aa", section)
        server = await wire.serve(replica.peering.methods(), port=port)
        async with replica.running():
            await eventually(lambda: replica.peering.num_routers == 2)
            names.records["routers.test.", "A"] = ["127.0.0.1", ELSEWHERE, "192.0.2.2"]
            await eventually(lambda: replica.peering.num_routers == 3)
            names.records["routers.test.", "A"] = ["127.0.0.1"]
            await eventually(lambda: replica.peering.num_routers == 1)
        await server.close()

    assert replica.sizes == [2, 3, 1]


def test_by_name_the_port_must_be_known() -> None:
    with pytest.raises(ConfigError, match=r"peers\.port"):
        check_peers(configured({"dns": "routers"}, {"address": "unix:/tmp/router"}))


def test_by_name_the_port_is_our_own_if_none_is_given() -> None:
    assert peer_port(configured({"dns": "routers"}, {"address": "[::]:9002"})) == 9002
    assert peer_port(configured({"dns": "routers", "port": 7})) == 7


def test_each_link_uses_the_files_of_tls_as_they_are_then(tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    pki, later = Pki(tmp_path), Pki(tmp_path / "later")
    chain, key = pki.issue("routers")
    files = {"cert_file": chain, "key_file": key}
    config = configured({"static": [], "ca_file": pki.ca}, {"address": "127.0.0.1:0", "tls": files})

    def trusted() -> set[bytes]:
        context = link_tls(config)
        assert context is not None
        return set(context.get_ca_certs(binary_form=True))

    before = trusted()
    pki.ca.write_bytes(later.ca.read_bytes())
    for path, new in zip((chain, key), later.issue("routers"), strict=True):
        path.write_bytes(new.read_bytes())

    assert len(before) == len(trusted()) == 1
    assert trusted() != before
